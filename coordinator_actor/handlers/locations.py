"""Handles messages that ask where state is: those of query clients, and of hosts that ask for clients."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from msgspec import to_builtins

from backends.exceptions import VersionNotFoundError
from coordinator_actor.durable.manifests import schema_history
from coordinator_actor.durable.records import as_plain
from coordinator_actor.exceptions import QueryEndedError, UnknownOperatorError, UnknownRunError, WrongOperatorError
from coordinator_actor.handlers.owners import assign_owners
from coordinator_actor.handlers.registries import Registries
from coordinator_actor.messages import KvStateLocationOracle, LookedUp, OperatorLocation, RunningOperator
from coordinator_actor.run.state import QueryState


class Locations:
    """Finds the owners of operators' partitions.

    Only ``look_up`` takes the lock of a run: that may be held during requests to storage, and clients must not wait for
    it.
    """

    def __init__(self, registries: Registries) -> None:
        self._registries = registries
        self._runs = registries.runs

    def locate(self, operator: str, query: str | None = None) -> OperatorLocation:
        served = self._runs.served()
        named = [run for run in served if query is None or run.is_named(query)]
        runs = [run for run in named if run.operator(operator) is not None]
        runs = _meant(runs)
        if not runs:
            is_final = query is not None and any(run.lifetime.is_current for run in named)
            if not is_final:
                self._require_not_ended(operator, query, served)
            if self._registries.expects_reports() and not is_final:
                age = self._registries.clock() - self._registries.started
                raise UnknownRunError(
                    f"No query with an operator {operator!r} has been reported yet to this coordinator, "
                    f"which was started {age:.1f} s ago; ask again."
                )
            exist = ", ".join(sorted({f"{o.name!r}" for r in named for o in r.registration.operators})) or "none"
            where = "No running query" if query is None else f"No running query {query!r}"
            message = f"{where} has an operator {operator!r}; operators that exist: {exist}."
            raise WrongOperatorError(message) if is_final else UnknownOperatorError(message)
        if len(runs) > 1:
            names = ", ".join(
                f"{r.registration.name or 'unnamed'} ({r.registration.query_id}, run {r.run_id})" for r in runs
            )
            raise WrongOperatorError(
                f"Several running queries have an operator {operator!r}; say which with query=, by its name, query id "
                f"or run id: {names}."
            )
        run = runs[0]
        spec = run.operator(operator)
        assert spec is not None
        assignment = assign_owners(self._registries, run)
        return OperatorLocation(
            run.registration.query_id,
            run.run_id,
            run.registration.name,
            spec,
            run.registration.key_groups,
            run.versions.completed,
            tuple(assignment.owner(operator, p) for p in range(spec.num_partitions)),
        )

    def look_up(self, operator: str, query: str, by: str, batch_id: int) -> LookedUp:
        # May wait for storage, unlike the other messages here. A batch of another query asks.
        location = self.locate(operator, query)
        run = self._runs.get(location.run_id)
        run.lifetime.require_served()
        try:
            record = run.looked_up.resolve(by, batch_id, self._registries.clock(), run.lock)
        except VersionNotFoundError:
            run.manifests.epochs.check()  # a replaced coordinator does not know the versions of its successor
            raise
        return LookedUp(location, record.version, record.at_ms)

    def _require_not_ended(self, operator: str, query: str | None, running: Sequence[QueryState]) -> None:
        """Raise ``QueryEndedError`` if the last query with that operator has ended and does not run again."""
        again = {run.registration.state_location for run in running}
        ended = [
            e
            for e in self._runs.ended()
            if e.has(operator, query) and (e.registration.state_location not in again or query == e.registration.run_id)
        ]
        if not ended:
            return
        last = max(ended, key=lambda e: e.at)
        at = datetime.fromtimestamp(last.at, timezone.utc).isoformat(sep=" ", timespec="seconds")
        of = last.registration
        raise QueryEndedError(
            f"Query {of.name or 'unnamed'} ({of.query_id}, run {of.run_id}), which had the operator {operator!r}, "
            f"ended at {at} ({last.why}). Start it again, or read its state from the checkpoint with read_state."
        )

    def operators(self) -> tuple[RunningOperator, ...]:
        served = self._runs.served()
        having: dict[str, list[QueryState]] = {}
        for run in served:
            for operator in run.registration.operators:
                having.setdefault(operator.name, []).append(run)
        meant = {name: {run.run_id for run in _meant(runs)} for name, runs in having.items()}
        return tuple(
            RunningOperator(
                run.registration.query_id,
                run.run_id,
                run.registration.name,
                operator,
                run.registration.key_groups,
                run.versions.readable[0],
                run.versions.completed,
                run.lifetime.stopped_at is not None,
            )
            for run in served
            for operator in run.registration.operators
            if run.run_id in meant[operator.name]
        )

    def get_kv_state_location_oracle(self, job_id: str) -> KvStateLocationOracle | None:
        served = self._runs.served()
        location = next((r.registration.state_location for r in served if r.run_id == job_id), job_id)
        runs = _meant([r for r in served if location in (r.registration.state_location, r.registration.query_id)])
        if not runs:
            return None
        run = runs[0]
        assignment = assign_owners(self._registries, run)
        registration = run.registration
        owners = {
            name: [assignment.owner(name, p) for p in range(len(places))] for name, places in assignment.owners.items()
        }
        return KvStateLocationOracle.of(
            registration.query_id,
            run.run_id,
            registration.name,
            registration.key_groups,
            run.versions.completed,
            owners,
            registration.state_location,
        )


def _meant(having: Sequence[QueryState]) -> list[QueryState]:
    """Return the runs that a caller means by an operator name that they all have.

    Running queries come first. Of ended ones the last counts, for example if one is started repeatedly.
    """
    running = [run for run in having if run.lifetime.is_current]
    return running or sorted(having, key=lambda run: run.lifetime.stopped_at or 0.0)[-1:]


# Handles messages for people: descriptions of queries and hosts, and the figures of checkpoints and savepoints.


MAX_LOST = 100
"""At most this many queries with lost drivers are named, the last ones."""

REPORTED_SECONDS = 30.0
"""A driver with failing loops reports them every few seconds; an older report no longer counts."""


class Figures:
    """Describes the coordinator and its queries as plain dicts, lists, numbers and strings."""

    def __init__(self, coordinator_id: str, registries: Registries) -> None:
        self._coordinator_id = coordinator_id
        self._registries = registries
        self._runs = registries.runs

    def describe(self) -> dict[str, Any]:
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
            instances = self._registries.instances.describe_instances()
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
                for e in self._runs.lost()[-MAX_LOST:]
            ],
        }

    def checkpoint_stats(self, query: str, history_since: str = "") -> dict[str, Any]:
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
    registration, versions, pending = run.registration, run.versions, run.machine.pending
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
        "watermark_rose_at": run.spark_logs.rose_at,
        "input": None if run.spark.pace is None else to_builtins(run.spark.pace),
        "batch_times": None if run.spark_logs.last_times is None else to_builtins(run.spark_logs.last_times),
    }
