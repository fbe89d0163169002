"""The pairs of a state variable in one partition, within bounds of the grouping key, and how many rows they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.keys import GROUP_BYTES, KeyRange
from backends.ids import DEFAULT_FAMILY
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.protocol.request_context import raise_if_cancelled
from spark_bridge.queryable.reads.answer_version import PartitionView
from spark_bridge.queryable.reads.operator_plan import behind
from spark_bridge.queryable.reads.row_stream import gathered
from spark_bridge.state_format.stored_rows import VariableRows

MOST_RANGES = 4096
"""So many ranges are opened one by one; where there are more, one range is read that has all of them, and what is between is dropped."""
_EXPIRY_BYTES = 9
"""What stands between key group and grouping key where timers are kept by time."""

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
        """Whether all keys are within."""
        return not self.start and self.end is None

    def ranges(self, groups: range) -> list[KeyRange]:
        """Where the keys lie in these key groups."""
        found: list[KeyRange] = []
        for group in groups:
            begin = group.to_bytes(GROUP_BYTES, "big")
            behind = (group + 1).to_bytes(GROUP_BYTES, "big") if group + 1 < 1 << 16 else None
            found.append((begin + (self.start or b""), behind if self.end is None else begin + self.end))
        return found

    def within(self, pairs: pa.RecordBatch, skipped: int = GROUP_BYTES) -> pa.RecordBatch:
        """The pairs whose keys are within, of keys whose first ``skipped`` bytes do not count."""
        keys = behind(pairs.column(0), skipped)
        if self.start:
            chosen = pc.greater_equal(keys, self.start)
            pairs, keys = pairs.filter(chosen), keys.filter(chosen)
        return pairs if self.end is None else pairs.filter(pc.less(keys, self.end))


def pairs_of(view: PartitionView, rows: VariableRows, groups: range, bounds: KeyBounds) -> Pairs:
    """The pairs that rows are made of, by family. All is opened at once: it shows this moment, however long it is read."""
    return {family: _checked(_pairs(view, rows, family, groups, bounds)) for family in rows.families}


def _checked(pairs: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same, as long as the request is wanted: here, for of what is read there may be no rows for long."""
    for batch in pairs:
        raise_if_cancelled()
        yield batch


def _pairs(
    view: PartitionView, rows: VariableRows, family: str, groups: range, bounds: KeyBounds
) -> Iterator[pa.RecordBatch]:
    state, at = view.state, view.version
    if family != DEFAULT_FAMILY and family not in state.column_families(at, head=view.head):
        return iter(())
    if bounds.is_open:
        return state.scan(at, None, None, family, head=view.head)
    if rows.kind == "timers":
        # Kept by time: those of some keys are everywhere.
        found = state.scan(at, None, None, family, head=view.head)
        return gathered(bounds.within(batch, GROUP_BYTES + _EXPIRY_BYTES) for batch in _checked(found))
    ranges = bounds.ranges(groups)
    if len(ranges) > MOST_RANGES:
        found = state.scan(at, ranges[0][0], ranges[-1][1], family, head=view.head)
        return gathered(bounds.within(batch) for batch in _checked(found))
    return gathered(chain.from_iterable(state.scan_ranges(ranges, at, family, head=view.head)))


def has_row_per_pair(rows: VariableRows) -> bool:
    """Whether every stored pair is one row that never expires, so that rows can be counted without reading values."""
    return rows.kind in ("rows", "value", "timers") and not rows.has_ttl
