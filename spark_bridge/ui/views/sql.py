"""SQL over the state: one statement that reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pyarrow as pa
from starlette.responses import Response

from backends.exceptions import StateStoreError
from spark_bridge.exceptions import RequestError, RequestLimitError, SparkBridgeError
from spark_bridge.queryable.sql.duckdb_connections import SqlLimits
from spark_bridge.queryable.sql.statement_process import ProcessStatement
from spark_bridge.ui.lookups import PAGE_READ_SECONDS, Found, found_in
from spark_bridge.ui.requests import PageCall
from spark_bridge.ui.system import tables_of
from spark_bridge.ui.views.results import MOST_CSV_ROWS, chart, csv_response

MOST_SQL_ROWS = 1_000
SQL_SECONDS = 30.0
MOST_STATEMENTS = 4
PAGE_BATCH_ROWS = 1_024
MOST_ANSWER_BYTES = 64 << 20
"""The page keeps an answer in memory."""
_running = threading.BoundedSemaphore(MOST_STATEMENTS)
"""At most this many statements run at once in this process."""
PAGE_SQL = SqlLimits(memory_bytes=1024 << 20, threads=2, temp_bytes=0)
"""The limits of all statements of a page together, unless it is given others."""


def sql(call: PageCall) -> Response:
    """Show the form, and the rows of the statement that was sent."""
    found: Found | None = None
    problem, status = "", 200
    if call.form.get("statement", "").strip():
        try:
            with _answered(call) as answer:
                found = found_in(_first(answer, MOST_SQL_ROWS + 1), MOST_SQL_ROWS)
        except (SparkBridgeError, StateStoreError) as error:
            problem, status = str(error), 400
    return call.render(
        "sql.html",
        status,
        tables=tables_of(call.overview),
        found=found,
        chart=chart(call, found),
        problem=problem,
        most=MOST_SQL_ROWS,
    )


def sql_csv(call: PageCall) -> Response:
    """Return the rows of the statement as CSV."""
    with _answered(call) as answer:
        table = _first(answer, MOST_CSV_ROWS + 1)
    return csv_response("statement", table.schema, table.to_batches())


@contextmanager
def _answered(call: PageCall) -> Iterator[ProcessStatement]:
    """Give the answer of the statement, which ends after ``SQL_SECONDS``. Raises ``RequestError`` for wrong SQL."""
    if not _running.acquire(timeout=SQL_SECONDS):
        raise RequestError(f"{MOST_STATEMENTS} statements are running, which is the limit; try again later.")
    try:
        answer = ProcessStatement(
            call.system.client(),
            call.form["statement"],
            timeout=PAGE_READ_SECONDS,
            limits=(call.sql_limits or PAGE_SQL).share_of(MOST_STATEMENTS),
        )
        too_long = RequestError(f"The statement was not done after {SQL_SECONDS:.0f} s, which is the limit.")
        ending = threading.Timer(SQL_SECONDS, answer.end, [too_long])
        ending.start()
        with closing(answer):
            try:
                yield answer
            finally:
                ending.cancel()
    finally:
        _running.release()


def _first(answer: ProcessStatement, most: int) -> pa.Table:
    schema, rows = answer.record_batches(PAGE_BATCH_ROWS)
    batches, given, size = [], 0, 0
    for batch in rows:
        batches.append(batch.slice(0, most - given))
        given += batch.num_rows
        size += batches[-1].nbytes
        if size > MOST_ANSWER_BYTES:
            raise RequestLimitError(
                f"The first {min(given, most)} rows of the answer have more than {MOST_ANSWER_BYTES >> 20} MiB. Ask "
                "for fewer columns or parts of the values, or ask the HTTP application (POST /v1/sql), which streams."
            )
        if given >= most:
            break
    return pa.Table.from_batches(batches, schema)
