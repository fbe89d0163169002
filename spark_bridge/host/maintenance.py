"""The maintenance of a host: unload partitions that are another host's by now, upload snapshots that are due, and have
idle partitions give up write buffers.

RocksDB's write buffers are shared. While they are full, whoever writes writes files, and not who holds most. So without
this, a busy query beside idle ones that hold the buffers would write small files in each batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from backends.conf import StateStoreConf
from backends.exceptions import StoreClosedError
from backends.host_memory import WRITE_BUFFERS, HostMemory
from coordinator_actor.messages import SnapshotUploaded
from coordinator_actor.query.files_in_use import UPLOAD
from spark_bridge.host.counters import Counters
from spark_bridge.host.held_partitions import HeldPartitions
from spark_bridge.host.instance import Instance, InstanceKey
from spark_bridge.host.partition_loading import PartitionLoading
from spark_bridge.host.registration import HostRegistration
from spark_bridge.host.version_requests import VersionRequests

log = logging.getLogger(__name__)


class Maintenance:
    """The maintenance of one host. The lock of ``HeldPartitions`` guards the table of uploads."""

    def __init__(
        self,
        registration: HostRegistration,
        held: HeldPartitions,
        loading: PartitionLoading,
        version_requests: VersionRequests,
        counters: Counters,
        memory: HostMemory,
        conf: StateStoreConf,
    ) -> None:
        self._registration = registration
        self._held = held
        self._loading = loading
        self._version_requests = version_requests
        self._counters = counters
        self._memory = memory
        self._write_buffer_bytes = conf.write_buffer_bytes
        self._deltas_per_snapshot = conf.deltas_per_snapshot
        self._hooks: list[Callable[[], None]] = []
        self._uploads = ThreadPoolExecutor(conf.maintenance_threads, thread_name_prefix="statestore-maintenance")
        self._uploading: dict[InstanceKey, Future[None]] = {}

    def on_maintenance(self, work: Callable[[], None]) -> None:
        """Have something quick done with every maintenance."""
        self._hooks.append(work)

    def do_maintenance(self) -> list[Future[None]]:
        """Unload partitions that are another's by now, and begin the work that is due; return what was begun.

        That are uploads of snapshots, and, while the write buffers are more than half full, the writing of files by
        partitions to which nothing was committed since the last maintenance.
        """
        log.debug("Doing maintenance")
        for work in self._hooks:
            work()
        self._version_requests.forget_idle_runs()
        self._loading.drop_kept()
        self._unload_others()
        begun = []
        is_crowded = 2 * self._memory.held().get(WRITE_BUFFERS, 0) > self._write_buffer_bytes
        with self._held.lock:
            for key, instance in self._held.instances.items():
                running = self._uploading.get(key)
                version = instance.state.version
                # A partition made of an earlier layout's files is expensive to load until it has a snapshot of its own.
                if instance.rescaled_at is not None:
                    is_due = version > instance.rescaled_at
                else:
                    is_due = version - instance.snapshot_version >= self._deltas_per_snapshot
                is_idle, instance.seen_version = version == instance.seen_version, version
                # A snapshot would wait for a load in a thread that other partitions need.
                if is_due and not instance.state.is_loading and (running is None or running.done()):
                    self._uploading[key] = self._uploads.submit(self.upload_snapshot, instance)
                    begun.append(self._uploading[key])
                elif is_crowded and is_idle and instance.written_out != version and not instance.state.is_loading:
                    begun.append(self._uploads.submit(self._write_out, instance, version))
            for key in [k for k, f in self._uploading.items() if f.done() and k not in self._held.instances]:
                del self._uploading[key]
        return begun

    def _write_out(self, instance: Instance, version: int) -> None:
        try:
            instance.state.write_out()
            instance.written_out = version
        except StoreClosedError:
            log.debug("%s was unloaded before it gave up its write buffers", instance)
        except Exception:  # as with snapshots
            log.warning("%s did not write its files, and keeps its write buffers", instance, exc_info=True)

    def _unload_others(self) -> None:
        # A partition that is being opened now, the coordinator has just assigned; the next maintenance looks at it.
        held = self._held.all()
        run_ids = tuple({i.registration.run_id for i in held})
        if not run_ids:
            return
        info = self._registration.info
        owned = self._registration.coordinator.verify_instances(info.host_id, info.incarnation, run_ids)
        for instance in held:
            of_run = owned.get(instance.registration.run_id)
            is_ours = of_run is None or instance.partition in of_run.get(instance.operator, ())
            log.debug("Verified that state store %s is active: %s", instance, is_ours)
            if not is_ours:
                self._loading.unload(instance, waits=False)

    def upload_snapshot(self, instance: Instance) -> None:
        """Upload a snapshot of a partition's version and report it.

        A failure is logged; the next maintenance tries again.
        """
        registration, coordinator = self._registration, self._registration.coordinator
        run_id, operator, partition = instance.run_key
        try:
            lineage = coordinator.lineage(run_id, operator, partition, instance.state.version, UPLOAD)
            earlier = lineage.snapshots[-1] if lineage.snapshots else None
            made = instance.state.snapshot(earlier)
            message = SnapshotUploaded(
                run_id, operator, partition, registration.info.host_id, registration.info.incarnation, made, earlier
            )
            if registration.call(lambda: coordinator.snapshot_uploaded(message)):
                instance.snapshot_version = made.version
                instance.rescaled_at = None
            self._counters.add("snapshots")
        except StoreClosedError:
            log.debug("%s was unloaded while a snapshot of it was taken", instance)
        except Exception:  # no error may be lost in a thread, and the next round tries again
            log.warning("Error managing %s; no snapshot was taken", instance, exc_info=True)

    def close(self) -> None:
        """Begin no more uploads."""
        self._uploads.shutdown(cancel_futures=True)
