"""Checks of the answers of a processor in columns: tables against schemas, masks against the number of keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from spark_bridge.exceptions import StatefulProcessorError
from spark_bridge.stateful.arrow_processor import Columns, Flags, KeyMask


def aligned(given: Columns, schema: pa.Schema, what: str) -> pa.Table:
    """Return a table with the columns of the schema; raises ``StatefulProcessorError`` naming what does not fit."""
    if not isinstance(given, (pa.Table, pa.RecordBatch)):
        raise StatefulProcessorError(f"The processor gave a {type(given).__name__} for its {what}: give a table.")
    if sorted(given.schema.names) != sorted(schema.names):
        raise StatefulProcessorError(
            f"The processor's {what} has the columns {', '.join(given.schema.names) or '(none)'}; its schema has "
            f"{', '.join(schema.names)}."
        )
    table = given if isinstance(given, pa.Table) else pa.Table.from_batches([given])
    columns = []
    for f in schema:
        column = table.column(f.name)
        try:
            column = column if column.type == f.type else column.cast(f.type)
        except pa.ArrowException as error:
            raise StatefulProcessorError(
                f"Column {f.name!r} of the processor's {what} is of type {column.type}, not {f.type}, and cannot be "
                f"cast: {error}"
            ) from error
        if column.null_count and not f.nullable:
            raise StatefulProcessorError(
                f"Column {f.name!r} of the processor's {what} is declared not nullable, but has "
                f"{column.null_count} nulls."
            )
        columns.append(column)
    return pa.table(columns, schema=schema)


def flags_of(given: KeyMask | None, n: int, what: str, *, default: bool) -> Flags:
    """Return a mask of n keys that the processor gave, or ``default`` for all; raises ``StatefulProcessorError``."""
    if given is None:
        return np.full(n, default)
    if isinstance(given, (pa.Array, pa.ChunkedArray)) and pa.types.is_boolean(given.type):
        given = given.fill_null(False)
    flags = np.asarray(given)
    if flags.dtype != np.bool_ or flags.shape != (n,):
        raise StatefulProcessorError(
            f"The processor gave {what}= with {flags.size} values of type {flags.dtype}: give {n} booleans, one per "
            "key."
        )
    return flags
