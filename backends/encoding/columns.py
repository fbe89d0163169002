"""Arrow columns as numpy arrays and back, for the encoders: whole columns at a time.

Every function takes slices (with an offset), chunked and dictionary-encoded columns, and nulls.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.exceptions import InvalidStateStoreArgument, SchemaMismatchError, UnsupportedTypeError

# The types of columns by their names in Spark's ``StructType.json()``, and the Arrow type that stands for each.


_FROM_SPARK: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_TO_SPARK: dict[pa.DataType, str] = {
    **{arrow: spark for spark, arrow in _FROM_SPARK.items()},
    pa.large_string(): "string",
    pa.large_binary(): "binary",
}


_STORABLE = f"State can have {', '.join(_FROM_SPARK)}, decimal(p,s), array, map and struct."
INTERVAL_REMEDY = (
    "Keep an interval of days to seconds as its seconds, extract(DAY FROM i) * 86400L + extract(HOUR FROM i) * 3600 + "
    "extract(MINUTE FROM i) * 60 + extract(SECOND FROM i), and one of years to months as its months, "
    "extract(YEAR FROM i) * 12 + extract(MONTH FROM i)."
)
_DECIMAL = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")


def normalized_type(name: str, data_type: pa.DataType) -> pa.DataType:
    """Return the one Arrow type that stands for a column's Spark type; raises ``UnsupportedTypeError``.

    ``name`` is the column's, for the message.
    """
    return from_spark_type(to_spark_type(name, data_type))


def to_spark_type(name: str, data_type: pa.DataType) -> Any:
    """Return Spark's JSON for an Arrow type: a name, or a dict for arrays, maps and structs.

    ``name`` is the column's, for the message. Raises ``UnsupportedTypeError``.
    """
    if pa.types.is_dictionary(data_type):
        return to_spark_type(name, data_type.value_type)
    if pa.types.is_timestamp(data_type) and data_type.tz is not None and data_type.unit == "us":
        return "timestamp"
    if pa.types.is_decimal128(data_type):
        return f"decimal({data_type.precision},{data_type.scale})"
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        return {
            "type": "array",
            "elementType": to_spark_type(f"{name}.element", data_type.value_type),
            "containsNull": data_type.value_field.nullable,
        }
    if pa.types.is_map(data_type):
        return {
            "type": "map",
            "keyType": to_spark_type(f"{name}.key", data_type.key_type),
            "valueType": to_spark_type(f"{name}.value", data_type.item_type),
            "valueContainsNull": data_type.item_field.nullable,
        }
    if pa.types.is_struct(data_type):
        return spark_struct_json([data_type.field(i) for i in range(data_type.num_fields)], f"{name}.")
    spark = _TO_SPARK.get(data_type)
    if spark is None:
        raise UnsupportedTypeError(
            f"Column {name!r} has the type {data_type}, which cannot be stored. Cast it to one of: "
            f"{', '.join(_FROM_SPARK)}, decimal(p,s), array, map or struct (timestamps in microseconds)."
        )
    return spark


def spark_struct_json(fields: list[pa.Field], prefix: str = "") -> dict[str, Any]:
    """Return Spark's JSON for a struct of Arrow fields; ``prefix`` comes before their names in messages.

    Raises ``UnsupportedTypeError``, and ``InvalidStateStoreArgument`` for two fields of one name.
    """
    names = [f.name for f in fields]
    if len(set(names)) != len(names):
        raise InvalidStateStoreArgument(f"Two columns have the same name: {', '.join(prefix + n for n in names)}.")
    return {
        "type": "struct",
        "fields": [
            {"name": f.name, "type": to_spark_type(prefix + f.name, f.type), "nullable": f.nullable, "metadata": {}}
            for f in fields
        ],
    }


def from_spark_type(spark: Any) -> pa.DataType:
    """Return the Arrow type of one of Spark's JSON types; raises ``InvalidStateStoreArgument``."""
    if isinstance(spark, str):
        if spark in _FROM_SPARK:
            return _FROM_SPARK[spark]
        decimal = _DECIMAL.fullmatch(spark)
        if decimal:
            with suppress(ValueError, OverflowError):  # more digits than a decimal can have
                return pa.decimal128(int(decimal[1]), int(decimal[2]))
    elif isinstance(spark, dict):
        match spark:
            case {"type": "array", "elementType": element, "containsNull": bool(nullable)}:
                return pa.list_(pa.field("element", from_spark_type(element), nullable))
            case {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": bool(nullable)}:
                return pa.map_(from_spark_type(key), pa.field("value", from_spark_type(value), nullable))
            case {"type": "struct", "fields": list(fields)}:
                return pa.struct(arrow_fields(fields))
    remedy = "Cast the column to one of these."
    if isinstance(spark, str) and spark.startswith("interval"):
        remedy = INTERVAL_REMEDY
    raise InvalidStateStoreArgument(f"{spark!r} is not a type that state can have. {_STORABLE} {remedy}")


def arrow_fields(fields: list[Any]) -> list[pa.Field]:
    """Return the Arrow fields of the ``fields`` of Spark's JSON for a struct; raises ``InvalidStateStoreArgument``."""
    arrow = []
    for f in fields:
        match f:
            case {"name": str(name), "type": spark, "nullable": bool(nullable)}:
                try:
                    arrow.append(pa.field(name, from_spark_type(spark), nullable))
                except InvalidStateStoreArgument as error:
                    raise InvalidStateStoreArgument(f"Field {name!r}: {error}") from error
            case _:
                raise InvalidStateStoreArgument(f"{f!r} is not a field as Spark's StructType.json() writes it.")
    return arrow


Mask = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]
Integers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Records = npt.NDArray[np.void]

