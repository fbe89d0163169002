"""Faults of a system: rules over the overview, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from backends.storage.failures import for_people
from spark_bridge.overview.model import (
    CLUSTER,
    ENDED,
    ERROR,
    RECENT_CHECKPOINTS,
    RUNNING,
    STORED,
    WARNING,
    Checkpoint,
    CoordinatorInfo,
    Fault,
    HostOverview,
    LocationTrouble,
    LoopFailures,
    Operator,
    Overview,
    Query,
    duration,
)

# Faults of hosts, of the coordinator, and of the storage that both ask: rules, each with its remedy.


SILENT_HOST_MS = 5_000
"""A host's heartbeats come every second, and its lease ends after ten."""
EVICTION_SECONDS = 600
"""A host whose disk was too small is shown for so many seconds."""
RECENT_RESTART_MS = 600_000
"""A process that was started again is reported for this long."""
MIN_FAILURES = 3
"""Fewer failed and retried requests within a minute are normal: each store has some."""
MIN_WAITING_MS = 10_000
HANGING_MS = 30_000
"""Storage that does not answer for this long holds up batches."""
LONGEST_REASON = 300
COORDINATOR_PROCESS = "coordinator"
MIN_LOOP_FAILURES = 2
"""A loop that fails once tries again at once, and nothing is lost."""
ALIVE = "ALIVE"
"""Ray's word for an actor whose process runs."""


def process_faults(overview: Overview) -> Iterator[Fault]:
    """Yield the faults of hosts, coordinator and storage."""
    if overview.source == CLUSTER and overview.queries and not overview.hosts:
        what = "No host is registered with the coordinator: no batch can continue."
        remedy = "Look at the driver: hosts are started by init_spark and attach, and end with it."
        yield Fault(ERROR, "no-hosts", "hosts", what, remedy)
    coordinator = overview.coordinator
    for problem in () if coordinator is None else coordinator.problems:
        remedy = "Batches continue, but data travels further than necessary until hosts run beside executors again."
        yield Fault(WARNING, "placement", "hosts", problem, remedy)
    if coordinator is not None:
        yield from _restarted(COORDINATOR_PROCESS, coordinator, "Queries continue from their manifests")
        for lost in coordinator.lost:
            yield Fault(
                ERROR,
                "driver-lost",
                f"query {lost.query}",
                f"Its driver has sent no heartbeat for {duration(max(0, overview.taken_ms - lost.lost_ms))}, and was "
                "given up: the query does not run.",
                "Look for the driver's process and its machine, and start the program again: it continues from its "
                f"checkpoint, {lost.checkpoint_location}. 'statestore run' starts programs again by itself.",
            )
        yield from _of_loops(coordinator.failing_loops)
    for host in overview.hosts:
        yield from _of_host(host)
        yield from _of_loops(host.failing_loops)
    yield from _of_storage(overview)


def _of_loops(loops: Sequence[LoopFailures]) -> Iterator[Fault]:
    for loop in loops:
        if loop.failures >= MIN_LOOP_FAILURES:
            what = (
                f"A background loop has failed {loop.failures} consecutive times, for {duration(loop.failing_ms)}, to "
                f"{loop.what}. The last error: {for_people(loop.error, LONGEST_REASON).rstrip('.')}."
            )
            remedy = loop.remedy or "Look at the log of that process."
            yield Fault(WARNING, "background-loop-fails", loop.process, what, remedy)


