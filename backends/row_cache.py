"""A cache of pairs in front of RocksDB, which answers a thousand keys at once for a quarter of a microsecond each.

RocksDB takes some microseconds for a key, part of them for calls and Python objects that each key costs. Here keys and
values lie in Arrow arrays, to which rows are only ever appended, and a hash table in numpy says which row a key has. A lookup is a
few calls of numpy and Arrow for all its keys together, and makes no Python object per key. A dict of the same pairs takes several
times as long and twice the memory (``benchmarks/reads.py``).

The table is set-associative, as in processors' caches: a hash leads to a bucket of ``WAYS`` entries, each with a tag of 16 more bits and
the number of a row. At most one entry of a bucket has a given tag, so an entry is replaced without comparing keys; a lookup compares them
whole, so that colliding hashes push each other out and never give a wrong value. Where there is no more room, all rows that the table still
refers to move to new arrays, as they do in a log-structured store, the oldest being left behind if they may not grow.

Readers take no lock: they keep to the arrays that they began with (``_Rows``), of which nothing that they look at changes. Writers do, one per cache.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.columns import binary_content

WAYS = 8
"""Entries of a bucket: 64 bytes, a line of a processor's cache."""
STEP_ROWS = 1 << 13
"""Keys looked up at once: the temporary arrays of so many stay in a processor's cache."""

Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_EMPTY = -1
_TAG_SHIFT = 47
_TAG = np.uint64(0xFFFF)
_ABSENT = np.int64(1 << 46)
_ROW = np.int64((1 << 46) - 1)
_ROUNDS = 2 * WAYS
_ROW_BYTES = 44
_MOST_BYTES = (1 << 31) - 1

_HASHED_BYTES = 256
_SEED = np.uint64(secrets.randbits(64))
_STIR = np.uint64(0x9E3779B97F4A7C15)
_STIR_LAST = np.uint64(0xBF58476D1CE4E5B9)
_BYTES_MASKS = np.array([(1 << 8 * i) - 1 for i in range(9)], np.uint64)


def hash_keys(keys: pa.BinaryArray) -> Hashes:
    """A hash of 64 bits for each key, which depends on the key and on the process.

    Of a key longer than 256 bytes, the first 256, the last 8 and the length count.
    """
    content, offsets = binary_content(keys)
    n = len(keys)
    if not n:
        return np.zeros(0, np.uint64)
    widths = np.diff(offsets)
    width = int(widths[0])
    if width >= 8 and (widths == width).all():
        return _hash_fixed(content, n, width)
    starts = offsets[:-1]
    # 8 more bytes, so that a word can be read wherever a key begins.
    padded = np.zeros(len(content) + 8, np.uint8)
    padded[: len(content)] = content
    words: npt.NDArray[np.uint64] = np.ndarray((len(content) + 1,), "<u8", padded, 0, (1,))
    masks = _BYTES_MASKS[np.minimum(widths, 8)]
    hashes = _stirred(widths.astype(np.uint64) ^ _SEED, words[starts] & masks)
    hashes = _stirred(hashes, words[np.maximum(offsets[1:] - 8, starts)] & masks)
    for at in range(8, min(int(widths.max()) - 8, _HASHED_BYTES), 8):
        longer = np.flatnonzero(widths > at + 8)
        hashes[longer] = _stirred(hashes[longer], words[starts[longer] + at])
    return _finished(hashes)


def _hash_fixed(content: npt.NDArray[np.uint8], n: int, width: int) -> Hashes:
    """The same for keys of one width, in fewer steps: the words of all keys are columns, without a copy."""
    hashes = np.full(n, np.uint64(width) ^ _SEED)
    for at in (0, width - 8, *range(8, min(width - 8, _HASHED_BYTES), 8)):
        word: npt.NDArray[np.uint64] = np.ndarray((n,), "<u8", content, at, (width,))
        hashes = _stirred(hashes, word)
    return _finished(hashes)


def _stirred(hashes: Hashes, words: Hashes) -> Hashes:
    hashes = hashes ^ words
    hashes *= _STIR
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _finished(hashes: Hashes) -> Hashes:
    hashes *= _STIR_LAST
    hashes ^= hashes >> np.uint64(29)
    return hashes


