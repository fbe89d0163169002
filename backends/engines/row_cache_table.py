"""The hash table of a ``RowCache``, which says which row a key has.

The table is set-associative, as processors' caches are: a hash leads to a bucket of ``WAYS`` entries, each with a tag
of 16 more bits and the number of a row. At most one entry of a bucket has a given tag, so an entry is replaced without
comparing keys. A look-up compares whole keys, so that colliding hashes push each other out and never give a wrong
value.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import Records, binary_content, content_bytes, even_array, even_rows, validity

# Hashes of keys for the table of a ``RowCache``: secret, of 64 bits, for many keys at once.


KeyHashes = npt.NDArray[np.uint64]
UPPER_HALF = np.uint64(32)
"""A shift that leaves the upper half of a hash."""

_HASHED_BYTES = 256
_SEED = np.uint64(secrets.randbits(64))
_FACTORS = [np.uint64(secrets.randbits(64) | 1) for _ in range(_HASHED_BYTES // 8 + 2)]
"""The secret factors of the length, and of each word of a key."""
_WORD = (1 << 64) - 1
_WORDS = np.dtype("<u8")
_STIR = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)
_BYTES_MASKS = np.array([(1 << 8 * i) - 1 for i in range(9)], np.uint64)


def hash_keys(keys: pa.BinaryArray, even: Records | None = None) -> KeyHashes:
    """Return a hash of 64 bits for each key, which depends on the key and on the process.

    ``even`` is the result of ``even_rows(keys)``, if it is known. Of a key longer than 256 bytes, the first 256 bytes,
    the last 8 and the length count. The words of a key are multiplied by secret numbers and added up (multilinear
    hashing), and the sum is mixed, so that all its bits are good. Each word is added once. A second factor could make
    the sum of its odd factors even, and the highest bits of the word would be lost.
    """
    n = len(keys)
    if not n:
        return np.zeros(0, np.uint64)
    even = even_rows(keys) if even is None else even
    if even is not None and even.dtype.itemsize >= 8:
        return _hash_even(even)
    content, offsets = binary_content(keys)
    widths = np.diff(offsets)
    starts = offsets[:-1]
    # 8 more bytes, so that a word can be read wherever a key begins.
    padded = np.zeros(len(content) + 8, np.uint8)
    padded[: len(content)] = content
    words: npt.NDArray[np.uint64] = np.ndarray((len(content) + 1,), "<u8", padded, 0, (1,))
    masks = _BYTES_MASKS[np.minimum(widths, 8)]
    hashes: KeyHashes = (words[starts] & masks) * _FACTORS[1]
    hashes += widths.astype(np.uint64) * _FACTORS[0] + _SEED
    hashes += np.where(widths > 8, words[np.maximum(offsets[1:] - 8, starts)], np.uint64(0)) * _FACTORS[2]
    for i, at in enumerate(range(8, min(int(widths.max()) - 8, _HASHED_BYTES), 8)):
        longer = np.flatnonzero(widths > at + 8)
        hashes[longer] += words[starts[longer] + at] * _FACTORS[3 + i]
    return _stirred(hashes)


def _hash_even(keys: Records) -> KeyHashes:
    """Return the hashes of keys of one width, 8 bytes or more, in fewer steps: the words of all keys are columns."""
    width = keys.dtype.itemsize
    shape, strides = (len(keys),), (width,)
    added, others = _even_words(width)
    hashes: KeyHashes = np.ndarray(shape, _WORDS, keys, 0, strides) * _FACTORS[1]
    hashes += added
    for at, factor in others:
        hashes += np.ndarray(shape, _WORDS, keys, at, strides) * factor
    return _stirred(hashes)


def _even_words(width: int) -> tuple[np.uint64, Iterator[tuple[int, np.uint64]]]:
    """Return the term added for the width, and the positions and factors of the words after the first one."""
    if width == 8:
        return np.uint64((8 * int(_FACTORS[0]) + int(_SEED)) & _WORD), iter(())
    added = np.uint64((width * int(_FACTORS[0]) + int(_SEED)) & _WORD)
    places = (width - 8, *range(8, min(width - 8, _HASHED_BYTES), 8))
    return added, zip(places, _FACTORS[2:], strict=False)


def _stirred(hashes: KeyHashes) -> KeyHashes:
    hashes ^= hashes >> UPPER_HALF
    hashes *= _STIR
    hashes ^= hashes >> _SHIFT
    return hashes


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
    """A hash table with room for a given number of rows. The first ``count`` rows are filled.

    Rows below ``count`` never change. ``count`` is raised when a row is complete, and only then does the table refer to
    the row. So a reader that reads ``count`` first, and then trusts the table for rows below ``count`` only, never sees
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
        """Return for each hash: number of the bucket, tag, entries of the bucket, way and entry with that tag.

        If no entry has the tag, way and entry are arbitrary.
        """
        at, tags, entries_at = self.buckets_of(hashes)
        ways = ((entries_at >> TAG_SHIFT) == tags[:, None]).argmax(axis=1)
        entries = entries_at.reshape(-1).take(ways + np.arange(0, WAYS * len(hashes), WAYS))
        return at, tags, entries_at, ways, entries

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
            at, tags, entries_at, ways, entries = self.match(hashes)
            is_other = (entries >> TAG_SHIFT) != tags
            if attempt and not is_other.all():
                # The first round replaced the older entry. An entry with this tag is now one of the new rows: it stays.
                hashes, new, at, tags, entries_at = (a[is_other] for a in (hashes, new, at, tags, entries_at))
                ways = _oldest(entries_at)
            elif is_other.any():
                ways[is_other] = _oldest(entries_at[is_other])
            slots = at * WAYS + ways
            entries = (tags << TAG_SHIFT) | new
            table[slots] = entries
            lost = table[slots] != entries  # several rows went to the same slot
            if not lost.any():
                return
            hashes, new = hashes[lost], new[lost]

    def remove(self, hashes: KeyHashes) -> None:
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
        """Enter the rows ``numbers`` of ``rows``, a table of the same size, as the first rows here."""
        moved_to: Ints = np.full(rows.count, _EMPTY, np.int64)
        moved_to[numbers] = np.arange(len(numbers))
        table = rows.buckets.reshape(-1)
        at = np.flatnonzero(table >= 0)
        entries = table[at]
        to = moved_to[entries & ROW]
        stays = to >= 0
        self.buckets.reshape(-1)[at[stays]] = (entries[stays] & ~ROW) | to[stays]


