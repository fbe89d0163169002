"""The two sides of a join: their columns, their event times, and when their rows cannot match any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import Integers, Mask
from spark_bridge.aggregates.row_groups import as_type
from spark_bridge.state_format.layouts import NO_TIME
from spark_bridge.task.state_task import EventTime, Times

INNER, LEFT_OUTER, RIGHT_OUTER, FULL, SEMI, ANTI = "inner", "left", "right", "full", "left_semi", "left_anti"
JOIN_TYPES = (INNER, LEFT_OUTER, RIGHT_OUTER, FULL, SEMI, ANTI)

SIDE = "__statestore_side"
"""The column that names the side of a row: ``LEFT_ROW`` or ``RIGHT_ROW``."""
SLOT = "__statestore_slot"
"""Prefix of the names of shared columns. A column of each side shares one if both have the same type."""
LEFT_ROW, RIGHT_ROW = 0, 1


@dataclass(frozen=True)
class JoinSide:
    """One side of a join.

    - ``name``: that of its state variable.
    - ``columns``: its columns without the keys, as they are stored. ``slots`` are the numbers of the shared columns
      that they come in.
    - ``time``: the column that the bounds of the join compare, or that is in the key; None if the join has no bounds.
    - ``late``: the column that decides whether a row is late; None if rows are never late.
    - ``expires_after_us``: a row can find no match any more once the watermark is this many microseconds after the
      row's time; None if that is never known.
    - ``keeps_unmatched``: rows that find no match are emitted in the end. ``leaves_once_matched``: a row is removed
      from the state with its first match.
    - ``flag``: the stored column that marks rows with a match; None if the join does not need it.
    """

    name: str
    columns: pa.Schema
    slots: tuple[int, ...]
    time: EventTime | None = None
    late: EventTime | None = None
    expires_after_us: int | None = None
    keeps_unmatched: bool = False
    leaves_once_matched: bool = False
    flag: str | None = None

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [as_type(batch.column(slot_name(i)), f.type) for i, f in zip(self.slots, self.columns, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self.columns)

    def row_times(self, rows: pa.RecordBatch) -> Times:
        """Return the times of rows that have the key's columns as well."""
        return self.times(rows, np.arange(rows.num_rows), rows)

    def times(self, keys: pa.RecordBatch, ids: npt.NDArray[np.int64], rows: pa.RecordBatch) -> Times:
        """Return the times of rows in microseconds since 1970; ``ids`` are the places of their keys in ``keys``."""
        if self.time is None:
            return np.zeros(len(ids), np.int64)
        in_key = self.time.column in keys.schema.names
        times: Times = self.time.times(keys if in_key else rows).fill_null(NO_TIME).to_numpy()
        return times[ids] if in_key else times

    def expired(self, times: Times, watermark_ms: int) -> Mask:
        """Return which rows can find no match any more; a row without a time never could."""
        if self.expires_after_us is None:
            return np.zeros(len(times), np.bool_)
        expired: Mask = (times <= watermark_ms * 1000 - self.expires_after_us) | (times == NO_TIME)
        return expired

    def is_late(self, batch: pa.RecordBatch, watermark_ms: int) -> Mask:
        """Return which rows are late; ``batch`` has the key columns and the shared columns."""
        if self.late is None:
            return np.zeros(batch.num_rows, np.bool_)
        name = self.late.column
        if name in self.columns.names:
            name = slot_name(self.slots[self.columns.get_field_index(name)])
        column = batch.column(name)
        return self.late.is_done(pa.RecordBatch.from_arrays([column], names=[self.late.column]), watermark_ms)


