"""Partitions that a host does not hold, but whose local files it keeps for a while.

They were partly loaded, loaded ahead of the first task, or set aside when their run was over. The next load of the
partition continues with them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from backends import spans
from backends.exceptions import LineageMismatchError, LocalStateDamagedError, StoreClosedError
from backends.partition.load_watch import LoadProgress, LoadWatch
from coordinator_actor.messages import Completed, OpenGrant
from spark_bridge.host.held_partitions import REMEMBERED_COMMITS, HeldPartitions, Instance, InstanceKey
from spark_bridge.host.partition_files import FileLease, PartitionFiles
from spark_bridge.host.registration import CompletedVersions, Grants, HostRegistration
from spark_bridge.host.versions import VersionRequests

# The running loads of a host: the lock of each partition, the progress of its load, and its lease.


class LoadsUnderWay:
    """The loading locks of partitions, and the loads under way with their grants. Thread-safe.

    A partition's loading lock is held by the thread that loads or unloads the partition. The lock of ``HeldPartitions``
    guards the tables; the loads are also looked at without it.
    """

    def __init__(
        self, registration: HostRegistration, held: HeldPartitions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registration = registration
        self._held = held
        self._clock = clock
        self._locks: dict[InstanceKey, threading.Lock] = {}
        self._watches: dict[InstanceKey, tuple[OpenGrant, LoadWatch]] = {}
        self._leases: dict[InstanceKey, FileLease] = {}

    def lock_of(self, key: InstanceKey) -> threading.Lock:
        """Return the loading lock of a partition."""
        with self._held.lock:
            return self._locks.setdefault(key, threading.Lock())

    @contextmanager
    def watching(self, key: InstanceKey, grant: OpenGrant, is_abandoned: Callable[[], bool]) -> Iterator[LoadWatch]:
        """Register the load of a partition, so that it can be shown and cancelled. Its loading lock is held."""
        run_id = grant.registration.run_id
        _, operator, partition = key
        what = f"version {grant.version} of operator {operator!r}, partition {partition} (run {run_id})"
        lease = self.lease(run_id, operator, partition, grant.version)
        watch = LoadWatch(what, is_abandoned=is_abandoned, on_step=lease.renew, clock=self._clock)
        with self._held.lock:
            self._watches[key] = (grant, watch)
            self._leases[key] = lease
        try:
            yield watch
        finally:
            with self._held.lock:
                del self._watches[key], self._leases[key]

    def lease(self, run_id: str, operator: str, partition: int, version: int) -> FileLease:
        """Return the lease of a load of this host's own partition. It ends with the first changes to the partition."""
        use = self._registration.info.host_id
        return FileLease(self._registration, run_id, operator, partition, version, use=use, clock=self._clock)

    def progress(self, key: InstanceKey) -> LoadProgress:
        """Return the progress of the running load of a partition; nothing if none is running."""
        watched = self._watches.get(key)
        return LoadProgress() if watched is None else watched[1].progress()

    def listed(self) -> list[str]:
        """Return the partitions that are being loaded, and their progress, for people."""
        return [f"{watch.what}: {watch.progress()}" for _, watch in list(self._watches.values())]

    def due_leases(self) -> list[tuple[str, Callable[[], None]]]:
        """Return, for each load under way whose lease is due, the run id and the function that renews the lease.

        A renewal may take long.

        Files of a load that no caller waits for are released, although storage may block its thread for ever.
        """
        with self._held.lock:
            loads = [(*self._watches[key], lease) for key, lease in self._leases.items()]
        return [
            (grant.registration.run_id, lease.renew)
            for grant, watch, lease in loads
            if lease.is_due and watch.is_wanted
        ]

    def end_older(self, key: InstanceKey, grant: OpenGrant) -> None:
        """Cancel a load for an older run: the run of the grant needs the partition."""
        watched = self._watches.get(key)
        run_id = grant.registration.run_id
        if watched is not None and watched[0].registration.run_id != run_id and watched[0].epoch < grant.epoch:
            watched[1].end(f"run {run_id} has replaced run {watched[0].registration.run_id}", is_over=True)

    def end_run(self, run_id: str) -> None:
        """Cancel the loads of a run that is over. The lock of ``HeldPartitions`` is held."""
        for grant, watch in self._watches.values():
            if grant.registration.run_id == run_id:
                watch.end("its run is over", is_over=True)


log = logging.getLogger(__name__)

LOADED_FILES_SECONDS = 600.0
"""Files that are kept are removed if no load has continued with them for this many seconds."""


def close(instance: Instance) -> None:
    """Close the state of a partition once the commit under way has ended. The local files stay."""
    with instance.commit_lock:
        instance.state.close()


def destroy(instance: Instance) -> None:
    """Close the state of a partition, and remove the local files."""
    with instance.commit_lock:
        instance.state.destroy()
    log.info("Unloaded %s", instance)


