"""The RocksDB provider, used alone: its own manifests, and a commit completes at once.

Under a coordinator, hosts use the core beneath it, ``PartitionState``, directly.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from backends.changelog import ChangelogMeta, Changes
from backends.conf import StateStoreConf
from backends.exceptions import ConcurrentCommitError, StoreClosedError, VersionNotFoundError
from backends.ids import StateStoreId
from backends.manifest import FileRef
from backends.metrics import StateStoreMetrics
from backends.overlay import OverlayStateStore
from backends.partition_state import PartitionState
from backends.standalone import StandaloneLog
from backends.storage import CheckpointStorage
from backends.store import StateStore, StateStoreProvider

T = TypeVar("T")


class RocksDBStateStoreProvider(StateStoreProvider):
    """Versions of one store, in RocksDB, durable below ``<checkpoint location>/statestore/standalone/``.

    ``local_dir`` is where RocksDB works: kept at ``close`` and used again if it proves right; without
    it, a temporary directory that ``close`` removes. ``storage`` replaces the one at
    ``<checkpoint location>/statestore``.
    """

    def __init__(
        self,
        store_id: StateStoreId,
        conf: StateStoreConf | None = None,
        local_dir: str | Path | None = None,
        *,
        storage: CheckpointStorage | None = None,
    ) -> None:
        self._id = store_id
        self._conf = conf or StateStoreConf()
        root = f"{store_id.checkpoint_location.rstrip('/')}/statestore"
        self._storage = storage or CheckpointStorage.open(root, fsync=self._conf.fsync)
        self._log = StandaloneLog(self._storage, store_id, "rocksdb")
        self._log.refresh()
        self._closed = False
        self._local_dir = Path(local_dir) if local_dir else Path(tempfile.mkdtemp(prefix="statestore-"))
        self._remove_local = weakref.finalize(self, shutil.rmtree, self._local_dir, ignore_errors=True)
        if local_dir:
            self._remove_local.detach()
        try:
            self._main = self._partition("current")
        except BaseException:
            self._remove_local()
            raise
        self._copies: weakref.WeakSet[PartitionState] = weakref.WeakSet()
        self._lock = threading.RLock()

    def _partition(self, name: str) -> PartitionState:
        return PartitionState(self._local_dir / name, self._storage, self._log.directory, self._conf)

    @property
    def id(self) -> StateStoreId:
        """Which store this provider is for."""
        return self._id

    def latest_version(self) -> int:
        """The newest version, 0 if nothing was ever committed."""
        self._check_open()
        self._log.refresh()
        return self._log.latest_version()

    def get_store(self, version: int) -> StateStore:
        """Open a version to change it; raises ``VersionNotFoundError``."""
        with self._lock:
            self._check_open()
            self._log.refresh()
            chain = self._log.chain(version)
            newest = self._log.newest
            self._go_to(chain)
        attempt = uuid.uuid4().hex
        return OverlayStateStore(_Reader(self, chain), lambda changes: self._commit(chain, newest, attempt, changes))

    def get_read_store(self, version: int) -> StateStore:
        """Open a version to read, while others write; raises ``VersionNotFoundError``."""
        with self._lock:
            self._check_open()
            self._log.refresh()
            chain = self._log.chain(version)
            if self._main.head is None or any(ref.path == self._main.head for _, ref in chain):
                self._go_to(chain)
        return OverlayStateStore(_Reader(self, chain), None)

    def _go_to(self, chain: list[tuple[int, FileRef]]) -> None:
        if self._main.head != _head(chain):
            self._main.load(chain)

    def _commit(self, chain: list[tuple[int, FileRef]], newest: int, attempt: str, changes: Changes) -> int:
        version = len(chain) + 1
        with self._lock:
            self._check_open()
            self._log.check_newest(version, newest)
            self._go_to(chain)
            meta = ChangelogMeta(
                query_run_id="",
                operator=self._id.operator_id,
                partition=self._id.partition_id,
                num_partitions=0,
                version=version,
                attempt=attempt,
                base=_head(chain),
                store=self._id.store_name,
            )
            file = self._main.stage(meta, changes)
            try:
                self._log.append(version, newest, attempt, file)
            except ConcurrentCommitError:
                self._main.discard(version, attempt)
                # No manifest names it, and none ever will.
                self._storage.delete(file.path)
                raise
            except BaseException:
                self._main.discard(version, attempt)
                raise
            self._main.accept(version, attempt)
            self._main.complete(version, file.path)
        return version

    def read(self, head: str | None, version: int, call: Callable[[PartitionState], T]) -> T:
        """Call ``call`` with the main copy, if it holds that very version; raises ``VersionNotFoundError``."""
        self._check_open()
        if head is None and self._main.head is not None:
            raise VersionNotFoundError(f"The empty version 0 of {self._id} is not held; held is {self._main.version}.")
        return call(self._main)

    def copy_at(self, chain: list[tuple[int, FileRef]]) -> PartitionState:
        """A copy of the state at a version that the main one has moved on from."""
        self._check_open()
        copy = self._partition(f"at-{len(chain)}-{uuid.uuid4().hex[:8]}")
        self._copies.add(copy)
        try:
            copy.load(chain)
        except BaseException:
            copy.destroy()
            raise
        return copy

    def metrics(self) -> StateStoreMetrics:
        """Figures of the main copy."""
        return self._main.metrics()

    def close(self) -> None:
        """Let go of memory and of temporary local files; what was committed stays."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for copy in list(self._copies):
                copy.destroy()
            self._main.close()
            self._remove_local()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"The provider of {self._id} is closed: make a new one.")


class _Reader:
    """One version, read from the provider's main copy while that holds it, else from a copy of its own."""

    def __init__(self, provider: RocksDBStateStoreProvider, chain: list[tuple[int, FileRef]]) -> None:
        self.id = provider.id
        self.version = len(chain)
        self._provider = provider
        self._chain = chain
        self._copy: PartitionState | None = None

    def _read(self, call: Callable[[PartitionState], T]) -> T:
        if self._copy is None:
            try:
                return self._provider.read(_head(self._chain), self.version, call)
            except VersionNotFoundError:
                self._copy = self._provider.copy_at(self._chain)
                # A store that is dropped without abort() leaves no copy behind.
                weakref.finalize(self, self._copy.destroy)
        return call(self._copy)

    def get_many(self, keys: pa.BinaryArray, column_family: str) -> pa.BinaryArray:
        head = _head(self._chain)
        return self._read(lambda state: state.get_many(keys, self.version, column_family, head=head))

    def scan(self, start: bytes | None, end: bytes | None, column_family: str) -> Iterator[pa.RecordBatch]:
        head = _head(self._chain)
        return self._read(lambda state: state.scan(self.version, start, end, column_family, head=head))

    def column_families(self) -> frozenset[str]:
        head = _head(self._chain)
        return self._read(lambda state: state.column_families(self.version, head=head))

    def metrics(self) -> StateStoreMetrics:
        return self._provider.metrics() if self._copy is None else self._copy.metrics()

    def close(self) -> None:
        if self._copy is not None:
            self._copy.destroy()
            self._copy = None


def _head(chain: list[tuple[int, FileRef]]) -> str | None:
    return chain[-1][1].path if chain else None
