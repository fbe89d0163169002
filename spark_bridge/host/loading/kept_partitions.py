"""Partitions that a host does not hold, but whose local files it keeps for a while.

They were loaded in part, loaded ahead of the first task, or laid aside when their run was over. The next load of the
partition goes on with them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spark_bridge.host.held.held_partitions import HeldPartitions
from spark_bridge.host.held.instance import Instance, InstanceKey
from spark_bridge.host.loading.loads_under_way import LoadsUnderWay
from spark_bridge.host.loading.partition_files import PartitionFiles

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

    The lock of ``HeldPartitions`` guards the tables. Whoever takes a partition out, or puts one in, holds its loading
    lock.
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
        """Begin the time for which a partition is kept anew."""
        instance.kept_since = self._clock()

    def runs_in_use(self) -> set[str]:
        """Return the runs whose local directories have files that are held, kept, being loaded or laid aside."""
        with self._held.lock:
            there = (*self._held.instances.values(), *self._kept.values())
            return {i.registration.run_id for i in there}.union(*(runs for _, runs in self._at_work.values()))

    def may_be_of_state(self, location: str | None, *, but_for: str) -> bool:
        """Return whether files of a state are kept or at work, or held ``but_for`` those that a run holds."""
        with self._held.lock:
            of_others = (k for k, i in self._held.instances.items() if i.registration.run_id != but_for)
            at_work = (state for state, _ in self._at_work.values())
            return location in (*at_work, *(state for state, _, _ in (*self._kept, *of_others)))

    @contextmanager
    def noted_at_work(self, run_id: str, key: InstanceKey) -> Iterator[None]:
        """Keep the run's local directory from being removed: what is loaded or laid aside now is not held.

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
                self.remove_unused(of_run)

    def remove_unused(self, run_id: str) -> None:
        """Remove the directory of a run that is over, once nothing of the run is held, kept or at work there."""
        if self._held.registration(run_id) is None and run_id not in self.runs_in_use():
            self._files.remove_run(run_id)

    def drop_old(self) -> None:
        """Remove the files with which nobody has gone on for ``LOADED_FILES_SECONDS``."""
        now = self._clock()
        self.drop(lambda kept: now - kept.kept_since > LOADED_FILES_SECONDS)

    def drop_unfinished(self, run_id: str) -> None:
        """Remove what was loaded in part or ahead for a run. What was laid aside stays: its files are whole."""
        self.drop(lambda kept: kept.registration.run_id == run_id and not kept.state.is_closed)

    def drop(self, is_meant: Callable[[Instance], bool]) -> int:
        """Remove the files of the partitions meant with which nobody goes on now; return the number of partitions."""
        with self._held.lock:
            gone = [i for i in self._kept.values() if is_meant(i)]
        dropped = 0
        for instance in gone:
            lock = self._loads.lock_of(instance.key)
            if not lock.acquire(blocking=False):
                continue  # somebody goes on with it
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
