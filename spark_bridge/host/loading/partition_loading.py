"""Loading, completing and unloading the partitions that the coordinator assigns to a host."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

from backends.exceptions import (
    DamagedFileError,
    LineageMismatchError,
    LoadEndedError,
    LocalDiskFullError,
    LocalStateDamagedError,
    MissingFileError,
    StorageError,
    StoreClosedError,
)
from backends.formats.manifest import Lineage
from backends.partition.load_watch import LoadProgress, LoadWatch
from backends.tracing import spans, trace_ids
from coordinator_actor.exceptions import CoordinatorError, RetiredRunError, StaleBatchError
from coordinator_actor.messages import Completed, OpenGrant, QueryRegistration
from spark_bridge.exceptions import HostUnavailableError, SparkBridgeError
from spark_bridge.host.coordination.completed_versions import CompletedVersions
from spark_bridge.host.coordination.grants import Grants
from spark_bridge.host.coordination.registration import HostRegistration
from spark_bridge.host.coordination.version_requests import VersionRequests
from spark_bridge.host.counters import Counters
from spark_bridge.host.held.held_partitions import HeldPartitions
from spark_bridge.host.held.instance import REMEMBERED_COMMITS, Instance, InstanceKey, spec_of
from spark_bridge.host.loading.file_lease import FileLease
from spark_bridge.host.loading.partition_files import PartitionFiles

log = logging.getLogger(__name__)

T = TypeVar("T")

LOADED_FILES_SECONDS = 600.0
"""Files of an unfinished load are removed if no other load has continued with them for this many seconds."""
SHARED_LOAD_SECONDS = 10.0
"""A read waits at most this many seconds for a task's load of the partition: its thread is needed for other reads."""


