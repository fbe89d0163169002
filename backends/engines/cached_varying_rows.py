"""Rows of a ``RowCache`` with keys and values of any widths: binary arrays of Arrow, to which rows are appended."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import Records, binary_content, content_bytes
from backends.engines.cache_table import ABSENT, ROW, TAG_SHIFT, CacheTable, Ints
from backends.engines.cached_even_rows import EVEN_BYTES, NO_POSITIONS, Widths
from backends.engines.key_hashes import KeyHashes


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
        arrays: tuple[npt.NDArray[Any], ...] = (
            self.buckets,
            self.key_offsets,
            self.value_offsets,
            self.key_content,
            self.value_content,
        )
        return sum(array.nbytes for array in arrays)

    def has_room(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> bool:
        """Return whether these rows can be appended."""
        count = self.count
        return (
            count + len(keys) < len(self.key_offsets)
            and int(self.key_offsets[count]) + content_bytes(keys) <= len(self.key_content)
            and int(self.value_offsets[count]) + content_bytes(values) <= len(self.value_content)
        )

    def get(self, keys: pa.BinaryArray, asked: Records | None, hashes: KeyHashes) -> tuple[pa.BinaryArray | None, Ints]:
        """See ``EvenRows``."""
        entries, is_held = self._find(keys, hashes)
        missing = NO_POSITIONS if is_held is None else np.flatnonzero(~is_held)
        if len(missing) == len(keys) and len(keys):
            return None, missing
        return self._values_of(entries, is_held if len(missing) else None), missing

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
        """Add rows, for which there must be room; return the number of the first one."""
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
        """See ``EvenRows``."""
        key, value = (
            (offsets[rows + 1] - offsets[rows]).astype(np.int64) for offsets in (self.key_offsets, self.value_offsets)
        )
        return key, value

    def pairs(self, entries: Ints) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        """See ``EvenRows``."""
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
