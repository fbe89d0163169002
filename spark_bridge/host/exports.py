"""A host's part in savepoints: exporting its partitions while the stream runs."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa

from backends import spans
from backends.encoding.key_groups import partition_range
from backends.encoding.schema import StateSchema
from backends.exceptions import LoadEndedError, StoreClosedError, VersionNotFoundError
from backends.partition.partition_state import PartitionState
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.messages import ExportedFile, HostInfo, SavepointExported, SavepointOrder
from coordinator_actor.savepoints.export import export_partition
from coordinator_actor.savepoints.savepoint_coordinator import savepoint_families
from spark_bridge.host.instances import spec_of
from spark_bridge.host.partition_cache import PartitionCache
from spark_bridge.host.partition_loader import PartitionLoader, StoredPartition

log = logging.getLogger(__name__)

Scans = dict[str, Iterator[pa.RecordBatch]]
"""Batches of ``key`` and ``value`` by state variable."""
Key = tuple[str, int, str, int]
"""Run id, checkpoint id, operator, partition."""

SHARE_OF_A_CORE = 0.15
"""The part of the time that an export has a core where others want it; it waits or sleeps for the rest."""
WAITED_LITTLE = 0.1
"""An export that has waited for less than this part of the time has slowed nothing down."""


def pause(took: float, computed: float) -> float:
    """Return the seconds to sleep after a step that took ``took`` seconds, ``computed`` of them on a processor.

    The export waited for the rest of the step: for a core, for Python's lock, for the disk. The stream was working
    then, so the wait counts as sleep.
    """
    if took - computed <= WAITED_LITTLE * took:
        return 0.0
    return max(0.0, computed / SHARE_OF_A_CORE - took)


@dataclass(eq=False, repr=False)
class SavepointExports:
    """The exports of one host: those in progress and those that are done.

    The host exports one partition after the other, and leaves the processors to the stream: during an export, the
    stream's batches should take at most 1.2 times as long. An export runs without pauses while nothing else needs its
    core or this process's Python lock. Where it has had to wait for one of them, it sleeps (see ``pause``). A query
    that stops with the savepoint is held until then and has no batches to slow down, so its export does not sleep.

    All partitions of an order are pinned at the savepoint's version when the order comes. The stream soon leaves that
    version behind, and reading a partition back from storage costs much more than exporting it.

    ``pin(order, operator, partition)`` opens a partition at the order's version as the host holds it, and returns None
    if the host does not hold it. ``read_back`` opens a copy of a partition that the host does not hold, for a block; a
    function tells it whether the export is given up. ``_lock`` guards the table of exports; one thread exports.
    """

    _info: HostInfo
    _pin: Callable[[SavepointOrder, str, int], Scans | None]
    _read_back: Callable[[SavepointOrder, str, int, Callable[[], bool]], AbstractContextManager[Scans]]
    _report_export: Callable[[SavepointExported], None]
    _open_storage: Callable[[SavepointOrder], CheckpointStorage]
    _scratch: Path
    _sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)  # of an incarnation of this host that was killed
        self._states: dict[Key, SavepointExported | None] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="statestore-savepoint")
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def begin_exports(self, order: SavepointOrder) -> None:
        """Begin the new exports of an order, and report again those that are done: the answer may have been lost."""
        for operator, partitions in order.partitions.items():
            for partition in partitions:
                key = (order.run_id, order.checkpoint_id, operator, partition)
                with self._lock:
                    is_new = key not in self._states
                    done = self._states.setdefault(key, None)
                if is_new:
                    pinned = self._pinned_now(order, operator, partition)
                    self._pool.submit(self._export, order, operator, partition, pinned)
                elif done is not None:
                    self._pool.submit(self._report, done)

    def _pinned_now(self, order: SavepointOrder, operator: str, partition: int) -> Scans | None:
        try:
            return self._pin(order, operator, partition)
        except Exception:  # the export retries, and reports the error
            log.warning("Partition %d of %s is not held for its export", partition, operator, exc_info=True)
            return None

    def _export(self, order: SavepointOrder, operator: str, partition: int, pinned: Scans | None) -> None:
        key = (order.run_id, order.checkpoint_id, operator, partition)
        if self._is_given_up(key):
            return
        started = time.monotonic()
        message = SavepointExported(
            order.run_id, order.checkpoint_id, operator, partition, self._info.host_id, self._info.incarnation
        )
        try:
            trace = spans.savepoint(order.run_id, order.checkpoint_id)
            with spans.span("host.export", trace, operator=operator, partition=partition, version=order.version):
                files = self._files(order, operator, partition, pinned)
        except (StoreClosedError, LoadEndedError):
            # The partition was unloaded, and the new owner gets the order to export it; or the savepoint was given up.
            log.info("Partition %d of %s was not exported", partition, operator)
            with self._lock:
                self._states.pop(key, None)
            return
        except Exception as error:  # any error makes the savepoint fail
            log.warning("Partition %d of %s was not exported", partition, operator, exc_info=True)
            message = msgspec.structs.replace(message, failure=f"{type(error).__name__}: {error}")
        else:
            message = msgspec.structs.replace(message, files=files, duration=time.monotonic() - started)
        with self._lock:
            if key not in self._states:
                return
            self._states[key] = message
        self._report(message)

    def _report(self, message: SavepointExported) -> None:
        try:
            self._report_export(message)
        except Exception:  # the coordinator repeats the order, which retries
            log.warning("The export of %s/%d was not reported", message.operator, message.partition, exc_info=True)

    def _files(
        self, order: SavepointOrder, operator: str, partition: int, pinned: Scans | None
    ) -> dict[str, ExportedFile]:
        registration, key = order.registration, (order.run_id, order.checkpoint_id, operator, partition)
        spec = spec_of(registration, operator)
        first, end = partition_range(partition, spec.num_partitions, registration.key_groups)
        storage = self._open_storage(order)
        scans = pinned if pinned is not None else self._pin(order, operator, partition)
        with ExitStack() as until_exported:
            if scans is None:
                copy = self._read_back(order, operator, partition, lambda: self._is_given_up(key))
                scans = until_exported.enter_context(copy)
            return {
                variable: export_partition(
                    storage,
                    operator,
                    variable,
                    StateSchema.from_json(schema),
                    first,
                    end - 1,
                    scans[variable],
                    scratch=self._scratch / uuid.uuid4().hex,
                    throttle=None if order.is_held else self._make_way,
                    is_cancelled=lambda: self._is_given_up(key),
                )
                for variable, schema in savepoint_families(spec.schema).items()
            }

    def _make_way(self, took: float, computed: float) -> None:
        seconds = pause(took, computed)
        if seconds:
            self._sleep(seconds)

    def give_up_others(self, pending: Mapping[str, Collection[int]], unknown_runs: Collection[str] = ()) -> None:
        """Give up all exports but those of ``pending``, by run id the checkpoint ids of unfinished savepoints.

        It keeps the exports of ``unknown_runs``, which the coordinator does not know yet.
        """
        with self._lock:
            self._states = {
                k: m for k, m in self._states.items() if k[0] in unknown_runs or k[1] in pending.get(k[0], ())
            }

    def _is_given_up(self, key: Key) -> bool:
        return self._closed.is_set() or key not in self._states

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self._scratch, ignore_errors=True)


# The rows of a partition at the version of a savepoint: as the host holds the partition, or read back from storage.


def pin_scans(cache: PartitionCache, order: SavepointOrder, operator: str, partition: int) -> Scans | None:
    """Return a partition at the savepoint's version, as it is loaded here; None if it is not, or no longer.

    Does not wait for a load of another version, as a read would: the host's heartbeat calls this.
    """
    instance = cache.instance(order.run_id, operator, partition)
    # The changes that are accepted for a version not completed here yet need not be those that the manifest names.
    if instance is None or instance.state.is_loading or instance.state.version < order.version:
        return None
    spec = spec_of(order.registration, operator)
    try:
        return _scans(instance.state, savepoint_families(spec.schema), order.version)
    except (VersionNotFoundError, StoreClosedError):
        log.debug("Version %d of %s is not held", order.version, instance)
        return None


@contextmanager
def scans_read_back(
    loader: PartitionLoader, order: SavepointOrder, operator: str, partition: int, is_given_up: Callable[[], bool]
) -> Iterator[Scans]:
    """Yield a copy of a partition from storage at the savepoint's version.

    Raises ``LoadEndedError`` once ``is_given_up`` returns true.
    """
    spec = spec_of(order.registration, operator)
    stored = StoredPartition(order.registration, spec, partition, order.version)
    with loader.pinned_for_export(stored, is_given_up) as copy:
        yield _scans(copy, savepoint_families(spec.schema))


def _scans(state: PartitionState, variables: Iterable[str], version: int | None = None) -> Scans:
    """Return the pairs of all state variables; a variable that was never written to is empty."""
    families = state.reads.column_families(version)
    return {v: state.reads.scan(version, column_family=v) if v in families else iter(()) for v in variables}
