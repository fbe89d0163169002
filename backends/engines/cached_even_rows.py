"""Rows of a ``RowCache`` whose keys have one width and whose values another, as those of fixed-width columns have.

A row is a record of both. One access to memory then serves the look-up of a key, and a few calls of numpy serve all
keys.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import Records, binary_content, even_array, even_rows, validity
from backends.engines.cache_table import ABSENT, ROW, TAG_SHIFT, WAYS, CacheTable, Ints
from backends.engines.key_hashes import KeyHashes

EVEN_BYTES = 1 << 10
"""The longest rows that are kept as records: an Arrow array can hold a step of look-ups of them."""

Widths: TypeAlias = tuple[int, int | None]
"""The width of all keys and the width of all values, in bytes; None for the values if no key has one."""

NO_POSITIONS: Ints = np.zeros(0, np.int64)
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

    def get(self, keys: pa.BinaryArray, asked: Records | None, hashes: KeyHashes) -> tuple[pa.BinaryArray | None, Ints]:
        """Return the values of keys, and the positions of the keys that are not held here.

        The value is null for a key that has none or is not held. None for the values if no key is held. ``asked`` is
        ``even_rows(keys)``.
        """
        count = self.count
        if asked is None or asked.dtype.itemsize != self._key_width:
            return self._get_uneven(keys, hashes)
        _, tags, held = self.buckets_of(hashes)
        # No bucket has a tag twice: these are the entries in the order of the keys. (While a tag moves within its
        # bucket, a reader may see it twice or not at all: then whole keys differ below.)
        slots = ((held >> TAG_SHIFT) == tags[:, None]).reshape(-1).nonzero()[0]
        entries = held.reshape(-1).take(slots)
        if len(slots) == len(keys):
            rows = entries & _ROW_OR_ABSENT
            if int(rows.max()) < count:  # and none is known to have no value
                found = self._records.take(rows)
                if found["key"].tobytes() == asked.tobytes():
                    return even_array(found["value"].copy()), NO_POSITIONS
        return self._get_some(asked, slots // WAYS, entries, count)

    def _get_uneven(self, keys: pa.BinaryArray, hashes: KeyHashes) -> tuple[pa.BinaryArray | None, Ints]:
        """Do ``get`` for keys of several widths, or of another width."""
        own = np.flatnonzero(np.diff(binary_content(keys)[1]) == self._key_width)
        if not len(own):
            return None, np.arange(len(keys))
        keys_of_own = keys.take(pa.array(own))
        values, missing = self.get(keys_of_own, even_rows(keys_of_own), hashes[own])
        is_missing = np.ones(len(keys), np.bool_)
        if values is None:
            return None, np.flatnonzero(is_missing)
        rows = np.zeros(len(keys), np.int64)
        rows[own] = np.arange(len(own))
        is_missing[own] = False
        is_missing[own[missing]] = True
        return values.take(pa.array(rows, mask=is_missing)), np.flatnonzero(is_missing)

    def _get_some(self, asked: Records, places: Ints, entries: Ints, count: int) -> tuple[pa.BinaryArray | None, Ints]:
        """Do ``get`` where some keys are not held, or have no value.

        ``entries`` are the entries with the tags of the keys at these ``places``.
        """
        is_first = np.ones(len(places), np.bool_)
        is_first[1:] = places[1:] != places[:-1]
        if not is_first.all():
            places, entries = places[is_first], entries[is_first]
        rows = entries & ROW
        is_held = rows < count
        found = self._records.take(np.where(is_held, rows, 0))
        is_held &= (_bytes_of(found["key"]) == _bytes_of(asked.take(places))).all(axis=1)
        is_missing = np.ones(len(asked), np.bool_)
        is_missing[places[is_held]] = False
        missing = np.flatnonzero(is_missing)
        if len(missing) == len(asked):
            return None, missing
        has_value = is_held & ((entries & ABSENT) == 0)
        content = np.ascontiguousarray(found["value"][has_value]) if self._has_values else np.zeros(0, "V1")
        is_null = np.ones(len(asked), np.bool_)
        is_null[places[has_value]] = False
        offsets = np.zeros(len(asked) + 1, np.int32)
        np.cumsum(~is_null * np.int32(content.dtype.itemsize), out=offsets[1:])
        buffers = [validity(is_null), pa.py_buffer(offsets), pa.py_buffer(content.view(np.uint8))]
        return pa.Array.from_buffers(pa.binary(), len(asked), buffers), missing

    @property
    def _has_values(self) -> bool:
        return self.widths is not None and self.widths[1] is not None

    def append(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> int:
        """Add rows, for which there must be room; return the number of the first one."""
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
        found = self._records.take(entries & ROW)
        keys = even_array(np.ascontiguousarray(found["key"]))
        is_absent = (entries & ABSENT) != 0
        if not self._has_values:
            return keys, pa.nulls(len(entries), pa.binary())
        values = even_array(np.ascontiguousarray(found["value"][~is_absent]))
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


def _bytes_of(rows: Records) -> npt.NDArray[np.uint8]:
    """Return the bytes of each record: an array of shape (records, bytes of a record)."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
