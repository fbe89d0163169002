"""``PartitionLoader`` fills the entries of ``PartitionCache``: own partitions at granted versions, and copies."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from backends import exceptions, spans
from backends.exceptions import LoadEndedError, LocalDiskFullError, MissingFileError
from backends.formats.manifest import ChangelogRef, Lineage, partition_directory
from backends.load_watch import LoadProgress, LoadWatch
from backends.partition.partition_state import PartitionState
from coordinator_actor.exceptions import CoordinatorError, RetiredRunError, StaleBatchError
from coordinator_actor.messages import Completed, OpenGrant, OperatorSpec, QueryRegistration, WarmUp
from spark_bridge.exceptions import HostUnavailableError, SparkBridgeError, StateVersionError
from spark_bridge.host.instances import (
    REMEMBERED_COMMITS,
    Counters,
    Instance,
    InstanceKey,
    PartitionFiles,
    key_of,
    spec_of,
)
from spark_bridge.host.local_disk import IN_USE_SECONDS, DiskRoom, LocalDisk
from spark_bridge.host.partition_cache import FOR_EVER, Copy, CopyKey, Kind, PartitionCache, close, destroy
from spark_bridge.host.registration import CompletedVersions, HostRegistration
from spark_bridge.host.running_loads import FileLease, Load, Loads

log = logging.getLogger(__name__)

TaskChangelog: TypeAlias = tuple[tuple[str, int], ChangelogRef]
"""Operator and partition, and a changelog of that partition."""

TASK_ANSWER_SECONDS = 2.0
"""A task is answered after this many seconds at the latest: far below the time limit of its call."""
ABANDONED_SECONDS = 60.0
"""A load ends if no task has asked for it for this many seconds; its files are kept for the next one."""
READ_SECONDS = 1.0
"""A partition that was loaded for a read is not evicted for this many seconds."""
FOLLOWED_BYTES = 16 << 20
"""Copies fetch at most this many bytes of changelogs with one request, and hold them until they are applied."""
SHARED_LOAD_SECONDS = 10.0
"""A read waits at most this many seconds for a task's load of the partition: its thread is needed for other reads."""


class StoredPartition(NamedTuple):
    """A retained version of a partition, to be read from storage."""

    registration: QueryRegistration
    spec: OperatorSpec
    partition: int
    version: int

    def key(self, kind: Kind) -> CopyKey:
        return CopyKey(kind, self.registration.run_id, (self.spec.name, self.version), self.partition)