def _of_host(host: HostOverview) -> Iterator[Fault]:
    subject = f"host {host.host_id}"
    if host.heartbeat_ms is not None and host.heartbeat_ms > SILENT_HOST_MS:
        yield Fault(
            ERROR,
            "host-silent",
            subject,
            f"The coordinator has heard nothing of it for {host.heartbeat_ms / 1000:.0f} s.",
            f"Look at its machine ({host.machine}) and at its actor's log; its partitions move when its lease is over.",
        )
    elif not host.answered and host.heartbeat_ms is None:
        yield _lost(host, subject)
    elif not host.answered:
        what = "It sends heartbeats and has not described itself in time."
        remedy = "It may be loading state or be starved of CPU: look at its machine, and try again."
        yield Fault(WARNING, "host-not-answering", subject, what, remedy)
    elif host.heartbeat_ms is None:
        what = "It is there, and the coordinator does not know it (yet)."
        remedy = "A host registers within seconds; if it stays so, look at its actor's log."
        yield Fault(WARNING, "host-unknown", subject, what, remedy)
    yield from _restarted(subject, host, "Its partitions are loaded again, and batches continue")
    budget = host.memory.get("host_memory")
    if budget and host.used_bytes > budget:
        what = f"It holds {host.used_bytes:,} bytes of its {budget:,}."
        remedy = "Give hosts more memory (host_memory), or spread the partitions over more hosts."
        yield Fault(WARNING, "host-memory", subject, what, remedy)
    evicted_seconds = host.disk.get("evicted_seconds")
    if evicted_seconds is not None and evicted_seconds < EVICTION_SECONDS:
        yield Fault(
            WARNING,
            "host-disk",
            subject,
            f"Its local disk is smaller than its state: {host.disk['evictions']:,} partitions were evicted, the last "
            f"{evicted_seconds:.0f} s ago, and {host.disk['reread_bytes']:,} bytes were read again.",
            "Give it a larger disk (ray start --temp-dir) or local_disk_bytes, or spread the state over more machines.",
        )


def _lost(host: HostOverview, subject: str) -> Fault:
    if host.actor_state is None:
        what = "The coordinator has given it up, and Ray does not report the state of its actor."
        remedy = "'ray list actors' shows it. Other hosts serve its partitions."
        return Fault(WARNING, "host-lost", subject, what, remedy)
    if host.actor_state != ALIVE:
        what = f"Its process has ended, and Ray has not started it again yet (state: {host.actor_state})."
        remedy = (
            "Other hosts serve its partitions. If it stays so, Ray finds no place for it: 'ray status' shows "
            "the requested and the available resources."
        )
        return Fault(WARNING, "host-starting", subject, what, remedy)
    return Fault(
        ERROR,
        "host-lost",
        subject,
        f"Its process (pid {host.pid} on {host.machine}) runs and does not answer. The coordinator has given it up: "
        "its partitions go to other hosts.",
        "It hangs, or its machine is cut off: look at the machine. A process that hangs may be killed: Ray starts it "
        "again, and nothing is lost.",
    )


def _restarted(subject: str, process: HostOverview | CoordinatorInfo, goes_on: str) -> Iterator[Fault]:
    if not process.restarts or process.up_ms is None or process.up_ms > RECENT_RESTART_MS:
        return
    times = "once" if process.restarts == 1 else f"{process.restarts} times"
    what = f"Its process has ended, and Ray started it again {duration(process.up_ms)} ago ({times} so far)."
    remedy = (
        f"{goes_on} by themselves. Look for why it ended: Ray's memory monitor or the system's out-of-memory killer "
        "(dmesg), a machine that went away, the last lines of its log ('statestore logs')."
    )
    yield Fault(WARNING, "process-restarted", subject, what, remedy)


# -- storage -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """Faults of storage that the processes of a system have met at one location."""

    location: str
    by: list[str]
    troubles: list[LocationTrouble]

    @property
    def failures(self) -> int:
        return sum(t.failures for t in self.troubles)

    @property
    def waiting_ms(self) -> int:
        return max(t.waiting_ms for t in self.troubles)

    @property
    def stands_still(self) -> bool:
        """Whether no process whose requests fail has had one of the same kind answered since, or a request hangs."""
        failing = [t for t in self.troubles if t.failures]
        return self.waiting_ms > HANGING_MS or (bool(failing) and not any(t.is_over for t in failing))


