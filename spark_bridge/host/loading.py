"""Loading the partitions that the coordinator assigns to a host."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from backends import spans
from backends.exceptions import DamagedFileError, LoadEndedError, LocalDiskFullError, MissingFileError, StorageError
from backends.formats.manifest import Lineage, partition_directory
from backends.partition.load_watch import LoadProgress, LoadWatch
from backends.partition.partition_state import PartitionState
from coordinator_actor.exceptions import CoordinatorError, RetiredRunError, StaleBatchError
from coordinator_actor.messages import OpenGrant, OperatorSpec, QueryRegistration
from spark_bridge.exceptions import HostUnavailableError, SparkBridgeError
from spark_bridge.host.held_partitions import Counters, HeldPartitions, Instance, InstanceKey, key_of, spec_of
from spark_bridge.host.kept_partitions import (
    KeptPartitions,
    LoadsUnderWay,
    PartitionUnloading,
    apply_accepted,
    close,
    destroy,
)
from spark_bridge.host.partition_files import FileLease, PartitionFiles
from spark_bridge.host.registration import HostRegistration

log = logging.getLogger(__name__)

T = TypeVar("T")

SHARED_LOAD_SECONDS = 10.0
"""A read waits at most this many seconds for a task's load of the partition: its thread is needed for other reads."""


