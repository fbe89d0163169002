"""Schemas written as DDL text, read without a JVM: PySpark's own parser needs a JVM, which its workers do not have."""

from __future__ import annotations

import datetime as dt
import math
import re
import time
from collections.abc import Callable, Hashable, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.sql import types as T

from backends.encoding.columns import INTERVAL_REMEDY
from spark_bridge.exceptions import StateDeclarationError

_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|([^\s<>(),:`'\"]+)|([<>(),:]))")
_SIMPLE: dict[str, type[T.DataType]] = {
    "boolean": T.BooleanType,
    **dict.fromkeys(("tinyint", "byte"), T.ByteType),
    **dict.fromkeys(("smallint", "short"), T.ShortType),
    **dict.fromkeys(("int", "integer"), T.IntegerType),
    **dict.fromkeys(("bigint", "long"), T.LongType),
    **dict.fromkeys(("float", "real"), T.FloatType),
    "double": T.DoubleType,
    "string": T.StringType,
    "binary": T.BinaryType,
    "date": T.DateType,
    **dict.fromkeys(("timestamp", "timestamp_ltz"), T.TimestampType),
    "timestamp_ntz": T.TimestampNTZType,
}
_DECIMALS = ("decimal", "dec", "numeric")


def struct_of(schema: T.StructType | str) -> T.StructType:
    """Return a schema, given as a ``StructType`` or as text such as "a INT, b STRUCT<c: STRING>", as a ``StructType``.

    Raises ``StateDeclarationError``.
    """
    if isinstance(schema, T.StructType):
        return schema
    if not isinstance(schema, str):
        raise StateDeclarationError(
            f"{schema!r} is not a schema: give a StructType, or its fields as DDL text such as "
            "'count INT, last TIMESTAMP'."
        )
    return _Parser(schema).fields()


class _Parser:
    """Reads Spark's grammar of table schemas, with the types that state can have."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[str] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            if not (match := _TOKEN.match(text, at)):
                raise self._refusal(f"{text[at:].strip()!r} cannot be read")
            self._tokens.append(match[0].strip())
            at = match.end()
        self._at = 0

    def _refusal(self, reason: str) -> StateDeclarationError:
        return StateDeclarationError(
            f"The schema {self._text!r} is not DDL text of a struct's fields: {reason.removesuffix('.')}. Write it as "
            "'name TYPE, name TYPE', such as 'count INT, tags ARRAY<STRING>', or give a StructType."
        )

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def _take(self, *wanted: str) -> bool:
        """Return whether the next tokens are these words, and if so, consume them."""
        if [t.lower() for t in self._tokens[self._at : self._at + len(wanted)]] != list(wanted):
            return False
        self._at += len(wanted)
        return True

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise self._refusal(f"{token!r} is missing before {self._peek() or 'the end'!r}")

    def _name(self) -> str:
        token = self._next()
        if token[:1] == "`":
            return token[1:-1].replace("``", "`")
        if not token or token[0] in "<>(),:'\"":
            raise self._refusal(f"a name is missing before {token or 'the end'!r}")
        return token

    def fields(self, end: str = "") -> T.StructType:
        """Read the fields up to the token ``end``."""
        struct = T.StructType()
        if self._peek() == end:
            return struct
        while True:
            name = self._name()
            self._take(":")
            data_type = self._type()
            nullable = not self._take("not", "null")
            metadata = {"comment": self._next()[1:-1]} if self._take("comment") else None
            struct.add(name, data_type, nullable, metadata)
            if not self._take(","):
                break
        if self._peek() != end:
            raise self._refusal(f"{self._peek() or 'the end'!r} comes after field {struct.names[-1]!r}")
        return struct

    def _type(self) -> T.DataType:
        name = self._name().lower()
        if name in _SIMPLE:
            return _SIMPLE[name]()
        if name in _DECIMALS:
            precision, scale = self._numbers((10, 0))
            return T.DecimalType(precision, scale)
        if name in ("char", "character", "varchar"):
            self._numbers((1, 0))
            return T.StringType()
        if name in ("array", "map", "struct"):
            self._expect("<")
            nested: T.DataType
            if name == "struct":
                nested = self.fields(end=">")
            elif name == "array":
                nested = T.ArrayType(self._type())
            else:
                key = self._type()
                self._expect(",")
                nested = T.MapType(key, self._type())
            self._expect(">")
            return nested
        remedy = f". {INTERVAL_REMEDY}" if name == "interval" else ""
        raise self._refusal(f"{name!r} is not a type that state can have{remedy}")

    def _numbers(self, default: tuple[int, int]) -> tuple[int, int]:
        """Read the one or two numbers in brackets after a type; ``default`` without them."""
        if not self._take("("):
            return default
        first = self._number()
        second = self._number() if self._take(",") else default[1]
        self._expect(")")
        return first, second

    def _number(self) -> int:
        token = self._next()
        if not token.isdecimal():
            raise self._refusal(f"{token or 'the end'!r} is not a number")
        return int(token)


# Instants to wall-clock times of this process's time zone and back, whole columns at a time.
#
# PySpark converts a ``TimestampType`` to a naive datetime in the local time zone for Python, and converts such
# datetimes back.


Micros = npt.NDArray[np.int64]
"""Microseconds since 1970: of an instant in UTC, of a wall-clock time as if it were UTC."""

_SECOND = 1_000_000
_DAY_SECONDS = 86_400
_FIRST = -62_135_596_800 * _SECOND
_LAST = 253_402_300_799 * _SECOND + 999_999


def to_local(instants: Micros) -> list[datetime]:
    """Return naive local datetimes; ``fold`` is set in the second of two equal hours.

    Raises ``ValueError`` for a time outside the years 1 to 9999.
    """
    check_years(instants)
    offsets, is_steady = _offsets(instants)
    wall = instants + offsets * _SECOND
    check_years(wall)
    values: list[datetime] = wall.view("datetime64[us]").tolist()
    for i in np.flatnonzero(~is_steady).tolist():
        seconds, micros = divmod(int(instants[i]), _SECOND)
        values[i] = datetime.fromtimestamp(seconds).replace(microsecond=micros)
    return values


def from_local(wall: Micros, values: Sequence[datetime | None]) -> Micros:
    """Return the instants of naive local datetimes: ``wall`` are the wall-clock times of ``values`` (of None: any)."""
    offsets, is_steady = _offsets(wall)
    instants: Micros = wall - offsets * _SECOND
    for i in np.flatnonzero(~is_steady).tolist():
        value = values[i]
        if value is not None:
            # A float of whole seconds is exact.
            instants[i] = int(value.replace(microsecond=0).timestamp()) * _SECOND + value.microsecond
    return instants


def check_years(micros: Micros) -> None:
    """Raise ``ValueError`` for a time that Python's datetime cannot hold."""
    if len(micros) and (micros.min() < _FIRST or micros.max() > _LAST):
        wrong = micros[(micros < _FIRST) | (micros > _LAST)][0]
        raise ValueError(
            f"The time {np.datetime64(int(wrong), 'us')} is outside the years 1 to 9999, which are all that Python's "
            "datetime has. Cast the column to a string or a number."
        )


def _offsets(micros: Micros) -> tuple[Micros, npt.NDArray[np.bool_]]:
    """Return the seconds that local time is ahead of UTC, and whether they are the same on the days around."""
    if time.tzname == ("UTC", "UTC"):
        return np.zeros(len(micros), np.int64), np.ones(len(micros), np.bool_)
    days, which = np.unique(micros // (_DAY_SECONDS * _SECOND), return_inverse=True)
    offsets = np.zeros(len(days), np.int64)
    is_steady = np.zeros(len(days), np.bool_)
    for i, day in enumerate(days.tolist()):
        # A wall-clock day is within these three days of UTC; datetime looks a day back to find hours that occur twice.
        around = {time.localtime((day + d) * _DAY_SECONDS).tm_gmtoff for d in (-1, 0, 1, 2)}
        offsets[i] = around.pop()
        is_steady[i] = not around
    return offsets[which], is_steady[which]


# The users' keys of map entries as Python values: equality and order of keys are those of the stored keys.


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
