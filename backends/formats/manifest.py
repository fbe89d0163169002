"""Manifests: the only source of truth about which files make a version (as in SlateDB and Iceberg).

A manifest says what changed since its parent. Manifests are written once, create-if-absent, and never changed. To find
version V, walk the parents of the newest manifest of the highest epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field, structs

from backends.decoders import convert, json_decoder
from backends.exceptions import DamagedFileError
from backends.formats.local_state import LocalState
from backends.storage.locations import FileRef, digest

# The contribution of each partition to a version, kept in columns.
#
# A manifest of 10,000 partitions, and the hundred before it that a coordinator remembers, would be millions of small
# objects. So the entries of one operator are columns, in memory and in the file. The directories of the changelogs
# differ in the partition's number only, and are written once.


class SnapshotRef(Struct, frozen=True):
    """A snapshot of one partition at ``version``, whose last changelog is ``head``. ``file`` is its descriptor."""

    version: int
    head: str
    file: FileRef


class PartitionEntry(Struct, frozen=True):
    """The contribution of one partition to a version: the accepted attempt and its changelog.

    ``snapshots`` are those that became known since the parent manifest, of this version or earlier ones.
    """

    attempt: str
    changelog: FileRef
    snapshots: tuple[SnapshotRef, ...] = ()


class StoredEntries(Struct, frozen=True):
    """The columns as they are written. ``directory`` has ``*`` in place of the partition's number.

    ``partition`` is None if the partitions are 0, 1, 2 and so on. ``groups`` are the objects that hold changelogs of
    several partitions. ``group`` is the number of the object that holds a partition's changelog (-1: the changelog is a
    separate file), and ``offset`` its position there, in bytes. None: all changelogs are separate files, as before
    groups existed.
    """

    directory: str
    attempt: list[str]
    changelog: list[str]
    size: list[int]
    digest: list[str]
    partition: list[int] | None = None
    snapshots: dict[int, tuple[SnapshotRef, ...]] = {}
    groups: list[str] = []
    group: list[int] | None = None
    offset: list[int] | None = None


class PartitionEntries(Mapping[int, PartitionEntry]):
    """The entries of one operator's partitions, in the order of their numbers; never changed."""

    __slots__ = ("_rows", "stored")

    def __init__(self, stored: StoredEntries) -> None:
        """Take over the columns; raises ``ValueError`` if they differ in length or name a group that does not exist."""
        numbers = range(len(stored.attempt)) if stored.partition is None else stored.partition
        lengths = {len(c) for c in (stored.attempt, stored.changelog, stored.size, stored.digest, numbers)}
        if stored.group is not None or stored.offset is not None:
            lengths |= {len(c or ()) for c in (stored.group, stored.offset)}
        if len(lengths) > 1:
            raise ValueError(f"the columns of the partitions differ in length: {sorted(lengths)}")
        if any(not -1 <= group < len(stored.groups) for group in stored.group or ()):
            raise ValueError(f"there are {len(stored.groups)} groups of changelogs, and others are named")
        self.stored = stored
        self._rows: Mapping[int, int] | range = (
            numbers if isinstance(numbers, range) else {p: row for row, p in enumerate(numbers)}
        )

    @classmethod
    def of(cls, entries: Mapping[int, PartitionEntry]) -> PartitionEntries:
        """Make columns of single entries. The directories of their changelogs differ only in the partition's number.

        Raises ``ValueError`` for other directories.
        """
        if isinstance(entries, PartitionEntries):
            return entries
        numbers = sorted(entries)
        rows = [entries[p] for p in numbers]
        directory = _template(numbers[0], rows[0].changelog.path) if rows else ""
        names = []
        for p, row in zip(numbers, rows, strict=True):
            parent, _, name = row.changelog.path.rpartition("/")
            if parent != directory.replace("*", str(p)):
                raise ValueError(f"{row.changelog.path} is not in {directory}, as the others are")
            names.append(name)
        groups: dict[str, int] = {}
        for row in rows:
            if row.changelog.within is not None:
                groups.setdefault(row.changelog.within, len(groups))
        return cls(
            StoredEntries(
                directory,
                [e.attempt for e in rows],
                names,
                [e.changelog.size for e in rows],
                [e.changelog.digest for e in rows],
                None if numbers == list(range(len(numbers))) else numbers,
                {p: e.snapshots for p, e in zip(numbers, rows, strict=True) if e.snapshots},
                list(groups),
                [-1 if e.changelog.within is None else groups[e.changelog.within] for e in rows] if groups else None,
                [e.changelog.offset for e in rows] if groups else None,
            )
        )

    def __getitem__(self, partition: int) -> PartitionEntry:
        file_path, row, stored = self.head(partition), self._rows[partition], self.stored
        offset = 0 if stored.offset is None else stored.offset[row]
        file = FileRef(file_path, stored.size[row], stored.digest[row], self._group(row), offset)
        return PartitionEntry(stored.attempt[row], file, self.snapshots.get(partition, ()))

    def head(self, partition: int) -> str:
        """Return the name of a partition's changelog; raises ``KeyError``."""
        if partition not in self._rows:
            raise KeyError(partition)
        return f"{self.stored.directory.replace('*', str(partition))}/{self.stored.changelog[self._rows[partition]]}"

    def stored_in(self, partition: int) -> str:
        """Return the path of the object that holds a partition's changelog; raises ``KeyError``."""
        return self._group(self._rows[partition]) or self.head(partition)

    def _group(self, row: int) -> str | None:
        stored = self.stored
        return None if stored.group is None or stored.group[row] < 0 else stored.groups[stored.group[row]]

    @property
    def snapshots(self) -> Mapping[int, tuple[SnapshotRef, ...]]:
        """The snapshots of the partitions that have any."""
        return self.stored.snapshots

    def with_snapshots(self, by_partition: Mapping[int, tuple[SnapshotRef, ...]]) -> PartitionEntries:
        """Return the same entries with more snapshots."""
        snapshots = {
            p: (*self.snapshots.get(p, ()), *by_partition.get(p, ()))
            for p in self
            if p in self.snapshots or by_partition.get(p)
        }
        return PartitionEntries(structs.replace(self.stored, snapshots=snapshots))

    def __contains__(self, partition: object) -> bool:
        return partition in self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionEntries) and self.stored == other.stored

    def __hash__(self) -> int:
        raise TypeError("PartitionEntries cannot be hashed")

    def __repr__(self) -> str:
        return f"PartitionEntries({len(self)} partitions in {self.stored.directory})"

    def __reduce__(self) -> tuple[Any, ...]:
        return PartitionEntries, (self.stored,)


