"""``Host``: owns loaded state partitions, serves reads and commits, and follows the coordinator.

Plain classes without Ray and without a network: the coordinator is handed in. A host carries on Spark's executor-side
``StateStore`` object (loaded providers) and Flink's ``KvStateServer``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import backends.providers.rocksdb  # noqa: F401 - most hosts need it, and their first batch would wait for its import
from backends import spans
from backends.conf import StateStoreConf
from backends.exceptions import StoreClosedError
from backends.formats.changelog import Changes
from backends.host_memory import host_memory
from backends.partition.load_watch import LoadProgress
from backends.storage.checkpoint_storage import OpenStorage
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.messages import Acknowledged, HostInfo, OperatorFigures
from spark_bridge.exceptions import PartitionMismatchError
from spark_bridge.host.commits import GroupCommits, TaskCommits
from spark_bridge.host.exports import SavepointExports, SavepointPartitions
from spark_bridge.host.held_partitions import Counters, HeldPartitions, spec_of
from spark_bridge.host.kept_partitions import KeptPartitions, LoadsUnderWay, PartitionUnloading, VersionCompletion
from spark_bridge.host.loading import CopyLoading, PartitionLoading
from spark_bridge.host.maintenance import Maintenance
from spark_bridge.host.partition_files import PartitionFiles
from spark_bridge.host.reads import PartitionReads
from spark_bridge.host.registration import CompletedVersions, Grants, HostRegistration, RunOrders
from spark_bridge.host.shared_loads import HandOvers, SharedLoads
from spark_bridge.host.versions import PreparedVersions, VersionRequests
from spark_bridge.transport.protocol import OpenReply, TaskIdentity

REVOKED_SECONDS = 60.0
"""For how long a host that does not reach the coordinator goes by the revocations that it knows of."""


class Host:
    """Loads, commits and answers for the partitions that the coordinator assigns to it.

    ``info`` names this incarnation; ``local_dir`` is the directory of this host, made when needed, where an incarnation
    that was killed may have left its state; ``open_storage(location, options)`` opens the durable files of a query.

    Each part has one concern: ``held`` (loaded partitions), ``grants`` (owners), ``loading``
    with ``loads`` (under way), ``kept`` (files for the next load), ``completion`` and ``unloading``, ``task_commits``,
    ``group_commits`` (changelogs that are stored together) and ``reads``. ``completed``,
    ``prepared`` and ``version_requests`` know the completed versions. Further parts are ``hand_overs`` (partitions
    that move), ``maintenance``, ``exports`` (savepoints) and ``copy_loading`` (copies of partitions from storage).
    Locks are taken in the order: the loading lock of a partition (``LoadsUnderWay``), its commit lock
    (``Instance``), the lock of the tables (``HeldPartitions``), and last the locks that ``Grants``,
    ``VersionRequests``, ``CompletedVersions``, ``GroupCommits`` and ``Counters`` hold for their own tables.
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
        self.counters = Counters()
        self.memory = host_memory(conf)
        self.completed = CompletedVersions()
        self.held = HeldPartitions()
        self.files = PartitionFiles(local_dir, info.incarnation, conf, open_storage)
        registration = self.registration = HostRegistration(info, coordinator, self.held, self.completed, clock)
        self.version_requests = VersionRequests(registration, self.held, self.completed)
        self.grants = Grants(registration, self.completed, clock)
        self.loads = LoadsUnderWay(registration, self.held, clock)
        self.kept = KeptPartitions(self.held, self.loads, self.files, clock)
        self.unloading = PartitionUnloading(
            self.held, self.loads, self.kept, self.grants, self.completed, self.version_requests
        )
        self.completion = VersionCompletion(self.held, self.completed, self.kept, self.unloading)
        self.loading = PartitionLoading(self.held, self.files, self.loads, self.kept, self.unloading, self.counters)
        self.shared_loads = SharedLoads(self.loading, self.held, clock)
        self.hand_overs = HandOvers(info, self.held, self.loading, self.completed, clock)
        self.prepared = PreparedVersions(
            registration, self.held, self.completed, self.files.open_storage, self.hand_overs.gives
        )
        self.group_commits = GroupCommits(conf.commit_linger, self.memory, clock)
        self.held.on_run_ended(self.group_commits.forget)
        self.task_commits = TaskCommits(registration, self.held, self.prepared, self.counters, self.group_commits)
        self.reads = PartitionReads(
            registration, self.held, self.loading, self.grants, self.completed, self.prepared, self.counters
        )
        self.maintenance = Maintenance(
            registration,
            self.held,
            self.kept,
            self.unloading,
            self.version_requests,
            self.counters,
            self.memory,
            conf,
            clock,
        )
        self.copy_loading = CopyLoading(registration, self.files, clock)
        self.savepoint_partitions = SavepointPartitions(self.held, self.files, self.copy_loading)
        self.exports = SavepointExports(
            info,
            self.savepoint_partitions.held,
            self.savepoint_partitions.read_back,
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
        self.held.note_opened(grant.registration, task.batch_id)
        # Before that, too: those that are loaded first are stored together with those that are loaded next.
        self.group_commits.opened(task.run_id, task.batch_id + 1, task.operator, task.partition)
        instance = self.shared_loads.opened(grant, task.operator, task.partition, task.invocation)
        if isinstance(instance, LoadProgress):
            return OpenReply(None, grant.version, loading=instance)
        self.counters.add("opens")
        if instance.loaded_at == task.batch_id:
            # Another host may have accepted changes of the batch before: this task may be a duplicate.
            self.prepared.accepted(grant.registration, task.batch_id + 1)
        with self.held.lock:
            if instance.invocations_of != task.batch_id:
                instance.invocations, instance.invocations_of, instance.opened_at = {}, task.batch_id, asked
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
        """Make this host known to the coordinator, reporting all that the host holds."""
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
        if not orders.known:
            self.registration.register_apart()
        by_run: dict[str, list[Callable[[], None]]] = {}
        for completed in orders.completed:
            by_run.setdefault(completed.run_id, []).append(partial(self.completion.complete, completed))
        for run_id in orders.unload_runs:
            by_run.setdefault(run_id, []).append(partial(self.unloading.unload_run, run_id))
        for run_id, renew in (*self.loads.due_leases(), *self.copy_loading.due_leases()):
            by_run.setdefault(run_id, []).append(renew)
        self.held.note_ended(orders.ended_runs)
        if orders.known:
            self._looked_at = {run_id: self._clock() - lag for run_id, lag in orders.lags.items()}
        # Before the versions are recorded: from here on, partitions that may move are tracked.
        self.hand_overs.follow(hand_over.number, orders)
        self._orders.carry_out(by_run)
        if orders.known:
            self.exports.give_up_others(orders.pending)
        for order in orders.savepoints:
            self.exports.take(order)

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
        for instance in self.held.all():
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
            "storage_requests": self.files.requests.read(),
            "storage_trouble": self.files.requests.trouble.read(),
            "instances": described,
            "loading": self.loads.listed() + self.copy_loading.loads_under_way(),
        }

    def close(self) -> None:
        """Unload everything and remove the local files."""
        self.unloading.close()
        self.held.tell_ended(None)
        self.exports.close()
        self.maintenance.close()
