"""``statestore status``, ``queries``, ``checkpoints``, ``partitions``, ``hosts`` and ``top``: views of an overview."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from backends.storage.requests import KINDS, MONTH_SECONDS, RECEIVED, SENT, STANDARD, Prices
from spark_bridge.cli import output
from spark_bridge.cli.sources import Source, with_source
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.overview import model

# The overview as tables.


def status_view(overview: model.Overview) -> RenderableType:
    """Return queries, hosts and faults."""
    if overview.source == model.CLUSTER and overview.coordinator is None:
        return Text("No coordinator: no stream with state has run in this namespace of the cluster.")
    parts: list[RenderableType] = []
    if (coordinator := overview.coordinator) is not None:
        where = f"{coordinator.node_ip}, pid {coordinator.pid}, namespace {coordinator.namespace}"
        parts.append(Text(f"Coordinator on {where}"))
    parts += [queries_view(overview.queries), *_hosts_and_faults(overview)]
    if overview.source == model.STORAGE:
        parts.append(Text("This is what manifests say; 'statestore verify' reads the files that they name.", "dim"))
    return Group(*parts)


def _hosts_and_faults(overview: model.Overview) -> Iterator[RenderableType]:
    if overview.source == model.CLUSTER:
        yield hosts_view(overview.hosts)
        if any(host.loading for host in overview.hosts):
            yield loads_view(overview.hosts)
    yield faults_view(overview.faults)


def queries_view(queries: Iterable[model.Query]) -> Table:
    """Return a row per query."""
    return output.table_of(
        queries,
        {
            "query": lambda q: q.title,
            "run": lambda q: q.run_id if q.status == model.RUNNING else f"{q.run_id} ({q.status})",
            "operators (partitions)": lambda q: ", ".join(f"{o.name} ({o.num_partitions})" for o in q.operators),
            "completed": lambda q: q.completed_version,
            "prepared": lambda q: q.prepared_version,
            "oldest": lambda q: q.oldest_version,
            "waits for": lambda q: f"{q.pending_partitions} partitions" if q.pending_partitions else "",
            "standby copies": standby_copies,
            "last checkpoint": lambda q: _completed(q.checkpoints[-1]) if q.checkpoints else "",
            "epoch": lambda q: q.epoch,
        },
        "Queries",
    )


def _completed(checkpoint: model.Checkpoint) -> str:
    return model.moment(checkpoint.completed_ms or checkpoint.prepared_ms)


SHOWN_LOADS = 20


def standby_copies(query: model.Query) -> str:
    """Return how many standby copies a query has, and how many versions the last of them is behind."""
    if not query.standby_replicas:
        return ""
    lags = [lag for o in query.operators for p in o.partitions for lag in p.copy_lags]
    wanted = query.standby_replicas * sum(o.num_partitions for o in query.operators)
    behind = max(lags, default=0)
    return f"{len(lags)} of {wanted}" + (f", {behind} behind" if behind else "")


def hosts_view(hosts: Iterable[model.HostOverview]) -> Table:
    """Return a row per host."""
    return output.table_of(
        hosts,
        {
            "machine": lambda h: h.machine,
            "host": lambda h: h.host_id,
            "query address": lambda h: h.query_address,
            "pid": lambda h: h.pid,
            "partitions": lambda h: h.partitions if h.answered else "no answer",
            "memory": _memory,
            "commits": lambda h: model.number(h.counters.get("commits")),
            "loading": lambda h: len(h.loading) or "",
            "heartbeat": lambda h: "" if h.heartbeat_ms is None else f"{model.duration(h.heartbeat_ms)} ago",
            "runs for": lambda h: model.duration(h.up_ms) + (f", restart {h.restarts}" if h.restarts else ""),
        },
        "Hosts",
    )


def _memory(host: model.HostOverview) -> str:
    budget = host.memory.get("host_memory")
    return f"{model.size(host.used_bytes)} of {model.size(budget)}" if budget else ""


def loads_view(hosts: Iterable[model.HostOverview]) -> RenderableType:
    """Return a line per load under way, with its progress; at most ``SHOWN_LOADS`` of them."""
    loads = [f"{host.host_id} loads {load}" for host in hosts for load in host.loading]
    more = [f"and {len(loads) - SHOWN_LOADS} more loads"] if len(loads) > SHOWN_LOADS else []
    return Text("\n".join([*loads[:SHOWN_LOADS], *more]))


def faults_view(faults: Iterable[model.Fault]) -> RenderableType:
    """Return the faults with their remedies."""
    lines: list[RenderableType] = []
    for fault in faults:
        style = "bold red" if fault.severity == model.ERROR else "yellow"
        # ``visible``, because ``what`` may quote the error that has ended a query.
        what = f"{fault.severity.upper()} {fault.kind}: {fault.subject}: {fault.what}"
        lines.append(Text(output.visible(what), style=style))
        lines.append(Text(output.visible(f"    {fault.remedy}")))
    return Group(*lines) if lines else Text("Nothing is wrong.")


def checkpoints_view(query: model.Query, most: int, prices: Prices) -> RenderableType:
    """Return a row for each of the last checkpoints, the newest first, and the total cost of their requests."""
    shown = query.checkpoints[-most:]
    view = output.table_of(
        reversed(shown),
        {
            "version": lambda c: c.version,
            "batch": lambda c: c.version - 1,
            "id": lambda c: c.id,
            "completed (UTC)": _completed,
            "duration": lambda c: model.duration(c.duration_ms),
            "tasks": lambda c: model.duration(c.phases.get("tasks")),
            "acknowledge": lambda c: model.duration(c.phases.get("acknowledge")),
            "manifest": lambda c: model.duration(c.phases.get("manifest")),
            "commit": lambda c: model.duration(c.phases.get("commit")),
            "added": lambda c: model.size(c.delta_bytes),
            "full": lambda c: model.size(c.full_bytes),
            "rows": lambda c: model.number(c.rows),
            "late": lambda c: model.number(c.late),
            "duplicates": lambda c: c.duplicates or "",
            "retried": lambda c: c.retried or "",
            "requests": lambda c: model.number(c.requests),
            "": lambda c: c.status if c.status != "completed" else "kept" if c.is_kept else "",
        },
        f"Checkpoints of {query.title}",
    )
    cost = cost_of(shown, prices)
    return view if cost is None else Group(view, Text(cost))


def requests_view(query: model.Query, most: int, prices: Prices) -> RenderableType:
    """Return the requests of each of the last checkpoints to storage, the newest first, and their cost."""
    shown = query.checkpoints[-most:]
    rows = (
        (
            one.version,
            _completed(one),
            model.number(one.requests),
            *(model.number(one.storage.get(kind, 0)) if one.storage else "" for kind in KINDS.values()),
            *(model.size(one.storage.get(name, 0)) if one.storage else "" for name in (SENT, RECEIVED)),
            f"${prices.dollars(one.storage):.6f}" if one.storage else "",
        )
        for one in reversed(shown)
    )
    headings = ("version", "completed (UTC)", "requests", *KINDS.values(), "sent", "received", "cost")
    view = output.filled(rows, *headings, title=f"Requests to storage of {query.title}")
    return Group(view, Text(cost_of(shown, prices) or "Nothing is known of these checkpoints' requests by kind."))


def cost_of(checkpoints: Sequence[model.Checkpoint], prices: Prices) -> str | None:
    """Return the cost of the requests of checkpoints, in a sentence; None if they are not known."""
    with_storage = [one for one in checkpoints if one.storage]
    if not with_storage:
        return None
    batch = sum(prices.dollars(one.storage) for one in with_storage) / len(with_storage)
    times = [one.completed_ms for one in with_storage if one.completed_ms is not None]
    seconds = (times[-1] - times[0]) / 1000 / (len(times) - 1) if len(times) > 1 else 0.0
    pace = f", ${batch / seconds * MONTH_SECONDS:,.2f} a month at a batch in {seconds:.1f} s" if seconds > 0 else ""
    standard = " (those of S3 standard in us-east-1; --prices sets others)" if prices == STANDARD else ""
    return f"Requests to storage cost about ${batch:.6f} a batch{pace}, at the prices {prices}{standard}."


def partitions_view(query: model.Query, operator: str | None) -> RenderableType:
    """Return a row per partition of the operators."""
    views = []
    for of in query.operators:
        if operator in (None, of.name):
            skew = "" if of.skew is None else f", the largest has {of.skew:.1f} times the keys of the median one"
            view = output.table_of(
                of.partitions,
                {
                    "partition": lambda p: p.partition,
                    "owner": lambda p: p.owner,
                    "version": lambda p: p.version,
                    "keys": lambda p: model.number(p.keys),
                    "memory": lambda p: model.size(p.memory_bytes),
                    "snapshot": lambda p: p.snapshot_version,
                    "lag": lambda p: p.snapshot_lag,
                    "standby lag": lambda p: ", ".join(map(str, p.copy_lags)),
                    "changelogs": lambda p: model.size(p.changelog_bytes),
                    "last commit": lambda p: model.duration(sum(p.commit_ms.values()) if p.commit_ms else None),
                },
                f"{of.name} of {query.title}: {of.num_partitions} partitions{skew}",
            )
            views.append(view)
    return Group(*views)


QueryArgument = Annotated[str | None, typer.Argument(help="Name, query id or run id; needed if there are several.")]


@with_source
def status(source: Source, as_json: output.AsJson = False) -> None:
    """Show the queries and the hosts, the problems, and the remedies.

    The exit code is 1 if there is an error among the faults.

    Examples: statestore status; statestore status --checkpoint s3://bucket/ck --json
    """
    with output.errors_explained():
        overview = source.looked_at()
    source.damages.clear()  # the faults of the overview include them
    output.show(lambda: model.to_plain(overview), lambda: status_view(overview), as_json=as_json)
    _exit_for_errors(overview)


def _exit_for_errors(overview: model.Overview) -> None:
    if any(fault.severity == model.ERROR for fault in overview.faults):
        raise typer.Exit(output.FOUND)


@with_source
def queries(source: Source, as_json: output.AsJson = False) -> None:
    """List the running queries, with their operators and versions.

    Example: statestore queries --json
    """
    with output.errors_explained():
        overview = source.looked_at()
    output.show(lambda: model.to_plain(overview.queries), lambda: queries_view(overview.queries), as_json=as_json)


@with_source
def checkpoints(
    source: Source,
    query: QueryArgument = None,
    most: Annotated[int, typer.Option("--last", min=1, help="This many of the last checkpoints.")] = 20,
    requests: Annotated[bool, typer.Option("--requests", help="Show requests by kind, bytes and cost, not times.")] = (
        False
    ),
    prices: output.PricesOption = "",
    as_json: output.AsJson = False,
) -> None:
    """Show how the last checkpoints of a query went: durations by step, bytes, rows, retried tasks, requests, cost.

    A checkpoint has four steps: "tasks" ends with the first task, "acknowledge" with the last one, "manifest" when the
    manifest is durable, and "commit" when the coordinator sees Spark's commit. "added" is the size of the changelogs,
    "full" that of all files that a load of the version reads. Requests are those of the hosts and the coordinator to
    storage since the version before; "sent" and "received" are the bytes of their files. The history outlives the
    cluster.

    Examples: statestore checkpoints clicks; statestore checkpoints --checkpoint ck/ --last 300 --json; statestore
    checkpoints --requests --prices put=0.0054,get=0.00043
    """
    with output.errors_explained():
        price_list = Prices.parse(prices)
        query_overview = source.looked_at().query(query)
    output.show(
        lambda: [
            {**model.to_plain(c), "dollars": price_list.dollars(c.storage) if c.storage else None}
            for c in query_overview.checkpoints[-most:]
        ],
        lambda: (requests_view if requests else checkpoints_view)(query_overview, most, price_list),
        as_json=as_json,
    )


@with_source
def partitions(
    source: Source,
    query: QueryArgument = None,
    operator: Annotated[str | None, typer.Option(help="Only those of this operator.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Show the partitions of a query: owner, version, keys, bytes, and how far snapshots are behind.

    From a checkpoint, owners, keys and memory are not known.

    Examples: statestore partitions clicks --operator user_totals; statestore partitions --checkpoint ck/
    """
    with output.errors_explained():
        query_overview = source.looked_at().query(query)
        names = [o.name for o in query_overview.operators]
        if operator is not None and operator not in names:
            raise LookupError(
                f"Query {query_overview.title} has no operator {operator!r}; it has {', '.join(names) or 'none'}."
            )
    output.show(
        lambda: model.to_plain([o for o in query_overview.operators if operator in (None, o.name)]),
        lambda: partitions_view(query_overview, operator),
        as_json=as_json,
    )


