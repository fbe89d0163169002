"""Keys as bytes whose order is the order of the values, whole columns at a time.

A stored key is its key group (2 bytes, big-endian), then per column a byte that is 0 for null and 1 for a value, then
the value:

- integers, dates and timestamps: big-endian with the sign bit flipped;
- floats: likewise by their bits, with -0.0 as 0.0, and every NaN as the same and greatest value, as Spark orders them;
- decimals: 16 bytes;
- strings and binary: 0x00 written as 0x00 0xFF, and 0x00 0x00 at the end;
- structs: their fields;
- arrays: the elements with 0x01 before each, and 0x00 at the end.

A null of a fixed-width column takes the width of its column, so that such keys all have one length.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding import columns
from backends.encoding.key_groups import MAX_KEY_GROUPS
from backends.encoding.sorted_pairs import as_keys
from backends.exceptions import InvalidStateStoreArgument, UnsupportedTypeError

KEY_GROUP_BYTES = 2
_END = b"\x00\x00"

KeyPiece: TypeAlias = npt.NDArray[Any] | pa.BinaryArray
"""Bytes of each row: numpy for one width, Arrow for several.

Numbers get their most significant byte first. An array of one element is for all rows.
"""

_PRESENT = np.ones(1, np.uint8)
_LIST_END = np.zeros(1, np.uint8)
_STRING_END = np.zeros(1, np.uint16)


def first_key_after(prefix: bytes) -> bytes | None:
    """Return the first bytes after all bytes that begin with ``prefix``; None if there are none."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None


def encode_keys(batch: pa.RecordBatch, groups: npt.NDArray[Any]) -> pa.BinaryArray:
    """Return the key of each row; ``groups`` are the rows' key groups (any integer type).

    Raises ``UnsupportedTypeError`` naming column and type, ``InvalidStateStoreArgument`` if the
    groups do not fit the rows.
    """
    groups = np.asarray(groups)
    if len(groups) != batch.num_rows:
        raise InvalidStateStoreArgument(f"{batch.num_rows} rows came with {len(groups)} key groups.")
    if len(groups) and not _are_groups(groups):
        raise InvalidStateStoreArgument(
            f"Key groups must be 0 to {MAX_KEY_GROUPS - 1}, not {groups.min()} to {groups.max()}."
        )
    pieces: list[KeyPiece] = [groups.astype(np.uint16)]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        pieces += _pieces(name, columns.normalized_column(name, column))
    return _assemble(pieces, batch.num_rows)


def _are_groups(groups: npt.NDArray[Any]) -> bool:
    if groups.dtype == np.int32:
        return bool(groups.view(np.uint32).max() < MAX_KEY_GROUPS)  # unsigned, a negative number is a large one
    return bool(groups.min() >= 0 and groups.max() < MAX_KEY_GROUPS)


def decode_keys(keys: pa.Array | pa.ChunkedArray, schema: pa.Schema) -> pa.RecordBatch:
    """Return the key columns of encoded keys, without the key group.

    Raises ``SchemaMismatchError`` if the bytes are not keys of the schema.
    """
    keys = as_keys(keys)
    fields = [f.with_type(columns.normalized_type(f.name, f.type)) for f in schema]
    reader = _KeyReader(keys, schema)
    arrays = [reader.next_column(f.type) for f in fields]
    reader.check_end()
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _pieces(name: str, array: pa.Array) -> Iterator[KeyPiece]:
    kind = array.type
    mask = columns.null_mask(array)
    yield _PRESENT if mask is None else (~mask).astype(np.uint8)
    dtype = columns.fixed_dtype(kind)
    if dtype is not None:
        values = _ordered(kind, columns.fixed_values(array, dtype))
        if mask is not None:
            values[mask] = np.zeros((), values.dtype)
        yield values
    elif pa.types.is_struct(kind):
        for i, child in enumerate(array.flatten()):
            child_name = f"{name}.{kind.field(i).name}"
            yield from _pieces(child_name, columns.normalized_column(child_name, child))
    elif columns.is_list_like(kind):
        columns.refuse_map(name, kind)
        elements, offsets = columns.list_parts(array)
        element_name = f"{name}.element"
        marked = [_PRESENT, *_pieces(element_name, columns.normalized_column(element_name, elements))]
        content, ends = columns.binary_content(_assemble(marked, len(elements)))
        yield columns.binary_array(content, ends[offsets])
        yield _LIST_END
    else:
        yield _escape(columns.binary_values(array))
        yield _STRING_END


def _escape(values: pa.BinaryArray) -> pa.BinaryArray:
    content, _ = columns.binary_content(values)
    return values if content.all() else pc.replace_substring(values, b"\x00", b"\x00\xff")


