"""``statestore logs QUERY``: what coordinator, hosts and driver have logged about a query, by Ray's state API."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.cli.cluster.overview_commands import QueryArgument
from spark_bridge.cli.joined_ray import joined_ray
from spark_bridge.cli.output import AsJson, complain, errors_explained, json_line
from spark_bridge.cli.sources import Address, CoordinatorName, Namespace
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.overview.model import Overview, Query

_MOMENT = re.compile(r'^(?:\{"time": ?")?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[,.]\d+)')
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b")


@dataclass(frozen=True)
class LogFile:
    """A log that can be read: ``source`` says whose it is, and ``read`` gives its last lines."""

    source: str
    read: Callable[[], Iterable[str]]


@dataclass(frozen=True)
class LogEvent:
    """One event of a log: its first line, and those behind that belong to it, such as a traceback."""

    source: str
    time: str
    level: str
    text: str


def logs(
    query: QueryArgument = None,
    tail: Annotated[int, typer.Option(min=1, help="Look at so many of the last lines of each log.")] = 10_000,
    errors: Annotated[bool, typer.Option("--errors", help="Only warnings and errors.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also lines that name no query.")] = False,
    address: Address = None,
    namespace: Namespace = NAMESPACE,
    coordinator: CoordinatorName = COORDINATOR_NAME,
    as_json: AsJson = False,
) -> None:
    """Show what the coordinator, the hosts and the driver have logged about a query, in the order of time.

    The driver's log is read where it was started with ``ray job submit``; else it is where the driver writes it. With
    --json there is one JSON object a line.

    Examples: statestore logs clicks; statestore logs clicks --errors --json; statestore logs clicks --all --tail 500
    """
    with errors_explained(), joined_ray(address, namespace):
        from spark_bridge.overview.on_ray import cluster_overview

        overview = cluster_overview(namespace, coordinator)
        of = overview.query(query)
        files, missing = _log_files(overview, namespace, coordinator, tail)
        found = events_about(files, () if everything else names_of(of), missing)
    for event in found:
        if errors and event.level not in ("WARNING", "WARN", "ERROR", "CRITICAL"):
            continue
        if as_json:
            typer.echo(json_line(event))
        else:
            typer.echo(f"[{event.source}] {event.text}")
    for one in missing:
        complain(one)


def names_of(query: Query) -> tuple[str, ...]:
    """Return the texts by which logs name a query: its ids and places, and its name as a word."""
    given = (query.run_id, query.query_id, query.name, query.checkpoint_location, query.state_location)
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


def _log_files(overview: Overview, namespace: str, coordinator: str, tail: int) -> tuple[list[LogFile], list[str]]:
    """Return the logs of coordinator, hosts and drivers, and what is not there."""
    from ray.util.state import list_actors, list_jobs
    from ray.util.state.exception import RayStateApiException

    try:
        actors = [
            actor
            for name in ("StateStoreCoordinator", "StateStoreHost")
            for actor in list_actors(
                filters=[("class_name", "=", name), ("ray_namespace", "=", namespace)], limit=10_000
            )
        ]
        jobs = {job.job_id: job for job in list_jobs(limit=10_000)}
    except (RayStateApiException, OSError) as error:
        raise EnvironmentProblemError(
            f"Ray's state API does not answer: {error}. It needs Ray's dashboard (ray[default]) on the head node."
        ) from error
    files, missing, drivers = list[LogFile](), list[str](), set[str]()
    for actor in actors:
        is_coordinator = actor.class_name == "StateStoreCoordinator"
        if is_coordinator and actor.name != coordinator:
            continue
        if not is_coordinator:
            drivers.add(actor.job_id)
        source = "coordinator" if is_coordinator else f"host {actor.name.removeprefix('StateStoreHost-')}"
        files += [LogFile(source, _reader(tail, actor_id=actor.actor_id, suffix=suffix)) for suffix in ("err", "out")]
    for job_id in sorted(drivers):
        job = jobs.get(job_id)
        if job is not None and job.submission_id and job.driver_info is not None:
            # Ray takes no submission's id without its node.
            named = {"submission_id": job.submission_id, "node_ip": job.driver_info.node_ip_address}
            files.append(LogFile("driver", _reader(tail, **named)))
        elif job is not None and job.status == "RUNNING":
            missing.append(f"The driver (job {job_id}) was not started with 'ray job submit': look where it writes.")
    return files, missing


def _reader(tail: int, **named: Any) -> Callable[[], Iterator[str]]:
    def read() -> Iterator[str]:
        from ray.util.state import get_log
        from ray.util.state.exception import RayStateApiException

        try:
            text = "".join(get_log(tail=tail, filter_ansi_code=True, errors="replace", **named))
        except RayStateApiException as error:
            raise RuntimeError(str(error).splitlines()[0]) from error
        yield from text.splitlines()

    return read
