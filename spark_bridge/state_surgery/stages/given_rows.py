"""Rows that users give for stored state, as the columns of a state variable: by name, without loss, or refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.given_values import CAST_ERRORS, cast_without_loss, check_same, python_value
from backends.encoding.key_order import key_order
from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.user_columns import KEY_GROUP, PARTITION

DERIVED = (KEY_GROUP, PARTITION)
"""Columns of stored rows that follow from the key: they may be given, and say nothing."""


def conformed(given: Any, pairs: PairsOfRows, owner: str) -> pa.RecordBatch:
    """Return rows in the columns of ``pairs.columns``; ``owner`` names in messages what they are for.

    ``given`` is a ``pa.RecordBatch`` or ``pa.Table``. Raises ``InvalidStateStoreArgument`` for anything else, for
    columns that are missing or too many, for values that a column's type cannot have, and for nulls where none may be.
    """
    columns = pairs.columns
    if not isinstance(given, (pa.RecordBatch, pa.Table)):
        raise InvalidStateStoreArgument(
            f"The rows of {owner} came as {type(given).__name__}: they must be a pyarrow RecordBatch or Table."
        )
    names = [name for name in given.schema.names if name not in DERIVED or name in columns.names]
    missing = [name for name in columns.names if name not in names]
    extra = [name for name in names if name not in columns.names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if missing or extra or twice:
        said = [
            f"{what} {', '.join(map(repr, which))}"
            for what, which in (("without", missing), ("with the unknown", extra), ("twice with", twice))
            if which
        ]
        raise InvalidStateStoreArgument(
            f"The rows of {owner} came {' and '.join(said)}: they need the columns "
            f"{', '.join(f'{f.name} ({f.type})' for f in columns)}."
        )
    arrays = [_column(given, field, owner) for field in columns]
    bare = pa.schema([pa.field(f.name, f.type) for f in columns])
    rows = pa.RecordBatch.from_arrays(arrays, schema=bare)
    wrong = pairs.without_length(rows)
    if len(wrong):
        raise InvalidStateStoreArgument(
            f"{len(wrong)} sessions of {owner} do not end after their beginning, as that of "
            f"{key_in_words(rows, pairs, int(wrong[0]))}."
        )
    return rows


def _column(given: pa.RecordBatch | pa.Table, field: pa.Field, owner: str) -> pa.Array:
    column = given.column(field.name)
    try:
        array = cast_without_loss(column, field.type)
        check_same(column, array)
    except CAST_ERRORS as error:
        raise InvalidStateStoreArgument(
            f"Column {field.name!r} of the rows of {owner} is {column.type}, and the state has {field.type}: {error} "
            "Cast it in the function."
        ) from error
    if array.null_count and not field.nullable:
        raise InvalidStateStoreArgument(
            f"Column {field.name!r} of the rows of {owner} has {array.null_count} nulls, and the state has none there."
        )
    return array


def key_in_words(rows: pa.RecordBatch, pairs: PairsOfRows, at: int) -> str:
    """Return the key of one row, for messages, with what tells it apart from others of the same key."""
    n = len(pairs.rows.key) + len(pairs.rows.inner)
    return ", ".join(f"{name}={python_value(rows.column(i)[at])!r}" for i, name in enumerate(rows.schema.names[:n]))


def in_key_order(rows: pa.RecordBatch, keys: pa.BinaryArray) -> tuple[pa.RecordBatch, pa.BinaryArray]:
    """Return rows and keys sorted by key; equal keys stay in the order in which they came."""
    if len(keys) < 2 or pc.all(pc.greater_equal(keys.slice(1), keys.slice(0, len(keys) - 1))).as_py():
        return rows, keys
    order = key_order(keys)
    return rows.take(order), keys.take(order)
