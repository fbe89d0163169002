"""Handles messages for people: descriptions of queries and hosts, and the figures of checkpoints and savepoints."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from coordinator_actor.durable.checkpoint_records import as_plain
from coordinator_actor.durable.schema_history import schema_history
from coordinator_actor.handlers.registries.registries import Registries
from coordinator_actor.query.query_state import QueryState

MOST_LOST = 100
"""At most this many queries whose drivers were lost are named, the last ones."""

REPORTED_SECONDS = 30.0
"""A driver that has loops that fail reports them every few seconds; an older report counts no more."""


class Figures:
    """Describes the coordinator and its queries as plain dicts, lists, numbers and texts."""

    def __init__(self, coordinator_id: str, registries: Registries) -> None:
        self._coordinator_id = coordinator_id
        self._registries = registries
        self._runs = registries.runs

    def describe(self) -> dict[str, Any]:
        """See ``CoordinatorPort``."""
        with self._registries.lock:
            hosts = [
                {
                    "host_id": lease.info.host_id,
                    "address": lease.info.address,
                    "node_id": lease.info.node_id,
                    "seconds_since_heartbeat": round(self._registries.clock() - lease.seen, 3),
                }
                for lease in self._registries.hosts.leases.values()
            ]
            now = self._registries.clock()
            runs = [(run, now - run.lifetime.driver_seen) for run in self._runs.by_id.values()]
            instances = self._registries.instances.describe()
            failing = [
                {"process": process, **to_builtins(loop)}
                for process, reported, loops in self._registries.failing.values()
                if now - reported < REPORTED_SECONDS
                for loop in loops
            ]
            problems = [p for of_session in self._registries.placement_problems.values() for p in of_session]
        return {
            "coordinator_id": self._coordinator_id,
            "expects_reports": self._registries.expects_reports(),
            "hosts": hosts,
            "queries": [
                {**_described(run), "failure": self._runs.failure(run.run_id), "seconds_since_driver": round(silent, 3)}
                | {"lag_seconds": round(run.lag(now), 1)}
                for run, silent in runs
            ],
            "instances": instances,
            "problems": problems,
            "failing_drivers": failing,
            "lost": [
                {"query": e.registration.name or e.registration.query_id, "run_id": e.registration.run_id, "at": e.at}
                | {"checkpoint_location": e.registration.checkpoint_location, "query_id": e.registration.query_id}
                | {"state_location": e.registration.state_location}
                for e in self._runs.lost()[-MOST_LOST:]
            ],
        }

    def checkpoint_stats(self, query: str, history_since: str = "") -> dict[str, Any]:
        """See ``CoordinatorPort``."""
        run = self._runs.running(query, or_ended=True)
        savepoints = self._runs.savepoints_of(run.run_id)
        changed = run.history.changed_since(history_since)
        return {
            "checkpoints": run.stats.snapshot(),
            "savepoints": {} if savepoints is None else savepoints.coordinator.stats.snapshot(),
            "history": [as_plain(record) for record in changed.records],
            "history_first": changed.first,
            "history_mark": changed.mark,
            "history_is_all": changed.is_all,
        }


def _described(run: QueryState) -> dict[str, Any]:
    registration, versions, pending = run.registration, run.versions, run.batch.pending
    records = run.history.records()
    began = run.spark.began(versions.completed, pending)
    return {
        "query_id": registration.query_id,
        "last_checkpoint": as_plain(records[-1]) if records else None,
        "run_id": run.run_id,
        "name": registration.name,
        "checkpoint_location": registration.checkpoint_location,
        "state_location": registration.state_location,
        "epoch": run.manifests.epoch,
        "completed_version": versions.completed,
        "prepared_version": max(versions.chain, default=0),
        "oldest_version": versions.readable[0],
        "batch_begun_ms": None if began is None else int(began * 1000),
        "pending_partitions": 0 if pending is None else pending.num_not_yet_acknowledged,
        "checkpoints": run.stats.counts(),
        "retired_by": run.lifetime.retired_by,
        "ended_at": run.lifetime.stopped_at,
        "operators": {o.name: o.num_partitions for o in registration.operators},
        "backends": {o.name: o.backend for o in registration.operators},
        "schemas": {o.name: o.schema for o in registration.operators},
        "schema_history": {o.name: schema_history(versions.chain, o.name) for o in registration.operators},
        "watermark_rose_at": run.times.rose_at,
        "input": None if run.spark.pace is None else to_builtins(run.spark.pace),
        "batch_times": None if run.times.last is None else to_builtins(run.times.last),
    }
