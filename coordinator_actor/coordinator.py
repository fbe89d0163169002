"""The StateStoreCoordinator's logic: registry, owners, acknowledgements, versions.

Plain Python: the clock and the storage are handed in. It carries on Spark's
``StateStoreCoordinator`` (instances) and Flink's checkpoint coordinator (acknowledgements of all
tasks make a completed checkpoint) and ``KvStateLocationOracle``.
"""

from __future__ import annotations

import logging
import secrets
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from backends.exceptions import StateStoreError, StorageError, VersionNotFoundError
from backends.formats.manifest import Lineage, PartitionEntry
from backends.ids import StateStoreId, StateStoreProviderId
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.access_tokens import AccessTokens, MemoryTokenStore
from coordinator_actor.assignment import assign
from coordinator_actor.checkpoints.completed_checkpoint import CompletedCheckpoint
from coordinator_actor.checkpoints.snapshot_lag import SnapshotLag, SnapshotLagConf
from coordinator_actor.checkpoints.tasks import TaskKey
from coordinator_actor.compatibility import evolved_operators, refusal_of
from coordinator_actor.exceptions import (
    BatchHeldError,
    CoordinatorError,
    InvalidRequestError,
    LineageError,
    QueryEndedError,
    RetiredRunError,
    StaleBatchError,
    StaleOwnerError,
    UnknownHostError,
    UnknownOperatorError,
    UnknownQueryError,
    UnknownRunError,
    error_from,
)
from coordinator_actor.location_oracle import KvStateLocationOracle
from coordinator_actor.manifests import ManifestLog, QueryFile, SparkCommits, schema_path
from coordinator_actor.messages import (
    Acknowledge,
    Acknowledged,
    BatchGrant,
    Completed,
    HostInfo,
    HostOrders,
    HostReport,
    OpenBatch,
    OpenGrant,
    OperatorLocation,
    QueryRegistration,
    Refused,
    RegisteredQuery,
    RunningOperator,
    SavepointExported,
    SavepointOrder,
    SavepointStatus,
    SnapshotUploaded,
)
from coordinator_actor.query import Assignment, QueryState
from coordinator_actor.registry import HostRegistry, InstanceRegistry
from coordinator_actor.retention import remove_garbage
from coordinator_actor.savepoints.run_savepoints import InBackground, RunSavepoints, status_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoordinatorConf:
    """Times in seconds.

    A host silent for ``host_timeout`` is lost, a driver for ``driver_timeout`` is gone, and a coordinator that nobody has
    needed for ``idle_timeout`` ends itself. A savepoint that takes longer than ``savepoint_timeout`` fails; a micro-batch that
    takes longer than ``slow_checkpoint`` is warned about. ``snapshot_lag`` says when a partition's snapshots lag behind.
    For ``report_timeout`` after a coordinator's start, hosts and drivers that knew the one before may still have to report to it.
    """

    host_timeout: float = 10.0
    driver_timeout: float = 60.0
    idle_timeout: float = 600.0
    savepoint_timeout: float = 600.0
    slow_checkpoint: float = 600.0
    report_timeout: float = 5.0
    snapshot_lag: SnapshotLagConf = field(default_factory=SnapshotLagConf)


REMEMBERED_RUNS = 1000
LEASE_OVER = "its driver was not heard of"
BUSY_SECONDS = 900.0
"""How long a load or an upload is believed to go on if nothing more is heard of it."""
OpenStorage = Callable[[str, Mapping[str, str]], CheckpointStorage]


@dataclass(frozen=True)
class _EndedQuery:
    """A run that is over: for who asks for its state. ``at`` in seconds since 1970."""

    registration: QueryRegistration
    at: float
    why: str

    def has(self, operator: str, query: str | None) -> bool:
        """Whether it is what somebody asks for who takes it for running."""
        named = (self.registration.name, self.registration.query_id, self.registration.run_id)
        return (query is None or query in named) and any(o.name == operator for o in self.registration.operators)


