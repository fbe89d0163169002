"""The table of all metrics, and their sinks. Code, reference page, dashboards and alerts follow the table.

Names follow Prometheus: base units (seconds, bytes), ``_total`` for counters. Ray adds ``ray_`` before each name, and
its own labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

from backends.host_memory import BoundedDict
from backends.storage.requests import KINDS, RECEIVED, SENT, RequestCounts
from coordinator_actor.durable.records import CheckpointRecord
from coordinator_actor.run.query_state import QueryState

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
COORDINATOR, HOST, DRIVER = "coordinator", "host", "driver"

DURATION_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The upper bounds of histograms of seconds."""
REQUEST_DURATION_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, *DURATION_BOUNDS[:11])
"""The same for requests of query clients. ``+Inf`` follows them."""

OPERATOR_FIGURES = {
    "numRowsTotal": "Pairs of all column families after the batch.",
    "numRowsUpdated": "Keys that the batch has written.",
    "numRowsRemoved": "Keys that the batch has removed.",
    "numRowsDroppedByWatermark": "Rows of the batch that were late.",
    "commitTimeMs": "Milliseconds of commits, over all partitions.",
    "memoryUsedBytes": "Memory of the hosts for the operator.",
    "numShufflePartitions": "Partitions of the operator.",
    "numStateStoreInstances": "Partitions that have reported the batch.",
}
"""The figures of an operator in its last batch, by their names in Spark's ``StateOperatorProgress``."""


@dataclass(frozen=True)
class Metric:
    """One metric. ``role`` names the publishing process; labels are ``namespace`` and those of ``labels``."""

    name: str
    kind: str
    role: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        suffix = "_total" if self.kind == COUNTER and not self.name.endswith("_total") else ""
        return f"ray_{self.name}{suffix}"


