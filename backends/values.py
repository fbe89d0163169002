"""Values: typed rows as bytes, whole columns at a time.

A row is: schema number (uint16, little-endian, 0 so far), a bitmap of nulls, the fixed-width
columns, for each other column where it ends in the data (uint32), the data. A struct adds a null
bit and its fields; an array or map is its count, the lengths of its elements, and the elements,
each of them a row without schema number. All little-endian.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.columns import (
    Bytes,
    Mask,
    Offsets,
    binary_array,
    binary_content,
    binary_values,
    check_ranges,
    fixed_array,
    fixed_dtype,
    fixed_values,
    gather_fixed,
    gather_ranges,
    is_list_like,
    join,
    list_array,
    list_parts,
    null_mask,
    plain,
    rows_as_binary,
    struct_array,
)
from backends.exceptions import SchemaMismatchError
from backends.schema import normalized_type
from backends.sorted_pairs import as_binary

SCHEMA_NUMBER = 0
_COUNT = np.dtype("<u4")


@dataclass
class _Part:
    """One node of a row's layout, with its column's values while encoding.

    ``dtype`` None and ``is_data`` False is a struct, which has only its null bit.
    """

    dtype: np.dtype[Any] | None
    is_data: bool
    mask: Mask | None = None
    values: npt.NDArray[Any] | pa.BinaryArray | None = None


def encode_values(batch: pa.RecordBatch) -> pa.BinaryArray:
    """The bytes of each row; raises ``UnsupportedTypeError`` naming column and type."""
    parts = [
        part
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
        for part in _parts(name, plain(name, column))
    ]
    return _encode_rows(parts, batch.num_rows, numbered=True)


def decode_values(values: pa.Array | pa.ChunkedArray, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of ``schema``; a null in ``values`` gives a row of nulls.

    Raises ``SchemaMismatchError`` if the bytes are of another schema.
    """
    fields = [f.with_type(normalized_type(f.name, f.type)) for f in schema]
    columns = _decode_rows(as_binary("values", values), [f.type for f in fields], schema, numbered=True)
    # Where the schema forbids nulls, an absent row still is one.
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([f.with_nullable(True) for f in fields]))


def _parts(name: str, array: pa.Array) -> Iterator[_Part]:
    kind = array.type
    dtype = fixed_dtype(kind)
    mask = null_mask(array)
    if dtype is not None:
        yield _Part(dtype, False, mask, fixed_values(array, dtype))
    elif pa.types.is_struct(kind):
        yield _Part(None, False, mask)
        for i, child in enumerate(array.flatten()):
            child_name = f"{name}.{kind.field(i).name}"
            yield from _parts(child_name, plain(child_name, child))
    elif is_list_like(kind):
        yield _Part(None, True, mask, _encode_lists(name, array))
    else:
        yield _Part(None, True, mask, binary_values(array))


def _layout_of(kind: pa.DataType) -> Iterator[_Part]:
    dtype = fixed_dtype(kind)
    if dtype is None and pa.types.is_struct(kind):
        yield _Part(None, False)
        for i in range(kind.num_fields):
            yield from _layout_of(kind.field(i).type)
    else:
        yield _Part(dtype, dtype is None)