def _template(partition: int, path: str) -> str:
    """Return the directory of a changelog with ``*`` for the partition's number: ``operators/op/4/*/default``."""
    parts = path.split("/")[:-1]
    if len(parts) < 2 or parts[-2] != str(partition) or "*" in path:
        raise ValueError(f"{path} is not a changelog of partition {partition}")
    return "/".join((*parts[:-2], "*", parts[-1]))


STATE_FORMAT_VERSION = 1
NO_PARTITION_STAGES: Mapping[int, int] = MappingProxyType({})


class ChangelogRef(Struct, frozen=True):
    """A changelog file and the version that it makes."""

    version: int
    file: FileRef


class OperatorEntry(Struct, frozen=True):
    """One operator in a manifest: layout, schema id, backend, and the partitions that changed.

    ``stage`` is the highest Spark stage that made these changes; None: not known. ``earlier_stages`` has the stages of
    the partitions whose changes were made in a lower one: a plan that ran again has not reached them. Both hold only
    within the run that wrote the manifest.
    """

    num_partitions: int
    schema_id: str
    backend: str
    partitions: PartitionEntries
    stage: int | None = None
    earlier_stages: dict[int, int] = {}

    @classmethod
    def of(
        cls,
        num_partitions: int,
        schema_id: str,
        backend: str,
        partitions: Mapping[int, PartitionEntry],
        stages: Mapping[int, int] = NO_PARTITION_STAGES,
    ) -> OperatorEntry:
        """Make the entry of the partitions' contributions, and of the Spark stages that made them, where known."""
        stage = max(stages.values(), default=None)
        earlier = {p: s for p, s in stages.items() if s != stage}
        return cls(num_partitions, schema_id, backend, PartitionEntries.of(partitions), stage, earlier)

    def stage_of(self, partition: int) -> int | None:
        """Return the stage that made the changes of a partition; None: not known."""
        return self.earlier_stages.get(partition, self.stage)


