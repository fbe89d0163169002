"""Assigns the partitions of a run to live hosts, and answers where state is. ``run/owners.py`` decides who owns what.

A coordinator that was just started knows no owners of earlier runs. For a while it relies on the partitions that hosts
report, and leaves the other partitions without an owner: the host that reports first must not get the partitions that
other hosts hold. Only a partition that a task waits for is assigned to a known host.

A new owner loads its partitions before tasks ask for them (``HostOrders.warm_up``): an executor with few cores runs its
tasks one after the other. A partition whose owner is lost gets another one at once. One whose owner is alive moves
warm: the new owner loads a copy while the old one keeps serving, and takes over between two batches. Before that, its
copy is nearly complete, and the old owner answers nothing without a look at Spark's log (``HostOrders.giving``).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from msgspec import to_builtins

from backends import spans
from backends.conf import StateStoreId, StateStoreProviderId
from backends.encoding.operator_schema import ROLLING_KIND
from backends.exceptions import VersionNotFoundError
from backends.formats.manifest import ChangelogRef
from coordinator_actor import exceptions
from coordinator_actor.checkpoints.pending_checkpoint import TaskKey
from coordinator_actor.durable.manifests import schema_history
from coordinator_actor.durable.records import as_plain
from coordinator_actor.feature_views import FeatureView
from coordinator_actor.handlers.registries import Handler, Registries
from coordinator_actor.messages import (
    NOBODY,
    HandOver,
    KvStateLocationOracle,
    LocatedView,
    LookedUp,
    OperatorLocation,
    OperatorSpec,
    RunningOperator,
    RunningView,
    WarmUp,
)
from coordinator_actor.run.owners import WARM_VERSIONS, Assignment, SessionHosts
from coordinator_actor.run.query_state import QueryState

log = logging.getLogger(__name__)


def assign_owners(
    registries: Registries,
    run: QueryState,
    *,
    moves: bool = False,
    rebalance: bool = False,
    waiting: Collection[TaskKey] = (),
) -> Assignment:
    """Return the assignment of a run, a new one if hosts have come or gone. Waits for no storage.

    With ``moves``, partitions whose new owners are warm move away from living hosts; with ``rebalance`` all planned
    moves happen now, as far as they are safe. Both are for moments between two batches, and nothing moves while hosts
    still report. Tasks wait for the partitions in ``waiting``: these get owners even while hosts still report. Raises
    ``UnknownHostError`` if the session has no live host.
    """
    with run.assignment.lock:
        began, before = spans.now(), run.assignment.current
        after = _assign_owners(registries, run, moves=moves, rebalance=rebalance, waiting=waiting)
        if spans.is_on() and after is not before:
            _trace(run, began, before, after)
        return after


def _trace(run: QueryState, began: int, before: Assignment | None, after: Assignment) -> None:
    """Make the span of a new assignment, in the trace of the current or next batch."""
    moved = 0 if before is None else sum(before.find(*task) != after.find(*task) for task in run.tasks())
    trace = spans.batch(run.run_id, run.versions.completed + 1)
    planned = len(run.assignment.planned)
    spans.finished("coordinator.assign", trace, began, moved=moved, planned=planned, num_hosts=len(after.hosts))


def _assign_owners(
    registries: Registries, run: QueryState, *, moves: bool, rebalance: bool, waiting: Collection[TaskKey]
) -> Assignment:
    ownership, before, completed = run.assignment, run.assignment.current, run.versions.completed
    with registries.lock:
        hosts, session_id = registries.hosts, run.registration.session_id
        is_reporting = ownership.awaits_reports and registries.expects_reports()
        ready: Mapping[TaskKey, str] = {}
        hand_overs = {h: lease.hand_over for h, lease in hosts.leases.items()}
        if moves and not is_reporting and ownership.planned:
            ready = ownership.ready_moves(hand_overs, completed)
        is_valid = ownership.is_valid(hosts.generation, is_reporting=is_reporting, rebalance=rebalance, waiting=waiting)
        if before is not None and is_valid and not ready:
            return before
        infos = {host_id: hosts.leases[host_id].info for host_id in hosts.nodes_of_session(session_id)}
        if not infos:
            raise exceptions.UnknownHostError(f"No state store host of session {session_id} is alive.")
        reported = hosts.reported(run.run_id)
        session = SessionHosts(hosts.generation, infos, hosts.staying(session_id), reported, hand_overs)
    after = ownership.assign(
        session, ready, completed, run.manifests.epoch, is_reporting=is_reporting, rebalance=rebalance, waiting=waiting
    )
    location = run.registration.checkpoint_location
    with registries.lock:
        for task in run.tasks():
            owner, former = after.find(*task), None if before is None else before.find(*task)
            if owner is not None and (former is None or former.host_id != owner.host_id):
                instance = StateStoreProviderId(StateStoreId(location, *task), run.run_id)
                registries.instances.report_active_instance(instance, owner.ip, owner.host_id)
    return after


def plan_moves(registries: Registries, run: QueryState) -> None:
    """Take new and leaving hosts into account, and make moves if no batch is under way.

    Does not wait: a thread that works on the run may wait for storage. Plans nothing before all partitions have owners.
    """
    ownership = run.assignment
    if not ownership.is_made:
        return
    note_copies(registries, run)
    with suppress(exceptions.UnknownHostError):  # the last host is just leaving
        if not _spread(registries, run):
            assign_owners(registries, run)
        if ownership.planned:
            with run.lock_if_free() as is_free:
                before = ownership.current
                is_idle = run.lifetime.is_current and run.machine.highest_opened < run.versions.completed
                if is_free and is_idle and assign_owners(registries, run, moves=True) is not before:
                    run.announce()


def _spread(registries: Registries, run: QueryState) -> bool:
    """Give all hosts their share of a run that no host holds anything of yet: an immediate move loses nothing.

    Hosts may come between the registration of a run and its first batch. Return whether that was done.
    """
    with registries.lock:
        has_copies = any(
            warm
            for lease in registries.hosts.leases.values()
            for warm in lease.hand_over.warm.get(run.run_id, {}).values()
        )
    if has_copies or run.assignment.awaits_reports:
        return False
    with run.lock_if_free() as is_free:
        is_untouched = is_free and run.machine.highest_opened < 0
        if is_untouched:
            assign_owners(registries, run, rebalance=True)
        return is_untouched


def warm_up(run: QueryState, host_id: str, hand_over: HandOver) -> WarmUp | None:
    """Return the partitions of a run that a host must load before tasks ask for them. Needs no lock of the run.

    ``hand_over`` is the last report of the host: the files that its copies lack are named. Standby copies that are
    complete are left out. Until the host has dropped all files from before an exchange, no copy counts as complete.
    """
    completed, new, current = run.versions.completed, run.assignment.new_owners, run.assignment.current
    wanted = dict.fromkeys(task for task, receiver in run.assignment.planned.items() if receiver == host_id)
    if completed and new.version == completed:
        wanted.update(dict.fromkeys(sorted(new.of_host.get(host_id, ()))))
    warm = hand_over.warm.get(run.run_id, {})
    if completed and current is not None and (copies := current.copies_of_host.get(host_id)):
        is_exchanged = hand_over.exchanged.get(run.run_id, "") == run.last_exchange
        for operator, partitions in copies.items():
            versions = warm.get(operator, {}) if is_exchanged else {}
            wanted.update(dict.fromkeys((operator, p) for p in partitions if versions.get(p) != completed))
    if not wanted:
        return None
    heads: dict[str, dict[int, str | None]] = {}
    changelogs: dict[str, dict[int, tuple[ChangelogRef, ...]]] = {}
    snapshots: dict[str, dict[int, int]] = {}
    for operator, partition in wanted:
        heads.setdefault(operator, {})[partition] = run.versions.head(completed, operator, partition)
        copied = warm.get(operator, {}).get(partition)
        if copied is not None and completed - WARM_VERSIONS <= copied < completed:
            files = run.versions.changelogs(operator, partition, copied)
            if files:
                changelogs.setdefault(operator, {})[partition] = files
        if (snapshot := run.snapshot_lag.latest((operator, partition))) is not None:
            snapshots.setdefault(operator, {})[partition] = snapshot
    created_ms = run.versions.created_ms(completed)
    return WarmUp(run.registration, run.manifests.epoch, completed, heads, changelogs, snapshots, created_ms)


def copied_to(run: QueryState, host_id: str) -> Mapping[str, list[int]] | None:
    """Return all partitions of a run that a host keeps standby copies of, by operator; None if there are none."""
    current = run.assignment.current
    return None if current is None else current.copies_of_host.get(host_id)


def note_copies(registries: Registries, run: QueryState) -> None:
    """Record for people how many versions each standby copy of a run is behind. Grows with the partitions."""
    current, completed = run.assignment.current, run.versions.completed
    replicas = run.registration.standby_replicas
    if current is None or not replicas:
        return
    with registries.lock:
        warm = {h: lease.hand_over.warm.get(run.run_id, {}) for h, lease in registries.hosts.leases.items()}
    lags: dict[str, list[list[int]]] = {}
    for operator, places in current.owners.items():
        lags[operator] = of_operator = []
        for partition, place in enumerate(places):
            standbys = () if place == NOBODY else current.standbys.get(current.hosts[place].host_id, ())
            versions = (warm.get(h, {}).get(operator, {}).get(partition) for h in standbys)
            of_operator.append([max(0, completed - version) for version in versions if version is not None])
    run.copy_lags = lags


def gives(run: QueryState, host_id: str) -> bool:
    """Return whether partitions of a host are to move, or have moved and the host knows no later version yet."""
    ownership, announced = run.assignment, run.announcement_to(host_id)
    with ownership.lock:
        current = ownership.current
        if announced is not None and ownership.givers.get(host_id, -1) >= announced.version:
            return True
        return current is not None and any(
            owner.host_id == host_id for task in ownership.planned if (owner := current.find(*task)) is not None
        )


def needed_by(run: QueryState) -> set[str]:
    """Return the hosts that own partitions of a run, or that tasks of the batch under way may ask for owners.

    These tasks know the hosts of the time when the batch began. Needs no lock of the run.
    """
    with run.assignment.lock:
        current, givers = run.assignment.current, dict(run.assignment.givers)
    owning = set() if current is None else {host_id for host_id, tasks in current.of_host.items() if tasks}
    completed = run.versions.completed
    asked = {host_id for host_id, at in givers.items() if at >= completed}
    return owning | asked if run.machine.highest_opened >= completed else owning


class Locations(Handler):
    """Finds the owners of operators' partitions.

    Only ``look_up`` takes the lock of a run: that may be held during requests to storage, and clients must not wait for
    it.
    """

    def locate(self, operator: str, query: str | None = None, version: int | None = None) -> OperatorLocation:
        served = self._runs.served()
        named = [run for run in served if query is None or run.registration.is_named(query)]
        runs = _meant([run for run in named if run.operator(operator) is not None])
        if not runs:
            is_final = query is not None and any(run.lifetime.is_current for run in named)
            if not is_final:
                self._require_not_ended(operator, query, served)
            if self._registries.expects_reports() and not is_final:
                age = self._registries.clock() - self._registries.started
                raise exceptions.UnknownRunError(
                    f"No query with an operator {operator!r} has been reported yet to this coordinator, "
                    f"which was started {age:.1f} s ago; ask again."
                )
            exist = exceptions.listed_names(operator, (o.name for r in named for o in r.registration.operators))
            where = "No running query" if query is None else f"No running query {query!r}"
            message = f"{where} has an operator {operator!r}; operators that exist: {exist}"
            raise exceptions.WrongOperatorError(message) if is_final else exceptions.UnknownOperatorError(message)
        if len(runs) > 1:
            names = ", ".join(run.registration.title for run in runs)
            raise exceptions.WrongOperatorError(
                f"Several running queries have an operator {operator!r}; say which with query=, by its name, query id "
                f"or run id: {names}."
            )
        run = runs[0]
        spec = run.operator(operator)
        assert spec is not None
        assignment = assign_owners(self._registries, run)
        owners = tuple(assignment.owner(operator, p) for p in range(spec.num_partitions))
        completed = run.versions.completed
        manifest = run.versions.chain.get(completed if version is None else version)
        return OperatorLocation(
            run.registration.query_id,
            run.run_id,
            run.registration.name,
            spec,
            run.registration.key_groups,
            completed,
            owners,
            _watermark_of(run, spec),
            assignment.standbys_of(owners),
            "" if manifest is None else manifest.run_id,
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
        raise exceptions.QueryEndedError(
            f"Query {last.registration.title}, which had the operator {operator!r}, ended at {at} ({last.why}). Start "
            "it again, or read its state from the checkpoint with read_state."
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
            assignment.standbys_of(owner for of_operator in owners.values() for owner in of_operator),
        )


def _watermark_of(run: QueryState, spec: OperatorSpec) -> int | None:
    """Return the watermark of the completed version if clients may ask as of it. None if storage does not have it."""
    if spec.kind != ROLLING_KIND:
        return None
    try:
        return run.spark_logs.watermark_of(run.versions.completed)
    except Exception as error:  # noqa: BLE001 - most clients do not need the watermark; the others say that it is missing
        log.warning("The watermark of version %s of run %s: %s", run.versions.completed, run.run_id, error)
        return None


class FeatureViews(Handler):
    """Keeps the feature views of queries, and locates their operators. Only changes take the lock of a run."""

    def __init__(self, registries: Registries, locations: Locations) -> None:
        super().__init__(registries)
        self._locations = locations

    def declare_view(self, run_id: str, view: FeatureView) -> None:
        run = self._runs.awaited(run_id)
        for other in self._having(view.name):
            if other.registration.state_location != run.registration.state_location:
                raise exceptions.InvalidRequestError(
                    f"Feature view {view.name!r} is declared for query {other.registration.title} already, and now for "
                    f"query {run.registration.title}: its first feature has moved. Drop it first (statestore features "
                    f"{view.name} --drop), or take another name."
                )
        with run.lock:
            run.lifetime.require_current()
            at = next((i for i, kept in enumerate(run.feature_views) if kept.name == view.name), len(run.feature_views))
            run.keep_feature_views((*run.feature_views[:at], view, *run.feature_views[at + 1 :]))

    def drop_view(self, run_id: str, view: str) -> bool:
        run = self._runs.awaited(run_id)
        with run.lock:
            run.lifetime.require_current()
            is_known = any(kept.name == view for kept in run.feature_views)
            run.keep_feature_views(tuple(kept for kept in run.feature_views if kept.name != view))
        return is_known

    def feature_views(self) -> tuple[RunningView, ...]:
        return tuple(
            RunningView(view, run.registration.query_id, run.run_id, run.registration.name)
            for run in self._runs.served()
            for view in run.feature_views
        )

    def locate_view(self, view: str) -> LocatedView:
        runs = _meant(self._having(view))
        if not runs:
            if self._registries.expects_reports():
                raise exceptions.UnknownRunError(
                    f"No query with a feature view {view!r} has been reported yet to this coordinator; ask again."
                )
            exist = exceptions.listed_names(view, (running.view.name for running in self.feature_views()))
            raise exceptions.UnknownFeatureViewError(
                f"No running query has a feature view {view!r}; feature views that exist: {exist} "
                "declare_feature_view declares one."
            )
        if len(runs) > 1:
            names = ", ".join(f"query {run.registration.title}" for run in runs)
            raise exceptions.WrongOperatorError(
                f"Several running queries have a feature view {view!r}: {names}. Their states are copies of one "
                "another: in the program of one of them, call drop_feature_view."
            )
        run = runs[0]
        (declared,) = (kept for kept in run.feature_views if kept.name == view)
        # An operator without a query is that of the view's own query, if that has one.
        sources = [
            (operator, run.run_id if query is None and run.operator(operator) is not None else query)
            for operator, query in declared.sources
        ]
        return LocatedView(declared, tuple(self._locations.locate(*source) for source in sources))

    def _having(self, view: str) -> list[QueryState]:
        return [run for run in self._runs.served() if any(kept.name == view for kept in run.feature_views)]


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


class Figures(Handler):
    """Describes the coordinator and its queries as plain dicts, lists, numbers and strings."""

    def __init__(self, coordinator_id: str, registries: Registries) -> None:
        super().__init__(registries)
        self._coordinator_id = coordinator_id

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
                | {"lag_seconds": round(run.lag(now), 1), "is_mirror": run.is_mirror}
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
        return {
            "checkpoints": run.stats.snapshot(),
            "savepoints": {} if savepoints is None else savepoints.coordinator.stats.snapshot(),
            **run.history.changed_since(history_since),
        }


def _described(run: QueryState) -> dict[str, Any]:
    registration, versions, pending = run.registration, run.versions, run.machine.pending
    records = run.history.records()
    began = run.spark.began(versions.completed, pending)
    return {
        "query_id": registration.query_id,
        "standby_replicas": registration.standby_replicas,
        "copy_lags": run.copy_lags,
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
