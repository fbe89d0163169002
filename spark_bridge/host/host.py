"""What a StateStoreHost does: owns loaded state, serves reads and commits, follows the coordinator.

A plain class, without Ray and without a network: the coordinator is handed in. It carries on
Spark's executor-side ``StateStore`` object (loaded providers) and Flink's ``KvStateServer``.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Protocol, TypeVar

import pyarrow as pa
from msgspec import to_builtins

from backends.conf import StateStoreConf
from backends.encoding.keys import KeyRange
from backends.exceptions import (
    ConcurrentCommitError,
    LineageMismatchError,
    LocalStateDamagedError,
    StoreClosedError,
    VersionNotFoundError,
)
from backends.formats.changelog import ChangelogMeta, Changes
from backends.formats.file_names import partition_directory
from backends.formats.manifest import Lineage
from backends.ids import DEFAULT_FAMILY
from backends.partition.partition_state import PartitionState, open_partition
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.file_ref import FileRef
from coordinator_actor.exceptions import (
    CoordinatorError,
    InvalidRequestError,
    RetiredRunError,
    StaleBatchError,
    StaleOwnerError,
    UnknownHostError,
    UnknownRunError,
)
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
    OperatorFigures,
    OperatorLocation,
    QueryRegistration,
    Refused,
    RunningOperator,
    SavepointExported,
    SavepointOrder,
    SnapshotUploaded,
)
from coordinator_actor.savepoints.run_savepoints import variables_of
from spark_bridge.exceptions import NotOwnerError, PartitionMismatchError
from spark_bridge.host.acknowledgements import Acknowledgements
from spark_bridge.host.completed_versions import CompletedVersion, CompletedVersions
from spark_bridge.host.savepoint_exports import SavepointExports, Scans
from spark_bridge.transport.protocol import Opened, ScanCommand, TaskIdentity

log = logging.getLogger(__name__)

T = TypeVar("T")

REVOKED_SECONDS = 60.0
"""For how long a host that does not reach the coordinator goes by the revocations that it knows of."""
NOTHING_HELD = 1 << 62
"""The version reported of a run that a host knows, but has no partition of: no version is newer."""
GRANT_SECONDS = 1.0
"""For how long the tasks of a batch go by what the coordinator said to the first of them: owners may have moved since."""
REMEMBERED_COMMITS = 4
"""Of so many versions a host can tell what was done, for those who ask when the next batch has begun."""
ASK_SECONDS = 0.02
"""So long after one question for the completed version the next one is asked, however many readers wait for it."""
UNKNOWN_SECONDS = 0.5
"""For so long a host believes that there is no such run: anybody may name any, and the coordinator has more to do."""
IDLE_RUN_SECONDS = 60.0
"""For so long a host without partitions of a run remembers what it has asked of it last."""
MOST_ASKED = 1000
"""Of so many runs a host knows when it has asked for them."""
InstanceKey = tuple[str, str, int]
"""Query id, operator, partition."""
RunKey = tuple[str, str, int]
"""Run id, operator, partition."""


class CoordinatorPort(Protocol):
    """The messages that a host sends to the coordinator."""

    def register_host(self, info: HostInfo, report: HostReport) -> None:
        """Make the host known, with all it holds."""

    def heartbeat_host(self, host_id: str, incarnation: str, held: Mapping[str, int] | None = None) -> HostOrders:
        """Still here, with these runs at these versions; what is to be done?"""

    def open_batch(self, request: OpenBatch) -> BatchGrant:
        """Ask who owns what in a batch, and what the state of one's own partitions is."""

    def open_for_read(self, run_id: str, operator: str, partition: int) -> OpenGrant:
        """Ask who owns a partition, and what its last completed version is."""

    def lineage(self, run_id: str, operator: str, partition: int, version: int) -> Lineage:
        """The files that lead to a version."""

    def snapshot_uploaded(self, message: SnapshotUploaded) -> bool:
        """Report a snapshot; whether it counts."""

    def acknowledge_many(
        self, run_id: str, host_id: str, incarnation: str, messages: tuple[Acknowledge, ...]
    ) -> tuple[Acknowledged | Refused, ...]:
        """Report durable commits; an answer for each."""

    def verify_instances(
        self, host_id: str, incarnation: str, run_ids: tuple[str, ...]
    ) -> dict[str, dict[str, list[int]]]:
        """What this host owns of runs: operator to partitions."""

    def savepoint_exported(self, message: SavepointExported) -> None:
        """Report that a partition has been exported for a savepoint, or cannot be."""

    def locate(self, operator: str, query: str | None = None) -> OperatorLocation:
        """Find the owners of an operator's partitions."""

    def operators(self) -> tuple[RunningOperator, ...]:
        """The operators of all running queries."""

    def completed(self, run_id: str, host_id: str) -> Completed:
        """The last completed version of a run, with the heads of the host's partitions."""


