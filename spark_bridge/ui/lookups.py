"""Reading state for the pages: the typed key of a form, rows of some versions, filters."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from backends.encoding.given_values import python_values
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.client.calls.state_scan import StateScan
from spark_bridge.ui.requests import PageCall
from spark_bridge.ui.system import StateTable
from spark_bridge.ui.typed_values import Input, input_for, parsed

PAGE_READ_SECONDS = 20.0
"""The longest time that one reading takes."""
KEY_PREFIX = "key."
NULL_PREFIX = "null."


@dataclass(frozen=True)
class Found:
    """Rows of one version. ``is_cut``: there are more."""

    version: int | None
    columns: list[str]
    rows: list[list[Any]]
    is_cut: bool = False


def variable_schema(call: PageCall, table: StateTable) -> pa.Schema:
    """Return the columns of a state variable's rows."""
    rows = call.system.client().scan(
        table.operator,
        table.state,
        limit=0,
        query=table.query,
        version=table.schema_version,
        timeout=PAGE_READ_SECONDS,
    )
    with closing(rows):
        return rows.schema


def inputs_of(table: StateTable, schema: pa.Schema) -> list[Input]:
    """Return the controls for a key: one per column, without the window."""
    return [input_for(name, schema.field(name).type) for name in table.key]


def has_key(call: PageCall, table: StateTable) -> bool:
    """Return whether the request names a key."""
    return any(f"{KEY_PREFIX}{name}" in {**call.query, **call.form} for name in table.key) or (
        not table.key and bool(call.given("look"))
    )


def key_of_call(call: PageCall, table: StateTable, schema: pa.Schema) -> tuple[Any, ...]:
    """Return the key of the request. Raises ``RequestError`` naming the column whose text is no value."""
    given = {**call.query, **call.form}
    key: list[Any] = []
    for name in table.key:
        if given.get(f"{NULL_PREFIX}{name}"):
            key.append(None)
            continue
        text = given.get(f"{KEY_PREFIX}{name}")
        kind = schema.field(name).type
        if text is None or (not text and not pa.types.is_string(kind)):
            raise RequestError(f"Key column {name!r} has no value; type one, or say that it is null.")
        key.append(parsed(text, kind, f"Key column {name!r}"))
    return tuple(key)


def conditions_of(call: PageCall, schema: pa.Schema, most: int) -> list[tuple[Any, ...]]:
    """Return the filters of the request. Raises ``RequestError``."""
    found: list[tuple[Any, ...]] = []
    for i in range(most):
        column, comparison = call.given(f"column{i}"), call.given(f"is{i}") or "="
        if not column:
            continue
        if column not in schema.names:
            raise RequestError(f"There is no column {column[:100]!r}; there are {', '.join(map(repr, schema.names))}.")
        kind, text = schema.field(column).type, call.given(f"value{i}")
        if comparison in ("is null", "is not null"):
            found.append((column, comparison))
        elif comparison == "in":
            parts = [part.strip() for part in text.split(",")]
            found.append((column, "in", [parsed(part, kind, f"Column {column!r}") for part in parts]))
        else:
            found.append((column, comparison, parsed(text, kind, f"Column {column!r}")))
    return found


def take_rows(rows: StateScan, most: int, seconds: float = PAGE_READ_SECONDS) -> Found:
    """Return up to ``most`` rows, and end the reading. Raises ``RequestError`` if they do not come in time."""
    with closing(rows):
        table = pa.Table.from_batches(list(_until(rows, most + 1, seconds)), rows.schema)
        version = rows.version
    return found_in(table, most, version)


def found_in(table: pa.Table, most: int, version: int | None = None) -> Found:
    """Return up to ``most`` rows of a table."""
    shown = table.slice(0, most)
    columns = [python_values(column) for column in shown.columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    return Found(version, list(table.schema.names), rows, table.num_rows > most)


def _until(rows: StateScan, most: int, seconds: float) -> Iterator[pa.RecordBatch]:
    deadline, given = time.monotonic() + seconds, 0
    for batch in rows:
        yield batch.slice(0, most - given)
        given += batch.num_rows
        if given >= most:
            return
        if time.monotonic() > deadline:
            raise RequestError(f"The rows did not come within {seconds:.0f} s; ask for fewer by a filter or a limit.")
