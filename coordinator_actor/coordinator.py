"""The StateStoreCoordinator's logic: registry, owners, acknowledgements, versions.

Plain Python: the clock and the storage are handed in. It carries on Spark's
``StateStoreCoordinator`` (instances) and Flink's checkpoint coordinator (acknowledgements of all
tasks make a completed checkpoint) and ``KvStateLocationOracle``.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from backends import chain as chains
from backends import snapshot
from backends.exceptions import DamagedFileError, MissingFileError, StorageError
from backends.ids import StateStoreProviderId
from backends.manifest import Lineage, PartitionEntry, SnapshotRef
from backends.schema import StateSchema
from backends.storage import CheckpointStorage
from coordinator_actor.assignment import assign
from coordinator_actor.compatibility import refusal_of
from coordinator_actor.exceptions import (
    CoordinatorError,
    InvalidRequestError,
    LineageError,
    RetiredRunError,
    StaleBatchError,
    StaleOwnerError,
    UnknownHostError,
    UnknownOperatorError,
    UnknownRunError,
)
from coordinator_actor.manifests import ManifestLog, QueryFile, SparkCommits, schema_path
from coordinator_actor.messages import (
    Acknowledge,
    Acknowledged,
    Completed,
    HostInfo,
    HostOrders,
    HostReport,
    OpenGrant,
    OpenRequest,
    OperatorLocation,
    QueryRegistration,
    RegisteredQuery,
    SnapshotUploaded,
)
from coordinator_actor.query import QueryState
from coordinator_actor.registry import HostRegistry, InstanceRegistry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoordinatorConf:
    """Leases in seconds: a host silent for ``host_timeout`` is lost, a driver for ``driver_timeout`` is gone,
    and a coordinator that nobody has needed for ``idle_timeout`` ends itself."""

    host_timeout: float = 10.0
    driver_timeout: float = 60.0
    idle_timeout: float = 600.0


REMEMBERED_RUNS = 1000
LEASE_OVER = "its driver was not heard of"
BUSY_SECONDS = 900.0
"""How long a load or an upload is believed to go on if nothing more is heard of it."""
OpenStorage = Callable[[str, Mapping[str, str]], CheckpointStorage]


class Coordinator:
    """One per namespace. Thread-safe: a lock per query for what touches storage, one for the registries."""

    def __init__(
        self, clock: Callable[[], float], open_storage: OpenStorage, conf: CoordinatorConf | None = None
    ) -> None:
        self.id = uuid.uuid4().hex
        self._clock = clock
        self._open_storage = open_storage
        self._conf = conf or CoordinatorConf()
        self._hosts = HostRegistry()
        self._instances = InstanceRegistry()
        self._runs: dict[str, QueryState] = {}
        self._registering: dict[str, threading.Lock] = {}
        self._over: dict[str, str] = {}
        self._ended_sessions: dict[str, None] = {}
        self._lock = threading.RLock()
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
                    self._take_report(run, report)

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
                return HostOrders(known=False)
            self._last_needed = self._clock()
            runs = {run_id: self._runs.get(run_id) for run_id in held}
            over = [
                r for r, run in runs.items() if (run is None and r in self._over) or (run is not None and run.ended)
            ]
            is_known = all(run is not None for r, run in runs.items() if r not in over)
        announced = [run.announced for r, run in runs.items() if run is not None and r not in over]
        completed = tuple(a for a in announced if a is not None and held[a.run_id] < a.version)
        return HostOrders(is_known, completed, tuple(over))

    def unregister_session(self, session_id: str) -> bool:
        """A driver's session ends: its hosts are gone. Returns whether other hosts are left."""
        with self._lock:
            # Its hosts are told to stop only afterwards, and must not bring it back meanwhile.
            self._ended_sessions[session_id] = None
            while len(self._ended_sessions) > REMEMBERED_RUNS:
                del self._ended_sessions[next(iter(self._ended_sessions))]
            for host_id in self._hosts.of_session(session_id):
                del self._hosts.leases[host_id]
            for run in [r for r in self._runs.values() if r.registration.session_id == session_id]:
                del self._runs[run.run_id]
            return bool(self._hosts.leases)

    def expire(self) -> None:
        """Drop hosts and runs whose lease has run out."""
        now = self._clock()
        with self._lock:
            for host_id in self._hosts.expire(now - self._conf.host_timeout):
                log.warning(
                    "Host %s has not been heard of for %.0f s; its partitions move", host_id, self._conf.host_timeout
                )
            gone = [r for r in self._runs.values() if now - r.driver_seen > self._conf.driver_timeout]
        for run in gone:
            # Not for good: a machine may have slept, and the driver may bring it back. Only the driver.
            log.warning("The driver of run %s has not been heard of; the run is forgotten", run.run_id)
            with self._lock:
                self._instances.deactivate(run.run_id)
                self._runs.pop(run.run_id, None)
            run.ended = True
            self._remember_over(run.run_id, LEASE_OVER)

    def is_idle(self) -> bool:
        """Whether nobody has needed this coordinator for ``idle_timeout``."""
        with self._lock:
            return not self._hosts.leases and self._clock() - self._last_needed > self._conf.idle_timeout

    # -- queries -------------------------------------------------------------------------------

    def register_query(self, registration: QueryRegistration) -> RegisteredQuery:
        """A run starts, or is reported again. A newer run of the same state retires the older one."""
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
            manifest_log.refresh()
            commits = SparkCommits(spark)
            run = QueryState(registration, manifest_log, commits, driver_seen=self._clock(), maintained=self._clock())
            run.completed = commits.next_batch()
            run.chain = manifest_log.chain()
            refusal = refusal_of(run)
            if refusal is not None:
                return RegisteredQuery(refusal, 0, run.completed)
            self._claim(run)
            return RegisteredQuery(None, manifest_log.epoch, run.completed)

    def _claim(self, run: QueryState) -> None:
        registration = run.registration
        query_file = QueryFile(registration.query_id, registration.key_groups)
        run.log.ensure_query_file(query_file)
        for operator in registration.operators:
            schema_id = StateSchema.from_json(operator.schema).id
            run.log.ensure(schema_path(schema_id), operator.schema.encode())
        run.log.claim(registration.run_id)
        run.chain = run.log.chain()
        # Nobody knows the run before all of this has succeeded.
        if run.completed > 0:
            if run.completed not in run.chain:
                run.recover(run.completed, self._now_ms(), run.log.runs())
            run.announced = run.heads(run.completed)
        following = run.chain.get(run.completed + 1)
        if following is not None and following.run_id == registration.run_id:
            # Prepared before this coordinator was restarted: it knows better than the hosts which attempts were last.
            run.pending[following.version] = dict(chains.partitions(following))
        run.carry_snapshots()
        with self._lock:
            for other in list(self._runs.values()):
                if other.registration.state_location == registration.state_location:
                    other.retired_by = registration.run_id
                    other.ended = True
            self._runs[registration.run_id] = run
            self._over.pop(registration.run_id, None)
        log.info(
            "Registered query %s (run %s) at version %d, epoch %d",
            registration.query_id,
            registration.run_id,
            run.completed,
            run.log.epoch,
        )

    @staticmethod
    def _take_report(run: QueryState, report: HostReport) -> None:
        """Count what a host has opened and acknowledged, after this coordinator was restarted."""
        run.highest_opened = max(run.highest_opened, report.opened.get(run.run_id, -1))
        for message in report.pending:
            if message.run_id != run.run_id:
                continue
            same_base = message.base == run.head(message.version - 1, message.operator, message.partition)
            if message.version > run.completed and same_base:
                entry = PartitionEntry(message.attempt, message.file)
                run.pending.setdefault(message.version, {}).setdefault((message.operator, message.partition), entry)
                run.owners.setdefault(f"{message.operator}/{message.partition}", message.host_id)

    def driver_heartbeat(self, run_id: str) -> bool:
        """The driver of a run is alive. False asks it to register the run again."""
        with self._lock:
            run = self._runs.get(run_id)
            if self._over.get(run_id, LEASE_OVER) != LEASE_OVER or (run is not None and run.ended):
                return True
            if run is None:
                return False
            run.driver_seen = self._last_needed = self._clock()
        with run.lock:
            # The progress event of a batch may have met a coordinator that was just being restarted.
            following = run.completed + 1
            if following in run.chain and run.chain[following].run_id == run_id and run.commits.has(run.completed):
                run.complete(following, self._now_ms())
        return True

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

    def open(self, request: OpenRequest) -> OpenGrant:
        """A task of batch N opens its partition at version N: who owns it, and what is its state?"""
        run = self._run(request.run_id)
        with run.lock:
            self._require_current(run)
            with self._lock:
                self._hosts.require(request.host_id, request.incarnation)
            self._require_partition(run, request.operator, request.partition)
            if request.batch_id < run.highest_opened:
                raise StaleBatchError(
                    f"A task of batch {request.batch_id} is too late: batch {run.highest_opened} of run {run.run_id} has begun."
                )
            self._advance(run, request.batch_id)
            begins = request.batch_id > run.highest_opened
            run.highest_opened = request.batch_id
            return self._grant(run, request.operator, request.partition, request.batch_id, rebalance=begins)

    def open_for_read(self, run_id: str, operator: str, partition: int) -> OpenGrant:
        """Who owns a partition, and what is its last completed state? Changes nothing."""
        run = self._run(run_id)
        with run.lock:
            self._require_current(run)
            self._require_partition(run, operator, partition)
            return self._grant(run, operator, partition, run.completed)

    def _advance(self, run: QueryState, batch_id: int) -> None:
        """Make version ``batch_id`` the completed one, as Spark's commits say."""
        if batch_id == run.completed:
            return
        if batch_id < run.completed:
            raise StaleBatchError(
                f"Batch {batch_id} of run {run.run_id} is committed already; version {run.completed} is completed."
            )
        if batch_id != run.completed + 1 or not run.commits.has(batch_id - 1):
            raise InvalidRequestError(
                f"Batch {batch_id} begins, but version {run.completed} is the last completed one and Spark's commits/"
                f"{batch_id - 1} does not exist in {run.registration.checkpoint_location}."
            )
        run.complete(batch_id, self._now_ms())

    def _grant(
        self, run: QueryState, operator: str, partition: int, version: int, *, rebalance: bool = False
    ) -> OpenGrant:
        """Partitions move between hosts only where a batch begins, or where their host is lost."""
        with self._lock:
            hosts = self._hosts.of_session(run.registration.session_id)
            if not hosts:
                raise UnknownHostError(f"No state store host of session {run.registration.session_id} is alive.")
            keys = [f"{o}/{p}" for o, p in run.partitions()]
            run.owners = assign(keys, hosts, run.owners, rebalance=rebalance)
            owner = self._hosts.leases[run.owners[f"{operator}/{partition}"]].info
        return OpenGrant(owner, version, run.head(version, operator, partition), run.registration, run.log.epoch)

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

    def lineage(self, run_id: str, operator: str, partition: int, version: int) -> Lineage:
        """The files that lead to a version of a partition; none of that partition are removed while it is loaded."""
        run = self._run(run_id)
        with run.lock:
            self._require_partition(run, operator, partition)
            if version > run.completed:
                raise InvalidRequestError(
                    f"Version {version} is not completed; {run.completed} is the last one that is."
                )
            run.busy[(operator, partition)] = self._clock() + BUSY_SECONDS
            return run.lineage(operator, partition, version)

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
            new, known = message.snapshot, {s.file.path for s in run.snapshots(key, run.completed)}
            counts = (
                run.owners.get(f"{message.operator}/{message.partition}") == message.host_id
                and run.oldest < new.version <= run.completed
                and run.head(new.version, *key) == new.head
                and new.file.path not in known
                and (message.reused is None or message.reused.file.path in known)
            )
            if counts:
                run.unnamed[key] = (*run.unnamed.get(key, ()), new)
            return counts

    def acknowledge(self, message: Acknowledge) -> Acknowledged:
        """A host has made a task's changes durable. The last one is answered when the manifest is durable too."""
        run = self._run(message.run_id)
        with run.lock:
            self._require_current(run)
            self._require_partition(run, message.operator, message.partition)
            key = f"{message.operator}/{message.partition}"
            with self._lock:
                self._hosts.require(message.host_id, message.incarnation)
                if run.owners.setdefault(key, message.host_id) != message.host_id:
                    raise StaleOwnerError(
                        f"Host {message.host_id} does not own {key} of run {run.run_id}; {run.owners[key]} does."
                    )
            if message.version != run.highest_opened + 1 or message.version <= run.completed:
                raise StaleBatchError(
                    f"Version {message.version} of run {run.run_id} cannot be committed: batch {run.highest_opened} is the "
                    f"newest one opened, version {run.completed} the last completed one."
                )
            base = run.head(message.version - 1, message.operator, message.partition)
            if message.base != base:
                raise LineageError(
                    f"Changes of {key} apply to {message.base}, but version {message.version - 1} ends with {base}."
                )
            run.busy.pop((message.operator, message.partition), None)
            task, entry = (message.operator, message.partition), PartitionEntry(message.attempt, message.file)
            prepared = run.entry(message.version, *task)
            if prepared is not None and msgspec.structs.replace(prepared, snapshots=()) == entry:
                # Its answer was lost: the manifest that names it is there.
                return Acknowledged(message.version, run.chain[message.version].id)
            run.pending.setdefault(message.version, {})[task] = entry
            return Acknowledged(message.version, run.prepare(message.version, self._now_ms()))

    def batch_committed(self, run_id: str, batch_id: int) -> Completed | None:
        """Spark reports progress: batch N is committed, so version N + 1 is completed. None if that was known."""
        run = self._run(run_id)
        with run.lock:
            if run.ended or run.retired_by or batch_id + 1 <= run.completed:
                return None
            self._advance(run, batch_id + 1)
            return run.heads(run.completed)

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
                removed = self._remove_garbage(run)
            except (StorageError, CoordinatorError):
                log.warning("Files of run %s that are no longer kept were not removed", run.run_id, exc_info=True)
                continue
            if removed:
                log.info("Deleted files older than %d for run %s: %d files", run.oldest, run.run_id, len(removed))

    def _remove_garbage(self, run: QueryState) -> list[str]:
        """Remove only what the newest manifest, which is durable, says is not kept."""
        storage = run.log.storage
        sizes = dict(storage.list("operators"))
        with run.lock:
            self._require_current(run)
            below = {v: m for v, m in run.chain.items() if v <= run.completed}
            refs = [s for key in run.partitions() for s in chains.snapshots(below, key)]
            refs += [s for unnamed in run.unnamed.values() for s in unnamed]
        self._read_descriptors(run, refs)
        with run.lock:
            self._require_current(run)
            run.log.check_epoch()
            run.plan_retention(
                lambda s: (
                    sizes.get(s.file.path) == s.file.size
                    and s.file.path in run.descriptors
                    and run.descriptors[s.file.path].is_complete(sizes)
                )
            )
            recorded, unnamed = run.recorded, [s for refs in run.unnamed.values() for s in refs]
            if recorded is None or recorded.oldest == 0:
                return []
            now = self._clock()
            busy = tuple(
                f"operators/{o}/{spec.num_partitions}/{p}/"
                for (o, p), until in run.busy.items()
                if until > now and (spec := run.operator(o)) is not None
            )
            self._read_descriptors(run, [*refs, *unnamed])
            try:
                removed = chains.garbage(
                    [*sizes, *storage.unfinished("operators")],
                    run.chain,
                    recorded,
                    lambda s: run.descriptors[s.file.path].paths,
                    unnamed,
                )
            except KeyError as error:
                # Until that snapshot is no longer kept, nobody can tell which files are its own.
                log.warning("Nothing of run %s is removed: the snapshot %s is damaged", run.run_id, error)
                return []
            removed = [path for path in removed if not path.startswith(busy)]
            removed += run.log.forget({m.id for m in run.chain.values()})
        for path in removed:
            storage.delete(path)
        return removed

    @staticmethod
    def _read_descriptors(run: QueryState, refs: list[SnapshotRef]) -> None:
        """Remember the descriptors of these snapshots, but for damaged ones, and of no others."""
        wanted = {s.file.path for s in refs}
        held = run.descriptors
        for ref in refs:
            if ref.file.path not in held:
                try:
                    held = {**held, ref.file.path: snapshot.read_descriptor(run.log.storage, ref)}
                except (DamagedFileError, MissingFileError) as error:
                    log.warning("A snapshot of run %s is damaged: %s", run.run_id, error)
        run.descriptors = {path: held[path] for path in held if path in wanted}

    # -- for query clients ---------------------------------------------------------------------

    def locate(self, operator: str, query: str | None = None) -> OperatorLocation:
        """Where an operator's partitions are. ``query``: name, query id or run id, where several have the operator."""
        with self._lock:
            running = [r for r in self._runs.values() if not r.ended and r.retired_by is None]
        named = [
            r for r in running if query is None or query in (r.registration.name, r.registration.query_id, r.run_id)
        ]
        found = [r for r in named if r.operator(operator) is not None]
        if not found:
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
            owners = tuple(self._grant(run, operator, p, run.completed).owner for p in range(spec.num_partitions))
            return OperatorLocation(
                run.registration.query_id,
                run.run_id,
                run.registration.name,
                spec,
                run.registration.key_groups,
                run.completed,
                owners,
            )

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

    def deactivate_instances(self, run_id: str) -> bool:
        """A run is over: its instances are inactive, and hosts unload them."""
        with self._lock:
            run = self._runs.get(run_id)
        if run is not None:
            with run.lock:
                try:
                    run.name_snapshots(self._now_ms())
                except (StorageError, CoordinatorError):
                    # They only save time: the next run takes new ones.
                    log.warning("The last snapshots of run %s are not named in a manifest", run_id, exc_info=True)
        with self._lock:
            self._instances.deactivate(run_id)
            run = self._runs.get(run_id)
            if run is not None:
                run.ended = True
                del self._runs[run_id]
            self._remember_over(
                run_id, "its query ended" if run is None or run.retired_by is None else f"replaced by {run.retired_by}"
            )
        return True

    def _remember_over(self, run_id: str, why: str) -> None:
        with self._lock:
            self._over[run_id] = why
            while len(self._over) > REMEMBERED_RUNS:
                del self._over[next(iter(self._over))]

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
        pending = max(run.pending, default=None)
        return {
            "query_id": run.registration.query_id,
            "run_id": run.run_id,
            "name": run.registration.name,
            "checkpoint_location": run.registration.checkpoint_location,
            "epoch": run.log.epoch,
            "completed_version": run.completed,
            "prepared_version": max(run.chain, default=0),
            "pending_partitions": len(run.missing(pending)) if pending is not None else 0,
            "retired_by": run.retired_by,
            "operators": {o.name: o.num_partitions for o in run.registration.operators},
        }

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)
