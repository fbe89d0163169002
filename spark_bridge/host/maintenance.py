"""The maintenance of a host: unload partitions that another host owns by now, or that are of an ended, unread query;
upload snapshots that are due; flush the write buffers of idle partitions.

All partitions share RocksDB's write buffers. While the buffers are full, the partition that writes must flush its own,
however little that is. So a busy query would write small files in each batch if idle queries kept the buffers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from backends import spans
from backends.conf import StateStoreConf
from backends.exceptions import StoreClosedError
from backends.formats.manifest import SnapshotRef
from backends.formats.snapshot import PreparedSnapshot, StoredSnapshot
from backends.host_memory import COPIES, WRITE_BUFFERS, HostMemory
from backends.partition.partition_state import store_snapshots
from coordinator_actor.exceptions import BatchHeldError
from coordinator_actor.messages import SnapshotUploaded
from coordinator_actor.run.holds import UPLOAD
from spark_bridge.exceptions import STATESTORE_ERRORS
from spark_bridge.host.instances import Counters, Instance, InstanceKey
from spark_bridge.host.partition_cache import PartitionCache
from spark_bridge.host.prepared_versions import VersionRequests
from spark_bridge.host.registration import HostRegistration, Order, RunOrders
from spark_bridge.host.running_loads import FileLease

log = logging.getLogger(__name__)


INLINE_FILES_BYTES = 1 << 20
"""At most this many bytes of small files of one snapshot are stored with its descriptor."""
IDLE_SNAPSHOT_BYTES = 8 << 20
"""A snapshot of an idle partition is due at this size of the changelogs behind the last one: about 0.3 s of a load."""
TOGETHER_BYTES = 16 << 20
TOGETHER_SECONDS = 10.0
MEET_SECONDS = 1.0
"""A thread that has prepared its snapshots waits at most this many seconds for the others, so that they share an
object.
"""
WAIT_SECONDS = 10.0
"""A query without an upload waits at most this many seconds for the uploads of others."""
MAX_UPLOAD_THREADS = 4096
"""Threads for uploads of all queries together; they are made when needed, and are kept."""


class _Ready(NamedTuple):
    """A partition whose snapshot is to be stored with others.

    ``earlier`` is the snapshot that it shares files with, ``changelog_bytes`` those of the state in the snapshot.
    """

    instance: Instance
    lease: FileLease
    earlier: SnapshotRef | None
    prepared: PreparedSnapshot
    changelog_bytes: int


class _Together:
    """Files of one run that several threads have prepared, to be stored with one request. Thread-safe."""

    def __init__(self, threads: int) -> None:
        self._changed = threading.Condition()
        self._at_work = threads
        self._ready: list[_Ready] = []
        self._since = time.monotonic()

    def collect_snapshot(self, one: _Ready) -> list[_Ready]:
        """Add a snapshot. Return all waiting ones if it is time to store them, else nothing."""
        with self._changed:
            self._ready.append(one)
            nbytes = sum(ready.prepared.nbytes for ready in self._ready)
            is_due = nbytes >= TOGETHER_BYTES or time.monotonic() - self._since > TOGETHER_SECONDS
            return self._taken() if is_due else []

    def end(self) -> list[_Ready]:
        """Record that a thread has prepared all its snapshots; wait for the others, and return those it is to store."""
        with self._changed:
            self._at_work -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._at_work, MEET_SECONDS)
            return self._taken()

    def _taken(self) -> list[_Ready]:
        ready, self._ready, self._since = self._ready, [], time.monotonic()
        return ready


class _Slots:
    """The uploads of a host that run at a time: ``num_slots``, and one more for each query that has waited for long.

    So queries whose storage hangs cannot stop the uploads of another. Thread-safe.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._changed = threading.Condition()
        self._in_use = Counter[str]()
        self._is_closed = False

    @contextmanager
    def hold(self, location: str) -> Iterator[bool]:
        """Wait for a slot for the query with that state, and hold it. Give False if the host closes before."""
        with self._changed:
            if not self._changed.wait_for(self._is_free, WAIT_SECONDS):
                self._changed.wait_for(lambda: self._is_free() or not self._in_use[location])
            is_closed = self._is_closed
            self._in_use[location] += 1
        try:
            yield not is_closed
        finally:
            with self._changed:
                self._in_use[location] -= 1
                self._in_use += Counter()  # forgets the queries without an upload
                self._changed.notify_all()

    def _is_free(self) -> bool:
        return self._is_closed or self._in_use.total() < self._num_slots

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


