"""Lists every file of a query's state with its kind, and with the version or savepoint that keeps the file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pyarrow as pa
from msgspec import structs

from backends.conf import StateStoreConf
from backends.exceptions import DamagedFileError, MissingFileError, VersionNotFoundError
from backends.formats import manifest_chain as chains
from backends.formats import snapshot
from backends.formats.changelog import GROUPS_DIRECTORY, read_changelog
from backends.formats.manifest import Lineage, SnapshotDescriptor, SnapshotRef, version_in
from backends.formats.manifest_chain import Layout
from backends.partition.partition_state import PartitionState, open_partition
from backends.storage.checkpoint_storage import CREATE_PROBE, CheckpointStorage, OpenStorage
from backends.storage.locations import FileRef
from coordinator_actor.durable.fencing import EPOCHS, FENCE, MANIFESTS
from coordinator_actor.durable.manifests import FOLDS, QUERY_FILE, REWRITTEN, manifest_path, schema_path
from coordinator_actor.durable.records import AUDIT, FEATURE_VIEWS, HISTORY
from coordinator_actor.reading.stored_versions import Piece, StatePlace, StateVersions

SNAPSHOT_READ_THREADS = 16

_RECORDS = {
    EPOCHS: ("epoch", "it says which run has the state; only the last ones stay"),
    "checkpoints": ("place", "it says where the checkpoint is"),
    "savepoint-ids": ("savepoint id", "its number is not reused"),
    FOLDS: ("fold", "it has copies of manifests, so that few requests read them"),
    REWRITTEN: ("exchange of files", "it maps files that manifests name to their replacements"),
    AUDIT: ("audit record", "it records manual changes; it is never removed"),
    HISTORY: ("history", "it is for people; a newer one replaces it"),
    FEATURE_VIEWS: ("feature views", "it declares feature views; a newer one replaces it"),
    "standalone": ("standalone store", "a provider that is used alone, with separate manifests"),
}
UNKNOWN = "not known: a damaged manifest may name it"
"""What keeps a file that no manifest names, if one of them cannot be read."""
_SINGLE = {QUERY_FILE: "it says whose state this is", CREATE_PROBE: "it shows that the store overwrites nothing"}
_KINDS = {"changelog": "changelog", "snapshot": "snapshot", "sst": "snapshot file", "part": "snapshot file"}


@dataclass(frozen=True)
class StoredFile:
    """One file below the state location. ``kept_by`` says what needs it; nothing if retention may remove it.

    ``why`` explains the fate of a file that nothing keeps.
    """

    path: str
    size: int
    kind: str
    operator: str | None = None
    partition: int | None = None
    version: int | None = None
    kept_by: tuple[str, ...] = ()
    why: str = ""


class NamedSnapshot(NamedTuple):
    """A snapshot that a manifest names. ``descriptor`` is None if it is missing or damaged."""

    layout: Layout
    partition: int
    ref: SnapshotRef
    descriptor: SnapshotDescriptor | None


class LoadedFiles(NamedTuple):
    """The files that loads of the readable versions need.

    Each version above ``oldest`` needs its own changelogs. A load of the oldest version also applies earlier ones:
    ``changelogs`` maps them to their objects. ``snapshots`` has the first snapshot of each such load and all later
    ones, by the path of the descriptor.
    """

    oldest: int
    changelogs: Mapping[str, str]
    snapshots: Mapping[str, NamedSnapshot]

    def needs(self, version: int, changelog: str) -> bool:
        """Return whether a readable version is loaded from the changelog of ``version`` with that name."""
        return version > self.oldest or changelog in self.changelogs


class SnapshotReader:
    """Reads the descriptors of snapshots, each once, and finds out which snapshots are whole.

    ``sizes`` are those of a listing that was made after the manifests were read.
    """

    def __init__(self, storage: CheckpointStorage, sizes: Mapping[str, int]) -> None:
        self._storage = storage
        self._sizes = sizes
        self._descriptors: dict[str, SnapshotDescriptor | None] = {}

    def read(self, refs: Iterable[SnapshotRef]) -> None:
        """Read the descriptors that are not known yet, ``SNAPSHOT_READ_THREADS`` at once. Raises ``StorageError``."""
        new = [ref for ref in refs if ref.file.path not in self._descriptors]
        if not new:
            return

        def read(ref: SnapshotRef) -> SnapshotDescriptor | None:
            try:
                return snapshot.read_descriptor(self._storage, ref) if ref.file.is_in(self._sizes) else None
            except (DamagedFileError, MissingFileError):
                return None  # 'verify' names the damage

        with ThreadPoolExecutor(SNAPSHOT_READ_THREADS, thread_name_prefix="statestore-files") as pool:
            for ref, descriptor in zip(new, pool.map(read, new), strict=True):
                self._descriptors[ref.file.path] = descriptor

    def descriptor(self, ref: SnapshotRef) -> SnapshotDescriptor | None:
        """Return the descriptor of a snapshot that was read; None if it is missing or damaged."""
        return self._descriptors[ref.file.path]

    def is_whole(self, ref: SnapshotRef) -> bool:
        """Return whether a snapshot that was read can be loaded."""
        descriptor = self._descriptors[ref.file.path]
        return descriptor is not None and descriptor.is_complete(self._sizes)


def loaded_files(versions: StateVersions, reader: SnapshotReader) -> LoadedFiles:
    """Return what the readable versions are loaded from.

    No load begins at a damaged snapshot: it begins at an older one.

    Retention follows the same rule. Grows with the partitions and their snapshots. Raises ``StorageError``.
    """
    oldest = versions.oldest
    named = {
        ref.file.path: (segment.layout, partition, ref)
        for operator in {name for manifest in versions.chain.values() for name in manifest.operators}
        for segment in chains.segments(versions.chain, operator)
        for partition, refs in chains.snapshots(versions.chain, segment).items()
        for ref in refs
    }
    reader.read(ref for _, _, ref in named.values())
    changelogs: dict[str, str] = {}
    starts: set[str] = set()
    left = list(_lineages_at(versions, oldest))
    while left:
        lineage = left.pop()
        start = next((ref for ref in reversed(lineage.snapshots) if reader.is_whole(ref)), None)
        applied = [ref for ref in lineage.changelogs if start is None or ref.version > start.version]
        changelogs.update((ref.file.path, ref.file.stored_in) for ref in applied)
        if start is not None:
            starts.add(start.file.path)
        elif lineage.rescaled is not None:
            left += [source.lineage for source in lineage.rescaled.sources]
    return LoadedFiles(
        oldest,
        changelogs,
        {
            path: NamedSnapshot(layout, partition, ref, reader.descriptor(ref))
            for path, (layout, partition, ref) in named.items()
            if path in starts or ref.version > oldest
        },
    )


def _lineages_at(versions: StateVersions, version: int) -> Iterator[Lineage]:
    if version in versions.readable:
        for operator in versions.operators(version):
            for piece in versions.reading(operator, version).pieces:
                yield piece.lineage


def stored_files(
    versions: StateVersions, version: int | None = None, *, open_storage: OpenStorage = CheckpointStorage.open
) -> list[StoredFile]:
    """Return all files of a query's state, by path; with ``version`` only those that this version can be loaded from.

    Reads the manifests and the descriptors of snapshots, and lists the rest. Raises ``VersionNotFoundError``.
    """
    storage = open_storage(versions.place.state_location, versions.place.options)
    wanted = None if version is None else versions.resolve(version)
    listed = dict(storage.list())
    listed.update(dict.fromkeys(storage.unfinished("operators"), 0))
    reader = SnapshotReader(storage, listed)
    kept: dict[str, list[str]] = {}
    _keep_manifests(versions, kept)
    _keep_loaded(versions, loaded_files(versions, reader), kept)
    chosen = None if wanted is None else _of_version(reader, versions, wanted)
    return [
        _described(path, size, kept.get(path, ()), versions)
        for path, size in sorted(listed.items())
        if chosen is None or path in chosen
    ]


def _keep_manifests(versions: StateVersions, kept: dict[str, list[str]]) -> None:
    schemas: dict[str, list[int]] = {}
    for version, manifest in versions.chain.items():
        kept.setdefault(manifest_path(manifest), []).append(f"version {version}")
        for entry in manifest.operators.values():
            schemas.setdefault(schema_path(entry.schema_id), []).append(version)
    for path, of in schemas.items():
        kept.setdefault(path, []).append(f"versions {min(of)} to {max(of)}")


def _keep_loaded(versions: StateVersions, loaded: LoadedFiles, kept: dict[str, list[str]]) -> None:
    for version, manifest in versions.chain.items():
        for entry in manifest.operators.values() if version > loaded.oldest else ():
            for partition in entry.partitions:
                # A group is kept as long as one of its parts is.
                kept.setdefault(entry.partitions.stored_in(partition), []).append(f"version {version}")
    for stored_in in loaded.changelogs.values():
        kept.setdefault(stored_in, []).append(f"version {loaded.oldest}, the oldest one")
    for named in loaded.snapshots.values():
        _keep_snapshot(named.ref, named.descriptor, kept)


def _keep_snapshot(ref: SnapshotRef, descriptor: SnapshotDescriptor | None, kept: dict[str, list[str]]) -> None:
    for path in {ref.file.stored_in, *(descriptor.paths if descriptor is not None else ())}:
        kept.setdefault(path, []).append(f"snapshot of version {ref.version}")


def _of_version(reader: SnapshotReader, versions: StateVersions, version: int) -> set[str]:
    """Return the paths of the files that a version can be loaded from, and of its manifests and schemas."""
    paths: set[str] = set()
    refs: list[SnapshotRef] = []
    for operator, entry in versions.operators(version).items():
        paths.add(schema_path(entry.schema_id))
        left = [piece.lineage for piece in versions.reading(operator, version).pieces]
        while left:
            lineage = left.pop()
            base = versions.base(lineage)
            paths.update(ref.file.stored_in for ref in lineage.changelogs if ref.version > base)
            refs += [ref for ref in lineage.snapshots if ref.version >= base]
            if lineage.rescaled is not None and base < 0:
                left += [source.lineage for source in lineage.rescaled.sources]
    reader.read(refs)
    of_snapshots: dict[str, list[str]] = {}
    for ref in refs:
        _keep_snapshot(ref, reader.descriptor(ref), of_snapshots)
    manifests = {manifest_path(m) for v, m in versions.chain.items() if v <= version}
    return {QUERY_FILE, *paths, *of_snapshots, *manifests}


def _described(path: str, size: int, kept: Iterable[str], versions: StateVersions) -> StoredFile:
    top = path.partition("/")[0]
    kept_by = tuple(dict.fromkeys(kept))
    if not kept_by and versions.damages and top in (GROUPS_DIRECTORY, "operators", "schemas", MANIFESTS):
        kept_by = ("it is damaged: 'statestore verify' says how" if path in versions.damages else UNKNOWN,)
    version, why = None, ""
    if top == "operators":
        return _of_partition(path, size, kept_by, versions)
    if top == GROUPS_DIRECTORY:
        version = version_in(path)
        kind, why = "snapshots" if path.endswith(".snapshots") else "changelogs", _why_not(version, versions)
    elif top == MANIFESTS and size == len(FENCE):
        kind, kept_by = "fence", ("it keeps an earlier coordinator from writing; it stays",)
    elif top == MANIFESTS:
        kind, why = "manifest", "a later manifest replaces it; retention removes it"
    elif top == "schemas":
        kind, why = "schema", "rows of versions that are gone; it is never removed"
    elif path in _SINGLE:
        kind, kept_by = "record", (_SINGLE[path],)
    elif top in _RECORDS:
        kind, kept_by = _RECORDS[top][0], _RECORDS[top][1:]
    else:
        kind, why = "unknown", "the state has no such file; nothing reads or removes it"
    return StoredFile(path, size, kind, version=version, kept_by=kept_by, why="" if kept_by else why)


def _of_partition(path: str, size: int, kept_by: tuple[str, ...], versions: StateVersions) -> StoredFile:
    parts = path.split("/")
    operator = parts[1] if len(parts) > 2 else None
    partition = int(parts[3]) if len(parts) > 4 and parts[3].isdecimal() else None
    suffix = path.rpartition(".")[2]
    kind = _KINDS.get(suffix, "unfinished" if "#" in path else "unknown")
    version = version_in(path)
    why = "" if kept_by else _why_not(version, versions)
    return StoredFile(path, size, kind, operator, partition, version if version >= 0 else None, kept_by, why)


def _why_not(version: int, versions: StateVersions) -> str:
    if version < 0:
        return "the state has no files with such names; nothing reads or removes it"
    if version <= versions.oldest:
        return "no version needs it any more; retention removes it"
    if version > versions.completed:
        return "of a batch that is under way, or was given up; it goes when its version is no longer kept"
    return "no manifest names it: an attempt that did not count, or a snapshot to be named; it goes with its version"


# Reads copies of a query's partitions from storage: all pairs at a version, or the pairs that versions have written.
#
# After Spark's state data source. Nothing is written, locked or retained: a reader makes its own copy of one partition
# after the other in a temporary directory, even while the query runs. Retention does not know of readers. So a version
# may be removed before it is read; the error then says so.


class ChangedPairs(NamedTuple):
    """Pairs of one column family that a version has written.

    A null ``before`` means that the key is new, a null ``after`` that it was removed.
    """

    keys: pa.BinaryArray
    before: pa.BinaryArray
    after: pa.BinaryArray


@contextmanager
def opened_partition(
    place: StatePlace, piece: Piece, version: int | None = None, *, open_storage: OpenStorage = CheckpointStorage.open
) -> Iterator[PartitionState]:
    """Yield a copy of a partition at a version of its lineage (None: the last one), in a temporary directory.

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
    readable = versions.readable
    if oldest not in readable or version not in readable:
        kept = f"versions {readable[0]} to {readable[-1]} are kept" if readable else "none is kept"
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
            changed_families = {
                f: changed.families[f] for f in families if f in changed.families and len(changed.families[f])
            }
            if not changed_families:
                continue
            load(place, state, piece, version - 1, open_storage=open_storage)
            families_now = state.reads.column_families()
            yield (
                version,
                {
                    family: ChangedPairs(
                        pairs.keys,
                        state.reads.get_many(pairs.keys, None, family)
                        if family in families_now
                        else pa.nulls(len(pairs), pa.binary()),
                        pairs.values,
                    )
                    for family, pairs in changed_families.items()
                },
            )


def _changelog(lineage: Lineage, version: int) -> FileRef:
    return next(ref.file for ref in lineage.changelogs if ref.version == version)


def scan_family(state: PartitionState, family: str) -> Iterator[pa.RecordBatch]:
    """Yield all pairs of a column family in the order of keys, in batches; none if the partition has no such family."""
    reads = state.reads
    return reads.scan(None, None, None, family) if family in reads.column_families() else iter(())
