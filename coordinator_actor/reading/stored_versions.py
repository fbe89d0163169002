"""Finds out which versions of a query's state can be read, and which files each of them needs.

A reader looks at the manifests, even while the query runs. It writes and locks nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from msgspec import Struct, structs

from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import DamagedFileError, InvalidStateStoreArgument, MissingFileError, VersionNotFoundError
from backends.formats import manifest_chain as chains
from backends.formats.manifest import Lineage, Manifest, OperatorEntry
from backends.formats.manifest_chain import Layout
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.durable.fencing import RecordFiles
from coordinator_actor.durable.manifests import ManifestLog
from coordinator_actor.durable.records import CheckpointRecords
from coordinator_actor.durable.spark_commits import SparkCommits, query_id_of

STATE_DIRECTORY = "statestore"
LOOKS = 5
"""How often the manifests are read again if retention removes some of them during the read."""


@dataclass(frozen=True)
class StatePlace:
    """The place of a query's state: Spark's checkpoint location, and the directory with ``manifests/`` and the rest.

    ``options`` are the storage options of both, as in ``StateStoreConf.storage_options``.
    """

    checkpoint_location: str
    state_location: str
    options: Mapping[str, str] = field(default_factory=dict, hash=False)


class Piece(Struct, frozen=True):
    """One partition to be read, in one layout.

    It is read at the version of ``lineage``; with ``since``, the changes after that version up to it are read.
    """

    partition: int
    directory: str
    backend: str
    lineage: Lineage
    since: int | None = None


@dataclass(frozen=True)
class Reading:
    """The state of one operator that is to be read. ``schema`` is that of ``version``, and reads older rows as well.

    There are ``key_groups`` in all; ``num_partitions`` is the layout of ``version``.
    """

    place: StatePlace
    operator: str
    version: int
    schema: OperatorSchema
    pieces: tuple[Piece, ...]
    key_groups: int
    num_partitions: int


def find_state(
    checkpoint_location: str,
    state_location: str | None = None,
    options: Mapping[str, str] | None = None,
    *,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> StatePlace:
    """Return where the state of the query with that checkpoint location is.

    ``state_location`` is the base directory of ``spark.statestore.location``, where each query has a directory named by
    its id. If it has no state, the directory next to Spark's own files is used. Raises ``MissingFileError`` if neither
    has state.
    """
    storage_options = dict(options or {})
    checkpoint = open_storage(checkpoint_location, storage_options)
    places = [f"{checkpoint.location.rstrip('/')}/{STATE_DIRECTORY}"]
    if state_location:
        places.insert(0, f"{state_location.rstrip('/')}/{query_id_of(checkpoint)}")
    for place in places:
        storage = open_storage(place, storage_options)
        if storage.exists("query.json"):
            return StatePlace(checkpoint.location, storage.location, storage_options)
    raise MissingFileError(
        f"No state of a query is kept at {' or '.join(places)}: there is no query.json. Give the checkpoint location "
        "of a query with operators of the state store, and state_location= if spark.statestore.location was set when "
        "it ran."
    )


@dataclass(frozen=True)
class StateVersions:
    """The versions of a query's state, as its storage showed them at one moment.

    ``chain`` has a manifest per version. ``completed`` is the version after the last batch that Spark has committed.
    ``damages`` has, by path, the faults of manifests that were skipped: the chain may not have their versions. Then
    ``loadable`` has the versions that can still be loaded.
    """

    place: StatePlace
    log: ManifestLog
    chain: Mapping[int, Manifest]
    completed: int
    key_groups: int
    damages: Mapping[str, str] = field(default_factory=dict)
    loadable: tuple[int, ...] | None = None

    @classmethod
    def look(
        cls, place: StatePlace, *, passes_over_damage: bool = False, open_storage: OpenStorage = CheckpointStorage.open
    ) -> StateVersions:
        """Read the manifests. Raises ``MissingFileError``, ``DamagedFileError``.

        ``passes_over_damage`` is for callers that report damage to people (``damages``). Then only damage of the newest
        manifest is an error, because without it the valid ones among the others are unknown.
        """
        storage = open_storage(place.state_location, place.options)
        log = ManifestLog(storage, "reader")
        commits = SparkCommits(open_storage(place.checkpoint_location, place.options))
        file = log.query_file()
        if file is None:
            raise MissingFileError(f"{storage.full_location('query.json')} does not exist: there is no state.")
        attempt = 0
        while True:
            attempt += 1
            # Read the commits before the manifests: a committed batch has a manifest.
            completed = commits.next_batch()
            log.refresh(passes_over_damage=passes_over_damage)
            try:
                leaves_out = passes_over_damage and (bool(log.damages) or attempt == LOOKS)
                versions = cls(place, log, log.chain(leaves_out=leaves_out), completed, file.key_groups, log.damages)
            except MissingFileError:
                # A manifest was removed after it was listed. The newer manifest that has caused this exists by now.
                if attempt == LOOKS:
                    raise
                continue
            if log.has_gaps:
                versions = replace(versions, loadable=tuple(versions._loadable()))
            # If not even the last completed version is kept, then later versions were completed during the look.
            if versions.readable or completed == 0 or attempt == LOOKS:
                return versions

    @property
    def readable(self) -> Sequence[int]:
        """Return the versions that can be read. The empty version 0 is one until something is removed."""
        if self.loadable is not None:
            return self.loadable
        if not self.chain:
            return range(0)
        newest = max(self.chain)
        lowest = min(self.chain)
        oldest = self.chain[newest].oldest or (0 if lowest <= 1 else lowest)
        return range(oldest, min(newest, self.completed) + 1)

    def _loadable(self) -> Iterator[int]:
        """Yield the completed versions that can be loaded from the files that a chain with gaps names."""
        head = self.chain[max(self.chain)] if self.chain else None
        for first, last in spans(sorted(self.chain)) if head is not None else ():
            assert head is not None
            is_from_begin = first <= head.chain_from
            start = (head.oldest or (0 if first <= 1 else first)) if is_from_begin else self._loadable_from(first, last)
            yield from range(max(start, head.oldest), min(last, self.completed) + 1)

    def _loadable_from(self, first: int, last: int) -> int:
        """Return the first version of a part of the chain that has loadable snapshots in all its partitions.

        The result is above the last version if there is none.
        """
        starts = [
            _first_start(chains.lineage(self.chain, last, chains.layout_of(name, entry), p, self.key_groups), first)
            for name, entry in self.chain[last].operators.items()
            for p in range(entry.num_partitions)
        ]
        return max((last + 1 if start is None else start for start in starts), default=first)

    def newest_completed(self) -> int:
        """Return the last completed version, whether it can be loaded or not. Raises ``VersionNotFoundError``."""
        return self.completed if self.completed in self.chain else self.resolve(None)

    @property
    def oldest(self) -> int:
        """Return the oldest version that the newest manifest keeps: retention removes what only older ones need."""
        return self.chain[max(self.chain)].oldest if self.chain else 0

    def base(self, lineage: Lineage) -> int:
        """Return the version of the snapshot that a partition is kept from; -1 if it is kept from its beginning.

        Changelogs that lead to that snapshot, and older snapshots and layouts, are removed, or will be.
        """
        return max((ref.version for ref in lineage.snapshots if ref.version <= self.oldest), default=-1)

    def resolve(self, version: int | None) -> int:
        """Return the requested version; None requests the last completed one.

        Raises ``VersionNotFoundError`` with the versions that exist, and ``DamagedFileError`` if the last completed one
        cannot be read because of a manifest that was skipped.
        """
        readable = self.readable
        if version is None:
            if self.loadable is not None and self.completed not in readable:
                raise DamagedFileError(
                    f"Version {self.completed} of the state at {self.place.state_location}, the last completed one, "
                    f"cannot be read: {self._available()}."
                )
            if not readable and self.completed == 0:
                raise VersionNotFoundError(
                    f"No batch of {self.place.checkpoint_location} is committed yet, so the state at "
                    f"{self.place.state_location} has no completed version. Start the query, and wait for its "
                    "first batch."
                )
            if self.completed not in readable:
                other = "Name one of them with version=, or start the query" if readable else "Start the query"
                raise VersionNotFoundError(
                    f"Spark's commits at {self.place.checkpoint_location} say that the last completed version is "
                    f"{self.completed}, but at {self.place.state_location} {self._available()}. {other}: it recovers "
                    "what it can, or says what is missing."
                )
            return readable[-1]
        if isinstance(version, bool) or not isinstance(version, int):
            raise InvalidStateStoreArgument(f"version={version!r} must be an int, the number of a state version.")
        if version not in readable:
            raise VersionNotFoundError(
                f"Version {version} of the state at {self.place.state_location} cannot be read: {self._available()}. "
                "Version N+1 is the state after batch N."
            )
        return version

    def _available(self) -> str:
        return ". ".join((self._kept(), *(what.rstrip(".") for what in self.damages.values())))

    def _kept(self) -> str:
        readable = self.readable
        if not readable and self.loadable is not None:
            return "no version can, since manifests are missing"
        if not readable and self.chain and self.completed:
            return f"the versions from {self.chain[max(self.chain)].oldest} to {max(self.chain)} are kept"
        if not readable:
            return "no version is completed"
        return f"there are the versions {named(readable)}" if len(readable) > 1 else f"there is version {readable[0]}"

    def operators(self, version: int) -> Mapping[str, OperatorEntry]:
        """Return the operators at a readable version. The empty version 0 counts as having those of the first one."""
        return self.chain[version if version in self.chain else min(self.chain)].operators

    def entry(self, operator: str, version: int) -> OperatorEntry:
        """Return an operator at a readable version. Raises ``InvalidStateStoreArgument`` with those that exist."""
        operators = self.operators(version)
        if operator not in operators:
            raise InvalidStateStoreArgument(
                f"Operator {operator!r} does not exist in version {version} of the state at "
                f"{self.place.state_location}; there are {', '.join(map(repr, sorted(operators)))}."
            )
        return operators[operator]

    def schema(self, entry: OperatorEntry) -> OperatorSchema:
        return OperatorSchema.from_json(self.log.schema(entry.schema_id))

    def reading(self, operator: str, version: int | None = None) -> Reading:
        """Return how to read an operator at a version (None: the last completed one).

        Raises ``VersionNotFoundError``, ``InvalidStateStoreArgument``.
        """
        at = self.resolve(version)
        entry = self.entry(operator, at)
        pieces = tuple(self.pieces(operator, entry, at))
        return Reading(self.place, operator, at, self.schema(entry), pieces, self.key_groups, entry.num_partitions)

    def reading_of_changes(self, operator: str, from_version: int, to_version: int | None = None) -> Reading:
        """Return how to read all changes from one version to another: by batches ``from_version`` to ``to_version -
        1``.

        There is a piece per partition of every layout that the operator had. Raises the errors of ``reading``.
        """
        start, end = self.resolve(from_version), self.resolve(to_version)
        if start > end:
            raise InvalidStateStoreArgument(f"from_version={start} is above to_version={end}.")
        missing = [v for v in range(start + 1, end + 1) if v not in self.chain]
        if missing:
            raise VersionNotFoundError(
                f"What version {missing[0]} of the state at {self.place.state_location} has changed cannot be read: "
                f"{self._available()}."
            )
        entry = self.entry(operator, end)
        pieces: list[Piece] = []
        for segment in reversed(chains.segments(self.chain, operator, end)):
            if segment.last > start:
                of_segment = self.chain[segment.last].operators[operator]
                since = max(start, segment.first - 1)
                pieces += (structs.replace(p, since=since) for p in self.pieces(operator, of_segment, segment.last))
        schema = self.schema(entry)
        return Reading(self.place, operator, end, schema, tuple(pieces), self.key_groups, entry.num_partitions)

    def pieces(self, operator: str, entry: OperatorEntry, version: int) -> Iterator[Piece]:
        """Yield the partitions of an operator at a version, whose entry this is."""
        layout: Layout = chains.layout_of(operator, entry)
        for p in range(layout.num_partitions):
            lineage = chains.lineage(self.chain, version, layout, p, self.key_groups)
            yield Piece(p, layout.directory(p), layout.backend, lineage)


def _first_start(lineage: Lineage, first: int) -> int | None:
    """Return the first version from ``first`` on where a load of a lineage's version may begin; None if none."""
    heads = {ref.version: ref.file.path for ref in lineage.changelogs}
    starts = [s.version for s in lineage.snapshots if s.version >= first and heads.get(s.version) == s.head]
    below = lineage.rescaled
    if below is not None and below.version >= first:
        is_whole = all(_first_start(source.lineage, first) is not None for source in below.sources)
        starts += [below.version] if is_whole else []
    return min(starts, default=None)