class PartitionLoading:
    """Brings partitions to the versions that are granted or completed, and lets them go. Thread-safe.

    A partition's loading lock is held by the thread that loads or unloads the partition. Locks are taken in this order:
    the loading lock, the instance's ``commit_lock``, the lock of ``HeldPartitions``, which guards the tables here as
    well; the loads under way are also looked at without it. A load that does not come through leaves the partition as
    far as it has come: it is not held, and the next load of the same run goes on with it. If the disk is full, what
    other loads have left goes first, and then what this one has loaded.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registration = registration
        self._held = held
        self._files = files
        self._grants = grants
        self._completed = completed
        self._version_requests = version_requests
        self._counters = counters
        self._locks: dict[InstanceKey, threading.Lock] = {}
        # Loads and unloads under way: the query, and the runs whose directories must stay.
        self._at_work: dict[object, tuple[str, set[str]]] = {}
        self._clock = clock
        # What was loaded in part, and the loads under way with what they are for.
        self._kept: dict[InstanceKey, Instance] = {}
        self._watches: dict[InstanceKey, tuple[OpenGrant, LoadWatch]] = {}
        self._leases: dict[InstanceKey, FileLease] = {}

    # -- loading -------------------------------------------------------------------------------

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
        key = (grant.registration.query_id, operator, partition)
        self._end_older_load(key, grant)
        lock = self.lock_of(key)
        if not lock.acquire(timeout=SHARED_LOAD_SECONDS if for_read else -1):
            raise HostUnavailableError(
                f"Partition {partition} of operator {operator!r} is being loaded: {self.progress(key)}. "
                "Ask again in a moment."
            )
        try:
            with self._noted_at_work(grant.registration.run_id, key):
                with self._watching(key, grant, is_abandoned) as watch:
                    instance = self._bring_to_grant(grant, operator, partition, watch, for_read=for_read)
                assert instance is not None
                return instance
        finally:
            lock.release()

    def ready(self, grant: OpenGrant, operator: str, partition: int) -> Instance | None:
        """Return the partition at the version of the grant; None if files must be fetched for it, or are being fetched.

        Waits for no load. Raises as ``load`` does.
        """
        key = (grant.registration.query_id, operator, partition)
        lock = self.lock_of(key)
        if not lock.acquire(blocking=False):
            self._end_older_load(key, grant)
            return None
        try:
            with self._noted_at_work(grant.registration.run_id, key):
                return self._bring_to_grant(grant, operator, partition, None, for_read=False)
        finally:
            lock.release()

    def warm_up(
        self, grant: OpenGrant, operator: str, partition: int, is_abandoned: Callable[[], bool] = lambda: False
    ) -> None:
        """Load a copy of a partition that is to become this host's, and keep it for the load by the first task.

        Does nothing if the partition ``is_warm`` or being loaded. Raises as ``load`` does, and ``LocalDiskFullError``
        where there is no room beside what else is loaded: a copy drops nothing of others.
        """
        key = (grant.registration.query_id, operator, partition)
        run_id = grant.registration.run_id
        lock = self.lock_of(key)
        if not lock.acquire(blocking=False):
            return
        try:
            if self.is_warm(grant, operator, partition):
                return
            trace = trace_ids.batch(run_id, grant.version + 1)
            with (
                spans.span("host.warm_up", trace, operator=operator, partition=partition),
                self._noted_at_work(run_id, key),
                self._watching(key, grant, is_abandoned) as watch,
            ):
                self._bring_to_grant(grant, operator, partition, watch, for_read=False, holds=False)
        finally:
            lock.release()

    def is_warm(self, grant: OpenGrant, operator: str, partition: int) -> bool:
        """Return whether a partition is held, or there is a copy of its version. Such a copy is kept for longer."""
        key = (grant.registration.query_id, operator, partition)
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
                kept.kept_since = self._clock()
            return is_there

    def warm_version(self, registration: QueryRegistration, operator: str, partition: int) -> int | None:
        """Return the version of the copy of a partition that a load has left here whole; None if there is none."""
        with self._held.lock:
            kept = self._kept.get((registration.query_id, operator, partition))
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
        key = (registration.query_id, operator, partition)
        with self._held.lock:
            kept = self._kept.pop(key, None)
            instance = self._held.instances.get(key)
            self._held.registrations[registration.run_id] = registration
        left: Instance | None = None
        if kept is not None and (kept.registration.run_id != registration.run_id or kept.state.is_closed):
            if grant.epoch < kept.epoch:
                self._keep(kept)
                raise _replaced(registration.run_id, kept)
            kept, left = None, kept
        if kept is not None and grant.version < kept.state.version:
            _destroy(kept)
            kept = None
        if instance is not None and instance.registration.run_id != registration.run_id:
            self._retire(instance, grant)
            if left is not None:
                _destroy(left)
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
                self._keep(instance)
            else:
                _destroy(instance)
            raise
        if is_there and holds:
            self._held.put(instance)
            return instance
        with self._held.lock:
            is_held = self._held.instances.get(key) is instance
        if not is_held:
            self._keep(instance)
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
            _close(left)
            same = (left.spec.num_partitions, left.spec.backend) == (spec.num_partitions, spec.backend)
            goes_on = same and self._files.hand_on(left.state, registration, spec, partition)
            if not goes_on:
                _destroy(left)
        with self._held.lock:
            others = [*self._held.instances.values(), *self._kept.values()]
            of_work = (runs for _, runs in self._at_work.values())
            runs = {*(i.registration.run_id for i in others), *chain.from_iterable(of_work)}
        state = self._with_room(lambda: self._files.open_own(registration, spec, partition, runs), drops=drops)
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
        """Do some work; if the disk is full and one ``drops`` what other loads have left there, do the work again."""
        while True:
            try:
                return work()
            except LocalDiskFullError as error:
                if not drops:
                    raise
                dropped = self._drop(lambda kept: True)
                if not dropped:
                    raise
                log.warning("What %d loads that broke off have left is removed: %s", dropped, error)

    def _keep(self, instance: Instance) -> None:
        """Keep a partition that is loaded in part for the next load of it. Its loading lock is held."""
        instance.kept_since = self._clock()
        with self._held.lock:
            self._kept[instance.key] = instance

    def drop_kept(self) -> None:
        """Remove what was loaded in part or laid aside, if nobody has gone on with it for long."""
        now = self._clock()
        self._drop(lambda kept: now - kept.kept_since > LOADED_FILES_SECONDS)

    def close(self) -> None:
        """Unload everything, and remove the local files."""
        for instance in self._held.all():
            self.unload(instance)
        for run_id in {*self._held.registrations}:
            self.unload_run(run_id)
        self._drop(lambda kept: True)  # what was opened meanwhile is laid aside by now, too

    def _drop(self, is_meant: Callable[[Instance], bool]) -> int:
        """Remove what was loaded in part, where nobody goes on with it. Return of how many partitions."""
        with self._held.lock:
            gone = [i for i in self._kept.values() if is_meant(i)]
        dropped = 0
        for instance in gone:
            lock = self.lock_of(instance.key)
            if not lock.acquire(blocking=False):
                continue  # somebody goes on with it
            try:
                with self._held.lock:
                    is_kept = self._kept.get(instance.key) is instance
                    if is_kept:
                        del self._kept[instance.key]
                if is_kept:
                    _destroy(instance)
                    dropped += 1
            finally:
                lock.release()
        for run_id in {i.registration.run_id for i in gone}:
            self._remove_unused(run_id)
        return dropped

    def progress(self, key: InstanceKey) -> LoadProgress:
        """Return how far the load of a partition has come that is under way; nothing if none is."""
        watched = self._watches.get(key)
        return LoadProgress() if watched is None else watched[1].progress()

    def loads_under_way(self) -> list[str]:
        """Return which partitions are being loaded and how far that has come, for people."""
        return [f"{watch.what}: {watch.progress()}" for _, watch in list(self._watches.values())]

    def due_leases(self) -> list[tuple[str, Callable[[], None]]]:
        """Return, for each load under way whose lease is due, the run id and the function that renews the lease.

        A renewal may take long.

        The files of a load that nobody waits for any more are let go, though storage may keep its thread for ever.
        """
        with self._held.lock:
            loads = [(*self._watches[key], lease) for key, lease in self._leases.items()]
        return [
            (grant.registration.run_id, lease.renew)
            for grant, watch, lease in loads
            if lease.is_due and watch.is_wanted
        ]

    @contextmanager
    def _watching(self, key: InstanceKey, grant: OpenGrant, is_abandoned: Callable[[], bool]) -> Iterator[LoadWatch]:
        """Let the load of a partition be seen, and be ended. Its loading lock is held."""
        run_id = grant.registration.run_id
        _, operator, partition = key
        what = f"version {grant.version} of operator {operator!r}, partition {partition} (run {run_id})"
        lease = self._lease(run_id, operator, partition, grant.version)
        watch = LoadWatch(what, is_abandoned=is_abandoned, on_step=lease.renew, clock=self._clock)
        with self._held.lock:
            self._watches[key] = (grant, watch)
            self._leases[key] = lease
        try:
            yield watch
        finally:
            with self._held.lock:
                del self._watches[key], self._leases[key]

    def _lease(self, run_id: str, operator: str, partition: int, version: int) -> FileLease:
        """Return the lease of a load of this host's own partition. It ends with the first changes to the partition."""
        use = self._registration.info.host_id
        return FileLease(self._registration, run_id, operator, partition, version, use=use, clock=self._clock)

    def _end_older_load(self, key: InstanceKey, grant: OpenGrant) -> None:
        """Have a load for an older run end: the run of the grant needs the partition."""
        watched = self._watches.get(key)
        run_id = grant.registration.run_id
        if watched is not None and watched[0].registration.run_id != run_id and watched[0].epoch < grant.epoch:
            watched[1].end(f"run {run_id} has replaced run {watched[0].registration.run_id}", is_over=True)

    def _retire(self, instance: Instance, grant: OpenGrant) -> None:
        """Hold a partition of another run of the query no longer: the run of the grant is newer. Its files stay."""
        if grant.epoch < instance.epoch:
            raise _replaced(grant.registration.run_id, instance)
        retired = instance.registration.run_id
        with self._held.lock:
            self._held.remove(instance)
            if not self._held.of_run(retired):
                self._forget_run(retired)
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
            and _complete(instance, grant.version, grant.head)
        ):
            return True
        if watch is None and (grant.head is not None or not is_whole):
            return False
        lineage = Lineage(0)
        if grant.head is not None:
            lineage = self._lease(*instance.run_key, grant.version).lineage()
        started = time.perf_counter()
        # The span stands below the task that waits for the load, else in the trace of the running batch.
        trace = trace_ids.batch(instance.registration.run_id, grant.version + 1)
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

    def exchanged(self) -> dict[str, str]:
        """Return the last exchange of files of each run of which nothing from before it is held here."""
        return self._held.exchanged()

    def lock_of(self, key: InstanceKey) -> threading.Lock:
        """Return the loading lock of a partition."""
        with self._held.lock:
            return self._locks.setdefault(key, threading.Lock())

    @contextmanager
    def _noted_at_work(self, run_id: str, key: InstanceKey) -> Iterator[None]:
        """Keep the run's local directory from being removed: a partition that is loaded or laid aside is not held.

        That of the run before stays, too: the load may go on with its files. The partition's loading lock is held.
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
                self._remove_unused(of_run)

    # -- completing ----------------------------------------------------------------------------

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
            query_id = None if registration is None else registration.query_id
            self._drop(lambda kept: completed.run_id == kept.registration.run_id or query_id == kept.key[0])
            with self._held.lock:
                held = self._held.instances.values()
                of_others = [i.key[0] for i in held if i.registration.run_id != completed.run_id]
                at_work = [of_query for of_query, _ in self._at_work.values()]
                is_clean = query_id not in (*of_others, *(key[0] for key in self._kept), *at_work)
        for instance in self._held.of_run(completed.run_id):
            owned = completed.heads.get(instance.operator)
            if owned is None or instance.state.version > completed.version:
                is_clean &= owned is not None
                continue
            head = owned.get(instance.partition)
            if instance.state.version == completed.version:
                if instance.state.head != head and (head is not None or completed.rewritten != known):
                    # The files of the version were exchanged: keys that the new files lack must be gone here as well.
                    self.unload(instance, waits=False)
                    is_clean &= not self._held.holds(instance)
                continue
            if not instance.commit_lock.acquire(blocking=False):
                is_clean = False
                continue  # a commit is under way, which may wait for long; the next heartbeat brings this again
            try:
                stale = head is None or not _complete(instance, completed.version, head)
            except StoreClosedError:
                continue  # the partition was unloaded meanwhile
            finally:
                instance.commit_lock.release()
            if stale and not self._held.has_ended(completed.run_id):
                # Another host owns the partition by now, or this version was made by another host or by an earlier
                # incarnation of this one. If the partition is still this host's, the next open loads it; or it is
                # loading it now, and what was loaded must stay.
                self.unload(instance, waits=False)
            # The coordinator never accepted changes made on top of exchanged files.
            is_clean &= not stale or not self._held.holds(instance)
        if is_clean:
            self._held.note_exchanged(completed.run_id, completed.rewritten)

    # -- unloading -----------------------------------------------------------------------------

    def unload(self, instance: Instance, *, waits: bool = True) -> None:
        """Unload a partition and remove its local files, if it is the one that is held.

        ``waits``: also for a load of the partition that is under way. Otherwise nothing happens during one.
        """
        lock = self.lock_of(instance.key)
        if not lock.acquire(blocking=waits):
            return
        try:
            if self._held.remove(instance):
                _destroy(instance)
        finally:
            lock.release()

    def lay_aside(self, instance: Instance, *, waits: bool = True) -> None:
        """Unload a partition, but keep its local files for a while: its query may be started again.

        ``waits``: see ``unload``.
        """
        lock = self.lock_of(instance.key)
        if not lock.acquire(blocking=waits):
            return
        try:
            with self._noted_at_work(instance.registration.run_id, instance.key):
                if not self._held.remove(instance):
                    return
                with self._held.lock:
                    is_free = instance.key not in self._kept
                if is_free:
                    _close(instance)
                    self._keep(instance)
                else:  # a copy that is loaded for a newer run
                    _destroy(instance)
        finally:
            lock.release()

    def unload_run(self, run_id: str) -> None:
        """Lay the partitions of a run aside that is over, and forget the run."""
        with self._held.lock:
            gone = self._held.of_run(run_id)
            self._forget_run(run_id)
            for grant, watch in self._watches.values():
                if grant.registration.run_id == run_id:
                    watch.end("its run is over", is_over=True)
        self._held.tell_ended(run_id)
        # What was laid aside before stays, as that of an ended query that nobody has read.
        self._drop(lambda kept: kept.registration.run_id == run_id and not kept.state.is_closed)
        for instance in gone:
            self.lay_aside(instance)
        self._remove_unused(run_id)

    def _remove_unused(self, run_id: str) -> None:
        """Remove the directory of a run that is over, once nothing of the run is open, laid aside or at work there."""
        with self._held.lock:
            there = {i.registration.run_id for i in (*self._held.instances.values(), *self._kept.values())}
            at_work = chain.from_iterable(runs for _, runs in self._at_work.values())
            is_used = run_id in (*self._held.registrations, *there, *at_work)
        if not is_used:
            self._files.remove_run(run_id)

    def _forget_run(self, run_id: str) -> None:
        # The registration goes first: whoever waits for a version wakes when that is forgotten, and must not find it.
        self._held.forget_run(run_id)
        for table in (self._grants, self._version_requests, self._completed):
            table.forget(run_id)


def _complete(instance: Instance, version: int, head: str) -> bool:
    """Apply the accepted changes that made ``head``; return False if the partition has not got them."""
    trace = trace_ids.batch(instance.registration.run_id, version)
    try:
        with spans.span("host.apply", trace, operator=instance.operator, partition=instance.partition):
            instance.state.complete(version, head)
    except LineageMismatchError:
        return False
    except LocalStateDamagedError as error:
        log.warning("Version %d of %s is loaded anew: %s", version, instance, error)
        return False
    for done in [v for v in instance.acknowledged if v <= version]:
        del instance.acknowledged[done]
    earlier = {v: keys for v, keys in instance.keys_at.items() if version - REMEMBERED_COMMITS < v < version}
    instance.keys_at = {**earlier, version: instance.state.reads.num_keys(version)}
    return True


def _replaced(run_id: str, by: Instance) -> RetiredRunError:
    return RetiredRunError(
        f"Run {run_id} has been replaced by run {by.registration.run_id}; only the newer one may go on."
    )


def _leaves_files_right(error: BaseException) -> bool:
    """Return whether a load that ended with this error may be gone on with: neither files nor state are to blame."""
    if isinstance(error, MissingFileError | DamagedFileError):
        return False
    return isinstance(error, StorageError | LoadEndedError | CoordinatorError | SparkBridgeError)


def _close(instance: Instance) -> None:
    with instance.commit_lock:
        instance.state.close()


def _destroy(instance: Instance) -> None:
    with instance.commit_lock:
        instance.state.destroy()
    log.info("Unloaded %s", instance)