_TABLE = """
coordinator gauge statestore_hosts: State store hosts that are alive.
coordinator counter statestore_lost_hosts_total{reason}:
    Hosts that were given up: refused (the process is dead), silent (the machine does not answer), node_dead (says Ray),
    no_heartbeat.
coordinator gauge statestore_queries: Streaming queries that are registered.
coordinator gauge statestore_coordinator_start_timestamp_seconds:
    When this process of the coordinator began, in seconds since 1970: a change is a restart.
coordinator histogram statestore_acknowledge_seconds: Time to take acknowledgements.
coordinator counter statestore_prepared_versions_total: Versions whose manifest was written.
coordinator gauge statestore_query_running{query}: 1 while the query runs, 0 once it has ended.
coordinator gauge statestore_freshness_seconds{query}:
    Age of the newest completed version: the time since its batch began to read its rows.
coordinator gauge statestore_event_time_lag_seconds{query}:
    How far the watermark of the newest batch is behind the clock. Queries without a watermark have none.
coordinator gauge statestore_last_checkpoint_timestamp_seconds{query}:
    When the newest version was completed, in seconds since 1970.
coordinator gauge statestore_batch_seconds{query}:
    How long Spark has been at the batch that runs, its source and its sink included; 0 between batches.
coordinator gauge statestore_usual_interval_seconds{query}: The median time between the last completed versions.
coordinator gauge statestore_epoch{query}: The epoch of the run: it grows with each restart.
coordinator gauge statestore_completed_version{query}: The newest completed version.
coordinator gauge statestore_standby_lag_versions{query}:
    How many versions the standby copy is behind that is most behind. Queries without standby replicas have none.
coordinator gauge statestore_partitions_without_standby{query}:
    Partitions with fewer standby copies than the query asks for. Queries without standby replicas have none.
coordinator histogram statestore_checkpoint_duration_seconds{query}:
    Time of a checkpoint, from the first open to the durable manifest.
coordinator counter statestore_checkpoint_step_seconds_total{query, step}:
    Time of tasks by step of their work (such as get, logic, put, changelog, acknowledge), over all tasks.
coordinator counter statestore_checkpoint_phase_seconds_total{query, phase}:
    Time of checkpoints by phase: tasks, acknowledge, manifest, commit.
coordinator counter statestore_checkpoints_total{query}: Completed checkpoints.
coordinator counter statestore_checkpoints_failed_total{query}: Checkpoints that were given up.
coordinator counter statestore_retried_tasks_total{query}:
    Partitions that were acknowledged again: tasks that were retried, speculated, or run again.
coordinator counter statestore_checkpoint_delta_bytes_total{query}: Bytes of the changelogs that were stored.
coordinator gauge statestore_checkpoint_full_bytes{query}:
    Bytes of all files that the newest measured version is loaded from.
coordinator counter statestore_query_storage_requests_total{query, kind}:
    Requests to checkpoint storage, of hosts and coordinator, by kind: put, get, head, list, delete.
coordinator counter statestore_query_storage_bytes_total{query, direction}:
    Bytes of files that hosts and coordinator have sent to checkpoint storage, and received.
coordinator counter statestore_rows_total{query}: Rows that operators have taken.
coordinator counter statestore_keys_updated_total{query}: Keys that were written.
coordinator counter statestore_keys_removed_total{query}: Keys that were removed.
coordinator counter statestore_late_rows_total{query}: Rows that the watermark has dropped.
coordinator counter statestore_duplicate_rows_total{query}: Rows dropped as duplicates.
coordinator counter statestore_storage_requests_total{host, kind}:
    Requests to checkpoint storage, each attempt counted: put, get, head, list, delete. Hosts have it, too; that of the
    coordinator has an empty host.
coordinator counter statestore_storage_failures_total{host, kind}:
    Requests to checkpoint storage that were answered with an error, or not at all. Hosts have it, too.
coordinator counter statestore_storage_request_seconds_bucket{host, kind, le}:
    Requests to checkpoint storage that took at most le seconds. Hosts have it, too.
host gauge statestore_host_restarts{host}: How many times Ray has started this host again.
host counter statestore_loads_total{host}: Partitions that were loaded from storage.
host counter statestore_commits_total{host}: Commits of partitions.
host counter statestore_snapshots_total{host}: Snapshots that were stored.
host counter statestore_keys_read_total{host}: Keys that tasks have read.
host counter statestore_keys_written_total{host}: Keys that tasks have written.
host gauge statestore_loads_under_way{host}: Partitions that are being loaded now.
host gauge statestore_waiting_commits{host}: Commits that wait for room in host_memory.
host counter statestore_disk_evictions_total{host}: Partitions that were evicted because the local disk was full.
host counter statestore_disk_evicted_bytes_total{host}: Bytes of their local files.
host counter statestore_disk_reread_bytes_total{host}: Bytes that were read from storage because they were evicted.
host gauge statestore_memory_bytes{host, kind}: Memory that a host holds, by what holds it.
host gauge statestore_memory_limit_bytes{host}: The option host_memory.
host gauge statestore_keys{host, query, operator, partition}:
    Keys that a host holds. Operators of more than 100 partitions have one value a host, partition='all'.
host gauge statestore_partition_memory_bytes{host, query, operator, partition}:
    Memory of partitions, as statestore_keys.
host gauge statestore_snapshot_lag_versions{host, query, operator}:
    How many versions the newest snapshot of a partition is behind, in the partition that is most behind.
host counter statestore_requests_total{host, operator, verb}: Queries of state that were answered.
host counter statestore_request_failures_total{host, operator, verb}: Queries of state that failed.
host counter statestore_request_seconds_bucket{host, operator, verb, le}:
    Queries of state that took at most le seconds: the buckets of a histogram, for histogram_quantile.
driver gauge statestore_input_rows_per_second{query}: Spark's inputRowsPerSecond.
driver gauge statestore_processed_rows_per_second{query}: Spark's processedRowsPerSecond.
driver gauge statestore_spark_duration_seconds{query, step}:
    Spark's durationMs of the last batch, by step (triggerExecution, addBatch, walCommit ...).
driver gauge statestore_largest_partition_keys{query, operator}:
    Keys of the partition that has most, in the last batch, however many partitions the operator has.
driver gauge statestore_median_partition_keys{query, operator}:
    Keys of the median partition, in the last batch, however many partitions the operator has.
driver gauge statestore_operator_customMetrics{query, operator, figure}:
    The customMetrics of an operator in its last batch, by Spark's name where Spark has the figure.
"""
"""One record per metric: the process that publishes it, kind, name, labels, and its help text."""
_RECORD = re.compile(r"(\w+) (\w+) (\w+)(?:\{(.+)\})?: (.+)")


