"""Finds the row of the other side that is nearest in time, as pandas' ``merge_asof`` chooses it. No loop per row.

The rows of the right side are sorted by key, time and, where times are equal, by their columns. The match of a left row
is then next to the place that a binary search finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import Integers, Mask, null_mask
from spark_bridge.aggregates.column_order import order_codes, plain
from spark_bridge.operators.join.sides import NO_TIME

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
        """Return for both sides how far the watermark may be behind a row's time when the row comes, None for any.

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
        found: Integers = np.searchsorted(
            self._places,
            ids * self._span + np.searchsorted(self._distinct, times, "right" if or_at else "left"),
            "left",
        )
        return found

    def last_before(self, ids: Integers, times: Integers, *, or_at: bool) -> Integers:
        """Return the place of the last row of a key before each time, ``NO_ROW`` if there is none."""
        places = self.number_before(ids, times, or_at=or_at) - 1
        return self._of_key(places, ids)

    def first_behind(self, ids: Integers, times: Integers, *, or_at: bool) -> Integers:
        """Return the place of the first row of a key after each time, ``NO_ROW`` if there is none."""
        return self._of_key(self.number_before(ids, times, or_at=not or_at), ids)

    def _of_key(self, places: Integers, ids: Integers) -> Integers:
        is_there = (places >= 0) & (places < len(self.ids))
        is_there[is_there] = self.ids[places[is_there]] == ids[is_there]
        return np.where(is_there, places, NO_ROW)


def nearest(asof: Asof, ids: Integers, times: Integers, rows: SortedRows) -> tuple[Integers, Integers]:
    """Return for each left row the place of its right row in ``rows``, and how far their times are apart.

    ``NO_ROW`` and ``NO_TIME`` where there is no row, whatever the tolerance says.
    """
    before = np.full(len(ids), NO_ROW)
    behind = before
    if asof.direction != FORWARD:
        before = rows.last_before(ids, times, or_at=asof.allow_exact)
    if asof.direction != BACKWARD:
        behind = rows.first_behind(ids, times, or_at=asof.allow_exact)
    distances = [_distance(places, times, rows) for places in (before, behind)]
    is_before = distances[0] <= distances[1]  # as pandas has it, also of two that are equally far
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
    # So that the result does not depend on the order in which rows come.
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
