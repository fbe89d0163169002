"""Reading a query's state from its storage alone: any retained version, or what changed between two.

After Spark's state data source. Nothing is written, locked or kept back: a reader looks at the manifests,
and makes its own copy of one partition after the other in a temporary directory, also while the query runs. Retention
does not know of readers, so a version may be removed before it has been read; that is an error that says so.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pyarrow as pa
from msgspec import Struct, structs

from backends.conf import StateStoreConf
from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import DamagedFileError, InvalidStateStoreArgument, MissingFileError, VersionNotFoundError
from backends.formats import manifest_chain as chains
from backends.formats.changelog import read_changelog
from backends.formats.manifest import Lineage, Manifest, OperatorEntry
from backends.formats.manifest_chain import Layout
from backends.partition.partition_state import PartitionState, open_partition
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.durable.manifests import ManifestLog
from coordinator_actor.durable.spark_commits import SparkCommits

STATE_DIRECTORY = "statestore"
LOOKS = 5
"""How often the manifests are looked at while retention removes some of those that are being read."""


@dataclass(frozen=True)
class StatePlace:
    """Where a query's state is: Spark's checkpoint location, and the directory that holds ``manifests/`` and the rest.

    ``options`` say how both are reached, as in ``StateStoreConf.storage_options``.
    """

    checkpoint_location: str
    state_location: str
    options: Mapping[str, str] = field(default_factory=dict, hash=False)


class Piece(Struct, frozen=True):
    """One partition to be read, in one layout: at the version of ``lineage``, or what changed behind ``since`` up to
    it.
    """

    partition: int
    directory: str
    backend: str
    lineage: Lineage
    since: int | None = None


@dataclass(frozen=True)
class Reading:
    """What is to be read of one operator. ``schema`` is that of ``version``, and reads older rows as well."""

    place: StatePlace
    operator: str
    version: int
    schema: OperatorSchema
    pieces: tuple[Piece, ...]


class ChangedPairs(NamedTuple):
    """Pairs of one column family that a version has written; null: there was none before, or there is none any more."""

    keys: pa.BinaryArray
    before: pa.BinaryArray
    after: pa.BinaryArray


def find_state(
    checkpoint_location: str,
    state_location: str | None = None,
    options: Mapping[str, str] | None = None,
    *,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> StatePlace:
    """Where the state of the query with that checkpoint location is.

    ``state_location`` is the base directory of ``spark.statestore.location``, where each query has a directory named by
    its id; without state there, that beside Spark's own files is taken. Raises ``MissingFileError`` if there is none at
    all.
    """
    given = dict(options or {})
    checkpoint = open_storage(checkpoint_location, given)
    places = [f"{checkpoint.location.rstrip('/')}/{STATE_DIRECTORY}"]
    if state_location:
        places.insert(0, f"{state_location.rstrip('/')}/{_query_id(checkpoint)}")
    for place in places:
        storage = open_storage(place, given)
        if storage.exists("query.json"):
            return StatePlace(checkpoint.location, storage.location, given)
    raise MissingFileError(
        f"No state of a query is kept at {' or '.join(places)}: there is no query.json. Give the checkpoint location "
        "of a query "
        "with operators of the state store, and state_location= if spark.statestore.location was set when it ran."
    )


def _query_id(checkpoint: CheckpointStorage) -> str:
    name = checkpoint.full_location("metadata")
    try:
        content = json.loads(checkpoint.get("metadata"))
    except MissingFileError as error:
        raise MissingFileError(
            f"{name} does not exist: {checkpoint.location} is no checkpoint location of a query that has started."
        ) from error
    except ValueError as error:
        raise DamagedFileError(f"{name} is damaged: {error}") from error
    match content:
        case {"id": str(query_id)}:
            return query_id
    raise DamagedFileError(f"{name} is damaged: it has no query id.")


@dataclass(frozen=True)
class StateVersions:
    """The versions of a query's state, as its storage showed them at one moment.

    ``chain`` has a manifest per version, ``completed`` is the version behind the last batch that Spark has committed.
    """

    place: StatePlace
    log: ManifestLog
    chain: Mapping[int, Manifest]
    completed: int
    key_groups: int

    @classmethod
    def look(cls, place: StatePlace, *, open_storage: OpenStorage = CheckpointStorage.open) -> StateVersions:
        """Read the manifests. Raises ``MissingFileError``, ``DamagedFileError``."""
        storage = open_storage(place.state_location, place.options)
        log = ManifestLog(storage, "reader")
        commits = SparkCommits(open_storage(place.checkpoint_location, place.options))
        file = log.query_file()
        if file is None:
            raise MissingFileError(f"{storage.full_location('query.json')} does not exist: there is no state.")
        attempt = 0
        while True:
            attempt += 1
            # Before the manifests: what Spark has committed has a manifest.
            completed = commits.next_batch()
            log.refresh()
            try:
                found = cls(place, log, log.chain(), completed, file.key_groups)
            except MissingFileError:
                # Removed since it was listed; the manifest for whose sake that was done is there by now.
                if attempt == LOOKS:
                    raise
                continue
            # If not even the last completed version is kept, later ones have been completed meanwhile.
            if found.readable or completed == 0 or attempt == LOOKS:
                return found

    @property
    def readable(self) -> range:
        """The versions that can be read; the empty version 0 is one as long as nothing has been removed."""
        if not self.chain:
            return range(0)
        newest = max(self.chain)
        lowest = min(self.chain)
        oldest = self.chain[newest].oldest or (0 if lowest <= 1 else lowest)
        return range(oldest, min(newest, self.completed) + 1)

    def resolve(self, version: int | None) -> int:
        """The version asked for, None for the last completed one; raises ``VersionNotFoundError`` naming those that
        are there.
        """
        there = self.readable
        if version is None:
            if not there or (self.completed not in there):
                raise VersionNotFoundError(
                    f"Spark's commits at {self.place.checkpoint_location} say that version {self.completed} is the "
                    "last completed "
                    f"one, but at {self.place.state_location} {self._there()}. Name one of them with version=, or "
                    "start the query: "
                    "it recovers what it can, or says what is missing."
                )
            return there[-1]
        if isinstance(version, bool) or not isinstance(version, int):
            raise InvalidStateStoreArgument(f"version={version!r} must be an int, the number of a state version.")
        if version not in there:
            raise VersionNotFoundError(
                f"Version {version} of the state at {self.place.state_location} cannot be read: {self._there()}. "
                "Version N+1 is the state behind batch N."
            )
        return version

    def _there(self) -> str:
        there = self.readable
        if not there and self.chain and self.completed:
            return f"the versions from {self.chain[max(self.chain)].oldest} to {max(self.chain)} are kept"
        if not there:
            return "there is no completed version"
        return f"there are the versions {there[0]} to {there[-1]}" if len(there) > 1 else f"there is version {there[0]}"

    def operators(self, version: int) -> Mapping[str, OperatorEntry]:
        """The operators at a readable version. The empty version 0 is taken to have those of the first one."""
        return self.chain[version if version in self.chain else min(self.chain)].operators

    def entry(self, operator: str, version: int) -> OperatorEntry:
        """An operator at a readable version; raises ``InvalidStateStoreArgument`` naming those that there are."""
        operators = self.operators(version)
        if operator not in operators:
            raise InvalidStateStoreArgument(
                f"There is no operator {operator!r} in version {version} of the state at {self.place.state_location}; "
                "there "
                f"are {', '.join(map(repr, sorted(operators)))}."
            )
        return operators[operator]

    def schema(self, entry: OperatorEntry) -> OperatorSchema:
        """The schema that an operator has there."""
        return OperatorSchema.from_json(self.log.schema(entry.schema_id))

    def reading(self, operator: str, version: int | None = None) -> Reading:
        """How to read an operator at a version, None for the last completed one.

        Raises ``VersionNotFoundError``, ``InvalidStateStoreArgument``.
        """
        at = self.resolve(version)
        entry = self.entry(operator, at)
        return Reading(self.place, operator, at, self.schema(entry), tuple(self._pieces(operator, entry, at)))

    def reading_of_changes(self, operator: str, from_version: int, to_version: int | None = None) -> Reading:
        """How to read what batches ``from_version`` to ``to_version - 1`` have changed, those that lead from one to the
        other.

        A piece per partition of every layout that the operator had. Raises as ``reading`` does.
        """
        start, end = self.resolve(from_version), self.resolve(to_version)
        if start > end:
            raise InvalidStateStoreArgument(f"from_version={start} is above to_version={end}.")
        entry = self.entry(operator, end)
        pieces: list[Piece] = []
        for segment in reversed(chains.segments(self.chain, operator, end)):
            if segment.last > start:
                held = self.chain[segment.last].operators[operator]
                since = max(start, segment.first - 1)
                pieces += (structs.replace(p, since=since) for p in self._pieces(operator, held, segment.last))
        return Reading(self.place, operator, end, self.schema(entry), tuple(pieces))

    def _pieces(self, operator: str, entry: OperatorEntry, version: int) -> Iterator[Piece]:
        layout: Layout = chains.layout_of(operator, entry)
        for p in range(layout.num_partitions):
            lineage = chains.lineage(self.chain, version, layout, p, self.key_groups)
            yield Piece(p, layout.directory(p), layout.backend, lineage)


@contextmanager
def opened(
    place: StatePlace, piece: Piece, version: int | None = None, *, open_storage: OpenStorage = CheckpointStorage.open
) -> Iterator[PartitionState]:
    """A copy of a partition at a version of its lineage, None for the last one, in a temporary directory.

    Raises ``VersionNotFoundError`` if the version has been removed since it was planned to read it, else what
    ``PartitionState.load`` raises.
    """
    storage = open_storage(place.state_location, place.options)
    conf = StateStoreConf(
        provider=piece.backend,
        storage_options=dict(place.options),
        track_total_number_of_rows=False,
        max_versions_in_memory=0,
    )
    with TemporaryDirectory(prefix="statestore-read-") as scratch:
        state = open_partition(Path(scratch) / "state", storage, piece.directory, conf)
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
    """Bring a copy of a partition to a version of its lineage; raises as ``opened`` does."""
    whole = piece.lineage
    lineage = Lineage(
        version,
        tuple(ref for ref in whole.changelogs if ref.version <= version),
        tuple(ref for ref in whole.snapshots if ref.version <= version),
        whole.rescaled,
    )
    with _explaining(place, version if piece.since is None else piece.since, open_storage):
        state.load(lineage)


@contextmanager
def _explaining(place: StatePlace, version: int, open_storage: OpenStorage) -> Iterator[None]:
    """If a file is missing because its version is no longer kept, say that."""
    try:
        yield
    except MissingFileError as error:
        there = StateVersions.look(place, open_storage=open_storage).readable
        if version in there:
            raise
        kept = f"versions {there[0]} to {there[-1]} are kept" if there else "none is kept"
        raise VersionNotFoundError(
            f"Version {version} of the state at {place.state_location} was removed while it was read: now {kept}. Read "
            "a later "
            "one, or let the query keep more versions (min_versions_to_retain)."
        ) from error


def changes(
    place: StatePlace, piece: Piece, families: Collection[str], *, open_storage: OpenStorage = CheckpointStorage.open
) -> Iterator[tuple[int, dict[str, ChangedPairs]]]:
    """What each version behind ``piece.since`` has written to some of the column families, ascending.

    One version is held in memory at a time. Raises as ``opened`` does.
    """
    since = piece.since if piece.since is not None else piece.lineage.version
    storage = open_storage(place.state_location, place.options)
    with opened(place, piece, since, open_storage=open_storage) as state:
        for ref in piece.lineage.changelogs:
            if ref.version <= since:
                continue
            with _explaining(place, since, open_storage):
                data = storage.read(ref.file)
            _, changed = read_changelog(data, storage.full_location(ref.file.path))
            found = {f: changed.families[f] for f in families if f in changed.families and len(changed.families[f])}
            if not found:
                continue
            load(place, state, piece, ref.version - 1, open_storage=open_storage)
            there = state.column_families()
            yield (
                ref.version,
                {
                    family: ChangedPairs(
                        pairs.keys,
                        state.get_many(pairs.keys, None, family)
                        if family in there
                        else pa.nulls(len(pairs), pa.binary()),
                        pairs.values,
                    )
                    for family, pairs in found.items()
                },
            )


def scan(state: PartitionState, family: str) -> Iterator[pa.RecordBatch]:
    """All pairs of a column family in the order of their keys, in batches; none if the partition has no such family."""
    return state.scan(None, None, None, family) if family in state.column_families() else iter(())
