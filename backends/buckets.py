"""Counts of durations by buckets with fixed bounds, as Prometheus's histograms have them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class HistogramBuckets:
    """The counts of a histogram. ``cumulative`` has for each of ``bounds`` the values that were not above the bound.

    ``count`` are all values, ``total`` is their sum. Those of several processes add up, for their bounds are the same.
    """

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    count: int
    total: float


class BucketCounts:
    """Counts values since the process began. Not safe from several threads."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value ``times`` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def read(self) -> HistogramBuckets:
        """Return the counts as they are now."""
        cumulative: list[int] = []
        seen = 0
        for count in self._counts[:-1]:
            seen += count
            cumulative.append(seen)
        return HistogramBuckets(self._bounds, tuple(cumulative), seen + self._counts[-1], self._total)
