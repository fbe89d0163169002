"""``Host``: owns loaded state partitions, serves reads and commits, and follows the coordinator.

Plain classes without Ray and without a network: the coordinator is handed in. A host carries on Spark's executor-side
``StateStore`` object (loaded providers) and Flink's ``KvStateServer``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import pyarrow as pa

from backends import spans
from backends.conf import DEFAULT_FAMILY, StateStoreConf
from backends.encoding.keys import KeyRange
from backends.exceptions import StoreClosedError, VersionNotFoundError
from backends.formats.changelog import Changes
from backends.host_memory import host_memory
from backends.load_watch import LoadProgress
from backends.storage.checkpoint_storage import OpenStorage
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.messages import Acknowledged, Completed, HostInfo, OpenGrant, OperatorFigures
from spark_bridge.exceptions import NotOwnerError, PartitionMismatchError, not_open
from spark_bridge.host.commits import GroupCommits, TaskCommits
from spark_bridge.host.exports import SavepointExports, pin_scans, scans_read_back
from spark_bridge.host.hand_overs import HandOvers
from spark_bridge.host.instances import Counters, Instance, PartitionFiles, spec_of
from spark_bridge.host.local_disk import IN_USE_SECONDS, DiskRoom, LocalDisk
from spark_bridge.host.maintenance import Maintenance
from spark_bridge.host.partition_cache import PartitionCache
from spark_bridge.host.partition_loader import PartitionLoader
from spark_bridge.host.prepared_versions import PreparedVersions, VersionRequests
from spark_bridge.host.registration import CompletedVersions, Grants, HostRegistration, RunOrders
from spark_bridge.host.running_loads import Loads
from spark_bridge.transport.protocol import GetCommand, OpenReply, ScanCommand, TaskIdentity

# Reading a host's partitions: bulk reads for tasks, and loading for queries (``spark_bridge.queryable.reads``).


LOOK_WAIT_SECONDS = 10.0
"""A partition that is loaded for a query waits at most this many seconds for the answer whether Spark has committed a
prepared version.
"""


def _ascending(ranges: Sequence[KeyRange]) -> Iterator[Sequence[KeyRange]]:
    """Yield ranges in runs that ascend and do not overlap: the sweep of expired values begins in the middle."""
    begin = 0
    for i in range(1, len(ranges)):
        end = ranges[i - 1][1]
        if end is None or end > ranges[i][0]:
            yield ranges[begin:i]
            begin = i
    yield ranges[begin:]


@dataclass(eq=False, repr=False)
class PartitionReads:
    """Thread-safe without a lock: a partition's state guards itself."""

    _registration: HostRegistration
    _cache: PartitionCache
    _loader: PartitionLoader
    _grants: Grants
    _completed: CompletedVersions
    _prepared: PreparedVersions
    _counters: Counters

    # -- tasks ---------------------------------------------------------------------------------

    def get_many(self, command: GetCommand, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Return the values of keys at a version (None: the last completed one); null for keys without a value.

        A column family that was never written to is empty.
        Raises ``NotOwnerError`` if the partition is not this host's, or not open here at that version.
        """
        version, family = command.version, command.column_family
        instance = self._cache.instance(command.run_id, command.operator, command.partition)
        if version is None:
            instance = instance or self.load(command.run_id, command.operator, command.partition)
        elif instance is None or instance.state.version != version:
            raise self._not_open(command)
        try:
            if family != DEFAULT_FAMILY and family not in instance.state.reads.column_families(version):
                return pa.nulls(len(keys), pa.binary())
            values = instance.state.reads.get_many(keys, version, family)
        except (VersionNotFoundError, StoreClosedError) as error:
            raise self._not_open(command) from error
        self._counters.count("keys_read", len(keys))
        return values

    def scan(self, command: ScanCommand, ranges: Sequence[KeyRange]) -> Iterator[pa.RecordBatch]:
        """Yield the pairs (``key``, ``value``) of ranges of keys, one range after the other. Raises as ``get_many``."""
        instance = self._cache.instance(command.run_id, command.operator, command.partition)
        if instance is None or instance.state.version != command.version:
            raise self._not_open(command)
        version, left = command.version, command.limit
        try:
            reads, family = instance.state.reads, command.column_family
            if family not in reads.column_families(version):
                return
            in_turn = (reads.scan_in_turn(run, version, family) for run in _ascending(ranges))
            for batch in chain.from_iterable(in_turn):
                pairs = batch if left is None else batch.slice(0, left)
                if left is not None:
                    left -= pairs.num_rows
                if pairs.num_rows:
                    yield pairs
                if left == 0:
                    return
        except (VersionNotFoundError, StoreClosedError) as error:
            raise self._not_open(command) from error

    def _not_open(self, of: GetCommand | ScanCommand) -> NotOwnerError:
        return not_open(self._registration.info.host_id, of.run_id, of.operator, of.partition, of.version)

    # -- queries -------------------------------------------------------------------------------

    def load(self, run_id: str, operator: str, partition: int, *, again: bool = False) -> Instance:
        """Record the coordinator's last completed version of a partition, and return the partition loaded at it.

        With ``again``, ask even if the partition is loaded, because it lacks that version. Raises ``NotOwnerError`` if
        another host owns the partition, and the errors of the coordinator.
        """
        grant = self._own_grant(run_id, operator, partition)
        if grant.is_begun:
            # An earlier incarnation of this host, or another host, may have accepted changes of the batch: this one
            # must not begin behind Spark.
            self._prepared.accepted(grant.registration, grant.version + 1)
            self._prepared.settle(run_id, LOOK_WAIT_SECONDS)
            grant = self._own_grant(run_id, operator, partition)
        heads = {} if grant.head is None else {operator: {partition: grant.head}}
        self._completed.note(Completed(run_id, grant.version, heads, created_ms=grant.created_ms))
        instance = None if again else self._cache.instance(run_id, operator, partition)
        return self._loader.load(grant, operator, partition, for_read=True) if instance is None else instance

    def _own_grant(self, run_id: str, operator: str, partition: int) -> OpenGrant:
        grant = self._grants.for_read(run_id, operator, partition)
        if not self._registration.owns(grant.owner):
            raise NotOwnerError(
                f"Partition {partition} of operator {operator!r} belongs to host {grant.owner.host_id} "
                f"at {grant.owner.address}, not to {self._registration.info.host_id}; locate it again."
            )
        return grant

    def partitions(self, run_id: str, operator: str) -> list[dict[str, int]]:
        """Return the partitions of an operator that are loaded here, ascending, with their versions and sizes."""
        sized = []
        for instance in self._cache.of_run(run_id, operator):
            if instance.state.is_loading:
                continue
            with suppress(StoreClosedError):  # it is being unloaded
                sized.append({"partition": instance.partition, "version": instance.state.version, **instance.size()})
        return sorted(sized, key=lambda one: one["partition"])


REVOKED_SECONDS = 60.0
"""For how long a host that does not reach the coordinator goes by the revocations that it knows of."""


class Host:
    """Loads, commits and answers for the partitions that the coordinator assigns to it.

    ``info`` names this incarnation; ``local_dir`` is the directory of this host, made when needed, where an incarnation
    that was killed may have left its state; ``open_storage(location, options)`` opens the durable files of a query.

    Each part has one concern: ``cache`` (partitions and runs), ``grants`` (owners), ``loader`` with ``loads`` (under
    way), ``task_commits``, ``group_commits`` (changelogs that are stored together) and ``reads``. ``completed``,
    ``prepared`` and ``version_requests`` know the completed versions. Further parts are ``hand_overs`` (partitions
    that move), ``maintenance`` and ``exports`` (savepoints). Locks are taken in the order: the loading lock of a
    partition (``PartitionCache``), its commit lock (``Instance``), the lock of the tables (``PartitionCache``), and
    last the locks that ``Grants``, ``VersionRequests``, ``CompletedVersions``, ``Loads``, ``GroupCommits`` and
    ``Counters`` hold for their own tables.
    """

    def __init__(
        self,
        info: HostInfo,
        coordinator: CoordinatorPort,
        local_dir: Path,
        *,
        conf: StateStoreConf | None = None,
        open_storage: OpenStorage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        conf = conf or StateStoreConf()
        self.info = info
        self.coordinator = coordinator
        self._clock = clock
        self._began = clock()
        self._revoked_tokens: frozenset[str] = frozenset()
        self._revoked_until = -math.inf
        self._orders = RunOrders()
        self._looked_at: dict[str, float] = {}
        """By run of a late follower, when storage was last looked at with success, by ``clock``."""
        self._announced: dict[str, tuple[int, str]] = {}
        """By run, the version and the exchange of files that the last heartbeat's answer has announced."""
        self._unknown_runs: frozenset[str] = frozenset()
        """The runs that the coordinator did not know at the last heartbeat, or has not taken this host's report of."""
        self.counters = Counters()
        self.memory = host_memory(conf)
        self.completed = CompletedVersions()
        self.files = PartitionFiles(local_dir, info.incarnation, conf, open_storage)
        self.loads = Loads(clock)
        cache = self.cache = PartitionCache(self.files, clock)
        registration = self.registration = HostRegistration(info, coordinator, cache, self.completed, clock)
        self.version_requests = VersionRequests(registration, cache, self.completed)
        self.grants = Grants(registration, self.completed, clock)
        for forget in (self.grants.forget, self.version_requests.forget, self.completed.forget, self.loads.end_run):
            cache.on_run_forgotten(forget)
        cache.on_run_ended(self.loads.forget_failures)
        self.disk = LocalDisk(local_dir, conf.local_disk_bytes, clock)
        room = DiskRoom(cache, self.disk, clock)
        self.loader = PartitionLoader(
            registration, cache, self.loads, self.files, self.completed, self.counters, clock, room, self.disk
        )
        self.hand_overs = HandOvers(info, cache, self.loader, self.completed, clock)
        self.prepared = PreparedVersions(
            registration, cache, self.completed, self.files.open_storage, self.hand_overs.gives
        )
        self.group_commits = GroupCommits(conf.commit_linger, self.memory, clock)
        cache.on_run_ended(self.group_commits.forget)
        self.task_commits = TaskCommits(
            registration, cache, self.prepared, self.counters, self.group_commits, self.disk.notify
        )
        self.reads = PartitionReads(
            registration, cache, self.loader, self.grants, self.completed, self.prepared, self.counters
        )
        self.maintenance = Maintenance(
            registration, cache, self.version_requests, self.counters, self.memory, conf, clock
        )
        self.maintenance.on_maintenance(room.keep_within_disk)
        self.maintenance.on_maintenance(self.grants.forget_idle_runs)
        self.exports = SavepointExports(
            info,
            partial(pin_scans, cache),
            partial(scans_read_back, self.loader),
            coordinator.savepoint_exported,
            lambda order: self.files.open_storage(order.location, order.registration.storage_options),
            self.files.savepoints,
        )

    # -- tasks ---------------------------------------------------------------------------------

    def open(self, task: TaskIdentity) -> OpenReply:
        """Open the store of a task's partition at version = batch id, or return the address of the host that owns it.

        If the load takes long, the answer has its progress; the task asks again. Raises
        ``PartitionMismatchError`` if the task opens the partition a second time, and the errors of loading and the
        coordinator.
        """
        trace = spans.batch(task.run_id, task.batch_id + 1)
        with spans.span("host.open", trace, operator=task.operator, partition=task.partition) as span:
            reply = self._opened(task)
            span.note(redirected=reply.redirect is not None, loading=reply.loading is not None)
            return reply

    def _opened(self, task: TaskIdentity) -> OpenReply:
        asked = self._clock()
        grant = self.grants.for_task(task)
        if not self.registration.owns(grant.owner):
            return OpenReply(grant.owner.address, grant.version)
        # Before the state is loaded, which may take long: a coordinator that restarts during the load must know.
        self.cache.note_opened(grant.registration, task.batch_id)
        # Before that, too: those that are loaded first are stored together with those that are loaded next.
        self.group_commits.opened(task.run_id, task.batch_id + 1, task.operator, task.partition)
        instance = self.loader.open_for_task(grant, task.operator, task.partition, task.invocation)
        if isinstance(instance, LoadProgress):
            return OpenReply(None, grant.version, loading=instance)
        self.counters.count("opens")
        if instance.loaded_at == task.batch_id:
            # Another host may have accepted changes of the batch before: this task may be a duplicate.
            self.prepared.accepted(grant.registration, task.batch_id + 1)
        with self.cache.lock:
            if instance.invocations_of != task.batch_id:
                instance.invocations, instance.invocations_of, instance.opened_at = {}, task.batch_id, asked
            instance.in_use_until = asked + IN_USE_SECONDS
            instance.note_use()
            earlier = instance.invocations.setdefault(task.attempt, task.invocation)
        if earlier != task.invocation:
            raise PartitionMismatchError(
                f"Task attempt {task.attempt} of operator {task.operator!r} opened partition {task.partition} "
                "a second time. Something after the operator merges its partitions (coalesce, union); "
                "put .repartition(n) between the operator and it."
            )
        schema = spec_of(grant.registration, task.operator).schema
        return OpenReply(None, grant.version, grant.registration.key_groups, schema, grant.times)

    def commit(
        self, task: TaskIdentity, changes: Changes, timings: Mapping[str, float], figures: OperatorFigures | None = None
    ) -> Acknowledged:
        trace = spans.batch(task.run_id, task.batch_id + 1)
        with spans.span("host.commit", trace, operator=task.operator, partition=task.partition):
            return self.task_commits.commit(task, changes, timings, figures)

    # -- the coordinator -----------------------------------------------------------------------

    def register(self) -> None:
        self.registration.register()

    def lag_ms(self, run_id: str) -> int:
        """Return how many ms ago storage was last looked at, for a run that follows a query and is late; else 0."""
        looked_at = self._looked_at.get(run_id)
        return 0 if looked_at is None else int(1000 * (self._clock() - looked_at))

    def heartbeat(self) -> None:
        """Renew the lease and carry out the coordinator's orders. Does not wait for the storage of any query."""
        hand_over = self.hand_overs.report()
        orders = self.registration.renew(hand_over)
        # Answers may overtake each other, and a token that is revoked stays revoked.
        self._revoked_tokens = self._revoked_tokens.union(orders.revoked_tokens)
        self._revoked_until = self._clock() + REVOKED_SECONDS
        if not orders.known or any(orders.unknown_runs.values()):
            self.registration.report_apart(orders)
        if orders.known:
            self._unknown_runs = frozenset(orders.unknown_runs)
            self._announced = {c.run_id: (c.version, c.rewritten) for c in orders.completed}
            self.registration.is_informed = True
            for warm in orders.warm_up:
                if warm.registration.run_id not in self._announced:
                    # A host that has only copies of a run gets no announcements of it.
                    completed = Completed(warm.registration.run_id, warm.version, {}, created_ms=warm.created_ms)
                    self.completed.note(completed)
        by_run: dict[str, list[Callable[[], None]]] = {}
        for completed in orders.completed:
            by_run.setdefault(completed.run_id, []).append(partial(self.loader.complete, completed))
        for run_id in orders.unload_runs:
            by_run.setdefault(run_id, []).append(partial(self.cache.unload_run, run_id))
        for run_id, renew in self.loads.due_leases():
            by_run.setdefault(run_id, []).append(renew)
        for run_id in self.cache.note_ended(orders.ended_runs):
            by_run.setdefault(run_id, []).append(partial(self.maintenance.write_out_ended, run_id))
        if orders.known:
            of_unknown = {run_id: at for run_id, at in self._looked_at.items() if run_id in self._unknown_runs}
            self._looked_at = of_unknown | {run_id: self._clock() - lag for run_id, lag in orders.lags.items()}
        # Before the versions are recorded: from here on, partitions that may move are tracked.
        self.hand_overs.follow(hand_over.number, orders)
        self._orders.carry_out(by_run)
        if orders.known:
            self.exports.give_up_others(orders.pending, orders.unknown_runs)
        for order in orders.savepoints:
            self.exports.begin_exports(order)

    def knows_newest(self, run_id: str) -> bool:
        """Return whether this host knows the newest version of a run as of its last heartbeat, and its lease runs.

        It does not after it has registered again, while the coordinator does not know the run, or before it has carried
        out what the last heartbeat's answer says of the run: its copies may be of files that were exchanged.
        """
        if not self.registration.is_leased or not self.registration.is_informed or run_id in self._unknown_runs:
            return False
        version, rewritten = self._announced.get(run_id, (0, None))
        is_clean = rewritten is None or self.cache.last_exchange(run_id) == rewritten
        return is_clean and (not version or self.completed.has(run_id, version))

    @property
    def replaced(self) -> str | None:
        """Return why this incarnation must end itself, once the coordinator has said so; else None."""
        return self.registration.replaced

    @property
    def revoked_tokens(self) -> frozenset[str] | None:
        """Return the ids of revoked read-only tokens; None if the coordinator has not named them yet, or for long."""
        return self._revoked_tokens if self._clock() < self._revoked_until else None

    # -- life ----------------------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        """Return the description of this host and of its partitions, as JSON types, for people."""
        described = []
        for instance in self.cache.all():
            if instance.state.is_loading:
                continue  # its size is known only then, which may take long; see "loading"
            with suppress(StoreClosedError):  # it is being unloaded
                described.append(instance.describe())
        return {
            "host_id": self.info.host_id,
            "incarnation": self.info.incarnation,
            "address": self.info.address,
            "node_id": self.info.node_id,
            "restarts": self.info.restart,
            "up_seconds": round(self._clock() - self._began, 1),
            **self.counters.read(),
            "memory": {"host_memory": self.memory.limit, **self.memory.held()},
            "row_cache": self.memory.row_cache_counts(),
            "waiting_commits": self.memory.num_waiting,
            "disk": self.disk.describe(),
            "storage_requests": self.files.requests.read(),
            "storage_trouble": self.files.requests.trouble.read(),
            "instances": described,
            "loading": self.loads.describe(),
        }

    def close(self) -> None:
        self.cache.close()
        self.exports.close()
        self.maintenance.close()
