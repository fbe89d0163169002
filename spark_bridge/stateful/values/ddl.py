"""Schemas written as DDL text, read without a JVM: PySpark's own parser needs a JVM, which its workers do not have."""

from __future__ import annotations

import re

from pyspark.sql import types as T

from backends.encoding.spark_types import INTERVAL_REMEDY
from spark_bridge.exceptions import StateDeclarationError

_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|([^\s<>(),:`'\"]+)|([<>(),:]))")
_SIMPLE: dict[str, type[T.DataType]] = {
    "boolean": T.BooleanType,
    "tinyint": T.ByteType,
    "byte": T.ByteType,
    "smallint": T.ShortType,
    "short": T.ShortType,
    "int": T.IntegerType,
    "integer": T.IntegerType,
    "bigint": T.LongType,
    "long": T.LongType,
    "float": T.FloatType,
    "real": T.FloatType,
    "double": T.DoubleType,
    "string": T.StringType,
    "binary": T.BinaryType,
    "date": T.DateType,
    "timestamp": T.TimestampType,
    "timestamp_ltz": T.TimestampType,
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
            f"{schema!r} is no schema: give a StructType, or its fields as DDL text such as 'count INT, last "
            "TIMESTAMP'."
        )
    return _Parser(schema).fields()


class _Parser:
    """Reads Spark's grammar of table schemas, with the types that state can have."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[str] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if not found:
                raise self._refusal(f"{text[at:].strip()!r} cannot be read")
            self._tokens.append(found[0].strip())
            at = found.end()
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
        """Return whether the next tokens are these words, and if so, go on after them."""
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
        if name == "array":
            self._expect("<")
            array = T.ArrayType(self._type())
            self._expect(">")
            return array
        if name == "map":
            self._expect("<")
            key = self._type()
            self._expect(",")
            made = T.MapType(key, self._type())
            self._expect(">")
            return made
        if name == "struct":
            self._expect("<")
            struct = self.fields(end=">")
            self._expect(">")
            return struct
        remedy = f". {INTERVAL_REMEDY}" if name == "interval" else ""
        raise self._refusal(f"{name!r} is no type that state can have{remedy}")

    def _numbers(self, default: tuple[int, int]) -> tuple[int, int]:
        """Read the one or two numbers in brackets after a type; ``default`` where there are none."""
        if not self._take("("):
            return default
        first = self._number()
        second = self._number() if self._take(",") else default[1]
        self._expect(")")
        return first, second

    def _number(self) -> int:
        token = self._next()
        if not token.isdecimal():
            raise self._refusal(f"{token or 'the end'!r} is no number")
        return int(token)
