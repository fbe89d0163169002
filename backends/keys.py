"""Keys as bytes whose order is the order of the values, whole columns at a time.

A key is its key group (2 bytes, big-endian), then per column a byte that is 0 for null and 1 for a
value, then the value: integers, dates and timestamps big-endian with the sign bit flipped; floats
likewise by their bits (-0.0 as 0.0, every NaN as one and the greatest, as Spark orders them);
decimals as 16 bytes; strings and binary with 0x00 written as 0x00 0xFF and 0x00 0x00 at the end;
structs as their fields; arrays as elements with 0x01 before each and 0x00 at the end.
A null of a fixed-width column takes the width of its column, so such keys all have one length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.columns import (
    Mask,
    Offsets,
    binary_array,
    binary_content,
    binary_values,
    check_ranges,
    fixed_array,
    fixed_dtype,
    fixed_values,
    gather_ranges,
    is_list_like,
    join,
    list_parts,
    null_mask,
    plain,
    rows_as_binary,
    struct_array,
)
from backends.exceptions import InvalidStateStoreArgument, SchemaMismatchError, UnsupportedTypeError
from backends.key_groups import MAX_KEY_GROUPS
from backends.schema import normalized_type
from backends.sorted_pairs import as_binary, to_bytes_list

GROUP_BYTES = 2

Piece: TypeAlias = npt.NDArray[Any] | pa.BinaryArray
"""A run of bytes per row: all of one width (numpy), or not (Arrow)."""


def encode_keys(batch: pa.RecordBatch, groups: npt.NDArray[Any]) -> pa.BinaryArray:
    """The key of each row; ``groups`` are the rows' key groups (any integer type).

    Raises ``UnsupportedTypeError`` naming column and type, ``InvalidStateStoreArgument`` if the
    groups do not fit the rows.
    """
    groups = np.asarray(groups)
    if len(groups) != batch.num_rows:
        raise InvalidStateStoreArgument(f"{batch.num_rows} rows came with {len(groups)} key groups.")
    if len(groups) and not (groups.min() >= 0 and groups.max() < MAX_KEY_GROUPS):
        raise InvalidStateStoreArgument(
            f"Key groups must be 0 to {MAX_KEY_GROUPS - 1}, not {groups.min()} to {groups.max()}."
        )
    pieces: list[Piece] = [groups.astype(">u2")]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        pieces += _pieces(name, plain(name, column))
    return _assemble(pieces, batch.num_rows)


def decode_keys(keys: pa.Array | pa.ChunkedArray, schema: pa.Schema) -> pa.RecordBatch:
    """The key columns of encoded keys, without the key group.

    Raises ``SchemaMismatchError`` if the bytes are no keys of that schema.
    """
    keys = as_binary("keys", keys)
    if keys.null_count:
        raise InvalidStateStoreArgument(f"{keys.null_count} of {len(keys)} keys are null; a key cannot be null.")
    fields = [f.with_type(normalized_type(f.name, f.type)) for f in schema]
    if any(_has_list(f.type) for f in fields):
        columns = _decode_by_row(keys, [f.type for f in fields], schema)
    else:
        reader = _Reader(keys, [f.type for f in fields], schema)
        columns = [reader.column(f.type) for f in fields]
        reader.check_end()
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _pieces(name: str, array: pa.Array) -> Iterator[Piece]:
    kind = array.type
    mask = null_mask(array)
    yield np.ones(len(array), np.uint8) if mask is None else (~mask).astype(np.uint8)
    dtype = fixed_dtype(kind)
    if dtype is not None:
        values = _ordered(kind, fixed_values(array, dtype))
        if mask is not None:
            values[mask] = np.zeros((), values.dtype)
        yield values
    elif pa.types.is_struct(kind):
        for i, child in enumerate(array.flatten()):
            child_name = f"{name}.{kind.field(i).name}"
            yield from _pieces(child_name, plain(child_name, child))
    elif pa.types.is_map(kind):
        raise UnsupportedTypeError(f"Column {name!r} has the type {kind}: a map has no order and cannot be a key.")
    elif is_list_like(kind):
        elements, offsets = list_parts(array)
        element_name = f"{name}.element"
        marked = [np.ones(len(elements), np.uint8), *_pieces(element_name, plain(element_name, elements))]
        content, ends = binary_content(_assemble(marked, len(elements)))
        yield binary_array(content, ends[offsets])
        yield np.zeros(len(array), np.uint8)
    else:
        yield _escape(binary_values(array))
        yield np.zeros(len(array), "<u2")


def _escape(values: pa.BinaryArray) -> pa.BinaryArray:
    content, _ = binary_content(values)
    return values if content.all() else pc.replace_substring(values, b"\x00", b"\x00\xff")


def _assemble(pieces: list[Piece], n: int) -> pa.BinaryArray:
    """Join pieces; neighbours of fixed width become one structured array first."""
    parts: list[pa.BinaryArray] = []
    run: list[npt.NDArray[Any]] = []
    for piece in [*pieces, None]:
        if isinstance(piece, np.ndarray):
            run.append(piece)
            continue
        if run:
            rows = np.empty(n, [(f"f{i}", values.dtype) for i, values in enumerate(run)])
            for i, values in enumerate(run):
                rows[f"f{i}"] = values
            parts.append(rows_as_binary(rows))
            run = []
        if piece is not None:
            parts.append(piece)
    return join(parts)


def _ordered(kind: pa.DataType, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Values as big-endian numbers (or bytes) that sort as the values do; always a fresh array."""
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
        return flipped.astype(f">u{width}")
    canonical = np.where(np.isnan(values), np.array(np.nan, values.dtype), values + values.dtype.type(0))
    bits: npt.NDArray[Any] = canonical.view(unsigned)
    ordered: npt.NDArray[Any] = np.where(bits & sign, ~bits, bits ^ sign)
    return ordered.astype(f">u{width}")


