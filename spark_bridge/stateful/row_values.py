"""Arrow batches as the Python rows that PySpark would give, and such rows as batches: a column at a time.

A struct is a ``Row``, a map a dict, an array a list, a timestamp a naive datetime in the local time zone.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from functools import cached_property, lru_cache, partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.types import StructType

from backends.encoding.columns import Mask, is_list_like, list_array, list_parts, null_mask, struct_array
from backends.encoding.spark_types import from_spark_type, to_spark_type
from spark_bridge.stateful.local_time import Micros, check_years, from_local, to_local

Value = Any
"""A value of a column, as PySpark gives it."""

_DAY_MICROS = 86_400_000_000
_REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError)


@dataclass(frozen=True)
class RowCodec:
    """Rows of one Spark schema. Columns go by position."""

    struct: StructType

    @cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the rows, in normalised types; raises ``InvalidStateStoreArgument`` for other types."""
        return pa.schema(
            [pa.field(f.name, from_spark_type(f.dataType.jsonValue()), f.nullable) for f in self.struct.fields]
        )

    def to_tuples(self, batch: pa.RecordBatch) -> list[tuple[Value, ...]]:
        """The rows as tuples."""
        return list(zip(*self.to_columns(batch), strict=True)) if batch.num_columns else [()] * batch.num_rows

    def to_rows(self, batch: pa.RecordBatch) -> list[Row]:
        """The rows as ``Row``."""
        return list(self.iter_rows(batch))

    def iter_rows(self, batch: pa.RecordBatch) -> Iterator[Row]:
        """The rows as ``Row``, each made when it is asked for."""
        return _rows(tuple(self.struct.names), self.to_columns(batch), batch.num_rows)

    def to_columns(self, batch: pa.RecordBatch) -> list[list[Value]]:
        """Each column's values; raises ``ValueError`` naming the column of a time that Python's datetime cannot hold."""
        return [_column_values(name, c) for name, c in zip(self.struct.names, batch.columns, strict=True)]

    def to_batch(self, rows: Sequence[Sequence[Value]]) -> pa.RecordBatch:
        """The rows as a batch; raises ``TypeError`` or ``ValueError`` naming field, type and value."""
        schema = self.schema
        if not rows:
            return pa.RecordBatch.from_pylist([], schema=schema)
        columns = _transposed(
            rows, len(schema), lambda: f"the schema has {len(schema)} fields ({', '.join(schema.names)})"
        )
        arrays = [to_array(f.name, c, f) for f, c in zip(schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


@lru_cache(maxsize=1024)
def row_class(names: tuple[str, ...]) -> type[Row]:
    """``Row`` with these field names.

    The names and getters are the class's, so that a row is made as fast as a tuple and a field is read as
    fast as a namedtuple's; pickling makes a plain ``Row`` of it.
    """
    members: dict[str, Any] = {"__fields__": list(names), "__slots__": (), "__module__": Row.__module__}
    fields = namedtuple("fields", [f"field{i}" for i in range(len(names))])  # type: ignore[misc]
    for i, name in reversed(list(enumerate(names))):
        # Row itself finds a field only where a tuple has no such attribute ("count", "index").
        if not hasattr(Row, name) and not name.startswith("__"):
            members[name] = getattr(fields, f"field{i}")
    return type("Row", (Row,), members)


def _rows(names: tuple[str, ...], columns: Sequence[Sequence[Value]], num_rows: int) -> Iterator[Row]:
    tuples = zip(*columns, strict=True) if columns else iter([()] * num_rows)
    return map(partial(tuple.__new__, row_class(names)), tuples)


def _column_values(name: str, array: pa.Array) -> list[Value]:
    """A column's values; raises ``ValueError`` naming the column."""
    try:
        return _values(array)
    except ValueError as error:
        raise ValueError(f"Column {name!r}: {error}") from error


def _values(array: pa.Array) -> list[Value]:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _values(array.dictionary_decode())
    mask = null_mask(array)
    values: list[Value]
    if _is_text(kind):
        values = array.to_numpy(zero_copy_only=False).tolist()
        return values
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        filled = array if mask is None else array.fill_null(False if pa.types.is_boolean(kind) else 0)
        values = filled.to_numpy(zero_copy_only=False).tolist()
    elif pa.types.is_date32(kind):
        days = _numbers(array, pa.int32(), mask)
        check_years(days * _DAY_MICROS)
        values = days.view("datetime64[D]").tolist()
    elif pa.types.is_timestamp(kind) and kind.unit == "us":
        micros = _numbers(array, pa.int64(), mask)
        if kind.tz is not None:
            values = list(to_local(micros))
        else:
            check_years(micros)
            values = micros.view("datetime64[us]").tolist()
    elif pa.types.is_struct(kind):
        names = tuple(kind.field(i).name for i in range(kind.num_fields))
        values = list(_rows(names, [_values(child) for child in array.flatten()], len(array)))
    elif is_list_like(kind):
        elements, offsets = list_parts(array)
        bounds = pairwise(offsets.tolist())
        if pa.types.is_map(kind):
            keys, items = (_values(part) for part in elements.flatten())
            values = [dict(zip(keys[a:b], items[a:b], strict=True)) for a, b in bounds]
        else:
            flat = _values(elements)
            values = [flat[a:b] for a, b in bounds]
    else:
        values = array.to_pylist()
        return values
    if mask is not None:
        for i in np.flatnonzero(mask).tolist():
            values[i] = None
    return values


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    )


def _numbers(array: pa.Array, kind: pa.DataType, mask: Mask | None) -> Micros:
    """The integers behind a date or timestamp column; nulls are zero."""
    numbers = array.view(kind)
    return np.array(numbers if mask is None else numbers.fill_null(0), np.int64)


def _transposed(rows: Sequence[Sequence[Value]], width: int, what: Callable[[], str]) -> list[Sequence[Value]]:
    """Columns of rows that all must have ``width`` values; ``what`` says whose schema that is."""
    lengths = set(map(len, rows))
    if lengths != {width}:
        wrong = next(row for row in rows if len(row) != width)
        raise ValueError(f"The row {shown(wrong)} has {len(wrong)} values, but {what()}.")
    # Rows have an item getter of their own, which is slow; their iterator is the tuple's.
    values = list(chain.from_iterable(rows))
    return [values[i::width] for i in range(width)]


def to_array(name: str, values: Sequence[Value], field: pa.Field) -> pa.Array:
    """A column of Python values, of the field's type.

    ``name`` is the path to it, for messages: raises ``TypeError`` or ``ValueError`` naming it, its type and the value.
    """
    kind = field.type
    if pa.types.is_struct(kind):
        array = _struct_array(name, values, kind)
    elif pa.types.is_map(kind):
        array = _map_array(name, values, kind)
    elif is_list_like(kind):
        array = _list_array(name, values, kind)
    else:
        convert = _convert_timestamps if pa.types.is_timestamp(kind) else _convert
        try:
            array = convert(values, kind)
        except _REFUSALS:
            array = convert([_accepted(name, v, kind, convert) for v in values], kind)
    if array.null_count and not field.nullable:
        raise ValueError(f"Field {name!r} is declared not nullable, but a value of it is None.")
    return array


def _convert(values: Sequence[Value], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_integer(kind):
        return pa.array(values, kind)
    # Given the type, Arrow would cut 1.5 to 1.
    inferred = pa.array(values)
    if not (
        pa.types.is_integer(inferred.type) or pa.types.is_floating(inferred.type) or pa.types.is_null(inferred.type)
    ):
        raise TypeError(f"not an integer but {inferred.type}")
    return inferred.cast(kind)


def _convert_timestamps(values: Sequence[Value], kind: pa.DataType) -> pa.Array:
    is_aware = _aware(values)
    micros = pa.array(values, pa.timestamp("us"))
    if kind.tz is None:
        if any(is_aware):
            raise TypeError("a time with a time zone")
        return micros
    mask = null_mask(micros)
    numbers = _numbers(micros, pa.int64(), mask)
    if not all(is_aware):
        # Arrow has turned times with a zone into UTC.
        numbers = np.where(is_aware, numbers, from_local(numbers, values))
    return pa.array(numbers, pa.int64(), mask=mask).view(kind)


def _aware(values: Sequence[Value]) -> list[bool]:
    """Which of the values have a time zone; raises ``AttributeError`` for what is no datetime."""
    try:
        return [v is not None and v.tzinfo is not None for v in values]
    except AttributeError as error:
        raise TypeError("not a datetime") from error


def _accepted(name: str, value: Value, kind: pa.DataType, convert: Callable[[list[Value], Any], pa.Array]) -> Value:
    """The value in a form that Arrow takes; raises ``TypeError`` or ``ValueError`` if it is not of the type."""
    if isinstance(value, np.generic):
        value = value.item() if not isinstance(value, np.datetime64) else pd.Timestamp(value).to_pydatetime()
    if value is None or value is pd.NaT or value is pd.NA:
        return None
    if pa.types.is_floating(kind) and isinstance(value, int):
        value = float(value)
    try:
        if pa.types.is_decimal(kind) and isinstance(value, Decimal):
            value = value.quantize(Decimal(1).scaleb(-kind.scale), ROUND_HALF_UP)
        convert([value], kind)
    except (*_REFUSALS, InvalidOperation) as error:
        spark = str(to_spark_type(name, kind))
        is_type = isinstance(value, bool) or not isinstance(value, _PYTHON_TYPES.get(spark.partition("(")[0], ()))
        raise (TypeError if is_type else ValueError)(
            f"Field {name!r} is of type {spark}, and {shown(value)} ({type(value).__name__}) is not a value of it: {error}"
        ) from error
    return value


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "byte": (int, float),
    "short": (int, float),
    "integer": (int, float),
    "long": (int, float),
    "float": (float,),
    "double": (float,),
    "decimal": (Decimal, int),
    "string": (str,),
    "timestamp": (datetime,),
    "timestamp_ntz": (datetime,),
}
"""Python types whose values can be wrong only in range."""


def _struct_array(name: str, values: Sequence[Value], kind: pa.DataType) -> pa.Array:
    fields = [kind.field(i) for i in range(kind.num_fields)]
    names = [f.name for f in fields]
    absent = (None,) * len(fields)
    rows = [absent if v is None else _positional(name, v, names) for v in values]
    columns = (
        _transposed(rows, len(fields), lambda: f"field {name!r} has {len(fields)} ({', '.join(names)})") if rows else []
    )
    mask = np.fromiter((v is None for v in values), np.bool_, len(values))
    children = [
        to_array(f"{name}.{f.name}", columns[i] if rows else [], f.with_nullable(f.nullable or bool(mask.any())))
        for i, f in enumerate(fields)
    ]
    return struct_array(children, len(values), mask, kind)


def _positional(name: str, value: Value, names: list[str]) -> Sequence[Value]:
    if isinstance(value, dict):
        return tuple(value.get(n) for n in names)
    if isinstance(value, Row):
        given = getattr(value, "__fields__", names)
        return tuple(value[n] for n in names) if given != names and set(given) == set(names) else value
    if not isinstance(value, (tuple, list)):
        raise TypeError(
            f"Field {name!r} is a struct ({', '.join(names)}), and {shown(value)} ({type(value).__name__}) is none: "
            "give a Row, a tuple or a dict."
        )
    return value


def _list_array(name: str, values: Sequence[Value], kind: pa.DataType) -> pa.Array:
    for v in values:
        if not (v is None or isinstance(v, (list, tuple, np.ndarray))):
            raise TypeError(f"Field {name!r} is an array, and {shown(v)} ({type(v).__name__}) is none: give a list.")
    elements = to_array(
        f"{name}.element", list(chain.from_iterable(v for v in values if v is not None)), kind.value_field
    )
    return list_array(elements, *_extents(values), kind)


def _map_array(name: str, values: Sequence[Value], kind: pa.DataType) -> pa.Array:
    for v in values:
        if not (v is None or isinstance(v, dict)):
            raise TypeError(f"Field {name!r} is a map, and {shown(v)} ({type(v).__name__}) is none: give a dict.")
    present = [v for v in values if v is not None]
    keys = to_array(f"{name}.key", list(chain.from_iterable(present)), kind.key_field)
    items = to_array(f"{name}.value", list(chain.from_iterable(v.values() for v in present)), kind.item_field)
    entries = pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
    return list_array(entries, *_extents(values), kind)


def _extents(values: Sequence[Value]) -> tuple[Micros, Mask]:
    """Where each row's elements begin and end (n+1 offsets), and which rows are None."""
    mask = np.fromiter((v is None for v in values), np.bool_, len(values))
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter((0 if v is None else len(v) for v in values), np.int64, len(values)), out=offsets[1:])
    return offsets, mask


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
