"""The matching rows of two sides: those with one key whose times are within the bounds. No loop per row.

The rows of one side are sorted by key and time. The matches of a row of the other side then lie together, and are found
by two binary searches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.encoding.columns import Integers
from spark_bridge.operators.join.sides import NO_TIME

PAIRS_AT_ONCE = 1 << 16
"""Matches that are made rows at once, at most."""


@dataclass(frozen=True)
class RowsToMatch:
    """Rows of one side: the places of their keys, their times in microseconds, and their numbers."""

    ids: Integers
    times: Integers
    numbers: Integers

    def where(self, chosen: npt.NDArray[np.bool_]) -> RowsToMatch:
        """Return some of the rows."""
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

    The bounds, in microseconds, are those of the other row's time minus the probe's. None is no bound.
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
    """Return the times moved; times that would be too large or too small are the greatest or least ones."""
    low, high = np.iinfo(np.int64).min, NO_TIME
    return np.clip(times, max(low, low - by), min(high, high - by)) + by
