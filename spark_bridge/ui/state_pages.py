"""The pages of state: the hottest keys of an operator, one key, scans, and SQL."""

from __future__ import annotations

import csv
import io
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
from starlette.responses import Response, StreamingResponse

from backends.encoding.user_values import python_values
from backends.exceptions import StateStoreError
from spark_bridge.exceptions import RequestError, RequestLimitError, SparkBridgeError
from spark_bridge.overview.model import rate
from spark_bridge.queryable.client.arguments import OPERATORS
from spark_bridge.queryable.client.scans import StateScan
from spark_bridge.queryable.sql.sql import SqlLimits
from spark_bridge.queryable.sql.statement_process import ProcessStatement
from spark_bridge.ui import lookups
from spark_bridge.ui.charts import value as value_text
from spark_bridge.ui.charts import whole_value
from spark_bridge.ui.requests import PageCall, StateTable, tables_of

SHOWN_VERSIONS = 10
"""At most this many of the last versions are looked at."""
MAX_CHANGES = 200_000
"""At most this many changes are counted."""
SHOWN = 20


def hottest(call: PageCall) -> Response:
    """Count the changes of the last versions by key."""
    table = call.table()
    if table is None:
        raise RequestError("table= must name the state whose keys are counted.")
    newest = table.versions.stop - 1
    since = max(table.versions.start, newest - SHOWN_VERSIONS)
    counts: Counter[tuple[object, ...]] = Counter()
    deadline, is_cut = time.monotonic() + lookups.PAGE_READ_SECONDS, False
    for change in call.system.recent_changes(table, since, newest) if since < newest else ():
        columns = [python_values(change.batch.column(name)) for name in table.key]
        counts.update(_hashable(key) for key in zip(*columns, strict=True))
        is_cut = counts.total() > MAX_CHANGES or time.monotonic() > deadline
        if is_cut:
            break
    return call.render(
        "hottest.html",
        table=table,
        since=since,
        until=newest,
        is_cut=is_cut,
        changes=counts.total(),
        keys=len(counts),
        look_up=lambda key: call.url("keys", table=table.id, **_parameters(table.key, key)),
        hottest=counts.most_common(SHOWN),
    )


