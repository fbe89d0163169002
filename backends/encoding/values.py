"""Values: typed rows as bytes, whole columns at a time.

A stored row is a schema number (uint16), a bitmap of nulls, the fixed-width columns, for each other column its end in
the data (uint32), and the data. A struct adds a null bit and its fields. An array or map is the number of its elements,
their lengths, and the elements, each of them a row without schema number. Everything is little-endian.

The number says which of the schemas of its column family the row was written with. Rows of earlier schemas stay as they
are until they are written again, and are converted when they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding import columns
from backends.encoding.sorted_pairs import as_binary
from backends.encoding.user_values import converted
from backends.exceptions import SchemaMismatchError

_COUNT = np.dtype("<u4")
_NUMBER = np.dtype("<u2")


@dataclass
class _Part:
    """A null bit of a row's layout, and the field that it belongs to.

    The field has a fixed width (``dtype``), or is stored with the row's data (``is_data``). A struct has neither.
    ``mask`` and ``values`` are those of the column, and are set only while rows are encoded.
    """

    dtype: np.dtype[Any] | None
    is_data: bool
    mask: columns.Mask | None = None
    values: npt.NDArray[Any] | pa.BinaryArray | None = None


def encode_values(batch: pa.RecordBatch, number: int = 0) -> pa.BinaryArray:
    """Return the bytes of each row. ``number`` is the number of the rows' schema.

    Raises ``UnsupportedTypeError`` naming column and type.
    """
    parts = [
        part
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
        for part in _parts(name, columns.normalized_column(name, column))
    ]
    return _encode_rows(parts, batch.num_rows, number)


def decode_values(
    values: pa.Array | pa.ChunkedArray,
    schema: pa.Schema,
    history: Sequence[pa.Schema] = (),
    zeros: Collection[str] = (),
) -> pa.RecordBatch:
    """Return the rows in the columns of ``schema``; a null in ``values`` gives a row of nulls.

    Each row may have been written with ``schema`` or one of ``history``: its number is the index in ``[*history,
    schema]``. Columns that its schema lacks are null, or zero if they are among ``zeros``. Raises
    ``SchemaMismatchError`` if the bytes are of another schema.
    """
    newest, layout = _prepared(schema)
    values = as_binary("values", values)
    even = layout.even_columns(values, len(history))
    if even is not None:
        return pa.RecordBatch.from_arrays(even, schema=newest)
    content, offsets = columns.binary_content(_filled(values, layout, len(history)))
    rows = layout.heads(content, offsets) if layout.fits(offsets).all() else None
    if rows is None or (rows["number"] != len(history)).any():
        arrays = _decode_mixed(content, offsets, [*map(_readable, history), newest], zeros)
    else:
        arrays = layout.columns(rows, content, offsets, schema)
    return pa.RecordBatch.from_arrays(arrays, schema=newest)


def _readable(schema: pa.Schema) -> pa.Schema:
    # All columns are nullable here, whatever the schema says: an absent row is decoded as a row of nulls.
    return pa.schema([pa.field(f.name, columns.normalized_type(f.name, f.type)) for f in schema])


@lru_cache(256)
def _prepared(schema: pa.Schema) -> tuple[pa.Schema, _Layout]:
    """Return the schema of decoded rows, and the layout of stored ones."""
    newest = _readable(schema)
    return newest, _Layout.of(newest.types, numbered=True)


def _decode_mixed(
    content: columns.Bytes, offsets: columns.Offsets, schemas: list[pa.Schema], zeros: Collection[str]
) -> list[pa.Array]:
    """Return rows of several schemas, in the columns of the last schema."""
    newest = len(schemas) - 1
    columns.check_ranges(np.diff(offsets) >= _NUMBER.itemsize, "values", schemas[newest])
    numbers = columns.gather_fixed(content, offsets[:-1], _NUMBER)
    schema_numbers, counts = np.unique(numbers, return_counts=True)
    if schema_numbers[-1] > newest:
        raise SchemaMismatchError(
            f"Stored values have the schema number {schema_numbers[-1]}, and the schema that they are read with has "
            f"the number {newest}: they were written with a later schema or by a newer release, or are not values."
        )
    by_number = np.argsort(numbers, kind="stable")
    values = columns.binary_array(content, offsets)
    if len(schema_numbers) > 1:
        values = values.take(pa.array(by_number))
    parts, begin = [], 0
    for number, count in zip(schema_numbers.tolist(), counts.tolist(), strict=True):
        arrays = _decode_rows(values.slice(begin, count), schemas[number].types, schemas[number], numbered=True)
        parts.append(converted(arrays, schemas[number], schemas[newest], count, zeros))
        begin += count
    if len(parts) == 1:
        return parts[0]
    back = pa.array(np.argsort(by_number, kind="stable"))
    return [pa.concat_arrays(pieces).take(back) for pieces in zip(*parts, strict=True)]


def _parts(name: str, array: pa.Array) -> Iterator[_Part]:
    kind = array.type
    dtype = columns.fixed_dtype(kind)
    mask = columns.null_mask(array)
    if dtype is not None:
        yield _Part(dtype, False, mask, columns.fixed_values(array, dtype))
    elif pa.types.is_struct(kind):
        yield _Part(None, False, mask)
        for i, child in enumerate(array.flatten()):
            child_name = f"{name}.{kind.field(i).name}"
            yield from _parts(child_name, columns.normalized_column(child_name, child))
    elif columns.is_list_like(kind):
        yield _Part(None, True, mask, _encode_lists(name, array))
    else:
        yield _Part(None, True, mask, columns.binary_values(array))


def _layout_of(kind: pa.DataType) -> Iterator[_Part]:
    dtype = columns.fixed_dtype(kind)
    if dtype is None and pa.types.is_struct(kind):
        yield _Part(None, False)
        for i in range(kind.num_fields):
            yield from _layout_of(kind.field(i).type)
    else:
        yield _Part(dtype, dtype is None)


def _row_dtype(parts: list[_Part], *, numbered: bool) -> np.dtype[Any]:
    """Return numpy's type of a row's head: everything but the data."""
    fields: list[tuple[Any, ...]] = [("number", "<u2")] if numbered else []
    fields.append(("nulls", "u1", ((len(parts) + 7) // 8,)))
    fields += [(f"fixed{i}", part.dtype) for i, part in enumerate(parts) if part.dtype is not None]
    fields += [(f"end{i}", _COUNT) for i, part in enumerate(parts) if part.is_data]
    return np.dtype(fields)


def _encode_rows(parts: list[_Part], n: int, number: int | None) -> pa.BinaryArray:
    rows = np.zeros(n, _row_dtype(parts, numbered=number is not None))
    if number is not None:
        rows["number"] = number
    ends = np.zeros(n, np.int64)
    data: list[pa.BinaryArray] = []
    for i, part in enumerate(parts):
        if part.mask is not None:
            rows["nulls"][:, i // 8] |= part.mask.astype(np.uint8) << np.uint8(i % 8)
        if part.dtype is not None:
            rows[f"fixed{i}"] = part.values
        elif part.is_data:
            ends += np.diff(columns.binary_content(part.values)[1])
            rows[f"end{i}"] = ends
            data.append(part.values)
    return columns.join_columns([columns.rows_as_binary(rows), *data])


def _decode_rows(values: pa.BinaryArray, kinds: list[pa.DataType], schema: object, *, numbered: bool) -> list[pa.Array]:
    layout = _Layout.of(kinds, numbered=numbered)
    content, offsets = columns.binary_content(_filled(values, layout))
    columns.check_ranges(layout.fits(offsets), "values", schema)
    return layout.columns(layout.heads(content, offsets), content, offsets, schema)


@dataclass(frozen=True)
class _Layout:
    """The layout of rows of columns of the given types; ``dtype`` is the head of a row, everything but the data."""

    kinds: list[pa.DataType]
    parts: list[_Part]
    dtype: np.dtype[Any]
    has_data: bool

    @classmethod
    def of(cls, kinds: list[pa.DataType], *, numbered: bool) -> _Layout:
        parts = [part for kind in kinds for part in _layout_of(kind)]
        return cls(kinds, parts, _row_dtype(parts, numbered=numbered), any(part.is_data for part in parts))

    def fits(self, offsets: columns.Offsets) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that may be of this layout, by their lengths."""
        lengths = np.diff(offsets)
        return lengths >= self.dtype.itemsize if self.has_data else lengths == self.dtype.itemsize

    def heads(self, content: columns.Bytes, offsets: columns.Offsets) -> npt.NDArray[Any]:
        """Return the heads of the rows, which must all fit."""
        return columns.gather_fixed(content, offsets[:-1], self.dtype) if self.has_data else content.view(self.dtype)

    @cached_property
    def is_flat(self) -> bool:
        """Whether all columns are of fixed width."""
        return all(part.dtype is not None for part in self.parts)

    def even_columns(self, values: pa.BinaryArray, number: int) -> list[pa.Array] | None:
        """Return the columns if all columns are of fixed width, and all rows have this schema number and no null.

        Return None for other rows. This is the fast path of ``decode_values``.
        """
        even = columns.even_rows(values) if self.is_flat else None
        if even is None or even.dtype.itemsize != self.dtype.itemsize:
            return None
        rows = even.view(self.dtype)
        if self.head_mask is None:
            is_plain = not rows["nulls"].any() and bool((rows["number"] == number).all())
        else:  # compare number and nulls as one word
            words: npt.NDArray[np.uint64] = np.ndarray((len(rows),), "<u8", rows, 0, rows.strides)
            words = words & self.head_mask
            is_plain = bool((words == np.uint64(number)).all())
        if not is_plain:
            return None
        return [columns.fixed_array(rows[f"fixed{i}"], None, kind) for i, kind in enumerate(self.kinds)]

    @cached_property
    def head_mask(self) -> np.uint64 | None:
        """The mask of number and nulls in the first 8 bytes of a row; None if they do not fit there."""
        length = _NUMBER.itemsize + int(self.dtype["nulls"].itemsize)
        return np.uint64((1 << 8 * length) - 1) if length <= 8 <= self.dtype.itemsize else None

    def columns(
        self, rows: npt.NDArray[Any], content: columns.Bytes, offsets: columns.Offsets, schema: object
    ) -> list[pa.Array]:
        reader = _RowReader(self.parts, rows, content, offsets, schema)
        arrays = [reader.column(kind) for kind in self.kinds]
        if self.has_data:
            columns.check_ranges(reader.starts == offsets[1:], "values", schema)
        return arrays


