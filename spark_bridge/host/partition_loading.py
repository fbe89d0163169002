"""Loading, completing and unloading the partitions that the coordinator assigns to a host."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from backends.exceptions import LineageMismatchError, LocalStateDamagedError, StoreClosedError
from backends.formats.manifest import Lineage
from coordinator_actor.exceptions import RetiredRunError, StaleBatchError
from coordinator_actor.messages import Completed, OpenGrant
from spark_bridge.host.completed_versions import CompletedVersions
from spark_bridge.host.counters import Counters
from spark_bridge.host.grants import Grants
from spark_bridge.host.held_partitions import HeldPartitions
from spark_bridge.host.instance import Instance, InstanceKey, spec_of
from spark_bridge.host.partition_files import PartitionFiles
from spark_bridge.host.registration import HostRegistration
from spark_bridge.host.version_requests import VersionRequests

log = logging.getLogger(__name__)


class PartitionLoading:
    """Brings partitions to the versions that are granted or completed, and lets them go. Thread-safe.

    A partition's loading lock is held by the thread that loads or unloads the partition. Locks are taken in this order:
    the loading lock, the instance's ``commit_lock``, the lock of ``HeldPartitions``, which guards the tables here as
    well.
    """

    def __init__(
        self,
        registration: HostRegistration,
        held: HeldPartitions,
        files: PartitionFiles,
        grants: Grants,
        completed: CompletedVersions,
        version_requests: VersionRequests,
        counters: Counters,
    ) -> None:
        self._registration = registration
        self._held = held
        self._files = files
        self._grants = grants
        self._completed = completed
        self._version_requests = version_requests
        self._counters = counters
        self._locks: dict[InstanceKey, threading.Lock] = {}
        self._loading_runs: dict[object, str] = {}

    # -- loading -------------------------------------------------------------------------------

    def load(self, grant: OpenGrant, operator: str, partition: int, *, for_read: bool = False) -> Instance:
        """Return the partition, loaded at exactly the version and lineage of the grant.

        ``for_read``: a later version is as good. Raises ``RetiredRunError`` if a newer run holds the partition,
        ``StaleBatchError`` if a later version is completed, and what loading raises.
        """
        registration = grant.registration
        key = (registration.query_id, operator, partition)
        with self.lock_of(key), self._noted_as_loading(registration.run_id):
            with self._held.lock:
                instance = self._held.instances.get(key)
                self._held.registrations[registration.run_id] = registration
            if instance is not None and instance.registration.run_id != registration.run_id:
                self._retire(instance, grant)
                instance = None
            if instance is None:
                with self._held.lock:
                    held_runs = {i.registration.run_id for i in self._held.instances.values()}
                state = self._files.open_own(registration, spec_of(registration, operator), partition, held_runs)
                instance = Instance(registration, operator, partition, state)
            elif grant.version < instance.state.version:
                if for_read:
                    return instance
                raise StaleBatchError(
                    f"A task of batch {grant.version} is too late: version {instance.state.version} is completed."
                )
            instance.epoch = grant.epoch
            try:
                with instance.commit_lock:
                    self._advance(instance, grant)
            except BaseException:
                self._held.remove(instance)
                _destroy(instance)
                raise
            self._held.put(instance)
            return instance

    def _retire(self, instance: Instance, grant: OpenGrant) -> None:
        """Unload a partition of another run of the query: it makes room for the run of the grant, which is newer."""
        if grant.epoch < instance.epoch:
            raise RetiredRunError(
                f"Run {grant.registration.run_id} has been replaced by run {instance.registration.run_id}; "
                "only the newer one may go on."
            )
        retired = instance.registration.run_id
        with self._held.lock:
            self._held.remove(instance)
            if not self._held.of_run(retired):
                self._forget_run(retired)
        self._held.tell_ended(retired)
        _destroy(instance)

    def _advance(self, instance: Instance, grant: OpenGrant) -> None:
        """Bring an instance to the grant's version: by its own accepted changes, else from storage."""
        state = instance.state
        if (state.version, state.head) == (grant.version, grant.head):
            return
        if (
            grant.head is not None
            and grant.version == state.version + 1
            and _complete(instance, grant.version, grant.head)
        ):
            return
        lineage = Lineage(0)
        if grant.head is not None:
            lineage = self._registration.coordinator.lineage(*instance.run_key, grant.version)
        started = time.perf_counter()
        state.load(lineage)
        instance.snapshot_version = max((s.version for s in lineage.snapshots), default=0)
        if lineage.rescaled is not None and not lineage.snapshots:
            instance.rescaled_at = lineage.rescaled.version
        self._counters.add("loads")
        milliseconds = (time.perf_counter() - started) * 1e3
        log.info("Loaded version %d of %s in %.0f ms", grant.version, instance, milliseconds)

    def lock_of(self, key: InstanceKey) -> threading.Lock:
        """Return the loading lock of a partition."""
        with self._held.lock:
            return self._locks.setdefault(key, threading.Lock())

    @contextmanager
    def _noted_as_loading(self, run_id: str) -> Iterator[None]:
        """Keep the run's local directory from being removed: a partition that is being loaded is not held yet."""
        token = object()
        with self._held.lock:
            self._loading_runs[token] = run_id
        try:
            yield
        finally:
            with self._held.lock:
                del self._loading_runs[token]

    # -- completing ----------------------------------------------------------------------------

    def complete(self, completed: Completed) -> None:
        """Apply the accepted changes of a version that Spark has committed.

        Readers see the version in all partitions at once, before it is applied.
        """
        self._completed.note(completed)
        for instance in self._held.of_run(completed.run_id):
            owned = completed.heads.get(instance.operator)
            if owned is None or instance.state.version >= completed.version:
                continue
            head = owned.get(instance.partition)
            if not instance.commit_lock.acquire(blocking=False):
                continue  # a commit is under way, which may wait for long; the next heartbeat brings this again
            try:
                stale = head is None or not _complete(instance, completed.version, head)
            except StoreClosedError:
                continue  # the partition was unloaded meanwhile
            finally:
                instance.commit_lock.release()
            if stale:
                # Another host owns the partition by now, or this version was made by another host or by an earlier
                # incarnation of this one. If the partition is still this host's, the next open loads it.
                self.unload(instance)

    # -- unloading -----------------------------------------------------------------------------

    def unload(self, instance: Instance) -> None:
        """Unload a partition and remove its local files, if it is the one that is held."""
        with self.lock_of(instance.key):
            if self._held.remove(instance):
                _destroy(instance)

    def unload_run(self, run_id: str) -> None:
        """Unload the partitions of a run that is over, and forget the run."""
        with self._held.lock:
            gone = self._held.of_run(run_id)
            self._forget_run(run_id)
        self._held.tell_ended(run_id)
        for instance in gone:
            self.unload(instance)
        with self._held.lock:
            is_loading = run_id in self._loading_runs.values()
            is_back = run_id in self._held.registrations
        if not is_loading and not is_back:
            self._files.remove_run(run_id)

    def _forget_run(self, run_id: str) -> None:
        # The registration goes first: whoever waits for a version wakes when that is forgotten, and must not find it.
        self._held.forget_run(run_id)
        for table in (self._grants, self._version_requests, self._completed):
            table.forget(run_id)


def _complete(instance: Instance, version: int, head: str) -> bool:
    """Apply the accepted changes that made ``head``; return False if the partition has not got them."""
    try:
        instance.state.complete(version, head)
    except LineageMismatchError:
        return False
    except LocalStateDamagedError as error:
        log.warning("Version %d of %s is loaded anew: %s", version, instance, error)
        return False
    for done in [v for v in instance.acknowledged if v <= version]:
        del instance.acknowledged[done]
    return True


def _destroy(instance: Instance) -> None:
    with instance.commit_lock:
        instance.state.destroy()
    log.info("Unloaded %s", instance)