def _of_storage(overview: Overview) -> Iterator[Fault]:
    processes = [(host.host_id, host.storage_trouble) for host in overview.hosts]
    if overview.coordinator is not None:
        processes.insert(0, ("the coordinator", overview.coordinator.storage_trouble))
    seen: dict[str, _Seen] = {}
    for name, troubles in processes:
        for one in troubles:
            at = seen.setdefault(one.location, _Seen(one.location, [], []))
            at.by.append(name)
            at.troubles.append(one)
    for met in seen.values():
        if met.failures >= MIN_FAILURES or met.waiting_ms >= MIN_WAITING_MS:
            yield Fault(
                ERROR if met.stands_still else WARNING,
                "storage-fails" if met.failures >= MIN_FAILURES else "storage-hangs",
                _subject(overview, met.location),
                " ".join(_told(met)),
                "Look at that storage: is it up, full, slowed down, are the credentials and permissions right, is the "
                "network? Requests are retried for a time; batches continue by themselves once storage answers. Start "
                "a query again if these errors have ended it.",
            )


def _told(seen: _Seen) -> Iterator[str]:
    yield f"Requests to {seen.location} fail or get no answer."
    if seen.failures:
        last = min((t for t in seen.troubles if t.failures), key=lambda t: t.failed_ms)
        yield (
            f"{_number(seen.failures, 'request')} failed within the last minute, the last {duration(last.failed_ms)} "
            f"ago: {last.error}."
        )
    waiting = sum(t.waiting for t in seen.troubles)
    if waiting:
        yield f"{_number(waiting, 'request')} without an answer so far, the longest for {duration(seen.waiting_ms)}."
    others = f" and {len(seen.by) - 3} more" if len(seen.by) > 3 else ""
    yield f"Those who ask: {', '.join(seen.by[:3])}{others}."