def _filled(values: pa.BinaryArray, layout: _Layout, number: int | None = None) -> pa.BinaryArray:
    """Return the values with a row of nulls in the place of each null."""
    if not values.null_count:
        return values
    row = np.zeros(1, layout.dtype)
    row["nulls"] = 0xFF
    if number is not None:
        row["number"] = number
    return values.fill_null(row.tobytes())


class _RowReader:
    """Reads the columns of rows, in the order of their parts."""

    def __init__(
        self,
        parts: list[_Part],
        rows: npt.NDArray[Any],
        content: columns.Bytes,
        offsets: columns.Offsets,
        schema: object,
    ):
        self._parts = parts
        self._rows = rows
        self._content = content
        self._data = offsets[:-1] + rows.dtype.itemsize
        self._ends = offsets[1:]
        self._schema = schema
        self._next = 0
        self.starts = self._data
        """The positions where each row's next data begins."""

    def column(self, kind: pa.DataType) -> pa.Array:
        i = self._next
        self._next += 1
        bits = self._rows["nulls"][:, i // 8] & np.uint8(1 << (i % 8))
        mask = bits != 0
        part = self._parts[i]
        if part.dtype is not None:
            return columns.fixed_array(self._rows[f"fixed{i}"], mask, kind)
        if not part.is_data:
            children = [self.column(kind.field(c).type) for c in range(kind.num_fields)]
            return columns.struct_array(children, len(self._rows), mask, kind)
        stops = self._data + self._rows[f"end{i}"]
        columns.check_ranges((self.starts <= stops) & (stops <= self._ends), "values", self._schema)
        content, offsets = columns.gather_ranges(self._content, self.starts, stops)
        self.starts = stops
        if columns.is_list_like(kind):
            return _decode_lists(content, offsets, mask, kind, self._schema)
        return columns.binary_array(content, offsets, mask, kind)


def _encode_lists(name: str, array: pa.Array) -> pa.BinaryArray:
    elements, offsets = columns.list_parts(array)
    rows = _encode_rows(list(_parts(name, columns.normalized_column(name, elements))), len(elements), None)
    content, ends = columns.binary_content(rows)
    lengths = np.diff(ends).astype(_COUNT)
    counts = np.zeros(len(array), [("count", _COUNT)])
    counts["count"] = np.diff(offsets)
    # All lengths of one row are adjacent, and so are all its elements. So only the offsets change: one offset per row
    # instead of one per element.
    return columns.join_columns(
        [
            columns.rows_as_binary(counts),
            columns.binary_array(lengths.view(np.uint8), offsets * _COUNT.itemsize),
            columns.binary_array(content, ends[offsets]),
        ]
    )


def _decode_lists(
    content: columns.Bytes, offsets: columns.Offsets, mask: columns.Mask, kind: pa.DataType, schema: object
) -> pa.Array:
    starts, stops = offsets[:-1], offsets[1:].copy()
    absent = mask & (starts == stops)  # a row that is not stored at all has no count either
    width = _COUNT.itemsize
    columns.check_ranges(absent | (stops - starts >= width), "values", schema)
    after_count = np.where(absent, starts, starts + width)
    counts = np.zeros(len(starts), np.int64)
    counts[~absent] = columns.gather_fixed(content, starts[~absent], _COUNT)
    after_lengths = after_count + counts * width
    columns.check_ranges(after_lengths <= stops, "values", schema)
    lengths = columns.gather_ranges(content, after_count, after_lengths)[0].view(_COUNT)
    elements, _ = columns.gather_ranges(content, after_lengths, stops)
    ends, firsts = columns.offsets_of(lengths), columns.offsets_of(counts)
    columns.check_ranges(ends[firsts[1:]] - ends[firsts[:-1]] == stops - after_lengths, "values", schema)
    element_kind = pa.struct([kind.key_field, kind.item_field]) if pa.types.is_map(kind) else kind.value_type
    (decoded,) = _decode_rows(columns.binary_array(elements, ends), [element_kind], schema, numbered=False)
    return columns.list_array(decoded, firsts, mask, kind)


# The stored keys of lists of the provider API (``merge``): each element is a separate pair, so appending reads nothing.
#
# The lists of processors (``ListState``) have another layout, see ``spark_bridge/state_format/layouts.py``.
#
# A column family of lists is stored under its name and a mark. The stored key of an element is the user's key, then the
# version that appended the element, and its number within the commit. So elements are stored in the order of their
# appends. The user's key is escaped so that no key is a prefix of another one, and the order of keys stays. (Spark's
# RocksDB provider has the same contract, ``useMultipleValuesPerKey`` and ``merge``, by RocksDB's merge operator.)


_MARK = "!list"
_END = b"\x00\x00"
_SUFFIX_BYTES = 16


def list_family_name(column_family: str) -> str:
    """Return the name under which a column family of lists is stored; no user's family has such a name."""
    return column_family + _MARK


def is_list(stored: str) -> bool:
    """Return whether a stored family holds lists."""
    return stored.endswith(_MARK)


def user_name(stored: str) -> str:
    """Return the user's name of a stored family."""
    return stored.removesuffix(_MARK)


def escape(key: bytes) -> bytes:
    """Return the beginning of the stored keys of all user keys that begin with ``key``. Keeps the order of keys."""
    return key.replace(b"\x00", b"\x00\xff")


def elements_prefix(key: bytes) -> bytes:
    """Return the beginning of the stored keys of one list, which no other keys have."""
    return escape(key) + _END


def element_keys(keys: pa.BinaryArray, version: int, first: int) -> pa.BinaryArray:
    """Return the stored keys of elements that ``version`` appends to the lists ``keys``, numbered from ``first``."""
    suffixes = np.empty((len(keys), 2), ">u8")
    suffixes[:, 0] = version
    suffixes[:, 1] = np.arange(first, first + len(keys))
    tails = pa.Array.from_buffers(pa.binary(_SUFFIX_BYTES), len(keys), [None, pa.py_buffer(suffixes.tobytes())])
    escaped = pc.replace_substring(keys, b"\x00", b"\x00\xff")
    return pc.binary_join_element_wise(escaped, tails.cast(pa.binary()), _END)


def user_keys_of_lists(stored: pa.BinaryArray) -> pa.BinaryArray:
    """Return the user's keys of stored keys."""
    if not len(stored):
        return stored
    return pc.replace_substring(pc.binary_slice(stored, 0, -_SUFFIX_BYTES - len(_END)), b"\x00\xff", b"\x00")
