"""The overview as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from backends.storage.sending.prices import MONTH_SECONDS, STANDARD, Prices
from backends.storage.sending.request_counts import KINDS, RECEIVED, SENT
from spark_bridge.cli.output import add_row, filled, table
from spark_bridge.overview.formats import duration, moment, number, size
from spark_bridge.overview.model import CLUSTER, ERROR, RUNNING, STORAGE, Checkpoint, Fault, Overview, Query
from spark_bridge.overview.processes import HostOverview


def status_view(overview: Overview) -> RenderableType:
    """Return queries, hosts and faults."""
    if overview.source == CLUSTER and overview.coordinator is None:
        return Text("No coordinator: no stream with state has run in this namespace of the cluster.")
    parts: list[RenderableType] = []
    if overview.coordinator is not None:
        of = overview.coordinator
        parts.append(Text(f"Coordinator on {of.node_ip}, pid {of.pid}, namespace {of.namespace}"))
    parts.append(queries_view(overview.queries))
    if overview.source == CLUSTER:
        parts.append(hosts_view(overview.hosts))
    parts.append(faults_view(overview.faults))
    if overview.source == STORAGE:
        parts.append(Text("This is what manifests say; 'statestore verify' reads the files that they name.", "dim"))
    return Group(*parts)


def queries_view(queries: Iterable[Query]) -> Table:
    """Return a row per query."""
    made = table(
        "query",
        "run",
        "operators (partitions)",
        "completed",
        "prepared",
        "oldest",
        "waits for",
        "last checkpoint",
        "epoch",
        title="Queries",
    )
    for query in queries:
        last = query.checkpoints[-1] if query.checkpoints else None
        add_row(
            made,
            query.title,
            query.run_id if query.status == RUNNING else f"{query.run_id} ({query.status})",
            ", ".join(f"{o.name} ({o.num_partitions})" for o in query.operators),
            query.completed_version,
            query.prepared_version,
            query.oldest_version,
            f"{query.pending_partitions} partitions" if query.pending_partitions else "",
            "" if last is None else moment(last.completed_ms or last.prepared_ms),
            query.epoch,
        )
    return made


def hosts_view(hosts: Iterable[HostOverview]) -> Table:
    """Return a row per host."""
    made = table(
        "machine",
        "host",
        "query address",
        "pid",
        "partitions",
        "memory",
        "commits",
        "loading",
        "heartbeat",
        "runs for",
        title="Hosts",
    )
    for host in hosts:
        held = sum(n for name, n in host.memory.items() if name != "host_memory")
        budget = host.memory.get("host_memory")
        add_row(
            made,
            host.machine,
            host.host_id,
            host.query_address,
            host.pid,
            host.partitions if host.answered else "no answer",
            f"{size(held)} of {size(budget)}" if budget else "",
            number(host.counters.get("commits")),
            len(host.loading) or "",
            "" if host.heartbeat_ms is None else f"{duration(host.heartbeat_ms)} ago",
            duration(host.up_ms) + (f", restart {host.restarts}" if host.restarts else ""),
        )
    return made


def faults_view(faults: Iterable[Fault]) -> RenderableType:
    """Return the faults with their remedies."""
    lines: list[RenderableType] = []
    for fault in faults:
        style = "bold red" if fault.severity == ERROR else "yellow"
        lines.append(Text(f"{fault.severity.upper()} {fault.kind}: {fault.subject}: {fault.what}", style=style))
        lines.append(Text(f"    {fault.remedy}"))
    return Group(*lines) if lines else Text("Nothing is wrong.")


def checkpoints_view(query: Query, most: int, prices: Prices) -> RenderableType:
    """Return a row for each of the last checkpoints, the newest first, and what their requests cost together."""
    made = table(
        "version",
        "batch",
        "id",
        "completed (UTC)",
        "duration",
        "tasks",
        "acknowledge",
        "manifest",
        "commit",
        "added",
        "full",
        "rows",
        "late",
        "duplicates",
        "retried",
        "requests",
        "",
        title=f"Checkpoints of {query.title}",
    )
    shown = query.checkpoints[-most:]
    for one in reversed(shown):
        add_row(made, *_cells(one))
    cost = cost_of(shown, prices)
    return made if cost is None else Group(made, Text(cost))


def requests_view(query: Query, most: int, prices: Prices) -> RenderableType:
    """Return the requests of each of the last checkpoints to storage, the newest first, and their cost."""
    shown = query.checkpoints[-most:]
    rows = (
        (
            one.version,
            moment(one.completed_ms or one.prepared_ms),
            number(one.requests),
            *(number(one.storage.get(kind, 0)) if one.storage else "" for kind in KINDS.values()),
            *(size(one.storage.get(name, 0)) if one.storage else "" for name in (SENT, RECEIVED)),
            f"${prices.dollars(one.storage):.6f}" if one.storage else "",
        )
        for one in reversed(shown)
    )
    headings = ("version", "completed (UTC)", "requests", *KINDS.values(), "sent", "received", "cost")
    made = filled(rows, *headings, title=f"Requests to storage of {query.title}")
    return Group(made, Text(cost_of(shown, prices) or "Nothing is known of these checkpoints' requests by kind."))


def cost_of(checkpoints: Sequence[Checkpoint], prices: Prices) -> str | None:
    """Return in a sentence what the requests of checkpoints cost; None if they are not known."""
    known = [one for one in checkpoints if one.storage]
    if not known:
        return None
    batch = sum(prices.dollars(one.storage) for one in known) / len(known)
    times = [one.completed_ms for one in known if one.completed_ms is not None]
    seconds = (times[-1] - times[0]) / 1000 / (len(times) - 1) if len(times) > 1 else 0.0
    pace = f", ${batch / seconds * MONTH_SECONDS:,.2f} a month at a batch in {seconds:.1f} s" if seconds > 0 else ""
    standard = " (those of S3 standard in us-east-1; --prices sets others)" if prices == STANDARD else ""
    return f"Requests to storage cost about ${batch:.6f} a batch{pace}, at the prices {prices}{standard}."


def _cells(one: Checkpoint) -> list[object]:
    phases = [duration(one.phases.get(name)) for name in ("tasks", "acknowledge", "manifest", "commit")]
    return [
        one.version,
        one.version - 1,
        one.id,
        moment(one.completed_ms or one.prepared_ms),
        duration(one.duration_ms),
        *phases,
        size(one.delta_bytes),
        size(one.full_bytes),
        number(one.rows),
        number(one.late),
        one.duplicates or "",
        one.retried or "",
        number(one.requests),
        one.status if one.status != "completed" else "kept" if one.is_kept else "",
    ]


def partitions_view(query: Query, operator: str | None) -> RenderableType:
    """Return a row per partition of the operators."""
    made = []
    for of in query.operators:
        if operator in (None, of.name):
            skew = "" if of.skew is None else f", the largest has {of.skew:.1f} times the keys of the median one"
            made.append(
                filled(
                    (
                        (
                            p.partition,
                            p.owner,
                            p.version,
                            number(p.keys),
                            size(p.memory_bytes),
                            p.snapshot_version,
                            p.snapshot_lag,
                            size(p.changelog_bytes),
                            duration(sum(p.commit_ms.values()) if p.commit_ms else None),
                        )
                        for p in of.partitions
                    ),
                    "partition",
                    "owner",
                    "version",
                    "keys",
                    "memory",
                    "snapshot",
                    "lag",
                    "changelogs",
                    "last commit",
                    title=f"{of.name} of {query.title}: {of.num_partitions} partitions{skew}",
                )
            )
    return Group(*made)