def _declared() -> Iterator[Metric]:
    for record in re.sub(r"\n\s+", " ", _TABLE).strip().splitlines():
        match = _RECORD.fullmatch(record)
        assert match is not None, record
        role, kind, name, labels, help_text = match.groups()
        yield Metric(name, kind, role, help_text, tuple(labels.split(", ")) if labels else ())
    for name, help_text in OPERATOR_FIGURES.items():
        yield Metric(f"statestore_operator_{name}", GAUGE, DRIVER, help_text, ("query", "operator"))


METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _declared()}


class MetricSink(Protocol):
    """Takes the values of metrics. The label ``namespace``, and ``host`` in a host, are the sink's own."""

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""

    def increase(self, name: str, more: float, **labels: str) -> None:
        """Increase a counter; nothing, if ``more`` is 0."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Count a value in a histogram."""


def storage_totals(requests: RequestCounts, reached: Callable[..., None], **labels: str) -> None:
    """Publish a process's requests to checkpoint storage with ``reached``."""
    for kind, count in requests.read().items():
        reached("statestore_storage_requests_total", count, **labels, kind=kind)
    for kind, count in requests.failures().items():
        reached("statestore_storage_failures_total", count, **labels, kind=kind)
    for kind, took in requests.durations().items():
        for bound, count in zip((*took.bounds, None), (*took.cumulative, took.count), strict=True):
            le = "+Inf" if bound is None else f"{bound:g}"
            reached("statestore_storage_request_seconds_bucket", count, **labels, kind=kind, le=le)


def running_totals(sink: MetricSink) -> Callable[..., None]:
    """Return a function ``reached(name, total, **labels)`` for counters with a known running total.

    A total that is lower than before has restarted at 0.
    """
    before: dict[tuple[object, ...], float] = {}

    def reached(name: str, total: float, **labels: str) -> None:
        key = (name, *sorted(labels.items()))
        last_total = before.get(key, 0.0)
        sink.increase(name, total - last_total if total >= last_total else total, **labels)
        before[key] = total

    return reached


# The coordinator's metrics, derived from counts that it keeps anyway. No batch waits for metrics.


RECENT_VERSIONS = 20
"""The usual interval is computed from at most this many versions."""
MAX_COUNTED_QUERIES = 10_000
"""The last counted checkpoint is known of at most this many queries."""


@dataclass
class _Shown:
    """The last published figures of a run."""

    query: str
    failed: int = 0