class _Rows:
    """Room for so many rows, and the table that leads to them.

    Rows below ``count`` never change. ``count`` is raised when a row is complete, and only then does the table refer to it: a reader who takes
    ``count`` first, and the table's word only for rows below it, never sees half a row.
    """

    __slots__ = (
        "buckets",
        "count",
        "key_content",
        "key_offsets",
        "keys",
        "number",
        "value_content",
        "value_offsets",
        "values",
    )

    def __init__(self, rows: int, key_bytes: int, value_bytes: int) -> None:
        number = _num_buckets(rows)
        self.buckets: Ints = np.full((number, WAYS), _EMPTY, np.int64)
        self.number = np.uint64(number)
        self.count = 0
        self.key_offsets: npt.NDArray[np.int32] = np.zeros(rows + 1, np.int32)
        self.value_offsets: npt.NDArray[np.int32] = np.zeros(rows + 1, np.int32)
        self.key_content: npt.NDArray[np.uint8] = np.empty(key_bytes, np.uint8)
        self.value_content: npt.NDArray[np.uint8] = np.empty(value_bytes, np.uint8)
        # Over the same memory: what is appended is in them.
        self.keys = _over(self.key_offsets, self.key_content)
        self.values = _over(self.value_offsets, self.value_content)

    @property
    def nbytes(self) -> int:
        """Memory, used or not."""
        arrays: tuple[npt.NDArray[Any], ...] = (
            self.buckets,
            self.key_offsets,
            self.value_offsets,
            self.key_content,
            self.value_content,
        )
        return sum(array.nbytes for array in arrays)

    def has_room(self, rows: int, key_bytes: int, value_bytes: int) -> bool:
        """Whether so much can be appended."""
        count = self.count
        return (
            count + rows < len(self.key_offsets)
            and int(self.key_offsets[count]) + key_bytes <= len(self.key_content)
            and int(self.value_offsets[count]) + value_bytes <= len(self.value_content)
        )

    def _match(self, hashes: Hashes) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """For each hash its bucket's number, its tag, the bucket's entries, the way of the entry with that tag (any, if there is none) and that entry."""
        # The upper half of the hash, as a fraction of 1, times the number of buckets.
        at = (((hashes >> np.uint64(32)) * self.number) >> np.uint64(32)).view(np.int64)
        tags = (hashes & _TAG).view(np.int64)
        held = self.buckets.take(at, axis=0)
        ways = ((held >> _TAG_SHIFT) == tags[:, None]).argmax(axis=1)
        entries = held.reshape(-1).take(ways + np.arange(0, WAYS * len(hashes), WAYS))
        return at, tags, held, ways, entries

    def find(self, keys: pa.BinaryArray, hashes: Hashes) -> tuple[Ints, npt.NDArray[np.bool_] | None]:
        """The table's entry for each key, and whether that is the key's (None: all are). Other entries are of no use."""
        count = self.count
        _, tags, _, _, entries = self._match(hashes)
        rows = entries & _ROW
        is_held = (rows < count) & ((entries >> _TAG_SHIFT) == tags)
        if is_held.all():
            held_keys = self.keys.take(pa.array(rows))
            if held_keys.equals(keys):
                return entries, None
        else:
            held_keys = self.keys.take(pa.array(np.where(is_held, rows, 0)))
        is_held &= np.asarray(pc.equal(held_keys, keys))
        return entries, is_held

    def values_of(self, entries: Ints, is_held: npt.NDArray[np.bool_] | None) -> pa.BinaryArray:
        """The values of what ``find`` has found; null for what it has not, and for keys that are known to have none."""
        is_null = (entries & _ABSENT) != 0
        if is_held is not None:
            is_null |= ~is_held
        rows = entries & _ROW
        return self.values.take(pa.array(rows, mask=is_null) if is_null.any() else pa.array(rows))

    def append(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> int:
        """Add rows, for which there must be room; the number of the first one."""
        first = self.count
        _append(keys, self.key_content, self.key_offsets, first)
        _append(values, self.value_content, self.value_offsets, first)
        self.count = first + len(keys)
        return first

    def has_tags(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Whether there is an entry that ``place`` would replace by one of this hash."""
        _, tags, _, _, entries = self._match(hashes)
        has: npt.NDArray[np.bool_] = (entries >> _TAG_SHIFT) == tags
        return has

    def place(self, hashes: Hashes, first: int, is_absent: npt.NDArray[np.bool_] | None) -> None:
        """Refer to the rows from ``first``, which have these hashes, and no more to others with the same tag in the same bucket.

        Of rows with the same tag in the same bucket one remains. Some may find no place, if very many go to one bucket.
        """
        table = self.buckets.reshape(-1)
        new = first + np.arange(len(hashes))
        if is_absent is not None:
            new[is_absent] |= _ABSENT
        for attempt in range(_ROUNDS):
            at, tags, held, ways, entries = self._match(hashes)
            is_other = (entries >> _TAG_SHIFT) != tags
            if attempt and not is_other.all():
                # The older entry went in the first round, so what has the tag now is one of these very rows: it stays.
                hashes, new, at, tags, held = (a[is_other] for a in (hashes, new, at, tags, held))
                ways = _oldest(held)
            elif is_other.any():
                ways[is_other] = _oldest(held[is_other])
            slots = at * WAYS + ways
            entries = (tags << _TAG_SHIFT) | new
            table[slots] = entries
            lost = table[slots] != entries  # several rows had the same slot in mind
            if not lost.any():
                return
            hashes, new = hashes[lost], new[lost]

    def remove(self, hashes: Hashes) -> None:
        """Refer to no row with these hashes any more."""
        at, tags, _, ways, entries = self._match(hashes)
        has = (entries >> _TAG_SHIFT) == tags
        self.buckets[at[has], ways[has]] = _EMPTY

    def live(self) -> Ints:
        """The entries that refer to a row, those of the oldest rows first."""
        entries = self.buckets[self.buckets >= 0]
        by_row: Ints = np.full(self.count, _EMPTY, np.int64)
        by_row[entries & _ROW] = entries
        return by_row[by_row >= 0]

    def place_as(self, rows: _Rows, numbers: Ints) -> None:
        """Refer to the first rows as ``rows``, with a table of the same size, refers to those of these numbers."""
        moved_to: Ints = np.full(rows.count, _EMPTY, np.int64)
        moved_to[numbers] = np.arange(len(numbers))
        table = rows.buckets.reshape(-1)
        at = np.flatnonzero(table >= 0)
        entries = table[at]
        to = moved_to[entries & _ROW]
        stays = to >= 0
        self.buckets.reshape(-1)[at[stays]] = (entries[stays] & ~_ROW) | to[stays]


def _num_buckets(rows: int) -> int:
    """Enough for the table to be a quarter full at most: half full, one row in 400 would find no place in its bucket.

    Rounded up by an eighth at most, so that a cache of a steady size keeps its number.
    """
    wanted = max(16, rows * 4 // WAYS)
    step = 1 << max(0, wanted.bit_length() - 4)
    return -(-wanted // step) * step


def _oldest(held: Ints) -> Ints:
    """The way of each bucket that is empty, or was filled first."""
    ways: Ints = np.where(held < 0, _EMPTY, held & _ROW).argmin(axis=1)
    return ways


def _over(offsets: npt.NDArray[np.int32], content: npt.NDArray[np.uint8]) -> pa.BinaryArray:
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(content)], 0)


def _append(added: pa.BinaryArray, content: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int32], first: int) -> None:
    new_content, new_offsets = binary_content(added)
    at = int(offsets[first])
    content[at : at + len(new_content)] = new_content
    offsets[first + 1 : first + 1 + len(added)] = new_offsets[1:] + at


_NOTHING = _Rows(0, 0, 0)


class CacheBudget:
    """The memory that all caches of a process may have together, ``limit`` bytes.

    A cache may have what the others leave, and its equal share in any case: for that, those that have more are emptied. While a cache
    moves to new arrays, its old ones are there as well.

    A cache is emptied without the lock: a stream that nobody has any more may be released by any allocation, also by one made here, and the
    cache of the copy that it has read is emptied with it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._caches: weakref.WeakSet[RowCache] = weakref.WeakSet()

    @property
    def used(self) -> int:
        """Bytes that all caches have now."""
        with self._lock:
            return sum(self._used().values())

    def _used(self) -> dict[RowCache, int]:
        """The bytes of each cache that has any."""
        held = [(cache, cache.rows) for cache in self._caches]
        return {cache: rows.nbytes for cache, rows in held if rows is not _NOTHING}

    def allowance(self, cache: RowCache) -> int:
        """The most that ``cache`` may have now."""
        with self._lock:
            used = self._used()
            used.pop(cache, None)
            return max(self.limit - sum(used.values()), self._share(used))

    def _share(self, others: dict[RowCache, int]) -> int:
        return self.limit // (len(others) + 1)

    def give(self, cache: RowCache, rows: _Rows) -> bool:
        """Let ``cache`` have these rows in place of its own. False, and it has none, if there is no room for them."""
        cache.rows = _NOTHING
        if rows is _NOTHING:
            return True
        with self._lock:
            used = self._used()
            if rows.nbytes > max(self.limit - sum(used.values()), self._share(used)):
                return False
            while sum(used.values()) + rows.nbytes > self.limit:
                largest = max(used, key=used.__getitem__)
                # It may be about to change these rows, which does no harm: nobody reads them any more.
                largest.rows = _NOTHING
                del used[largest]
            self._caches.add(cache)
            cache.rows = rows
            return True


class RowCache:
    """The pairs of one column family that were read last, and the keys found to be absent, for any number of threads.

    Whoever writes below must call ``update`` when that is done and before anyone may rely on it; ``clear`` if it is not known what was written.
    """

    def __init__(self, budget: CacheBudget) -> None:
        self._budget = budget
        self.rows = _NOTHING
        self._epoch = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self.rows.nbytes

    def get_many(
        self, keys: pa.BinaryArray, read: Callable[[pa.BinaryArray], pa.BinaryArray], *, keep: bool = True
    ) -> pa.BinaryArray:
        """The values of keys, in their order; null where there is none. Those not held are read by ``read``, and with ``keep`` held."""
        if len(keys) <= STEP_ROWS:
            return self._get_step(keys, read, keep)
        steps = (keys.slice(at, STEP_ROWS) for at in range(0, len(keys), STEP_ROWS))
        return pa.concat_arrays([self._get_step(step, read, keep) for step in steps])

    def _get_step(
        self, keys: pa.BinaryArray, read: Callable[[pa.BinaryArray], pa.BinaryArray], keep: bool
    ) -> pa.BinaryArray:
        epoch = self._epoch  # first of all: what is read below counts only if nothing was written since
        rows = self.rows
        if not (rows.count or keep):
            return read(keys)
        if not rows.count:
            values = read(keys)
            self._keep(keys, hash_keys(keys), values, epoch)
            return values
        hashes = hash_keys(keys)
        entries, is_held = rows.find(keys, hashes)
        if is_held is None:
            return rows.values_of(entries, None)
        missing = np.flatnonzero(~is_held)
        if len(missing) == len(keys):
            values = read(keys)
            if keep:
                self._keep(keys, hashes, values, epoch)
            return values
        if not len(missing):
            return rows.values_of(entries, None)
        asked = keys.take(pa.array(missing))
        values = read(asked)
        if keep:
            self._keep(asked, hashes[missing], values, epoch)
        order = np.arange(len(keys))
        order[missing] = len(keys) + np.arange(len(missing))
        return pa.concat_arrays([rows.values_of(entries, is_held), values]).take(pa.array(order))

    def _keep(self, keys: pa.BinaryArray, hashes: Hashes, values: pa.BinaryArray, epoch: int) -> None:
        """Hold what was read, unless something has been written meanwhile, or is being changed here: then it is read again another time."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if epoch != self._epoch:
                return
            n = len(keys)
            if not self.rows.has_room(n, _num_bytes(keys), _num_bytes(values)):
                allowed = self._budget.allowance(self)
                while n and 2 * _needed(keys, values) > allowed:
                    n //= 2
                    keys, hashes, values = keys.slice(0, n), hashes[:n], values.slice(0, n)
            if n:
                self._insert(keys, hashes, values)
        finally:
            self._lock.release()

    def update(self, keys: pa.BinaryArray, hashes: Hashes, values: pa.BinaryArray) -> None:
        """Each of these keys, which differ, has been given this value, or removed (null). Only those that are held are changed here."""
        with self._lock:
            self._epoch += 1
            for at in range(0, len(keys), STEP_ROWS):
                if not self.rows.count:
                    return
                self._update_step(keys.slice(at, STEP_ROWS), hashes[at : at + STEP_ROWS], values.slice(at, STEP_ROWS))

    def _update_step(self, keys: pa.BinaryArray, hashes: Hashes, values: pa.BinaryArray) -> None:
        is_held = self.rows.has_tags(hashes)
        if not is_held.any():
            return
        if not is_held.all():
            held = pa.array(np.flatnonzero(is_held))
            keys, values, hashes = keys.take(held), values.take(held), hashes[is_held]
        self._insert(keys, hashes, values)

    def clear(self) -> None:
        """Hold nothing, nor anything that is being read now."""
        with self._lock:
            self._epoch += 1
            self._budget.give(self, _NOTHING)

    def _insert(self, keys: pa.BinaryArray, hashes: Hashes, values: pa.BinaryArray) -> None:
        key_bytes, value_bytes = _num_bytes(keys), _num_bytes(values)
        rows = self.rows
        if not rows.has_room(len(keys), key_bytes, value_bytes):
            rows.remove(hashes)  # these need not move, and are not right any more, whatever becomes of the new values
            moved = self._moved(rows, len(keys), key_bytes, value_bytes)
            if moved is None or not self._budget.give(self, moved):
                return
            rows = moved
        first = rows.append(keys, values)
        rows.place(hashes, first, np.asarray(values.is_null()) if values.null_count else None)

    def _moved(self, rows: _Rows, more: int, key_bytes: int, value_bytes: int) -> _Rows | None:
        """New arrays with all live rows, or as many of the newest as may be, and room for as much again."""
        live = rows.live()
        numbers = live & _ROW
        key_sizes, value_sizes = (
            (offsets[numbers + 1] - offsets[numbers]).astype(np.int64)
            for offsets in (rows.key_offsets, rows.value_offsets)
        )
        allowed = min(self._budget.allowance(self), _MOST_BYTES)
        left = allowed // 2 - key_bytes - value_bytes - _ROW_BYTES * more
        if left < 0:
            return None
        from_newest = np.cumsum((key_sizes + value_sizes + _ROW_BYTES)[::-1])
        kept = int(np.searchsorted(from_newest, left, side="right"))
        dropped = len(live) - kept
        live, numbers, key_sizes, value_sizes = (a[dropped:] for a in (live, numbers, key_sizes, value_sizes))
        made = _Rows(
            2 * (kept + more), 2 * (int(key_sizes.sum()) + key_bytes), 2 * (int(value_sizes.sum()) + value_bytes)
        )
        if kept:
            taken = pa.array(numbers)
            keys = rows.keys.take(taken)
            made.append(keys, rows.values.take(taken))
            if made.buckets.shape == rows.buckets.shape:
                made.place_as(rows, numbers)
            else:
                hashes, is_absent = hash_keys(keys), (live & _ABSENT) != 0
                for at in range(0, kept, STEP_ROWS):
                    made.place(hashes[at : at + STEP_ROWS], at, is_absent[at : at + STEP_ROWS])
        return made


def _num_bytes(array: pa.BinaryArray) -> int:
    return int(binary_content(array)[1][-1])


def _needed(keys: pa.BinaryArray, values: pa.BinaryArray) -> int:
    return _num_bytes(keys) + _num_bytes(values) + _ROW_BYTES * len(keys)