@dataclass(eq=False, repr=False)
class PartitionLoader:
    """Brings partitions to the versions that are granted or asked for. Thread-safe: ``PartitionCache`` has the locks.

    A load that fails leaves the partition partly loaded: it does not serve, and the next load of the same run continues
    from there. ``DiskRoom`` makes room on a full disk.
    """

    _registration: HostRegistration
    _cache: PartitionCache
    _loads: Loads
    _files: PartitionFiles
    _completed: CompletedVersions
    _counters: Counters
    _clock: Callable[[], float]
    _room: DiskRoom
    disk: LocalDisk

    # -- own partitions ------------------------------------------------------------------------

    def open_for_task(self, grant: OpenGrant, operator: str, partition: int, asker: str) -> Instance | LoadProgress:
        """Return the partition as the grant says, or the progress of its load; the caller then asks again.

        Raises the errors of ``load``, for every ``asker`` that was asked to retry before.
        """
        instance = self.ready(grant, operator, partition)
        if instance is not None:
            return instance
        key = key_of(grant.registration, operator, partition)
        goal = (grant.registration.run_id, grant.epoch, grant.version, grant.head)
        load = partial(self._load_for_task, grant, operator, partition)
        if self._loads.wait_for_task(key, goal, load, asker, TASK_ANSWER_SECONDS):
            instance = self.ready(grant, operator, partition)
        return self._loads.progress(key) if instance is None else instance

    def _load_for_task(self, grant: OpenGrant, operator: str, partition: int, load: Load) -> None:
        def is_abandoned() -> bool:
            return self._clock() - load.last_asked > ABANDONED_SECONDS

        try:
            self.load(grant, operator, partition, is_abandoned=is_abandoned)
        except LoadEndedError as error:
            log.info("%s", error)  # the next caller starts a new load

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
        with self._cache.loading_locked(key, SHARED_LOAD_SECONDS if for_read else FOR_EVER) as is_locked:
            if not is_locked:
                raise HostUnavailableError(
                    f"Partition {partition} of operator {operator!r} is being loaded: {self._loads.progress(key)}. "
                    "Ask again in a moment."
                )
            with self._watching(key, grant, is_abandoned) as watch:
                instance = self._bring_to_grant(grant, key, watch, for_read=for_read)
            assert instance is not None
            return instance

    def ready(self, grant: OpenGrant, operator: str, partition: int) -> Instance | None:
        """Return the partition at the version of the grant; None if files must be fetched for it, or are being fetched.

        Waits for no load. Raises as ``load`` does.
        """
        key = key_of(grant.registration, operator, partition)
        with self._cache.loading_locked(key) as is_locked:
            if not is_locked:
                self._loads.end_older(key, grant)
                return None
            try:
                with self._cache.in_use(grant.registration.run_id, key):
                    return self._bring_to_grant(grant, key, None)
            except LocalDiskFullError:
                return None  # a load makes room, and may wait for it

    def warm_up(
        self, grant: OpenGrant, operator: str, partition: int, is_abandoned: Callable[[], bool] = lambda: False
    ) -> None:
        """Load a copy of a partition that is to become this host's, and keep it for the load by the first task.

        Does nothing if the partition ``is_warm`` or being loaded. Raises as ``load`` does, and ``LocalDiskFullError``
        if there is no room next to the other loaded partitions: a copy does not evict them.
        """
        key = key_of(grant.registration, operator, partition)
        with self._cache.loading_locked(key) as is_locked:
            if not is_locked or self.is_warm(grant, operator, partition):
                return
            trace = spans.batch(grant.registration.run_id, grant.version + 1)
            with (
                spans.span("host.warm_up", trace, operator=operator, partition=partition),
                self._watching(key, grant, is_abandoned, is_ahead=True) as watch,
            ):
                self._bring_to_grant(grant, key, watch, serves=False)
            # No commit of this host ends the lease of a standby, and old files would stay until it runs out.
            self._lease(grant.registration.run_id, operator, partition, grant.version).end()

    def is_warm(self, grant: OpenGrant, operator: str, partition: int) -> bool:
        """Return whether a partition serves, or there is a copy of its version. Such a copy is kept for longer."""
        key, run_id = key_of(grant.registration, operator, partition), grant.registration.run_id
        with self._cache.lock:
            instance = self._cache.instances.get(key)
            if instance is not None and instance.registration.run_id == run_id:
                return True
            copy = self._cache.whole_copy(grant.registration, operator, partition)
            if copy is None:
                return False
            version, head = copy.state.version, copy.state.head
            # Files of a version may have been exchanged: then its head is another one.
            is_warm = version > grant.version or (version, head) == (grant.version, grant.head)
            if is_warm:
                self._cache.keep(copy)
            return is_warm

    def follow(self, order: WarmUp, is_wanted: Callable[[str, int], bool]) -> list[tuple[str, int]]:
        """Apply to whole copies the changelogs that an order names, version after version.

        All changelogs of a version that are in one object are fetched with one request, while no lock is held. Return
        the operator and partition of each copy that cannot follow: ``warm_up`` loads it. A copy without room for its
        changes waits for the next order. Raises ``StorageError``.
        """
        storage = self._files.storage_of(order.registration)
        unable: list[tuple[str, int]] = []
        stopped: set[tuple[str, int]] = set()
        steps: dict[tuple[int, str], dict[tuple[str, int], ChangelogRef]] = {}
        for operator, partitions in order.changelogs.items():
            for partition, refs in partitions.items():
                copy = self._cache.whole_copy(order.registration, operator, partition)
                version = None if copy is None else copy.state.version
                if version is None or refs[0].version > version + 1:
                    unable.append((operator, partition))
                    continue
                for ref in refs:
                    if ref.version > version:
                        steps.setdefault((ref.version, ref.file.stored_in), {})[operator, partition] = ref
        trace = spans.batch(order.registration.run_id, order.version + 1)
        for (version, _), refs_of in sorted(steps.items()):
            wanted = [(task, ref) for task, ref in refs_of.items() if task not in stopped and is_wanted(*task)]
            with spans.span("host.follow", trace, version=version, num_partitions=len(wanted)):
                for few in _in_bounds(wanted):
                    claim = self._files.note_copies(sum(ref.file.size for _, ref in few))
                    contents = storage.read_together([ref.file for _, ref in few])
                    for task, ref in few:
                        data = contents.get(ref.file.path)
                        try:
                            if data is None or not self._follow(order.registration, task, ref, data):
                                stopped.add(task)
                                unable.append(task)
                        except (LocalDiskFullError, exceptions.HostMemoryBusyError) as error:
                            stopped.add(task)
                            log.warning("The copy of partition %d of %r waits for room: %s", task[1], task[0], error)
                    del claim
        return unable

    def _follow(self, registration: QueryRegistration, task: tuple[str, int], ref: ChangelogRef, data: bytes) -> bool:
        """Apply one changelog to a copy; return False if the copy cannot follow, or is used otherwise by now.

        Raises ``LocalDiskFullError`` and ``HostMemoryBusyError``.
        """
        key = key_of(registration, *task)
        with self._cache.loading_locked(key) as is_locked:
            if not is_locked:
                return False
            try:
                copy = self._cache.whole_copy(registration, *task)
                if copy is None:
                    return False
                with copy.commit_lock:
                    base = copy.state.head
                    changes = copy.state.follow(ref, data)
                    if copy.key_windows is not None:
                        copy.key_windows.follow_changes(base, ref.file.path, changes)
                self._cache.keep(copy)
                self._counters.count("followed")
                return True
            except LocalDiskFullError:
                raise
            except (
                exceptions.LineageMismatchError,
                exceptions.DamagedFileError,
                exceptions.LocalStateDamagedError,
                exceptions.StoreClosedError,
            ) as error:
                log.warning("The copy of partition %d of %r cannot follow, and is loaded: %s", task[1], task[0], error)
                return False

    @contextmanager
    def _watching(
        self, key: InstanceKey, grant: OpenGrant, is_abandoned: Callable[[], bool], *, is_ahead: bool = False
    ) -> Iterator[LoadWatch]:
        """Show the load of an own partition, and keep its directory. Its loading lock is held."""
        _, operator, partition = key
        run_id = grant.registration.run_id
        what = f"version {grant.version} of operator {operator!r}, partition {partition} (run {run_id})"
        lease = self._lease(run_id, operator, partition, grant.version)
        with (
            self._cache.in_use(run_id, key),
            self._loads.watching(key, what, lease, is_abandoned, grant.epoch, is_ahead=is_ahead) as watch,
        ):
            yield watch

    def _lease(self, run_id: str, operator: str, partition: int, version: int, use: str | None = None) -> FileLease:
        """Return the lease of a load: by default of an own partition, which ends with the first changes to it."""
        use = self._registration.info.host_id if use is None else use
        return FileLease(self._registration, (run_id, operator, partition), version, use, self._clock)

    def _bring_to_grant(
        self,
        grant: OpenGrant,
        key: InstanceKey,
        watch: LoadWatch | None,
        *,
        for_read: bool = False,
        serves: bool = True,
    ) -> Instance | None:
        """Return the partition at the version of the grant; None if files must be fetched and there is no ``watch``.

        Unless it ``serves``, the files are kept like those of a partition that is loaded in part, and this returns
        None.
        """
        cache, registration = self._cache, grant.registration
        with cache.lock:
            kept = cache.pop_kept(key)
            instance = cache.instances.get(key)
            cache.registrations[registration.run_id] = registration
        older: Instance | None = None
        if kept is not None and (kept.registration.run_id != registration.run_id or kept.state.is_closed):
            if grant.epoch < kept.epoch:
                cache.keep(kept)
                raise _replaced(registration.run_id, kept)
            kept, older = None, kept
        if kept is not None and grant.version < kept.state.version:
            destroy(kept)
            kept = None
        if instance is not None and instance.registration.run_id != registration.run_id:
            self._retire(instance, grant)
            if older is not None:
                destroy(older)
            instance, older = None, instance
        if instance is None:
            instance = kept
        if instance is None:
            instance = self._open(grant, key, older, watch, makes_room=serves)
        elif grant.version < instance.state.version:
            if for_read:
                return instance
            raise StaleBatchError(
                f"A task of batch {grant.version} is too late: version {instance.state.version} is completed."
            )
        instance.epoch = grant.epoch
        is_whole = instance is not kept or instance.is_whole_copy
        if instance is kept and is_whole:
            instance.loaded_at = instance.state.version  # as after a load: another host has made the version

        def advance() -> bool:
            nonlocal is_whole
            was_whole, is_whole = is_whole, False
            fetched = instance.state.fetched_dir
            reserving = nullcontext() if watch is None else self.disk.reserving(watch, str(instance), fetched)
            with instance.commit_lock, reserving:
                return self._advance(instance, grant, watch, is_whole=was_whole)

        try:
            is_advanced = self._room.make(advance, key, watch, instance) if serves else advance()
        except BaseException as error:
            cache.remove_instance(instance)
            if _can_continue(error) and (watch is None or not watch.is_over):
                cache.keep(instance)
            else:
                destroy(instance)
            raise
        if is_advanced and serves:
            if watch is not None:
                self.disk.note_loaded(key, watch.progress().nbytes)
                # Not evicted before the task or the reader that waits for it has used it once.
                instance.in_use_until = self._clock() + (READ_SECONDS if for_read else IN_USE_SECONDS)
                instance.note_use()
            cache.register_instance(instance)
            self.disk.notify()
            return instance
        if not cache.has_instance(instance):
            cache.keep(instance)
        return None

    def _open(
        self, grant: OpenGrant, key: InstanceKey, older: Instance | None, watch: LoadWatch | None, *, makes_room: bool
    ) -> Instance:
        """Open a partition, with the ``older`` local files of an earlier run, or laid aside (Flink: local recovery).

        Files of another layout or backend are removed.
        """
        registration, (_, operator, partition) = grant.registration, key
        spec = spec_of(registration, operator)
        continues = False
        if older is not None:
            close(older)
            is_same = (older.spec.num_partitions, older.spec.backend) == (spec.num_partitions, spec.backend)
            continues = is_same and self._files.hand_on(older.state, registration, spec, partition)
            if not continues:
                destroy(older)
        open_own = partial(self._files.open_own, registration, spec, partition, self._cache.runs_in_use)
        state = self._room.make(open_own, key, watch) if makes_room else open_own()
        instance = Instance(registration, operator, partition, state, loaded_at=grant.version)
        if older is not None and continues:
            log.info("Opened %s with the files left here, at version %d", instance, state.version)
            instance.snapshot_version, instance.rescaled_at = older.snapshot_version, older.rescaled_at
        return instance

    def _retire(self, instance: Instance, grant: OpenGrant) -> None:
        """Let a partition of another run of the query serve no longer: the grant's run is newer. Its files stay."""
        if grant.epoch < instance.epoch:
            raise _replaced(grant.registration.run_id, instance)
        retired = instance.registration.run_id
        with self._cache.lock:
            self._cache.remove_instance(instance)
            if not self._cache.of_run(retired):
                self._cache.forget_run(retired)
        self._cache.end_run(retired)

    def _advance(self, instance: Instance, grant: OpenGrant, watch: LoadWatch | None, *, is_whole: bool) -> bool:
        """Bring an instance to the grant's version: by its own accepted changes, else from storage.

        Unless the instance ``is_whole``, a load has left it midway, and a write may have left its state midway: then
        ``PartitionState.load`` alone knows what of it can be used. Return False if files must be fetched and there is
        no ``watch``: nothing has changed then.
        """
        state, head = instance.state, grant.head
        is_whole = is_whole and state.is_whole
        if is_whole and (state.version, state.head) == (grant.version, head):
            return True
        is_next = is_whole and head is not None and grant.version == state.version + 1
        if is_next and head is not None and apply_accepted(instance, grant.version, head):
            return True
        if watch is None and (head is not None or not is_whole):
            return False
        lineage = Lineage(0) if head is None else self._lease(*instance.run_key, grant.version).lineage()
        started = time.perf_counter()
        # The span belongs to the task that waits for the load, else to the trace of the running batch.
        trace = spans.batch(instance.registration.run_id, grant.version + 1)
        with spans.span("host.load", trace, operator=instance.operator, partition=instance.partition) as span:
            span.note(snapshots=len(lineage.snapshots), rescaled=lineage.rescaled is not None)
            with self._files.shared.loading():
                state.load(lineage, watch)
        instance.snapshot_version, instance.snapshot_bytes = max((s.version for s in lineage.snapshots), default=0), 0
        if lineage.rescaled is not None and not lineage.snapshots:
            instance.rescaled_at = lineage.rescaled.version
        instance.loaded_at = grant.version
        self._counters.count("loads")
        milliseconds = (time.perf_counter() - started) * 1e3
        log.info("Loaded version %d of %s in %.0f ms", grant.version, instance, milliseconds)
        return True

    def complete(self, completed: Completed) -> None:
        """Apply the accepted changes of a version that Spark has committed to the own partitions of the run.

        Readers see the version in all partitions at once, before it is applied.
        """
        cache, run_id = self._cache, completed.run_id
        self._completed.note(completed)
        is_exchanged = completed.rewritten != cache.last_exchange(run_id)
        is_clean = not is_exchanged or cache.drop_exchanged(run_id)
        cache.forget_evicted(run_id, completed.version)
        for instance in cache.of_run(run_id):
            heads = completed.heads.get(instance.operator)
            if heads is None or instance.state.version > completed.version:
                is_clean &= heads is not None
                continue
            head = heads.get(instance.partition)
            if instance.state.version == completed.version:
                if instance.state.head != head and (head is not None or is_exchanged):
                    # The files of the version were exchanged: keys that the new files lack must be gone here as well.
                    cache.unload(instance, waits=False)
                    is_clean &= not cache.has_instance(instance)
                continue
            if not instance.commit_lock.acquire(blocking=False):
                is_clean = False
                continue  # a commit is under way, which may wait for long; the next heartbeat brings this again
            try:
                is_stale = head is None or not apply_accepted(instance, completed.version, head)
            except exceptions.StoreClosedError:
                continue  # another thread has unloaded the partition
            finally:
                instance.commit_lock.release()
            if is_stale and not cache.has_ended(run_id):
                # Another host now owns the partition, or this version was made by another host or by an earlier
                # incarnation of this one. If the partition is still this host's, the next open loads it. If it is
                # being loaded now, the loaded files must stay.
                cache.unload(instance, waits=False)
            # The coordinator never accepted changes made on top of exchanged files.
            is_clean &= not is_stale or not cache.has_instance(instance)
        if is_clean:
            cache.note_exchanged(run_id, completed.rewritten)

    # -- copies --------------------------------------------------------------------------------

    @contextmanager
    def pinned_version(self, stored: StoredPartition, seconds: float) -> Iterator[PartitionState]:
        """Yield a copy of a partition for a ``with``; the copy stays at that version until the ``with`` ends.

        Raises ``StateVersionError`` if the version is not retained, ``TooManyRequestsError`` if as many other versions
        as possible are in use, ``HostUnavailableError`` if the copy is not loaded within ``seconds``, and what loading
        raises. The load then continues, for later readers.
        """
        key = stored.key(Kind.VERSION)

        def start_load(copy: Copy) -> Future[PartitionState]:
            return self._loads.start(copy, partial(self._load_version, copy, stored), self._loads.copies).result

        copy = self._cache.pin_version(key, start_load)
        try:
            if not wait([copy.loaded], seconds).done:
                raise HostUnavailableError(
                    f"Version {stored.version} of partition {stored.partition} of operator {stored.spec.name!r} (run "
                    f"{key.run_id}) is being loaded from storage, which takes longer: {self._loads.progress(key)}. Ask "
                    "again in a moment."
                )
            yield copy.loaded.result()
        finally:
            self._cache.unpin(copy)

    def _load_version(self, copy: Copy, stored: StoredPartition, _: Load) -> PartitionState:
        try:
            return self.load_copy(copy.key, stored, self._files.copies, lambda: copy.is_dropped)
        except exceptions.VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        except LoadEndedError as error:
            raise HostUnavailableError(f"{error} Ask again.") from error

    @contextmanager
    def pinned_for_export(self, stored: StoredPartition, is_given_up: Callable[[], bool]) -> Iterator[PartitionState]:
        """Yield a copy of a partition for an export. Raises ``LoadEndedError`` once ``is_given_up`` returns true."""
        key = stored.key(Kind.SAVEPOINT)
        load = partial(self.load_copy, key, stored, self._files.savepoints, is_given_up)
        with self._cache.pinned(key, load) as state:
            yield state

    @contextmanager
    def pinned_follower(
        self, registration: QueryRegistration, directory: str, backend: str, partition: int, version: int
    ) -> Iterator[PartitionState]:
        """Yield a copy of a partition at ``version`` or before, or an empty one, for one reader to advance it."""
        local = self._files.copies / uuid.uuid4().hex
        open_copy = partial(self._files.open_copy, registration, directory, backend, local)
        key = CopyKey(Kind.FOLLOWER, registration.run_id, (directory, backend), partition)
        with self._cache.pinned(key, open_copy, version) as state:
            yield state

    def load_copy(
        self, key: CopyKey, stored: StoredPartition, below: Path, is_abandoned: Callable[[], bool]
    ) -> PartitionState:
        """Return a copy of a partition at a version, in a new directory ``below``; ``destroy`` removes the copy.

        Raises ``VersionNotFoundError`` if the version is not kept (any more), ``LoadEndedError`` if ``is_abandoned``,
        and what loading and the coordinator raise. Nothing is left then.
        """
        use, (registration, spec, partition, version) = uuid.uuid4().hex, stored
        lease = self._lease(registration.run_id, spec.name, partition, version, use)
        lineage = lease.lineage()
        what = f"a copy of version {version} of operator {spec.name!r}, partition {partition} (run {key.run_id})"
        try:
            is_ahead = key.kind is Kind.SAVEPOINT
            with self._loads.watching(key, what, lease, is_abandoned, is_ahead=is_ahead) as watch:
                directory = partition_directory(spec.name, spec.num_partitions, partition)

                def loaded_copy() -> PartitionState:
                    copy = self._files.open_copy(registration, directory, spec.backend, below / use)
                    try:
                        with self.disk.reserving(watch, what, copy.fetched_dir):
                            copy.load(lineage, watch)
                    except BaseException as error:
                        copy.destroy()
                        if isinstance(error, MissingFileError):
                            lease.lineage()  # raises if the version has been given up since
                        raise
                    return copy

                return self._room.make(loaded_copy, None, watch)
        finally:
            lease.end()


