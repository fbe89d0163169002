"""``VersionReads``: reads of one partition, each at one version, and the last bulk reads of the stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import ref

import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.encoding.keys import KeyRange
from backends.encoding.sorted_pairs import SortedPairs, as_keys, is_strictly_sorted, merged_scan
from backends.exceptions import InvalidStateStoreArgument
from backends.host_memory import LAST_READS, SCANS, Claim, HostMemory
from backends.partition.loading import PartitionContext
from backends.partition.readable_versions import OlderVersion, ReadableVersions, VersionView

# The pairs that the stream has read last: mostly the same pairs that its next commit replaces.


@dataclass(frozen=True)
class _Read:
    """Bulk reads of one column family at a completed version, in ascending order of their keys up to ``last``.

    No ``parts`` if there were too many bytes.
    """

    head: str | None
    last: bytes
    parts: tuple[SortedPairs, ...] = ()
    claims: tuple[Claim, ...] = ()


class RecentReads:
    """The last bulk reads of each column family, up to ``max_bytes`` each, as long as ``memory`` can spare them.

    Kept from a task's read to its commit, or to the next version. Needs no lock: every read and write accesses one dict
    entry.
    """

    def __init__(self, max_bytes: int, memory: HostMemory) -> None:
        self._max_bytes = max_bytes
        self._memory = memory
        self._reads: dict[str, _Read] = {}

    def remember(self, head: str | None, column_family: str, read: SortedPairs) -> None:
        """Keep what was read at the version that ``head`` made.

        An operator reads in steps, in ascending order of the keys: pairs that follow the last read are added to it.
        """
        last_read, last = self._reads.get(column_family), read.keys[-1].as_py()
        follows = last_read is not None and last_read.head == head and last_read.last < read.keys[0].as_py()
        earlier = last_read if last_read is not None and follows else _Read(head, b"")
        nbytes = sum(c.nbytes for c in earlier.claims) + read.nbytes
        claim = None
        if (earlier.parts or not follows) and nbytes <= self._max_bytes:
            claim = self._memory.spare(LAST_READS, read.nbytes, partial(_forget, ref(self), column_family))
        if claim is None:  # a part of a read is useless, and so are the parts that follow
            self._reads[column_family] = _Read(head, last)
        else:
            self._reads[column_family] = _Read(head, last, (*earlier.parts, read), (*earlier.claims, claim))
            if any(c.is_dropped for c in (*earlier.claims, claim)):  # by another thread, which found nothing here
                self._reads[column_family] = _Read(head, last)

    def values(self, head: str | None, column_family: str, keys: pa.BinaryArray) -> pa.BinaryArray | None:
        """Return the values of sorted keys at the version that ``head`` made; None unless all of them were read."""
        read = self._reads.get(column_family)
        if read is None or read.head != head or not read.parts:
            return None
        read_keys = pa.concat_arrays([p.keys for p in read.parts])
        read_values = pa.concat_arrays([p.values for p in read.parts])
        if keys.equals(read_keys):
            return read_values
        at = SortedPairs(read_keys, read_values).find(keys)
        return read_values.take(pa.array(at)) if (at >= 0).all() else None

    def forget(self, column_family: str) -> None:
        """Drop the reads of a family: the task that has read it has committed, or the memory is needed."""
        self._reads.pop(column_family, None)

    def forget_others(self, head: str | None) -> None:
        """Drop the reads at other versions than the one that ``head`` made."""
        for family, read in list(self._reads.items()):
            if read.head != head:
                self._reads.pop(family, None)

    @property
    def nbytes(self) -> int:
        return sum(claim.nbytes for read in list(self._reads.values()) for claim in read.claims)

    def clear(self) -> None:
        self._reads.clear()


def _forget(reads: ref[RecentReads], column_family: str) -> None:
    recent = reads()
    if recent is not None:
        recent.forget(column_family)


# Counts the memory that a scan holds.


_FEW_BYTES = 64 << 10
"""Smaller batches are not counted: a task scans thousands of ranges with few pairs each, one after the other."""


def counted_scan(
    batches: Iterator[pa.RecordBatch], memory: HostMemory, changes: Claim | None
) -> Iterator[pa.RecordBatch]:
    """Return the batches of a scan; its last batch is counted, and ``changes`` as long as the scan lives."""
    last: Claim | None = None
    for batch in batches:
        if last is not None or batch.nbytes >= _FEW_BYTES:
            last = last or memory.note(SCANS, 0)
            memory.resize(last, batch.nbytes)
        yield batch


# Reads of one partition, each at one version: the engine's pairs with the layers of changes over them.


class VersionReads:
    """Reads the versions that a partition holds. All reads may run in many threads at once.

    ``get_ms`` is the time of the last ``get_many`` of a task, in milliseconds.
    """

    def __init__(
        self, context: PartitionContext, versions: ReadableVersions, recent_reads: RecentReads, memory: HostMemory
    ) -> None:
        self._engine = context.engine
        self._directory = context.directory
        self._versions = versions
        self._recent_reads = recent_reads
        self._memory = memory
        self.get_ms = 0.0

    def get_many(
        self,
        keys: pa.Array | pa.ChunkedArray,
        version: int | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
        remember: bool = True,
    ) -> pa.BinaryArray:
        """Return the values at a version, in the order of ``keys``; null where a key has none. Sorted keys are fastest.

        ``version`` None is the last completed one. ``remember`` keeps the result, which may save the following commit a
        second look-up; queries, which no commit follows, pass False. Raises ``VersionNotFoundError`` if the version, or
        the one that the changelog ``head`` made, is not held.
        """
        started = time.perf_counter()
        keys = as_keys(keys)
        reader = object()
        view = self._versions.begin_read(reader, version, head)
        try:
            self._check_family(column_family, view)
            values = self._engine.get_many(keys, column_family)
            if remember and not view.layers and len(keys) and is_strictly_sorted(keys):
                self._recent_reads.remember(view.head, column_family, SortedPairs(keys, values))
            for layer in view.layers:
                if column_family in layer.changes.families:
                    values = layer.changes.families[column_family].overlay(keys, values)
        finally:
            self._versions.end_read(reader)
        if remember:
            self.get_ms = (time.perf_counter() - started) * 1e3
        return values

    def get_one(
        self, key: bytes, version: int | None = None, column_family: str = DEFAULT_FAMILY, *, head: str | None = None
    ) -> bytes | None:
        """Return the value of one key at a version, None if it has none: ``get_many`` for one key, in microseconds."""
        versions = self._versions
        reader = object()
        view = versions.begin_read(reader, version, head)
        try:
            if column_family not in view.families:
                self._check_family(column_family, view)
            for layer in reversed(view.layers):
                pairs = layer.changes.families.get(column_family)
                if pairs is not None:
                    is_changed, value = pairs.get(key)
                    if is_changed:
                        return value
            return self._engine.get_one(key, column_family)
        finally:
            versions.end_read(reader)

    def scan(
        self,
        version: int | None = None,
        start: bytes | None = None,
        end: bytes | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Return batches of ``key`` and ``value`` from ``start`` (included) to ``end`` (not included), in key order.

        Shows the version at the time of the call, however long the scan takes and whatever is committed during it.
        Raises ``HostMemoryError`` if there is no room for the changes over the engine.
        """
        return self.scan_ranges([(start, end)], version, column_family, head=head)[0]

    def scan_ranges(
        self,
        ranges: Sequence[tuple[bytes | None, bytes | None]],
        version: int | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
    ) -> list[Iterator[pa.RecordBatch]]:
        """Scan several ranges that do not overlap: all scans show the same moment. See ``scan``."""
        with self._versions.reading(version, head) as view:
            self._check_family(column_family, view)
            bases = [self._engine.scan(start, end, column_family) for start, end in ranges]
        only = ranges[0] if len(ranges) == 1 else (None, None)
        changes, claim = self._changes(view, column_family, lambda pairs: pairs.between(*only))
        return [
            counted_scan(merged_scan(base, changes.between(*bounds) if len(changes) else changes), self._memory, claim)
            for base, bounds in zip(bases, ranges, strict=True)
        ]

    def scan_in_turn(
        self,
        ranges: Sequence[KeyRange],
        version: int | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Scan ascending ranges that do not overlap, one after the other; a batch may have pairs of many ranges.

        See ``scan``.
        """
        with self._versions.reading(version, head) as view:
            self._check_family(column_family, view)
            base = self._engine.scan_ranges(ranges, column_family)
        changes, claim = self._changes(view, column_family, lambda pairs: pairs.within(ranges))
        return counted_scan(merged_scan(base, changes), self._memory, claim)

    def _changes(
        self, view: VersionView, column_family: str, wanted: Callable[[SortedPairs], SortedPairs]
    ) -> tuple[SortedPairs, Claim | None]:
        """Return the changes of the wanted keys in the layers of a view, and the claim to their memory."""
        changes = SortedPairs.empty()
        for layer in view.layers:
            if column_family in layer.changes.families:
                changes = changes.under(wanted(layer.changes.families[column_family]))
        claim = self._memory.claim(SCANS, changes.nbytes, f"A scan of {self._directory}") if len(changes) else None
        return changes, claim

    def num_keys(self, version: int | None = None, *, head: str | None = None) -> int | None:
        """Return the exact number of keys of all column families at a version; None if it is unknown.

        Raises as ``get_many``.
        """
        with self._versions.reading(version, head) as view:
            return self.counted(view)

    def counted(self, view: VersionView) -> int | None:
        """Return the number of keys that a view shows; None if it is unknown."""
        if not view.layers:
            return self._engine.state.num_keys
        last = view.layers[-1]
        return last.num_keys if isinstance(last, OlderVersion) else None

    def column_families(self, version: int | None = None, *, head: str | None = None) -> frozenset[str]:
        with self._versions.reading(version, head) as view:
            return view.families

    def _check_family(self, column_family: str, view: VersionView) -> None:
        if column_family not in view.families:
            raise InvalidStateStoreArgument(
                f"Column family {column_family!r} does not exist in {self._directory}; there are "
                f"{', '.join(sorted(view.families))}. Create it with create_column_family."
            )