@dataclass(frozen=True)
class Bounds:
    """The times that rows are matched by.

    The times of matching rows, in the columns ``left`` and ``right``, differ by ``lower_us`` to ``upper_us``
    microseconds, both included (right minus left; None means no bound). With ``in_key`` both columns are a key of the
    join, so the times are equal. If a column is None, there are no bounds. ``left_late`` and ``right_late`` decide
    whether a row is late.
    """

    left: EventTime | None = None
    right: EventTime | None = None
    left_late: EventTime | None = None
    right_late: EventTime | None = None
    lower_us: int | None = None
    upper_us: int | None = None
    in_key: bool = False

    @property
    def uses_time(self) -> bool:
        """Return whether the tasks ask for the watermark."""
        return any(t is not None for t in (self.left, self.right, self.left_late, self.right_late))

    @property
    def expires_after_us(self) -> tuple[int | None, int | None]:
        """Return for both sides how long after the time of a row the watermark rules out a match.

        A row of the left side matches times up to ``upper_us`` after its own. The result is rounded up to milliseconds,
        plus one millisecond. Spark does the same for inclusive bounds (``StreamingJoinHelper.getStateValueWatermark``),
        so both emit rows without a match in the same batch.
        """
        if self.in_key:
            return 0, 0
        after = (self.upper_us, None if self.lower_us is None else -self.lower_us)
        left, right = (None if us is None else (-(-us // 1000) + 1) * 1000 for us in after)
        return left, right

    @property
    def waits_ms(self) -> tuple[int | None, int | None]:
        """Return for both sides how far the watermark may be behind the time of an arriving row; None: no limit."""
        left, right = (None if us is None else max(0, us // 1000) for us in self.expires_after_us)
        return left, right

    @property
    def in_words(self) -> str:
        """Return the bounds in words, which must not change while there is state."""
        if self.left is None or self.right is None:
            return "no bounds"
        if self.in_key:
            return f"{self.left.column} equal"
        return f"{self.right.column} - {self.left.column} from {self.lower_us} to {self.upper_us} us"


def slot_name(number: int) -> str:
    """Return the name of a shared column."""
    return f"{SLOT}{number}"


def shared_slots(
    left: Sequence[pa.DataType], right: Sequence[pa.DataType]
) -> tuple[tuple[pa.DataType, ...], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the types of the shared columns, and for each column of both sides the number of its shared column.

    Columns of both sides with the same type share one, so that a row has few nulls for the columns of the other
    side.
    """
    types = list(left)
    free = list(range(len(left)))
    of_right = []
    for kind in right:
        if (slot := next((i for i in free if left[i] == kind), None)) is None:
            slot = len(types)
            types.append(kind)
        else:
            free.remove(slot)
        of_right.append(slot)
    return tuple(types), (tuple(range(len(left))), tuple(of_right))


# The matching rows of two sides: those with one key whose times are within the bounds. No loop per row.
#
# The rows of one side are sorted by key and time. The matches of a row of the other side are then adjacent, and are
# found by two binary searches.


PAIRS_AT_ONCE = 1 << 16
"""The most matches that are converted to rows at once."""


@dataclass(frozen=True)
class RowsToMatch:
    """Rows of one side: the places of their keys, their times in microseconds, and their numbers."""

    ids: Integers
    times: Integers
    numbers: Integers

    def where(self, chosen: npt.NDArray[np.bool_]) -> RowsToMatch:
        return RowsToMatch(self.ids[chosen], self.times[chosen], self.numbers[chosen])


@dataclass(frozen=True)
class Matches:
    """Row i of ``probes`` (numbers) matches the rows ``others[starts[i]:ends[i]]`` (numbers) of the other side."""

    probes: Integers
    others: Integers
    starts: Integers
    ends: Integers

    @property
    def matched_probes(self) -> Integers:
        """Return the numbers of the rows of ``probes`` that have a match."""
        return self.probes[self.ends > self.starts]

    @property
    def matched_others(self) -> Integers:
        """Return the numbers of the rows of ``others`` that have a match."""
        changes = np.zeros(len(self.others) + 1, np.int64)
        np.add.at(changes, self.starts, 1)
        np.add.at(changes, self.ends, -1)
        return self.others[np.cumsum(changes)[:-1] > 0]

    def pairs(self) -> Iterator[tuple[Integers, Integers]]:
        """Yield the numbers of matching rows, some thousand pairs at a time."""
        ends = np.cumsum(self.ends - self.starts)
        total = int(ends[-1]) if len(ends) else 0
        begins = ends - (self.ends - self.starts)
        for first in range(0, total, PAIRS_AT_ONCE):
            pairs = np.arange(first, min(first + PAIRS_AT_ONCE, total))
            rows = np.searchsorted(ends, pairs, "right")
            yield self.probes[rows], self.others[self.starts[rows] + pairs - begins[rows]]


def matches(probes: RowsToMatch, others: RowsToMatch, lower_us: int | None, upper_us: int | None) -> Matches:
    """Return the rows of ``others`` with the key of each probe whose time is within the bounds.

    The bounds, in microseconds, are those of the other row's time minus the probe's. None means no bound.
    """
    if lower_us is None and upper_us is None:
        order = np.argsort(others.ids, kind="stable")
        ids = others.ids[order]
        starts, ends = np.searchsorted(ids, probes.ids, "left"), np.searchsorted(ids, probes.ids, "right")
        return Matches(probes.numbers, others.numbers[order], starts, ends)
    order = np.lexsort((others.times, others.ids))
    times = np.unique(others.times)
    span = len(times) + 1
    places = others.ids[order] * span + np.searchsorted(times, others.times[order])
    first = 0 if lower_us is None else np.searchsorted(times, _shifted(probes.times, lower_us), "left")
    behind = len(times) if upper_us is None else np.searchsorted(times, _shifted(probes.times, upper_us), "right")
    starts = np.searchsorted(places, probes.ids * span + first, "left")
    ends = np.searchsorted(places, probes.ids * span + behind, "left")
    return Matches(probes.numbers, others.numbers[order], starts, np.maximum(starts, ends))


def _shifted(times: Integers, by: int) -> Integers:
    """Return the times plus ``by``, limited to the range of times."""
    low, high = np.iinfo(np.int64).min, NO_TIME
    return np.clip(times, max(low, low - by), min(high, high - by)) + by
