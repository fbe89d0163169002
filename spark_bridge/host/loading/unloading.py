"""Unloading partitions: those that are another host's by now, that nobody reads, or whose run is over."""

from __future__ import annotations

from spark_bridge.host.coordination.completed_versions import CompletedVersions
from spark_bridge.host.coordination.grants import Grants
from spark_bridge.host.coordination.version_requests import VersionRequests
from spark_bridge.host.held.held_partitions import HeldPartitions
from spark_bridge.host.held.instance import Instance
from spark_bridge.host.loading.kept_partitions import KeptPartitions, close, destroy
from spark_bridge.host.loading.loads_under_way import LoadsUnderWay


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
        # The registration goes first: whoever waits for a version wakes when that is forgotten, and must not find it.
        self._held.forget_run(run_id)
        for table in self._of_runs:
            table.forget(run_id)

    def close(self) -> None:
        """Unload everything, and remove the local files."""
        for instance in self._held.all():
            self.unload(instance)
        for run_id in {*self._held.registrations}:
            self.unload_run(run_id)
        self._kept.drop(lambda kept: True)  # what was opened meanwhile is laid aside by now, too
