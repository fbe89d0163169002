"""The overview as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spark_bridge.cli.output import add_row, duration, filled, moment, number, size, table
from spark_bridge.overview.model import CLUSTER, ERROR, RUNNING, Checkpoint, Fault, Host, Overview, Query


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


def hosts_view(hosts: Iterable[Host]) -> Table:
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
        )
    return made


def faults_view(faults: Iterable[Fault]) -> RenderableType:
    """Return what is wrong, and what to do."""
    lines: list[RenderableType] = []
    for fault in faults:
        style = "bold red" if fault.severity == ERROR else "yellow"
        lines.append(Text(f"{fault.severity.upper()} {fault.kind}: {fault.subject}: {fault.what}", style=style))
        lines.append(Text(f"    {fault.remedy}"))
    return Group(*lines) if lines else Text("Nothing is wrong.")


def checkpoints_view(query: Query, most: int) -> RenderableType:
    """Return a row for each of the last checkpoints, the newest first."""
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
        "retried",
        "requests",
        "",
        title=f"Checkpoints of {query.title}",
    )
    for one in reversed(query.checkpoints[-most:]):
        add_row(made, *_cells(one))
    return made


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
