"""Reads of one partition, each at one version: the engine's pairs under the changes that lie over the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from backends.encoding.keys import KeyRange
from backends.encoding.merged_scan import merged_scan
from backends.encoding.sorted_pairs import SortedPairs, as_binary, is_strictly_sorted
from backends.exceptions import InvalidStateStoreArgument
from backends.host_memory import SCANS, Claim, HostMemory
from backends.ids import DEFAULT_FAMILY
from backends.partition.context import PartitionContext
from backends.partition.counted_scan import counted_scan
from backends.partition.held_versions import HeldVersions
from backends.partition.layers import OlderVersion, VersionView
from backends.partition.recent_reads import RecentReads


class VersionReads:
    """Reads the versions that a partition holds. All reads may run in many threads at once.

    ``get_ms`` is the time of the last ``get_many`` of a task, in milliseconds.
    """

    def __init__(
        self, context: PartitionContext, versions: HeldVersions, recent_reads: RecentReads, memory: HostMemory
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

        ``version`` None is the last completed one. With ``remember``, what is read may spare the commit that follows a
        second look-up; queries, which no commit follows, say False. Raises ``VersionNotFoundError`` if the version, or
        the one that the changelog ``head`` made, is not held.
        """
        started = time.perf_counter()
        keys = as_binary("keys", keys)
        if keys.null_count:
            raise InvalidStateStoreArgument(f"{keys.null_count} of {len(keys)} keys are null; a key cannot be null.")
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
        self,
        key: bytes,
        version: int | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
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

        Shows the version as it is at the call, however long the scan takes and whatever is committed meanwhile. Raises
        ``HostMemoryError`` if there is no room for the changes that lie over the engine.
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
        """Scan several ranges, of which no two overlap: all scans show the same moment. See ``scan``."""
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
        """Scan ascending ranges, of which no two overlap, one after the other; a batch may have pairs of many ranges.

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
        """Return the exact number of keys of all column families at a version; None if it is not at hand.

        Raises as ``get_many``.
        """
        with self._versions.reading(version, head) as view:
            return self.counted(view)

    def counted(self, view: VersionView) -> int | None:
        """Return the number of keys that a view shows; None if it is not at hand."""
        if not view.layers:
            return self._engine.state.num_keys
        last = view.layers[-1]
        return last.num_keys if isinstance(last, OlderVersion) else None

    def column_families(self, version: int | None = None, *, head: str | None = None) -> frozenset[str]:
        """Return the names of the column families that exist at a version."""
        with self._versions.reading(version, head) as view:
            return view.families

    def _check_family(self, column_family: str, view: VersionView) -> None:
        if column_family not in view.families:
            raise InvalidStateStoreArgument(
                f"There is no column family {column_family!r} in {self._directory}; there are "
                f"{', '.join(sorted(view.families))}. Create it with create_column_family."
            )