def _number(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def _subject(overview: Overview, location: str) -> str:
    """Return the query at the location, which has a page, or the location itself."""
    for query in overview.queries:
        if location.rstrip("/") in (query.state_location.rstrip("/"), query.checkpoint_location.rstrip("/")):
            return f"query {query.title}"
    return f"storage {location}"


LATE_INTERVALS = 3
"""A checkpoint is late after this many of the usual intervals between two."""
MIN_LATE_MS = 60_000
"""No checkpoint is late before: short intervals vary."""
MAX_SKEW = 5.0
MIN_SKEWED_KEYS = 10_000
"""Fewer keys in a partition slow nothing down."""
MAX_COPY_LAG = 20
"""A standby copy that is more versions behind takes long to take over."""
MAX_SNAPSHOT_LAG = 50
"""Versions: five snapshots of ten versions each, as Spark's own warning has it."""
MAX_TIME_SKEW = 5.0
MIN_SKEWED_MS = 1_000
"""A partition whose batch takes less time slows nothing down."""
SLOW_STORAGE_MS = 1_000
"""Storage is slow if a usual batch's slowest changelog and its manifest take this long, and half the batch."""
CHANGELOG_STEP, MANIFEST_PHASE = "changelog_ms", "manifest"
SILENT_DRIVER_MS = 10_000
"""A driver's heartbeats come every second."""
RECENT_STORED = 5
"""Whether storage is slow is computed from this many checkpoints, so that it shows within a few batches."""
AT_WORK = (RUNNING, STORED)
"""How the batches of a query that has ended went need not be looked at any more."""
RECENT_MS = 600_000
"""A checkpoint that was given up is reported for this long."""


def faults_of(overview: Overview) -> tuple[Fault, ...]:
    """Return the faults of a system, errors first."""
    faults = [*process_faults(overview)]
    for query in overview.queries:
        faults += _of_query(overview, query)
        if query.status in AT_WORK:
            for operator in query.operators:
                faults += _of_operator(query, operator)
    return tuple(sorted(faults, key=lambda fault: fault.severity != ERROR))


def _of_query(overview: Overview, query: Query) -> Iterator[Fault]:
    subject = f"query {query.title}"
    if query.status == RUNNING:
        yield from _silent_driver(query, subject)
        yield from _late(overview, query, subject)
    if query.is_mirror and query.lag_ms > MIN_LATE_MS:
        yield Fault(
            WARNING,
            "mirror-late",
            subject,
            f"It mirrors a query of Spark, and its state is {duration(query.lag_ms)} old: answers are of version "
            f"{query.completed_version}, and each one has its lag.",
            "If the mirror has stopped or failed, start it again. If not, look at the faults of its driver, which name "
            "a storage that does not answer. If its batches take longer than those of the Spark query, give it more "
            "executor cores.",
        )
    elif query.lag_ms and not query.is_mirror:
        yield Fault(
            ERROR,
            "follower-late",
            subject,
            f"It is followed from its storage, which was last looked at {duration(query.lag_ms)} ago with success: "
            f"answers are of version {query.completed_version}, and each one has its possible lag.",
            "Look at the storage of the checkpoint, at its credentials, and at the log of the process that called "
            "serve_state. It continues by itself once storage answers.",
        )
    if query.status == ENDED and query.failure:
        ago = "" if query.ended_ms is None else f" {duration(max(0, overview.taken_ms - query.ended_ms))} ago"
        what = f"The query has ended{ago} with an error: {query.failure}"
        remedy = (
            "Fix the cause of the error, and start the query again: it continues after version "
            f"{query.completed_version}, and nothing is lost. Until then its last version stays readable."
        )
        yield Fault(ERROR, "query-failed", subject, what, remedy)
    if query.status != RUNNING and query.replaced_by is not None:
        what = f"Run {query.run_id} was replaced by run {query.replaced_by} on the same checkpoint."
        remedy = "Stop the older one: only the newer one may continue."
        yield Fault(WARNING, "run-replaced", subject, what, remedy)
    if query.completed_version > query.prepared_version:
        what = f"Spark has committed version {query.completed_version}, and no manifest in storage has it."
        remedy = "Start the query: it recovers the data that its hosts have stored, or names the missing files."
        yield Fault(ERROR, "version-missing", subject, what, remedy)
    if query.damages:
        yield _damaged(query, subject)
    if query.status not in AT_WORK:
        return
    recent = query.checkpoints[-RECENT_CHECKPOINTS:]
    retried = [c for c in recent if c.retried]
    if retried:
        what = f"In {len(retried)} of the last {len(recent)} checkpoints tasks have committed more than once."
        remedy = (
            "Look at Spark's UI for failed or speculative tasks of these batches: "
            + ", ".join(str(c.version - 1) for c in retried[-3:])
            + "."
        )
        yield Fault(WARNING, "retried-tasks", subject, what, remedy)
    yield from _slow_storage(recent[-RECENT_STORED:], subject)
    given_up = [g for g in query.given_up if overview.taken_ms - g.begun_ms < RECENT_MS]
    if query.status == RUNNING and given_up:
        yield Fault(
            WARNING,
            "failed-checkpoints",
            subject,
            f"{len(given_up)} checkpoints that began within the last ten minutes were given up, and made again. "
            f"The last: {for_people(given_up[-1].reason, LONGEST_REASON)}.",
            "Nothing is lost, and batches continue once the failed operation succeeds: look at the storage of the "
            "checkpoint location, and at the coordinator's log ('statestore logs').",
        )


def _silent_driver(query: Query, subject: str) -> Iterator[Fault]:
    if query.driver_ms is not None and query.driver_ms > SILENT_DRIVER_MS:
        yield Fault(
            ERROR,
            "driver-silent",
            subject,
            f"Its driver has sent no heartbeat for {duration(query.driver_ms)}. It is given up when driver_timeout is "
            "over (60 s).",
            "Look for the driver's process and its machine: was it killed, does it hang, is it cut off? If it has "
            "ended, start the program again: it continues from its checkpoint. 'statestore run' does so by itself.",
        )


def _damaged(query: Query, subject: str) -> Fault:
    more = f" And {len(query.damages) - 1} more." if len(query.damages) > 1 else ""
    spans = " and ".join(f"{first} to {last}" if first < last else f"{first}" for first, last in query.readable)
    whole = f"The versions {spans} of the state" if spans else "No version of the state"
    return Fault(
        ERROR,
        "damaged-manifest",
        subject,
        f"{query.damages[0]}{more} {whole} can be read (last completed: {query.completed_version}), and the query does "
        "not start.",
        "Put the file back from a copy of the checkpoint; 'statestore verify' reads all files and names all damage. "
        "Without a copy, rewrite_state(version=...) makes a new checkpoint of a version that can be read, and "
        "restore_savepoint one of a savepoint.",
    )


def _slow_storage(recent: Sequence[Checkpoint], subject: str) -> Iterator[Fault]:
    durations = [
        (c.steps[CHANGELOG_STEP].max_ms, c.phases.get(MANIFEST_PHASE, 0), c.duration_ms)
        for c in recent
        if c.duration_ms and CHANGELOG_STEP in c.steps
    ]
    if len(durations) < 3:
        return
    changelog, manifest = median(c for c, _, _ in durations), median(m for _, m, _ in durations)
    share = median((c + m) / whole for c, m, whole in durations)
    if changelog + manifest > SLOW_STORAGE_MS and share > 0.5:
        yield Fault(
            WARNING,
            "slow-storage",
            subject,
            f"Storage takes {min(share, 1):.0%} of a batch: its slowest changelog {changelog / 1000:.1f} s to become "
            f"durable, its manifest {manifest / 1000:.1f} s.",
            "The storage of the checkpoint location is slow: look at its disk (is it full, shared, failing?) or at the "
            "object store's latency and throttling, and at the hosts' networks.",
        )


def _late(overview: Overview, query: Query, subject: str) -> Iterator[Fault]:
    done = [c.completed_ms for c in query.checkpoints[-RECENT_CHECKPOINTS:] if c.completed_ms is not None]
    if len(done) < 3 or not query.batch_ms:
        return  # a stream without new data runs no batch
    usual = median(later - earlier for earlier, later in pairwise(done))
    limit = max(MIN_LATE_MS, LATE_INTERVALS * usual)
    if query.batch_ms > limit:
        waits_for, remedy = awaited(query)
        what = (
            f"The batch that makes version {query.completed_version + 1} runs for {query.batch_ms / 1000:.0f} s; "
            f"usually a version comes every {usual / 1000:.1f} s. {waits_for}"
        )
        yield Fault(ERROR, "checkpoint-late", subject, what, remedy)


def awaited(query: Query) -> tuple[str, str]:
    """Return the reason why a batch waits, and the remedy if that takes long."""
    if query.pending_partitions:
        return (
            f"{query.pending_partitions} partitions have not acknowledged it.",
            "Look at Spark's UI for the tasks that are left, and at the faults of hosts and storage here; 'statestore "
            "partitions' names the hosts that own them.",
        )
    if query.prepared_version > query.completed_version:
        return (
            "Its state is stored, and Spark has not committed it: the sink or a later stage is slow.",
            "Check the system that the stream writes to: does it answer, is it slow, is it locked? Spark's UI shows "
            "the stage.",
        )
    return (
        "No task has opened its state: the source or an earlier stage is slow.",
        "Check the system that the stream reads from: does it answer, is it slow? Spark's UI shows the stage, and "
        "whether its tasks have executors.",
    )


def _of_copies(query: Query, operator: Operator, subject: str) -> Iterator[Fault]:
    """Yield the faults of standby copies: those that are missing, and those that are far behind."""
    if query.status != RUNNING or not query.standby_replicas or not query.completed_version:
        return
    lacking = [p.partition for p in operator.partitions if len(p.copy_lags) < query.standby_replicas]
    if lacking:
        yield Fault(
            WARNING,
            "no-standby",
            subject,
            f"{len(lacking)} of {operator.num_partitions} partitions have fewer than {query.standby_replicas} standby "
            f"copies, among them {lacking[0]}: if their host is lost, another one must load them.",
            "Copies need hosts on other machines: have as many machines with executors as replicas and one more. New "
            "copies take as long as a load; if they stay away, look at the logs of hosts.",
        )
    behind = max((lag for p in operator.partitions for lag in p.copy_lags), default=0)
    if behind > MAX_COPY_LAG:
        yield Fault(
            WARNING,
            "standby-lag",
            subject,
            f"A standby copy is {behind} versions behind.",
            "Its host reads changelogs slower than the query writes them: look at its log, its CPU and its storage.",
        )


def _of_operator(query: Query, operator: Operator) -> Iterator[Fault]:
    subject = f"operator {operator.name} of query {query.title}"
    largest = max((p.keys or 0 for p in operator.partitions), default=0)
    if operator.skew is not None and operator.skew > MAX_SKEW and largest >= MIN_SKEWED_KEYS:
        hottest = max(operator.partitions, key=lambda p: p.keys or 0)
        yield Fault(
            WARNING,
            "skew",
            subject,
            f"Partition {hottest.partition} has {largest:,} keys, {operator.skew:,.0f} times those of the median one.",
            "Look at the hottest keys of this operator: if one key has most, its state must become smaller, or the key "
            "finer; partial_aggregation=True helps if the key only has most rows. If there are many keys, take more "
            "partitions.",
        )
    yield from _slow_partition(operator, subject)
    lagging = [p for p in operator.partitions if (p.snapshot_lag or 0) > MAX_SNAPSHOT_LAG]
    if lagging:
        worst = max(lagging, key=lambda p: p.snapshot_lag or 0)
        yield Fault(
            WARNING,
            "snapshots-lag",
            subject,
            f"{len(lagging)} partitions have no snapshot of the last {MAX_SNAPSHOT_LAG} versions; partition "
            f"{worst.partition} is {worst.snapshot_lag} versions behind.",
            "Loading them after a failure takes long: look at the logs of their hosts for uploads that fail or "
            "maintenance that does not keep up.",
        )
    yield from _of_copies(query, operator, subject)
    unowned = [p.partition for p in operator.partitions if p.owner is None]
    if query.status == RUNNING and query.completed_version and unowned:
        what = f"{len(unowned)} of {operator.num_partitions} partitions are held by no host that has answered."
        remedy = "They are loaded when a task or a client asks for them; if they stay so, look at the hosts."
        yield Fault(WARNING, "not-loaded", subject, what, remedy)


def _slow_partition(operator: Operator, subject: str) -> Iterator[Fault]:
    timed = [(ms, p) for p in operator.partitions if (ms := p.work_ms) is not None]
    if len(timed) < 3:
        return
    usual = median(ms for ms, _ in timed)
    slowest_ms, slowest = max(timed, key=lambda one: one[0])
    if slowest_ms > MIN_SKEWED_MS and slowest_ms > MAX_TIME_SKEW * usual:
        rows = "" if slowest.rows is None else f" for {slowest.rows:,} rows"
        yield Fault(
            WARNING,
            "slow-partition",
            subject,
            f"In its last batch partition {slowest.partition} took {slowest_ms / 1000:.1f} s{rows}; the median one "
            f"took {usual / 1000:.2f} s.",
            "If it is always the same partition, a few keys get most of the rows: look for them among the hottest "
            "keys, and use partial_aggregation=True or a key that spreads better. If it is always the same host, "
            "look at that machine.",
        )
