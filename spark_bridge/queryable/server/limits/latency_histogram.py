"""A histogram of latencies, for percentiles in little memory."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

SUB_BUCKETS = 8
"""Buckets per power of two. A percentile is the middle of its bucket, so it is wrong by 1/16 (6 %) at most."""
OCTAVES = 26
"""Powers of two, from 1 microsecond to 67 seconds (2^26 microseconds). Faster and slower requests count as the first or
last.
"""
QUANTILES = (0.5, 0.9, 0.99)
_frexp = math.frexp


class LatencyHistogram:
    """Counts by the logarithm of a latency, in 1.6 KB; not safe from several threads.

    After HdrHistogram (Gil Tene): powers of two, each in linear steps.
    """

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = array("Q", bytes(8 * SUB_BUCKETS * OCTAVES))
        self.total = 0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bucket_of(seconds)] += 1
        self.total += 1

    def since(self, earlier: LatencyHistogram) -> LatencyHistogram:
        """Return the latencies added since an earlier copy."""
        difference = LatencyHistogram()
        difference.counts = array("Q", [a - b for a, b in zip(self.counts, earlier.counts, strict=True)])
        difference.total = self.total - earlier.total
        return difference

    def copy(self) -> LatencyHistogram:
        """Return a copy of the counts as they are now."""
        copied = LatencyHistogram()
        copied.counts = self.counts[:]
        copied.total = self.total
        return copied

    def counts_up_to(self, bounds: Sequence[float]) -> list[int]:
        """Return how many latencies were at most each bound, in ascending seconds, and then how many there are.

        A bucket counts for the first bound that its middle does not exceed.
        """
        found = [0] * (len(bounds) + 1)
        for bucket, count in enumerate(self.counts):
            if count:
                found[bisect_left(bounds, middle_of(bucket))] += count
        return list(accumulate(found))

    def quantiles(self, wanted: tuple[float, ...] = QUANTILES) -> list[float]:
        """Return the latencies in seconds that the shares ``wanted`` (ascending) did not exceed.

        0.0 without requests.
        """
        if not self.total:
            return [0.0] * len(wanted)
        found: list[float] = []
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            while len(found) < len(wanted) and seen >= wanted[len(found)] * self.total:
                found.append(middle_of(bucket))
            if len(found) == len(wanted):
                break
        return found


def bucket_of(seconds: float) -> int:
    """Return the bucket of a latency in seconds."""
    mantissa, exponent = _frexp(seconds * 1e6)
    if exponent < 1:
        return 0
    if exponent > OCTAVES:
        return SUB_BUCKETS * OCTAVES - 1
    return (exponent - 1) * SUB_BUCKETS + int((mantissa - 0.5) * (2 * SUB_BUCKETS))


def middle_of(bucket: int) -> float:
    """Return the middle of a bucket, in seconds."""
    octave, step = divmod(bucket, SUB_BUCKETS)
    return float(1 << octave) * (1 + (step + 0.5) / SUB_BUCKETS) * 1e-6