@with_source
def hosts(source: Source, as_json: output.AsJson = False) -> None:
    """Show the hosts of a cluster: addresses, partitions, memory, loads in progress, and their last heartbeats.

    Example: statestore hosts --json
    """
    if source.checkpoint is not None:
        raise typer.BadParameter("a checkpoint has no hosts; leave --checkpoint out to look at a cluster")
    with output.errors_explained():
        overview = source.looked_at()
    output.show(lambda: model.to_plain(overview.hosts), lambda: hosts_view(overview.hosts), as_json=as_json)


# ``statestore top``: speed and delay of queries and hosts, live in the terminal, or once.


@with_source
def top(
    source: Source,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, as if the output were a pipe.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """Show rows a second, freshness, batches, memory, the hottest partition and faults, live until Ctrl-C.

    It looks once with --once or --json, or if the output is not a terminal. The exit code of one look is 1 if there is
    an error among the faults.

    Examples: statestore top; statestore top --interval 5; statestore top --once --checkpoint ck/; statestore top --json
    """
    with output.errors_explained(), source.joined():
        if once or as_json or not sys.stdout.isatty():
            overview = source.overview()
            source.damages.clear()  # the faults of the overview include them
            if as_json:
                plain = {"taken_ms": overview.taken_ms, "queries": model.pace_of(overview), "faults": overview.faults}
                typer.echo(output.json_line(model.to_plain(plain)))
            else:
                output.printer().print(top_view(overview), highlight=False)
            _exit_for_errors(overview)
            return
        with suppress(KeyboardInterrupt):
            _live(source, interval)


def _live(source: Source, interval: float) -> None:
    """Refresh the view until Ctrl-C. While the coordinator does not answer, show its error above the last view."""
    view: RenderableType = Text("Looking ...")
    with Live(view, console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown = view = top_view(source.overview())
                source.damages.clear()  # the faults of the overview include them
            except EnvironmentProblemError as error:
                shown = Group(Text(str(error), style="yellow"), view)
            live.update(shown, refresh=True)
            time.sleep(interval)


def top_view(overview: model.Overview) -> RenderableType:
    """Return the pace of each query, the hosts, and the faults."""
    taken = Text(f"{model.moment(overview.taken_ms)} UTC", style="dim")
    paces = output.table_of(
        model.pace_of(overview),
        {
            "query": lambda of: of.query,
            "status": lambda of: of.status,
            "version": lambda of: of.version,
            "rows/s": lambda of: "" if of.rows_per_second is None else f"{of.rows_per_second:,.0f}",
            "age": lambda of: model.duration(of.freshness_ms),
            "batch": lambda of: model.duration(of.batch_ms),
            "usual": lambda of: model.duration(of.usual_ms),
            "every": lambda of: model.duration(of.interval_ms),
            "added": lambda of: model.size(None if of.bytes_per_checkpoint is None else int(of.bytes_per_checkpoint)),
            "keys": lambda of: model.number(of.keys),
            "memory": lambda of: model.size(of.memory_bytes),
            "hottest": lambda of: "" if of.hottest is None else f"{of.hottest} ({model.duration(of.hottest_ms)})",
        },
        "Queries",
    )
    return Group(taken, paces, *_hosts_and_faults(overview))