def _unordered(kind: pa.DataType, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The inverse of ``_ordered``."""
    dtype = fixed_dtype(kind)
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
    dtype = fixed_dtype(kind)
    if dtype is None or pa.types.is_decimal(kind) or pa.types.is_boolean(kind):
        return dtype
    return np.dtype(f">u{dtype.itemsize}")


def _has_list(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        raise UnsupportedTypeError(f"The type {kind} cannot be in a key: a map has no order.")
    return is_list_like(kind) or any(_has_list(kind.field(i).type) for i in range(kind.num_fields))


class _Reader:
    """Takes columns out of keys without arrays, run of fixed-width fields by run."""

    def __init__(self, keys: pa.BinaryArray, kinds: list[pa.DataType], schema: object) -> None:
        self._content, self._offsets = binary_content(keys)
        self._n = len(keys)
        self._schema = schema
        self._at: Offsets = self._offsets[:-1]
        self._ends: Offsets | None = None
        self._runs = _runs(kinds)
        self._rows: npt.NDArray[Any] = np.zeros(0)
        self._field = 0
        self._next_run()
        self._field = 1  # past the key group

    def _next_run(self) -> None:
        dtype = next(self._runs)
        stops = self._at + dtype.itemsize
        check_ranges(stops <= self._offsets[1:], "keys", self._schema)
        content, _ = gather_ranges(self._content, self._at, stops)
        self._rows = np.frombuffer(content, dtype, count=self._n) if self._n else np.zeros(0, dtype)
        self._at = stops
        self._field = 0

    def _take(self) -> npt.NDArray[Any]:
        taken = self._rows[f"f{self._field}"]
        self._field += 1
        return taken

    def column(self, kind: pa.DataType) -> pa.Array:
        present: npt.NDArray[Any] = self._take()
        check_ranges(present <= 1, "keys", self._schema)
        mask: Mask = present == 0
        if fixed_dtype(kind) is not None:
            return fixed_array(self._zeroed(_unordered(kind, self._take()), mask), mask, kind)
        if pa.types.is_struct(kind):
            children = [self.column(kind.field(i).type) for i in range(kind.num_fields)]
            return struct_array(children, self._n, mask, kind)
        starts, stops = self._at, self._string_ends()
        self._at = stops
        self._next_run()
        check_ranges(self._take() == 0, "keys", self._schema)
        content, offsets = gather_ranges(self._content, starts, stops)
        if not content.all():
            escaped = binary_array(content, offsets)
            content, offsets = binary_content(pc.replace_substring(escaped, b"\x00\xff", b"\x00"))
        return binary_array(content, offsets, mask, kind)

    @staticmethod
    def _zeroed(values: npt.NDArray[Any], mask: Mask) -> npt.NDArray[Any]:
        if mask.any():
            values[mask] = np.zeros((), values.dtype)
        return values

    def _string_ends(self) -> Offsets:
        """Where the string beginning at the current position of each row ends: the first 0x00 without 0xFF behind."""
        if self._ends is None:
            zeros = np.flatnonzero(self._content == 0)
            followed = np.append(self._content, np.uint8(0))[zeros + 1]
            self._ends = zeros[followed != 0xFF]
        found = np.searchsorted(self._ends, self._at)
        check_ranges(found < len(self._ends), "keys", self._schema)
        return self._ends[found]

    def check_end(self) -> None:
        """Raise unless every key has been read to its end."""
        check_ranges(self._at == self._offsets[1:], "keys", self._schema)


def _runs(kinds: list[pa.DataType]) -> Iterator[np.dtype[Any]]:
    """The fixed-width runs of a key, each up to the next string's bytes."""
    run: list[Any] = [">u2"]

    def walk(kind: pa.DataType) -> Iterator[np.dtype[Any]]:
        nonlocal run
        run.append("u1")
        stored = _stored_dtype(kind)
        if stored is not None:
            run.append(stored)
        elif pa.types.is_struct(kind):
            for i in range(kind.num_fields):
                yield from walk(kind.field(i).type)
        else:
            yield np.dtype([(f"f{i}", t) for i, t in enumerate(run)])
            run = ["<u2"]

    for kind in kinds:
        yield from walk(kind)
    yield np.dtype([(f"f{i}", t) for i, t in enumerate(run)])


def _decode_by_row(keys: pa.BinaryArray, kinds: list[pa.DataType], schema: object) -> list[pa.Array]:
    """Keys with arrays in them: their shape differs from row to row."""
    columns: list[list[Any]] = [[] for _ in kinds]
    for row, key in enumerate(to_bytes_list(keys)):
        assert key is not None
        at = GROUP_BYTES
        try:
            for column, kind in zip(columns, kinds, strict=True):
                value, at = _decode_one(kind, key, at)
                column.append(value)
        except (IndexError, ValueError, struct.error) as error:
            raise SchemaMismatchError(f"Stored key {row} is not of the schema [{schema}]: {error}") from error
        check_ranges(at == len(key), "keys", schema)
    return [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]


def _decode_one(kind: pa.DataType, key: bytes, at: int) -> tuple[Any, int]:
    """One value and the position behind it, as Python objects that ``pa.array`` takes for ``kind``."""
    present, at = key[at] == 1, at + 1
    stored = _stored_dtype(kind)
    if stored is not None:
        end = at + stored.itemsize
        value = _unordered(kind, np.frombuffer(key[at:end], stored, count=1))
        if not present:
            return None, end
        if pa.types.is_decimal(kind):
            digits = int.from_bytes(value.tobytes(), "little", signed=True)
            return Decimal((digits < 0, tuple(map(int, str(abs(digits)))), -kind.scale)), end
        return (bool(value[0]) if pa.types.is_boolean(kind) else value[0].item()), end
    if pa.types.is_struct(kind):
        fields = {}
        for i in range(kind.num_fields):
            fields[kind.field(i).name], at = _decode_one(kind.field(i).type, key, at)
        return (fields if present else None), at
    if is_list_like(kind):
        elements = []
        while key[at] == 1:
            element, at = _decode_one(kind.value_type, key, at + 1)
            elements.append(element)
        return (elements if present else None), at + 1
    end = at
    while True:
        end = key.index(b"\x00", end)
        if key[end + 1] == 0:
            break
        end += 2
    content = key[at:end].replace(b"\x00\xff", b"\x00")
    if not present:
        return None, end + 2
    return (content.decode() if pa.types.is_string(kind) else content), end + 2
