"""The coordinator's metrics, made of counts that it keeps anyway. No batch waits for metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from backends.storage.sending.request_counts import KINDS, RECEIVED, SENT, RequestCounts
from coordinator_actor.durable.checkpoint_records import CheckpointRecord
from coordinator_actor.metrics import MetricSink, running_totals, storage_totals
from coordinator_actor.query.query_state import QueryState

RECENT_VERSIONS = 20
"""The usual interval is computed from at most this many versions."""


@dataclass
class _Shown:
    """The metrics that were published of a run."""

    query: str
    record: int = 0
    failed: int = 0


class QueryMetrics:
    """Publishes the figures of running queries: those of checkpoints once, when they are completed; others as they are.

    A look costs a few microseconds for each query and new checkpoint, whatever partitions it has. ``clock`` is in
    seconds since 1970. Checkpoints that were completed before this process began are not counted again. For one thread.
    """

    def __init__(self, sink: MetricSink, clock: Callable[[], float]) -> None:
        self._sink = sink
        self._clock = clock
        self._began = clock()
        self._shown: dict[str, _Shown] = {}
        self._total = running_totals(sink)

    def publish(self, hosts: int, queries: int, running: Sequence[QueryState], requests: RequestCounts) -> None:
        """Publish what is new. ``requests`` are those to storage since the process began."""
        # Again and again: what was set once, at the start of the process, was not exported.
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

    def _publish(self, run: QueryState, shown: _Shown) -> None:
        sink, query, now = self._sink, shown.query, self._clock()
        sink.set("statestore_query_running", 1, query=query)
        sink.set("statestore_epoch", run.manifests.epoch, query=query)
        sink.set("statestore_completed_version", run.versions.completed, query=query)
        began = run.spark.began(run.versions.completed, run.batch.pending)
        sink.set("statestore_batch_seconds", 0 if began is None else max(0.0, now - began), query=query)
        watermark_ms = run.times.watermark_ms
        if watermark_ms:
            sink.set("statestore_event_time_lag_seconds", now - watermark_ms / 1000, query=query)
        failed = run.stats.counts()["failed"]
        sink.add("statestore_checkpoints_failed_total", failed - shown.failed, query=query)
        shown.failed = failed
        records = run.history.records()
        if not records:
            return
        for record in records:
            if record.id > shown.record:
                shown.record = record.id
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
        sink.add("statestore_checkpoints_total", 1, query=query)
        for name, more in (
            ("statestore_retried_tasks_total", record.retried),
            ("statestore_checkpoint_delta_bytes_total", record.delta_bytes),
            ("statestore_rows_total", record.rows),
            ("statestore_keys_updated_total", record.updated),
            ("statestore_keys_removed_total", record.removed),
            ("statestore_late_rows_total", record.late),
            ("statestore_duplicate_rows_total", record.duplicates),
        ):
            sink.add(name, more, query=query)
        for kind in KINDS.values():
            sink.add("statestore_query_storage_requests_total", record.storage.get(kind, 0), query=query, kind=kind)
        for direction, name in (("sent", SENT), ("received", RECEIVED)):
            more = record.storage.get(name, 0)
            sink.add("statestore_query_storage_bytes_total", more, query=query, direction=direction)
        if record.duration_ms is not None:
            sink.observe("statestore_checkpoint_duration_seconds", record.duration_ms / 1000, query=query)
        for step, time in record.steps.items():
            sink.add("statestore_checkpoint_step_seconds_total", time.sum_ms / 1000, query=query, step=step)
        for phase, ms in record.phases.items():
            sink.add("statestore_checkpoint_phase_seconds_total", ms / 1000, query=query, phase=phase)