def _in_bounds(refs: Sequence[TaskChangelog]) -> Iterator[list[TaskChangelog]]:
    """Divide changelogs of one object into lists of at most ``FOLLOWED_BYTES``, or of one changelog."""
    few: list[TaskChangelog] = []
    nbytes = 0
    for task, ref in refs:
        if few and nbytes + ref.file.size > FOLLOWED_BYTES:
            yield few
            few, nbytes = [], 0
        few.append((task, ref))
        nbytes += ref.file.size
    if few:
        yield few


def apply_accepted(instance: Instance, version: int, head: str) -> bool:
    """Apply the accepted changes that made ``head``; return False if the partition has not got them."""
    trace = spans.batch(instance.registration.run_id, version)
    try:
        with spans.span("host.apply", trace, operator=instance.operator, partition=instance.partition):
            instance.state.complete(version, head)
    except exceptions.LineageMismatchError:
        return False
    except exceptions.LocalStateDamagedError as error:
        log.warning("Loading version %d of %s again: %s", version, instance, error)
        return False
    for done in [v for v in instance.acknowledged if v <= version]:
        del instance.acknowledged[done]
    earlier = {v: keys for v, keys in instance.keys_at.items() if version - REMEMBERED_COMMITS < v < version}
    instance.keys_at = {**earlier, version: instance.state.reads.num_keys(version)}
    return True


def _replaced(run_id: str, by: Instance) -> RetiredRunError:
    return RetiredRunError(
        f"Run {run_id} has been replaced by run {by.registration.run_id}; only the newer one may continue."
    )


def _can_continue(error: BaseException) -> bool:
    """Return whether a later load can continue one that ended with this error: its files and state are not to blame."""
    if isinstance(error, MissingFileError | exceptions.DamagedFileError):
        return False
    return isinstance(error, exceptions.StorageError | LoadEndedError | CoordinatorError | SparkBridgeError)
