"""The output of every command: tables for people, JSON for programs, errors on stderr, and its exit code.

Exit codes: 0: done, and nothing is wrong. 1: looked, and found something: damage, a fault, differences, no such key.
2: could not look, or was asked wrongly; stderr says why. 3: answered, and something else in storage is damaged; stderr
says what. The reference has them command by command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from backends.exceptions import StateStoreError
from coordinator_actor.exceptions import CoordinatorError
from spark_bridge.exceptions import SparkBridgeError

FOUND = 1
FAILED = 2
DAMAGED = 3
PIPE_WIDTH = 240
"""A pipe has no width, so lines must not be folded."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def show(plain: Callable[[], Any], rendered: Callable[[], RenderableType], *, as_json: bool) -> None:
    """Print the answer of a command: as JSON, or for people."""
    if as_json:
        typer.echo(json_line(plain()))
        return
    printer().print(rendered(), highlight=False)


def json_line(plain: Any) -> str:
    """Return one line of JSON. Times are ISO 8601, bytes base64, decimals strings."""
    return msgspec.json.encode(plain, enc_hook=str).decode()


def printer() -> Console:
    """Return the console of stdout."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def complain(text: str) -> None:
    """Print an error on stderr."""
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def errors_explained() -> Iterator[None]:
    """Print an error of ours on stderr in place of a traceback, and end the program with code 2."""
    try:
        yield
    except (CoordinatorError, LookupError, SparkBridgeError, StateStoreError) as error:
        complain(str(error) if not isinstance(error, KeyError) else f"{error!r}")
        raise typer.Exit(FAILED) from error


def table(*headings: str, title: str | None = None) -> Table:
    """Return an empty table."""
    made = Table(title=None if title is None else Text(title), title_justify="left", box=None, padding=(0, 2))
    for heading in headings:
        made.add_column(heading, overflow="fold")
    return made


def add_row(made: Table, *cells: object) -> None:
    """Add cells as plain text: names may contain text that rich takes for markup. None is an empty cell."""
    made.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))


def filled(rows: Iterable[Iterable[object]], *headings: str, title: str | None = None) -> Table:
    """Return a table of rows."""
    made = table(*headings, title=title)
    for row in rows:
        add_row(made, *row)
    return made
