"""Loading copies of partitions from storage: for savepoints, and for readers of older versions."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from backends.exceptions import MissingFileError
from backends.formats.file_names import partition_directory
from backends.partition.load_watch import LoadProgress, LoadWatch
from backends.partition.partition_state import PartitionState
from coordinator_actor.messages import OperatorSpec, QueryRegistration
from spark_bridge.host.coordination.registration import HostRegistration
from spark_bridge.host.loading.file_lease import FileLease
from spark_bridge.host.loading.partition_files import PartitionFiles

PartitionCopyKey = tuple[str, str, int, int]
"""Run id, operator, partition, version."""


class CopyLoading:
    """Loads copies, each with progress and a lease on its files. Thread-safe; the lock guards the loads under way.

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
                lease.lineage()  # raises if the version was given up meanwhile
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
        """Return how far the load of a copy has come that is under way; nothing if none is."""
        with self._lock:
            watches = [watch for of, watch in self._watches.values() if of == key]
        return watches[0].progress() if watches else LoadProgress()

    def due_leases(self) -> list[tuple[str, Callable[[], None]]]:
        """Return, for each load under way whose lease is due, the run id and the function that renews the lease.

        A renewal may take long.

        The files of a load that nobody waits for any more are let go, though storage may keep its thread for ever.
        """
        with self._lock:
            loads = [(*held, self._watches[use][1]) for use, held in self._leases.items()]
        return [(run_id, lease.renew) for run_id, lease, watch in loads if lease.is_due and watch.is_wanted]

    def loads_under_way(self) -> list[str]:
        """Return which copies are being loaded and how far that has come, for people."""
        with self._lock:
            watches = [watch for _, watch in self._watches.values()]
        return [f"{watch.what}: {watch.progress()}" for watch in watches]
