"""The first page: the health of the system, and the delay and speed of each query."""

from __future__ import annotations

from starlette.responses import Response

from spark_bridge.overview.faults import AT_WORK
from spark_bridge.overview.model import ERROR, RUNNING, Query
from spark_bridge.overview.stream_pace import query_pace
from spark_bridge.ui.charts import sparkline, strip
from spark_bridge.ui.requests import PageCall

MOST_FAULTS = 20
QUERIES_AT_ONCE = 100
BUDGET = "host_memory"


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
        behind=sum(q.pending_partitions > 0 for q in of.queries),
        rows_per_second=sum(rates) if rates else None,
        oldest=max((p.freshness_ms for _, p in at_work if p.freshness_ms is not None), default=None),
        silent=sum(not host.answered for host in of.hosts),
        held=held,
        budget=budget,
        memory=strip({"held": float(held)}, float(budget)),
    )


def _is_faulty(query: Query, faulty: set[str]) -> bool:
    subjects = [f"operator {o.name} of query {query.title}" for o in query.operators]
    return not faulty.isdisjoint([f"query {query.title}", *subjects])


def _held(memory: dict[str, int]) -> int:
    return sum(n for name, n in memory.items() if name != BUDGET)
