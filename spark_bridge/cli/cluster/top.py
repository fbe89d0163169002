"""``statestore top``: speed and delay of queries and hosts, live in the terminal, or once."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from spark_bridge.cli.cluster.views import faults_view, hosts_view
from spark_bridge.cli.output import FOUND, AsJson, errors_explained, filled, json_line, printer
from spark_bridge.cli.sources import Source, with_source
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.overview.formats import duration, moment, number
from spark_bridge.overview.formats import size as size_of
from spark_bridge.overview.model import CLUSTER, ERROR, Overview, to_plain
from spark_bridge.overview.stream_pace import QueryPace, pace_of


@with_source
def top(
    source: Source,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, as into a pipe.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show rows a second, freshness, batches, memory, the hottest partition and faults, live until Ctrl-C.

    It looks once with --once or --json, or if the output is no terminal. The exit code of one look is 1 if there is an
    error among the faults.

    Examples: statestore top; statestore top --interval 5; statestore top --once --checkpoint ck/; statestore top --json
    """
    with errors_explained(), source.joined():
        if once or as_json or not sys.stdout.isatty():
            found = source.overview()
            source.damages.clear()  # they are faults
            if as_json:
                plain = {"taken_ms": found.taken_ms, "queries": pace_of(found), "faults": found.faults}
                typer.echo(json_line(to_plain(plain)))
            else:
                printer().print(top_view(found), highlight=False)
            if any(fault.severity == ERROR for fault in found.faults):
                raise typer.Exit(FOUND)
            return
        with suppress(KeyboardInterrupt):
            _live(source, interval)


def _live(source: Source, interval: float) -> None:
    """Look again and again; a coordinator that does not answer for a while is said and waited for."""
    shown: RenderableType = Text("Looking ...")
    with Live(shown, console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown = top_view(source.overview())
                source.damages.clear()  # they are faults
            except EnvironmentProblemError as error:
                shown = Group(Text(str(error), style="yellow"), shown)
            live.update(shown, refresh=True)
            time.sleep(interval)


def top_view(overview: Overview) -> RenderableType:
    """Return the pace of each query, the hosts, and the faults."""
    parts: list[RenderableType] = [Text(f"{moment(overview.taken_ms)} UTC", style="dim"), _paces(pace_of(overview))]
    if overview.source == CLUSTER:
        parts.append(hosts_view(overview.hosts))
    parts.append(faults_view(overview.faults))
    return Group(*parts)


def _paces(paces: Sequence[QueryPace]) -> RenderableType:
    rows = (
        (
            of.query,
            of.status,
            of.version,
            "" if of.rows_per_second is None else f"{of.rows_per_second:,.0f}",
            duration(of.freshness_ms),
            duration(of.batch_ms),
            duration(of.usual_ms),
            duration(of.interval_ms),
            size_of(None if of.bytes_per_checkpoint is None else int(of.bytes_per_checkpoint)),
            number(of.keys),
            size_of(of.memory_bytes),
            "" if of.hottest is None else f"{of.hottest} ({duration(of.hottest_ms)})",
        )
        for of in paces
    )
    return filled(
        rows,
        "query",
        "status",
        "version",
        "rows/s",
        "age",
        "batch",
        "usual",
        "every",
        "added",
        "keys",
        "memory",
        "hottest",
        title="Queries",
    )