@dataclass(eq=False, repr=False)
class Maintenance:
    """The maintenance of one host. The lock of ``PartitionCache`` guards the table of uploads."""

    _registration: HostRegistration
    _cache: PartitionCache
    _version_requests: VersionRequests
    _counters: Counters
    _memory: HostMemory
    _conf: StateStoreConf
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        threads = self._conf.maintenance_threads
        self._hooks: list[Callable[[], None]] = []
        self._orders = RunOrders()
        self._slots = _Slots(threads)
        self._uploads = ThreadPoolExecutor(MAX_UPLOAD_THREADS, thread_name_prefix="statestore-maintenance")
        self._flushes = ThreadPoolExecutor(threads, thread_name_prefix="statestore-flush")
        self._uploading: dict[InstanceKey, Future[None]] = {}
        self._leases: set[FileLease] = set()
        """The leases of running uploads. Each maintenance renews them: a large file may take longer than a lease lasts.
        """

    def on_maintenance(self, work: Callable[[], None]) -> None:
        """Have something quick done with every maintenance."""
        self._hooks.append(work)

    def do_maintenance(self) -> list[Future[None]]:
        """Unload partitions that another host owns, and begin the work that is due; return what was begun.

        The work is uploads of snapshots: one is due after ``deltas_per_snapshot`` versions, or if the partition has had
        no commit since the last maintenance and the changelogs behind its snapshot are large. While the write buffers
        or the room for unwritten changes are more than half full, it is also flushes of partitions that have had no
        commit since the last maintenance.
        """
        log.debug("Doing maintenance")
        for work in self._hooks:
            work()
        self._renew_leases()
        self._version_requests.forget_idle_runs()
        self._cache.drop_unused()
        self._unload_others()
        self._unload_damaged(self._cache.all())
        self._unload_unread()
        begun = []
        due: dict[str, list[Instance]] = {}
        used, conf = self._memory.held(), self._conf
        is_crowded = (
            2 * used.get(WRITE_BUFFERS, 0) > conf.write_buffer_bytes or 2 * used[COPIES] > self._memory.copies_bytes
        )
        with self._cache.lock:
            for key, instance in self._cache.instances.items():
                # No manifest names a snapshot of an ended query any more.
                has_ended = self._cache.has_ended(instance.registration.run_id)
                running = self._uploading.get(key)
                version = instance.state.version
                # A partition built from files of an earlier layout is expensive to load until it has its first
                # snapshot.
                is_idle, instance.seen_version = version == instance.seen_version, version
                if instance.rescaled_at is not None:
                    is_due = version > instance.rescaled_at
                else:
                    is_due = version - instance.snapshot_version >= conf.deltas_per_snapshot
                    changed_bytes = instance.state.changelog_bytes - instance.snapshot_bytes
                    is_due |= is_idle and version > instance.snapshot_version and changed_bytes >= IDLE_SNAPSHOT_BYTES
                # A snapshot would wait for a load in a thread that other partitions need.
                if is_due and not has_ended and not instance.state.is_loading and (running is None or running.done()):
                    due.setdefault(instance.registration.run_id, []).append(instance)
                elif is_crowded and is_idle and instance.written_out != version and not instance.state.is_loading:
                    begun.append(self._flushes.submit(self._write_out, instance, version))
            for copy in self._cache.kept_copies() if is_crowded else ():
                version = copy.state.version
                is_idle, copy.seen_version = version == copy.seen_version, version
                if is_idle and copy.written_out != version:
                    begun.append(self._flushes.submit(self._write_out, copy, version))
            uploads = {(key[0], upload) for key, upload in self._uploading.items() if not upload.done()}
            uploading = Counter(location for location, _ in uploads)
            for instances in due.values():
                threads = conf.maintenance_threads - uploading[instances[0].registration.state_location]
                if threads <= 0:
                    continue  # the next maintenance looks at them
                share = -(-len(instances) // threads)
                shares = [instances[first : first + share] for first in range(0, len(instances), share)]
                together = _Together(len(shares))
                for some in shares:
                    upload = self._uploads.submit(self.upload_snapshots, some, together)
                    self._uploading.update({instance.key: upload for instance in some})
                    begun.append(upload)
            for key in [k for k, f in self._uploading.items() if f.done() and k not in self._cache.instances]:
                del self._uploading[key]
        return begun

    def _renew_leases(self) -> None:
        with self._cache.lock:
            leases = list(self._leases)
        for lease in leases:
            try:
                lease.is_held()
            except STATESTORE_ERRORS as error:
                what = "Could not report to the coordinator that the upload of %s is still running: %s"
                log.warning(what, lease.partition, error)

    def _unload_unread(self) -> None:
        """Unload the partitions of ended queries that had no reader since the last maintenance.

        The next reader loads them again. So ended queries take no memory in the long run.
        """
        unread: dict[str, list[Order]] = {}
        for instance in self._cache.all():
            run_id = instance.registration.run_id
            if self._cache.has_ended(run_id) and not instance.state.is_loading:
                if not instance.is_read:
                    unread.setdefault(run_id, []).append(partial(self._cache.lay_aside, instance, waits=False))
                instance.is_read = False
        self._orders.carry_out(unread)

    def write_out_ended(self, run_id: str) -> None:
        """Flush the partitions and copies of a query that has just ended.

        All databases of a process share the write buffers, and RocksDB makes room by flushing the database that writes.
        Without this flush, the next query would write many small files until the ended one is unloaded. A partition
        that is missed here is flushed by the maintenance.
        """
        with self._cache.lock:
            idle = [*self._cache.instances.values(), *self._cache.kept_copies()]
        for instance in idle:
            version = instance.state.version
            if (
                instance.registration.run_id == run_id
                and not instance.state.is_loading
                and instance.written_out != version
            ):
                self._write_out(instance, version)

    def _write_out(self, instance: Instance, version: int) -> None:
        try:
            instance.state.write_out()
            instance.written_out = version
        except StoreClosedError:
            log.debug("%s was unloaded before it gave up its write buffers", instance)
        except Exception:  # as with snapshots
            log.warning("%s did not write its files, and keeps its write buffers", instance, exc_info=True)

    def _unload_damaged(self, instances: Sequence[Instance]) -> None:
        """Unload partitions that an error, such as a full disk, has left at no version: the next use loads them."""
        for instance in instances:
            if not instance.state.is_whole:
                self._cache.evict(instance, if_damaged=True)

    def _unload_others(self) -> None:
        # A partition that is being opened now, the coordinator has just assigned; the next maintenance looks at it.
        instances = self._cache.all()
        run_ids = tuple({i.registration.run_id for i in instances})
        if not run_ids:
            return
        info = self._registration.info
        owned = self._registration.coordinator.verify_instances(info.host_id, info.incarnation, run_ids)
        others: dict[str, list[Order]] = {}
        for instance in instances:
            run_id = instance.registration.run_id
            of_run = owned.get(run_id)
            is_ours = of_run is None or instance.partition in of_run.get(instance.operator, ())
            log.debug("Verified that state store %s is active: %s", instance, is_ours)
            if not is_ours:
                others.setdefault(run_id, []).append(partial(self._cache.unload, instance, waits=False))
        # A commit or an upload under way is waited for, and so perhaps the storage of one query.
        self._orders.carry_out(others)

    def upload_snapshots(self, instances: Sequence[Instance], together: _Together | None = None) -> None:
        """Upload snapshots of partitions of one run and report them. Descriptors and small files go up together.

        Each partition's large files go up one partition after the other. What then waits for the others, also for those
        of other threads in ``together``, is stored once it has ``TOGETHER_BYTES``, or has waited ``TOGETHER_SECONDS``:
        so memory is bounded, and a large partition does not hold up small ones for long. A failure is logged; the next
        maintenance tries again.
        """
        run_id = instances[0].registration.run_id
        with spans.alone("host.snapshots", run_id=run_id, num_partitions=len(instances)):
            together = together or _Together(1)
            with self._slots.hold(instances[0].registration.state_location) as is_open:
                try:
                    self._upload_snapshots(instances if is_open else (), together)
                finally:
                    self._store(together.end())

    def _upload_snapshots(self, instances: Sequence[Instance], together: _Together) -> None:
        listed: dict[str, dict[str, int]] = {}
        for instance in instances:
            ready: list[_Ready] = []
            with self._logged([instance]), ExitStack() as unless_prepared:
                version = instance.state.version
                lease = FileLease(self._registration, instance.run_key, version, UPLOAD, self._clock)
                lineage = lease.lineage()
                with self._cache.lock:
                    self._leases.add(lease)
                unless_prepared.callback(self._end_leases, [lease])
                if lineage.head != instance.state.head:
                    # Its files were exchanged, and this host has not received that yet; or it has advanced: retry next
                    # time.
                    continue
                earlier = lineage.snapshots[-1] if lineage.snapshots else None
                changelog_bytes = instance.state.changelog_bytes
                prepared = instance.state.snapshots.prepare(earlier, INLINE_FILES_BYTES, listed)
                ready = together.collect_snapshot(_Ready(instance, lease, earlier, prepared, changelog_bytes))
                unless_prepared.pop_all()
            self._store(ready)

    def _end_leases(self, leases: Sequence[FileLease]) -> None:
        """Tell the coordinator that the upload has ended, unless the report of a snapshot has told it."""
        with self._cache.lock:
            left = [lease for lease in leases if lease in self._leases]
            self._leases.difference_update(left)
        for lease in left:
            lease.end()

    def _is_held(self, ready: _Ready) -> bool:
        if ready.lease.is_held():
            return True
        log.warning("The snapshot of %s is given up: the coordinator has given up its upload", ready.instance)
        return False

    def _store(self, ready: Sequence[_Ready]) -> None:
        if not ready:
            return
        snapshots: list[StoredSnapshot] = []
        leases = [r.lease for r in ready]
        try:
            with self._logged([r.instance for r in ready]):
                ready = [r for r in ready if self._is_held(r)]
                if ready:
                    snapshots = store_snapshots([(r.instance.state.snapshots, r.prepared) for r in ready])
            for one, stored in zip(ready, snapshots, strict=False):
                with self._logged([one.instance]):
                    self._report(one, stored)
        finally:
            self._end_leases(leases)

    def _report(self, ready: _Ready, stored: StoredSnapshot) -> None:
        instance = ready.instance
        registration, coordinator = self._registration, self._registration.coordinator
        message = SnapshotUploaded(
            *instance.run_key,
            registration.info.host_id,
            registration.info.incarnation,
            stored.ref,
            ready.earlier,
            stored.descriptor.without_content,
        )
        if registration.call(message.run_id, lambda: coordinator.snapshot_uploaded(message)):
            instance.snapshot_version, instance.snapshot_bytes = stored.ref.version, ready.changelog_bytes
            instance.rescaled_at = None
        with self._cache.lock:
            self._leases.discard(ready.lease)
        self._counters.count("snapshots")

    @contextmanager
    def _logged(self, instances: Sequence[Instance]) -> Iterator[None]:
        """Log an error of the block: no error may be lost in a thread, and the next maintenance tries again."""
        names = ", ".join(map(str, instances))
        try:
            yield
        except (StoreClosedError, BatchHeldError) as error:
            log.debug("No snapshot of %s was taken: %s", names, error)
        except Exception:
            log.warning("Error managing %s; no snapshot was taken", names, exc_info=True)
            self._unload_damaged(instances)

    def close(self) -> None:
        self._slots.close()
        for pool in (self._uploads, self._flushes):
            pool.shutdown(cancel_futures=True)