class KeptPartitions:
    """The partitions whose files are kept, and the runs whose local directories are in use. Thread-safe.

    The lock of ``HeldPartitions`` guards the tables. A caller that takes a partition out, or puts one in, holds its
    loading lock.
    """

    def __init__(
        self,
        held: HeldPartitions,
        loads: LoadsUnderWay,
        files: PartitionFiles,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._held = held
        self._loads = loads
        self._files = files
        self._clock = clock
        self._kept: dict[InstanceKey, Instance] = {}
        # What loads or lays aside now: the query, and the runs whose directories must stay.
        self._at_work: dict[object, tuple[str, set[str]]] = {}

    def get(self, key: InstanceKey) -> Instance | None:
        """Return the partition, if it is kept."""
        with self._held.lock:
            return self._kept.get(key)

    def take(self, key: InstanceKey) -> Instance | None:
        """Return the partition, if it is kept, and keep it no longer."""
        with self._held.lock:
            return self._kept.pop(key, None)

    def keep(self, instance: Instance) -> None:
        """Keep a partition for the next load of it."""
        instance.kept_since = self._clock()
        with self._held.lock:
            self._kept[instance.key] = instance

    def keep_longer(self, instance: Instance) -> None:
        """Restart the time for which a partition is kept."""
        instance.kept_since = self._clock()

    def runs_in_use(self) -> set[str]:
        """Return the runs whose local directories have files that are held, kept, being loaded or laid aside."""
        with self._held.lock:
            there = (*self._held.instances.values(), *self._kept.values())
            return {i.registration.run_id for i in there}.union(*(runs for _, runs in self._at_work.values()))

    def may_be_of_state(self, location: str | None, *, but_for: str) -> bool:
        """Return whether files of a state are kept or in use, or held ``but_for`` those that a run holds."""
        with self._held.lock:
            of_others = (k for k, i in self._held.instances.items() if i.registration.run_id != but_for)
            at_work = (state for state, _ in self._at_work.values())
            return location in (*at_work, *(state for state, _, _ in (*self._kept, *of_others)))

    @contextmanager
    def noted_at_work(self, run_id: str, key: InstanceKey) -> Iterator[None]:
        """Keep the run's local directory from being removed: a partition that is being loaded or set aside is not held.

        The directory of the run before stays, too: the load may continue with its files. The partition's loading lock
        is held.
        """
        token = object()
        with self._held.lock:
            there = (self._held.instances.get(key), self._kept.get(key))
            before = {i.registration.run_id for i in there if i is not None} - {run_id}
            self._at_work[token] = key[0], {run_id, *before}
        try:
            yield
        finally:
            with self._held.lock:
                del self._at_work[token]
            for of_run in before:
                self.remove_unused(of_run)

    def remove_unused(self, run_id: str) -> None:
        """Remove the directory of a run that is over, once nothing of the run is held, kept or in use there."""
        if self._held.registration(run_id) is None and run_id not in self.runs_in_use():
            self._files.remove_run(run_id)

    def drop_old(self) -> None:
        """Remove the files that no load has used for ``LOADED_FILES_SECONDS``."""
        now = self._clock()
        self.drop(lambda kept: now - kept.kept_since > LOADED_FILES_SECONDS)

    def drop_unfinished(self, run_id: str) -> None:
        """Remove files of a run that were partly loaded or loaded ahead. Files set aside stay: they are complete."""
        self.drop(lambda kept: kept.registration.run_id == run_id and not kept.state.is_closed)

    def drop(self, is_meant: Callable[[Instance], bool]) -> int:
        """Remove the files of the selected partitions that no load is using; return the number of partitions."""
        with self._held.lock:
            gone = [i for i in self._kept.values() if is_meant(i)]
        dropped = 0
        for instance in gone:
            lock = self._loads.lock_of(instance.key)
            if not lock.acquire(blocking=False):
                continue  # a load is using it
            try:
                with self._held.lock:
                    is_kept = self._kept.get(instance.key) is instance
                    if is_kept:
                        del self._kept[instance.key]
                if is_kept:
                    destroy(instance)
                    dropped += 1
            finally:
                lock.release()
        for run_id in {i.registration.run_id for i in gone}:
            self.remove_unused(run_id)
        return dropped


# Unloading partitions: those that another host owns, that have no readers, or whose run is over.


class PartitionUnloading:
    """Lets partitions and runs go. Thread-safe.

    Locks are taken in this order: the loading lock, the instance's ``commit_lock``, the lock of ``HeldPartitions``.
    """

    def __init__(
        self,
        held: HeldPartitions,
        loads: LoadsUnderWay,
        kept: KeptPartitions,
        grants: Grants,
        completed: CompletedVersions,
        version_requests: VersionRequests,
    ) -> None:
        self._held = held
        self._loads = loads
        self._kept = kept
        self._of_runs = (grants, version_requests, completed)

    def unload(self, instance: Instance, *, waits: bool = True) -> None:
        """Unload a partition and remove its local files, if it is the one that is held.

        ``waits``: also for a load of the partition that is under way. Otherwise nothing happens during one.
        """
        lock = self._loads.lock_of(instance.key)
        if not lock.acquire(blocking=waits):
            return
        try:
            if self._held.remove(instance):
                destroy(instance)
        finally:
            lock.release()

    def lay_aside(self, instance: Instance, *, waits: bool = True) -> None:
        """Unload a partition, but keep its local files for a while: its query may be started again.

        ``waits``: see ``unload``.
        """
        lock = self._loads.lock_of(instance.key)
        if not lock.acquire(blocking=waits):
            return
        try:
            with self._kept.noted_at_work(instance.registration.run_id, instance.key):
                if not self._held.remove(instance):
                    return
                if self._kept.get(instance.key) is None:
                    close(instance)
                    self._kept.keep(instance)
                else:  # a copy that is loaded for a newer run
                    destroy(instance)
        finally:
            lock.release()

    def unload_run(self, run_id: str) -> None:
        """Lay the partitions of a run aside that is over, and forget the run."""
        with self._held.lock:
            gone = self._held.of_run(run_id)
            self.forget_run(run_id)
            self._loads.end_run(run_id)
        self._held.tell_ended(run_id)
        self._kept.drop_unfinished(run_id)
        for instance in gone:
            self.lay_aside(instance)
        self._kept.remove_unused(run_id)

    def forget_run(self, run_id: str) -> None:
        """Forget a run that is over; its partitions are unloaded apart."""
        # The registration goes first: a thread that waits for a version wakes when it is forgotten, and must not find
        # it.
        self._held.forget_run(run_id)
        for table in self._of_runs:
            table.forget(run_id)

    def close(self) -> None:
        """Unload everything, and remove the local files."""
        for instance in self._held.all():
            self.unload(instance)
        for run_id in {*self._held.registrations}:
            self.unload_run(run_id)
        self._kept.drop(lambda kept: True)  # partitions opened since then have been set aside, too


# Completing versions: the accepted changes of a batch that Spark has committed become the state that is read.


def apply_accepted(instance: Instance, version: int, head: str) -> bool:
    """Apply the accepted changes that made ``head``; return False if the partition has not got them."""
    trace = spans.batch(instance.registration.run_id, version)
    try:
        with spans.span("host.apply", trace, operator=instance.operator, partition=instance.partition):
            instance.state.complete(version, head)
    except LineageMismatchError:
        return False
    except LocalStateDamagedError as error:
        log.warning("Loading version %d of %s again: %s", version, instance, error)
        return False
    for done in [v for v in instance.acknowledged if v <= version]:
        del instance.acknowledged[done]
    earlier = {v: keys for v, keys in instance.keys_at.items() if version - REMEMBERED_COMMITS < v < version}
    instance.keys_at = {**earlier, version: instance.state.reads.num_keys(version)}
    return True


class VersionCompletion:
    """Completes versions in the partitions that a host holds. Thread-safe."""

    def __init__(
        self,
        held: HeldPartitions,
        completed: CompletedVersions,
        kept: KeptPartitions,
        unloading: PartitionUnloading,
    ) -> None:
        self._held = held
        self._completed = completed
        self._kept = kept
        self._unloading = unloading

    def complete(self, completed: Completed) -> None:
        """Apply the accepted changes of a version that Spark has committed.

        Readers see the version in all partitions at once, before it is applied.
        """
        self._completed.note(completed)
        known = self._held.last_exchange(completed.run_id)
        is_clean = True
        if completed.rewritten != known:
            self._held.tell_exchanged(completed.run_id)
            # Copies may be of the files from before. One that is being loaded now may become one.
            registration = self._held.registration(completed.run_id)
            location = None if registration is None else registration.state_location
            self._kept.drop(lambda kept: completed.run_id == kept.registration.run_id or location == kept.key[0])
            is_clean = not self._kept.may_be_of_state(location, but_for=completed.run_id)
        for instance in self._held.of_run(completed.run_id):
            owned = completed.heads.get(instance.operator)
            if owned is None or instance.state.version > completed.version:
                is_clean &= owned is not None
                continue
            head = owned.get(instance.partition)
            if instance.state.version == completed.version:
                if instance.state.head != head and (head is not None or completed.rewritten != known):
                    # The files of the version were exchanged: keys that the new files lack must be gone here as well.
                    self._unloading.unload(instance, waits=False)
                    is_clean &= not self._held.holds(instance)
                continue
            if not instance.commit_lock.acquire(blocking=False):
                is_clean = False
                continue  # a commit is under way, which may wait for long; the next heartbeat brings this again
            try:
                stale = head is None or not apply_accepted(instance, completed.version, head)
            except StoreClosedError:
                continue  # another thread has unloaded the partition
            finally:
                instance.commit_lock.release()
            if stale and not self._held.has_ended(completed.run_id):
                # Another host now owns the partition, or this version was made by another host or by an earlier
                # incarnation of this one. If the partition is still this host's, the next open loads it. If it is
                # being loaded now, the loaded files must stay.
                self._unloading.unload(instance, waits=False)
            # The coordinator never accepted changes made on top of exchanged files.
            is_clean &= not stale or not self._held.holds(instance)
        if is_clean:
            self._held.note_exchanged(completed.run_id, completed.rewritten)