class Manifest(Struct, frozen=True):
    """One version of a query's whole state. ``parent`` is the id of the manifest below; None for the first one.

    ``created_ms`` is when the version was prepared, in ms since 1970.

    ``oldest`` is the oldest version that is kept (apart from the empty 0). ``chain_from`` is the lowest version whose
    manifest is kept to make ``oldest``. Files that only lower versions need are being removed. ``sequence`` counts the
    manifests of an epoch from 1 on, so that a query's coordinators can fence each other; it is 0 in manifests from
    before fences existed, and for writers without fencing. ``parent_completed_ms`` is when the version below was
    completed, in ms since 1970; None if the coordinator that wrote this did not see that. ``rewritten`` are the paths
    of the records that map files of the versions below to their current places, the oldest first
    (``RewrittenFiles``).
    """

    id: int
    parent: int | None
    version: int
    epoch: int
    run_id: str
    created_ms: int
    operators: dict[str, OperatorEntry]
    oldest: int = 0
    chain_from: int = 1
    format_version: int = field(default=STATE_FORMAT_VERSION)
    sequence: int = 0
    parent_completed_ms: int | None = None
    rewritten: tuple[str, ...] = ()


class SourcePartition(Struct, frozen=True):
    """A partition of an earlier layout. Another partition takes over a range of its keys.

    Its files are in ``directory``; ``backend`` is the name of the backend that made its snapshots.
    """

    directory: str
    backend: str
    lineage: Lineage


class Rescaled(Struct, frozen=True):
    """The state of a partition where a new layout begins: the keys from ``start`` to ``end`` of the ``sources``.

    ``head`` stands for the changelog that would have made it. ``end`` None is the end of all keys.
    """

    version: int
    head: str
    start: bytes
    end: bytes | None
    sources: tuple[SourcePartition, ...]


class Lineage(Struct, frozen=True):
    """The files that bring one partition to ``version``.

    ``changelogs`` ascend to that version, one per version; ``snapshots`` ascend as well. Loading begins with the empty
    version 0 if the first changelog makes version 1, else with a snapshot, or with the partitions of an earlier layout
    (``rescaled``), whose key groups have been redistributed.
    """

    version: int
    changelogs: tuple[ChangelogRef, ...] = ()
    snapshots: tuple[SnapshotRef, ...] = ()
    rescaled: Rescaled | None = None

    @property
    def head(self) -> str | None:
        """The path of the changelog that made the version; None for the empty version 0."""
        if self.changelogs:
            return self.changelogs[-1].file.path
        return self.rescaled.head if self.rescaled is not None else None

    @property
    def oldest(self) -> float:
        """The lowest version that has a file, including files of earlier layouts; infinite if there is no file."""
        sources = self.rescaled.sources if self.rescaled is not None else ()
        lowest = [math.inf, *(source.lineage.oldest for source in sources)]
        lowest += [log.version for log in self.changelogs[:1]] + [snapshot.version for snapshot in self.snapshots[:1]]
        return min(lowest)

    @property
    def is_empty(self) -> bool:
        """Whether this is the lineage of the empty version 0."""
        return self.version == 0 and self.head is None


