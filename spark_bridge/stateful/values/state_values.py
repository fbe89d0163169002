"""Values that a processor puts into a state variable: checked, copied, and in the form in which they will come back."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
from pyspark.sql import Row
from pyspark.sql import types as T

from spark_bridge.exceptions import IllegalStateValueError
from spark_bridge.stateful.values.row_values import RowCodec, row_class

_EXACT: dict[type[T.DataType], type] = {
    T.BooleanType: bool,
    T.ByteType: int,
    T.ShortType: int,
    T.IntegerType: int,
    T.LongType: int,
    T.DoubleType: float,
    T.StringType: str,
    T.BinaryType: bytes,
    T.DateType: dt.date,
}
"""Types whose Python values of one class come back as they went in (or are too large, which the codec finds)."""
_SIGNATURES_KEPT = 1024


class _UnusualError(Exception):
    """Says that only the codec can judge a value."""


class StateValues:
    """Checks values of one schema. A returned value shares no object that can change with the given value."""

    def __init__(self, variable: str, what: str, codec: RowCodec) -> None:
        self._variable = variable
        self._what = what
        self._codec = codec
        self._names = codec.struct.names
        self._fields = [_canonical(f.dataType) for f in codec.struct.fields]
        self._is_flat = all(type(f.dataType) in _EXACT for f in codec.struct.fields)
        self._plain: set[tuple[type, ...]] = set()
        self.is_immutable = not any(map(_is_mutable, (f.dataType for f in codec.struct.fields)))

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
            value = (value,)  # as PySpark takes it, to which a text is a sequence
        if not isinstance(value, (tuple, list)):
            raise self.refusal(f"{value!r} ({type(value).__name__}) is no tuple.")
        if len(value) != len(self._fields):
            raise self.refusal(f"{value!r} has {len(value)} fields, not {len(self._fields)}.")
        try:
            accepted = tuple(f(v) for f, v in zip(self._fields, value, strict=True))
        except _UnusualError:
            return self._through_codec(value)
        if self._is_flat and all(a is v for a, v in zip(accepted, value, strict=True)):
            if len(self._plain) >= _SIGNATURES_KEPT:
                self._plain.clear()
            self._plain.add(tuple(map(type, value)))
        return accepted

    def _through_codec(self, value: Any) -> tuple[Any, ...]:
        """Return the value as it would come back from the store; raises ``IllegalStateValueError``."""
        try:
            return self._codec.to_tuples(self._codec.to_batch([value]))[0]
        except (TypeError, ValueError, OverflowError) as error:
            raise self.refusal(error) from error


def null_value(variable: str, what: str = "value") -> IllegalStateValueError:
    """Return the error for a None where state must have a value."""
    return IllegalStateValueError(
        f"[ILLEGAL_STATE_STORE_VALUE.NULL_VALUE] State variable {variable!r} was given None as its {what}. State "
        "cannot be None: call clear() to remove it; a single field may be None."
    )


def _is_mutable(data_type: T.DataType) -> bool:
    return isinstance(data_type, (T.ArrayType, T.MapType, T.StructType))


def _canonical(data_type: T.DataType) -> Callable[[Any], Any]:
    """Return a function that copies a value in the form in which it would come back from the store.

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
    made = row_class(tuple(names))

    def struct(value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, tuple) or len(value) != len(fields):
            raise _UnusualError
        if isinstance(value, Row) and list(getattr(value, "__fields__", names)) != names:
            raise _UnusualError
        return tuple.__new__(made, [f(v) for f, v in zip(fields, value, strict=True)])

    return struct
