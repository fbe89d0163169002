"""The hash table of a ``RowCache``, which says which row a key has.

The table is set-associative, as processors' caches are: a hash leads to a bucket of ``WAYS`` entries, each with a tag
of 16 more bits and the number of a row. At most one entry of a bucket has a given tag, so an entry is replaced without
comparing keys. A look-up compares whole keys, so that colliding hashes push each other out and never give a wrong
value.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.engines.key_hashes import UPPER_HALF, KeyHashes

WAYS = 8
"""Entries of a bucket: 64 bytes, a line of a processor's cache."""

Ints = npt.NDArray[np.int64]

_EMPTY = -1
TAG_SHIFT = 47
_TAG = np.uint64(0xFFFF)
ABSENT = np.int64(1 << 46)
ROW = np.int64((1 << 46) - 1)
_ROUNDS = 2 * WAYS


class CacheTable:
    """The hash table, with room for a given number of rows, of which the first ``count`` are there.

    Rows below ``count`` never change. ``count`` is raised when a row is complete, and only then does the table refer to
    the row. So a reader that takes ``count`` first, and then trusts the table for rows below ``count`` only, never sees
    half a row.
    """

    __slots__ = ("buckets", "count", "number")

    def __init__(self, rows: int) -> None:
        number = _num_buckets(rows)
        self.buckets: Ints = np.full((number, WAYS), _EMPTY, np.int64)
        self.number = np.uint64(number)
        self.count = 0

    def buckets_of(self, hashes: KeyHashes) -> tuple[Ints, Ints, Ints]:
        """Return for each hash its bucket's number, its tag, and the bucket's entries."""
        # The upper half of the hash, as a fraction of 1, times the number of buckets.
        at = (((hashes >> UPPER_HALF) * self.number) >> UPPER_HALF).view(np.int64)
        return at, (hashes & _TAG).view(np.int64), self.buckets.take(at, axis=0)

    def match(self, hashes: KeyHashes) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Return for each hash its bucket's number, its tag, the bucket's entries, and the way and entry that have the
        tag.

        Any way and its entry, if none has the tag.
        """
        at, tags, held = self.buckets_of(hashes)
        ways = ((held >> TAG_SHIFT) == tags[:, None]).argmax(axis=1)
        entries = held.reshape(-1).take(ways + np.arange(0, WAYS * len(hashes), WAYS))
        return at, tags, held, ways, entries

    def has_tags(self, hashes: KeyHashes) -> npt.NDArray[np.bool_]:
        """Return for each hash whether there is an entry that ``place`` would replace."""
        _, tags, _, _, entries = self.match(hashes)
        has: npt.NDArray[np.bool_] = (entries >> TAG_SHIFT) == tags
        return has

    def place(self, hashes: KeyHashes, first: int, is_absent: npt.NDArray[np.bool_] | None) -> None:
        """Enter the rows from ``first`` on, which have these hashes.

        They replace rows with the same tag in the same bucket; of several new ones with the same tag in the same bucket
        one remains. Some rows may find no place, if very many go to one bucket.
        """
        table = self.buckets.reshape(-1)
        new = first + np.arange(len(hashes))
        if is_absent is not None:
            new[is_absent] |= ABSENT
        for attempt in range(_ROUNDS):
            at, tags, held, ways, entries = self.match(hashes)
            is_other = (entries >> TAG_SHIFT) != tags
            if attempt and not is_other.all():
                # The older entry was replaced in the first round, so the tag is now that of one of these rows: it
                # stays.
                hashes, new, at, tags, held = (a[is_other] for a in (hashes, new, at, tags, held))
                ways = _oldest(held)
            elif is_other.any():
                ways[is_other] = _oldest(held[is_other])
            slots = at * WAYS + ways
            entries = (tags << TAG_SHIFT) | new
            table[slots] = entries
            lost = table[slots] != entries  # several rows went to the same slot
            if not lost.any():
                return
            hashes, new = hashes[lost], new[lost]

    def remove(self, hashes: KeyHashes) -> None:
        """Remove the entries of these hashes."""
        at, tags, _, ways, entries = self.match(hashes)
        has = (entries >> TAG_SHIFT) == tags
        self.buckets[at[has], ways[has]] = _EMPTY

    def live(self) -> Ints:
        """Return the entries of all rows that have one, those of the oldest rows first."""
        entries = self.buckets[self.buckets >= 0]
        by_row: Ints = np.full(self.count, _EMPTY, np.int64)
        by_row[entries & ROW] = entries
        return by_row[by_row >= 0]

    def place_as(self, rows: CacheTable, numbers: Ints) -> None:
        """Enter the first rows here as ``rows``, with a table of the same size, has entered those of these numbers."""
        moved_to: Ints = np.full(rows.count, _EMPTY, np.int64)
        moved_to[numbers] = np.arange(len(numbers))
        table = rows.buckets.reshape(-1)
        at = np.flatnonzero(table >= 0)
        entries = table[at]
        to = moved_to[entries & ROW]
        stays = to >= 0
        self.buckets.reshape(-1)[at[stays]] = (entries[stays] & ~ROW) | to[stays]


def _num_buckets(rows: int) -> int:
    """Return the number of buckets with which the table is at most a quarter full.

    In a table that is half full, one row in 400 would find no place in its bucket. Rounded up by an eighth at most, so
    that a cache of a steady size keeps its number.
    """
    wanted = max(16, rows * 4 // WAYS)
    step = 1 << max(0, wanted.bit_length() - 4)
    return -(-wanted // step) * step


def _oldest(held: Ints) -> Ints:
    """Return for each bucket the way that is empty, or was filled first."""
    ways: Ints = np.where(held < 0, _EMPTY, held & ROW).argmin(axis=1)
    return ways