def _row_dtype(parts: list[_Part], *, numbered: bool) -> np.dtype[Any]:
    """The head of a row: everything but the data."""
    fields: list[tuple[Any, ...]] = [("number", "<u2")] if numbered else []
    fields.append(("nulls", "u1", ((len(parts) + 7) // 8,)))
    fields += [(f"fixed{i}", part.dtype) for i, part in enumerate(parts) if part.dtype is not None]
    fields += [(f"end{i}", _COUNT) for i, part in enumerate(parts) if part.is_data]
    return np.dtype(fields)


def _encode_rows(parts: list[_Part], n: int, *, numbered: bool) -> pa.BinaryArray:
    rows = np.zeros(n, _row_dtype(parts, numbered=numbered))
    if numbered:
        rows["number"] = SCHEMA_NUMBER
    ends = np.zeros(n, np.int64)
    data: list[pa.BinaryArray] = []
    for i, part in enumerate(parts):
        if part.mask is not None:
            rows["nulls"][:, i // 8] |= part.mask.astype(np.uint8) << np.uint8(i % 8)
        if part.dtype is not None:
            rows[f"fixed{i}"] = part.values
        elif part.is_data:
            ends += np.diff(binary_content(part.values)[1])
            rows[f"end{i}"] = ends
            data.append(part.values)
    return join([rows_as_binary(rows), *data])


def _decode_rows(values: pa.BinaryArray, kinds: list[pa.DataType], schema: object, *, numbered: bool) -> list[pa.Array]:
    parts = [part for kind in kinds for part in _layout_of(kind)]
    dtype = _row_dtype(parts, numbered=numbered)
    if values.null_count:
        values = values.fill_null(_null_row(dtype))
    content, offsets = binary_content(values)
    has_data = any(part.is_data for part in parts)
    lengths = np.diff(offsets)
    check_ranges(lengths >= dtype.itemsize if has_data else lengths == dtype.itemsize, "values", schema)
    rows = gather_fixed(content, offsets[:-1], dtype) if has_data else content.view(dtype)
    if numbered and (rows["number"] != SCHEMA_NUMBER).any():
        raise SchemaMismatchError(
            f"Stored values have the schema number {int(rows['number'].max())}; this release writes {SCHEMA_NUMBER}. "
            "They were written by a newer release, or are not values."
        )
    reader = _Reader(parts, rows, content, offsets, schema)
    columns = [reader.column(kind) for kind in kinds]
    if has_data:
        check_ranges(reader.starts == offsets[1:], "values", schema)
    return columns


def _null_row(dtype: np.dtype[Any]) -> bytes:
    row = np.zeros(1, dtype)
    row["nulls"] = 0xFF
    return row.tobytes()


class _Reader:
    """Takes the columns out of rows, in the order of their parts."""

    def __init__(self, parts: list[_Part], rows: npt.NDArray[Any], content: Bytes, offsets: Offsets, schema: object):
        self._parts = parts
        self._rows = rows
        self._content = content
        self._data = offsets[:-1] + rows.dtype.itemsize
        self._ends = offsets[1:]
        self._schema = schema
        self._next = 0
        self.starts = self._data
        """Where each row's next data begins."""

    def column(self, kind: pa.DataType) -> pa.Array:
        i = self._next
        self._next += 1
        bits = self._rows["nulls"][:, i // 8] & np.uint8(1 << (i % 8))
        mask = bits != 0
        part = self._parts[i]
        if part.dtype is not None:
            return fixed_array(self._rows[f"fixed{i}"], mask, kind)
        if not part.is_data:
            children = [self.column(kind.field(c).type) for c in range(kind.num_fields)]
            return struct_array(children, len(self._rows), mask, kind)
        stops = self._data + self._rows[f"end{i}"]
        check_ranges((self.starts <= stops) & (stops <= self._ends), "values", self._schema)
        content, offsets = gather_ranges(self._content, self.starts, stops)
        self.starts = stops
        if is_list_like(kind):
            return _decode_lists(content, offsets, mask, kind, self._schema)
        return binary_array(content, offsets, mask, kind)


def _encode_lists(name: str, array: pa.Array) -> pa.BinaryArray:
    elements, offsets = list_parts(array)
    rows = _encode_rows(list(_parts(name, plain(name, elements))), len(elements), numbered=False)
    content, ends = binary_content(rows)
    lengths = np.diff(ends).astype(_COUNT)
    counts = np.zeros(len(array), [("count", _COUNT)])
    counts["count"] = np.diff(offsets)
    # Lengths and elements of one row lie together already: they only need other offsets.
    return join(
        [
            rows_as_binary(counts),
            binary_array(lengths.view(np.uint8), offsets * _COUNT.itemsize),
            binary_array(content, ends[offsets]),
        ]
    )


def _decode_lists(content: Bytes, offsets: Offsets, mask: Mask, kind: pa.DataType, schema: object) -> pa.Array:
    starts, stops = offsets[:-1], offsets[1:].copy()
    absent = mask & (starts == stops)  # a row that is not stored at all has not even a count
    width = _COUNT.itemsize
    check_ranges(absent | (stops - starts >= width), "values", schema)
    after_count = np.where(absent, starts, starts + width)
    counts = np.zeros(len(starts), np.int64)
    counts[~absent] = gather_fixed(content, starts[~absent], _COUNT)
    after_lengths = after_count + counts * width
    check_ranges(after_lengths <= stops, "values", schema)
    lengths = gather_ranges(content, after_count, after_lengths)[0].view(_COUNT)
    elements, _ = gather_ranges(content, after_lengths, stops)
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    firsts = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(counts, out=firsts[1:])
    check_ranges(ends[firsts[1:]] - ends[firsts[:-1]] == stops - after_lengths, "values", schema)
    element_kind = pa.struct([kind.key_field, kind.item_field]) if pa.types.is_map(kind) else kind.value_type
    (decoded,) = _decode_rows(binary_array(elements, ends), [element_kind], schema, numbered=False)
    return list_array(decoded, firsts, mask, kind)
