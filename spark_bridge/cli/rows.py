"""Rows as they come: as tables for people, as CSV, or as one JSON object. Memory grows with a batch of rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import pyarrow as pa
import typer

from spark_bridge.cli.output import filled, json_line, printer
from spark_bridge.queryable.client.answers.json_values import rows_to_json

TABLE_ROWS = 500
"""A table has at most this many rows; further rows make another, so that memory stays flat."""


class PrintedForm(str, Enum):
    """The format in which rows are printed."""

    table = "table"
    csv = "csv"
    json = "json"


def print_rows(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], form: PrintedForm, about: Mapping[str, Any] | None = None
) -> int:
    """Print rows, and return how many there were. ``about`` are further fields of the JSON object."""
    rows = (row for batch in batches for row in rows_to_json(batch))
    if form is PrintedForm.json:
        return _print_json(rows, about or {})
    if form is PrintedForm.csv:
        return _print_csv(schema.names, rows)
    return _print_tables(schema.names, rows)


def _print_json(rows: Iterator[dict[str, Any]], about: Mapping[str, Any]) -> int:
    head = json_line(dict(about))[1:-1]
    typer.echo("{" + head + (", " if head else "") + '"rows": [', nl=False)
    count = 0
    for row in rows:
        typer.echo((",\n" if count else "\n") + json_line(row), nl=False)
        count += 1
    typer.echo("]}")
    return count


def _print_csv(names: list[str], rows: Iterator[dict[str, Any]]) -> int:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    count = 0
    for row in rows:
        writer.writerow([cell(value) for value in row.values()])
        count += 1
        if text.tell() > 1 << 16:
            typer.echo(text.getvalue(), nl=False)
            text.seek(0)
            text.truncate()
    typer.echo(text.getvalue(), nl=False)
    return count


def _print_tables(names: list[str], rows: Iterator[dict[str, Any]]) -> int:
    console, count, held = printer(), 0, list[list[str]]()
    for row in rows:
        held.append([cell(value) for value in row.values()])
        count += 1
        if len(held) == TABLE_ROWS:
            console.print(filled(held, *names), highlight=False)
            held = []
    if held or not count:
        console.print(filled(held, *names), highlight=False)
    return count


def cell(value: Any) -> str:
    """Return a value of JSON in one cell: text as it is, what is nested as JSON, null empty."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json_line(value)