def _num_buckets(rows: int) -> int:
    """Return the number of buckets that keeps the table at most a quarter full.

    In a table that is half full, one row in 400 would not fit into its bucket. The result is rounded up by an eighth at
    most, so that a cache of a steady size keeps its number.
    """
    wanted = max(16, rows * 4 // WAYS)
    step = 1 << max(0, wanted.bit_length() - 4)
    return -(-wanted // step) * step


def _oldest(entries: Ints) -> Ints:
    """Return for each bucket the way that is empty, or was filled first."""
    ways: Ints = np.where(entries < 0, _EMPTY, entries & ROW).argmin(axis=1)
    return ways


# Rows of a ``RowCache`` whose keys have one width and whose values another, as those of fixed-width columns have.
#
# A row is a record of both. One access to memory then serves the look-up of a key, and a few calls of numpy serve all
# keys.


EVEN_BYTES = 1 << 10
"""The longest rows that are kept as records: an Arrow array can hold a step of look-ups of them."""

Widths: TypeAlias = tuple[int, int | None]
"""The width of all keys and the width of all values, in bytes; None for the values if no key has one."""

ReadMissing: TypeAlias = Callable[[Ints], pa.BinaryArray]
_ROW_OR_ABSENT = ROW | ABSENT


class EvenRows(CacheTable):
    """Rows whose keys and values have the given widths, as records. The value's bytes of a key without one are
    arbitrary.
    """

    __slots__ = ("_key_width", "_records", "widths")

    def __init__(self, rows: int, widths: Widths) -> None:
        super().__init__(rows)
        self.widths: Widths | None = widths
        key, value = widths
        self._key_width = key
        fields = [("key", f"V{key}")] if value is None else [("key", f"V{key}"), ("value", f"V{value}")]
        self._records: npt.NDArray[Any] = np.empty(rows, fields)

    @property
    def nbytes(self) -> int:
        """The bytes of memory, used or not."""
        return self.buckets.nbytes + self._records.nbytes

    def has_room(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> bool:
        """Return whether these rows can be appended."""
        if self.count + len(keys) > len(self._records):
            return False
        widths = widths_of(keys, values)
        return widths is not None and common_widths(self.widths, widths) == self.widths

    def get(
        self, keys: pa.BinaryArray, asked: Records | None, hashes: KeyHashes, read_missing: ReadMissing
    ) -> pa.BinaryArray:
        """Return the values of keys, null for a key without one. ``asked`` is ``even_rows(keys)``.

        ``read_missing`` reads the keys that are not held, by their positions. It is called once if there are any.
        """
        count = self.count
        if asked is None or asked.dtype.itemsize != self._key_width:
            return self._get_uneven(keys, hashes, read_missing)
        _, tags, entries_at = self.buckets_of(hashes)
        # No bucket has a tag twice: these are the entries in the order of the keys. (While a tag moves within its
        # bucket, a reader may see it twice or not at all: then whole keys differ below.)
        slots = ((entries_at >> TAG_SHIFT) == tags[:, None]).reshape(-1).nonzero()[0]
        entries = entries_at.reshape(-1).take(slots)
        if len(slots) == len(keys):
            rows = entries & _ROW_OR_ABSENT
            if int(rows.max()) < count:  # and none is known to have no value
                records = self._records.take(rows)
                if records["key"].tobytes() == asked.tobytes():
                    return even_array(records["value"].copy())
        return self._get_some(asked, slots // WAYS, entries, count, read_missing)

    def _get_uneven(self, keys: pa.BinaryArray, hashes: KeyHashes, read_missing: ReadMissing) -> pa.BinaryArray:
        """Do ``get`` for keys of several widths, or of another width."""
        own = np.flatnonzero(np.diff(binary_content(keys)[1]) == self._key_width)
        is_missing = np.ones(len(keys), np.bool_)
        if not len(own):
            return read_missing(np.flatnonzero(is_missing))
        is_missing[own] = False
        others: list[pa.BinaryArray] = []

        def read_with_others(missing_of_own: Ints) -> pa.BinaryArray:
            is_missing[own[missing_of_own]] = True
            others.append(read_missing(np.flatnonzero(is_missing)))
            return pa.nulls(len(missing_of_own), pa.binary())

        keys_of_own = keys.take(pa.array(own))
        values = self.get(keys_of_own, even_rows(keys_of_own), hashes[own], read_with_others)
        if not others and len(own) < len(keys):
            others.append(read_missing(np.flatnonzero(is_missing)))
        if not others:
            return values
        of_own = np.zeros(len(keys), np.int64)
        of_own[own] = np.arange(len(own))
        return _merged(values, of_own, np.flatnonzero(is_missing), others[0])

    def _get_some(
        self, asked: Records, places: Ints, entries: Ints, count: int, read_missing: ReadMissing
    ) -> pa.BinaryArray:
        """Do ``get`` where some keys are not held, or have no value.

        ``entries`` are the entries with the tags of the keys at these ``places``.
        """
        n = len(asked)
        is_first = np.ones(len(places), np.bool_)
        is_first[1:] = places[1:] != places[:-1]
        if not is_first.all():
            places, entries = places[is_first], entries[is_first]
        rows = entries & ROW
        is_held = rows < count
        records = self._records.take(np.where(is_held, rows, 0))
        is_held &= (_bytes_of(records["key"]) == _bytes_of(asked.take(places))).all(axis=1)
        is_missing = np.ones(n, np.bool_)
        is_missing[places[is_held]] = False
        missing = np.flatnonzero(is_missing)
        if len(missing) == n:
            return read_missing(missing)
        has_value = is_held & ((entries & ABSENT) == 0)
        missing_values = read_missing(missing) if len(missing) else None
        if self._has_values and missing_values is not None and np.count_nonzero(has_value) + len(missing) == n:
            even = even_rows(missing_values)
            if even is not None and even.dtype == records.dtype["value"]:
                order = np.empty(n, np.int64)
                order[places[has_value]] = np.flatnonzero(has_value)
                order[missing] = len(records) + np.arange(len(missing))
                return even_array(np.concatenate((records["value"], even)).take(order))
        content = np.ascontiguousarray(records["value"][has_value]) if self._has_values else np.zeros(0, "V1")
        is_null = np.ones(n, np.bool_)
        is_null[places[has_value]] = False
        offsets = np.zeros(n + 1, np.int32)
        np.cumsum(~is_null * np.int32(content.dtype.itemsize), out=offsets[1:])
        buffers = [validity(is_null), pa.py_buffer(offsets), pa.py_buffer(content.view(np.uint8))]
        values = pa.Array.from_buffers(pa.binary(), n, buffers)
        return values if missing_values is None else _merged(values, np.arange(n), missing, missing_values)

    @property
    def _has_values(self) -> bool:
        return self.widths is not None and self.widths[1] is not None

    def append(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> int:
        """Add rows and return the number of the first one. The caller checks ``has_room`` first."""
        first, n = self.count, len(keys)
        added = self._records[first : first + n]
        added["key"] = even_rows(keys)
        if values.null_count < n:
            is_there = slice(None) if not values.null_count else np.asarray(values.is_valid())
            added["value"][is_there] = even_rows(values.drop_null() if values.null_count else values)
        self.count = first + n
        return first

    def widths_of(self, entries: Ints) -> Widths | None:
        """Return the widths of the rows of these entries, at least one; None if the rows cannot be ``EvenRows``."""
        return self.widths

    def sizes(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return how many bytes the keys of these rows have, and their values at most."""
        key, value = self.widths or (0, None)
        return np.full(len(rows), key), np.full(len(rows), value or 0)

    def pairs(self, entries: Ints) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        """Return the keys and values of the rows of these entries."""
        if not len(entries):
            return pa.array([], pa.binary()), pa.array([], pa.binary())
        records = self._records.take(entries & ROW)
        keys = even_array(np.ascontiguousarray(records["key"]))
        is_absent = (entries & ABSENT) != 0
        if not self._has_values:
            return keys, pa.nulls(len(entries), pa.binary())
        values = even_array(np.ascontiguousarray(records["value"][~is_absent]))
        if is_absent.any():
            values = values.take(pa.array(np.cumsum(~is_absent) - 1, mask=is_absent))
        return keys, values


def widths_of(keys: pa.BinaryArray, values: pa.BinaryArray) -> Widths | None:
    """Return the widths of pairs; None if the pairs cannot be ``EvenRows``."""
    even = even_rows(keys)
    if even is None:
        return None
    key = int(even.dtype.itemsize)
    if values.null_count == len(values):
        return (key, None) if key <= EVEN_BYTES else None
    even = even_rows(values.drop_null() if values.null_count else values)
    if even is None or key + even.dtype.itemsize > EVEN_BYTES:
        return None
    return key, int(even.dtype.itemsize)


def common_widths(one: Widths | None, other: Widths | None) -> Widths | None:
    """Return the widths of both kinds of rows together; None if the rows cannot be in one ``EvenRows``."""
    if one is None or other is None or one[0] != other[0]:
        return None
    if one[1] is None or other[1] is None:
        return one[0], other[1] if one[1] is None else one[1]
    return one if one == other else None


def _merged(values: pa.BinaryArray, order: Ints, missing: Ints, missing_values: pa.BinaryArray) -> pa.BinaryArray:
    """Return ``values`` in an order, with others in the place of those that are missing."""
    order[missing] = len(values) + np.arange(len(missing))
    return pa.concat_arrays([values, missing_values]).take(pa.array(order))


def _bytes_of(rows: Records) -> npt.NDArray[np.uint8]:
    """Return the bytes of each record: an array of shape (records, bytes of a record)."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.dtype.itemsize)


# Rows of a ``RowCache`` with keys and values of any widths, stored in append-only Arrow binary arrays.


class VaryingRows(CacheTable):
    """Rows of keys and values of any widths, with room for given numbers of bytes of keys and of values."""

    __slots__ = ("key_content", "key_offsets", "keys", "value_content", "value_offsets", "values")

    widths: Widths | None = None

    def __init__(self, rows: int, key_bytes: int, value_bytes: int) -> None:
        super().__init__(rows)
        self.key_offsets: npt.NDArray[np.int32] = np.zeros(rows + 1, np.int32)
        self.value_offsets: npt.NDArray[np.int32] = np.zeros(rows + 1, np.int32)
        self.key_content: npt.NDArray[np.uint8] = np.empty(key_bytes, np.uint8)
        self.value_content: npt.NDArray[np.uint8] = np.empty(value_bytes, np.uint8)
        # These arrays have the same memory, so that they show what is appended.
        self.keys = _over(self.key_offsets, self.key_content)
        self.values = _over(self.value_offsets, self.value_content)

    @property
    def nbytes(self) -> int:
        """The bytes of memory, used or not."""
        rows = self.key_offsets.nbytes + self.value_offsets.nbytes + self.key_content.nbytes + self.value_content.nbytes
        return self.buckets.nbytes + rows

    def has_room(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> bool:
        """Return whether these rows can be appended."""
        count = self.count
        return (
            count + len(keys) < len(self.key_offsets)
            and int(self.key_offsets[count]) + content_bytes(keys) <= len(self.key_content)
            and int(self.value_offsets[count]) + content_bytes(values) <= len(self.value_content)
        )

    def get(
        self, keys: pa.BinaryArray, asked: Records | None, hashes: KeyHashes, read_missing: ReadMissing
    ) -> pa.BinaryArray:
        """See ``EvenRows``."""
        if not self.count:
            return read_missing(np.arange(len(keys)))
        entries, is_held = self._find(keys, hashes)
        if is_held is None or is_held.all():
            return self._values_of(entries, None)
        missing = np.flatnonzero(~is_held)
        if len(missing) == len(keys):
            return read_missing(missing)
        return _merged(self._values_of(entries, is_held), np.arange(len(keys)), missing, read_missing(missing))

    def _find(self, keys: pa.BinaryArray, hashes: KeyHashes) -> tuple[Ints, npt.NDArray[np.bool_] | None]:
        """Return the table's entry for each key, and whether it is that key's (None: all are). Other entries are
        useless.
        """
        count = self.count
        _, tags, _, _, entries = self.match(hashes)
        rows = entries & ROW
        is_held = (rows < count) & ((entries >> TAG_SHIFT) == tags)
        if is_held.all():
            held_keys = self.keys.take(pa.array(rows))
            if held_keys.equals(keys):
                return entries, None
        else:
            held_keys = self.keys.take(pa.array(np.where(is_held, rows, 0)))
        is_held &= np.asarray(pc.equal(held_keys, keys))
        return entries, is_held

    def _values_of(self, entries: Ints, is_held: npt.NDArray[np.bool_] | None) -> pa.BinaryArray:
        """Return the values of the entries that ``_find`` found; null for other keys, and for keys without a value."""
        is_null = (entries & ABSENT) != 0
        if is_held is not None:
            is_null |= ~is_held
        rows = entries & ROW
        return self.values.take(pa.array(rows, mask=is_null) if is_null.any() else pa.array(rows))

    def append(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> int:
        """Add rows and return the number of the first one. The caller checks ``has_room`` first."""
        first = self.count
        _append(keys, self.key_content, self.key_offsets, first)
        _append(values, self.value_content, self.value_offsets, first)
        self.count = first + len(keys)
        return first

    def widths_of(self, entries: Ints) -> Widths | None:
        """See ``EvenRows``. Rows of one width may be left of rows of many widths."""
        keys, values = self.sizes(entries & ROW)
        values = values[(entries & ABSENT) == 0]
        key, value = int(keys[0]), int(values[0]) if len(values) else None
        if not (key and (keys == key).all()) or value == 0 or (value is not None and (values != value).any()):
            return None
        return (key, value) if key + (value or 0) <= EVEN_BYTES else None

    def sizes(self, rows: Ints) -> tuple[Ints, Ints]:
        key, value = (
            (offsets[rows + 1] - offsets[rows]).astype(np.int64) for offsets in (self.key_offsets, self.value_offsets)
        )
        return key, value

    def pairs(self, entries: Ints) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        rows = entries & ROW
        is_absent = (entries & ABSENT) != 0
        return self.keys.take(pa.array(rows)), self.values.take(pa.array(rows, mask=is_absent))


def _over(offsets: npt.NDArray[np.int32], content: npt.NDArray[np.uint8]) -> pa.BinaryArray:
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(content)], 0)


def _append(added: pa.BinaryArray, content: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int32], first: int) -> None:
    new_content, new_offsets = binary_content(added)
    at = int(offsets[first])
    content[at : at + len(new_content)] = new_content
    offsets[first + 1 : first + 1 + len(added)] = new_offsets[1:] + at
