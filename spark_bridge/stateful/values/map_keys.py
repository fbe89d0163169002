"""The users' keys of map entries as Python values: equality and order of keys are those of the stored keys."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Hashable
from typing import Any

from pyspark.sql import types as T

_NAN = float("nan")


def hash_function(struct: T.StructType) -> Callable[[tuple[Any, ...]], Hashable]:
    """Return a function that makes of a key a value for a dict, equal for two keys if their stored bytes are equal."""
    kinds = {type(f.dataType) for f in struct.fields}
    if kinds & {T.ArrayType, T.StructType, T.FloatType, T.DoubleType, T.TimestampType}:
        return _frozen
    return lambda key: key


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dt.datetime):
        return value, value.fold
    # One object for all NaN: a NaN equals itself only by identity.
    return _NAN if isinstance(value, float) and math.isnan(value) else value


def sort_key(value: Any) -> Any:
    """Return a value that sorts as the stored bytes of a key do: nulls first, NaN last."""
    if value is None:
        return (0,)
    if isinstance(value, (list, tuple)):
        return (1, *map(sort_key, value))
    if isinstance(value, float):
        return (1, 1, 0.0) if math.isnan(value) else (1, 0, value)
    return (1, value)
