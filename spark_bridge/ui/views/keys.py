"""Keys: look one up with typed inputs, some versions beside one another, and watch it live."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response

from backends.exceptions import StateStoreError
from spark_bridge.exceptions import RequestError, SparkBridgeError
from spark_bridge.ui.lookups import (
    PAGE_READ_SECONDS,
    Found,
    has_key,
    inputs_of,
    key_of_call,
    take_rows,
    variable_schema,
)
from spark_bridge.ui.requests import PageCall
from spark_bridge.ui.system import StateTable, tables_of

MOST_VERSIONS = 6
MOST_KEY_ROWS = 100


@dataclass(frozen=True)
class Compared:
    """One column of a single row in some versions. ``is_changed``: it is not the same in all."""

    column: str
    values: list[object]
    is_changed: bool


def keys(call: PageCall) -> Response:
    """Show the form, and what the key has."""
    tables = tables_of(call.overview)
    table = call.table() or (tables[0] if len(tables) == 1 else None)
    inputs, found, problem, status, watch = [], [], "", 200, ""
    if table is not None:
        try:
            schema = variable_schema(call, table)
            inputs = inputs_of(table, schema)
            if has_key(call, table):
                key = key_of_call(call, table, schema)
                found = [_found(call, table, key, version) for version in _versions(call, table)]
                given = {n: v for n, v in call.query.items() if n.startswith(("key.", "null."))}
                watch = call.url("watch", table=table.id, **given)
        except (SparkBridgeError, StateStoreError) as error:
            problem, status = str(error), 400
    return call.render(
        "keys.html",
        status,
        tables=tables,
        table=table,
        inputs=inputs,
        found=found,
        compared=_compared(found),
        problem=problem,
        watch=watch,
        at_most=MOST_VERSIONS,
    )


def _versions(call: PageCall, table: StateTable) -> list[int | None]:
    """Return the versions asked for; None is the newest. Raises ``RequestError``."""
    text = call.given("versions")
    if not text:
        return [None]
    parts = [part.strip() for part in text.replace(",", " ").split()]
    if len(parts) > MOST_VERSIONS or not all(part.isdecimal() and part.isascii() and len(part) < 19 for part in parts):
        raise RequestError(f"versions={text[:100]!r}: give up to {MOST_VERSIONS} numbers with commas between.")
    return [int(part) for part in parts]


def _found(call: PageCall, table: StateTable, key: tuple[object, ...], version: int | None) -> Found:
    rows = call.system.client().key_rows(
        table.operator, [key], table.state, query=table.query, version=version, timeout=PAGE_READ_SECONDS
    )
    return take_rows(rows, MOST_KEY_ROWS)


def _compared(found: list[Found]) -> list[Compared]:
    """Return the columns of versions beside one another, if each has at most one row, and one has a row."""
    if len(found) < 2 or any(len(f.rows) > 1 for f in found) or not any(f.rows for f in found):
        return []
    columns = next(f.columns for f in found if f.rows)
    made = []
    for name in columns:
        values = [f.rows[0][f.columns.index(name)] if f.rows and name in f.columns else None for f in found]
        made.append(Compared(name, values, any(value != values[0] for value in values)))
    return made
