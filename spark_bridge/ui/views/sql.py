"""SQL over the state: one statement that reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from starlette.responses import Response

from backends.exceptions import StateStoreError
from spark_bridge.exceptions import RequestError, SparkBridgeError
from spark_bridge.queryable.sql.duckdb_connections import SqlLimits, import_duckdb, is_out_of_memory
from spark_bridge.queryable.sql.relation import StateRelation
from spark_bridge.ui.lookups import PAGE_READ_SECONDS, Found, found_in
from spark_bridge.ui.requests import PageCall
from spark_bridge.ui.system import tables_of
from spark_bridge.ui.views.results import MOST_CSV_ROWS, chart, csv_response

MOST_SQL_ROWS = 1_000
SQL_SECONDS = 30.0
MOST_STATEMENTS = 4
PAGE_BATCH_ROWS = 1_024
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
def _answered(call: PageCall) -> Iterator[StateRelation]:
    """Give the answer of the statement, which ends after ``SQL_SECONDS``. Raises ``RequestError`` for wrong SQL."""
    duckdb = import_duckdb()
    if not _running.acquire(timeout=SQL_SECONDS):
        raise RequestError(f"{MOST_STATEMENTS} statements are running, which is the limit; try again later.")
    limits = (call.sql_limits or PAGE_SQL).share_of(MOST_STATEMENTS)
    try:
        answer = call.system.client().sql(
            call.form["statement"],
            timeout=PAGE_READ_SECONDS,
            limits=limits,
        )
        interrupting = threading.Timer(SQL_SECONDS, answer.interrupt)
        interrupting.start()
        try:
            yield answer
        finally:
            interrupting.cancel()
    except duckdb.InterruptException as error:
        raise RequestError(f"The statement was not done after {SQL_SECONDS:.0f} s, which is the limit.") from error
    except (duckdb.Error, pa.ArrowException, MemoryError) as error:
        if is_out_of_memory(error):
            raise limits.exceeded(error) from error
        raise RequestError(str(error)) from error
    finally:
        _running.release()


def _first(answer: StateRelation, most: int) -> pa.Table:
    reader = answer.to_arrow_reader(PAGE_BATCH_ROWS)
    batches, given = [], 0
    for batch in reader:
        batches.append(batch.slice(0, most - given))
        given += batch.num_rows
        if given >= most:
            break
    return pa.Table.from_batches(batches, reader.schema)