MAX_BYTES = (1 << 31) - 1
"""The most bytes of one Arrow binary array: its offsets are int32."""

_FIXED: dict[pa.DataType, str] = {
    pa.bool_(): "u1",
    pa.int8(): "i1",
    pa.int16(): "i2",
    pa.int32(): "i4",
    pa.int64(): "i8",
    pa.float32(): "f4",
    pa.float64(): "f8",
    pa.date32(): "i4",
    pa.timestamp("us"): "i8",
    pa.timestamp("us", tz="UTC"): "i8",
}


def fixed_dtype(data_type: pa.DataType) -> np.dtype[Any] | None:
    """Return the little-endian numpy type of a fixed-width column; None for any other column."""
    if pa.types.is_decimal128(data_type):
        return np.dtype("V16")
    code = _FIXED.get(data_type)
    return None if code is None else np.dtype(f"<{code}")


def refuse_map(name: str, data_type: pa.DataType) -> None:
    """Raise ``UnsupportedTypeError`` if a key column is a map; ``name`` is the column's, for the message."""
    if pa.types.is_map(data_type):
        raise UnsupportedTypeError(f"Column {name!r} has the type {data_type}: a map has no order and cannot be a key.")


def is_list_like(data_type: pa.DataType) -> bool:
    """Return whether a type is that of arrays or maps, with several elements per row."""
    return bool(pa.types.is_list(data_type) or pa.types.is_large_list(data_type) or pa.types.is_map(data_type))


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array. Raises ``pa.ArrowInvalid`` if it has more bytes than an array can."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    # ``combine_chunks`` may return chunks: of no chunks at all, and for too many bytes.
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def normalized_column(name: str, column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one contiguous array of its normalised type.

    ``name`` is the column's, for the message. Arrays, maps and structs are left as they are inside. Raises
    ``UnsupportedTypeError`` for the type, and ``InvalidStateStoreArgument`` for more bytes than an array can hold.
    """
    if column.type in _FIXED:
        return one_array(column)
    wanted = normalized_type(name, column.type)
    try:
        column = one_array(column)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if column.type != wanted and not pa.types.is_nested(wanted):
            column = column.cast(wanted)
    except pa.ArrowInvalid as error:
        raise InvalidStateStoreArgument(
            f"Column {name!r} has more than the 2 GiB that an Arrow array holds: use smaller batches ({error})."
        ) from error
    return column


def null_mask(array: pa.Array) -> Mask | None:
    """Return a mask that is true where the array is null; None if it is null nowhere."""
    if not array.null_count:
        return None
    return np.asarray(array.is_null())


def validity(mask: Mask | None) -> pa.Buffer | None:
    """Return Arrow's validity bitmap of a null mask."""
    if mask is None or not mask.any():
        return None
    return pa.py_buffer(np.packbits(~mask, bitorder="little"))


def fixed_values(array: pa.Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a fixed-width column's values; nulls are zero, so that equal rows give equal bytes."""
    n = len(array)
    if pa.types.is_boolean(array.type):
        bits = array.fill_null(False) if array.null_count else array
        return np.asarray(bits).astype(np.uint8)
    content = array.buffers()[1]
    if n == 0 or content is None:
        return np.zeros(n, dtype)
    values = np.frombuffer(content, dtype, count=array.offset + n)[array.offset :]
    mask = null_mask(array)
    if mask is not None:
        values = values.copy()
        values[mask] = np.zeros((), dtype)
    return values


def fixed_array(values: npt.NDArray[Any], mask: Mask | None, data_type: pa.DataType) -> pa.Array:
    """Return the inverse of ``fixed_values``."""
    n = len(values)
    if pa.types.is_boolean(data_type):
        values = np.packbits(values.astype(np.bool_), bitorder="little")
    return pa.Array.from_buffers(data_type, n, [validity(mask), _buffer(values)])


def binary_values(array: pa.Array) -> pa.BinaryArray:
    """Return a string or binary column as binary, with empty values for nulls."""
    if pa.types.is_string(array.type):
        array = array.cast(pa.binary())
    return array.fill_null(b"") if array.null_count else array


def binary_content(array: pa.BinaryArray) -> tuple[Bytes, Offsets]:
    """Return all bytes of a binary array of n elements, and the n+1 offsets into them, from 0."""
    n = len(array)
    if n == 0:
        return np.zeros(0, np.uint8), np.zeros(1, np.int64)
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + n + 1].astype(np.int64)
    content = array.buffers()[2]
    first, last = int(offsets[0]), int(offsets[-1])
    if content is None or first == last:
        return np.zeros(0, np.uint8), offsets - first
    return np.frombuffer(content, np.uint8)[first:last], offsets - first


def content_bytes(array: pa.BinaryArray) -> int:
    """Return how many bytes the elements have together."""
    n = len(array)
    if not n:
        return 0
    bounds = np.frombuffer(array.buffers()[1], np.int32, n + 1, 4 * array.offset)
    return int(bounds[n]) - int(bounds[0])


def binary_array(
    content: Bytes, offsets: npt.NDArray[Any], mask: Mask | None = None, data_type: pa.DataType | None = None
) -> pa.BinaryArray:
    """Return the binary (or string) array of bytes and n+1 offsets. The inverse of ``binary_content``."""
    check_size(int(offsets[-1]))
    buffers = [validity(mask), _buffer(offsets.astype(np.int32)), _buffer(content)]
    return pa.Array.from_buffers(data_type or pa.binary(), len(offsets) - 1, buffers)


def rows_as_binary(rows: npt.NDArray[Any]) -> pa.BinaryArray:
    """Return the bytes of each record of a structured array as a binary array."""
    return even_array(np.ascontiguousarray(rows))


EVEN_ROWS = 1 << 13
"""Arrays of at most this many elements of one width share one buffer of offsets. Readers know its content."""
EVEN_WIDTH = 1 << 8
"""The largest width whose offsets are shared."""
_EVEN_OFFSETS: dict[int, pa.Buffer] = {}
_EVEN_WIDTHS: dict[int, int] = {}
"""Maps the addresses of the shared offsets to their widths. Entries are never removed."""


@lru_cache(EVEN_WIDTH)
def record(width: int) -> np.dtype[np.void]:
    """Return numpy's type of records of ``width`` bytes."""
    return np.dtype(f"V{width}")


def _even_offsets(n: int, width: int) -> pa.Buffer:
    """Return the offsets of n elements of one width; the shared ones may be of more elements."""
    if n > EVEN_ROWS or width > EVEN_WIDTH:
        check_size(n * width)
        return pa.py_buffer(np.arange(0, n * width + 1, width, dtype=np.int32))
    shared = _EVEN_OFFSETS.get(width)
    if shared is None:
        offsets = np.arange(0, EVEN_ROWS * width + 1, width, dtype=np.int32)
        offsets.flags.writeable = False
        shared = _EVEN_OFFSETS.setdefault(width, pa.py_buffer(offsets))  # another thread may have been first
        _EVEN_WIDTHS[shared.address] = width
    return shared


def even_rows(array: pa.BinaryArray) -> Records | None:
    """Return the elements as records of equal width, without a copy.

    Return None if the widths differ, if there are nulls or no elements, or if all elements are empty.
    """
    n = len(array)
    mask, bounds, content = array.buffers()
    if not n or (mask is not None and array.null_count):
        return None
    rows: Records
    width = _EVEN_WIDTHS.get(bounds.address)
    if width is not None:
        rows = np.ndarray((n,), record(width), content, width * array.offset)
        return rows
    offsets = np.frombuffer(bounds, np.int32, n + 1, 4 * array.offset)
    first = int(offsets[0])
    width = int(offsets[1]) - first
    if width <= 0 or int(offsets[n]) - first != n * width or not (offsets[1:] - offsets[:-1] == width).all():
        return None
    rows = np.ndarray((n,), record(width), content, first)
    return rows


def even_array(rows: npt.NDArray[Any]) -> pa.BinaryArray:
    """Return contiguous records as a binary array over the same memory, which must not change any more.

    The inverse of ``even_rows``.
    """
    n = len(rows)
    return pa.Array.from_buffers(
        pa.binary(), n, [None, _even_offsets(n, rows.dtype.itemsize), pa.py_buffer(rows if n else b"")]
    )


def concatenated(arrays: Sequence[pa.BinaryArray]) -> pa.BinaryArray:
    """Return several arrays as one. Raises ``pa.ArrowInvalid`` if they have more bytes than an array can."""
    if len(arrays) == 1:
        return arrays[0]
    return pa.concat_arrays(arrays) if arrays else pa.array([], pa.binary())


def _all_even(arrays: Sequence[pa.BinaryArray]) -> list[Records] | None:
    """Return the elements of each array as records, all of one width; None if one array cannot hold them together."""
    rows: list[Records] = []
    for array in arrays:
        even = even_rows(array)
        if even is None or (rows and even.dtype.itemsize != rows[0].dtype.itemsize):
            return None
        rows.append(even)
    return rows if sum(map(len, rows)) * rows[0].dtype.itemsize <= MAX_BYTES else None


def take_binary(array: pa.BinaryArray, rows: Offsets) -> pa.BinaryArray:
    """Return the elements in these rows, as Arrow's ``take`` does, in less time if all have one width.

    The caller guarantees that the rows exist.
    """
    even = even_rows(array)
    return array.take(pa.array(rows)) if even is None else even_array(even.take(rows))


def placed(arrays: Sequence[pa.BinaryArray], rows: Sequence[Offsets]) -> pa.BinaryArray:
    """Return one array with each element in its row of ``rows``; every row must come once. This is the inverse of
    ``take_binary``. Raises ``pa.ArrowInvalid`` if the elements have more bytes than an array can.
    """
    even = _all_even(arrays)
    if even is None:
        places = np.concatenate(rows)
        back = np.empty(len(places), np.int64)
        back[places] = np.arange(len(places))
        return concatenated(arrays).take(pa.array(back))
    in_place = np.empty(sum(map(len, rows)), even[0].dtype)
    for part, places in zip(even, rows, strict=True):
        in_place[places] = part
    return even_array(in_place)


def join_columns(parts: list[pa.BinaryArray]) -> pa.BinaryArray:
    """Return one array with the parts of each row joined."""
    if len(parts) == 1:
        return parts[0]
    check_size(sum(int(binary_content(part)[1][-1]) for part in parts))
    return pc.binary_join_element_wise(*parts, b"")


def offsets_of(counts: npt.NDArray[Any]) -> Offsets:
    """Return the n+1 offsets of n lists, or byte strings, with these lengths."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def gather_ranges(content: Bytes, starts: Offsets, stops: Offsets) -> tuple[Bytes, Offsets]:
    """Return the bytes of n ranges, joined, and their n+1 offsets.

    Ranges must be ascending and must not overlap.
    """
    n = len(starts)
    offsets = offsets_of(stops - starts)
    if n == 0 or offsets[-1] == len(content):
        return content[: offsets[-1]], offsets
    # Ranges and the gaps between them become elements of one array over the same bytes: Arrow then copies the ranges.
    bounds = np.empty(2 * n, np.int64)
    bounds[::2], bounds[1::2] = starts, stops
    pieces = binary_array(content, bounds).take(pa.array(np.arange(0, 2 * n, 2, dtype=np.uint32)))
    return binary_content(pieces)[0], offsets


def gather_fixed(content: Bytes, starts: Offsets, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the value or record at each position. All must lie within ``content``."""
    width = dtype.itemsize
    # A view with a value at every position: its elements overlap.
    anywhere = np.ndarray((max(len(content) - width + 1, 0),), f"V{width}", content, strides=(1,))
    values: npt.NDArray[Any] = anywhere[starts].view(dtype)
    return values


def check_size(total: int) -> None:
    """Raise ``InvalidStateStoreArgument`` for more bytes than one binary array can hold."""
    if total > MAX_BYTES:
        raise InvalidStateStoreArgument(
            f"The encoded rows take {total} bytes; at most {MAX_BYTES} fit into one Arrow array. Split the batch."
        )


def check_ranges(ok: npt.NDArray[np.bool_], what: str, schema: object, rows: Offsets | None = None) -> None:
    """Raise ``SchemaMismatchError`` unless all are ok. ``rows`` are the checks' rows, if not one per row."""
    if not ok.all():
        failed = int(np.argmin(ok))
        row = failed if rows is None else int(rows[failed])
        raise SchemaMismatchError(
            f"Row {row} of the stored {what} is not of the schema [{_one_line(schema)}]: read it with the schema "
            "that it was written with."
        )


def list_parts(array: pa.Array) -> tuple[pa.Array, Offsets]:
    """Return the elements of n arrays or maps (entries as structs), and n+1 offsets; null rows have no elements."""
    valid = array.drop_null() if array.null_count else array
    if len(valid) == 0:
        counts = np.zeros(0, np.int64)
        first = last = 0
    else:
        kind = np.int64 if pa.types.is_large_list(array.type) else np.int32
        bounds = np.frombuffer(valid.buffers()[1], kind)[valid.offset : valid.offset + len(valid) + 1]
        wide = bounds.astype(np.int64)
        counts, first, last = wide[1:] - wide[:-1], int(wide[0]), int(wide[-1])
    # Not ``keys`` and ``items`` of maps, which overlook that the entries may be a slice.
    entries = valid.values
    mask = null_mask(array)
    if mask is not None:
        of_valid, counts = counts, np.zeros(len(array), np.int64)
        counts[~mask] = of_valid
    return entries.slice(first, last - first), offsets_of(counts)


def list_array(elements: pa.Array, offsets: Offsets, mask: Mask | None, data_type: pa.DataType) -> pa.Array:
    """Return the inverse of ``list_parts`` (``data_type`` with int32 offsets)."""
    buffers = [validity(mask), _buffer(offsets.astype(np.int32))]
    return pa.Array.from_buffers(data_type, len(offsets) - 1, buffers, children=[elements])


def struct_array(children: list[pa.Array], n: int, mask: Mask | None, data_type: pa.DataType) -> pa.Array:
    """Return a struct of the given children."""
    return pa.Array.from_buffers(data_type, n, [validity(mask)], children=children)


def aligned_binary(array: pa.BinaryArray) -> pa.BinaryArray:
    """Return a binary array with its offsets at a multiple of 4 bytes; copy them only if they are elsewhere.

    Arrow Flight leaves buffers wherever gRPC has put them. Arrow's query engine (``group_by``, ``join``, scans by
    DuckDB) warns about such buffers, or rejects them.
    """
    mask, bounds, content = array.buffers()
    if bounds is None or bounds.address % 4 == 0:
        return array
    copied = pa.py_buffer(bounds.to_pybytes())
    return pa.Array.from_buffers(array.type, len(array), [mask, copied, content], offset=array.offset)


def aligned_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch of binary columns as ``aligned_binary`` does its columns."""
    return pa.RecordBatch.from_arrays([aligned_binary(column) for column in batch.columns], schema=batch.schema)


def _buffer(values: npt.NDArray[Any]) -> pa.Buffer:
    """Return the values as a buffer that is aligned to the width of a value."""
    contiguous = np.ascontiguousarray(values)
    if not contiguous.size:
        return pa.py_buffer(b"")
    buffer = pa.py_buffer(contiguous.view(np.uint8))
    # numpy treats the field of a single record as contiguous. Its values are where the record has them.
    if buffer.address % min(contiguous.itemsize, 8):
        return pa.py_buffer(contiguous.copy().view(np.uint8))
    return buffer


def _one_line(schema: object) -> str:
    return str(schema).replace("\n", ", ")


# Names of columns: the reserved prefix, and the rule that renames columns with equal names in one result.


RESERVED_PREFIX = "__statestore_"
"""Begins the names of columns that the state store adds; no column of a user's may have such a name."""
VALUE_SUFFIX = "__value"
"""Appended to the name of a column if an earlier column has that name, such as a value column named like a key."""


def distinct_names(names: Sequence[str], reserved: Iterable[str] = ()) -> list[str]:
    """Return the names, each with ``__value`` appended until no name before it and none of ``reserved`` is the same.

    Names are compared without case, as in SQL. A column keeps its name if no other column has that name.
    """
    own = {name.casefold() for name in names}
    used = {name.casefold() for name in reserved}
    result = []
    for wanted in names:
        name = wanted
        while name.casefold() in used or (name != wanted and name.casefold() in own):
            name += VALUE_SUFFIX
        used.add(name.casefold())
        result.append(name)
    return result
