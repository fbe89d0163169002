"""Reads copies of a query's partitions from storage: all pairs at a version, or the pairs that versions have written.

After Spark's state data source. Nothing is written, locked or kept back: a reader makes its own copy of one partition
after the other in a temporary directory, also while the query runs. Retention does not know of readers. So a version
may be removed before it is read; the error then says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pyarrow as pa
from msgspec import structs

from backends.conf import StateStoreConf
from backends.exceptions import MissingFileError, VersionNotFoundError
from backends.formats import manifest_chain as chains
from backends.formats.changelog import read_changelog
from backends.formats.manifest import Lineage
from backends.formats.manifest_chain import Layout
from backends.partition.partition_state import PartitionState, open_partition
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from backends.storage.file_ref import FileRef
from coordinator_actor.reading.stored_versions import Piece, StatePlace, StateVersions


class ChangedPairs(NamedTuple):
    """Pairs of one column family that a version has written.

    A null ``before`` means that there was no value before, a null ``after`` that there is none any more.
    """

    keys: pa.BinaryArray
    before: pa.BinaryArray
    after: pa.BinaryArray


@contextmanager
def opened_partition(
    place: StatePlace, piece: Piece, version: int | None = None, *, open_storage: OpenStorage = CheckpointStorage.open
) -> Iterator[PartitionState]:
    """Give a copy of a partition at a version of its lineage (None: the last one), in a temporary directory.

    Raises ``VersionNotFoundError`` if the version was removed after the read was planned, else the errors of
    ``PartitionState.load``.
    """
    storage = open_storage(place.state_location, place.options)
    conf = StateStoreConf(
        provider=piece.backend,
        storage_options=dict(place.options),
        track_total_number_of_rows=False,
        max_versions_in_memory=0,
    )
    with TemporaryDirectory(prefix="statestore-read-") as scratch:
        state = open_partition(Path(scratch) / "state", storage, piece.directory, conf, is_copy=True)
        try:
            load(place, state, piece, piece.lineage.version if version is None else version, open_storage=open_storage)
            yield state
        finally:
            state.close()


def load(
    place: StatePlace,
    state: PartitionState,
    piece: Piece,
    version: int,
    *,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> None:
    """Bring a copy of a partition to a version of its lineage. Raises the errors of ``opened_partition``."""
    try:
        state.load(_up_to(piece.lineage, version))
    except MissingFileError as error:
        state.load(_up_to(_lineage_now(place, piece, error, open_storage), version))


def _up_to(lineage: Lineage, version: int) -> Lineage:
    return Lineage(
        version,
        tuple(ref for ref in lineage.changelogs if ref.version <= version),
        tuple(ref for ref in lineage.snapshots if ref.version <= version),
        lineage.rescaled,
    )


def _lineage_now(place: StatePlace, piece: Piece, error: MissingFileError, open_storage: OpenStorage) -> Lineage:
    """Return the files that make the versions of a piece now. An exchange of files may have replaced the planned ones.

    Raises ``VersionNotFoundError`` if a version is no longer kept, and ``error`` if the files are the same.
    """
    version = piece.lineage.version
    oldest = version if piece.since is None else piece.since
    versions = StateVersions.look(place, open_storage=open_storage)
    there = versions.readable
    if oldest not in there or version not in there:
        kept = f"versions {there[0]} to {there[-1]} are kept" if there else "none is kept"
        raise VersionNotFoundError(
            f"Version {oldest} of the state at {place.state_location} was removed while it was read: now {kept}. Read "
            "a later one, or let the query keep more versions (min_versions_to_retain)."
        ) from error
    _, operator, num_partitions, *_ = piece.directory.split("/")
    layout = Layout(operator, int(num_partitions), piece.backend)
    lineage = chains.lineage(versions.chain, version, layout, piece.partition, versions.key_groups)
    if lineage == piece.lineage:
        raise error
    return lineage


def changes(
    place: StatePlace, piece: Piece, families: Collection[str], *, open_storage: OpenStorage = CheckpointStorage.open
) -> Iterator[tuple[int, dict[str, ChangedPairs]]]:
    """Yield what each version after ``piece.since`` has written to some of the column families, by ascending version.

    One version is held in memory at a time. Raises the errors of ``opened_partition``.
    """
    since = piece.since if piece.since is not None else piece.lineage.version
    storage = open_storage(place.state_location, place.options)
    with opened_partition(place, piece, since, open_storage=open_storage) as state:
        for version in (ref.version for ref in piece.lineage.changelogs if ref.version > since):
            try:
                data = storage.read(_changelog(piece.lineage, version))
            except MissingFileError as error:
                piece = structs.replace(piece, lineage=_lineage_now(place, piece, error, open_storage))
                data = storage.read(_changelog(piece.lineage, version))
            _, changed = read_changelog(data, storage.full_location(_changelog(piece.lineage, version).path))
            found = {f: changed.families[f] for f in families if f in changed.families and len(changed.families[f])}
            if not found:
                continue
            load(place, state, piece, version - 1, open_storage=open_storage)
            there = state.reads.column_families()
            yield (
                version,
                {
                    family: ChangedPairs(
                        pairs.keys,
                        state.reads.get_many(pairs.keys, None, family)
                        if family in there
                        else pa.nulls(len(pairs), pa.binary()),
                        pairs.values,
                    )
                    for family, pairs in found.items()
                },
            )


def _changelog(lineage: Lineage, version: int) -> FileRef:
    return next(ref.file for ref in lineage.changelogs if ref.version == version)


def scan_family(state: PartitionState, family: str) -> Iterator[pa.RecordBatch]:
    """Yield all pairs of a column family in the order of keys, in batches; none if the partition has no such family."""
    reads = state.reads
    return reads.scan(None, None, None, family) if family in reads.column_families() else iter(())