class QueryMetrics:
    """Publishes the figures of running queries: of a checkpoint once, after its completion, others at each call.

    A call costs a few microseconds for each query and new checkpoint, and some more for the partitions of queries with
    standby replicas. ``clock`` is in seconds since 1970. Checkpoints that were completed before this process began are
    not counted again. For one thread.
    """

    def __init__(self, sink: MetricSink, clock: Callable[[], float]) -> None:
        self._sink = sink
        self._clock = clock
        self._began = clock()
        self._shown: dict[str, _Shown] = {}
        # The newest counted checkpoint by query id. The history of a run has the checkpoints of earlier runs as well,
        # which this process may have counted.
        self._counted: BoundedDict[str, int] = BoundedDict(MAX_COUNTED_QUERIES)
        self._total = running_totals(sink)

    def publish(self, hosts: int, queries: int, running: Sequence[QueryState], requests: RequestCounts) -> None:
        """Publish what is new. ``requests`` are those to storage since the process began."""
        # Repeatedly: a value that was set once, at the start of the process, was not exported.
        self._sink.set("statestore_coordinator_start_timestamp_seconds", self._began)
        self._sink.set("statestore_hosts", hosts)
        self._sink.set("statestore_queries", queries)
        storage_totals(requests, self._total, host="")
        names = {run.run_id: run.registration.name or run.registration.query_id for run in running}
        for run_id in self._shown.keys() - names:
            ended = self._shown.pop(run_id)
            if ended.query not in names.values():
                self._sink.set("statestore_query_running", 0, query=ended.query)
        for run in running:
            self._publish(run, self._shown.setdefault(run.run_id, _Shown(names[run.run_id])))

    def publish_losses(self, lost_hosts: Mapping[str, int]) -> None:
        """Publish how many hosts were lost since the process began, by the reason."""
        for reason, count in lost_hosts.items():
            self._total("statestore_lost_hosts_total", count, reason=reason)

    def _publish(self, run: QueryState, shown: _Shown) -> None:
        sink, query, now = self._sink, shown.query, self._clock()
        sink.set("statestore_query_running", 1, query=query)
        sink.set("statestore_epoch", run.manifests.epoch, query=query)
        sink.set("statestore_completed_version", run.versions.completed, query=query)
        began = run.spark.began(run.versions.completed, run.machine.pending)
        sink.set("statestore_batch_seconds", 0 if began is None else max(0.0, now - began), query=query)
        watermark_ms = run.spark_logs.watermark_ms
        if watermark_ms:
            sink.set("statestore_event_time_lag_seconds", now - watermark_ms / 1000, query=query)
        replicas, lags = run.registration.standby_replicas, [lag for lags in run.copy_lags.values() for lag in lags]
        if replicas:
            sink.set(
                "statestore_standby_lag_versions", max((max(lag, default=0) for lag in lags), default=0), query=query
            )
            sink.set("statestore_partitions_without_standby", sum(len(lag) < replicas for lag in lags), query=query)
        failed = run.stats.counts()["failed"]
        sink.increase("statestore_checkpoints_failed_total", failed - shown.failed, query=query)
        shown.failed = failed
        records = run.history.records()
        if not records:
            return
        query_id = run.registration.query_id
        for record in records:
            if record.id > self._counted.get(query_id, 0):
                self._counted[query_id] = record.id
                if (record.completed_ms or 0) >= self._began * 1000:
                    self._count(query, record)
        newest = records[-1]
        done = [r.completed_ms / 1000 for r in records[-RECENT_VERSIONS:] if r.completed_ms is not None]
        if done:
            opened = done[-1] if newest.begun_ms is None else newest.begun_ms / 1000
            begun = min(opened, run.spark.began_of(newest.version) or opened)
            sink.set("statestore_last_checkpoint_timestamp_seconds", done[-1], query=query)
            sink.set("statestore_freshness_seconds", max(0.0, now - begun), query=query)
        if len(done) > 2:
            usual = median(later - earlier for earlier, later in pairwise(done))
            sink.set("statestore_usual_interval_seconds", usual, query=query)
        measured = next((r.full_bytes for r in reversed(records) if r.full_bytes is not None), None)
        if measured is not None:
            sink.set("statestore_checkpoint_full_bytes", measured, query=query)

    def _count(self, query: str, record: CheckpointRecord) -> None:
        sink = self._sink
        sink.increase("statestore_checkpoints_total", 1, query=query)
        for name, more in (
            ("statestore_retried_tasks_total", record.retried),
            ("statestore_checkpoint_delta_bytes_total", record.delta_bytes),
            ("statestore_rows_total", record.rows),
            ("statestore_keys_updated_total", record.updated),
            ("statestore_keys_removed_total", record.removed),
            ("statestore_late_rows_total", record.late),
            ("statestore_duplicate_rows_total", record.duplicates),
        ):
            sink.increase(name, more, query=query)
        for kind in KINDS.values():
            sink.increase(
                "statestore_query_storage_requests_total", record.storage.get(kind, 0), query=query, kind=kind
            )
        for direction, name in (("sent", SENT), ("received", RECEIVED)):
            more = record.storage.get(name, 0)
            sink.increase("statestore_query_storage_bytes_total", more, query=query, direction=direction)
        if record.duration_ms is not None:
            sink.observe("statestore_checkpoint_duration_seconds", record.duration_ms / 1000, query=query)
        for step, time in record.steps.items():
            sink.increase("statestore_checkpoint_step_seconds_total", time.sum_ms / 1000, query=query, step=step)
        for phase, ms in record.phases.items():
            sink.increase("statestore_checkpoint_phase_seconds_total", ms / 1000, query=query, phase=phase)
