"""Rows as a table, a chart and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal

import pyarrow as pa
from starlette.responses import Response, StreamingResponse

from backends.encoding.given_values import python_values
from spark_bridge.overview.formats import rate
from spark_bridge.ui.formats import value as value_text
from spark_bridge.ui.lookups import Found
from spark_bridge.ui.requests import PageCall

MOST_RESULT_BARS = 40
MOST_CSV_ROWS = 1_000_000
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class ChartBar:
    """A bar from the zero line: where it begins and how wide it is, 0 to 100."""

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


def chart(call: PageCall, found: Found | None) -> Chart | None:
    """Return the chart of the rows by the columns that the request names; None without a column of numbers."""
    if found is None or not found.rows:
        return None
    numbers = [name for i, name in enumerate(found.columns) if _is_numeric(row[i] for row in found.rows)]
    if not numbers:
        return None
    labels = list(found.columns)
    number = call.given("y") if call.given("y") in numbers else numbers[-1]
    label = call.given("x") if call.given("x") in labels else labels[0]
    x, y = found.columns.index(label), found.columns.index(number)
    points = [(value_text(row[x]), float(row[y])) for row in found.rows if row[y] is not None]
    shown = points[:MOST_RESULT_BARS]
    low, high = min([0.0, *(v for _, v in shown)]), max([0.0, *(v for _, v in shown)])
    span = (high - low) or 1.0
    bars = [_bar(name, v, low, span) for name, v in shown]
    return Chart(label, number, labels, numbers, bars, len(points) - len(shown))


def _bar(label: str, value: float, low: float, span: float) -> ChartBar:
    begin = min(value, 0.0) - low
    width = round(abs(value) / span * 100, 2)
    return ChartBar(label[:40], rate(value), round(begin / span * 100, 2), width, value < 0)


def _is_numeric(cells: Iterable[object]) -> bool:
    there = [cell for cell in cells if cell is not None]
    return bool(there) and all(
        isinstance(cell, int | float | Decimal) and not isinstance(cell, bool) and math.isfinite(cell) for cell in there
    )


def csv_response(name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Response:
    """Return rows as CSV for download, as they come. At most ``MOST_CSV_ROWS``; a last line says if there are more."""
    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return StreamingResponse(_lines(schema, batches), media_type="text/csv; charset=utf-8", headers=headers)


def _lines(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[str]:
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow([_safe(name) for name in schema.names])
    given = 0
    for batch in batches:
        columns = [python_values(column) for column in batch.columns]
        for row in zip(*columns, strict=True):
            if given == MOST_CSV_ROWS:
                writer.writerow([f"There are more than {MOST_CSV_ROWS} rows."])
                break
            writer.writerow([_written(cell) for cell in row])
            given += 1
        yield written.getvalue()
        written.seek(0)
        written.truncate()
        if given == MOST_CSV_ROWS:
            return
    yield written.getvalue()


def _written(cell: object) -> object:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return _safe(cell)
    return cell if isinstance(cell, int | float | Decimal) else value_text(cell)


def _safe(text: str) -> str:
    """Return a text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text.startswith(_FORMULAS) else text