def _assemble(pieces: list[KeyPiece], n: int) -> pa.BinaryArray:
    """Join the pieces of each row. Neighbours of fixed width become one structured array first."""
    parts: list[pa.BinaryArray] = []
    run: list[npt.NDArray[Any]] = []
    for piece in [*pieces, None]:
        if isinstance(piece, np.ndarray):
            run.append(piece)
            continue
        if run:
            rows = np.empty(n, _records(tuple(values.dtype for values in run)))
            for i, values in enumerate(run):
                rows[f"f{i}"] = values
            parts.append(columns.rows_as_binary(rows))
            run = []
        if piece is not None:
            parts.append(piece)
    return columns.join_columns(parts)


@lru_cache(256)
def _records(dtypes: tuple[np.dtype[Any], ...]) -> np.dtype[Any]:
    return np.dtype([(f"f{i}", dtype.newbyteorder(">")) for i, dtype in enumerate(dtypes)])


def _ordered(kind: pa.DataType, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values as unsigned numbers (or bytes) that sort as the values do, always in a new array."""
    if pa.types.is_decimal(kind):
        swapped = np.ascontiguousarray(values.copy().view(np.uint8).reshape(-1, 16)[:, ::-1])
        swapped[:, 0] ^= 0x80
        return swapped.view("V16").reshape(-1)
    if pa.types.is_boolean(kind):
        return values.astype(np.uint8)
    width = values.dtype.itemsize
    unsigned = np.dtype(f"u{width}")
    sign = unsigned.type(1 << (width * 8 - 1))
    if not pa.types.is_floating(kind):
        flipped: npt.NDArray[Any] = values.view(unsigned) ^ sign
        return flipped
    bits: npt.NDArray[Any] = values.view(unsigned).copy()
    bits[np.isnan(values)] = np.array(np.nan, values.dtype).view(unsigned)
    bits[bits == sign] = 0  # -0.0
    ordered: npt.NDArray[Any] = np.where(bits & sign, ~bits, bits ^ sign)
    return ordered


def _unordered(kind: pa.DataType, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the inverse of ``_ordered``."""
    dtype = columns.fixed_dtype(kind)
    if pa.types.is_decimal(kind):
        swapped = np.ascontiguousarray(stored).copy().view(np.uint8).reshape(-1, 16)
        swapped[:, 0] ^= 0x80
        return np.ascontiguousarray(swapped[:, ::-1]).view("V16").reshape(-1)
    if pa.types.is_boolean(kind):
        return np.asarray(stored, np.uint8)
    assert dtype is not None
    unsigned = np.dtype(f"u{dtype.itemsize}")
    sign = unsigned.type(1 << (dtype.itemsize * 8 - 1))
    bits: npt.NDArray[Any] = stored.astype(unsigned)
    restored: npt.NDArray[Any] = bits ^ sign
    if pa.types.is_floating(kind):
        restored = np.where(bits & sign, restored, ~bits)
    return restored.view(dtype)


def _stored_dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    dtype = columns.fixed_dtype(kind)
    if dtype is None or pa.types.is_decimal(kind) or pa.types.is_boolean(kind):
        return dtype
    return np.dtype(f">u{dtype.itemsize}")


class _KeyReader:
    """Reads the columns of keys, one after the other.

    Its methods take the positions ``at`` where values begin, ascending, and for each the end of its key (``ends``).
    """

    def __init__(self, keys: pa.BinaryArray, schema: object) -> None:
        self._content, offsets = columns.binary_content(keys)
        self._ends = offsets[1:]
        self._schema = schema
        self._at = offsets[:-1] + KEY_GROUP_BYTES

    def next_column(self, kind: pa.DataType) -> pa.Array:
        column, self._at = self._column(kind, self._at, self._ends)
        return column

    def check_end(self) -> None:
        """Raise unless every key has been read to its end."""
        self._check(self._at == self._ends, self._ends)

    def _check(self, ok: npt.NDArray[np.bool_], ends: columns.Offsets) -> None:
        if not ok.all():
            columns.check_ranges(ok, "keys", self._schema, np.searchsorted(self._ends, ends, "right") - 1)

    def _fixed(
        self, at: columns.Offsets, ends: columns.Offsets, dtype: np.dtype[Any]
    ) -> tuple[npt.NDArray[Any], columns.Offsets]:
        """Return values or records of one width, and the positions after them."""
        behind = at + dtype.itemsize
        self._check(behind <= ends, ends)
        return columns.gather_fixed(self._content, at, dtype), behind

    def _absent(self, flags: npt.NDArray[np.uint8], ends: columns.Offsets) -> columns.Mask:
        """Return a mask of the bytes that are 0; all must be 0 or 1."""
        self._check(flags <= 1, ends)
        absent: columns.Mask = flags == 0
        return absent

    def _column(
        self, kind: pa.DataType, at: columns.Offsets, ends: columns.Offsets
    ) -> tuple[pa.Array, columns.Offsets]:
        """Return the values of a column, and the positions after them."""
        stored = _stored_dtype(kind)
        if stored is not None:
            parts, at = self._fixed(at, ends, np.dtype([("present", "u1"), ("value", stored)]))
            mask = self._absent(parts["present"], ends)
            values = _unordered(kind, parts["value"])
            if mask.any():
                values[mask] = np.zeros((), values.dtype)
            return columns.fixed_array(values, mask, kind), at
        present, at = self._fixed(at, ends, np.dtype("u1"))
        mask = self._absent(present, ends)
        if pa.types.is_struct(kind):
            children = []
            for i in range(kind.num_fields):
                child, at = self._column(kind.field(i).type, at, ends)
                children.append(child)
            return columns.struct_array(children, len(at), mask, kind), at
        if pa.types.is_map(kind):
            raise UnsupportedTypeError(f"The type {kind} cannot be in a key: a map has no order.")
        if columns.is_list_like(kind):
            starts, offsets, at = self._elements(kind.value_type, at, ends)
            elements, _ = self._column(kind.value_type, starts, np.repeat(ends, np.diff(offsets)))
            return columns.list_array(elements, offsets, mask, kind), at
        stops = self._string_ends(at, ends)
        content, offsets = self._unescape(*columns.gather_ranges(self._content, at, stops), ends)
        return columns.binary_array(content, offsets, mask, kind), stops + len(_END)

    def _skip(self, kind: pa.DataType, at: columns.Offsets, ends: columns.Offsets) -> columns.Offsets:
        """Return the positions after the values of a column."""
        at = at + 1
        stored = _stored_dtype(kind)
        if stored is not None:
            return at + stored.itemsize
        if pa.types.is_struct(kind):
            for i in range(kind.num_fields):
                at = self._skip(kind.field(i).type, at, ends)
            return at
        if columns.is_list_like(kind):
            return self._elements(kind.value_type, at, ends)[2]
        return self._string_ends(at, ends) + len(_END)

    def _elements(
        self, kind: pa.DataType, at: columns.Offsets, ends: columns.Offsets
    ) -> tuple[columns.Offsets, columns.Offsets, columns.Offsets]:
        """Return where the elements of n arrays begin, their n+1 offsets, and the positions after the arrays.

        Takes as many steps as the longest array has elements, each for all arrays of that length or more.
        """
        behind = np.empty(len(at), np.int64)
        counts = np.zeros(len(at), np.int64)
        reached: list[tuple[columns.Offsets, columns.Offsets]] = []
        arrays = np.arange(len(at))
        while len(arrays):
            flags, at = self._fixed(at, ends, np.dtype("u1"))
            is_end = self._absent(flags, ends)
            behind[arrays[is_end]] = at[is_end]
            more = ~is_end
            arrays, at, ends = arrays[more], at[more], ends[more]
            counts[arrays] += 1
            reached.append((arrays, at))
            at = self._skip(kind, at, ends)
        offsets = columns.offsets_of(counts)
        starts = np.empty(offsets[-1], np.int64)
        for i, (arrays, begun) in enumerate(reached):
            starts[offsets[arrays] + i] = begun
        return starts, offsets, behind

    def _string_ends(self, at: columns.Offsets, ends: columns.Offsets) -> columns.Offsets:
        """Return where strings end: at the first two zero bytes. Inside a string, 0xFF follows each zero."""
        self._check(at <= ends, ends)
        onwards = columns.binary_array(self._content, np.append(at, len(self._content)))
        lengths = np.asarray(pc.find_substring(onwards, _END)).astype(np.int64)
        stops = at + lengths
        self._check((lengths >= 0) & (stops + len(_END) <= ends), ends)
        return stops

    def _unescape(
        self, content: columns.Bytes, offsets: columns.Offsets, ends: columns.Offsets
    ) -> tuple[columns.Bytes, columns.Offsets]:
        zeros = np.flatnonzero(content == 0)
        if not len(zeros):
            return content, offsets
        is_escape = content[zeros + 1] == 0xFF  # the last byte is never zero: a zero there would be part of the end
        if not is_escape.all():
            self._check(is_escape, ends[np.searchsorted(offsets, zeros, "right") - 1])
        return np.delete(content, zeros + 1), offsets - np.searchsorted(zeros, offsets)


KeyRange: TypeAlias = tuple[bytes, bytes | None]
"""From a key (included) to another one (not included; None: no limit)."""
