"""Reading state for the pages: the typed key of a form, rows of some versions, filters."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.user_values import python_values
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.client.json_values import at_of_text, to_json
from spark_bridge.queryable.client.scans import StateScan
from spark_bridge.ui.requests import PageCall, StateTable

# Values as people type them into forms, for columns of Arrow types.


@dataclass(frozen=True)
class Input:
    """The control of a form for a value of a column: its kind, and an example."""

    name: str
    type: str
    control: str
    example: str


_CONTROLS: tuple[tuple[Callable[[pa.DataType], bool], str, str], ...] = (
    (pa.types.is_integer, "number", "42"),
    (pa.types.is_boolean, "choice", "true"),
    (pa.types.is_date, "date", "2024-03-09"),
    (pa.types.is_timestamp, "moment", "2024-03-09 23:00:00"),
    (pa.types.is_floating, "number", "1.5"),
    (pa.types.is_decimal, "number", "1.5"),
    (pa.types.is_binary, "text", "base64, as AP8="),
    (pa.types.is_nested, "text", "JSON"),
    (lambda kind: True, "text", ""),
)


def input_for(name: str, kind: pa.DataType) -> Input:
    """Return the control for a column: "number", "choice" of true and false, "date", "moment" or "text"."""
    control, example = next((control, example) for is_kind, control, example in _CONTROLS if is_kind(kind))
    return Input(name, str(kind), control, example)


def parsed(text: str, kind: pa.DataType, what: str) -> Any:
    """Return the Python value of a string. Times without a zone are UTC. Raises ``RequestError`` naming ``what``."""
    try:
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return text
        if pa.types.is_binary(kind):
            return base64.b64decode(text, validate=True)
        if pa.types.is_nested(kind):
            return pa.scalar(json.loads(text), kind).as_py()
        scalar = pa.scalar(text.strip())
        if pa.types.is_boolean(kind):
            return {"true": True, "false": False}[text.strip().lower()]
        if pa.types.is_timestamp(kind):
            return _moment(text.strip(), kind)
        return scalar.cast(kind).as_py()
    except (pa.ArrowException, binascii.Error, ValueError, KeyError, TypeError) as error:
        reason = "" if isinstance(error, KeyError) else str(error).splitlines()[0][:200]
        raise RequestError(f"{what}: {text[:100]!r} is no {kind}. {reason}".rstrip()) from error


def _moment(text: str, kind: pa.DataType) -> Any:
    plain = pa.scalar(text.replace("T", " ").removesuffix("Z"))
    if kind.tz is None:
        return plain.cast(kind).as_py()
    try:
        return pc.assume_timezone(plain.cast(pa.timestamp(kind.unit)), "UTC").cast(kind).as_py()
    except pa.ArrowInvalid:
        return pa.scalar(text).cast(kind).as_py()


def text_of(value: Any) -> str:
    """Return the string that ``parsed`` converts to a value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime):
        moment = value if value.tzinfo is None else value.astimezone(dt.timezone.utc)
        return moment.replace(tzinfo=None).isoformat()
    return json.dumps(value, default=str) if isinstance(value, list | dict) else str(value)


PAGE_READ_SECONDS = 20.0
"""The longest time that one reading takes."""
KEY_PREFIX = "key."
NULL_PREFIX = "null."


@dataclass(frozen=True)
class PageRows:
    """Rows of one version. ``is_cut``: there are more. ``at``: the time that rolling aggregates are of, or ""."""

    version: int | None
    columns: list[str]
    rows: list[list[Any]]
    is_cut: bool = False
    at: str = ""


def time_argument(call: PageCall) -> dict[str, Any]:
    """Return the time that the request gives for rolling aggregates, for the client. Raises ``RequestError``."""
    text = call.given("at")
    return {"at": at_of_text(text)} if text else {}


def variable_schema(call: PageCall, table: StateTable) -> pa.Schema:
    """Return the columns of a state variable's rows."""
    rows = call.client().scan(
        table.operator, table.state, limit=0, query=table.query, version=table.schema_version, timeout=PAGE_READ_SECONDS
    )
    with closing(rows):
        return rows.schema


def has_key(call: PageCall, table: StateTable) -> bool:
    """Return whether the request names a key."""
    if not table.key:
        return bool(call.given("look"))
    given = {**call.query, **call.form}
    return any(f"{prefix}{name}" in given for prefix in (KEY_PREFIX, NULL_PREFIX) for name in table.key)


def key_of_call(call: PageCall, table: StateTable, schema: pa.Schema) -> tuple[Any, ...]:
    """Return the key of the request. Raises ``RequestError`` naming the column whose input is not a value."""
    parameters = {**call.query, **call.form}
    key: list[Any] = []
    for name in table.key:
        if parameters.get(f"{NULL_PREFIX}{name}"):
            key.append(None)
            continue
        text = parameters.get(f"{KEY_PREFIX}{name}")
        kind = schema.field(name).type
        if text is None or (not text and not pa.types.is_string(kind)):
            raise RequestError(f"Key column {name!r} has no value; type one, or mark it as null.")
        key.append(parsed(text, kind, f"Key column {name!r}"))
    return tuple(key)


def conditions_of(call: PageCall, schema: pa.Schema, most: int) -> list[tuple[Any, ...]]:
    """Return the filters of the request. Raises ``RequestError``."""
    conditions: list[tuple[Any, ...]] = []
    for i in range(most):
        column, comparison = call.given(f"column{i}"), call.given(f"is{i}") or "="
        if not column:
            continue
        if column not in schema.names:
            raise RequestError(f"There is no column {column[:100]!r}; there are {', '.join(map(repr, schema.names))}.")
        kind, text = schema.field(column).type, call.given(f"value{i}")
        if comparison in ("is null", "is not null"):
            conditions.append((column, comparison))
        elif comparison == "in":
            parts = [part.strip() for part in text.split(",")]
            conditions.append((column, "in", [parsed(part, kind, f"Column {column!r}") for part in parts]))
        else:
            conditions.append((column, comparison, parsed(text, kind, f"Column {column!r}")))
    return conditions


def take_rows(rows: StateScan, most: int) -> PageRows:
    """Return up to ``most`` rows, and end the reading. Raises ``RequestError`` if they do not come in time."""
    with closing(rows):
        table = pa.Table.from_batches(list(_until(rows, most + 1)), rows.schema)
        version, at = rows.version, rows.at
    return page_rows(table, most, version, [] if at is None else [at])


def page_rows(table: pa.Table, most: int, version: int | None = None, times: Collection[dt.datetime] = ()) -> PageRows:
    """Return up to ``most`` rows of a table. ``times`` are the times of its rolling aggregates."""
    shown = table.slice(0, most)
    columns = [python_values(column) for column in shown.columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    at = " and ".join(sorted({str(to_json(time)) for time in times}))
    return PageRows(version, list(table.schema.names), rows, table.num_rows > most, at)


def _until(rows: StateScan, most: int) -> Iterator[pa.RecordBatch]:
    deadline, num_rows = time.monotonic() + PAGE_READ_SECONDS, 0
    for batch in rows:
        yield batch.slice(0, most - num_rows)
        num_rows += batch.num_rows
        if num_rows >= most:
            return
        if time.monotonic() > deadline:
            raise RequestError(
                f"The rows did not come within {PAGE_READ_SECONDS:.0f} s; ask for fewer by a filter or a limit."
            )