class Coordinator:
    """One per namespace. Thread-safe: a lock per query for what touches storage, one for the registries.

    ``clock`` gives seconds since 1970 and never goes back. ``in_background`` runs what must not hold up a message.
    ``tokens`` are the read-only ones of query clients.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        open_storage: OpenStorage,
        conf: CoordinatorConf | None = None,
        in_background: InBackground | None = None,
        tokens: AccessTokens | None = None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self._clock = clock
        self._open_storage = open_storage
        self._conf = conf or CoordinatorConf()
        self.tokens = tokens or AccessTokens(secrets.token_hex(32), MemoryTokenStore(), clock)
        self._hosts = HostRegistry()
        self._instances = InstanceRegistry()
        self._runs: dict[str, QueryState] = {}
        self._registering: dict[str, threading.Lock] = {}
        self._over: dict[str, str] = {}
        self._ended_queries: dict[str, _EndedQuery] = {}
        self._ended_sessions: dict[str, None] = {}
        self._savepoints: dict[str, RunSavepoints] = {}
        self._ended_savepoints: dict[str, Future[str]] = {}
        self._in_background = in_background or _in_thread
        self._lock = threading.RLock()
        self._started = clock()
        self._last_needed = clock()

    # -- hosts ---------------------------------------------------------------------------------

    def register_host(self, info: HostInfo, report: HostReport) -> None:
        """A host is there, or there again, with all it holds: runs, and acknowledgements of running batches."""
        with self._lock:
            if info.session_id in self._ended_sessions:
                return
            self._hosts.register(info, self._clock())
            self._last_needed = self._clock()
        log.info("Registered host %s at %s", info.host_id, info.address)
        # Runs that are known need no storage, and must not wait for one that hangs.
        for registration in sorted(report.registrations, key=lambda r: r.run_id not in self._runs):
            if registration.run_id not in self._over:
                self._register_again(registration)
            run = self._runs.get(registration.run_id)
            if run is not None:
                with run.lock:
                    self._take_report(run, report, info.host_id)

    def _register_again(self, registration: QueryRegistration) -> None:
        """A host holds a run that this coordinator, which was restarted, does not know."""
        try:
            refusal = self.register_query(registration).refusal
        except (StorageError, CoordinatorError):
            # The storage of one query must not keep the others from being taken up; the host reports again.
            log.warning("Run %s was reported, but cannot be registered now", registration.run_id, exc_info=True)
            return
        if refusal is not None:
            self._remember_over(registration.run_id, refusal)

    def heartbeat_host(self, host_id: str, incarnation: str, held: Mapping[str, int] | None = None) -> HostOrders:
        """Renew a host's lease, and answer what is to be done about the runs it holds.

        ``held`` is the lowest version it has of each run. The answer follows from that alone, so it does not
        matter whether an earlier one arrived. Waits for no query's storage.
        """
        held = held or {}
        with self._lock:
            lease = self._hosts.renew(host_id, incarnation, self._clock())
            if lease is None:
                return HostOrders(known=False, revoked_tokens=self.tokens.revoked())
            self._last_needed = self._clock()
            runs = {run_id: self._runs.get(run_id) for run_id in held}
            over = [
                r for r, run in runs.items() if (run is None and r in self._over) or (run is not None and run.ended)
            ]
            is_known = all(run is not None for r, run in runs.items() if r not in over)
        present = [run for r, run in runs.items() if run is not None and r not in over]
        completed = tuple(
            run.announced_by_host.get(host_id, run.announced)
            for run in present
            if run.announced is not None and held[run.run_id] < run.announced.version
        )
        with self._lock:
            of_session = [r for r in self._runs.values() if r.registration.session_id == lease.info.session_id]
        # Also of runs that the host has nothing of yet: it may own partitions that nobody has opened.
        savepoints = tuple(order for run in of_session for order in self._savepoint_orders(run, host_id))
        pending = {r.run_id: s.pending() for r in of_session if (s := self._savepoints.get(r.run_id)) is not None}
        pending = {r: ids for r, ids in pending.items() if ids}
        return HostOrders(is_known, completed, tuple(over), savepoints, pending, self.tokens.revoked())

    def _savepoint_orders(self, run: QueryState, host_id: str) -> list[SavepointOrder]:
        savepoints = self._savepoints.get(run.run_id)
        # The lock may be held by one who waits for the storage; the orders come again with the next heartbeat.
        if savepoints is None or run.ended or not savepoints.pending() or not run.lock.acquire(blocking=False):
            return []
        try:
            return list(savepoints.orders_for(host_id, self._assign(run)))
        finally:
            run.lock.release()

    def unregister_session(self, session_id: str) -> bool:
        """A driver's session ends: its hosts are gone. Returns whether other hosts are left."""
        with self._lock:
            # Its hosts are told to stop only afterwards, and must not bring it back meanwhile.
            self._ended_sessions[session_id] = None
            _forget_oldest(self._ended_sessions)
            for host_id in self._hosts.of_session(session_id):
                del self._hosts.leases[host_id]
            gone = [r for r in self._runs.values() if r.registration.session_id == session_id]
            for run in gone:
                del self._runs[run.run_id]
            others = bool(self._hosts.leases)
        for run in gone:
            self._end(run, "its session has ended")
        return others

    def expire(self, stood_still: float = 0.0) -> None:
        """Drop hosts and runs whose lease has run out.

        Leases do not run while the coordinator itself has ``stood_still``, so many seconds since the last time: heartbeats of then may wait
        to be heard, or their senders have stood still with it.
        """
        now = self._clock()
        with self._lock:
            self._hosts.prolong(stood_still, now)
            for run in self._runs.values():
                run.driver_seen = min(now, run.driver_seen + stood_still)
            self._last_needed = min(now, self._last_needed + stood_still)
            for host_id in self._hosts.expire(now - self._conf.host_timeout):
                log.warning(
                    "Host %s has not been heard of for %.0f s; its partitions move", host_id, self._conf.host_timeout
                )
            gone = [r for r in self._runs.values() if now - r.driver_seen > self._conf.driver_timeout]
        for run in gone:
            # Not for good: a machine may have slept, and the driver may bring it back. Only the driver.
            log.warning("The driver of run %s has not been heard of; the run is forgotten", run.run_id)
            with self._lock:
                self._runs.pop(run.run_id, None)
            self._end(run, LEASE_OVER)
            self._remember_over(run.run_id, LEASE_OVER)
        for run in self._current_runs():
            self._look_at(run, now)

    def _look_at(self, run: QueryState, now: float) -> None:
        """Warn of what is slow, and give up savepoints that are overdue; not if somebody is at work on the run."""
        if not run.lock.acquire(blocking=False):
            return
        try:
            savepoints = self._savepoints.get(run.run_id)
            if savepoints is not None:
                savepoints.settle()
            batch = run.batch
            is_slow = batch is not None and now - batch.started > self._conf.slow_checkpoint
            if batch is not None and is_slow and run.warned_of != batch.id:
                run.warned_of = batch.id
                log.warning(
                    "Batch %d of run %s has not been acknowledged for %.0f s: %s",
                    batch.properties["version"] - 1,
                    run.run_id,
                    now - batch.started,
                    batch.describe_missing(),
                )
            lagging = None if run.lag is None else run.lag.warning(run.completed, now)
            if lagging is not None:
                log.warning("%s", lagging)
        finally:
            run.lock.release()

    def _current_runs(self) -> list[QueryState]:
        with self._lock:
            return [run for run in self._runs.values() if not run.ended and run.retired_by is None]

    def _end(self, run: QueryState, why: str) -> None:
        """A run is over: nothing of it is active or pending any more."""
        run.ended = True
        with self._lock:
            self._ended_queries[run.run_id] = _EndedQuery(run.registration, self._clock(), why)
            _forget_oldest(self._ended_queries)
            self._instances.deactivate(run.run_id)
        run.cancel_checkpoints()
        with self._lock:
            savepoints = self._savepoints.pop(run.run_id, None)
            if savepoints is not None:
                # One that is being written down may still be finished.
                self._ended_savepoints.update(savepoints.requests)
                _forget_oldest(self._ended_savepoints)
        if savepoints is not None:
            savepoints.shutdown(why)

    def is_idle(self) -> bool:
        """Whether nobody has needed this coordinator for ``idle_timeout``."""
        with self._lock:
            return not self._hosts.leases and self._clock() - self._last_needed > self._conf.idle_timeout

    # -- queries -------------------------------------------------------------------------------

    def register_query(
        self, registration: QueryRegistration, initial: Mapping[str, Mapping[int, PartitionEntry]] | None = None
    ) -> RegisteredQuery:
        """A run starts, or is reported again. A newer run of the same state retires the older one.

        ``initial`` names the files of version 0, by operator and partition, of a query that does not begin empty.
        """
        with self._lock:
            registering = self._registering.setdefault(registration.state_location, threading.Lock())
        with registering:
            known = self._runs.get(registration.run_id)
            if known is not None:
                known.driver_seen = self._clock()
                return RegisteredQuery(None, known.log.epoch, known.completed)
            storage = self._open_storage(registration.state_location, registration.storage_options)
            spark = self._open_storage(registration.checkpoint_location, registration.storage_options)
            manifest_log = ManifestLog(storage, self.id)
            if manifest_log.superseded(registration.run_id):
                return RegisteredQuery(f"Run {registration.run_id} has been replaced by a newer one.", 0, 0)
            # Before the manifests: an older run may go on meanwhile, and what Spark has committed has a manifest.
            commits = SparkCommits(spark)
            completed = commits.next_batch()
            manifest_log.refresh()
            run = QueryState(
                registration, manifest_log, commits, self._clock, driver_seen=self._clock(), maintained=self._clock()
            )
            run.completed = completed
            run.chain = manifest_log.chain()
            refusal = refusal_of(run)
            if refusal is not None:
                return RegisteredQuery(refusal, 0, run.completed)
            run.adopt(evolved_operators(run))
            self._claim(run, initial)
            return RegisteredQuery(None, manifest_log.epoch, run.completed)

    def _claim(self, run: QueryState, initial: Mapping[str, Mapping[int, PartitionEntry]] | None = None) -> None:
        registration = run.registration
        query_file = QueryFile(registration.query_id, registration.key_groups)
        run.log.ensure_query_file(query_file)
        while True:
            for operator in run.registration.operators:
                run.log.ensure(schema_path(run.schema_ids[operator.name]), operator.schema.encode())
            run.log.claim(registration.run_id, run.layouts.values(), run.schema_ids)
            run.counter.ensure_above(run.log.last_id())
            # Nobody else can make a version any more, but an older run may just have committed one.
            run.completed = max(run.completed, run.commits.next_batch())
            run.chain = run.log.chain()
            if initial is not None and not run.chain and run.completed == 0:
                run.begin_with(initial)
            # Nobody knows the run before all of this has succeeded.
            if run.completed > 0 and run.completed not in run.chain:
                run.recover(run.completed)
            operators = evolved_operators(run)
            if operators == run.registration.operators:
                break
            # That older run has gone on to other schemas: this one has to follow upon them.
            run.adopt(operators)
        registration = run.registration
        if run.take_over():
            log.info("Run %s goes back to version %d", registration.run_id, run.completed)
        following = run.chain.get(run.completed + 1)
        if following is not None and following.run_id == registration.run_id:
            # Prepared before this coordinator was restarted: it knows better than the hosts which attempts were last.
            states: dict[TaskKey, Any] = {
                (name, p): PartitionEntry(e.attempt, e.changelog)
                for name, operator in following.operators.items()
                for p, e in operator.partitions.items()
            }
            run.last = CompletedCheckpoint(
                following.id, following.created_ms / 1000, 0.0, states, properties={"version": following.version}
            )
        run.carry_snapshots()
        run.announce()
        hold = run.log.hold_of(registration.run_id)
        if hold is not None:
            run.held_from, run.held_by_record = hold.version, hold.checkpoint_id
        conf = replace(self._conf.snapshot_lag, maintenance_interval=registration.maintenance_interval)
        run.lag = SnapshotLag(run.run_id, run.tasks(), self._clock(), run.completed, conf)
        with self._lock:
            replaced = [
                other
                for other in self._runs.values()
                if other.registration.state_location == registration.state_location
            ]
            for other in replaced:
                other.retired_by = registration.run_id
            self._runs[registration.run_id] = run
            self._savepoints[registration.run_id] = RunSavepoints(
                run, self._open_storage, self._in_background, self._clock, self._conf.savepoint_timeout
            )
            self._over.pop(registration.run_id, None)
            self._ended_queries.pop(registration.run_id, None)
        for other in replaced:
            self._end(other, f"run {registration.run_id} has replaced it")
        log.info(
            "Registered query %s (run %s) at version %d, epoch %d",
            registration.query_id,
            registration.run_id,
            run.completed,
            run.log.epoch,
        )

    @staticmethod
    def _take_report(run: QueryState, report: HostReport, host_id: str) -> None:
        """Count what a host has opened, holds and has acknowledged, after this coordinator was restarted."""
        run.highest_opened = max(run.highest_opened, report.opened.get(run.run_id, -1))
        for operator, partitions in report.held.get(run.run_id, {}).items():
            for partition in partitions:
                run.reported_owners.setdefault((operator, partition), host_id)
        known: dict[int, dict[TaskKey, PartitionEntry]] = {}
        for message in report.pending:
            task = (message.operator, message.partition)
            if message.run_id != run.run_id or message.version <= run.completed:
                continue
            run.reported_owners[task] = message.host_id
            if message.version not in known:
                known[message.version] = run.acknowledged(message.version)
            if task not in known[message.version] and message.base == run.head(message.version - 1, *task):
                run.acknowledge(message.version, {task: PartitionEntry(message.attempt, message.file)})

    def driver_heartbeat(self, run_id: str, *, is_stopping: bool = False) -> bool:
        """The driver of a run is alive. False asks it to register the run again.

        ``is_stopping``: it is making a savepoint, to stop with.
        """
        with self._lock:
            run = self._runs.get(run_id)
            if self._over.get(run_id, LEASE_OVER) != LEASE_OVER or (run is not None and run.ended):
                return True
            if run is None:
                return False
            run.driver_seen = self._last_needed = self._clock()
        with run.lock:
            # The progress event of a batch may have met a coordinator that was just being restarted.
            self._catch_up(run)
            if run.held_by_record is not None and not is_stopping:
                # That savepoint has failed, and the coordinator has died before it could write so.
                run.log.release(run.held_by_record)
                run.held_from, run.held_by_record = None, None
        return True

    def _catch_up(self, run: QueryState) -> None:
        """Complete what Spark has committed, though nobody may have said so yet."""
        following = run.completed + 1
        if following in run.chain and run.chain[following].run_id == run.run_id and run.commits.has(run.completed):
            self._complete(run, following)

    def _complete(self, run: QueryState, version: int) -> None:
        run.complete(version)
        savepoints = self._savepoints.get(run.run_id)
        if savepoints is not None:
            savepoints.on_completed()

    def _run(self, run_id: str) -> QueryState:
        with self._lock:
            run = self._runs.get(run_id)
        if run is None and self._over.get(run_id, LEASE_OVER) != LEASE_OVER:
            raise RetiredRunError(f"Run {run_id} is over ({self._over[run_id]}); start the query again.")
        if run is None:
            raise UnknownRunError(f"Run {run_id} is not registered with this coordinator; it must be registered again.")
        return run

    @staticmethod
    def _require_current(run: QueryState) -> None:
        if run.retired_by is not None:
            raise RetiredRunError(
                f"Run {run.run_id} of query {run.registration.query_id} has been replaced by run {run.retired_by} on the same "
                f"checkpoint ({run.registration.checkpoint_location}); only the newer one may go on."
            )
        if run.ended:
            raise RetiredRunError(f"Run {run.run_id} is over; start the query again.")

    # -- the batch -----------------------------------------------------------------------------

    def open_batch(self, request: OpenBatch) -> BatchGrant:
        """The first of a host's tasks of batch N opens its partition at version N: who owns what, and what is its state?

        Raises ``BatchHeldError`` while the batch has to wait.
        """
        run = self._run(request.run_id)
        with run.lock:
            self._require_current(run)
            with self._lock:
                self._hosts.require(request.host_id, request.incarnation)
            if request.batch_id < run.highest_opened:
                raise StaleBatchError(
                    f"A task of batch {request.batch_id} is too late: batch {run.highest_opened} of run {run.run_id} has begun."
                )
            self._advance(run, request.batch_id)
            if run.held_from is not None and request.batch_id >= run.held_from:
                raise BatchHeldError(
                    f"Batch {request.batch_id} of run {run.run_id} waits: the query stops with a savepoint of version "
                    f"{run.held_from}."
                )
            assignment = self._assign(run, rebalance=request.batch_id > run.highest_opened)
            run.highest_opened = request.batch_id
            run.begin(request.batch_id + 1)
            is_news = request.assignment != assignment.number
            return BatchGrant(
                version=request.batch_id,
                epoch=run.log.epoch,
                assignment=assignment.number,
                registration=run.registration,
                heads=run.heads(request.batch_id, assignment.of_host.get(request.host_id, ())),
                hosts=assignment.hosts if is_news else (),
                owners=dict(assignment.owners) if is_news else {},
                times=run.times(request.batch_id),
            )

    def open_for_read(self, run_id: str, operator: str, partition: int) -> OpenGrant:
        """Who owns a partition, and what is its last completed state? Changes nothing."""
        run = self._run(run_id)
        with run.lock:
            self._require_current(run)
            self._require_partition(run, operator, partition)
            owner = self._assign(run).owner(operator, partition)
            head = run.head(run.completed, operator, partition)
            return OpenGrant(owner, run.completed, head, run.registration, run.log.epoch)

    def _advance(self, run: QueryState, batch_id: int) -> None:
        """Make version ``batch_id`` the completed one, as Spark's commits say."""
        if batch_id == run.completed:
            return
        if batch_id < run.completed:
            raise StaleBatchError(
                f"Batch {batch_id} of run {run.run_id} is committed already; version {run.completed} is completed."
            )
        if batch_id != run.completed + 1:
            raise InvalidRequestError(
                f"Version {batch_id} of run {run.run_id} cannot be completed: version {run.completed} is the last completed one."
            )
        if not run.commits.has(batch_id - 1):
            raise InvalidRequestError(
                f"Version {batch_id} of run {run.run_id} cannot be completed: Spark's commits/{batch_id - 1} does not exist in "
                f"{run.registration.checkpoint_location}, or no longer."
            )
        self._complete(run, batch_id)

    def _assign(self, run: QueryState, *, rebalance: bool = False) -> Assignment:
        """Partitions move between hosts only where a batch begins, or where their host is lost."""
        with self._lock:
            current, generation = run.assignment, self._hosts.generation
            if current is not None and current.generation == generation and not (rebalance and run.unbalanced):
                return current
            nodes = self._hosts.nodes_of_session(run.registration.session_id)
            if not nodes:
                raise UnknownHostError(f"No state store host of session {run.registration.session_id} is alive.")
            infos = [self._hosts.leases[host_id].info for host_id in nodes]
        held = run.reported_owners if current is None else {t: current.owner(*t).host_id for t in run.tasks()}
        names = {f"{operator}/{partition}": (operator, partition) for operator, partition in run.tasks()}
        owners = assign(
            list(names),
            nodes,
            {name: held[task] for name, task in names.items() if task in held},
            rebalance=rebalance,
            salt=run.registration.query_id,
        )
        # Only where a batch begins may partitions move whose host is still there.
        run.unbalanced = not rebalance
        # Another coordinator, or this one restarted, must not give out the same number for something else.
        number = (run.log.epoch << 20) + 1 if current is None else current.number + 1
        assignment = Assignment.of(number, generation, infos, {names[name]: owners[name] for name in names})
        location = run.registration.checkpoint_location
        with self._lock:
            for task in names.values():
                owner = assignment.owner(*task)
                if current is None or current.owner(*task).host_id != owner.host_id:
                    instance = StateStoreProviderId(StateStoreId(location, *task), run.run_id)
                    self._instances.report(instance, owner.ip, owner.host_id)
        run.assignment = assignment
        return assignment

    def rebalance(self, query: str | None = None) -> dict[str, int]:
        """Give every host its share of the partitions, of one query or of all; returns how many moved, by run.

        A run whose batch is under way does so where its next batch begins, as it would anyway, and counts with 0 here.
        """
        moved = {}
        for run in self._current_runs():
            if query is not None and query not in (run.registration.name, run.registration.query_id, run.run_id):
                continue
            with run.lock:
                before = run.assignment
                run.unbalanced = True
                if before is None or run.highest_opened >= run.completed:
                    moved[run.run_id] = 0
                    continue
                after = self._assign(run, rebalance=True)
                moved[run.run_id] = sum(after.owner(*task) != before.owner(*task) for task in run.tasks())
                run.announce()
        return moved

    @staticmethod
    def _require_partition(run: QueryState, operator: str, partition: int) -> None:
        spec = run.operator(operator)
        if spec is None:
            raise InvalidRequestError(
                f"Run {run.run_id} has no operator {operator!r}; it has {', '.join(o.name for o in run.registration.operators)}."
            )
        if not 0 <= partition < spec.num_partitions:
            raise InvalidRequestError(
                f"Operator {operator!r} has {spec.num_partitions} partitions; there is no {partition}."
            )

    def completed(self, run_id: str, host_id: str) -> Completed:
        """The last completed version of a run, with the heads of a host's own partitions. Waits for no query's storage.

        What a host is told with its heartbeat, for one that cannot wait for the next. Of partitions that it was given since
        that version was completed, there are no heads.
        """
        run = self._run(run_id)
        self._require_current(run)
        announced = run.announced
        if announced is None:
            raise UnknownRunError(f"Run {run_id} is being registered; ask again.")
        return run.announced_by_host.get(host_id, announced)

    def lineage(self, run_id: str, operator: str, partition: int, version: int) -> Lineage:
        """The files that lead to a version of a partition; none of that partition are removed while it is loaded.

        Raises ``VersionNotFoundError`` for one that is no longer kept.
        """
        run = self._run(run_id)
        with run.lock:
            self._require_partition(run, operator, partition)
            if version > run.completed:
                raise InvalidRequestError(
                    f"Version {version} is not completed; {run.completed} is the last one that is."
                )
            if version not in run.readable:
                raise VersionNotFoundError(
                    f"Version {version} of query {run.registration.name or 'unnamed'} ({run.registration.query_id}) is no longer "
                    f"kept; there are the versions {run.readable[0]} to {run.readable[-1]}."
                )
            until = self._clock() + BUSY_SECONDS
            run.busy[(operator, partition)] = until
            found = run.lineage(operator, partition, version)
            if found.rescaled is not None:
                run.rescaling[(operator, partition)] = until
            return found

    def snapshot_uploaded(self, message: SnapshotUploaded) -> bool:
        """The owner of a partition has uploaded a snapshot. True if it counts: the next manifest names it."""
        run = self._run(message.run_id)
        key = (message.operator, message.partition)
        with run.lock:
            self._require_current(run)
            self._require_partition(run, *key)
            with self._lock:
                self._hosts.require(message.host_id, message.incarnation)
            run.busy.pop(key, None)
            new, known = message.snapshot, {s.file.path for s in run.snapshots(*key, run.completed)}
            counts = (
                run.assignment is not None
                and run.is_in_layout(new.version, message.operator)
                and run.assignment.owner(*key).host_id == message.host_id
                and run.oldest < new.version <= run.completed
                and run.head(new.version, *key) == new.head
                and new.file.path not in known
                and (message.reused is None or message.reused.file.path in known)
            )
            if counts:
                run.unnamed[key] = (*run.unnamed.get(key, ()), new)
                if run.lag is not None:
                    run.lag.report_uploaded(key, new.version, self._clock())
            return counts

    def verify_instances(
        self, host_id: str, incarnation: str, run_ids: Sequence[str]
    ) -> dict[str, dict[str, list[int]]]:
        """Before its maintenance a host asks what it owns of these runs: operator to partitions. It unloads what is not named.

        Runs whose owners are not known (yet) are left out.
        """
        with self._lock:
            self._hosts.require(host_id, incarnation)
            runs = [run for r in run_ids if (run := self._runs.get(r)) is not None and run.assignment is not None]
        owned: dict[str, dict[str, list[int]]] = {}
        for run in runs:
            assert run.assignment is not None
            owned[run.run_id] = {name: [] for name in run.layouts}
            for operator, partition in run.assignment.of_host.get(host_id, ()):
                owned[run.run_id][operator].append(partition)
        return owned

    def acknowledge(self, message: Acknowledge) -> Acknowledged:
        """A host has made a task's changes durable. The last one is answered when the manifest is durable too."""
        (answer,) = self.acknowledge_many(message.run_id, message.host_id, message.incarnation, (message,))
        if isinstance(answer, Refused):
            raise error_from(answer.error, answer.message)
        return answer

    def acknowledge_many(
        self, run_id: str, host_id: str, incarnation: str, messages: Sequence[Acknowledge]
    ) -> tuple[Acknowledged | Refused, ...]:
        """Those of several tasks of a run that have reached a host together; an answer for each.

        Raises an error only if it would refuse them all.
        """
        run = self._run(run_id)
        with run.lock:
            self._require_current(run)
            with self._lock:
                self._hosts.require(host_id, incarnation)
            for message in messages if run.assignment is None else ():
                run.reported_owners.setdefault((message.operator, message.partition), host_id)
            assignment = self._assign(run)
            answers: dict[int, Acknowledged | Refused] = {}
            entries: dict[TaskKey, PartitionEntry] = {}
            version = run.highest_opened + 1
            for i, message in enumerate(messages):
                task = (message.operator, message.partition)
                try:
                    prepared = self._check(run, message, assignment)
                except (CoordinatorError, StateStoreError) as error:
                    answers[i] = Refused(type(error).__name__, str(error))
                    continue
                version = message.version
                if prepared is None:
                    entries[task] = PartitionEntry(message.attempt, message.file)
                else:
                    answers[i] = Acknowledged(version, prepared)
            accepted: Acknowledged | Refused
            try:
                durations = {(m.operator, m.partition): m.duration for m in messages}
                manifest_id = run.acknowledge(version, entries, durations) if entries else None
                accepted = Acknowledged(version, manifest_id)
            except (CoordinatorError, StateStoreError) as error:
                accepted = Refused(type(error).__name__, str(error))
            return tuple(answers.get(i, accepted) for i in range(len(messages)))

    def _check(self, run: QueryState, message: Acknowledge, assignment: Assignment) -> int | None:
        """Raise unless the changes may be taken; the manifest's id if it names them already: its answer was lost."""
        task = (message.operator, message.partition)
        self._require_partition(run, *task)
        owner = assignment.owner(*task)
        if owner.host_id != message.host_id:
            raise StaleOwnerError(
                f"Host {message.host_id} does not own {task[0]}/{task[1]} of run {run.run_id}; {owner.host_id} does."
            )
        if run.highest_opened < message.version - 1 == run.completed:
            # The batch was opened before this coordinator was restarted, and the host has yet to say so.
            run.highest_opened = run.completed
        if message.version != run.highest_opened + 1 or message.version <= run.completed:
            raise StaleBatchError(
                f"Version {message.version} of run {run.run_id} cannot be committed: batch {run.highest_opened} is the "
                f"newest one opened, version {run.completed} the last completed one."
            )
        base = run.head(message.version - 1, *task)
        if message.base != base:
            raise LineageError(
                f"Changes of {task[0]}/{task[1]} apply to {message.base}, but version {message.version - 1} ends with {base}."
            )
        run.busy.pop(task, None)
        run.rescaling.pop(task, None)
        prepared = run.chain.get(message.version)
        if prepared is None or prepared.run_id != run.run_id or run.batch is not None:
            return None
        held = run.acknowledged(message.version).get(task)
        return prepared.id if held == PartitionEntry(message.attempt, message.file) else None

    def batch_committed(self, run_id: str, batch_id: int) -> bool:
        """Spark reports progress: batch N is committed, so version N + 1 is completed. False if that was known.

        The hosts learn of it with their next heartbeat.
        """
        run = self._run(run_id)
        with run.lock:
            if run.ended or run.retired_by or batch_id + 1 <= run.completed:
                return False
            self._advance(run, batch_id + 1)
            return True

    # -- maintenance ---------------------------------------------------------------------------

    def maintain(self) -> None:
        """Remove what the runs whose time has come no longer keep. May take long; not for many threads at once."""
        now = self._clock()
        with self._lock:
            runs = [
                run
                for run in self._runs.values()
                if not run.ended
                and run.retired_by is None
                and now - run.maintained >= run.registration.maintenance_interval
            ]
        for run in runs:
            run.maintained = now
            try:
                removed = remove_garbage(run, now, self._require_current)
            except (StorageError, CoordinatorError):
                log.warning("Files of run %s that are no longer kept were not removed", run.run_id, exc_info=True)
                continue
            if removed:
                log.info("Deleted files older than %d for run %s: %d files", run.oldest, run.run_id, len(removed))

    # -- savepoints ----------------------------------------------------------------------------

    def trigger_savepoint(
        self, request_id: str, query: str, path: str | None = None, *, stop: bool = False
    ) -> SavepointStatus:
        """Begin a savepoint of a running query (its name, id or run id) below the directory ``path``.

        ``request_id`` is the asker's own: asked again, nothing else begins. Without ``path`` it goes below the state's own
        location. With ``stop`` the next batch is held until the query is stopped. Raises ``UnknownQueryError``,
        ``InvalidRequestError``.
        """
        known = self.savepoint_status(request_id)
        if known.known:
            return known
        run = self._find(query)
        with run.lock:
            self._require_current(run)
            self._catch_up(run)
            base = path if path is not None else f"{run.registration.state_location}/savepoints"
            savepoints = self._savepoints.get(run.run_id)
            if savepoints is None:
                raise RetiredRunError(f"Run {run.run_id} is over; start the query again.")
            savepoints.trigger(request_id, base, stop=stop)
        return self.savepoint_status(request_id)

    def savepoint_status(self, request_id: str) -> SavepointStatus:
        """How a savepoint stands that was asked for."""
        with self._lock:
            requests = [savepoints.requests for savepoints in self._savepoints.values()]
            found = next((r[request_id] for r in (*requests, self._ended_savepoints) if request_id in r), None)
        return SavepointStatus(known=False) if found is None else status_of(found)

    def savepoint_exported(self, message: SavepointExported) -> None:
        """A host has exported a partition, or cannot."""
        with self._lock:
            self._hosts.require(message.host_id, message.incarnation)
            savepoints = self._savepoints.get(message.run_id)
        if savepoints is not None:
            savepoints.exported(message)

    def _find(self, query: str) -> QueryState:
        running = self._current_runs()
        found = [r for r in running if query in (r.registration.name, r.registration.query_id, r.run_id)]
        if len(found) != 1:
            exist = (
                ", ".join(f"{r.registration.name or 'unnamed'} ({r.registration.query_id})" for r in running) or "none"
            )
            how_many = "Several running queries are" if found else "No running query with state is"
            raise UnknownQueryError(f"{how_many} named {query!r}; running: {exist}. Give the query id.")
        return found[0]

    # -- for query clients ---------------------------------------------------------------------

    def locate(self, operator: str, query: str | None = None) -> OperatorLocation:
        """Where an operator's partitions are. ``query``: name, query id or run id, where several have the operator.

        Raises ``QueryEndedError`` if the query that had it has ended, and ``UnknownOperatorError``; ``UnknownRunError``
        from a coordinator that has just been started and may not have heard of it.
        """
        running = self._current_runs()
        named = [
            r for r in running if query is None or query in (r.registration.name, r.registration.query_id, r.run_id)
        ]
        found = [r for r in named if r.operator(operator) is not None]
        if not found:
            self._require_not_ended(operator, query, running)
            if (age := self._clock() - self._started) < self._conf.report_timeout:
                raise UnknownRunError(
                    f"No query with an operator {operator!r} has been reported yet to this coordinator, which has been there for "
                    f"{age:.1f} s; ask again."
                )
            exist = ", ".join(sorted({f"{o.name!r}" for r in named for o in r.registration.operators})) or "none"
            where = "No running query" if query is None else f"No running query {query!r}"
            raise UnknownOperatorError(f"{where} has an operator {operator!r}; operators that exist: {exist}.")
        if len(found) > 1:
            names = ", ".join(f"{r.registration.name or 'unnamed'} ({r.registration.query_id})" for r in found)
            raise UnknownOperatorError(
                f"Several running queries have an operator {operator!r}; say which with query=: {names}."
            )
        run = found[0]
        spec = run.operator(operator)
        assert spec is not None
        with run.lock:
            assignment = self._assign(run)
            owners = tuple(assignment.owner(operator, p) for p in range(spec.num_partitions))
            return OperatorLocation(
                run.registration.query_id,
                run.run_id,
                run.registration.name,
                spec,
                run.registration.key_groups,
                run.completed,
                owners,
            )

    def _require_not_ended(self, operator: str, query: str | None, running: Sequence[QueryState]) -> None:
        """Raise ``QueryEndedError`` if the last query that had such an operator has ended, and does not run again."""
        again = {r.registration.query_id for r in running}
        with self._lock:
            ended = [e for e in self._ended_queries.values() if e.has(operator, query)]
        ended = [e for e in ended if e.registration.query_id not in again or query == e.registration.run_id]
        if not ended:
            return
        last = max(ended, key=lambda e: e.at)
        at = datetime.fromtimestamp(last.at, timezone.utc).isoformat(sep=" ", timespec="seconds")
        of = last.registration
        raise QueryEndedError(
            f"Query {of.name or 'unnamed'} ({of.query_id}, run {of.run_id}), which had the operator {operator!r}, ended at {at} "
            f"({last.why}). Start it again, or read its state from the checkpoint with read_state."
        )

    def operators(self) -> tuple[RunningOperator, ...]:
        """All operators of all running queries."""
        return tuple(
            RunningOperator(
                run.registration.query_id,
                run.run_id,
                run.registration.name,
                operator,
                run.registration.key_groups,
                run.readable[0],
                run.completed,
            )
            for run in self._current_runs()
            for operator in run.registration.operators
        )

    def get_kv_state_location_oracle(self, job_id: str) -> KvStateLocationOracle | None:
        """Who owns which key groups of a running query (``job_id`` is its query id); None if it does not run here."""
        run = next((r for r in self._current_runs() if r.registration.query_id == job_id), None)
        if run is None:
            return None
        with run.lock:
            assignment = self._assign(run)
            registration = run.registration
            owners = {name: [assignment.hosts[i] for i in places] for name, places in assignment.owners.items()}
            return KvStateLocationOracle.of(
                registration.query_id, run.run_id, registration.name, registration.key_groups, run.completed, owners
            )

    def checkpoint_stats(self, query: str) -> dict[str, Any]:
        """Figures of a running query's micro-batches and savepoints: counts, durations, sizes, percentiles."""
        run = self._find(query)
        savepoints = self._savepoints.get(run.run_id)
        return {
            "checkpoints": run.stats.snapshot(),
            "savepoints": {} if savepoints is None else savepoints.coordinator.stats.snapshot(),
        }

    # -- instances (Spark) ---------------------------------------------------------------------

    def report_active_instance(
        self,
        provider_id: StateStoreProviderId,
        host: str,
        executor_id: str,
        other_provider_ids: tuple[StateStoreProviderId, ...] = (),
    ) -> list[StateStoreProviderId]:
        """An executor has loaded a provider; returns the others of its that it should unload."""
        with self._lock:
            return self._instances.report(provider_id, host, executor_id, tuple(other_provider_ids))

    def verify_if_instance_active(self, provider_id: StateStoreProviderId, executor_id: str) -> bool:
        """Whether the provider is active at that executor."""
        with self._lock:
            return self._instances.verify(provider_id, executor_id)

    def get_location(self, provider_id: StateStoreProviderId) -> str | None:
        """Where the provider is active."""
        with self._lock:
            return self._instances.location(provider_id)

    def get_locations(self, provider_ids: Sequence[StateStoreProviderId]) -> list[str | None]:
        """Where each of many providers is active."""
        with self._lock:
            return self._instances.locations(provider_ids)

    def deactivate_instances(self, run_id: str) -> bool:
        """A run is over: its instances are inactive, and hosts unload them."""
        with self._lock:
            run = self._runs.get(run_id)
        if run is not None:
            with run.lock:
                try:
                    run.name_snapshots()
                except (StorageError, CoordinatorError):
                    # They only save time: the next run takes new ones.
                    log.warning("The last snapshots of run %s are not named in a manifest", run_id, exc_info=True)
        with self._lock:
            self._instances.deactivate(run_id)
            run = self._runs.pop(run_id, None)
            why = "its query ended" if run is None or run.retired_by is None else f"replaced by {run.retired_by}"
            self._remember_over(run_id, why)
        if run is not None:
            self._end(run, why)
        return True

    def _remember_over(self, run_id: str, why: str) -> None:
        with self._lock:
            self._over[run_id] = why
            _forget_oldest(self._over)

    # -- for people ----------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Hosts, queries and instances as they are now."""
        with self._lock:
            hosts = [
                {
                    "host_id": lease.info.host_id,
                    "address": lease.info.address,
                    "node_id": lease.info.node_id,
                    "seconds_since_heartbeat": round(self._clock() - lease.seen, 3),
                }
                for lease in self._hosts.leases.values()
            ]
            runs = list(self._runs.values())
            instances = self._instances.describe()
        return {
            "coordinator_id": self.id,
            "hosts": hosts,
            "queries": [self._describe(r) for r in runs],
            "instances": instances,
        }

    @staticmethod
    def _describe(run: QueryState) -> dict[str, Any]:
        batch = run.batch
        return {
            "query_id": run.registration.query_id,
            "run_id": run.run_id,
            "name": run.registration.name,
            "checkpoint_location": run.registration.checkpoint_location,
            "epoch": run.log.epoch,
            "completed_version": run.completed,
            "prepared_version": max(run.chain, default=0),
            "pending_partitions": 0 if batch is None else batch.num_not_yet_acknowledged,
            "checkpoints": run.stats.counts(),
            "retired_by": run.retired_by,
            "operators": {o.name: o.num_partitions for o in run.registration.operators},
        }


def _forget_oldest(remembered: dict[str, Any]) -> None:
    while len(remembered) > REMEMBERED_RUNS:
        del remembered[next(iter(remembered))]


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="statestore-savepoint", daemon=True).start()
