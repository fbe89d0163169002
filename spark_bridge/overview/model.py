"""The model of the system, for people: queries, operators, partitions, checkpoints, hosts, savepoints, faults.

Plain data, the same for a running cluster and for storage alone. A field that a source cannot know is None. Moments
are in ms since 1970, times in ms, sizes in bytes. Records that occur in tens of thousands are cheap to build, and
Python's garbage collection, which holds up all threads, skips them (``gc=False``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

from backends.encoding.operator_schema import OperatorSchema
from backends.storage.requests import KINDS
from coordinator_actor.access_tokens import Scope
from coordinator_actor.durable.records import StepTime
from coordinator_actor.messages import InputPace
from spark_bridge.queryable.reads.operator_plan import variables_summary

# The model of processes: hosts, the coordinator, and the faults of storage that they meet.
#
# As in the rest of the model, times are in ms and sizes in bytes.


@dataclass(frozen=True)
class LocationTrouble:
    """Faults of one location of checkpoint storage, as one process sees them.

    ``failures`` requests have failed within the last minute, the last with ``error``, ``failed_ms`` ago; ``is_over`` if
    one was answered after that. ``waiting`` requests have had no answer for seconds, the longest for ``waiting_ms``.
    """

    location: str
    failures: int = 0
    error: str = ""
    failed_ms: int = 0
    is_over: bool = False
    waiting: int = 0
    waiting_ms: int = 0


@dataclass(frozen=True)
class LoopFailures:
    """A background loop with ``failures`` consecutive failures, the first ``failing_ms`` ago, the last with ``error``.

    ``process`` names its process, ``what`` the waiting work.
    """

    process: str
    what: str
    failing_ms: int
    failures: int
    error: str
    remedy: str


@dataclass(frozen=True)
class HostOverview:
    """One StateStoreHost. ``answered``: False if it did not answer in time, and only the coordinator's answer is known.

    ``heartbeat_ms`` is None if the coordinator does not know the host. ``actor_state`` is Ray's state of its actor, if
    the host has not answered: ALIVE, RESTARTING and so on.

    ``memory`` has bytes by kind of memory, and the budget as ``host_memory``. ``counters`` count since the process
    started, ``up_ms`` ago; Ray has restarted it ``restarts`` times. ``row_cache`` has the number of keys that its row
    caches were ``asked`` for, and of the ``hits`` among them. ``loading`` has a line for each load under way, with its
    progress. ``disk`` counts the partitions that the host has evicted because its local disk was full, and their bytes.
    It also has the ``budget`` of the disk in bytes (None: the file system's free space).
    """

    host_id: str
    address: str
    node_id: str | None = None
    query_address: str | None = None
    incarnation: str | None = None
    pid: int | None = None
    answered: bool = True
    heartbeat_ms: int | None = None
    partitions: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    row_cache: dict[str, int] = field(default_factory=dict)
    disk: dict[str, Any] = field(default_factory=dict)
    storage_requests: dict[str, int] = field(default_factory=dict)
    requests: dict[str, Any] = field(default_factory=dict)
    loading: tuple[str, ...] = ()
    restarts: int = 0
    up_ms: int | None = None
    storage_trouble: tuple[LocationTrouble, ...] = ()
    actor_state: str | None = None
    failing_loops: tuple[LoopFailures, ...] = ()

    @property
    def cache_hits(self) -> float | None:
        """Return the share of keys that row caches had, 0 to 1; None if nothing was asked for."""
        asked = self.row_cache.get("asked", 0)
        return self.row_cache.get("hits", 0) / asked if asked else None

    @property
    def used_bytes(self) -> int:
        """Return the bytes of memory that are held, without the budget."""
        return sum(nbytes for kind, nbytes in self.memory.items() if kind != "host_memory")

    @property
    def machine(self) -> str:
        return self.address.rpartition("//")[2].rpartition(":")[0]


@dataclass(frozen=True)
class LostDriver:
    """A query given up because its driver has been silent since ``lost_ms``, and that has not restarted."""

    query: str
    run_id: str
    checkpoint_location: str
    lost_ms: int
    query_id: str = ""
    state_location: str = ""


@dataclass(frozen=True)
class CoordinatorInfo:
    """The coordinator of a namespace. ``problems`` name hosts that run in the wrong places.

    ``restarts`` and ``up_ms`` are those of its process, as for hosts. ``lost`` are the queries that it has given up.
    ``failing_loops`` has the loops of its process, and those that drivers report.
    """

    id: str
    namespace: str
    node_ip: str | None = None
    pid: int | None = None
    storage_requests: dict[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    restarts: int = 0
    up_ms: int | None = None
    storage_trouble: tuple[LocationTrouble, ...] = ()
    lost: tuple[LostDriver, ...] = ()
    failing_loops: tuple[LoopFailures, ...] = ()


OVERVIEW_FORMAT_VERSION = 1
"""Grows when a field changes its meaning or goes. New fields do not change it."""

RUNNING, ENDED, RETIRED, STORED = "running", "ended", "replaced", "stored"
"""The status of a query. ``ENDED``: hosts still answer from its last version. ``RETIRED``: a newer run has replaced it.
``STORED``: the overview is of storage, which does not show whether the query runs.
"""
WARNING, ERROR = "warning", "error"
CLUSTER, STORAGE = "cluster", "storage"
INPUT_WAIT = "input_wait"
"""The step of a task that waits for its input rows: no work on state."""


@dataclass(frozen=True)
class Fault:
    """A problem that needs attention. ``kind`` is a fixed name, ``subject`` names the faulty part.

    ``severity`` is "error" if queries are blocked or data cannot be read, else "warning".
    """

    severity: str
    kind: str
    subject: str
    what: str
    remedy: str


class Checkpoint(Struct, frozen=True, gc=False):
    """One version, from the history, or from its manifest alone: then only id, times, bytes and partitions are known.

    For the fields see ``coordinator_actor.durable.records.CheckpointRecord``. ``status`` is "completed", or
    "prepared" while Spark has not committed the batch. ``is_kept``: the version can still be read.
    """

    id: int
    version: int
    epoch: int
    run_id: str
    status: str = "completed"
    is_kept: bool = False
    begun_ms: int | None = None
    prepared_ms: int | None = None
    completed_ms: int | None = None
    duration_ms: int | None = None
    phases: dict[str, int] = {}
    steps: dict[str, StepTime] = {}
    partitions: int = 0
    delta_bytes: int | None = None
    full_bytes: int | None = None
    retried: int | None = None
    rows: int | None = None
    updated: int | None = None
    removed: int | None = None
    late: int | None = None
    duplicates: int | None = None
    requests: int | None = None
    storage: dict[str, int] = {}

    @property
    def requests_by_kind(self) -> str:
        """Return the requests by kind, as people read them: ``5 put, 3 get``; "" if they are not known."""
        return ", ".join(f"{self.storage[kind]:,} {kind}" for kind in KINDS.values() if self.storage.get(kind))


class Partition(Struct, frozen=True, gc=False):
    """One partition of an operator. ``owner`` is the id of the host that holds its newest version.

    ``version`` is that of the host, or the last completed one in storage. ``snapshot_version`` is that of the newest
    snapshot, 0 for none, and ``snapshot_lag`` the versions that it is behind. ``changelog_bytes`` are those of the
    changelogs after it. ``commit_ms`` are the steps of the last commit, and ``rows`` its input rows.
    ``dropped_elements`` counts those that limits of lists have dropped since the host has loaded the partition; None if
    no list has a limit. ``copy_lags`` has the versions that each of its standby copies is behind.
    """

    operator: str
    partition: int
    version: int | None = None
    owner: str | None = None
    keys: int | None = None
    memory_bytes: int | None = None
    snapshot_version: int | None = None
    snapshot_lag: int | None = None
    changelog_bytes: int | None = None
    commit_ms: dict[str, float] = {}
    rows: int | None = None
    dropped_elements: int | None = None
    copy_lags: tuple[int, ...] = ()

    @property
    def work_ms(self) -> float | None:
        """Return the time of its last commit without the wait for input rows; None if it is not known."""
        return sum(ms for name, ms in self.commit_ms.items() if name != INPUT_WAIT) if self.commit_ms else None


@dataclass(frozen=True)
class Variable:
    """One state variable: the types of its columns by name, and its time to live.

    ``inner`` are the columns that tell the rows of one key apart: the user's key of a map, when a timer fires, the
    bounds of a session. ``window`` names the key column that is a window, ``index`` the columns that have an index.
    ``horizons`` are those of the outputs of rolling aggregates: by output and by the end of the column's name.
    """

    name: str
    kind: str
    key: dict[str, str] = field(default_factory=dict)
    value: dict[str, str] = field(default_factory=dict)
    inner: dict[str, str] = field(default_factory=dict)
    window: str | None = None
    ttl_ms: int | None = None
    horizons: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    index: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SchemaUse:
    """The schema that the versions from ``first_version`` to ``last_version`` of an operator were written with.

    ``variables`` are known if the schema itself can be read: from storage, and of the newest.
    """

    schema_id: str
    first_version: int
    last_version: int
    variables: tuple[Variable, ...] = ()


@dataclass(frozen=True)
class Operator:
    """One operator of a query. ``skew`` is the keys of the largest partition over those of the median one, at least 1.

    ``schemas`` are those of the versions that storage has, the oldest first. ``dropped_elements`` is the sum over the
    partitions.
    """

    name: str
    num_partitions: int
    backend: str | None = None
    schema_id: str | None = None
    keys: int | None = None
    memory_bytes: int | None = None
    skew: float | None = None
    partitions: tuple[Partition, ...] = ()
    variables: tuple[Variable, ...] = ()
    schemas: tuple[SchemaUse, ...] = ()
    dropped_elements: int | None = None


@dataclass(frozen=True)
class GivenUp:
    """A checkpoint that was given up, and why."""

    id: int
    begun_ms: int
    reason: str


@dataclass(frozen=True)
class Savepoint:
    """A savepoint that was begun. Its directory shows whether it was finished (``statestore savepoint list``)."""

    id: int
    version: int
    location: str
    created_ms: int
    run_id: str
    stop: bool


@dataclass(frozen=True)
class Query:
    """One query. Versions ``oldest_version`` to ``completed_version`` can be read.

    The running batch began ``batch_ms`` ago, and ``pending_partitions`` have not acknowledged it yet. ``given_up`` are
    the last checkpoints of this run that were given up. A query that has ended did so at ``ended_ms``, with the error
    ``failure`` if there was one. ``watermark_ms`` is the event time before which the last batch expects no more rows,
    and ``batch_time_ms`` its processing time, as Spark has logged them. They are None without a watermark, and if no
    operator of the query needs times. ``damages`` describes manifests that were skipped when storage was read. Then
    ``readable`` has the ranges of versions that can still be read, each as its first and its last version.

    The driver sent its last heartbeat ``driver_ms`` ago. ``lag_ms`` is how old the state may be: that of a mirror
    (``is_mirror``), or of a query that runs elsewhere and that a follower reads late. ``watermark_rose_ms`` is when the
    watermark last changed; ``input`` is the pace of the input in the last batch. Each partition should have
    ``standby_replicas`` copies.
    """

    query_id: str
    run_id: str
    name: str | None
    status: str
    checkpoint_location: str
    state_location: str
    epoch: int
    completed_version: int
    prepared_version: int
    oldest_version: int | None
    operators: tuple[Operator, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    savepoints: tuple[Savepoint, ...] = ()
    pending_partitions: int = 0
    batch_ms: int | None = None
    replaced_by: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    watermark_ms: int | None = None
    batch_time_ms: int | None = None
    given_up: tuple[GivenUp, ...] = ()
    ended_ms: int | None = None
    failure: str = ""
    damages: tuple[str, ...] = ()
    readable: tuple[tuple[int, int], ...] = ()
    driver_ms: int | None = None
    lag_ms: int = 0
    is_mirror: bool = False
    watermark_rose_ms: int | None = None
    input: InputPace | None = None
    standby_replicas: int = 0

    @property
    def title(self) -> str:
        return self.name or self.query_id


@dataclass(frozen=True)
class Overview:
    """The system at one moment. ``source`` is "cluster" or "storage"."""

    source: str
    taken_ms: int
    coordinator: CoordinatorInfo | None = None
    queries: tuple[Query, ...] = ()
    hosts: tuple[HostOverview, ...] = ()
    faults: tuple[Fault, ...] = ()
    format_version: int = OVERVIEW_FORMAT_VERSION

    def query(self, named: str | None) -> Query:
        """Return the query of that name, query id or run id; None means the only one. Raises ``LookupError``.

        If several match, such as all runs of a query, the one that runs is returned.
        """
        queries = [q for q in self.queries if named is None or named in (q.name, q.query_id, q.run_id)]
        running = [q for q in queries if q.status == RUNNING]
        queries = running if len(running) == 1 else queries
        if len(queries) != 1:
            names = ", ".join(f"{q.title} ({q.query_id})" for q in self.queries) or "none"
            asked = "A query must be named" if named is None and queries else f"No single query is named {named!r}"
            raise LookupError(f"{asked}; there are: {names}." if self.queries else "There is no query.")
        return queries[0]


_SHOWN_IN_PART = (
    *("query_id", "run_id", "name", "status", "epoch"),
    *("completed_version", "prepared_version", "oldest_version", "readable"),
)


def overview_within(overview: Overview, scope: Scope) -> Overview:
    """Return the part of an overview that a token with ``scope`` may see: its operators, and their queries.

    Hosts and coordinator serve all queries, and are left out. Of a query that the token may see in part, everything
    that is not of one operator is left out as well.
    """
    if scope.is_all:
        return overview
    queries = []
    for query in overview.queries:
        names = (query.name, query.query_id, query.run_id)
        operators = tuple(o for o in query.operators if scope.allows(o.name, *names))
        if scope.has_whole_queries and scope.allows_query(*names):
            queries.append(query)
        elif operators:
            shown = {name: getattr(query, name) for name in _SHOWN_IN_PART}
            queries.append(Query(**shown, checkpoint_location="", state_location="", operators=operators))
    subjects = {f"operator {o.name} of query {q.title}" for q in queries for o in q.operators}
    if scope.has_whole_queries:
        subjects |= {f"query {q.title}" for q in queries}
    coordinator = overview.coordinator and CoordinatorInfo(overview.coordinator.id, overview.coordinator.namespace)
    faults = tuple(fault for fault in overview.faults if fault.subject in subjects)
    return replace(overview, coordinator=coordinator, queries=tuple(queries), hosts=(), faults=faults)


def to_plain(described: Any) -> Any:
    """Return an object of the model as JSON types."""
    return msgspec.to_builtins(described)


# Numbers, sizes, times and money for people, on the page and in the terminal. An unknown value is an empty text.


def size(nbytes: float | None) -> str:
    """Return a size in binary units."""
    if nbytes is None:
        return ""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def number(value: float | None) -> str:
    """Return a number with thousands separators."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) or abs(value) < 10 else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Return a rate with its significant digits."""
    return "" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def dollars(amount: float | None) -> str:
    """Return an amount of money; a single request costs a fraction of a cent."""
    return "" if amount is None else f"${amount:,.2f}" if amount >= 1 else f"${amount:.6f}"


def duration(ms: float | None) -> str:
    """Return a duration in one unit, or in two from a minute on."""
    if ms is None:
        return ""
    if ms < 1000:
        return f"{ms:.0f} ms" if ms >= 10 or ms == int(ms) else f"{ms:.2g} ms"
    seconds = ms / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def moment(ms: int | None) -> str:
    """Return a moment in UTC."""
    if ms is None:
        return ""
    try:
        return datetime.fromtimestamp(ms / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms"


# The state variables of an operator, as the overview describes them.


def variables_in_use(schema: OperatorSchema) -> tuple[Variable, ...]:
    """Return the variables that are in use, with the columns that queries see."""
    return tuple(Variable(**described) for described in variables_summary(schema))


# Speed and delay of queries: sums over the last checkpoints of an overview.


RECENT_CHECKPOINTS = 20
"""At most this many of the last checkpoints are looked at."""
IDLE_MS = 10_000
STANDING_MS = 60_000
USUAL_INTERVALS = 3
"""A query is idle if it had no batch for this many of its usual intervals, and for at least ``IDLE_MS``. A watermark
stands still if it has not risen for as many intervals, and for at least ``STANDING_MS``.
"""


@dataclass(frozen=True)
class QueryPace:
    """One query at one moment. Times are in ms; unknown values are None.

    ``rows_per_second`` are the input rows of the last checkpoints over the time from the first to the last of them;
    ``usual_ms`` is the median duration of these checkpoints, ``interval_ms`` the median time between two. A query that
    is idle has no new input, and 0 rows a second. ``backlog_rows`` wait in the sources. ``watermark_stands_ms`` is set
    if the watermark has not risen for long: results that it closes wait for rows of later times. ``freshness_ms`` is
    the age of the last completed checkpoint, or of the last prepared one if none is known to be completed.
    ``watermark_behind_ms`` is how far the watermark is behind now, ``batch_ms`` how long the running batch has run.
    ``hottest`` is the partition with the longest work for its last commit, as ``operator/partition``, and
    ``hottest_ms`` that time.
    """

    query: str
    status: str
    version: int
    freshness_ms: int | None = None
    watermark_behind_ms: int | None = None
    batch_ms: int | None = None
    usual_ms: float | None = None
    interval_ms: float | None = None
    rows_per_second: float | None = None
    bytes_per_checkpoint: float | None = None
    keys: int | None = None
    memory_bytes: int | None = None
    hottest: str | None = None
    hottest_ms: float | None = None
    is_idle: bool = False
    backlog_rows: int | None = None
    watermark_stands_ms: int | None = None


def pace_of(overview: Overview) -> tuple[QueryPace, ...]:
    """Return the pace of each query, in the order of the overview."""
    return tuple(query_pace(query, overview.taken_ms) for query in overview.queries)


def query_pace(query: Query, now_ms: int) -> QueryPace:
    """Return the pace of one query at a moment, in ms since 1970."""
    recent = [c for c in query.checkpoints[-RECENT_CHECKPOINTS:] if c.completed_ms is not None]
    moments = [c.completed_ms for c in recent if c.completed_ms is not None]
    durations = [c.duration_ms for c in recent if c.duration_ms is not None]
    added = [c.delta_bytes for c in recent if c.delta_bytes is not None]
    newest = moments[-1] if moments else query.checkpoints[-1].prepared_ms if query.checkpoints else None
    # Without the wait for rows: a slow source would make any partition the hottest.
    worked = [(p.work_ms, f"{o.name}/{p.partition}") for o in query.operators for p in o.partitions]
    hottest_ms, hottest = max(((ms, name) for ms, name in worked if ms is not None), default=(None, None))
    interval = median(b - a for a, b in pairwise(moments)) if len(moments) > 1 else None
    freshness = _since(newest, now_ms)
    runs = query.status == RUNNING
    patience = USUAL_INTERVALS * (interval or 0)
    is_idle = runs and query.batch_ms is None and freshness is not None and freshness > max(IDLE_MS, patience)
    backlog = None if query.input is None else query.input.backlog_rows
    stands = _since(query.watermark_rose_ms, now_ms) if runs and query.watermark_ms is not None else None
    return QueryPace(
        query.title,
        query.status,
        query.completed_version,
        freshness_ms=freshness,
        watermark_behind_ms=_since(query.watermark_ms, now_ms),
        batch_ms=query.batch_ms,
        usual_ms=median(durations) if durations else None,
        interval_ms=interval,
        rows_per_second=0.0 if is_idle else _rate(recent, moments),
        bytes_per_checkpoint=sum(added) / len(added) if added else None,
        keys=_sum([o.keys for o in query.operators]),
        memory_bytes=_sum([o.memory_bytes for o in query.operators]),
        hottest=hottest,
        hottest_ms=hottest_ms,
        is_idle=is_idle,
        # An idle query has no rows in its sources, or Spark would have begun a batch. So an older backlog is over.
        backlog_rows=0 if is_idle and backlog is not None else backlog,
        watermark_stands_ms=stands if stands is not None and stands > max(STANDING_MS, patience) else None,
    )


def _since(moment_ms: int | None, now_ms: int) -> int | None:
    return None if moment_ms is None else max(0, now_ms - moment_ms)


def _rate(recent: Sequence[Checkpoint], moments: Sequence[int]) -> float | None:
    rows = [c.rows for c in recent[1:] if c.rows is not None]
    if len(moments) < 2 or moments[-1] <= moments[0] or len(rows) < len(recent) - 1:
        return None
    # The time begins at the first checkpoint, so its rows are left out.
    return sum(rows) * 1000 / (moments[-1] - moments[0])


def _sum(values: Sequence[int | None]) -> int | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if values and len(numbers) == len(values) else None
