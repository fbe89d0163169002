"""The contribution of each partition to a version, kept in columns.

A manifest of 10,000 partitions, and the hundred before it that a coordinator remembers, would be millions of small
objects. So the entries of one operator are columns, in memory and in the file. The directories of the changelogs differ
in the partition's number only, and are written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, structs

from backends.storage.file_ref import FileRef


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
    """The columns as they are written. ``directory`` has ``*`` in the place of the partition's number.

    ``partition`` is None if the partitions are 0, 1, 2 and so on. ``groups`` are the objects that hold changelogs of
    several partitions, ``group`` the number of the one that has a partition's (-1: the changelog is a file of its own),
    and ``offset`` where in it, in bytes. None: all changelogs are files of their own, as before there were groups.
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
        """Take over the columns; raises ``ValueError`` if they differ in length or name a group that is not there."""
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
        """Make columns of single entries, whose changelogs lie in directories that differ in the partition's number
        only.

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
                raise ValueError(f"{row.changelog.path} does not lie in {directory}, as the others do")
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

    def with_snapshots(self, found: Mapping[int, tuple[SnapshotRef, ...]]) -> PartitionEntries:
        """Return the same entries with more snapshots."""
        snapshots = {
            p: (*self.snapshots.get(p, ()), *found.get(p, ())) for p in self if p in self.snapshots or found.get(p)
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
        raise ValueError(f"{path} is no changelog of partition {partition}")
    return "/".join((*parts[:-2], "*", parts[-1]))
