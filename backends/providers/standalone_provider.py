"""A provider that is used alone, without a coordinator: it keeps its own manifests, and a commit completes at once.

It works over any engine. Under a coordinator, hosts use ``PartitionState`` directly, which is below the provider.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

import pyarrow as pa

from backends import exceptions, fault_points
from backends.conf import StateStoreConf, StateStoreId
from backends.engines.engine import StateEngine
from backends.engines.sorted_map_engine import SortedMapEngine
from backends.formats import snapshot
from backends.formats.changelog import ChangelogMeta, Changes
from backends.formats.manifest import Lineage, SnapshotDescriptor, SnapshotRef
from backends.formats.manifest_chain import Retention
from backends.partition.partition_state import PartitionState
from backends.providers import overlay
from backends.providers.overlay import OverlayStateStore
from backends.providers.standalone_manifests import StandaloneManifests
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.store import StateStore, StateStoreMetrics, StateStoreProvider

T = TypeVar("T")
log = logging.getLogger(__name__)


class LocalStateStoreProvider(StateStoreProvider):
    """Versions of one store, durable below ``<checkpoint location>/statestore/standalone/``.

    A subclass names its ``backend`` and its ``engine``. The engine works in ``local_dir``, which ``close`` keeps, and
    which is reused if its content belongs to the lineage. Without ``local_dir``, a temporary directory is created, and
    removed by ``close``. ``storage`` replaces the one at ``<checkpoint location>/statestore``.

    Locks: ``maintaining`` is held for a whole round of maintenance, and taken first. ``_lock`` guards everything else
    here, and is held while a version is opened or committed.
    """

    backend: ClassVar[str]
    engine: ClassVar[type[StateEngine]]
    opens_slowly: ClassVar[bool] = False
    """Whether a host opens the engine for writing only once it has something to write; see ``BackendEngine``."""

    def __init__(
        self,
        store_id: StateStoreId,
        conf: StateStoreConf | None = None,
        local_dir: str | Path | None = None,
        *,
        storage: CheckpointStorage | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._id = store_id
        self._conf = conf or StateStoreConf()
        root = f"{store_id.checkpoint_location.rstrip('/')}/statestore"
        self._storage = storage or CheckpointStorage.open(root, self._conf.storage_options, fsync=self._conf.fsync)
        self._manifests = StandaloneManifests(self._storage, store_id, clock)
        self._manifests.refresh()
        self._closed = False
        self._manifest_ms = 0.0
        self._local_dir = Path(local_dir) if local_dir else Path(tempfile.mkdtemp(prefix="statestore-"))
        self._remove_local = weakref.finalize(self, shutil.rmtree, self._local_dir, ignore_errors=True)
        if local_dir:
            self._remove_local.detach()
        try:
            self.main = self._partition("current")
            for left in self._local_dir.glob("at-*"):  # copies of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        except BaseException:
            self._remove_local()
            raise
        self._copies: dict[str | None, _Copy] = {}
        self._readers: weakref.WeakSet[_VersionReader] = weakref.WeakSet()
        self._descriptors: dict[str, SnapshotDescriptor] = {}
        self._lock = threading.RLock()
        self.maintaining = threading.Lock()

    def _partition(self, name: str) -> PartitionState:
        return PartitionState(
            self._local_dir / name, self._storage, self._manifests.directory, self._conf, self.backend, self.engine
        )

    def __str__(self) -> str:
        return f"{type(self).__name__}[{self._id}]"

    @property
    def id(self) -> StateStoreId:
        """The id of this store."""
        return self._id

    def latest_version(self) -> int:
        """Return the newest version, 0 if nothing was ever committed."""
        self._check_open()
        self._manifests.refresh()
        return self._manifests.latest_version()

    def get_store(self, version: int) -> StateStore:
        """Open a version to change it. Raises ``VersionNotFoundError``."""
        with self._lock:
            self._check_open()
            self._manifests.refresh()
            lineage = self._manifests.lineage(version)
            newest = self._manifests.head_at(self._manifests.latest_version())
            self.main.load(lineage)
            reader = self._reader(lineage, stays=False)
        log.info("Retrieved version %d of %s for update", version, self)
        attempt = uuid.uuid4().hex
        return OverlayStateStore(reader, lambda changes: self._commit(lineage, newest, attempt, changes))

    def get_read_store(self, version: int) -> OverlayStateStore:
        """Open a version to read, while others write. Raises ``VersionNotFoundError``."""
        with self._lock:
            self._check_open()
            self._manifests.refresh()
            lineage = self._manifests.lineage(version)
            heads = {ref.file.path for ref in lineage.changelogs}
            if self.main.head is None or self.main.head in heads:
                self.main.load(lineage)
            reader = self._reader(lineage, stays=True)
        log.info("Retrieved version %d of %s for readonly", version, self)
        return OverlayStateStore(reader, None)

    def _commit(
        self, lineage: Lineage, newest: str | None, attempt: str, changes: Changes
    ) -> tuple[int, StateStoreMetrics]:
        version = lineage.version + 1
        with self._lock:
            self._check_open()
            self._manifests.check_head(version, newest)
            self.main.load(lineage)
            meta = ChangelogMeta(
                query_run_id="",
                operator=self._id.operator_id,
                partition=self._id.partition_id,
                num_partitions=0,
                version=version,
                attempt=attempt,
                base=lineage.head,
                store=self._id.store_name,
            )
            file = self.main.attempts.store_alone(meta, changes)
            started = time.perf_counter()
            try:
                self._manifests.append(version, newest, attempt, file)
                self._manifest_ms = (time.perf_counter() - started) * 1e3
            except exceptions.ConcurrentCommitError:
                self.main.attempts.discard(version, attempt)
                # No manifest names it, and none ever will.
                self._storage.delete(file.path)
                raise
            except BaseException:
                self.main.attempts.discard(version, attempt)
                raise
            self.main.attempts.accept(version, attempt)
            self.main.complete(version, file.path)
            figures = self.metrics()
        log.info("Committed version %d for %s to file %s", version, self, self._storage.full_location(file.path))
        return version, figures

    def change_feed(self, from_version: int, to_version: int) -> Iterator[pa.RecordBatch]:
        """Return the changes from one version to a later one; see ``StateStoreProvider.change_feed``."""
        with self._lock:
            self._check_open()
            self._manifests.refresh()
            base, lineage = self._manifests.lineage(from_version), self._manifests.lineage(to_version)
            if from_version > to_version:
                raise exceptions.InvalidStateStoreArgument(
                    f"from_version={from_version} is above to_version={to_version}."
                )
            oldest = self._manifests.oldest_version()
            if from_version < min(oldest, to_version):
                raise exceptions.VersionNotFoundError(
                    f"What changed in {self._id} since version {from_version} is no longer kept: the oldest version is "
                    f"{oldest}."
                )
            reader = self._reader(base, stays=True)
            reader.keeps = from_version  # and the changelogs after it
        return overlay.read(self._storage, reader, lineage)

    def _reader(self, lineage: Lineage, *, stays: bool) -> _VersionReader:
        pins = ExitStack()
        if stays:
            pins.enter_context(self.main.attempts.pinned())
        reader = _VersionReader(self, lineage, pins)
        self._readers.add(reader)
        return reader

    # -- maintenance ---------------------------------------------------------------------------

    def do_maintenance(self) -> None:
        """Take a snapshot if one is due, and remove files that are no longer kept. Commits and reads continue."""
        with self.maintaining:
            with self._lock:
                self._check_open()
                self._manifests.refresh()
                snapshots = self._manifests.snapshots()
                newest = snapshots[-1] if snapshots else None
                done = newest.version if newest else 0
                head = self.main.head
                is_current = head is not None and head == self._manifests.head_at(self.main.version)
                due = is_current and self.main.version - done >= self._conf.deltas_per_snapshot
            new_snapshot = self.main.snapshots.store(newest) if due else None
            with self._lock:
                self._check_open()
                sizes = dict(self._storage.list(self._manifests.directory))
                kept = self._manifests.record_maintenance(
                    new_snapshot, newest, self._oldest_to_keep, lambda s: self._is_sound(s, sizes)
                )
                self._descriptors = {
                    s.file.path: self._descriptors[s.file.path]
                    for s in self._manifests.snapshots()
                    if s.file.path in self._descriptors
                }
                garbage = self._garbage(kept)
            for path in garbage:
                fault_points.reached("maintenance:delete")
                self._storage.delete(path)
            if garbage:
                log.info("Deleted files older than %d for %s: %s", kept.oldest, self, ", ".join(garbage))

    def _garbage(self, kept: Retention) -> list[str]:
        try:
            garbage = self._manifests.garbage(kept, self._files_of)
            # Versions that were rolled back are on no chain, but may still be open.
            rolled_back = [r.lineage for r in self._readers if self._manifests.head_at(r.version) != r.lineage.head]
            in_use = {ref.file.path for past in rolled_back for ref in past.changelogs}
            for ref in (ref for past in rolled_back for ref in past.snapshots):
                in_use |= {ref.file.path, *self._files_of(ref)}
            return [path for path in garbage if path not in in_use]
        except (exceptions.DamagedFileError, exceptions.MissingFileError) as error:
            # The files of a damaged snapshot are unknown: while it is kept, they cannot be distinguished from garbage.
            log.warning("Nothing of %s is removed: %s", self, error)
            return []

    def _oldest_to_keep(self, latest: int) -> int:
        read = [reader.keeps for reader in self._readers if reader.keeps is not None]
        return max(0, min(latest - self._conf.min_versions_to_retain - 1, *read, latest))

    def _files_of(self, ref: SnapshotRef) -> frozenset[str]:
        return self._descriptor(ref).paths

    def _descriptor(self, ref: SnapshotRef) -> SnapshotDescriptor:
        cached = self._descriptors.get(ref.file.path)
        if cached is None:
            cached = self._descriptors[ref.file.path] = snapshot.read_descriptor(self._storage, ref)
        return cached

    def _is_sound(self, ref: SnapshotRef, sizes: Mapping[str, int]) -> bool:
        try:
            return ref.file.is_in(sizes) and self._descriptor(ref).is_complete(sizes)
        except (exceptions.DamagedFileError, exceptions.MissingFileError) as error:
            log.warning("A snapshot of %s is damaged: %s", self, error)
            return False

    # -- for the stores ------------------------------------------------------------------------

    def read(self, lineage: Lineage, call: Callable[[PartitionState], T]) -> T:
        """Call ``call`` with the main copy, if it holds exactly that version. Raises ``VersionNotFoundError``."""
        self._check_open()
        if lineage.head is None and self.main.head is not None:
            raise exceptions.VersionNotFoundError(
                f"The empty version 0 of {self._id} is not held; held is {self.main.version}."
            )
        return call(self.main)

    def copy_at(self, lineage: Lineage) -> PartitionState:
        """Return a copy of the state at a version that the main copy no longer holds. All its readers share it."""
        with self._lock:
            self._check_open()
            copy = self._copies.get(lineage.head)
            if copy is None:
                copy = self._copies[lineage.head] = _Copy(
                    self._partition(f"at-{lineage.version}-{uuid.uuid4().hex[:8]}")
                )
            copy.readers += 1
        try:
            copy.state.load(lineage)
        except BaseException:
            self.release(lineage)
            raise
        return copy.state

    def release(self, lineage: Lineage) -> None:
        """Give a copy back. The last of its readers removes it."""
        with self._lock:
            copy = self._copies.get(lineage.head)
            if copy is None:
                return
            copy.readers -= 1
            if copy.readers:
                return
            del self._copies[lineage.head]
        copy.state.destroy()

    def forget(self, reader: _VersionReader) -> None:
        """Forget a store that has ended: its version need not be kept for it."""
        with self._lock:
            self._readers.discard(reader)

    def metrics(self) -> StateStoreMetrics:
        """Return the figures at the version that was opened or committed last."""
        return self.with_own_figures(self.main.metrics())

    def with_own_figures(self, figures: StateStoreMetrics) -> StateStoreMetrics:
        """Return the figures of a copy, and the provider's own."""
        return replace(figures, custom={**figures.custom, "manifest_ms": self._manifest_ms})

    def close(self) -> None:
        """Release memory and temporary local files. Committed versions stay."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for copy in self._copies.values():
                copy.state.destroy()
            self._copies.clear()
            self.main.close()
            self._remove_local()

    def _check_open(self) -> None:
        if self._closed:
            raise exceptions.StoreClosedError(f"The provider of {self._id} is closed: make a new one.")


class _Copy:
    """A copy of the state at one version, and how many stores read it."""

    def __init__(self, state: PartitionState) -> None:
        self.state = state
        self.readers = 0


class _VersionReader:
    """One version, read from the provider's main copy while that holds the version, and from another copy afterwards.

    ``pins`` is held as long as the reader exists.
    """

    def __init__(self, provider: LocalStateStoreProvider, lineage: Lineage, pins: ExitStack) -> None:
        self._unpin = weakref.finalize(self, pins.close)
        self.id = provider.id
        self.version = lineage.version
        self.keeps = lineage.version or None
        self._provider = provider
        self.lineage = lineage
        self._copy: PartitionState | None = None
        self._release: weakref.finalize[..., _VersionReader] | None = None

    def _read(self, call: Callable[[PartitionState], T]) -> T:
        if self._copy is None:
            try:
                return self._provider.read(self.lineage, call)
            except exceptions.VersionNotFoundError:
                self._copy = self._provider.copy_at(self.lineage)
                # A store that is dropped without abort() must not leave the copy behind.
                self._release = weakref.finalize(self, self._provider.release, self.lineage)
        return call(self._copy)

    def get_many(self, keys: pa.BinaryArray, column_family: str) -> pa.BinaryArray:
        head = self.lineage.head
        return self._read(lambda state: state.reads.get_many(keys, self.version, column_family, head=head))

    def scan(self, start: bytes | None, end: bytes | None, column_family: str) -> Iterator[pa.RecordBatch]:
        head = self.lineage.head
        return self._read(lambda state: state.reads.scan(self.version, start, end, column_family, head=head))

    def column_families(self) -> frozenset[str]:
        head = self.lineage.head
        return self._read(lambda state: state.reads.column_families(self.version, head=head))

    def metrics(self) -> StateStoreMetrics:
        state = self._copy or self._provider.main
        try:
            figures = state.metrics(self.version, head=self.lineage.head)
        except exceptions.VersionNotFoundError:
            # A copy is not worth loading for figures: take those of the version that is held.
            figures = state.metrics()
        return self._provider.with_own_figures(figures)

    def close(self) -> None:
        self._provider.forget(self)
        self._unpin()
        if self._release is not None:
            self._release()
            self._copy = None


class FileStateStoreProvider(LocalStateStoreProvider):
    """Keeps a store in memory: the fastest reads and writes, for state that fits."""

    backend = "file"
    engine = SortedMapEngine
