"""Conditions on rows as users give them (``where=``), in the form that hosts take."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from backends.encoding.given_values import CAST_ERRORS, is_missing, plain_value
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.protocol.messages import Comparison

WhereCondition = Comparison | tuple[Any, ...]
"""A ``Comparison``, or ``(column, operator, value)``."""
OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "in", "is null", "is not null")
_BYTES = (bytes, bytearray, memoryview)
_ALSO = {"==": "=", "<>": "!="}


def comparisons(where: Sequence[WhereCondition] | None, types: Mapping[str, pa.DataType]) -> list[Comparison]:
    """Return conditions in the form that hosts take. ``types`` are those of the columns. Raises ``RequestError``."""
    return [_comparison(condition, types) for condition in where or ()]


def _comparison(condition: WhereCondition, types: Mapping[str, pa.DataType]) -> Comparison:
    if isinstance(condition, Comparison):
        return condition
    if not isinstance(condition, tuple | list) or len(condition) not in (2, 3) or not isinstance(condition[0], str):
        raise RequestError(f"where: {condition!r} is no condition; give (column, operator, value), as ('n', '>', 10).")
    column, operator, *given = condition
    name: Any = _ALSO.get(operator, operator)
    name = name.lower() if isinstance(name, str) else name
    if name not in OPERATORS:
        raise RequestError(f"where: {operator!r} is no operator; there are {', '.join(OPERATORS)}.")
    if (name in ("is null", "is not null")) != (not given):
        raise RequestError(f"where: {condition!r}: 'is null' and 'is not null' take no value, all others one.")
    values = list(given[0]) if name == "in" else given
    if any(is_missing(value) for value in values):
        raise RequestError(f"where: {condition!r} compares with null, which nothing is equal to; use 'is null'.")
    kind = types.get(column)
    if kind is not None and pa.types.is_binary(kind) and any(isinstance(v, _BYTES) for v in values):
        given_bytes = [v.encode() if isinstance(v, str) else v for v in values]
        wrong = next((v for v in given_bytes if not isinstance(v, _BYTES)), None)
        if wrong is not None:
            raise _refused(wrong)
        return Comparison(column, name, [base64.b64encode(v).decode() for v in given_bytes], True)
    return Comparison(column, name, [json_value(value, kind) for value in values])


def json_value(value: Any, kind: pa.DataType | None) -> str | int | float | bool:
    """Return a value as JSON has it: as it is, or as a string that hosts read as the column's type.

    Raises ``RequestError``.
    """
    if isinstance(value, pa.Scalar):
        value = value.as_py()
    if isinstance(value, np.datetime64 | dt.datetime) and kind is not None and pa.types.is_timestamp(kind):
        try:
            value = plain_value(value, kind, lossless=True)
        except CAST_ERRORS as error:
            raise RequestError(f"where: {value!r} is not a {kind}: {error}") from error
    if isinstance(value, np.generic):
        value = value.astype("M8[us]").item() if isinstance(value, np.datetime64) else value.item()
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 63 else str(int(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, dt.datetime):
        return _time_text(value, kind)
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise _refused(value)


def _refused(value: Any) -> RequestError:
    return RequestError(f"where: {value!r} ({type(value).__name__}) cannot be compared with by the hosts.")


def _time_text(value: dt.datetime, kind: pa.DataType | None) -> str:
    """Return a time as Arrow reads it: with an offset if the column has one, else without.

    Times without a zone are UTC.
    """
    if value.tzinfo is not None:
        value = value.astimezone(dt.timezone.utc)
    has_zone = value.tzinfo is not None if kind is None or not pa.types.is_timestamp(kind) else kind.tz is not None
    return value.replace(tzinfo=dt.timezone.utc if has_zone else None).isoformat()
