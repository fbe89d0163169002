"""The loads of a host that are under way: the lock of each partition, how far a load has come, and its lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from backends.partition.load_watch import LoadProgress, LoadWatch
from coordinator_actor.messages import OpenGrant
from spark_bridge.host.coordination.registration import HostRegistration
from spark_bridge.host.held.held_partitions import HeldPartitions
from spark_bridge.host.held.instance import InstanceKey
from spark_bridge.host.loading.file_lease import FileLease


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
        """Let the load of a partition be seen, and be ended. Its loading lock is held."""
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
        """Return how far the load of a partition has come that is under way; nothing if none is."""
        watched = self._watches.get(key)
        return LoadProgress() if watched is None else watched[1].progress()

    def listed(self) -> list[str]:
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

    def end_older(self, key: InstanceKey, grant: OpenGrant) -> None:
        """Have a load for an older run end: the run of the grant needs the partition."""
        watched = self._watches.get(key)
        run_id = grant.registration.run_id
        if watched is not None and watched[0].registration.run_id != run_id and watched[0].epoch < grant.epoch:
            watched[1].end(f"run {run_id} has replaced run {watched[0].registration.run_id}", is_over=True)

    def end_run(self, run_id: str) -> None:
        """Have the loads of a run that is over end. The lock of ``HeldPartitions`` is held."""
        for grant, watch in self._watches.values():
            if grant.registration.run_id == run_id:
                watch.end("its run is over", is_over=True)
