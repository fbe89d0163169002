"""The work of ``join_asof`` in a state task: each left row waits until the watermark settles its right row.

New rows of both sides are put into the state. A key is looked at when the watermark has reached one of its rows: then
its left rows that nothing can change any more are emitted, and of its right rows those go that no left row can get.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import Integers, Mask, null_mask
from backends.encoding.keys import decode_keys
from spark_bridge.aggregates.row_groups import order_codes, plain
from spark_bridge.operators.join_sides import LEFT_OUTER, LEFT_ROW, RIGHT_ROW, SIDE, Bounds
from spark_bridge.operators.join_task import DUE_SIDES, JoinBatch, JoinLogic, join_logic
from spark_bridge.state_format.layouts import LEFT, NO_TIME, RIGHT, join_schema
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.keyed_rows import KeyedRows
from spark_bridge.task.state_task import Times
from spark_bridge.task.task_store import Spool, StateAccess

# Finds the row of the other side that is nearest in time, as pandas' ``merge_asof`` chooses it. No loop per row.
#
# The rows of the right side are sorted by key, time and, where times are equal, by their columns. The match of a left
# row is then next to the place that a binary search finds.


BACKWARD, FORWARD, NEAREST = "backward", "forward", "nearest"
DIRECTIONS = (BACKWARD, FORWARD, NEAREST)
NO_ROW = -1
"""Stands for no row."""


@dataclass(frozen=True)
class Asof:
    """The match of a left row: the last right row before it, the first one after it, or the nearer of both.

    ``tolerance_us`` is the greatest difference of their times in microseconds, None for any. ``allow_exact`` says
    whether a row of the same time counts.
    """

    direction: str = BACKWARD
    tolerance_us: int | None = None
    allow_exact: bool = True

    @property
    def waits_ms(self) -> tuple[int | None, int | None]:
        """Return for both sides how far the watermark may be behind the time of an arriving row, None for any.

        Backward, a left row waits for the watermark alone; else up to the tolerance, for a right row after it.
        """
        tolerance = None if self.tolerance_us is None else -(-self.tolerance_us // 1000)
        left = 0 if self.direction == BACKWARD else tolerance
        right = left if self.direction == FORWARD else None if tolerance is None or left is None else left + tolerance
        return left, right


class SortedRows:
    """Rows of the right side by key and time. ``numbers`` are their numbers in the order given."""

    def __init__(self, ids: Integers, times: Integers, rows: pa.RecordBatch) -> None:
        self.numbers = _order(ids, times, rows)
        self.ids, self.times = ids[self.numbers], times[self.numbers]
        self._distinct = np.unique(times)
        self._span = len(self._distinct) + 1
        self._places = self.ids * self._span + np.searchsorted(self._distinct, self.times)

    def number_before(self, ids: Integers, times: Integers, *, or_at: bool) -> Integers:
        """Return how many rows come before each time of a key, or at that time, and those of lesser keys."""
        places = ids * self._span + np.searchsorted(self._distinct, times, "right" if or_at else "left")
        numbers: Integers = np.searchsorted(self._places, places, "left")
        return numbers

    def last_before(self, ids: Integers, times: Integers, *, or_at: bool) -> Integers:
        """Return the place of the last row of a key before each time, ``NO_ROW`` if there is none."""
        return self._of_key(self.number_before(ids, times, or_at=or_at) - 1, ids)

    def first_behind(self, ids: Integers, times: Integers, *, or_at: bool) -> Integers:
        """Return the place of the first row of a key after each time, ``NO_ROW`` if there is none."""
        return self._of_key(self.number_before(ids, times, or_at=not or_at), ids)

    def _of_key(self, places: Integers, ids: Integers) -> Integers:
        is_there = (places >= 0) & (places < len(self.ids))
        is_there[is_there] = self.ids[places[is_there]] == ids[is_there]
        return np.where(is_there, places, NO_ROW)


def nearest(asof: Asof, ids: Integers, times: Integers, rows: SortedRows) -> tuple[Integers, Integers]:
    """Return for each left row the place of its right row in ``rows``, and how far their times are apart.

    ``NO_ROW`` and ``NO_TIME`` if there is no such row, whatever the tolerance.
    """
    before = behind = np.full(len(ids), NO_ROW)
    if asof.direction != FORWARD:
        before = rows.last_before(ids, times, or_at=asof.allow_exact)
    if asof.direction != BACKWARD:
        behind = rows.first_behind(ids, times, or_at=asof.allow_exact)
    distances = [_distance(places, times, rows) for places in (before, behind)]
    is_before = distances[0] <= distances[1]  # as pandas does, also for two that are equally far
    chosen = np.where((before != NO_ROW) & is_before, before, behind)
    return chosen, np.where(is_before, *distances)


def _distance(places: Integers, times: Integers, rows: SortedRows) -> Integers:
    distances = np.full(len(times), NO_TIME)
    is_there = places != NO_ROW
    distances[is_there] = np.abs(rows.times[places[is_there]] - times[is_there])
    return distances


def _order(ids: Integers, times: Integers, rows: pa.RecordBatch) -> npt.NDArray[np.intp]:
    order = np.lexsort((times, ids))
    same: Mask = (np.diff(ids[order]) == 0) & (np.diff(times[order]) == 0)
    if not same.any():
        return order
    # So that the result does not depend on the order of the rows.
    codes: list[npt.NDArray[Any]] = []
    for column in rows.columns:
        if not _is_ordered(column.type):
            continue
        mask = null_mask(column)
        values = order_codes(plain(column))
        codes += [values] if mask is None else [~mask, np.where(mask, 0, values)]
    return np.lexsort((*reversed(codes), times, ids))


def _is_ordered(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return False
    return all(_is_ordered(kind.field(i).type) for i in range(kind.num_fields))


@dataclass(frozen=True)
class AsofLogic(JoinLogic):
    """A join of each left row with the right row of its key that is nearest in time."""

    asof: Asof = field(default_factory=Asof)

    def batch(self, store: StateAccess, timer: StepTimer) -> JoinBatch:
        return _AsofBatch(self, store, timer)


def asof_logic(
    keys: pa.Schema, columns: tuple[pa.Schema, pa.Schema], bounds: Bounds, output: pa.Schema, asof: Asof
) -> AsofLogic:
    """Return the work of a join; see ``join_logic``."""
    plain = join_logic(keys, columns, LEFT_OUTER, bounds, output)
    left, right = (replace(side, expires_after_us=0, flag=None) for side in plain.sides)
    assert left.time is not None and right.time is not None
    settings = {
        "how": f"asof, {asof.direction}",
        "within": f"{right.time.column} - {left.time.column}, tolerance {asof.tolerance_us} us, "
        f"{'with' if asof.allow_exact else 'without'} equal times",
    }
    schema = join_schema(
        keys, tuple(keys.names), {LEFT: [*left.columns], RIGHT: [*right.columns]}, (LEFT, RIGHT), settings
    )
    return AsofLogic(schema, keys, plain.slots, left, right, LEFT_OUTER, bounds, output, asof=asof)


class _AsofBatch(JoinBatch):
    """One micro-batch of one partition."""

    _logic: AsofLogic

    def step(self, part: KeyedRows, spool: Spool) -> int:
        """Put the new rows of some keys into the state, and settle the keys that the watermark has reached."""
        keys = decode_keys(part.keys, self._logic.keys)
        no_nulls = self.no_nulls(keys, len(part.keys))
        codes = np.asarray(part.rows.column(SIDE))
        settled = np.zeros(len(part.keys), np.bool_)
        for code in DUE_SIDES:
            settled[part.ids[codes == code]] = True
        for side, is_new in zip(self._logic.sides, (codes == LEFT_ROW, codes == RIGHT_ROW), strict=True):
            ids = part.ids[is_new]
            times = side.times(keys, ids, side.rows(part.rows.filter(pa.array(is_new))))
            settled[ids[times <= self._now]] = True
        settled &= no_nulls
        left, right = (self.side(i, part, keys, no_nulls, settled, codes) for i in (LEFT_ROW, RIGHT_ROW))
        self._timer.step("get_ms")

        # Rows that cannot match are emitted or dropped at once; unsettled rows stay as they are.
        stays = [left.can_match.copy(), right.can_match.copy()]
        due_at = [left.times.copy(), right.times.copy()]
        self.output.emit(keys, (left, np.flatnonzero(~left.can_match)), None, spool)
        waiting = np.full(len(part.keys), NO_TIME)
        chosen = np.flatnonzero(left.can_match & settled[left.ids])
        others = np.flatnonzero(right.can_match & settled[right.ids])
        rows = SortedRows(right.ids[others], right.times[others], right.rows.take(pa.array(others)))
        if len(chosen):
            ids, times = left.ids[chosen], left.times[chosen]
            places, distances = nearest(self._logic.asof, ids, times, rows)
            final_at = self._final_at(times, places, distances)
            final = final_at <= self._now
            stays[0][chosen[final]] = False
            due_at[0][chosen] = final_at
            np.minimum.at(waiting, ids[~final], times[~final])
            of_left, matched = chosen[final], places[final] != NO_ROW
            if self._logic.asof.tolerance_us is not None:
                matched &= distances[final] <= self._logic.asof.tolerance_us
            of_right = others[rows.numbers[places[final][matched]]]
            self.output.emit(keys, (left, of_left[matched]), (right, of_right), spool)
            self.output.emit(keys, (left, of_left[~matched]), None, spool)
        if len(others):
            kept, times = self._kept(rows, waiting)
            numbers = others[rows.numbers]
            stays[1][numbers] = kept
            due_at[1][numbers] = times
        for i, of_side in enumerate((left, right)):
            self.write(i, part, of_side, stays[i], np.zeros(len(of_side.ids), np.bool_), due_at[i], has_entries=False)
        return int(part.rows.nbytes + left.waiting.nbytes + right.waiting.nbytes)

    @property
    def _now(self) -> int:
        """The watermark in microseconds: rows of later batches are later."""
        return self._watermark * 1000

    def _final_at(self, times: Times, places: Times, distances: Times) -> Times:
        """Return the watermark at which the right row of each left row is final."""
        asof = self._logic.asof
        if asof.direction == BACKWARD:
            return times
        # A row that comes in a later batch is later than the watermark: after the row that was found, or farther away.
        final_times: Times = np.where(places == NO_ROW, NO_TIME, times + np.where(places == NO_ROW, 0, distances))
        if asof.tolerance_us is not None:
            final_times = np.minimum(final_times, times + asof.tolerance_us)
        return np.maximum(final_times, times)

    def _kept(self, rows: SortedRows, waiting: Times) -> tuple[Mask, Times]:
        """Return which right rows a left row may still get, and when to look at them again.

        ``waiting`` has for each key the time of its first left row that waits. Left rows to come are later than
        the watermark.
        """
        asof = self._logic.asof
        is_later = rows.times > self._now
        due_at = np.where(is_later, rows.times, NO_TIME)
        if asof.direction == FORWARD:
            return is_later, due_at
        earliest = np.minimum(waiting - (0 if asof.allow_exact else 1), self._now)
        last = rows.last_before(np.arange(len(waiting)), earliest, or_at=True)
        kept: Mask = np.arange(len(rows.ids)) >= last[rows.ids]
        if asof.tolerance_us is not None:
            kept &= rows.times >= np.minimum(waiting, self._now)[rows.ids] - asof.tolerance_us
            due_at = np.where(is_later, rows.times, rows.times + asof.tolerance_us + 1)
        return kept, due_at
