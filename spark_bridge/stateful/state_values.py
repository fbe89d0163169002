"""Values that a processor puts into a state variable: checked, copied, and in the form that reads return."""

from __future__ import annotations

import datetime as dt
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from functools import cached_property, lru_cache, partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql import types as T
from pyspark.sql.types import StructType

from backends.encoding.columns import (
    Mask,
    from_spark_type,
    is_list_like,
    list_array,
    list_parts,
    null_mask,
    offsets_of,
    struct_array,
    to_spark_type,
)
from backends.encoding.user_values import are_plain, is_missing, plain_value
from spark_bridge.exceptions import IllegalStateValueError
from spark_bridge.stateful.ddl import Micros, check_years, from_local, to_local

# Python values as Arrow arrays, a column at a time. A value that does not fit is an error that names it.
#
# Taken are the values that PySpark takes: a struct may be a ``Row``, a tuple or a dict, an array a list, a tuple or a
# numpy array, a timestamp a datetime with or without a time zone.


Value = Any
"""A value of a column, in PySpark's form."""


_REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError, InvalidOperation)
_ROUNDING = Context(prec=76, rounding=ROUND_HALF_UP)
"""Has as many digits as the widest decimal: the default context cannot round one that long."""
_Conversion = Callable[[Sequence[Value], pa.DataType], pa.Array]


def integers_of(array: pa.Array, kind: pa.DataType, mask: Mask | None) -> Micros:
    """Return the integers behind a date or timestamp column; nulls are zero."""
    numbers = array.view(kind)
    return np.array(numbers if mask is None else numbers.fill_null(0), np.int64)


def transposed(rows: Sequence[Sequence[Value]], width: int, what: Callable[[], str]) -> list[Sequence[Value]]:
    """Return the columns of rows, which must all have ``width`` values; raises ``ValueError``.

    ``what`` returns the end of the message: the schema and its number of fields.
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

    ``name`` is the path to the field. ``nan_is_null``: NaN means null, as in pandas. Raises ``TypeError`` or
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
    """Return which of the values have a time zone; raises ``TypeError`` for a value that is not a datetime."""
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
        unboxed = value.item() if isinstance(value, np.generic) else value
        is_type = isinstance(unboxed, bool) or not isinstance(unboxed, _PYTHON_TYPES.get(spark.partition("(")[0], ()))
        raise (TypeError if is_type else ValueError)(
            f"Field {name!r} is of type {spark}, and {shown(value)} ({type(value).__name__}) is not a value of it: "
            f"{error}"
        ) from error
    return plain


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("byte", "short", "integer", "long"), (int, float)),
    **dict.fromkeys(("float", "double"), (float,)),
    "decimal": (Decimal, int),
    "string": (str,),
    **dict.fromkeys(("timestamp", "timestamp_ntz"), (datetime,)),
}
"""By Spark type, the Python types whose values can only be out of range."""


def _struct_array(name: str, values: Sequence[Value], kind: pa.DataType, nan_is_null: bool) -> pa.Array:
    fields = [kind.field(i) for i in range(kind.num_fields)]
    names = [f.name for f in fields]
    absent = (None,) * len(fields)
    rows = [absent if v is None else _positional(name, v, names) for v in values]
    columns: Sequence[Sequence[Value]] = [()] * len(fields)
    if rows:
        columns = transposed(rows, len(fields), lambda: f"field {name!r} has {len(fields)} ({', '.join(names)})")
    mask = np.fromiter((v is None for v in values), np.bool_, len(values))
    children = []
    for f, column in zip(fields, columns, strict=True):
        nullable = f.with_nullable(f.nullable or bool(mask.any()))
        children.append(to_array(f"{name}.{f.name}", column, nullable, nan_is_null=nan_is_null))
    return struct_array(children, len(values), mask, kind)


def _positional(name: str, value: Value, names: list[str]) -> Sequence[Value]:
    if isinstance(value, dict):
        return tuple(value.get(n) for n in names)
    if isinstance(value, Row):
        fields = getattr(value, "__fields__", names)
        return tuple(value[n] for n in names) if fields != names and set(fields) == set(names) else value
    if not isinstance(value, (tuple, list)):
        raise TypeError(
            f"Field {name!r} is a struct ({', '.join(names)}), not {shown(value)} ({type(value).__name__}): "
            "give a Row, a tuple or a dict."
        )
    return value


def _list_array(name: str, values: Sequence[Value], kind: pa.DataType, nan_is_null: bool) -> pa.Array:
    for v in values:
        if not (v is None or isinstance(v, (list, tuple, np.ndarray))):
            raise TypeError(f"Field {name!r} is an array, not {shown(v)} ({type(v).__name__}): give a list.")
    present = list(chain.from_iterable(v for v in values if v is not None))
    elements = to_array(f"{name}.element", present, kind.value_field, nan_is_null=nan_is_null)
    return list_array(elements, *_extents(values), kind)


def _map_array(name: str, values: Sequence[Value], kind: pa.DataType, nan_is_null: bool) -> pa.Array:
    for v in values:
        if not (v is None or isinstance(v, dict)):
            raise TypeError(f"Field {name!r} is a map, not {shown(v)} ({type(v).__name__}): give a dict.")
    present = [v for v in values if v is not None]
    keys = to_array(f"{name}.key", list(chain.from_iterable(present)), kind.key_field, nan_is_null=nan_is_null)
    values_of_all = list(chain.from_iterable(v.values() for v in present))
    items = to_array(f"{name}.value", values_of_all, kind.item_field, nan_is_null=nan_is_null)
    entries = pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
    return list_array(entries, *_extents(values), kind)


def _extents(values: Sequence[Value]) -> tuple[Micros, Mask]:
    """Return the bounds of the elements of each of n rows (n+1 offsets), and which rows are None."""
    mask = np.fromiter((v is None for v in values), np.bool_, len(values))
    counts = np.fromiter((0 if v is None else len(v) for v in values), np.int64, len(values))
    return offsets_of(counts), mask


def shown(value: object) -> str:
    """Return a value as text for a message, cut after 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


