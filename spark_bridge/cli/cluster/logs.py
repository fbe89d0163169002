"""``statestore logs QUERY``: what coordinator, hosts and driver have logged about a query, by Ray's state API."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.cli.cluster.log_files import LogFile, log_files
from spark_bridge.cli.cluster.overview_commands import QueryArgument
from spark_bridge.cli.joined_ray import joined_ray
from spark_bridge.cli.output import AsJson, complain, errors_explained, json_line
from spark_bridge.cli.sources import Address, CoordinatorName, Namespace
from spark_bridge.overview.model import Overview, Query
from spark_bridge.overview.processes import LostDriver

_MOMENT = re.compile(r'^(?:\{"time": ?")?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[,.]\d+)')
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b")


@dataclass(frozen=True)
class LogEvent:
    """One event of a log: its first line, and those after that belong to it, such as a traceback."""

    source: str
    time: str
    level: str
    text: str


def logs(
    query: QueryArgument = None,
    tail: Annotated[int, typer.Option(min=1, help="Look at this many of the last lines of each log.")] = 10_000,
    errors: Annotated[bool, typer.Option("--errors", help="Only warnings and errors.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also lines that name no query.")] = False,
    address: Address = None,
    namespace: Namespace = NAMESPACE,
    coordinator: CoordinatorName = COORDINATOR_NAME,
    as_json: AsJson = False,
) -> None:
    """Show what the coordinator, the hosts and the driver have logged about a query, in the order of time.

    The driver's log is read where it was started with ``ray job submit``; else it is where the driver writes it. A
    query that has ended, or whose driver was lost, is looked for as well, as long as Ray keeps the logs. With --json
    there is one JSON object a line.

    Examples: statestore logs clicks; statestore logs clicks --errors --json; statestore logs clicks --all --tail 500
    """
    with errors_explained(), joined_ray(address, namespace):
        from spark_bridge.overview.on_ray import cluster_overview

        overview = cluster_overview(namespace, coordinator)
        names, unknown = names_asked(overview, query)
        files, missing = log_files(namespace, coordinator, tail)
        found = events_about(files, () if everything else names, missing)
        if unknown and not found:
            raise LookupError(f"{unknown} No log of this namespace names it either.")
        if unknown:
            missing.append(unknown)
    for event in found:
        if errors and event.level not in ("WARNING", "WARN", "ERROR", "CRITICAL"):
            continue
        if as_json:
            typer.echo(json_line(event))
        else:
            typer.echo(f"[{event.source}] {event.text}")
    for one in missing:
        complain(one)


def names_asked(overview: Overview, asked: str | None) -> tuple[tuple[str, ...], str]:
    """Return the texts by which logs name a query, and why nobody knows the query any more, else "".

    Raises ``LookupError`` where none is asked for by its name and there is no single one.
    """
    try:
        return names_of(overview.query(asked)), ""
    except LookupError as error:
        lost = () if overview.coordinator is None else overview.coordinator.lost
        found = [one for one in lost if asked in (None, one.query, one.run_id, one.query_id)]
        if found and (asked is not None or len(found) == 1):
            return tuple(dict.fromkeys(name for one in found for name in names_of(one))), ""
        if asked is None:
            raise
        return (asked,), str(error.args[0])


def names_of(query: Query | LostDriver) -> tuple[str, ...]:
    """Return the texts by which logs name a query: its ids and places, and its name as a word."""
    name = query.name if isinstance(query, Query) else query.query
    given = (query.run_id, query.query_id, name, query.checkpoint_location, query.state_location)
    return tuple(name for name in given if name)


def events_about(files: Sequence[LogFile], names: Sequence[str], missing: list[str]) -> list[LogEvent]:
    """Return the events of all logs that have one of the names (none: all events), by time.

    Logs that cannot be read are told in ``missing``.
    """
    wanted = [re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])") for name in names]
    found: list[LogEvent] = []
    for file in files:
        try:
            events = list(_events(file.source, file.read()))
        except (OSError, RuntimeError, ValueError) as error:
            missing.append(f"The log of the {file.source} cannot be read: {error}")
            continue
        found += [event for event in events if not wanted or any(one.search(event.text) for one in wanted)]
    return sorted(found, key=lambda event: event.time)


def _events(source: str, lines: Iterable[str]) -> Iterator[LogEvent]:
    """Give a log's events. A line without a time belongs to the one before; those before the first are left out."""
    held: list[str] = []
    time = ""
    for line in lines:
        moment = _MOMENT.match(line)
        if moment is not None:
            if held:
                yield _event(source, time, held)
            held, time = [line], moment[1].replace("T", " ").replace(",", ".")
        elif held:
            held.append(line)
    if held:
        yield _event(source, time, held)


def _event(source: str, time: str, lines: list[str]) -> LogEvent:
    level = _LEVEL.search(lines[0])
    return LogEvent(source, time, "" if level is None else level[1], "\n".join(lines))
