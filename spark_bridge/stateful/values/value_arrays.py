"""Python values as Arrow arrays, a column at a time. A value that does not fit is an error that names it.

Taken are the values that PySpark takes: a struct may be a ``Row``, a tuple or a dict, an array a list, a tuple or a
numpy array, a timestamp a datetime with or without a time zone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Row

from backends.encoding.columns import Mask, is_list_like, list_array, null_mask, struct_array
from backends.encoding.given_values import are_plain, is_missing, plain_value
from backends.encoding.spark_types import to_spark_type
from spark_bridge.stateful.values.local_time import Micros, from_local

Value = Any
"""A value of a column, as PySpark gives it."""


_REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError, InvalidOperation)
_ROUNDING = Context(prec=76, rounding=ROUND_HALF_UP)
"""More digits than a decimal can have: the default context refuses to round the longest ones."""
_Conversion = Callable[[Sequence[Value], pa.DataType], pa.Array]


def integers_of(array: pa.Array, kind: pa.DataType, mask: Mask | None) -> Micros:
    """Return the integers behind a date or timestamp column; nulls are zero."""
    numbers = array.view(kind)
    return np.array(numbers if mask is None else numbers.fill_null(0), np.int64)


def transposed(rows: Sequence[Sequence[Value]], width: int, what: Callable[[], str]) -> list[Sequence[Value]]:
    """Return the columns of rows, all of which must have ``width`` values; raises ``ValueError``.

    ``what`` gives the end of the message: which schema has how many fields.
    """
    lengths = set(map(len, rows))
    if lengths != {width}:
        wrong = next(row for row in rows if len(row) != width)
        raise ValueError(f"The row {shown(wrong)} has {len(wrong)} values, but {what()}.")
    # The item getter of Row is slow; its iterator is the tuple's.
    values = list(chain.from_iterable(rows))
    return [values[i::width] for i in range(width)]


def to_array(name: str, values: Sequence[Value], field: pa.Field, *, nan_is_null: bool = False) -> pa.Array:
    """Return a column of Python values, of the field's type.

    ``name`` is the path to the field. ``nan_is_null``: NaN stands for null, as in pandas. Raises ``TypeError`` or
    ``ValueError`` naming path, type and value.
    """
    kind = field.type
    if nan_is_null or not are_plain(values, kind):
        values = [None if is_missing(v, nan=nan_is_null) else v for v in values]
    if pa.types.is_struct(kind):
        array = _struct_array(name, values, kind, nan_is_null)
    elif pa.types.is_map(kind):
        array = _map_array(name, values, kind, nan_is_null)
    elif is_list_like(kind):
        array = _list_array(name, values, kind, nan_is_null)
    else:
        array = _flat_array(name, values, kind)
    if array.null_count and not field.nullable:
        raise ValueError(f"Field {name!r} is declared not nullable, but a value of it is None.")
    return array


def _flat_array(name: str, values: Sequence[Value], kind: pa.DataType) -> pa.Array:
    convert: _Conversion = _convert_timestamps if pa.types.is_timestamp(kind) else pa.array
    try:
        plain = values if are_plain(values, kind) else [plain_value(v, kind) for v in values]
        return convert(plain, kind)
    except _REFUSALS:
        return convert([_accepted(name, v, kind, convert) for v in values], kind)


def _convert_timestamps(values: Sequence[Value], kind: pa.DataType) -> pa.Array:
    is_aware = _aware(values)
    micros = pa.array(values, pa.timestamp("us"))
    if kind.tz is None:
        if any(is_aware):
            raise TypeError("a time with a time zone")
        return micros
    mask = null_mask(micros)
    numbers = integers_of(micros, pa.int64(), mask)
    if not all(is_aware):
        # Arrow has turned times with a zone into UTC.
        numbers = np.where(is_aware, numbers, from_local(numbers, values))
    return pa.array(numbers, pa.int64(), mask=mask).view(kind)


def _aware(values: Sequence[Value]) -> list[bool]:
    """Return which of the values have a time zone; raises ``TypeError`` for a value that is no datetime."""
    try:
        return [v is not None and v.tzinfo is not None for v in values]
    except AttributeError as error:
        raise TypeError("not a datetime") from error


def _accepted(name: str, value: Value, kind: pa.DataType, convert: _Conversion) -> Value:
    """Return the value in a form that Arrow takes; raises ``TypeError`` or ``ValueError`` if it is not of the type."""
    try:
        plain = plain_value(value, kind)
        if pa.types.is_decimal(kind) and isinstance(plain, Decimal):
            plain = plain.quantize(Decimal(1).scaleb(-kind.scale), context=_ROUNDING)
        convert([plain], kind)
    except _REFUSALS as error:
        spark = str(to_spark_type(name, kind))
        given = value.item() if isinstance(value, np.generic) else value
        is_type = isinstance(given, bool) or not isinstance(given, _PYTHON_TYPES.get(spark.partition("(")[0], ()))
        raise (TypeError if is_type else ValueError)(
            f"Field {name!r} is of type {spark}, and {shown(value)} ({type(value).__name__}) is not a value of it: "
            f"{error}"
        ) from error
    return plain


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
"""By Spark type, the Python types whose values can be wrong only by being out of range."""


def _struct_array(name: str, values: Sequence[Value], kind: pa.DataType, nan_is_null: bool) -> pa.Array:
    fields = [kind.field(i) for i in range(kind.num_fields)]
    names = [f.name for f in fields]
    absent = (None,) * len(fields)
    rows = [absent if v is None else _positional(name, v, names) for v in values]
    columns = (
        transposed(rows, len(fields), lambda: f"field {name!r} has {len(fields)} ({', '.join(names)})") if rows else []
    )
    mask = np.fromiter((v is None for v in values), np.bool_, len(values))
    children = [
        to_array(
            f"{name}.{f.name}",
            columns[i] if rows else [],
            f.with_nullable(f.nullable or bool(mask.any())),
            nan_is_null=nan_is_null,
        )
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


def _list_array(name: str, values: Sequence[Value], kind: pa.DataType, nan_is_null: bool) -> pa.Array:
    for v in values:
        if not (v is None or isinstance(v, (list, tuple, np.ndarray))):
            raise TypeError(f"Field {name!r} is an array, and {shown(v)} ({type(v).__name__}) is none: give a list.")
    present = list(chain.from_iterable(v for v in values if v is not None))
    elements = to_array(f"{name}.element", present, kind.value_field, nan_is_null=nan_is_null)
    return list_array(elements, *_extents(values), kind)


def _map_array(name: str, values: Sequence[Value], kind: pa.DataType, nan_is_null: bool) -> pa.Array:
    for v in values:
        if not (v is None or isinstance(v, dict)):
            raise TypeError(f"Field {name!r} is a map, and {shown(v)} ({type(v).__name__}) is none: give a dict.")
    present = [v for v in values if v is not None]
    keys = to_array(f"{name}.key", list(chain.from_iterable(present)), kind.key_field, nan_is_null=nan_is_null)
    values_of_all = list(chain.from_iterable(v.values() for v in present))
    items = to_array(f"{name}.value", values_of_all, kind.item_field, nan_is_null=nan_is_null)
    entries = pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
    return list_array(entries, *_extents(values), kind)


def _extents(values: Sequence[Value]) -> tuple[Micros, Mask]:
    """Return where the elements of each of n rows begin and end (n+1 offsets), and which rows are None."""
    mask = np.fromiter((v is None for v in values), np.bool_, len(values))
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter((0 if v is None else len(v) for v in values), np.int64, len(values)), out=offsets[1:])
    return offsets, mask


def shown(value: object) -> str:
    """Return a value as text for a message, cut after 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
