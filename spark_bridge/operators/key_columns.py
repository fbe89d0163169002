"""Checks of the columns of a DataFrame that are the key of a stateful operator."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import types as T

from backends.encoding.column_names import RESERVED_PREFIX
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.spark_types import column_type, is_ordered

PLAIN_COLLATION = "UTF8_BINARY"
"""The collation of plain strings, which are compared by their bytes."""


def check_keys(schema: T.StructType, keys: Sequence[str]) -> None:
    """Raise ``InvalidOperatorError`` for key columns that do not exist, come twice, or cannot be compared."""
    if not keys:
        raise InvalidOperatorError("by= names no key column; give one column name or a list of them.")
    if len(set(keys)) != len(keys):
        raise InvalidOperatorError(f"by={list(keys)!r} names a key column twice.")
    for key in keys:
        kind = column_type(schema, key, "by=")
        if not is_ordered(kind):
            raise InvalidOperatorError(f"Key column {key!r} has type {kind.simpleString()}, which cannot be a key.")
        if getattr(kind, "collation", PLAIN_COLLATION) != PLAIN_COLLATION:
            raise InvalidOperatorError(
                f"Key column {key!r} has type {kind.simpleString()}, and keys are told apart by their bytes: cast it "
                "to string, or group by an expression such as lower()."
            )
        if key.startswith(RESERVED_PREFIX):
            raise InvalidOperatorError(
                f"Key column {key!r} has a name of the state store's own, which begin with {RESERVED_PREFIX}: "
                "rename it."
            )
