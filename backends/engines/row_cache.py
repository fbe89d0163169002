"""A cache of pairs in front of RocksDB, which answers a thousand keys at once for a tenth of a microsecond each.

RocksDB takes some microseconds per key, partly for the calls and Python objects of each key. This cache stores keys and
values in append-only arrays, and a hash table in numpy maps a key to its row (``row_cache_table``). A look-up is a few
calls of numpy and Arrow for all its keys together, and makes no Python object per key. A dict of the same pairs takes
several times as long and twice the memory.

When the arrays are full, all rows that the table still refers to move to new arrays, as in a log-structured store. If
the arrays may not grow, the oldest rows are dropped.

Readers take no lock: they keep the rows that they began with (``CachedRows``), and those rows do not change. Writers
take a lock, one per cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeAlias
from weakref import ref

import numpy as np
import pyarrow as pa

from backends.encoding.columns import MAX_BYTES, content_bytes, even_rows, take_binary
from backends.engines import row_cache_table
from backends.host_memory import Claim, HostMemory

CACHE_STEP_ROWS = 1 << 13
"""Keys that are looked up at once: so few that their temporary arrays stay in a processor's cache."""
MIN_KEPT = 64
"""A read adds its missing keys once this many keys were missing since the last addition, in it and in earlier reads.

A read counts at least a sixteenth of its keys as missing, so that large reads with few missing keys add them. An
addition takes as long as reading some thirty keys from RocksDB, or a thousand from here. Keys that are read often are
soon among those that are added.
"""
ROW_BYTES = 44
"""The most bytes that a row takes in addition to its key and value."""
SPARED_BYTES = 16
"""If most keys have no value, values longer than this are stored in a separate array."""
CachedRows: TypeAlias = row_cache_table.EvenRows | row_cache_table.VaryingRows
_NOTHING: CachedRows = row_cache_table.VaryingRows(0, 0, 0)


