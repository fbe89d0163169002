"""Opens partitions on a host's local disk, over the durable files of their query."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Collection
from dataclasses import replace as with_changes
from functools import partial
from pathlib import Path

from backends.conf import StateStoreConf
from backends.engines.engine import writing_to
from backends.exceptions import ConcurrentCommitError
from backends.formats.manifest import partition_directory
from backends.host_memory import LAST_READS, BoundedDict, host_memory
from backends.partition.partition_state import PartitionState, open_partition
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from backends.storage.object_files import SharedObjects
from backends.storage.requests import RequestCounts
from coordinator_actor.messages import OperatorSpec, QueryRegistration

log = logging.getLogger(__name__)

MAX_STORAGES = 64
"""At most this many storages are remembered: one for each running query, and those of runs before."""


class PartitionFiles:
    """The local directory of one host, below which an incarnation that was killed may have left its state.

    ``<query id>/<run id>/<partition>`` are the host's own partitions, ``copies`` and ``savepoints`` copies for a while.
    ``requests`` counts the requests to the storage that this class opens, unless ``open_storage`` is given.
    """

    def __init__(
        self, local_dir: Path, incarnation: str, conf: StateStoreConf, open_storage: OpenStorage | None
    ) -> None:
        self._local_dir = local_dir
        self._incarnation = incarnation
        self._conf = conf
        self.requests = requests = RequestCounts()
        self.open_storage: OpenStorage = open_storage or (
            lambda location, options: CheckpointStorage.open(location, options, fsync=conf.fsync, requests=requests)
        )
        self._lock = threading.Lock()
        self._storages: BoundedDict[tuple[str, tuple[tuple[str, str], ...]], CheckpointStorage] = BoundedDict(
            MAX_STORAGES
        )
        self.shared = SharedObjects(partial(host_memory(conf).spare, LAST_READS))
        self.copies = local_dir / "copies"
        self.savepoints = local_dir / "savepoints"
        shutil.rmtree(self.copies, ignore_errors=True)  # of an incarnation of this host that was killed

    def open_own(
        self,
        registration: QueryRegistration,
        spec: OperatorSpec,
        partition: int,
        runs_in_use: Callable[[], Collection[str]],
    ) -> PartitionState:
        """Open a partition where an earlier incarnation may have left it: valid files are used.

        Removes the files of other runs of the query that are not in use.
        """
        runs = self._local_dir / registration.query_id
        # Listed first: a run that begins during this call is recorded before it has a directory.
        listed = list(runs.iterdir()) if runs.exists() else []
        used = {*runs_in_use(), registration.run_id} if listed else set()
        for left in listed:
            if left.name not in used:
                shutil.rmtree(left, ignore_errors=True)  # of an incarnation that was killed
        directory = partition_directory(spec.name, spec.num_partitions, partition)
        local = self._local(registration, spec, partition)
        storage = self._storage_of(registration)
        conf = with_changes(self._conf, provider=spec.backend)
        with writing_to(local):
            try:
                return open_partition(local, storage, directory, conf)
            except ConcurrentCommitError:
                # That incarnation is not quite dead.
                return open_partition(local.with_name(f"{local.name}-{self._incarnation}"), storage, directory, conf)

    def hand_on(
        self, left: PartitionState, registration: QueryRegistration, spec: OperatorSpec, partition: int
    ) -> bool:
        """Move the local files of a closed partition to where ``open_own`` looks for them; return whether they exist.

        They belong to an older run of the query, or to this one. A head names the commit that made a version, even if
        another run continues from it: ``PartitionState.load`` checks whether the files belong to the run's lineage.
        """
        local = self._local(registration, spec, partition)
        if left.local_dir == local:
            return True
        shutil.rmtree(local, ignore_errors=True)
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            left.local_dir.rename(local)
        except OSError as error:  # the disk is full, say, or the directory of the run that is over was removed
            log.warning("%s could not be moved to %s, so the partition is loaded: %s", left.local_dir, local, error)
            return False
        return True

    def _local(self, registration: QueryRegistration, spec: OperatorSpec, partition: int) -> Path:
        directory = partition_directory(spec.name, spec.num_partitions, partition)
        return self._local_dir / registration.query_id / registration.run_id / directory

    def open_copy(self, registration: QueryRegistration, directory: str, backend: str, local: Path) -> PartitionState:
        """Open an empty state in ``local``, into which versions of the partition in ``directory`` can be loaded.

        The copy keeps one version and does not count its keys: to count, replaying would look up every key that it
        writes.
        """
        storage = self._storage_of(registration)
        conf = with_changes(self._conf, provider=backend, track_total_number_of_rows=False, max_versions_in_memory=0)
        return open_partition(local, storage, directory, conf)

    def _storage_of(self, registration: QueryRegistration) -> CheckpointStorage:
        """Return the storage of a query's state, one for all partitions: each storage opens its own connections."""
        key = (registration.state_location, tuple(sorted(registration.storage_options.items())))
        with self._lock:  # opening does no I/O
            storage = self._storages.get(key)
            if storage is None:
                storage = self._storages[key] = self.open_storage(
                    registration.state_location, registration.storage_options
                )
                if not storage.is_local:
                    storage.shared = self.shared
        return storage

    def remove_run(self, run_id: str) -> None:
        """Remove the files that an incarnation which was killed has left of a run."""
        for left in self._local_dir.glob(f"*/{run_id}"):
            shutil.rmtree(left, ignore_errors=True)