# JSON records that carry their own digest, so that damage is detected.
#
# Manifests and the like are found by listing, so no ``FileRef`` has their digest. Such a file is one line of JSON, and
# one line with the xxh3-128 of the first line.


T = TypeVar("T")


def seal(record: msgspec.Struct) -> bytes:
    """Return the bytes of a file: a record and its digest."""
    content = msgspec.json.encode(record, enc_hook=_encode)
    return content + b"\n" + digest(content).encode() + b"\n"


def unseal(data: bytes, kind: type[T], name: str) -> T:
    """Read what ``seal`` wrote; ``name`` is the file's, for messages. Raises ``DamagedFileError``."""
    content, _, written = data.rstrip(b"\n").rpartition(b"\n")
    if digest(content).encode() != written or not data.endswith(b"\n"):
        raise DamagedFileError(
            f"{name} is damaged: its content has the digest {digest(content)}, written was "
            f"{written[:40].decode(errors='replace')!r}. Restore it from a copy."
        )
    try:
        return json_decoder(kind, _decode).decode(content)
    except msgspec.MsgspecError as error:
        raise DamagedFileError(f"{name} is not a {kind.__name__} that this release can read: {error}") from error


def _encode(value: object) -> object:
    if isinstance(value, PartitionEntries):
        return value.stored
    raise NotImplementedError(f"A {type(value).__name__} cannot be written")


def _decode(kind: type[Any], value: Any) -> Any:
    if kind is PartitionEntries:
        return PartitionEntries(convert(value, StoredEntries, str_keys=True))
    raise NotImplementedError(f"A {kind.__name__} cannot be read")


# Paths of a partition's files below the state location, and the parts of their names.


def partition_directory(operator: str, num_partitions: int, partition: int, store: str = "default") -> str:
    """Return the directory of a partition's files in the layout of ``num_partitions``."""
    return f"operators/{operator}/{num_partitions}/{partition}/{store}"


def changelog_path(operator: str, n: int, p: int, store: str, version: int, unique: str) -> str:
    """Return the path of a changelog below the state location. ``unique`` differs for every file ever written."""
    return f"{partition_directory(operator, n, p, store)}/{changelog_name(version, unique)}"


def changelog_name(version: int, unique: str) -> str:
    """Return a changelog's file name in its partition's directory."""
    return f"{version}-{unique}.changelog"


def version_in(path: str) -> int:
    """Return the version that a file's name begins with, ``<version>-<unique>.<kind>``; -1 for any other name."""
    version, dash, _ = path.rsplit("/", 1)[-1].partition("-")
    return int(version) if dash and version.isdecimal() else -1


# The descriptor of a snapshot: which files it consists of, and where they are.


class SnapshotFile(Struct, frozen=True):
    """One file of a snapshot: its name in the backend, and the place of its content.

    The descriptor holds small files itself.
    """

    name: str
    file: FileRef | None = None
    content: bytes | None = None


class SnapshotDescriptor(Struct, frozen=True):
    """The descriptor of a snapshot, ``<version>-<unique>.snapshot`` in the partition's directory."""

    path: str
    backend: str
    state: LocalState
    files: tuple[SnapshotFile, ...]
    format_version: int = field(default=STATE_FORMAT_VERSION)

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the objects that the snapshot refers to."""
        return frozenset(f.file.stored_in for f in self.files if f.file is not None)

    @property
    def nbytes(self) -> int:
        """The bytes of the files that the snapshot refers to."""
        return sum(f.file.size for f in self.files if f.file is not None)

    def is_complete(self, sizes: Mapping[str, int]) -> bool:
        """Return whether all files of the snapshot are there, in full size. ``sizes`` are those of all stored files."""
        return all(f.file.is_in(sizes) for f in self.files if f.file is not None)

    @property
    def without_content(self) -> SnapshotDescriptor:
        """The same descriptor with only the files that are in storage, which is enough to know the needed objects."""
        return structs.replace(self, files=tuple(f for f in self.files if f.file is not None))