class PartitionLoading:
    """Brings partitions to the versions that are granted. Thread-safe.

    Locks are taken in this order: the loading lock (``LoadsUnderWay``), the instance's ``commit_lock``, the lock of
    ``HeldPartitions``. A load that fails leaves the partition partly loaded: it is not held, and the next load of the
    same run continues from there. If the disk is full, the kept files are removed first, and then the files that this
    load has fetched.
    """

    def __init__(
        self,
        held: HeldPartitions,
        files: PartitionFiles,
        loads: LoadsUnderWay,
        kept: KeptPartitions,
        unloading: PartitionUnloading,
        counters: Counters,
    ) -> None:
        self._held = held
        self._files = files
        self._loads = loads
        self._kept = kept
        self._unloading = unloading
        self._counters = counters

    def load(
        self,
        grant: OpenGrant,
        operator: str,
        partition: int,
        *,
        for_read: bool = False,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> Instance:
        """Return the partition, loaded at exactly the version and lineage of the grant.

        ``for_read``: a later version is as good, and a load that is under way is waited for ``SHARED_LOAD_SECONDS``
        at most; then ``HostUnavailableError`` is raised. The load ends if ``is_abandoned``. Raises ``RetiredRunError``
        if a newer run holds the partition, ``StaleBatchError`` if a later version is completed, ``LoadEndedError`` if
        the load was ended, and the errors of loading. The files that were loaded until then are kept for the next
        load, if they are not to blame.
        """
        key = key_of(grant.registration, operator, partition)
        self._loads.end_older(key, grant)
        lock = self._loads.lock_of(key)
        if not lock.acquire(timeout=SHARED_LOAD_SECONDS if for_read else -1):
            raise HostUnavailableError(
                f"Partition {partition} of operator {operator!r} is being loaded: {self._loads.progress(key)}. "
                "Ask again in a moment."
            )
        try:
            with self._kept.noted_at_work(grant.registration.run_id, key):
                with self._loads.watching(key, grant, is_abandoned) as watch:
                    instance = self._bring_to_grant(grant, operator, partition, watch, for_read=for_read)
                assert instance is not None
                return instance
        finally:
            lock.release()

    def ready(self, grant: OpenGrant, operator: str, partition: int) -> Instance | None:
        """Return the partition at the version of the grant; None if files must be fetched for it, or are being fetched.

        Waits for no load. Raises as ``load`` does.
        """
        key = key_of(grant.registration, operator, partition)
        lock = self._loads.lock_of(key)
        if not lock.acquire(blocking=False):
            self._loads.end_older(key, grant)
            return None
        try:
            with self._kept.noted_at_work(grant.registration.run_id, key):
                return self._bring_to_grant(grant, operator, partition, None, for_read=False)
        finally:
            lock.release()

    def progress(self, key: InstanceKey) -> LoadProgress:
        """Return the progress of the running load of a partition; nothing if none is running."""
        return self._loads.progress(key)

    def warm_up(
        self, grant: OpenGrant, operator: str, partition: int, is_abandoned: Callable[[], bool] = lambda: False
    ) -> None:
        """Load a copy of a partition that is to become this host's, and keep it for the load by the first task.

        Does nothing if the partition ``is_warm`` or being loaded. Raises as ``load`` does, and ``LocalDiskFullError``
        if there is no room next to the other loaded partitions: a copy does not evict them.
        """
        key = key_of(grant.registration, operator, partition)
        run_id = grant.registration.run_id
        lock = self._loads.lock_of(key)
        if not lock.acquire(blocking=False):
            return
        try:
            if self.is_warm(grant, operator, partition):
                return
            trace = spans.batch(run_id, grant.version + 1)
            with (
                spans.span("host.warm_up", trace, operator=operator, partition=partition),
                self._kept.noted_at_work(run_id, key),
                self._loads.watching(key, grant, is_abandoned) as watch,
            ):
                self._bring_to_grant(grant, operator, partition, watch, for_read=False, holds=False)
        finally:
            lock.release()

    def is_warm(self, grant: OpenGrant, operator: str, partition: int) -> bool:
        """Return whether a partition is held, or there is a copy of its version. Such a copy is kept for longer."""
        key = key_of(grant.registration, operator, partition)
        with self._held.lock:
            held, kept = self._held.instances.get(key), self._kept.get(key)
            if held is not None and held.registration.run_id == grant.registration.run_id:
                return True
            if kept is None or kept.registration.run_id != grant.registration.run_id:
                return False
            state = kept.state
            # Files of a version may have been exchanged: then its head is another one.
            is_there = kept.loaded_at == state.version and (
                state.version > grant.version or (state.version, state.head) == (grant.version, grant.head)
            )
            if is_there:
                self._kept.keep_longer(kept)
            return is_there

    def warm_version(self, registration: QueryRegistration, operator: str, partition: int) -> int | None:
        """Return the version of the copy of a partition that a load has left here whole; None if there is none."""
        kept = self._kept.get(key_of(registration, operator, partition))
        if kept is None or kept.registration.run_id != registration.run_id or kept.loaded_at != kept.state.version:
            return None
        return kept.loaded_at

    def _bring_to_grant(
        self,
        grant: OpenGrant,
        operator: str,
        partition: int,
        watch: LoadWatch | None,
        *,
        for_read: bool,
        holds: bool = True,
    ) -> Instance | None:
        """Return the partition at the version of the grant; None if files must be fetched and there is no ``watch``.

        Unless it ``holds`` the partition, the host keeps it like one that is loaded in part, and returns None.
        """
        registration = grant.registration
        key = key_of(registration, operator, partition)
        with self._held.lock:
            kept = self._kept.take(key)
            instance = self._held.instances.get(key)
            self._held.registrations[registration.run_id] = registration
        left: Instance | None = None
        if kept is not None and (kept.registration.run_id != registration.run_id or kept.state.is_closed):
            if grant.epoch < kept.epoch:
                self._kept.keep(kept)
                raise _replaced(registration.run_id, kept)
            kept, left = None, kept
        if kept is not None and grant.version < kept.state.version:
            destroy(kept)
            kept = None
        if instance is not None and instance.registration.run_id != registration.run_id:
            self._retire(instance, grant)
            if left is not None:
                destroy(left)
            instance, left = None, instance
        if instance is None:
            instance = kept
        if instance is None:
            instance = self._opened(grant, operator, partition, left, drops=holds)
        elif grant.version < instance.state.version:
            if for_read:
                return instance
            raise StaleBatchError(
                f"A task of batch {grant.version} is too late: version {instance.state.version} is completed."
            )
        instance.epoch = grant.epoch
        try:
            is_there = self._advance_making_room(instance, grant, watch, is_whole=instance is not kept, drops=holds)
        except BaseException as error:
            self._held.remove(instance)
            if _leaves_files_right(error) and (watch is None or not watch.is_over):
                self._kept.keep(instance)
            else:
                destroy(instance)
            raise
        if is_there and holds:
            self._held.put(instance)
            return instance
        with self._held.lock:
            is_held = self._held.instances.get(key) is instance
        if not is_held:
            self._kept.keep(instance)
        return None

    def _opened(
        self, grant: OpenGrant, operator: str, partition: int, left: Instance | None, *, drops: bool
    ) -> Instance:
        """Open a partition, with the local files that were left of it here, if there are some (Flink: local recovery).

        ``left`` is of an older run of the query, or was laid aside. Of another layout or backend its files are removed.
        """
        registration = grant.registration
        spec = spec_of(registration, operator)
        goes_on = False
        if left is not None:
            close(left)
            same = (left.spec.num_partitions, left.spec.backend) == (spec.num_partitions, spec.backend)
            goes_on = same and self._files.hand_on(left.state, registration, spec, partition)
            if not goes_on:
                destroy(left)
        in_use = self._kept.runs_in_use
        state = self._with_room(lambda: self._files.open_own(registration, spec, partition, in_use), drops=drops)
        instance = Instance(registration, operator, partition, state, loaded_at=grant.version)
        if left is not None and goes_on:
            log.info("Opened %s with the files left here, at version %d", instance, state.version)
            instance.snapshot_version, instance.rescaled_at = left.snapshot_version, left.rescaled_at
        return instance

    def _advance_making_room(
        self, instance: Instance, grant: OpenGrant, watch: LoadWatch | None, *, is_whole: bool, drops: bool
    ) -> bool:
        is_first = True

        def advance() -> bool:
            nonlocal is_first
            is_untouched, is_first = is_whole and is_first, False
            with instance.commit_lock:
                return self._advance(instance, grant, watch, is_whole=is_untouched)

        return self._with_room(advance, drops=drops)

    def _with_room(self, work: Callable[[], T], *, drops: bool) -> T:
        """Do some work; if the disk is full and ``drops`` frees the files of other loads, retry the work."""
        while True:
            try:
                return work()
            except LocalDiskFullError as error:
                if not drops:
                    raise
                dropped = self._kept.drop(lambda kept: True)
                if not dropped:
                    raise
                log.warning("What %d loads that broke off have left is removed: %s", dropped, error)

    def _retire(self, instance: Instance, grant: OpenGrant) -> None:
        """Hold a partition of another run of the query no longer: the run of the grant is newer. Its files stay."""
        if grant.epoch < instance.epoch:
            raise _replaced(grant.registration.run_id, instance)
        retired = instance.registration.run_id
        with self._held.lock:
            self._held.remove(instance)
            if not self._held.of_run(retired):
                self._unloading.forget_run(retired)
        self._held.tell_ended(retired)

    def _advance(self, instance: Instance, grant: OpenGrant, watch: LoadWatch | None, *, is_whole: bool) -> bool:
        """Bring an instance to the grant's version: by its own accepted changes, else from storage.

        Unless the instance ``is_whole``, a load has left it midway, and a write may have left its state midway: then
        ``PartitionState.load`` alone knows what of it can be used. Return False if files must be fetched and there is
        no ``watch``: nothing has changed then.
        """
        state = instance.state
        is_whole = is_whole and state.is_whole
        if is_whole and (state.version, state.head) == (grant.version, grant.head):
            return True
        if (
            is_whole
            and grant.head is not None
            and grant.version == state.version + 1
            and apply_accepted(instance, grant.version, grant.head)
        ):
            return True
        if watch is None and (grant.head is not None or not is_whole):
            return False
        lineage = Lineage(0)
        if grant.head is not None:
            lineage = self._loads.lease(*instance.run_key, grant.version).lineage()
        started = time.perf_counter()
        # The span belongs to the task that waits for the load, else to the trace of the running batch.
        trace = spans.batch(instance.registration.run_id, grant.version + 1)
        with spans.span("host.load", trace, operator=instance.operator, partition=instance.partition) as span:
            span.note(snapshots=len(lineage.snapshots), rescaled=lineage.rescaled is not None)
            with self._files.shared.loading():
                state.load(lineage, watch)
        instance.snapshot_version = max((s.version for s in lineage.snapshots), default=0)
        if lineage.rescaled is not None and not lineage.snapshots:
            instance.rescaled_at = lineage.rescaled.version
        instance.loaded_at = grant.version
        self._counters.add("loads")
        milliseconds = (time.perf_counter() - started) * 1e3
        log.info("Loaded version %d of %s in %.0f ms", grant.version, instance, milliseconds)
        return True


def _replaced(run_id: str, by: Instance) -> RetiredRunError:
    return RetiredRunError(
        f"Run {run_id} has been replaced by run {by.registration.run_id}; only the newer one may continue."
    )


def _leaves_files_right(error: BaseException) -> bool:
    """Return whether a load that ended with this error can be continued: neither files nor state are to blame."""
    if isinstance(error, MissingFileError | DamagedFileError):
        return False
    return isinstance(error, StorageError | LoadEndedError | CoordinatorError | SparkBridgeError)


# Loading copies of partitions from storage: for savepoints, and for readers of older versions.


PartitionCopyKey = tuple[str, str, int, int]
"""Run id, operator, partition, version."""


class CopyLoading:
    """Loads copies, each with progress and a lease on its files. Thread-safe; the lock guards the running loads.

    There are as many loads as threads call ``load``, and each takes one entry.
    """

    def __init__(
        self, registration: HostRegistration, files: PartitionFiles, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registration = registration
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._watches: dict[str, tuple[PartitionCopyKey, LoadWatch]] = {}
        self._leases: dict[str, tuple[str, FileLease]] = {}

    def load(
        self,
        registration: QueryRegistration,
        spec: OperatorSpec,
        partition: int,
        version: int,
        below: Path,
        *,
        is_abandoned: Callable[[], bool],
    ) -> PartitionState:
        """Return a copy of a partition at a version, in a new directory ``below``; ``destroy`` removes the copy.

        Raises ``VersionNotFoundError`` if the version is not kept (any more), ``LoadEndedError`` if ``is_abandoned``,
        and what loading and the coordinator raise. Nothing is left then.
        """
        use = uuid.uuid4().hex
        run_id = registration.run_id
        lease = FileLease(self._registration, run_id, spec.name, partition, version, use=use, clock=self._clock)
        what = f"a copy of version {version} of operator {spec.name!r}, partition {partition} (run {run_id})"
        watch = LoadWatch(what, is_abandoned=is_abandoned, on_step=lease.renew, clock=self._clock)
        lineage = lease.lineage()
        with self._lock:
            self._watches[use] = (run_id, spec.name, partition, version), watch
            self._leases[use] = run_id, lease
        try:
            directory = partition_directory(spec.name, spec.num_partitions, partition)
            copy = self._files.open_copy(registration, directory, spec.backend, below / use)
            try:
                copy.load(lineage, watch)
            except MissingFileError:
                copy.destroy()
                lease.lineage()  # raises if the version has been given up since
                raise
            except BaseException:
                copy.destroy()
                raise
            return copy
        finally:
            with self._lock:
                del self._watches[use], self._leases[use]
            lease.end()

    def progress(self, key: PartitionCopyKey) -> LoadProgress:
        """Return the progress of the running load of a copy; nothing if none is running."""
        with self._lock:
            watches = [watch for of, watch in self._watches.values() if of == key]
        return watches[0].progress() if watches else LoadProgress()

    def due_leases(self) -> list[tuple[str, Callable[[], None]]]:
        """Return, for each load under way whose lease is due, the run id and the function that renews the lease.

        A renewal may take long.

        Files of a load that no caller waits for are released, although storage may block its thread for ever.
        """
        with self._lock:
            loads = [(*held, self._watches[use][1]) for use, held in self._leases.items()]
        return [(run_id, lease.renew) for run_id, lease, watch in loads if lease.is_due and watch.is_wanted]

    def loads_under_way(self) -> list[str]:
        """Return the copies that are being loaded, and their progress, for people."""
        with self._lock:
            watches = [watch for _, watch in self._watches.values()]
        return [f"{watch.what}: {watch.progress()}" for watch in watches]
