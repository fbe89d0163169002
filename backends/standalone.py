"""The manifests of a provider that is used alone, without a coordinator.

They lie with the changelogs below the store's own directory. Every commit adds one by
create-if-absent with the next number, so that of two writers one is refused. Version V is the one
on the parent chain of the newest manifest (DESIGN, rule 1).
"""

from __future__ import annotations

import threading
import time

from backends.exceptions import ConcurrentCommitError, DamagedFileError, FileExistsInStorageError, VersionNotFoundError
from backends.ids import StateStoreId
from backends.manifest import FileRef, Manifest, OperatorEntry, PartitionEntry
from backends.sealed import seal, unseal
from backends.storage import CheckpointStorage

_DIGITS = 20


class StandaloneLog:
    """The versions of one store that keeps its own manifests. Safe to use from many threads."""

    def __init__(self, storage: CheckpointStorage, store_id: StateStoreId, backend: str) -> None:
        self._storage = storage
        self._id = store_id
        self._backend = backend
        self.directory = f"standalone/{store_id.operator_id}/{store_id.partition_id}/{store_id.store_name}"
        """Where changelogs and manifests are, below the state location."""
        self._manifests: dict[int, Manifest] = {}
        self._chain: list[Manifest] = []
        self._newest = 0
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """See what others have committed. Reads only manifests that are not known yet."""
        with self._lock:
            newest = max(self._ids(), default=0)
            if newest == self._newest:
                return
            chain: list[Manifest] = []
            wanted: int | None = newest
            while wanted is not None:
                manifest = self._manifests.get(wanted) or self._read(wanted)
                self._manifests[wanted] = manifest
                chain.append(manifest)
                wanted = manifest.parent
            chain.reverse()
            self._check(chain)
            self._chain, self._newest = chain, newest

    def _ids(self) -> list[int]:
        ids = []
        for path, _ in self._storage.list(f"{self.directory}/manifests"):
            stem = path.rsplit("/", 1)[-1].removesuffix(".json")
            if path.endswith(".json") and stem.isdecimal():
                ids.append(int(stem))
        return ids

    def _path(self, manifest_id: int) -> str:
        return f"{self.directory}/manifests/{manifest_id:0{_DIGITS}d}.json"

    def _read(self, manifest_id: int) -> Manifest:
        path = self._path(manifest_id)
        name = self._storage.full_location(path)
        manifest = unseal(self._storage.get(path), Manifest, name)
        if manifest.id != manifest_id:
            raise DamagedFileError(f"{name} holds manifest {manifest.id}: files have been exchanged.")
        return manifest

    def _check(self, chain: list[Manifest]) -> None:
        for version, manifest in enumerate(chain, 1):
            if manifest.version != version:
                raise DamagedFileError(
                    f"{self._storage.full_location(self._path(manifest.id))} holds version {manifest.version} where "
                    f"version {version} belongs: files have been exchanged."
                )

    @property
    def newest(self) -> int:
        """The number of the newest manifest known, 0 for none."""
        return self._newest

    def latest_version(self) -> int:
        """The newest version known."""
        return len(self._chain)

    def chain(self, version: int) -> list[tuple[int, FileRef]]:
        """The changelogs that lead to a version; raises ``VersionNotFoundError``."""
        with self._lock:
            chain = self._chain
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= len(chain):
            there = f"are versions 0 to {len(chain)}" if chain else "is only the empty version 0"
            raise VersionNotFoundError(f"Version {version!r} of {self._id} does not exist; there {there}.")
        return [(m.version, self._file(m)) for m in chain[:version]]

    def _file(self, manifest: Manifest) -> FileRef:
        return manifest.operators[self._id.operator_id].partitions[self._id.partition_id].changelog

    def check_newest(self, version: int, newest: int) -> None:
        """Raise ``ConcurrentCommitError`` if a manifest behind ``newest`` is known; no look at the storage."""
        if newest != self._newest:
            raise self._conflict(version)

    def append(self, version: int, newest: int, attempt: str, changelog: FileRef) -> None:
        """Make ``version`` of the one below it, if ``newest`` still is the newest manifest.

        Raises ``ConcurrentCommitError`` if it is not; nothing has changed then.
        """
        with self._lock:
            self.check_newest(version, newest)
            manifest = Manifest(
                id=newest + 1,
                parent=self._chain[version - 2].id if version > 1 else None,
                version=version,
                epoch=0,
                run_id="",
                created_ms=int(time.time() * 1000),
                # A store on its own is no part of a layout, and its bytes have no schema.
                operators={
                    self._id.operator_id: OperatorEntry(
                        num_partitions=0,
                        schema_id="",
                        backend=self._backend,
                        partitions={self._id.partition_id: PartitionEntry(attempt, changelog)},
                    )
                },
            )
            try:
                self._storage.put_new(self._path(manifest.id), seal(manifest))
            except FileExistsInStorageError as error:
                raise self._conflict(version) from error
            self._manifests[manifest.id] = manifest
            self._chain = [*self._chain[: version - 1], manifest]
            self._newest = manifest.id

    def _conflict(self, version: int) -> ConcurrentCommitError:
        return ConcurrentCommitError(
            f"Version {version} of {self._id} was not committed: another writer has committed since version "
            f"{version - 1} was opened. Open the store again, and see to it that there is one writer."
        )
