"""The output of every command: tables for people, JSON for programs, errors on stderr, and its exit code.

Exit codes: 0: done, and nothing is wrong. 1: looked, and found something: damage, a fault, differences, no such key.
2: could not look, or wrong arguments; stderr has the reason. 3: answered, and something else in storage is damaged;
stderr names it. The reference has the codes of each command.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Annotated, Any, TypeVar

import msgspec
import pyarrow as pa
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from backends.encoding.columns import distinct_names
from spark_bridge.exceptions import STATESTORE_ERRORS
from spark_bridge.queryable.client.json_values import rows_to_json

FOUND = 1
FAILED = 2
DAMAGED = 3
PIPE_WIDTH = 240
"""A pipe has no width, so lines must not be folded."""

T = TypeVar("T")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def show(plain: Callable[[], Any], rendered: Callable[[], RenderableType], *, as_json: bool) -> None:
    """Print the answer of a command: as JSON, or for people. A string is printed as it is, on one line."""
    if as_json:
        typer.echo(json_line(plain()))
        return
    answer = rendered()
    if isinstance(answer, str):
        line(answer)
    else:
        printer().print(answer, markup=False, highlight=False)


def line(text: str) -> None:
    """Print a line for people as it is, without folding it."""
    printer().print(visible(text), markup=False, highlight=False, soft_wrap=True)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Return text for people with its control characters escaped, but for line breaks and tabs.

    Keys and values come from the events of others, and some characters would control the terminal of the reader.
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def steps_printed(*, as_json: bool) -> Callable[[str], None]:
    """Return a function that prints each step of a long command, and prints nothing if the answer is JSON."""
    return lambda step: None if as_json else line(step)


def json_line(plain: Any) -> str:
    """Return one line of JSON. Times are ISO 8601, bytes base64, decimals strings."""
    return msgspec.json.encode(plain, enc_hook=str).decode()


def printer() -> Console:
    """Return the console of stdout."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def complain(text: str, style: str | None = "red") -> None:
    """Print an error on stderr; with ``style`` None a note."""
    Console(stderr=True).print(visible(text), style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def errors_explained() -> Iterator[None]:
    """Print an error of ours on stderr in place of a traceback, and end the program with code 2."""
    try:
        yield
    except (*STATESTORE_ERRORS, LookupError) as error:
        complain(str(error) if not isinstance(error, KeyError) else f"{error!r}")
        raise typer.Exit(FAILED) from error


def filled(rows: Iterable[Iterable[object]], *headings: str, title: str | None = None) -> Table:
    """Return a table of rows. None is an empty cell."""
    table = Table(title=None if title is None else Text(visible(title)), title_justify="left", box=None, padding=(0, 2))
    # As plain text: names may contain characters that rich takes for markup.
    for heading in headings:
        table.add_column(Text(visible(heading)), overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if value is None else visible(str(value))) for value in row))
    return table


def table_of(items: Iterable[T], columns: Mapping[str, Callable[[T], object]], title: str | None = None) -> Table:
    """Return a table with a row per item. ``columns`` maps each heading to the function that makes the item's cell."""
    return filled(([value_of(item) for value_of in columns.values()] for item in items), *columns, title=title)


# Rows as they come: as tables for people, as CSV, or as one JSON object. Memory grows with a batch of rows.


TABLE_ROWS = 500
"""A table has at most this many rows; further rows make another, so that memory stays flat."""


class PrintedForm(str, Enum):
    """The output format of rows."""

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
    names = distinct_names(schema.names)
    return _print_csv(names, rows) if form is PrintedForm.csv else _print_tables(names, rows)


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
    console, count, pending_rows = printer(), 0, list[list[str]]()
    for row in rows:
        pending_rows.append([cell(value) for value in row.values()])
        count += 1
        if len(pending_rows) == TABLE_ROWS:
            console.print(filled(pending_rows, *names), highlight=False)
            pending_rows = []
    if pending_rows or not count:
        console.print(filled(pending_rows, *names), highlight=False)
    return count


def cell(value: Any) -> str:
    """Return a JSON value as one cell: strings unchanged, nested values as JSON, null empty."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json_line(value)


# The option ``--prices``: the costs of requests to storage.


PricesOption = Annotated[
    str,
    typer.Option(
        help="Dollars for 1,000 requests of a kind, or for a GiB, such as put=0.0054,get=0.00043,received_gib=0.09. "
        "All other prices are those of S3 standard in us-east-1."
    ),
]
