"""The pages of a cluster or checkpoint: overview, hosts, operator, query, savepoints."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import RedirectResponse, Response

from backends.encoding.operator_schema import TIMERS
from coordinator_actor.savepoints.savepoint_format import SavepointInfo
from spark_bridge.exceptions import STATESTORE_ERRORS, RequestError
from spark_bridge.overview.faults import AT_WORK, COORDINATOR_PROCESS, awaited
from spark_bridge.overview.model import ERROR, RUNNING, HostOverview, Operator, Partition, Query, query_pace
from spark_bridge.queryable.client.features import age_of
from spark_bridge.ui import charts
from spark_bridge.ui.live import default_directory
from spark_bridge.ui.lookups import PAGE_READ_SECONDS
from spark_bridge.ui.requests import PageCall, faults_about, reference, state_id, tables_of

MAX_FAULTS = 20
QUERIES_AT_ONCE = 100
BUDGET = "host_memory"
LOOKUP_VERBS = ("lookup", "get")


def overview(call: PageCall) -> Response:
    """Show the faults, the queries and the hosts."""
    of = call.overview
    paces = [(q, query_pace(q, of.taken_ms), charts.sparkline(q.checkpoints)) for q in of.queries]
    faulty = {fault.subject for fault in of.faults}
    first = call.number("from", 0)
    # Problems first, then running queries, those with a running batch before the others.
    ordered = sorted(
        paces, key=lambda one: (not _is_faulty(one[0], faulty), one[0].status != RUNNING, not one[0].pending_partitions)
    )
    # A checkpoint does not show whether the query runs.
    at_work = [(q, p) for q, p, _ in paces if q.status in AT_WORK]
    used_bytes = sum(host.used_bytes for host in of.hosts)
    budget = sum(host.memory.get(BUDGET, 0) for host in of.hosts)
    idle = [p.freshness_ms or 0 for _, p in at_work if p.is_idle]
    backlogs = [p.backlog_rows for _, p in at_work if p.backlog_rows is not None]
    rates = [p.rows_per_second for _, p in at_work if p.rows_per_second is not None]
    return call.render(
        "overview.html",
        errors=sum(fault.severity == ERROR for fault in of.faults),
        faults=of.faults[:MAX_FAULTS],
        faults_left=max(0, len(of.faults) - MAX_FAULTS),
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
        held=used_bytes,
        budget=budget,
        memory=charts.strip({"held": float(used_bytes)}, float(budget)),
    )


def _lookup_latency(hosts: Sequence[HostOverview]) -> dict[str, float] | None:
    """Return the percentiles of lookups at the slowest host."""
    latencies = [
        (float(figures["p99_ms"]), float(figures.get("p50_ms") or 0))
        for host in hosts
        for verbs in host.requests.values()
        for verb, figures in verbs.items()
        if verb in LOOKUP_VERBS and figures.get("requests") and figures.get("p99_ms") is not None
    ]
    return dict(zip(("p99_ms", "p50_ms"), max(latencies), strict=True)) if latencies else None


def _is_faulty(query: Query, faulty: set[str]) -> bool:
    subjects = [f"operator {o.name} of query {query.title}" for o in query.operators]
    return not faulty.isdisjoint([f"query {query.title}", *subjects])


def feature_views(call: PageCall) -> Response:
    """Show the feature views."""
    views, problem = [], ""
    try:
        views = call.client().feature_views(timeout=PAGE_READ_SECONDS)
    except STATESTORE_ERRORS as error:
        problem = str(error)
    return call.render("features.html", views=views, age_of=age_of, problem=problem)


# The hosts: memory by its use, counters of their work, and statistics of their answers to requests.


HOSTS_AT_ONCE = 50
MAX_REQUEST_ROWS = 100
"""At most this many rows of requests are shown, those with the most requests first."""


@dataclass(frozen=True)
class HostRow:
    """A host with its memory: the strip, and bytes by holder, the largest first."""

    host: HostOverview
    budget: int
    strip: list[charts.Part]
    holders: list[tuple[str, int]]


@dataclass(frozen=True)
class RequestRow:
    """The requests of one operator and verb that a host has answered."""

    host: str
    operator: str
    verb: str
    figures: dict[str, Any]


def hosts(call: PageCall) -> Response:
    """Show the hosts."""
    all_hosts = call.overview.hosts
    first = call.number("from", 0)
    shown = all_hosts[first : first + HOSTS_AT_ONCE]
    kinds = sorted({name for host in all_hosts for name, nbytes in host.memory.items() if name != BUDGET and nbytes})
    rows = [_row(host, kinds) for host in shown]
    requests = [
        RequestRow(host.host_id, operator, verb, figures)
        for host in shown
        for operator, verbs in host.requests.items()
        for verb, figures in verbs.items()
    ]
    requests.sort(key=lambda r: (-r.figures.get("failures", 0), -r.figures["requests"]))
    subjects = {"hosts", COORDINATOR_PROCESS, *(f"host {host.host_id}" for host in all_hosts)}
    return call.render(
        "hosts.html",
        faults=[fault for fault in call.overview.faults if fault.subject in subjects],
        rows=rows,
        kinds=kinds,
        first=first,
        at_once=HOSTS_AT_ONCE,
        requests=requests[:MAX_REQUEST_ROWS],
        requests_left=max(0, len(requests) - MAX_REQUEST_ROWS),
        storage=sorted({kind for host in shown for kind in host.storage_requests}),
    )


def _row(host: HostOverview, kinds: list[str]) -> HostRow:
    holders = {f"m{i % 8}": float(host.memory.get(kind, 0)) for i, kind in enumerate(kinds)}
    budget = host.memory.get(BUDGET, 0)
    by_size = sorted(((k, host.memory[k]) for k in kinds if host.memory.get(k)), key=lambda item: -item[1])
    return HostRow(host, budget, charts.strip(holders, float(max(budget, host.used_bytes))), by_size)


# One operator: its partitions by host, its hottest partitions, and its schema.


PARTITIONS_AT_ONCE = 50
HOTTEST = 10
COLUMNS = ("partition", "keys", "bytes", "time", "rows", "lag")


def named_operator(call: PageCall) -> tuple[Query, Operator]:
    """Return the operator that the request names. Raises ``LookupError`` naming the existing ones."""
    of, name = call.named_query(), call.given("operator")
    for operator_ in of.operators:
        if operator_.name == name:
            return of, operator_
    names = ", ".join(o.name for o in of.operators) or "none"
    raise LookupError(f"Query {of.title} has no operator {name[:200]!r}; it has {names}.")


def operator(call: PageCall) -> Response:
    """Show an operator."""
    of, one = named_operator(call)
    measures = [m for m in charts.MEASURES if any(charts.partition_measure(p, m) is not None for p in one.partitions)]
    measure = call.given("by") if call.given("by") in measures else (measures[0] if measures else "")
    order = call.given("sort") if call.given("sort") in COLUMNS else "partition"
    first = call.number("from", 0)
    ordered = sorted(one.partitions, key=lambda p: _order(p, order))
    by_measure = sorted(one.partitions, key=lambda p: -(charts.partition_measure(p, measure) or 0)) if measure else []
    ref = reference(of, call.overview.queries)
    return call.render(
        "operator.html",
        query=of,
        operator=one,
        faults=faults_about(call.overview.faults, f"operator {one.name} of query {of.title}"),
        measures=measures,
        measure=measure,
        heat=charts.heat_map(one, measure) if measure else None,
        hottest=[
            (p, charts.measure_in_words(measure, charts.partition_measure(p, measure))) for p in by_measure[:HOTTEST]
        ],
        in_words=charts.measure_in_words,
        bytes_of=lambda p: charts.partition_measure(p, "bytes"),
        partitions=ordered[first : first + PARTITIONS_AT_ONCE],
        order=order,
        columns=COLUMNS,
        first=first,
        at_once=PARTITIONS_AT_ONCE,
        tables=[t for t in tables_of(call.overview) if (t.query, t.operator) == (ref, one.name)],
    )


def _order(partition: Partition, by: str) -> tuple[float, int]:
    """Return the sort key of a partition: by its number, or descending by another column."""
    if by == "partition":
        return (0.0, partition.partition)
    value = partition.snapshot_lag if by == "lag" else charts.partition_measure(partition, by)
    return (-(value if value is not None else -1.0), partition.partition)


# One query: where the time of its batches went, its checkpoints, watermark, late rows, TTLs and timers.


CHECKPOINTS_AT_ONCE = 25


def query(call: PageCall) -> Response:
    """Show a query."""
    of = call.named_query()
    first = call.number("from", 0)
    newest_first = of.checkpoints[::-1]
    recent = of.checkpoints[-charts.MAX_DURATION_BARS :]
    with_rows = [c for c in recent if c.rows is not None]
    ref = reference(of, call.overview.queries)
    about = (f"query {of.title}", *(f"operator {o.name} of query {of.title}" for o in of.operators))
    return call.render(
        "query.html",
        query=of,
        faults=faults_about(call.overview.faults, *about),
        awaited=awaited(of)[0],
        pace=query_pace(of, call.overview.taken_ms),
        timeline=charts.timeline(of.checkpoints),
        phases=charts.PHASES,
        steps=charts.steps(recent),
        rows=sum(c.rows or 0 for c in with_rows),
        late=sum(c.late or 0 for c in with_rows),
        duplicates=sum(c.duplicates or 0 for c in with_rows),
        removed=sum(c.removed or 0 for c in with_rows),
        known=len(with_rows),
        checkpoints=newest_first[first : first + CHECKPOINTS_AT_ONCE],
        first=first,
        at_once=CHECKPOINTS_AT_ONCE,
        timed=[
            (o, v, state_id(ref, o.name, v.name))
            for o in of.operators
            for v in o.variables
            if v.ttl_ms is not None or v.kind == TIMERS
        ],
    )


# Savepoints: list and describe them, and have one made.


MAX_SAVEPOINTS = 100


def savepoints_page(call: PageCall) -> Response:
    """List the savepoints of a query, the newest first, and show the progress of a requested one."""
    queries = call.overview.queries
    named = call.given("query")
    query = call.named_query() if named or len(queries) == 1 else None
    request = call.given("request")
    # Before the list is read: a savepoint that is shown as made is then in the list, too.
    progress = call.system.savepoint_status(request) if request else None
    savepoints: list[SavepointInfo] = []
    problem, status = "", 200
    if query is not None:
        try:
            savepoints = call.system.savepoints(query, _directory(call))[::-1]
        except STATESTORE_ERRORS as error:
            problem, status = str(error), 400
    return call.render(
        "savepoints.html",
        status,
        query=query,
        queries=[(reference(q, queries), q) for q in queries],
        directory=None if query is None else (_directory(call) or default_directory(query)),
        savepoints=savepoints[:MAX_SAVEPOINTS],
        left_out=max(0, len(savepoints) - MAX_SAVEPOINTS),
        problem=problem,
        request=request,
        progress=progress,
    )


def savepoint_page(call: PageCall) -> Response:
    """Describe a savepoint."""
    return _described(call, check_files=False)


def check(call: PageCall) -> Response:
    """Read every file of a savepoint, and compare it with its checksum."""
    return _described(call, check_files=True)


def trigger(call: PageCall) -> Response:
    """Begin a savepoint, and show how far it is."""
    query = call.named_query()
    request = uuid.uuid4().hex
    path = call.given("path") or None
    if path is not None and not call.may_name_places:
        raise RequestError("Your token is for some queries: a savepoint goes next to the state. Leave the path out.")
    if path is not None and not path.startswith("/") and "://" not in path:
        raise RequestError(f"{path[:200]!r} is not an absolute path or URL; hosts have different working directories.")
    call.system.trigger_savepoint(request, query.run_id, path)
    ref = reference(query, call.overview.queries)
    return RedirectResponse(call.url("savepoints", query=ref, request=request, directory=path), 303)


def _directory(call: PageCall) -> str | None:
    """Return the directory that the request names. Raises ``RequestError`` if the caller may not name one."""
    directory = call.given("directory")
    if directory and not call.may_name_places:
        raise RequestError("Another directory than the query's own is shown to an administrator of all queries only.")
    return directory or None


def _described(call: PageCall, *, check_files: bool) -> Response:
    """Describe the savepoint that the request names, in the directory of the list. Raises ``RequestError``."""
    query, name, directory = call.named_query(), call.given("name"), _directory(call)
    if not name or "/" in name or name in (".", ".."):
        raise RequestError(f"{name[:200]!r} is not a name of a savepoint.")
    base = directory or default_directory(query)
    info = call.system.describe_savepoint(f"{base.rstrip('/')}/{name}", check_files=check_files)
    return call.render("savepoint.html", query=query, info=info, is_checked=check_files, directory=directory)
