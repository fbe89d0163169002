"""Scan: the rows of a state variable, with filters."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from backends.exceptions import StateStoreError
from spark_bridge.exceptions import RequestError, SparkBridgeError
from spark_bridge.queryable.client.arguments.conditions import OPERATORS
from spark_bridge.queryable.client.calls.state_scan import StateScan
from spark_bridge.ui.lookups import PAGE_READ_SECONDS, Found, conditions_of, take_rows, variable_schema
from spark_bridge.ui.requests import PageCall
from spark_bridge.ui.system import StateTable, tables_of
from spark_bridge.ui.views.results import MOST_CSV_ROWS, chart, csv_response

FILTERS = 3
MOST_SCAN_ROWS = 1_000
USUAL_ROWS = 100


def scan(call: PageCall) -> Response:
    """Show the form, and the rows."""
    tables = tables_of(call.overview)
    table = call.table() or (tables[0] if len(tables) == 1 else None)
    found: Found | None = None
    columns: list[tuple[str, str]] = []
    problem, status = "", 200
    if table is not None:
        try:
            schema = variable_schema(call, table)
            columns = [(field.name, str(field.type)) for field in schema]
            if call.given("limit"):
                most = call.number("limit", USUAL_ROWS, 1, MOST_SCAN_ROWS)
                found = take_rows(_rows(call, table, conditions_of(call, schema, FILTERS), most + 1), most)
        except (SparkBridgeError, StateStoreError) as error:
            problem, status = str(error), 400
    return call.render(
        "scan.html",
        status,
        tables=tables,
        table=table,
        columns=columns,
        operators=OPERATORS,
        filters=FILTERS,
        usual=USUAL_ROWS,
        most=MOST_SCAN_ROWS,
        found=found,
        chart=chart(call, found),
        problem=problem,
    )


def scan_csv(call: PageCall) -> Response:
    """Return the rows as CSV, as many as there are."""
    table = call.table()
    if table is None:
        raise RequestError("table= must name the state to read.")
    conditions = conditions_of(call, variable_schema(call, table), FILTERS)
    rows = _rows(call, table, conditions, MOST_CSV_ROWS + 1)
    return csv_response("scan", rows.schema, rows)


def _rows(call: PageCall, table: StateTable, where: list[tuple[Any, ...]], limit: int) -> StateScan:
    version = call.number("version", -1) if call.given("version") else None
    return call.system.client().scan(
        table.operator,
        table.state,
        limit=limit,
        where=where,
        query=table.query,
        version=version,
        timeout=PAGE_READ_SECONDS,
    )