@dataclass
class Instance:
    """One loaded partition of one operator, as it stands in this host."""

    registration: QueryRegistration
    operator: str
    partition: int
    state: PartitionState
    commit_lock: threading.Lock = field(default_factory=threading.Lock)
    epoch: int = 0
    invocations: dict[str, str] = field(default_factory=dict)
    invocations_of: int = -1
    acknowledged: dict[int, Acknowledge] = field(default_factory=dict)
    commits: dict[int, tuple[dict[str, float], OperatorFigures]] = field(default_factory=dict)
    snapshot_version: int = 0
    rescaled_at: int | None = None
    key_windows: KeyWindows | None = None

    @property
    def key(self) -> InstanceKey:
        """What the host finds it by."""
        return self.registration.query_id, self.operator, self.partition

    @property
    def run_key(self) -> RunKey:
        """What those who name a run find it by."""
        return self.registration.run_id, self.operator, self.partition


class KeyWindows(Protocol):
    """Follows which windows the keys of a partition's rows have."""

    def add(self, base: str | None, head: str, changes: Changes) -> None:
        """The version with the head ``head`` consists of changes to the one with ``base``."""


@dataclass
class _Asking:
    """Who asks for the completed version of a run asks for all that wait; ``at`` is when, of ``time.monotonic``.

    ``answered`` is when the last question that has been answered was asked. ``refusal``: the coordinator said that there is no such run.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    at: float = float("-inf")
    answered: float = float("-inf")
    refusal: UnknownRunError | RetiredRunError | None = None

    def raise_refusal(self) -> None:
        """Raise what the coordinator has said just now."""
        refusal = self.refusal
        if refusal is not None and time.monotonic() - self.at < UNKNOWN_SECONDS:
            raise type(refusal)(*refusal.args)  # one of its own for every thread


@dataclass(frozen=True)
class _Granted:
    """What the coordinator last said of a run, and when."""

    grant: BatchGrant
    at: float
    hosts: tuple[HostInfo, ...]
    owners: Mapping[str, list[int]]


class Host:
    """Loads, commits and answers for the partitions that the coordinator assigns to it.

    ``info`` names this incarnation; ``local_dir`` is the directory of this host, made when needed,
    where an incarnation that was killed may have left its state; ``open_storage(location, options)`` opens the durable files of a query.
    """

    def __init__(
        self,
        info: HostInfo,
        coordinator: CoordinatorPort,
        local_dir: Path,
        *,
        conf: StateStoreConf | None = None,
        open_storage: Callable[[str, Mapping[str, str]], CheckpointStorage] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self._coordinator = coordinator
        self._local_dir = local_dir
        self._conf = conf or StateStoreConf()
        self.open_storage = open_storage or (
            lambda location, options: CheckpointStorage.open(location, options, fsync=self._conf.fsync)
        )
        self._clock = clock
        self._revoked_tokens: frozenset[str] = frozenset()
        self._revoked_until = -math.inf
        shutil.rmtree(self.scratch, ignore_errors=True)  # of an incarnation of this host that was killed
        self.completed = CompletedVersions()
        self._asking: dict[str, _Asking] = {}
        self._instances: dict[InstanceKey, Instance] = {}
        self._by_run: dict[RunKey, Instance] = {}
        self._ended_run_hooks: list[Callable[[str | None], None]] = []
        self._maintained: list[Callable[[], None]] = []
        self._opened: dict[str, int] = {}
        self._registrations: dict[str, QueryRegistration] = {}
        self._registering: threading.Thread | None = None
        self._lock = threading.RLock()
        self._loading: dict[InstanceKey, threading.Lock] = {}
        self._counters = {"opens": 0, "commits": 0, "keys_written": 0, "keys_read": 0, "loads": 0, "snapshots": 0}
        self._uploads = ThreadPoolExecutor(self._conf.maintenance_threads, thread_name_prefix="statestore-maintenance")
        self._uploading: dict[InstanceKey, Future[None]] = {}
        self._loading_runs: dict[object, str] = {}
        self._granted: dict[str, _Granted] = {}
        self._granting: dict[str, threading.Lock] = {}
        self._acknowledgements = Acknowledgements(
            lambda run_id, messages: self._coordinator.acknowledge_many(
                run_id, self.info.host_id, self.info.incarnation, messages
            )
        )
        self._exports = SavepointExports(
            info,
            self._held_for_savepoint,
            self._read_back_for_savepoint,
            self._coordinator.savepoint_exported,
            lambda order: self.open_storage(order.location, order.registration.storage_options),
            local_dir / "savepoints",
        )

    # -- with the coordinator ------------------------------------------------------------------

    def register(self) -> None:
        """Make this host known to the coordinator, reporting all it holds."""
        self._coordinator.register_host(self.info, self.report())

    def _register_again(self) -> None:
        try:
            self.register()
        except Exception:  # the next heartbeat tries again
            log.warning("Host %s could not be registered", self.info.host_id, exc_info=True)

    def report(self) -> HostReport:
        """What a coordinator that starts anew must know from this host."""
        with self._lock:
            pending = tuple(a for i in self._instances.values() for a in list(i.acknowledged.values()))
            held: dict[str, dict[str, list[int]]] = {}
            for i in self._instances.values():
                held.setdefault(i.registration.run_id, {}).setdefault(i.operator, []).append(i.partition)
            return HostReport(tuple(self._registrations.values()), pending, dict(self._opened), held)

    def heartbeat(self) -> None:
        """Renew the lease and carry out what the coordinator answers."""
        with self._lock:
            held = dict.fromkeys(self._registrations, NOTHING_HELD)
            for i in self._instances.values():
                held[i.registration.run_id] = min(i.state.version, held.get(i.registration.run_id, i.state.version))
            for run_id, version in held.items():
                # What is loaded is at a version that the coordinator has said; the other partitions must hear of it too.
                noted = self.completed.newest(run_id)
                held[run_id] = version if noted is None else min(version, noted.version)
        orders = self._coordinator.heartbeat_host(self.info.host_id, self.info.incarnation, held)
        # Answers may overtake each other, and what is revoked stays so.
        self._revoked_tokens = self._revoked_tokens.union(orders.revoked_tokens)
        self._revoked_until = self._clock() + REVOKED_SECONDS
        if not orders.known:
            # Apart, for one query's storage may hang, and the lease must be renewed meanwhile.
            if self._registering is None or not self._registering.is_alive():
                self._registering = threading.Thread(
                    target=self._register_again, name="statestore-register", daemon=True
                )
                self._registering.start()
            self._registering.join(timeout=1.0)
        for completed in orders.completed:
            self.on_completed(completed)
        for run_id in orders.unload_runs:
            self.unload_run(run_id)
        if orders.known:
            self._exports.give_up_others(orders.pending)
        for order in orders.savepoints:
            self._exports.take(order)

    @property
    def revoked_tokens(self) -> frozenset[str] | None:
        """The ids of read-only tokens that count no more; None if the coordinator has not said so yet, or for long."""
        return self._revoked_tokens if self._clock() < self._revoked_until else None

    def on_completed(self, completed: Completed) -> None:
        """Apply the accepted changes of a version that Spark has committed.

        Readers see it in all partitions at once, before it is applied.
        """
        self.completed.note(completed)
        with self._lock:
            instances = [i for i in self._instances.values() if i.registration.run_id == completed.run_id]
        for instance in instances:
            owned = completed.heads.get(instance.operator)
            if owned is None or instance.state.version >= completed.version:
                continue
            head = owned.get(instance.partition)
            if not instance.commit_lock.acquire(blocking=False):
                continue  # a commit is under way, which may wait for long; the next heartbeat brings this again
            try:
                stale = head is None or not self._complete(instance, completed.version, head)
            except StoreClosedError:
                continue  # it was unloaded meanwhile
            finally:
                instance.commit_lock.release()
            if stale:
                # Another host owns it by now, or has made this version, or an earlier incarnation of this one
                # has; if the partition is still ours, the next open loads it.
                self._unload(instance)

    def _complete(self, instance: Instance, version: int, head: str) -> bool:
        try:
            instance.state.complete(version, head)
        except LineageMismatchError:
            return False
        except LocalStateDamagedError as error:
            log.warning("Version %d of %s is loaded anew: %s", version, self._describe_id(instance), error)
            return False
        for done in [v for v in instance.acknowledged if v <= version]:
            del instance.acknowledged[done]
        return True

    def unload_run(self, run_id: str) -> None:
        """Unload the instances of a run that is over, and forget it."""
        with self._lock:
            gone = [i for i in self._instances.values() if i.registration.run_id == run_id]
            self._forget_run(run_id)
        self._tell_ended(run_id)
        for instance in gone:
            self._unload(instance)
        with self._lock:
            is_loading = run_id in self._loading_runs.values()
        for left in () if is_loading else self._local_dir.glob(f"*/{run_id}"):  # of an incarnation that was killed
            shutil.rmtree(left, ignore_errors=True)

    def _forget_run(self, run_id: str) -> None:
        for held in (self._registrations, self._opened, self._granted, self._granting, self._asking):
            held.pop(run_id, None)
        self.completed.forget(run_id)

    def _tell_ended(self, run_id: str | None) -> None:
        for hook in self._ended_run_hooks:
            hook(run_id)

    def on_run_ended(self, hook: Callable[[str | None], None]) -> None:
        """Have a function called with the id of each run that is over here, and with None when the host closes."""
        self._ended_run_hooks.append(hook)

    def on_maintenance(self, work: Callable[[], None]) -> None:
        """Have something quick done with every maintenance."""
        self._maintained.append(work)

    def _unload(self, instance: Instance) -> None:
        with self._loading_lock(instance.key):
            if not self._let_go(instance):
                return
            self._destroy(instance)

    def _let_go(self, instance: Instance) -> bool:
        """No longer find an instance, if it is the one that is found."""
        with self._lock:
            if self._instances.get(instance.key) is not instance:
                return False
            del self._instances[instance.key]
            self._by_run.pop(instance.run_key, None)
            return True

    def _loading_lock(self, key: InstanceKey) -> threading.Lock:
        """Held by whoever loads or unloads a partition."""
        with self._lock:
            return self._loading.setdefault(key, threading.Lock())

    @contextmanager
    def _noted_as_loading(self, run_id: str) -> Iterator[None]:
        """Meanwhile the run's local directory is left alone: what is being loaded is not among the instances yet."""
        token = object()
        with self._lock:
            self._loading_runs[token] = run_id
        try:
            yield
        finally:
            with self._lock:
                del self._loading_runs[token]

    def _destroy(self, instance: Instance) -> None:
        with instance.commit_lock:
            instance.state.destroy()
        log.info("Unloaded %s", self._describe_id(instance))

    def _with_registration(self, call: Callable[[], T]) -> T:
        """Call the coordinator; if it does not know this host or run (it was restarted), report and try again."""
        try:
            return call()
        except (UnknownRunError, UnknownHostError, StaleOwnerError):
            self.register()
            return call()

    # -- the data plane ------------------------------------------------------------------------

    def open(self, task: TaskIdentity) -> Opened:
        """Open the store of a task's partition at version = batch id, or say which host owns it."""
        grant = self._grant(task)
        if (grant.owner.host_id, grant.owner.incarnation) != (self.info.host_id, self.info.incarnation):
            return Opened(grant.owner.address, grant.version)
        with self._lock:
            # Before the state is loaded, which may take long: a coordinator that is restarted meanwhile must know.
            self._registrations[task.run_id] = grant.registration
            self._opened[task.run_id] = max(task.batch_id, self._opened.get(task.run_id, 0))
        instance = self._load(grant, task.operator, task.partition)
        with self._lock:
            self._counters["opens"] += 1
            if instance.invocations_of != task.batch_id:
                instance.invocations, instance.invocations_of = {}, task.batch_id
            earlier = instance.invocations.setdefault(task.attempt, task.invocation)
        if earlier != task.invocation:
            raise PartitionMismatchError(
                f"Task attempt {task.attempt} of operator {task.operator!r} opened partition {task.partition} "
                "a second time. Something behind the operator merges its partitions (coalesce, union); "
                "put .repartition(n) between the operator and it."
            )
        registration = grant.registration
        schema = next(o.schema for o in registration.operators if o.name == task.operator)
        return Opened(None, grant.version, registration.key_groups, schema, grant.times)

    def _grant(self, task: TaskIdentity) -> OpenGrant:
        """Who owns the task's partition, and what its state is: asked for once for all tasks that come close together."""
        with self._lock:
            granting = self._granting.setdefault(task.run_id, threading.Lock())
        with granting:
            held = self._granted.get(task.run_id)
            now = self._clock()
            if held is None or held.grant.version != task.batch_id or not 0 <= now - held.at < GRANT_SECONDS:
                known = 0 if held is None else held.grant.assignment
                request = OpenBatch(task.run_id, task.batch_id, self.info.host_id, self.info.incarnation, known)
                grant = self._with_registration(lambda: self._coordinator.open_batch(request))
                if grant.hosts or held is None:
                    held = _Granted(grant, now, grant.hosts, grant.owners)
                else:
                    held = _Granted(grant, now, held.hosts, held.owners)
                with self._lock:
                    self._granted[task.run_id] = held
                self.completed.note(Completed(task.run_id, grant.version, grant.heads))
        grant = held.grant
        owners = held.owners.get(task.operator, [])
        if not 0 <= task.partition < len(owners):
            raise InvalidRequestError(
                f"Run {task.run_id} has no partition {task.partition} of an operator {task.operator!r}; it has "
                f"{ {name: len(places) for name, places in held.owners.items()} }."
            )
        head = grant.heads.get(task.operator, {}).get(task.partition)
        owner = held.hosts[owners[task.partition]]
        return OpenGrant(owner, grant.version, head, grant.registration, grant.epoch, grant.times)

    def _load(self, grant: OpenGrant, operator: str, partition: int, *, for_read: bool = False) -> Instance:
        """The instance, at exactly the version and lineage of the grant."""
        registration = grant.registration
        key = (registration.query_id, operator, partition)
        with self._loading_lock(key), self._noted_as_loading(registration.run_id):
            with self._lock:
                instance = self._instances.get(key)
                self._registrations[registration.run_id] = registration
            spec = next(o for o in registration.operators if o.name == operator)
            layout = partition_directory(operator, spec.num_partitions, partition)
            if instance is not None and instance.registration.run_id != registration.run_id:
                if grant.epoch < instance.epoch:
                    raise RetiredRunError(
                        f"Run {registration.run_id} has been replaced by run {instance.registration.run_id}; only the newer "
                        "one may go on."
                    )
                with self._lock:
                    self._let_go(instance)
                    retired = instance.registration.run_id
                    if all(i.registration.run_id != retired for i in self._instances.values()):
                        self._forget_run(retired)
                self._tell_ended(retired)
                self._destroy(instance)
                instance = None
            if instance is None:
                storage = self.open_storage(registration.state_location, registration.storage_options)
                conf = with_changes(self._conf, provider=spec.backend)
                state = self._partition_state(registration, storage, layout, conf)
                instance = Instance(registration, operator, partition, state)
            elif grant.version < instance.state.version:
                if for_read:
                    return instance  # what is completed since is as good
                raise StaleBatchError(
                    f"A task of batch {grant.version} is too late: version {instance.state.version} is completed."
                )
            instance.epoch = grant.epoch
            try:
                with instance.commit_lock:
                    self._advance(instance, grant)
            except BaseException:
                self._let_go(instance)
                self._destroy(instance)
                raise
            with self._lock:
                self._instances[key] = instance
                self._by_run[instance.run_key] = instance
            return instance

    def _partition_state(
        self, registration: QueryRegistration, storage: CheckpointStorage, layout: str, conf: StateStoreConf
    ) -> PartitionState:
        """In the directory that an earlier incarnation of this host may have left: what is there is used if it proves right."""
        runs = self._local_dir / registration.query_id
        with self._lock:
            held = {i.registration.run_id for i in self._instances.values()}
        for left in runs.iterdir() if runs.exists() else ():
            if left.name not in held | {registration.run_id}:
                shutil.rmtree(left, ignore_errors=True)  # of an incarnation that was killed
        local = runs / registration.run_id / layout
        open_state = open_partition
        try:
            return open_state(local, storage, layout, conf)
        except ConcurrentCommitError:
            # That incarnation is not quite dead.
            return open_state(local.with_name(f"{local.name}-{self.info.incarnation}"), storage, layout, conf)

    def _advance(self, instance: Instance, grant: OpenGrant) -> None:
        """Bring an instance to the grant's version: by its own accepted changes, else from storage."""
        state = instance.state
        if (state.version, state.head) == (grant.version, grant.head):
            return
        if (
            grant.head is not None
            and grant.version == state.version + 1
            and self._complete(instance, grant.version, grant.head)
        ):
            return
        lineage = Lineage(0)
        if grant.head is not None:
            run_id = instance.registration.run_id
            lineage = self._coordinator.lineage(run_id, instance.operator, instance.partition, grant.version)
        started = time.perf_counter()
        state.load(lineage)
        instance.snapshot_version = max((s.version for s in lineage.snapshots), default=0)
        if lineage.rescaled is not None and not lineage.snapshots:
            instance.rescaled_at = lineage.rescaled.version
        with self._lock:
            self._counters["loads"] += 1
        log.info(
            "Loaded version %d of %s in %.0f ms",
            grant.version,
            self._describe_id(instance),
            (time.perf_counter() - started) * 1e3,
        )

    def instance(self, run_id: str, operator: str, partition: int) -> Instance | None:
        """A partition as it is loaded here, if it is."""
        return self._by_run.get((run_id, operator, partition))

    def registration(self, run_id: str) -> QueryRegistration | None:
        """A run that this host has, or has had, partitions of."""
        return self._registrations.get(run_id)

    def get_many(
        self,
        run_id: str,
        operator: str,
        partition: int,
        version: int | None,
        keys: pa.BinaryArray,
        column_family: str = DEFAULT_FAMILY,
    ) -> pa.BinaryArray:
        """Values of keys at a version (None: the last completed one); null where a key has none.

        A column family that was never written to is empty.
        Raises ``NotOwnerError`` if the partition is not this host's, or not open here at that version.
        """
        instance = self.instance(run_id, operator, partition)
        if version is None:
            instance = self._for_read(run_id, operator, partition, instance)
        elif instance is None or instance.state.version != version:
            raise self._not_open(run_id, operator, partition, version)
        try:
            if column_family != DEFAULT_FAMILY and column_family not in instance.state.column_families(version):
                return pa.nulls(len(keys), pa.binary())
            values = instance.state.get_many(keys, version, column_family)
        except (VersionNotFoundError, StoreClosedError) as error:
            raise self._not_open(run_id, operator, partition, version) from error
        with self._lock:
            self._counters["keys_read"] += len(keys)
        return values

    def scan(self, command: ScanCommand, ranges: Sequence[KeyRange]) -> Iterator[pa.RecordBatch]:
        """The pairs of ranges of keys, one range after the other; raises as ``get_many`` does."""
        run_id, operator, partition, version = command.run_id, command.operator, command.partition, command.version
        instance = self.instance(run_id, operator, partition)
        if instance is None or instance.state.version != version:
            raise self._not_open(run_id, operator, partition, version)
        left = command.limit
        try:
            is_there = command.column_family in instance.state.column_families(version)
            for start, end in ranges if is_there else ():
                for batch in instance.state.scan(version, start, end, command.column_family):
                    pairs = batch if left is None else batch.slice(0, left)
                    if left is not None:
                        left -= pairs.num_rows
                    if pairs.num_rows:
                        yield pairs
                    if left == 0:
                        return
        except (VersionNotFoundError, StoreClosedError) as error:
            raise self._not_open(run_id, operator, partition, version) from error

    def _not_open(self, run_id: str, operator: str, partition: int, version: int | None) -> NotOwnerError:
        return NotOwnerError(
            f"Partition {partition} of operator {operator!r} (run {run_id}) is not open at version {version} in host "
            f"{self.info.host_id}; open it again."
        )

    def _for_read(self, run_id: str, operator: str, partition: int, held: Instance | None) -> Instance:
        return held if held is not None else self.load_for_read(run_id, operator, partition)

    def load_for_read(self, run_id: str, operator: str, partition: int, *, again: bool = False) -> Instance:
        """Note the last completed version of a partition as the coordinator knows it now, and load it if it is not loaded.

        ``again``: even if it is, for it does not have that version. Raises ``NotOwnerError`` if it is another host's, and what the coordinator raises.
        """
        grant = self.open_for_read(run_id, operator, partition)
        if (grant.owner.host_id, grant.owner.incarnation) != (self.info.host_id, self.info.incarnation):
            raise NotOwnerError(
                f"Partition {partition} of operator {operator!r} belongs to host {grant.owner.host_id} "
                f"at {grant.owner.address}, not to {self.info.host_id}; locate it again."
            )
        heads = {} if grant.head is None else {operator: {partition: grant.head}}
        self.completed.note(Completed(run_id, grant.version, heads))
        held = None if again else self.instance(run_id, operator, partition)
        return self._load(grant, operator, partition, for_read=True) if held is None else held

    def open_for_read(self, run_id: str, operator: str, partition: int) -> OpenGrant:
        """Ask the coordinator who owns a partition, and what its state is."""
        return self._of_run(run_id, lambda: self._coordinator.open_for_read(run_id, operator, partition))

    def _of_run(self, run_id: str, call: Callable[[], T]) -> T:
        """Call the coordinator about a run. Only of a run that this host holds can it be told anew that there is one."""
        return self._with_registration(call) if run_id in self._registrations else call()

    def completed_version(self, run_id: str, at_least: int, seconds: float) -> CompletedVersion | None:
        """The last completed version of a run that this host knows of; if it is not ``at_least`` that, the coordinator is asked.

        Asks again until ``seconds`` are over, for all that wait together, and then gives what is known. Raises what the
        coordinator raises, as ``RetiredRunError`` if the run is over.
        """
        newest = self.completed.newest(run_id)
        if newest is not None and newest.version >= at_least:
            return newest
        deadline = time.monotonic() + seconds
        with self._lock:
            asking = self._asking.get(run_id)
            if asking is None:
                while len(self._asking) >= MOST_ASKED:
                    del self._asking[next(iter(self._asking))]
                asking = self._asking[run_id] = _Asking()
        while True:
            newest = self.completed.newest(run_id)
            left = deadline - time.monotonic()
            if (newest is not None and newest.version >= at_least) or left <= 0:
                return newest
            if not asking.lock.acquire(timeout=left):
                continue
            try:
                if run_id not in self._registrations:
                    asking.raise_refusal()
                # Somebody else may have asked meanwhile.
                pause = asking.at + ASK_SECONDS - time.monotonic()
                newest = self.completed.wait(run_id, at_least, min(left, pause))
                if newest is None or newest.version < at_least:
                    asking.at, asking.refusal = time.monotonic(), None
                    self.completed.note(
                        self._of_run(run_id, lambda: self._coordinator.completed(run_id, self.info.host_id))
                    )
                    asking.answered = asking.at
            except (UnknownRunError, RetiredRunError) as error:
                asking.refusal = type(error)(*error.args)
                if run_id not in self._registrations:  # else the heartbeat says that it is over
                    self.completed.forget(run_id)
                    self._tell_ended(run_id)
                raise
            finally:
                asking.lock.release()

    def has_asked_since(self, run_id: str, moment: float) -> bool:
        """Whether ``completed_version`` has asked for a run since then, a time of ``time.monotonic``, and was answered."""
        asking = self._asking.get(run_id)
        return asking is not None and asking.answered >= moment

    def commit(
        self,
        task: TaskIdentity,
        changes: Changes,
        timings: Mapping[str, float],
        figures: OperatorFigures | None = None,
    ) -> Acknowledged:
        """Make a task's changes durable and acknowledge them; returns when the coordinator has accepted.

        The changelog is durable before the coordinator hears of it (DESIGN, rule 2). If the
        coordinator refuses, nothing has changed.
        """
        instance = self.instance(task.run_id, task.operator, task.partition)
        if instance is None or instance.state.version != task.batch_id:
            raise self._not_open(task.run_id, task.operator, task.partition, task.batch_id)
        started = time.perf_counter()
        spec = next(o for o in instance.registration.operators if o.name == task.operator)
        version = task.batch_id + 1
        with instance.commit_lock:
            meta = ChangelogMeta(
                query_run_id=task.run_id,
                operator=task.operator,
                partition=task.partition,
                num_partitions=spec.num_partitions,
                version=version,
                attempt=task.attempt,
                base=instance.state.head,
            )
            try:
                file = instance.state.stage(meta, changes)
                if instance.key_windows is not None:
                    instance.key_windows.add(meta.base, file.path, changes)
            except (LineageMismatchError, StoreClosedError) as error:
                raise self._not_open(task.run_id, task.operator, task.partition, task.batch_id) from error
            durable = time.perf_counter()
            message = self._acknowledgement(meta, file, durable - started)
            try:
                answer = self._with_registration(lambda: self._acknowledgements.acknowledge(message))
            except CoordinatorError:
                instance.state.discard(version, task.attempt)
                raise
            instance.state.accept(version, task.attempt)
            instance.acknowledged[version] = message
        done = time.perf_counter()
        with self._lock:
            self._counters["commits"] += 1
            self._counters["keys_written"] += changes.num_changes
            milliseconds = {
                **timings,
                "changelog_ms": (durable - started) * 1e3,
                "acknowledge_ms": (done - durable) * 1e3,
            }
            earlier = {v: c for v, c in instance.commits.items() if version - REMEMBERED_COMMITS < v < version}
            instance.commits = {**earlier, version: (milliseconds, figures or OperatorFigures())}
        return answer

    def _acknowledgement(self, meta: ChangelogMeta, file: FileRef, duration: float) -> Acknowledge:
        return Acknowledge(
            run_id=meta.query_run_id,
            operator=meta.operator,
            partition=meta.partition,
            version=meta.version,
            attempt=meta.attempt,
            host_id=self.info.host_id,
            incarnation=self.info.incarnation,
            file=file,
            base=meta.base,
            duration=duration,
        )

    # -- maintenance ---------------------------------------------------------------------------

    def do_maintenance(self) -> list[Future[None]]:
        """Unload what is another's by now, and begin to upload the snapshots that are due, a few partitions at a time."""
        log.debug("Doing maintenance")
        for work in self._maintained:
            work()
        self._forget_idle_runs()
        self._unload_others()
        begun = []
        with self._lock:
            for key, instance in self._instances.items():
                running = self._uploading.get(key)
                version = instance.state.version
                # What was made of an earlier layout's files is expensive to load until it has a snapshot of its own.
                if instance.rescaled_at is not None:
                    is_due = version > instance.rescaled_at
                else:
                    is_due = version - instance.snapshot_version >= self._conf.deltas_per_snapshot
                if is_due and (running is None or running.done()):
                    self._uploading[key] = self._uploads.submit(self._upload_snapshot, instance)
                    begun.append(self._uploading[key])
            for key in [k for k, f in self._uploading.items() if f.done() and k not in self._instances]:
                del self._uploading[key]
        return begun

    def _forget_idle_runs(self) -> None:
        """Of runs that this host has no part of, nobody says that they are over; who asks for one again, has it asked for."""
        until = time.monotonic() - IDLE_RUN_SECONDS
        for run_id in self.completed.runs():
            asking = self._asking.get(run_id)
            if run_id not in self._registrations and (asking is None or asking.at <= until):
                self.completed.forget(run_id)

    def _unload_others(self) -> None:
        with self._lock:
            # What is being opened now, the coordinator has just assigned; it is looked at the next time.
            held = list(self._instances.values())
            run_ids = tuple({i.registration.run_id for i in held})
        if not run_ids:
            return
        owned = self._coordinator.verify_instances(self.info.host_id, self.info.incarnation, run_ids)
        for instance in held:
            of_run = owned.get(instance.registration.run_id)
            is_ours = of_run is None or instance.partition in of_run.get(instance.operator, ())
            log.debug("Verified that state store %s is active: %s", self._describe_id(instance), is_ours)
            if not is_ours:
                self._unload(instance)

    def _upload_snapshot(self, instance: Instance) -> None:
        run_id, operator, partition = instance.registration.run_id, instance.operator, instance.partition
        try:
            lineage = self._coordinator.lineage(run_id, operator, partition, instance.state.version)
            earlier = lineage.snapshots[-1] if lineage.snapshots else None
            made = instance.state.snapshot(earlier)
            message = SnapshotUploaded(
                run_id, operator, partition, self.info.host_id, self.info.incarnation, made, earlier
            )
            if self._with_registration(lambda: self._coordinator.snapshot_uploaded(message)):
                instance.snapshot_version = made.version
                instance.rescaled_at = None
            with self._lock:
                self._counters["snapshots"] += 1
        except StoreClosedError:
            log.debug("%s was unloaded while a snapshot of it was taken", self._describe_id(instance))
        except Exception:  # whatever it is, it must not be lost in a thread, and the next round tries again
            log.warning("Error managing %s; no snapshot was taken", self._describe_id(instance), exc_info=True)

    def _held_for_savepoint(self, order: SavepointOrder, operator: str, partition: int) -> Scans | None:
        """A partition at the version of a savepoint, as it is held here; None if it is not, or no longer."""
        instance = self.instance(order.run_id, operator, partition)
        # What is accepted for a version that is not completed here yet need not be what the manifest names.
        if instance is None or instance.state.version < order.version:
            return None
        spec = next(o for o in order.registration.operators if o.name == operator)
        try:
            return _scans(instance.state, variables_of(spec.schema), order.version)
        except (VersionNotFoundError, StoreClosedError):
            log.debug("Version %d of %s is not held", order.version, self._describe_id(instance))
            return None

    def _read_back_for_savepoint(
        self, order: SavepointOrder, operator: str, partition: int
    ) -> tuple[Scans, Callable[[], None]]:
        """A copy of a partition from storage, at the version of a savepoint, and what removes it."""
        registration = order.registration
        spec = next(o for o in registration.operators if o.name == operator)
        lineage = self._coordinator.lineage(order.run_id, operator, partition, order.version)
        storage = self.open_storage(registration.state_location, registration.storage_options)
        # To count keys, replaying would have to look up every one that it writes.
        conf = with_changes(self._conf, provider=spec.backend, track_total_number_of_rows=False)
        local = self._local_dir / "savepoints" / uuid.uuid4().hex
        layout = partition_directory(operator, spec.num_partitions, partition)
        copy = open_partition(local, storage, layout, conf)
        try:
            copy.load(lineage)
            return _scans(copy, variables_of(spec.schema)), copy.destroy
        except BaseException:
            copy.destroy()
            raise

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        """Where an operator's partitions are, for query clients."""
        return self._coordinator.locate(operator, query)

    def operators(self) -> tuple[RunningOperator, ...]:
        """The operators of all running queries, whichever hosts have them."""
        return self._coordinator.operators()

    def lineage(self, run_id: str, operator: str, partition: int, version: int) -> Lineage:
        """The files that lead to a retained version of a partition, for a copy of it."""
        return self._of_run(run_id, lambda: self._coordinator.lineage(run_id, operator, partition, version))

    def open_copy(self, registration: QueryRegistration, directory: str, backend: str, local: Path) -> PartitionState:
        """An empty state in the directory ``local``, into which versions of the partition in ``directory`` can be loaded."""
        storage = self.open_storage(registration.state_location, registration.storage_options)
        conf = with_changes(self._conf, provider=backend, track_total_number_of_rows=False, max_versions_in_memory=0)
        return open_partition(local, storage, directory, conf)

    def partitions(self, run_id: str, operator: str) -> list[dict[str, int]]:
        """The partitions of an operator that are loaded here, with their versions and sizes."""
        with self._lock:
            held = [i for (run, name, _), i in self._by_run.items() if (run, name) == (run_id, operator)]
        sized = []
        for instance in held:
            with suppress(StoreClosedError):  # it is being unloaded
                sized.append(
                    {"partition": instance.partition, "version": instance.state.version, **_size(instance.state)}
                )
        return sorted(sized, key=lambda one: one["partition"])

    def count_keys_read(self, number: int) -> None:
        """For ``describe``."""
        with self._lock:
            self._counters["keys_read"] += number

    # -- life ----------------------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        """What this host is and holds, for people."""
        with self._lock:
            counters, held = dict(self._counters), list(self._instances.values())
        described = []
        for instance in held:  # without the lock: a partition that is just being loaded tells its size only then
            with suppress(StoreClosedError):  # it is being unloaded
                described.append(_described(instance))
        return {
            "host_id": self.info.host_id,
            "incarnation": self.info.incarnation,
            "address": self.info.address,
            "node_id": self.info.node_id,
            **counters,
            "instances": described,
        }

    def close(self) -> None:
        """Unload everything and remove the local files."""
        for run_id in {i.registration.run_id for i in list(self._instances.values())}:
            self.unload_run(run_id)
        self._tell_ended(None)
        self._exports.close()
        self._uploads.shutdown(cancel_futures=True)

    @property
    def scratch(self) -> Path:
        """Where copies of partitions may be kept for a while; of what is there, an earlier incarnation needs nothing."""
        return self._local_dir / "copies"

    @staticmethod
    def _describe_id(instance: Instance) -> str:
        return f"StateStoreId[operator={instance.operator}, partition={instance.partition}]"


def _described(instance: Instance) -> dict[str, object]:
    commits = instance.commits
    return {
        "query_id": instance.registration.query_id,
        "run_id": instance.registration.run_id,
        "operator": instance.operator,
        "partition": instance.partition,
        "version": instance.state.version,
        **_size(instance.state),
        "last_commit": {"version": max(commits), **commits[max(commits)][0]} if commits else {},
        "commits": {v: {"ms": ms, **to_builtins(f)} for v, (ms, f) in commits.items()},
    }


def _size(state: PartitionState) -> dict[str, int]:
    figures = state.metrics()
    return {"keys": figures.num_keys, "memory_bytes": figures.memory_bytes}


def _scans(state: PartitionState, variables: Iterable[str], version: int | None = None) -> Scans:
    """Of all state variables; one that was never written to is empty."""
    there = state.column_families(version)
    return {v: state.scan(version, column_family=v) if v in there else iter(()) for v in variables}