def spans(versions: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending versions as pairs: the first and last version of each stretch without a gap."""
    ranges: list[tuple[int, int]] = []
    for version in versions:
        if ranges and ranges[-1][1] == version - 1:
            ranges[-1] = ranges[-1][0], version
        else:
            ranges.append((version, version))
    return ranges


def named(versions: Iterable[int]) -> str:
    """Name ascending versions, as "3 to 7 and 9"."""
    return " and ".join(f"{a} to {b}" if a < b else f"{a}" for a, b in spans(versions))


# Times when each version of a query's state was completed, and so the version that was visible at a time.


@dataclass(frozen=True)
class VersionTimes:
    """The versions that can be read, ascending, and when each was completed, in ms since 1970.

    The next version's manifest says when a version was completed. Of the last version, and of one after which the
    coordinator was replaced, the history of checkpoints does, 10 s later at most. If neither does, the time of Spark's
    commit of the batch counts, which is a moment before. The empty version 0 has always existed.
    """

    location: str
    versions: tuple[int, ...]
    completed_ms: tuple[int, ...]

    @classmethod
    def of(cls, versions: StateVersions) -> VersionTimes:
        """Return the times of the versions that storage shows. Raises ``StorageError``."""
        place = versions.place
        records = CheckpointRecords(RecordFiles(CheckpointStorage.open(place.state_location, place.options))).load()
        in_history = {record.id: record.completed_ms for record in records}
        commits = SparkCommits(CheckpointStorage.open(place.checkpoint_location, place.options))
        times = list[int]()
        for version in versions.readable:
            following, manifest = versions.chain.get(version + 1), versions.chain.get(version)
            completed_ms = None if following is None else following.parent_completed_ms
            if completed_ms is None and manifest is not None:
                completed_ms = in_history.get(manifest.id)
                if completed_ms is None:
                    completed_ms = commits.committed_ms(version - 1)
                completed_ms = max(completed_ms or 0, manifest.created_ms)
            times.append(max(completed_ms or 0, times[-1] if times else 0))
        return cls(place.checkpoint_location, tuple(versions.readable), tuple(times))

    def version_at(self, ms: int) -> int:
        """Return the version that was the last completed one at a time.

        Raises ``VersionNotFoundError`` for a time before the first version that is kept.
        """
        index = bisect_right(self.completed_ms, ms) - 1
        if index < 0:
            raise self.too_early(ms)
        return self.versions[index]

    def too_early(self, ms: int) -> VersionNotFoundError:
        """Return the error for a time before the first version that is kept."""
        first = (
            "none is kept" if not self.versions else f"version {self.versions[0]}, of {_in_words(self.completed_ms[0])}"
        )
        return VersionNotFoundError(
            f"The state at {self.location} as of {_in_words(ms)} is unknown: the first version that is kept is "
            f"{first}. More are kept with a higher min_versions_to_retain or min_seconds_to_retain (StateStoreConf)."
        )


def ms_of(time: str | datetime) -> int:
    """Return a time in ms since 1970. A string has the format ISO 8601; without a zone the time is UTC.

    Raises ``InvalidStateStoreArgument``.
    """
    try:
        moment = datetime.fromisoformat(time) if isinstance(time, str) else time
        aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
        return int(aware.timestamp() * 1000)
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidStateStoreArgument(
            f'as_of={time!r} is not a time: give a datetime, or a string such as "2026-01-01T00:00:00" (UTC).'
        ) from error


def _in_words(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(sep=" ", timespec="milliseconds")
