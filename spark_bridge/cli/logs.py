"""``statestore logs QUERY``: the log lines of coordinator, hosts and driver about a query, by Ray's state API."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import typer

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.cli.output import AsJson, complain, errors_explained, json_line, visible
from spark_bridge.cli.overview import QueryArgument
from spark_bridge.cli.sources import Address, CoordinatorName, Namespace, joined_ray
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.overview.model import LostDriver, Overview, Query

# The logs of coordinator, hosts and drivers, as Ray's state API finds them. The process has joined the cluster.


COORDINATOR_ACTOR, HOST_ACTOR = "StateStoreCoordinator", "StateStoreHost"
HOST_PREFIX = f"{HOST_ACTOR}-"
WHOLE = -1
MAX_LOOKED_AT = 500
"""At most this many logs of other processes on a machine are checked for an actor that was started again."""


@dataclass(frozen=True)
class LogFile:
    """A log that can be read: ``source`` names its process, and ``read`` returns its last lines."""

    source: str
    read: Callable[[], Iterable[str]]


def log_files(namespace: str, coordinator: str, tail: int) -> tuple[list[LogFile], list[str]]:
    """Return the logs of a namespace, each read to its last ``tail`` lines, and a list of missing logs.

    Raises ``EnvironmentProblemError`` if Ray's state API does not answer, or answers for another cluster: a cluster
    without a dashboard names the default port, which the dashboard of another cluster of the machine may have.
    """
    import ray
    from ray.util.state import list_nodes
    from ray.util.state.exception import RayStateApiException

    # Without an address Ray refuses if a machine has several heads.
    address = ray.get_runtime_context().gcs_address
    try:
        of_dashboard = {node.node_id for node in list_nodes(address, limit=10_000)}
        if of_dashboard.isdisjoint(node["NodeID"] for node in ray.nodes()):
            raise EnvironmentProblemError(
                f"The dashboard that the Ray cluster at {address} names is that of another Ray cluster. The "
                "dashboard of this cluster has its logs: start the head node with Ray's dashboard (ray[default])."
            )
        return _log_files(address, namespace, coordinator, tail)
    except (RayStateApiException, OSError) as error:
        raise EnvironmentProblemError(
            f"Ray's state API does not answer: {error}. It needs Ray's dashboard (ray[default]) on the head node."
        ) from error


def _log_files(address: str, namespace: str, coordinator: str, tail: int) -> tuple[list[LogFile], list[str]]:
    from ray.util.state import list_actors, list_jobs

    of_namespace = ("ray_namespace", "=", namespace)
    actors = [
        actor
        for name in (COORDINATOR_ACTOR, HOST_ACTOR)
        for actor in list_actors(address, filters=[("class_name", "=", name), of_namespace], limit=10_000, detail=True)
    ]
    jobs = {job.job_id: job for job in list_jobs(address, limit=10_000)}
    files, missing, drivers = list[LogFile](), list[str](), set[str]()
    for actor in actors:
        is_coordinator = actor.class_name == COORDINATOR_ACTOR
        if is_coordinator and actor.name != coordinator:
            continue
        if not is_coordinator:
            drivers.add(actor.job_id)
        source = "coordinator" if is_coordinator else f"host {actor.name.removeprefix(HOST_PREFIX)}"
        named: list[dict[str, Any]] = [{"actor_id": actor.actor_id, "suffix": suffix} for suffix in ("err", "out")]
        named += _of_earlier_processes(address, actor, missing)
        files += [LogFile(source, _reader(tail, address=address, **one)) for one in named]
    for job_id in sorted(drivers):
        job = jobs.get(job_id)
        if job is not None and job.submission_id and job.driver_info is not None:
            # Ray takes no submission's id without its node.
            where = {"submission_id": job.submission_id, "node_ip": job.driver_info.node_ip_address}
            files.append(LogFile("driver", _reader(tail, address=address, **where)))
        elif job is not None and job.status == "RUNNING":
            missing.append(
                f"The driver (job {job_id}) was not started with 'ray job submit': look for its output where you "
                "started it."
            )
    return files, missing


def _of_earlier_processes(address: str, actor: Any, missing: list[str]) -> Iterator[dict[str, Any]]:
    """Name the logs of the processes that an actor had on its machine before Ray started it again.

    Ray itself finds the log of the last process only. The reason for an earlier process's end is in its log. Logs that
    cannot be read are added to ``missing``.
    """
    from ray.util.state import list_logs

    if not actor.num_restarts or not actor.repr_name:
        return
    files = list_logs(address, node_id=actor.node_id, glob_filter="worker-*.err")
    names = [name for of in files.values() for name in of if not name.endswith(f"-{actor.pid}.err")]
    if len(names) > MAX_LOOKED_AT:
        missing.append(f"Only {MAX_LOOKED_AT} of {len(names)} logs were looked at for earlier ones of {actor.name}.")
    for name in names[:MAX_LOOKED_AT]:
        read = _reader(WHOLE, address=address, node_id=actor.node_id, filename=name, is_begin=True)
        try:
            begin = list(islice(read(), 10))
        except RuntimeError as error:
            missing.append(f"Whether {name} is an earlier log of {actor.name} is not known: {error}")
            continue
        if is_log_of(actor.repr_name, begin):
            for suffix in ("err", "out"):
                yield {"node_id": actor.node_id, "filename": name.removesuffix("err") + suffix}


def is_log_of(actor: str, begin: Iterable[str]) -> bool:
    """Return whether a log, by its first lines, belongs to an actor with this description.

    The ports that the actor names after its place are those of one process.
    """
    mark = f":actor_name:{actor.partition(' on ')[0]} on "
    return any(line.startswith(mark) for line in begin)


def _reader(tail: int, *, is_begin: bool = False, **named: Any) -> Callable[[], Iterator[str]]:
    """Return the function that reads the last lines of a log; with ``is_begin`` only the first part of these."""

    def read() -> Iterator[str]:
        from ray.util.state import get_log
        from ray.util.state.exception import RayStateApiException

        try:
            parts = get_log(tail=tail, filter_ansi_code=True, errors="replace", **named)
            text = next(iter(parts), "") if is_begin else "".join(parts)
        except RayStateApiException as error:
            raise RuntimeError(str(error).splitlines()[0]) from error
        yield from text.splitlines()

    return read


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
    """Show the log lines of the coordinator, the hosts and the driver about a query, in the order of time.

    The driver's log is read if it was started with ``ray job submit``; otherwise look for it where the driver writes
    it. A query that has ended, or whose driver was lost, is looked for as well, as long as Ray keeps the logs. With
    --json there is one JSON object a line.

    Examples: statestore logs clicks; statestore logs clicks --errors --json; statestore logs clicks --all --tail 500
    """
    with errors_explained(), joined_ray(address, namespace):
        from spark_bridge.overview.from_cluster import cluster_overview

        overview = cluster_overview(namespace, coordinator)
        names, unknown = names_asked(overview, query)
        files, missing = log_files(namespace, coordinator, tail)
        events = events_about(files, () if everything else names, missing)
        if unknown and not events:
            raise LookupError(f"{unknown} No log of this namespace names it either.")
        if unknown:
            missing.append(unknown)
    for event in events:
        if errors and event.level not in ("WARNING", "WARN", "ERROR", "CRITICAL"):
            continue
        if as_json:
            typer.echo(json_line(event))
        else:
            typer.echo(visible(f"[{event.source}] {event.text}"))
    for one in missing:
        complain(one)


def names_asked(overview: Overview, asked: str | None) -> tuple[tuple[str, ...], str]:
    """Return the strings that name a query in logs, and why the query is no longer known, else "".

    Raises ``LookupError`` if ``asked`` is None and there is not exactly one query.
    """
    try:
        return names_of(overview.query(asked)), ""
    except LookupError as error:
        lost = () if overview.coordinator is None else overview.coordinator.lost
        matches = [one for one in lost if asked in (None, one.query, one.run_id, one.query_id)]
        if matches and (asked is not None or len(matches) == 1):
            return tuple(dict.fromkeys(name for one in matches for name in names_of(one))), ""
        if asked is None:
            raise
        return (asked,), str(error.args[0])


def names_of(query: Query | LostDriver) -> tuple[str, ...]:
    """Return the strings that name a query in logs: its ids and locations, and its name as a word."""
    name = query.name if isinstance(query, Query) else query.query
    identifiers = (query.run_id, query.query_id, name, query.checkpoint_location, query.state_location)
    return tuple(name for name in identifiers if name)


def events_about(files: Sequence[LogFile], names: Sequence[str], missing: list[str]) -> list[LogEvent]:
    """Return the events with one of the names (none: all), by time. ``missing`` gets the logs that cannot be read."""
    wanted = [re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])") for name in names]
    selected: list[LogEvent] = []
    for file in files:
        try:
            events = list(_events(file.source, file.read()))
        except (OSError, RuntimeError, ValueError) as error:
            missing.append(f"The log of the {file.source} cannot be read: {error}")
            continue
        selected += [event for event in events if not wanted or any(one.search(event.text) for one in wanted)]
    return sorted(selected, key=lambda event: event.time)


def _events(source: str, lines: Iterable[str]) -> Iterator[LogEvent]:
    """Yield a log's events. A line without a time belongs to the one before; those before the first are left out."""
    lines_of_event: list[str] = []
    time = ""
    for line in lines:
        moment = _MOMENT.match(line)
        if moment is not None:
            if lines_of_event:
                yield _event(source, time, lines_of_event)
            lines_of_event, time = [line], moment[1].replace("T", " ").replace(",", ".")
        elif lines_of_event:
            lines_of_event.append(line)
    if lines_of_event:
        yield _event(source, time, lines_of_event)


def _event(source: str, time: str, lines: list[str]) -> LogEvent:
    level = _LEVEL.search(lines[0])
    return LogEvent(source, time, "" if level is None else level[1], "\n".join(lines))
