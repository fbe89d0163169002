"""The first page: the health of the system, and the delay and speed of each query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import Response

from spark_bridge.overview.faults import AT_WORK
from spark_bridge.overview.model import ERROR, RUNNING, Query
from spark_bridge.overview.processes import HostOverview
from spark_bridge.overview.stream_pace import query_pace
from spark_bridge.ui.charts import sparkline, strip
from spark_bridge.ui.requests import PageCall

MOST_FAULTS = 20
QUERIES_AT_ONCE = 100
BUDGET = "host_memory"
LOOKUP_VERBS = ("lookup", "get")


def overview(call: PageCall) -> Response:
    """Show the faults, the queries and the hosts."""
    of = call.overview
    paces = [(q, query_pace(q, of.taken_ms), sparkline(q.checkpoints)) for q in of.queries]
    faulty = {fault.subject for fault in of.faults}
    first = call.number("from", 0)
    # What is wrong stands first, then what runs, and of that what is at a batch.
    ordered = sorted(
        paces,
        key=lambda one: (not _is_faulty(one[0], faulty), one[0].status != RUNNING, not one[0].pending_partitions),
    )
    # From a checkpoint nobody knows whether the query runs.
    at_work = [(q, p) for q, p, _ in paces if q.status in AT_WORK]
    held = sum(_held(host.memory) for host in of.hosts)
    budget = sum(host.memory.get(BUDGET, 0) for host in of.hosts)
    idle = [p.freshness_ms or 0 for _, p in at_work if p.is_idle]
    backlogs = [p.backlog_rows for _, p in at_work if p.backlog_rows is not None]
    rates = [p.rows_per_second for _, p in at_work if p.rows_per_second is not None]
    return call.render(
        "overview.html",
        errors=sum(fault.severity == ERROR for fault in of.faults),
        faults=of.faults[:MOST_FAULTS],
        faults_left=max(0, len(of.faults) - MOST_FAULTS),
        queries=ordered[first : first + QUERIES_AT_ONCE],
        faulty={q.query_id for q in of.queries if _is_faulty(q, faulty)},
        first=first,
        at_once=QUERIES_AT_ONCE,
        running=sum(q.status == RUNNING for q in of.queries),
        partitions=sum(o.num_partitions for q, _ in at_work for o in q.operators),
        at_batch=sum(q.status == RUNNING and (q.batch_ms is not None or q.pending_partitions > 0) for q in of.queries),
        waiting=sum(q.pending_partitions > 0 for q in of.queries),
        rows_per_second=sum(rates) if rates else None,
        idle=len(idle),
        all_idle=bool(at_work) and len(idle) == len(at_work),
        idle_ms=min(idle, default=0),
        oldest=max((p.freshness_ms for _, p in at_work if p.freshness_ms is not None and not p.is_idle), default=None),
        backlog=sum(backlogs) if backlogs else None,
        lookup=_lookup_latency(of.hosts),
        silent=sum(not host.answered for host in of.hosts),
        held=held,
        budget=budget,
        memory=strip({"held": float(held)}, float(budget)),
    )


@dataclass(frozen=True)
class _Latency:
    """The percentiles of lookups at the host where they take longest."""

    p50_ms: float
    p99_ms: float


def _lookup_latency(hosts: Sequence[HostOverview]) -> _Latency | None:
    known = [
        (float(figures["p99_ms"]), float(figures.get("p50_ms") or 0))
        for host in hosts
        for verbs in host.requests.values()
        for verb, figures in verbs.items()
        if verb in LOOKUP_VERBS and figures.get("requests") and figures.get("p99_ms") is not None
    ]
    return _Latency(max(known)[1], max(known)[0]) if known else None


def _is_faulty(query: Query, faulty: set[str]) -> bool:
    subjects = [f"operator {o.name} of query {query.title}" for o in query.operators]
    return not faulty.isdisjoint([f"query {query.title}", *subjects])


def _held(memory: dict[str, int]) -> int:
    return sum(n for name, n in memory.items() if name != BUDGET)
