"""A cache of pairs in front of RocksDB, which answers a thousand keys at once for a tenth of a microsecond each.

RocksDB takes some microseconds per key, partly for the calls and Python objects of each key. This cache stores keys and
values in append-only arrays, and a hash table in numpy maps a key to its row (``cache_table``). A look-up is a few
calls of numpy and Arrow for all its keys together, and makes no Python object per key. A dict of the same pairs takes
several times as long and twice the memory.

When the arrays are full, all rows that the table still refers to move to new arrays, as in a log-structured store. If
the arrays may not grow, the oldest rows are dropped.

Readers take no lock: they keep the rows that they began with (``CachedRows``), and those rows do not change. Writers
take a lock, one per cache.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from backends.encoding.columns import MAX_BYTES, content_bytes, even_rows
from backends.engines.cached_rows import (
    ABSENT,
    ROW,
    EvenRows,
    Ints,
    KeyHashes,
    VaryingRows,
    Widths,
    common_widths,
    hash_keys,
    widths_of,
)

CACHE_STEP_ROWS = 1 << 13
"""Keys that are looked up at once: so few that their temporary arrays stay in a processor's cache."""
ROW_BYTES = 44
"""The most bytes that a row takes in addition to its key and value."""
SPARED_BYTES = 16
"""If most keys have no value, values longer than this are stored in a separate array."""
CachedRows: TypeAlias = EvenRows | VaryingRows
_NOTHING: CachedRows = VaryingRows(0, 0, 0)


class _Share:
    """The bytes that a cache has, until it releases this share, or until the cache is garbage-collected."""

    __slots__ = ("__weakref__", "_gone", "cache", "nbytes", "number")

    def __init__(self, cache: RowCache, gone: deque[tuple[int, int]], number: int, nbytes: int) -> None:
        self.cache = weakref.ref(cache)
        self._gone = gone
        self.number = number
        self.nbytes = nbytes

    def __del__(self) -> None:
        # Any allocation may end a share, including one that is made under the budget's lock: so this takes no lock.
        self._gone.append((self.number, self.nbytes))