def _hashable(key: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(part if part.__hash__ is not None else str(part) for part in key)


def _parameters(names: Sequence[str], key: tuple[object, ...]) -> dict[str, str]:
    """Return a key as the form of a lookup sends it."""
    parts = zip(names, key, strict=True)
    return {f"null.{n}" if v is None else f"key.{n}": "1" if v is None else lookups.text_of(v) for n, v in parts}


# Keys: look one up with typed inputs, some versions next to one another, and watch it live.


MAX_COMPARED_VERSIONS = 6
MAX_KEY_ROWS = 100


@dataclass(frozen=True)
class Compared:
    """One column of a single row in some versions. ``is_changed``: it is not the same in all."""

    column: str
    values: list[object]
    is_changed: bool


def keys(call: PageCall) -> Response:
    """Show the form, and the state of the key."""
    tables = tables_of(call.overview)
    table = call.table() or (tables[0] if len(tables) == 1 else None)
    inputs, answers, problem, status, watch = [], [], "", 200, ""
    if table is not None:
        try:
            schema = lookups.variable_schema(call, table)
            inputs = [lookups.input_for(name, schema.field(name).type) for name in table.key]  # without the window
            if lookups.has_key(call, table):
                key = lookups.key_of_call(call, table, schema)
                answers = [_found(call, table, key, version) for version in _versions(call, table)]
                values = {n: v for n, v in call.query.items() if n.startswith(("key.", "null."))}
                watch = "" if table.is_rolling else call.url("watch", table=table.id, **values)
        except (SparkBridgeError, StateStoreError) as error:
            problem, status = str(error), 400
    return call.render(
        "keys.html",
        status,
        tables=tables,
        table=table,
        inputs=inputs,
        found=answers,
        compared=_compared(answers),
        problem=problem,
        watch=watch,
        at_most=MAX_COMPARED_VERSIONS,
    )


def _versions(call: PageCall, table: StateTable) -> list[int | None]:
    """Return the versions asked for; None is the newest. Raises ``RequestError``."""
    text = call.given("versions")
    if not text:
        return [None]
    parts = [part.strip() for part in text.replace(",", " ").split()]
    are_numbers = all(part.isdecimal() and part.isascii() and len(part) < 19 for part in parts)
    if len(parts) > MAX_COMPARED_VERSIONS or not are_numbers:
        raise RequestError(f"versions={text[:100]!r}: give up to {MAX_COMPARED_VERSIONS} numbers with commas between.")
    return [int(part) for part in parts]


def _found(call: PageCall, table: StateTable, key: tuple[object, ...], version: int | None) -> lookups.PageRows:
    rows = call.client().key_rows(table.operator, [key], table.state, **_options(call, table, version))
    return lookups.take_rows(rows, MAX_KEY_ROWS)


def _options(call: PageCall, table: StateTable, version: int | None) -> dict[str, Any]:
    options = {"query": table.query, "version": version, "timeout": lookups.PAGE_READ_SECONDS}
    return {**options, **lookups.time_argument(call)}


def _compared(answers: list[lookups.PageRows]) -> list[Compared]:
    """Return the columns of versions next to one another, if each has at most one row, and one has a row."""
    if len(answers) < 2 or any(len(f.rows) > 1 for f in answers) or not any(f.rows for f in answers):
        return []
    columns = next(f.columns for f in answers if f.rows)
    rows = []
    for name in columns:
        values = [f.rows[0][f.columns.index(name)] if f.rows and name in f.columns else None for f in answers]
        rows.append(Compared(name, values, any(value != values[0] for value in values)))
    return rows


# Rows as a table, a chart and CSV.


MAX_RESULT_BARS = 40
MAX_CSV_ROWS = 1_000_000
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class ChartBar:
    """A bar from the zero line: its start and its width, 0 to 100."""

    label: str
    value: str
    x: float
    width: float
    is_negative: bool


@dataclass(frozen=True)
class Chart:
    """A bar chart of one column by another. ``numbers`` and ``labels`` are the columns that may be chosen."""

    label: str
    number: str
    labels: list[str]
    numbers: list[str]
    bars: list[ChartBar]
    left_out: int


def chart(call: PageCall, answer: lookups.PageRows | None) -> Chart | None:
    """Return the chart of the rows by the columns that the request names; None without a column of numbers."""
    if answer is None or not answer.rows:
        return None
    numbers = [name for i, name in enumerate(answer.columns) if _is_numeric(row[i] for row in answer.rows)]
    if not numbers:
        return None
    labels = answer.columns
    number = call.given("y") if call.given("y") in numbers else numbers[-1]
    label = call.given("x") if call.given("x") in labels else labels[0]
    x, y = answer.columns.index(label), answer.columns.index(number)
    points = [(value_text(row[x]), float(row[y])) for row in answer.rows if row[y] is not None]
    shown = points[:MAX_RESULT_BARS]
    low, high = min([0.0, *(v for _, v in shown)]), max([0.0, *(v for _, v in shown)])
    span = (high - low) or 1.0
    bars = [_bar(name, v, low, span) for name, v in shown]
    return Chart(label, number, labels, numbers, bars, len(points) - len(shown))


def _bar(label: str, value: float, low: float, span: float) -> ChartBar:
    begin = min(value, 0.0) - low
    width = round(abs(value) / span * 100, 2)
    return ChartBar(label[:40], rate(value), round(begin / span * 100, 2), width, value < 0)


def _is_numeric(cells: Iterable[object]) -> bool:
    values = [cell for cell in cells if cell is not None]
    return bool(values) and all(
        isinstance(cell, int | float | Decimal) and not isinstance(cell, bool) and math.isfinite(cell)
        for cell in values
    )


def csv_response(name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Response:
    """Return rows as a stream of CSV for download. At most ``MAX_CSV_ROWS``; a last line tells if there are more."""
    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return StreamingResponse(_lines(schema, batches), media_type="text/csv; charset=utf-8", headers=headers)


def _lines(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[str]:
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow([_safe(name) for name in schema.names])
    num_rows = 0
    for batch in batches:
        columns = [python_values(column) for column in batch.columns]
        for row in zip(*columns, strict=True):
            if num_rows == MAX_CSV_ROWS:
                writer.writerow([f"There are more than {MAX_CSV_ROWS} rows."])
                break
            writer.writerow([_written(cell) for cell in row])
            num_rows += 1
        yield written.getvalue()
        written.seek(0)
        written.truncate()
        if num_rows == MAX_CSV_ROWS:
            return
    yield written.getvalue()


def _written(cell: object) -> object:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return _safe(cell)
    # Whole: who downloads a list or bytes wants all of it, as of a string.
    return cell if isinstance(cell, int | float | Decimal) else whole_value(cell)


def _safe(text: str) -> str:
    """Return a string that a spreadsheet does not take for a formula."""
    return f"'{text}" if text.startswith(_FORMULAS) else text


# Scan: the rows of a state variable, with filters.


FILTERS = 3
MAX_SCAN_ROWS = 1_000
USUAL_ROWS = 100


def scan(call: PageCall) -> Response:
    """Show the form, and the rows."""
    tables = tables_of(call.overview)
    table = call.table() or (tables[0] if len(tables) == 1 else None)
    answer: lookups.PageRows | None = None
    columns: list[tuple[str, str]] = []
    problem, status = "", 200
    if table is not None:
        try:
            schema = lookups.variable_schema(call, table)
            columns = [(field.name, str(field.type)) for field in schema]
            if call.given("limit"):
                most = call.number("limit", USUAL_ROWS, 1, MAX_SCAN_ROWS)
                rows = _rows(call, table, lookups.conditions_of(call, schema, FILTERS), most + 1)
                answer = lookups.take_rows(rows, most)
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
        most=MAX_SCAN_ROWS,
        found=answer,
        chart=chart(call, answer),
        problem=problem,
    )


def scan_csv(call: PageCall) -> Response:
    """Return the rows as CSV, as many as there are."""
    table = call.table()
    if table is None:
        raise RequestError("table= must name the state to read.")
    conditions = lookups.conditions_of(call, lookups.variable_schema(call, table), FILTERS)
    rows = _rows(call, table, conditions, MAX_CSV_ROWS + 1)
    return csv_response("scan", rows.schema, rows)


def _rows(call: PageCall, table: StateTable, where: list[tuple[Any, ...]], limit: int) -> StateScan:
    version = call.number("version", -1) if call.given("version") else None
    options = _options(call, table, version)
    return call.client().scan(table.operator, table.state, limit=limit, where=where, **options)


# SQL over the state: one statement that reads.


MAX_SQL_ROWS = 1_000
SQL_SECONDS = 30.0
MAX_STATEMENTS = 4
PAGE_BATCH_ROWS = 1_024
MAX_ANSWER_BYTES = 64 << 20
"""The page keeps an answer in memory."""
_running = threading.BoundedSemaphore(MAX_STATEMENTS)
"""At most this many statements run at once in this process."""
PAGE_SQL = SqlLimits(memory_bytes=1024 << 20, threads=2, temp_bytes=0)
"""The limits of all statements of a page together, unless other limits are set."""


def sql(call: PageCall) -> Response:
    """Show the form, and the rows of the statement that was sent."""
    result: lookups.PageRows | None = None
    problem, status = "", 200
    if call.form.get("statement", "").strip():
        try:
            with _answered(call) as answer:
                rows = _first(answer, MAX_SQL_ROWS + 1)
                result = lookups.page_rows(rows, MAX_SQL_ROWS, times=answer.times.values())
        except (SparkBridgeError, StateStoreError) as error:
            problem, status = str(error), 400
    return call.render(
        "sql.html",
        status,
        tables=tables_of(call.overview),
        found=result,
        chart=chart(call, result),
        problem=problem,
        most=MAX_SQL_ROWS,
    )


def sql_csv(call: PageCall) -> Response:
    """Return the rows of the statement as CSV."""
    with _answered(call) as answer:
        table = _first(answer, MAX_CSV_ROWS + 1)
    return csv_response("statement", table.schema, table.to_batches())


@contextmanager
def _answered(call: PageCall) -> Iterator[ProcessStatement]:
    """Yield the answer of the statement, which ends after ``SQL_SECONDS``. Raises ``RequestError`` for wrong SQL."""
    if not _running.acquire(timeout=SQL_SECONDS):
        raise RequestError(f"{MAX_STATEMENTS} statements are running, which is the limit; try again later.")
    try:
        answer = ProcessStatement(
            call.client(),
            call.form["statement"],
            **lookups.time_argument(call),
            timeout=lookups.PAGE_READ_SECONDS,
            limits=(call.sql_limits or PAGE_SQL).share_of(MAX_STATEMENTS),
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
    batches, num_rows, size = [], 0, 0
    for batch in rows:
        batches.append(batch.slice(0, most - num_rows))
        num_rows += batch.num_rows
        size += batches[-1].nbytes
        if size > MAX_ANSWER_BYTES:
            raise RequestLimitError(
                f"The first {min(num_rows, most)} rows of the answer have more than {MAX_ANSWER_BYTES >> 20} MiB. Ask "
                "for fewer columns or parts of the values, or ask the HTTP application (POST /v1/sql), which streams."
            )
        if num_rows >= most:
            break
    return pa.Table.from_batches(batches, schema)