class RowCache:
    """The pairs of one column family that were read last, and the keys found to be absent, for any number of threads.

    A writer of the column family must call ``update`` after its write, before anyone may rely on the write, and
    ``clear`` if it does not know what was written. ``_lock`` is held while the rows are changed. ``memory`` may still
    empty the cache at any time. A writer then changes rows that no reader uses any more.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self.rows = _NOTHING
        self.claim: Claim | None = None
        """Counts the memory of the rows."""
        self._epoch = 0
        self._unkept = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The bytes of memory."""
        return self.rows.nbytes

    def get_many(
        self, keys: pa.BinaryArray, read: Callable[[pa.BinaryArray], pa.BinaryArray], *, keep: bool = True
    ) -> pa.BinaryArray:
        """Return the values of keys, in their order; null where a key has none.

        ``read`` reads the keys that are not held; with ``keep`` they may be held afterwards (``MIN_KEPT``).
        """
        if len(keys) <= CACHE_STEP_ROWS:
            return self._get_step(keys, read, keep)
        steps = (keys.slice(at, CACHE_STEP_ROWS) for at in range(0, len(keys), CACHE_STEP_ROWS))
        return pa.concat_arrays([self._get_step(step, read, keep) for step in steps])

    def _get_step(
        self, keys: pa.BinaryArray, read: Callable[[pa.BinaryArray], pa.BinaryArray], keep: bool
    ) -> pa.BinaryArray:
        epoch = self._epoch  # before the reads: their pairs are kept only if nothing was written since then
        rows = self.rows
        if not (rows.count or keep):
            return read(keys)
        even = even_rows(keys)
        hashes = row_cache_table.hash_keys(keys, even)
        num_missing = 0

        def read_missing(missing: row_cache_table.Ints) -> pa.BinaryArray:
            nonlocal num_missing
            num_missing = len(missing)
            is_all = len(missing) == len(keys)
            asked = keys if is_all else take_binary(keys, missing)
            values = read(asked)
            if keep:
                self._unkept += max(len(missing), len(keys) // 16)
                if self._unkept >= MIN_KEPT:
                    self._keep(asked, hashes if is_all else hashes[missing], values, epoch)
            return values

        values = rows.get(keys, even, hashes, read_missing)
        self._memory.count_rows(len(keys), len(keys) - num_missing)
        return values

    def _keep(
        self, keys: pa.BinaryArray, hashes: row_cache_table.KeyHashes, values: pa.BinaryArray, epoch: int
    ) -> None:
        """Hold pairs that were read, unless pairs were written since the read, or another thread changes the rows."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if epoch != self._epoch:
                return
            n = len(keys)
            if not self.rows.has_room(keys, values):
                allowed = self._memory.row_allowance(self.claim)
                while n and 2 * _needed(keys, values) > allowed:
                    n //= 2
                    keys, hashes, values = keys.slice(0, n), hashes[:n], values.slice(0, n)
            if n:
                self._insert(keys, hashes, values)
            self._unkept = 0
        finally:
            self._lock.release()

    def update(self, keys: pa.BinaryArray, hashes: row_cache_table.KeyHashes, values: pa.BinaryArray) -> None:
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

    def _update_step(self, keys: pa.BinaryArray, hashes: row_cache_table.KeyHashes, values: pa.BinaryArray) -> None:
        is_held = self.rows.has_tags(hashes)
        if not is_held.any():
            return
        if not is_held.all():
            positions = pa.array(np.flatnonzero(is_held))
            keys, values, hashes = keys.take(positions), values.take(positions), hashes[is_held]
        self._insert(keys, hashes, values)

    def clear(self) -> None:
        """Drop all rows, and the pairs that are being read now."""
        with self._lock:
            self._epoch += 1
            self.drop_rows()

    def drop_rows(self) -> None:
        """Hold no rows. Takes no lock: ``memory`` calls this, and any allocation may end a cache."""
        self.rows, self.claim = _NOTHING, None

    def _hold(self, rows: CachedRows) -> bool:
        """Hold these rows in place of the current ones; return False if there is no room: the cache is empty then."""
        self.drop_rows()  # before the claim: there may not be room for the old and the new rows at once
        claim = self._memory.claim_rows(rows.nbytes, partial(_empty_if_dropped, ref(self)))
        if claim is None:
            return False
        self.rows, self.claim = rows, claim
        if claim.is_dropped:  # by another thread, which found nothing here
            self.drop_rows()
        return True

    def _insert(self, keys: pa.BinaryArray, hashes: row_cache_table.KeyHashes, values: pa.BinaryArray) -> None:
        rows = self.rows
        if not rows.has_room(keys, values):
            rows.remove(hashes)  # these keys get new values, so their old ones need not move
            moved = self._moved(rows, keys, values)
            if moved is None or not self._hold(moved):
                return
            rows = moved
        first = rows.append(keys, values)
        rows.place(hashes, first, np.asarray(values.is_null()) if values.null_count else None)

    def _moved(self, rows: CachedRows, more_keys: pa.BinaryArray, more_values: pa.BinaryArray) -> CachedRows | None:
        """Return new rows that hold the live ones, with room for more pairs and for growing to twice the size.

        If that exceeds the cache's share of memory, only the newest live rows move. Return None if there is no room for
        the other pairs alone.
        """
        live, num_more = rows.live(), len(more_keys)
        widths = _widths_of_all(rows, live, more_keys, more_values)
        key_sizes, value_sizes = _sizes(live, rows, widths)
        if widths is None:
            key_bytes, value_bytes = content_bytes(more_keys), content_bytes(more_values)
        else:
            key_bytes, value_bytes = num_more * widths[0], num_more * (widths[1] or 0)
        allowed = min(self._memory.row_allowance(self.claim), MAX_BYTES)
        bytes_for_live = allowed // 2 - key_bytes - value_bytes - ROW_BYTES * num_more
        if bytes_for_live < 0:
            return None
        from_newest = np.cumsum((key_sizes + value_sizes + ROW_BYTES)[::-1])
        num_moved = int(np.searchsorted(from_newest, bytes_for_live, side="right"))
        num_dropped = len(live) - num_moved
        live, key_sizes, value_sizes = (a[num_dropped:] for a in (live, key_sizes, value_sizes))
        moved_rows: CachedRows
        if widths is None:
            key_bytes, value_bytes = key_bytes + int(key_sizes.sum()), value_bytes + int(value_sizes.sum())
            moved_rows = row_cache_table.VaryingRows(2 * (num_moved + num_more), 2 * key_bytes, 2 * value_bytes)
        else:
            moved_rows = row_cache_table.EvenRows(2 * (num_moved + num_more), widths)
        if num_moved:
            _move(rows, live, moved_rows)
        return moved_rows


def _widths_of_all(
    rows: CachedRows, live: row_cache_table.Ints, more_keys: pa.BinaryArray, more_values: pa.BinaryArray
) -> row_cache_table.Widths | None:
    """Return the widths of records that can hold the live rows and more pairs; None if their sizes must vary."""
    widths = row_cache_table.widths_of(more_keys, more_values)
    if len(live):
        widths = row_cache_table.common_widths(rows.widths_of(live), widths)
    if widths is not None and widths[1] is not None and widths[1] > SPARED_BYTES:
        num_absent = np.count_nonzero(live & row_cache_table.ABSENT) + more_values.null_count
        if 2 * num_absent > len(live) + len(more_keys):
            return None  # each record would have room for a value, although most keys have none
    return widths


def _move(rows: CachedRows, live: row_cache_table.Ints, target: CachedRows) -> None:
    """Copy the live rows of ``rows`` into ``target``, which is empty, and enter them in its table."""
    keys, values = rows.pairs(live)
    target.append(keys, values)
    if target.buckets.shape == rows.buckets.shape:
        target.place_as(rows, live & row_cache_table.ROW)
        return
    hashes, is_absent = row_cache_table.hash_keys(keys), (live & row_cache_table.ABSENT) != 0
    for at in range(0, len(live), CACHE_STEP_ROWS):
        target.place(hashes[at : at + CACHE_STEP_ROWS], at, is_absent[at : at + CACHE_STEP_ROWS])


def _sizes(
    live: row_cache_table.Ints, rows: CachedRows, widths: row_cache_table.Widths | None
) -> tuple[row_cache_table.Ints, row_cache_table.Ints]:
    """Return the bytes that the keys, and that the values of these rows will take."""
    if widths is None:
        key_sizes, value_sizes = rows.sizes(live & row_cache_table.ROW)
        value_sizes[(live & row_cache_table.ABSENT) != 0] = 0
        return key_sizes, value_sizes
    return np.full(len(live), widths[0]), np.full(len(live), widths[1] or 0)


def _needed(keys: pa.BinaryArray, values: pa.BinaryArray) -> int:
    return content_bytes(keys) + content_bytes(values) + ROW_BYTES * len(keys)


def _empty_if_dropped(reference: ref[RowCache]) -> None:
    """Empty a cache whose claim was dropped. A cache that has replaced its rows since has another claim."""
    cache = reference()
    if cache is not None and cache.claim is not None and cache.claim.is_dropped:
        cache.drop_rows()