class CacheBudget:
    """The memory that all caches of a process may have together, ``limit`` bytes, or less while ``room()`` is less.

    A cache may use the memory that the others leave, and always its equal share: if necessary, caches above their share
    are emptied. While a cache moves to new arrays, its old arrays still take memory. The budget keeps a total, and the
    caches in a heap by size. So the time of an allocation grows with the logarithm of the number of caches (one per
    partition and column family), and with the number of caches that are emptied.

    ``_lock`` guards allocations. A cache is emptied without the lock: any allocation of memory, including one made
    here, may release a scan that is no longer referred to, and with it the copy that the scan has read, and the cache
    of that copy.
    """

    def __init__(self, limit: int, room: Callable[[], int] | None = None) -> None:
        self._limit = limit
        self._room = room
        self._lock = threading.Lock()
        self._used = 0
        self._shares: dict[int, weakref.ref[_Share]] = {}
        self._largest: list[tuple[int, int]] = []
        """A heap of the shares, each as its negative size and its number; some of them are gone."""
        self._gone: deque[tuple[int, int]] = deque()
        self._number = 0
        self._asked = self._hits = 0

    def count(self, asked: int, hits: int) -> None:
        """Count requested keys, and those of them that a cache had. For people: threads may lose a count."""
        self._asked += asked
        self._hits += hits

    @property
    def counts(self) -> dict[str, int]:
        """The keys that were requested since the start, and those of them that a cache had."""
        return {"asked": self._asked, "hits": self._hits}

    @property
    def limit(self) -> int:
        """The bytes that all caches may have now."""
        return self._limit if self._room is None else min(self._limit, self._room())

    @property
    def used(self) -> int:
        """The bytes that all caches have now."""
        with self._lock:
            self._settle()
            return self._used

    def shrink(self) -> None:
        """Empty caches, the largest first, until their total is within the limit."""
        with self._lock:
            self._empty(self.limit)

    def allowance(self, cache: RowCache) -> int:
        """Return the most bytes that ``cache`` may have now."""
        with self._lock:
            return self._allowed(cache.share)

    def give(self, cache: RowCache, rows: CachedRows) -> bool:
        """Give ``cache`` these rows in place of its current ones.

        Return False if there is no room: the cache is empty then.
        """
        cache.rows, cache.share = _NOTHING, None
        if rows is _NOTHING:
            return True
        with self._lock:
            nbytes = rows.nbytes
            if nbytes > self._allowed(None):
                return False
            self._empty(self.limit - nbytes)
            self._number += 1
            share = _Share(cache, self._gone, self._number, nbytes)
            self._shares[share.number] = weakref.ref(share)
            self._used += nbytes
            heappush(self._largest, (-nbytes, share.number))
            cache.rows, cache.share = rows, share
            return True

    def _allowed(self, own: _Share | None) -> int:
        """Return the most bytes that the cache with this share may have."""
        self._settle()
        limit, used, others = self.limit, self._used, len(self._shares)
        if own is not None:
            used, others = used - own.nbytes, others - 1
        return max(limit - used, limit // (others + 1))

    def _empty(self, limit: int) -> None:
        self._settle()
        while self._largest and self._used > limit:
            number = heappop(self._largest)[1]
            found = self._shares.get(number)
            share = None if found is None else found()
            cache = None if share is None else share.cache()
            if cache is not None and cache.share is share:
                # Its writer may be about to change these rows, which does no harm: no reader uses them any more.
                cache.rows, cache.share = _NOTHING, None
            found = share = cache = None  # or the share would live on
            self._settle()

    def _settle(self) -> None:
        """Subtract the shares that caches have released."""
        while self._gone:
            number, nbytes = self._gone.popleft()
            if self._shares.pop(number, None) is not None:
                self._used -= nbytes
        if len(self._largest) > 2 * len(self._shares) + 16:
            self._largest = [entry for entry in self._largest if entry[1] in self._shares]
            heapify(self._largest)


class RowCache:
    """The pairs of one column family that were read last, and the keys found to be absent, for any number of threads.

    A writer of the column family must call ``update`` after its write, before anyone may rely on the write, and
    ``clear`` if it does not know what was written. ``_lock`` is held while the rows are changed.
    """

    def __init__(self, budget: CacheBudget) -> None:
        self._budget = budget
        self.rows = _NOTHING
        self.share: _Share | None = None
        """The budget's count of the rows; only the budget sets both."""
        self._epoch = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The bytes of memory."""
        return self.rows.nbytes

    def get_many(
        self, keys: pa.BinaryArray, read: Callable[[pa.BinaryArray], pa.BinaryArray], *, keep: bool = True
    ) -> pa.BinaryArray:
        """Return the values of keys, in their order; null where a key has none.

        ``read`` reads the keys that are not held; with ``keep`` they are held afterwards.
        """
        if len(keys) <= CACHE_STEP_ROWS:
            return self._get_step(keys, read, keep)
        steps = (keys.slice(at, CACHE_STEP_ROWS) for at in range(0, len(keys), CACHE_STEP_ROWS))
        return pa.concat_arrays([self._get_step(step, read, keep) for step in steps])

    def _get_step(
        self, keys: pa.BinaryArray, read: Callable[[pa.BinaryArray], pa.BinaryArray], keep: bool
    ) -> pa.BinaryArray:
        epoch = self._epoch  # first of all: pairs that are read below are kept only if nothing was written since
        rows = self.rows
        if not (rows.count or keep):
            return read(keys)
        if not rows.count:
            self._budget.count(len(keys), 0)
            values = read(keys)
            self._keep(keys, hash_keys(keys), values, epoch)
            return values
        even = even_rows(keys)
        hashes = hash_keys(keys, even)
        held, missing = rows.get(keys, even, hashes)
        if held is None:
            self._budget.count(len(keys), 0)
            values = read(keys)
            if keep:
                self._keep(keys, hashes, values, epoch)
            return values
        self._budget.count(len(keys), len(keys) - len(missing))
        if not len(missing):
            return held
        asked = keys.take(pa.array(missing))
        values = read(asked)
        if keep:
            self._keep(asked, hashes[missing], values, epoch)
        order = np.arange(len(keys))
        order[missing] = len(keys) + np.arange(len(missing))
        return pa.concat_arrays([held, values]).take(pa.array(order))

    def _keep(self, keys: pa.BinaryArray, hashes: KeyHashes, values: pa.BinaryArray, epoch: int) -> None:
        """Hold pairs that were read, unless pairs were written since, or another thread changes the rows."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if epoch != self._epoch:
                return
            n = len(keys)
            if not self.rows.has_room(keys, values):
                allowed = self._budget.allowance(self)
                while n and 2 * _needed(keys, values) > allowed:
                    n //= 2
                    keys, hashes, values = keys.slice(0, n), hashes[:n], values.slice(0, n)
            if n:
                self._insert(keys, hashes, values)
        finally:
            self._lock.release()

    def update(self, keys: pa.BinaryArray, hashes: KeyHashes, values: pa.BinaryArray) -> None:
        """Apply a write: distinct keys with their new values (null: removed). Keys that are not held stay so."""
        with self._lock:
            self._epoch += 1
            for at in range(0, len(keys), CACHE_STEP_ROWS):
                if not self.rows.count:
                    return
                self._update_step(
                    keys.slice(at, CACHE_STEP_ROWS),
                    hashes[at : at + CACHE_STEP_ROWS],
                    values.slice(at, CACHE_STEP_ROWS),
                )

    def _update_step(self, keys: pa.BinaryArray, hashes: KeyHashes, values: pa.BinaryArray) -> None:
        is_held = self.rows.has_tags(hashes)
        if not is_held.any():
            return
        if not is_held.all():
            held = pa.array(np.flatnonzero(is_held))
            keys, values, hashes = keys.take(held), values.take(held), hashes[is_held]
        self._insert(keys, hashes, values)

    def clear(self) -> None:
        """Drop all rows, and the pairs that are being read now."""
        with self._lock:
            self._epoch += 1
            self._budget.give(self, _NOTHING)

    def _insert(self, keys: pa.BinaryArray, hashes: KeyHashes, values: pa.BinaryArray) -> None:
        rows = self.rows
        if not rows.has_room(keys, values):
            rows.remove(hashes)  # their values are not right any more, so they need not move
            moved = self._moved(rows, keys, values)
            if moved is None or not self._budget.give(self, moved):
                return
            rows = moved
        first = rows.append(keys, values)
        rows.place(hashes, first, np.asarray(values.is_null()) if values.null_count else None)

    def _moved(self, rows: CachedRows, more_keys: pa.BinaryArray, more_values: pa.BinaryArray) -> CachedRows | None:
        """Return new rows with all live ones, or as many of the newest as may be, and room to grow to twice the size.

        There is room for the given pairs as well. None if they alone are too many.
        """
        live = rows.live()
        more, widths = len(more_keys), widths_of(more_keys, more_values)
        if len(live):
            widths = common_widths(rows.widths_of(live), widths)
        if widths is not None and widths[1] is not None and widths[1] > SPARED_BYTES:
            num_absent = np.count_nonzero(live & ABSENT) + more_values.null_count
            if 2 * num_absent > len(live) + more:
                widths = None  # every record has room for a value, also that of a key without one
        key_sizes, value_sizes = _sizes(live, rows, widths)
        if widths is None:
            key_bytes, value_bytes = content_bytes(more_keys), content_bytes(more_values)
        else:
            key_bytes, value_bytes = more * widths[0], more * (widths[1] or 0)
        allowed = min(self._budget.allowance(self), MAX_BYTES)
        left = allowed // 2 - key_bytes - value_bytes - ROW_BYTES * more
        if left < 0:
            return None
        from_newest = np.cumsum((key_sizes + value_sizes + ROW_BYTES)[::-1])
        kept = int(np.searchsorted(from_newest, left, side="right"))
        dropped = len(live) - kept
        live, key_sizes, value_sizes = (a[dropped:] for a in (live, key_sizes, value_sizes))
        made: CachedRows
        if widths is None:
            key_bytes, value_bytes = key_bytes + int(key_sizes.sum()), value_bytes + int(value_sizes.sum())
            made = VaryingRows(2 * (kept + more), 2 * key_bytes, 2 * value_bytes)
        else:
            made = EvenRows(2 * (kept + more), widths)
        if kept:
            keys, values = rows.pairs(live)
            made.append(keys, values)
            if made.buckets.shape == rows.buckets.shape:
                made.place_as(rows, live & ROW)
            else:
                hashes, is_absent = hash_keys(keys), (live & ABSENT) != 0
                for at in range(0, kept, CACHE_STEP_ROWS):
                    made.place(hashes[at : at + CACHE_STEP_ROWS], at, is_absent[at : at + CACHE_STEP_ROWS])
        return made


def _sizes(live: Ints, rows: CachedRows, widths: Widths | None) -> tuple[Ints, Ints]:
    """Return the bytes that the keys, and that the values of these rows will take."""
    if widths is None:
        key_sizes, value_sizes = rows.sizes(live & ROW)
        value_sizes[(live & ABSENT) != 0] = 0
        return key_sizes, value_sizes
    return np.full(len(live), widths[0]), np.full(len(live), widths[1] or 0)


def _needed(keys: pa.BinaryArray, values: pa.BinaryArray) -> int:
    return content_bytes(keys) + content_bytes(values) + ROW_BYTES * len(keys)
