"""What every key of the stream has at every version, known without the stream.

Row ``n`` is of key ``n * STEP % keys``: each key comes once in ``keys`` rows. A batch has ``rows`` rows, and version
``v`` is made of rows 0 to ``v * rows - 1``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

STEP = 618_033
"""Shares no factor with a power of ten."""

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """How many keys the state has, a power of ten, and how many rows a batch."""

    keys: int
    rows: int

    def firsts(self, keys: Integers) -> Integers:
        """Return the number of each key's first row."""
        return keys * pow(STEP, -1, self.keys) % self.keys

    def totals(self, keys: Integers, version: int) -> tuple[Integers, Integers]:
        """Return how many rows each key has at a version, and the sum of their numbers."""
        first = self.firsts(keys)
        count = np.maximum(0, -((first - version * self.rows) // self.keys))
        return count, count * first + self.keys * (count * (count - 1) // 2)

    def version_of(self, keys: Integers, counts: Integers, sums: Integers, versions: range) -> int | None:
        """Return the newest version of ``versions`` that gives the keys these counts and sums; None if none does."""
        for version in reversed(versions):
            expected = self.totals(keys, version)
            if (expected[0] == counts).all() and (expected[1] == sums).all():
                return version
        return None
