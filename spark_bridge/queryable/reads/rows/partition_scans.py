"""Scans of one partition: the stored pairs of a state variable, within bounds of the grouping key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.keys import KEY_GROUP_BYTES, KeyRange
from backends.encoding.operator_schema import TIMERS
from backends.ids import DEFAULT_FAMILY
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.protocol.request_context import raise_if_cancelled
from spark_bridge.queryable.reads.operators.operator_plan import without_prefix
from spark_bridge.queryable.reads.rows.row_stream import gather_batches
from spark_bridge.queryable.reads.versions.answer_version import PartitionView
from spark_bridge.state_format.layouts import ROWS, VALUE
from spark_bridge.state_format.stored_rows import VariableRows

MAX_RANGES = 4096
"""Ranges that are opened one by one. Where there are more, one range that has all of them is read, and filtered."""
_EXPIRY_BYTES = 9
"""Where timers are stored by time, the time stands between key group and grouping key."""

Pairs = dict[str, Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class KeyBounds:
    """Grouping keys from ``start`` (included) to ``end`` (not included), by their columns' bytes, in each key group."""

    start: bytes | None = None
    end: bytes | None = None

    def __post_init__(self) -> None:
        if self.start is not None and self.end is not None and self.end < self.start:
            raise RequestError(f"The scan's end {self.end.hex()} is below its start {self.start.hex()}.")

    @property
    def is_open(self) -> bool:
        """Whether all keys are within the bounds."""
        return not self.start and self.end is None

    def ranges(self, groups: range) -> list[KeyRange]:
        """Return the ranges of stored keys in these key groups."""
        found: list[KeyRange] = []
        for group in groups:
            begin = group.to_bytes(KEY_GROUP_BYTES, "big")
            after = (group + 1).to_bytes(KEY_GROUP_BYTES, "big") if group + 1 < 1 << 16 else None
            found.append((begin + (self.start or b""), after if self.end is None else begin + self.end))
        return found

    def within(self, pairs: pa.RecordBatch, skipped: int = KEY_GROUP_BYTES) -> pa.RecordBatch:
        """Return the pairs whose keys are within the bounds; the first ``skipped`` bytes of a key do not count."""
        keys = without_prefix(pairs.column(0), skipped)
        if self.start:
            chosen = pc.greater_equal(keys, self.start)
            pairs, keys = pairs.filter(chosen), keys.filter(chosen)
        return pairs if self.end is None else pairs.filter(pc.less(keys, self.end))


def pairs_of(view: PartitionView, rows: VariableRows, groups: range, bounds: KeyBounds) -> Pairs:
    """Return the pairs that rows are made of, by family.

    All iterators are opened at once, so that they show the same moment.
    """
    return {family: _checked(_pairs(view, rows, family, groups, bounds)) for family in rows.families}


def _checked(pairs: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the pairs as long as the request is wanted.

    The check is here because many pairs may make no row for long.
    """
    for batch in pairs:
        raise_if_cancelled()
        yield batch


def _pairs(
    view: PartitionView, rows: VariableRows, family: str, groups: range, bounds: KeyBounds
) -> Iterator[pa.RecordBatch]:
    reads, at = view.reads, view.version
    if family != DEFAULT_FAMILY and family not in reads.column_families(at, head=view.head):
        return iter(())
    if bounds.is_open:
        return reads.scan(at, None, None, family, head=view.head)
    if rows.kind == TIMERS:
        # Stored by time: the timers of some keys may be anywhere.
        found = reads.scan(at, None, None, family, head=view.head)
        return gather_batches(bounds.within(batch, KEY_GROUP_BYTES + _EXPIRY_BYTES) for batch in _checked(found))
    ranges = bounds.ranges(groups)
    if len(ranges) > MAX_RANGES:
        found = reads.scan(at, ranges[0][0], ranges[-1][1], family, head=view.head)
        return gather_batches(bounds.within(batch) for batch in _checked(found))
    return gather_batches(chain.from_iterable(reads.scan_ranges(ranges, at, family, head=view.head)))


def has_row_per_pair(rows: VariableRows) -> bool:
    """Return whether every stored pair is one row that never expires.

    Then rows can be counted without reading values.
    """
    return rows.kind in (ROWS, VALUE, TIMERS) and not rows.has_ttl
