"""The input of all contestants: batches of rows as files of JSON lines, and the totals that they must give."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
Totals = dict[int, tuple[int, int]]
"""By user the count and the sum."""
SLICES = 10
"""Files of a batch. A file is a slice of the input; contestants take them in order, in turns of so many slices."""
LARGEST = 100_000
OLDEST = 1_700_000_000
"""Seconds since 1970. Spark takes files in the order of their times, which are those of their batch."""


@dataclass(frozen=True)
class Given:
    """Slices of ``rows`` rows of random users below ``keys``, and by slice the counts and sums of its rows alone."""

    directory: Path
    rows: int
    keys: int
    counts: Longs
    sums: Longs

    def expected(self, slices: int) -> Totals:
        """Return the totals behind the first slices, of the users that had a row."""
        if slices > len(self.counts):
            raise ValueError(f"There are {len(self.counts)} slices, not {slices}.")
        counts, sums = self.counts[:slices].sum(0), self.sums[:slices].sum(0)
        seen = np.flatnonzero(counts)
        return dict(zip(seen.tolist(), zip(counts[seen].tolist(), sums[seen].tolist(), strict=True), strict=True))

    def feed(self, inbox: Path, first: int, slices: int) -> None:
        """Put slices into a contestant's input; each file appears as a whole."""
        for i in range(first, first + slices):
            os.link(self.directory / name_of(i), inbox / name_of(i))


def make(directory: Path, rows: int, keys: int, slices: int) -> Given:
    """Make slices of ``rows`` rows; the same sizes give the same bytes."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(20130101)
    counts, sums = np.zeros((slices, keys), np.int64), np.zeros((slices, keys), np.int64)
    for i in range(slices):
        users, amounts = rng.integers(0, keys, rows), rng.integers(1, LARGEST, rows)
        np.add.at(counts[i], users, 1)
        np.add.at(sums[i], users, amounts)
        write(directory, i, users, amounts)
    return Given(directory, rows, keys, counts, sums)


def write(directory: Path, i: int, users: Longs, amounts: Longs) -> None:
    """Write slice i; the file appears as a whole."""
    path = directory / name_of(i)
    draft = directory.parent / f".{path.name}"
    rows = zip(users.tolist(), amounts.tolist(), strict=True)
    draft.write_text("".join(f'{{"user":{user},"amount":{amount}}}\n' for user, amount in rows))
    os.utime(draft, (OLDEST + i // SLICES, OLDEST + i // SLICES))
    draft.rename(path)


def name_of(i: int) -> str:
    return f"{i:06}.json"


def with_one_more(totals: Mapping[int, tuple[int, int]]) -> Totals:
    """Return the totals behind one more row of each user, of the amount 0."""
    return {user: (n + 1, spent) for user, (n, spent) in totals.items()}