# Arrow batches to the Python rows that PySpark would return, and such rows to batches, a column at a time.
#
# A struct is a ``Row``, a map a dict, an array a list, a timestamp a naive datetime in the local time zone.


_DAY_MICROS = 86_400_000_000


@dataclass(frozen=True)
class RowCodec:
    """Rows of one Spark schema. Columns go by position."""

    struct: StructType

    @cached_property
    def schema(self) -> pa.Schema:
        """Return the Arrow schema of the rows, in normalised types; raises ``InvalidStateStoreArgument``."""
        return pa.schema(
            [pa.field(f.name, from_spark_type(f.dataType.jsonValue()), f.nullable) for f in self.struct.fields]
        )

    def to_tuples(self, batch: pa.RecordBatch) -> list[tuple[Value, ...]]:
        """Return the rows as tuples; raises as ``to_columns`` does."""
        return list(zip(*self.to_columns(batch), strict=True)) if batch.num_columns else [()] * batch.num_rows

    def iter_rows(self, batch: pa.RecordBatch) -> Iterator[Row]:
        """Yield the rows as ``Row``, each made when it is asked for."""
        return _rows(tuple(self.struct.names), self.to_columns(batch), batch.num_rows)

    def to_columns(self, batch: pa.RecordBatch) -> list[list[Value]]:
        """Return the values of each column.

        Raises ``ValueError`` naming the column of a time that Python's datetime cannot hold.
        """
        values = []
        for name, column in zip(self.struct.names, batch.columns, strict=True):
            try:
                values.append(_values(column))
            except ValueError as error:
                raise ValueError(f"Column {name!r}: {error}") from error
        return values

    def to_batch(self, rows: Sequence[Sequence[Value]]) -> pa.RecordBatch:
        """Return the rows as a batch; raises ``TypeError`` or ``ValueError`` naming field, type and value."""
        schema = self.schema
        if not rows:
            return pa.RecordBatch.from_pylist([], schema=schema)
        n = len(schema)
        columns = transposed(rows, n, lambda: f"the schema has {n} fields ({', '.join(schema.names)})")
        arrays = [to_array(f.name, c, f) for f, c in zip(schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


@lru_cache(maxsize=1024)
def row_class(names: tuple[str, ...]) -> type[Row]:
    """Return a subclass of ``Row`` with these field names.

    Names and getters belong to the class, so that a row is made as fast as a tuple, and a field is read as fast as that
    of a namedtuple. Pickling makes a plain ``Row`` of such a row.
    """
    members: dict[str, Any] = {"__fields__": list(names), "__slots__": (), "__module__": Row.__module__}
    fields = namedtuple("fields", [f"field{i}" for i in range(len(names))])  # type: ignore[misc]
    for i, name in reversed(list(enumerate(names))):
        # As in Row, an attribute that a tuple has ("count", "index") is not a field.
        if not hasattr(Row, name) and not name.startswith("__"):
            members[name] = getattr(fields, f"field{i}")
    return type("Row", (Row,), members)


def _rows(names: tuple[str, ...], columns: Sequence[Sequence[Value]], num_rows: int) -> Iterator[Row]:
    tuples = zip(*columns, strict=True) if columns else iter([()] * num_rows)
    return map(partial(tuple.__new__, row_class(names)), tuples)


def _values(array: pa.Array) -> list[Value]:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _values(array.dictionary_decode())
    mask = null_mask(array)
    values: list[Value]
    if kind in _TEXTS:
        values = array.to_numpy(zero_copy_only=False).tolist()
        return values
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        filled = array if mask is None else array.fill_null(False if pa.types.is_boolean(kind) else 0)
        values = filled.to_numpy(zero_copy_only=False).tolist()
    elif pa.types.is_date32(kind):
        days = integers_of(array, pa.int32(), mask)
        check_years(days * _DAY_MICROS)
        values = days.view("datetime64[D]").tolist()
    elif pa.types.is_timestamp(kind) and kind.unit == "us":
        micros = integers_of(array, pa.int64(), mask)
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


_TEXTS = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())


_EXACT: dict[type[T.DataType], type] = {
    T.BooleanType: bool,
    **dict.fromkeys((T.ByteType, T.ShortType, T.IntegerType, T.LongType), int),
    T.DoubleType: float,
    T.StringType: str,
    T.BinaryType: bytes,
    T.DateType: dt.date,
}
"""Types whose Python values of one class come back as they went in (or are too large, which the codec finds)."""
_SIGNATURES_KEPT = 1024


class _UnusualError(Exception):
    """Only the codec can judge a value."""


class StateValues:
    """Checks values of one schema. A returned value shares no object that can change with the given value."""

    def __init__(self, variable: str, what: str, codec: RowCodec) -> None:
        self._variable = variable
        self._what = what
        self._codec = codec
        self._fields = [_canonical(f.dataType) for f in codec.struct.fields]
        self._is_flat = all(type(f.dataType) in _EXACT for f in codec.struct.fields)
        self._plain: set[tuple[type, ...]] = set()
        mutable = (T.ArrayType, T.MapType, T.StructType)
        self.is_immutable = not any(isinstance(f.dataType, mutable) for f in codec.struct.fields)

    def accept(self, value: Any) -> tuple[Any, ...]:
        """Return the value as a tuple of its fields; raises ``IllegalStateValueError``."""
        # In most calls, the classes of the fields are known to be fine: one look-up.
        if type(value) is tuple and tuple(map(type, value)) in self._plain:
            return value
        return self._accept(value)

    def copied(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a copy of an accepted value, so that a user's changes to objects in it do not change the state."""
        return tuple(f(v) for f, v in zip(self._fields, value, strict=True))

    def refusal(self, reason: object) -> IllegalStateValueError:
        """Return the error for a value that does not fit."""
        return IllegalStateValueError(
            f"[ILLEGAL_STATE_STORE_VALUE] State variable {self._variable!r} cannot keep its {self._what}: {reason} "
            f"Its schema is {self._codec.struct.simpleString()}: give a tuple of these fields."
        )

    def _accept(self, value: Any) -> tuple[Any, ...]:
        if value is None:
            raise null_value(self._variable, self._what)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, str) and len(self._fields) == 1:
            value = (value,)  # as PySpark does, which treats a string as a sequence
        if not isinstance(value, (tuple, list)):
            raise self.refusal(f"{value!r} ({type(value).__name__}) is not a tuple.")
        if len(value) != len(self._fields):
            raise self.refusal(f"{value!r} has {len(value)} fields, not {len(self._fields)}.")
        try:
            accepted = tuple(f(v) for f, v in zip(self._fields, value, strict=True))
        except _UnusualError:  # as the value would come back from the store
            try:
                return self._codec.to_tuples(self._codec.to_batch([value]))[0]
            except (TypeError, ValueError, OverflowError) as error:
                raise self.refusal(error) from error
        if self._is_flat and all(a is v for a, v in zip(accepted, value, strict=True)):
            if len(self._plain) >= _SIGNATURES_KEPT:
                self._plain.clear()
            self._plain.add(tuple(map(type, value)))
        return accepted


def null_value(variable: str, what: str = "value") -> IllegalStateValueError:
    """Return the error for a None where state must have a value."""
    return IllegalStateValueError(
        f"[ILLEGAL_STATE_STORE_VALUE.NULL_VALUE] State variable {variable!r} was given None as its {what}. State "
        "cannot be None: call clear() to remove it; a single field may be None."
    )


def _canonical(data_type: T.DataType) -> Callable[[Any], Any]:
    """Return a function that copies a value in the form that a read from the store returns.

    The function raises ``_UnusualError`` for values that it does not know.
    """
    if isinstance(data_type, T.ArrayType):
        return _array(_canonical(data_type.elementType))
    if isinstance(data_type, T.MapType):
        return _map(_canonical(data_type.keyType), _canonical(data_type.valueType))
    if isinstance(data_type, T.StructType):
        return _struct(data_type.names, [_canonical(f.dataType) for f in data_type.fields])
    if isinstance(data_type, (T.TimestampType, T.TimestampNTZType)):
        return _time
    if isinstance(data_type, T.DecimalType):
        return _decimal(data_type.precision, data_type.scale)
    if isinstance(data_type, T.FloatType):
        return _float
    return _leaf(_EXACT[type(data_type)])


def _leaf(exact: type) -> Callable[[Any], Any]:
    def leaf(value: Any) -> Any:
        if value is None or type(value) is exact:
            return value
        if isinstance(value, np.generic):
            plain = value.item()
            if type(plain) is exact:
                return plain
        if exact is bytes and type(value) is bytearray:
            return bytes(value)
        raise _UnusualError

    return leaf


def _time(value: Any) -> Any:
    if value is None or (type(value) is dt.datetime and value.tzinfo is None):
        return value
    raise _UnusualError


def _float(value: Any) -> Any:
    if value is None:
        return None
    if type(value) is float:
        return float(np.float32(value))
    raise _UnusualError


def _decimal(precision: int, scale: int) -> Callable[[Any], Any]:
    def decimal(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is Decimal:
            _, digits, exponent = value.as_tuple()
            if exponent == -scale and len(digits) <= precision:
                return value
        raise _UnusualError

    return decimal


def _array(element: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def array(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is not list:
            raise _UnusualError
        return [element(v) for v in value]

    return array


def _map(key: Callable[[Any], Any], item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def a_map(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is not dict:
            raise _UnusualError
        return {key(k): item(v) for k, v in value.items()}

    return a_map


def _struct(names: list[str], fields: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    row_type = row_class(tuple(names))

    def struct(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, tuple) or len(value) != len(fields):
            raise _UnusualError
        if isinstance(value, Row) and list(getattr(value, "__fields__", names)) != names:
            raise _UnusualError
        return tuple.__new__(row_type, [f(v) for f, v in zip(fields, value, strict=True)])

    return struct
