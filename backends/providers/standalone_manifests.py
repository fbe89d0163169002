"""The manifests of a provider that is used alone, without a coordinator.

They are stored with the changelogs below the store's own directory. Every commit adds a manifest with the next number
by create-if-absent, so that one of two writers is rejected. Maintenance adds further manifests of the newest version.
A version exists if the parent chain of the newest manifest has it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from backends import exceptions, fault_points
from backends.conf import StateStoreId
from backends.formats import manifest_chain
from backends.formats.manifest import (
    Lineage,
    Manifest,
    OperatorEntry,
    PartitionEntry,
    SnapshotRef,
    seal,
    unseal,
    version_in,
)
from backends.storage.checkpoint_storage import CheckpointStorage, CreateIfAbsentProofs
from backends.storage.locations import FileRef

_DIGITS = 20
_PROOFS = CreateIfAbsentProofs()


class StandaloneManifests:
    """The versions of one store that keeps its own manifests. Many threads may use it at once; ``_lock`` guards all."""

    def __init__(
        self, storage: CheckpointStorage, store_id: StateStoreId, clock: Callable[[], float] = time.time
    ) -> None:
        self._storage = storage
        self._id = store_id
        self._clock = clock
        # A standalone store has no layout, and each snapshot says which backend made it.
        self._layout = manifest_chain.Layout(store_id.operator_id, 0, "")
        self._partition = store_id.partition_id
        self.directory = f"standalone/{store_id.operator_id}/{store_id.partition_id}/{store_id.store_name}"
        """The directory of changelogs, snapshots and manifests below the state location."""
        self._known: dict[int, Manifest] = {}
        self._chain: dict[int, Manifest] = {}
        self._head: Manifest | None = None
        self._lock = threading.RLock()

    def refresh(self) -> None:
        """Learn what other writers have committed. Reads only manifests that are not known yet."""
        with self._lock:
            newest = max(self.manifest_ids(), default=0)
            if newest == self._newest:
                return
            if newest < self._newest:
                raise exceptions.MissingFileError(
                    f"{self._storage.full_location(self._path(self._newest))} does not exist any more, but it was the "
                    "newest manifest: it was removed. Restore it from a copy."
                )
            head = self._manifest(newest) if newest else None
            self._chain = manifest_chain.walk(
                head, self._manifest, lambda i: self._storage.full_location(self._path(i))
            )
            self._head = head
            self._known = {m.id: m for m in self._chain.values()}

    def manifest_ids(self) -> list[int]:
        """Return the numbers of the manifests in the storage."""
        ids = []
        for path, _ in self._storage.list(f"{self.directory}/manifests"):
            stem = path.rsplit("/", 1)[-1].removesuffix(".json")
            if path.endswith(".json") and stem.isdecimal():
                ids.append(int(stem))
        return ids

    def _path(self, manifest_id: int) -> str:
        return f"{self.directory}/manifests/{manifest_id:0{_DIGITS}d}.json"

    def _manifest(self, manifest_id: int) -> Manifest | None:
        cached = self._known.get(manifest_id)
        if cached is not None:
            return cached
        path = self._path(manifest_id)
        if not self._storage.exists(path):
            return None
        name = self._storage.full_location(path)
        manifest = unseal(self._storage.get(path), Manifest, name)
        entry = self._entry({0: manifest}, 0)
        if manifest.id != manifest_id or entry is None or not entry.changelog.path.startswith(f"{self.directory}/"):
            raise exceptions.DamagedFileError(
                f"{name} holds manifest {manifest.id} of {', '.join(manifest.operators)}: another file has this name."
            )
        return manifest

    @property
    def _newest(self) -> int:
        return self._head.id if self._head else 0

    def latest_version(self) -> int:
        """Return the newest version known."""
        return self._head.version if self._head else 0

    def oldest_version(self) -> int:
        """Return the oldest version that is kept, apart from the empty 0."""
        return self._head.oldest if self._head else 0

    def lineage(self, version: int) -> Lineage:
        """Return the files that lead to a version; raises ``VersionNotFoundError``."""
        with self._lock:
            self._require(version)
            if not version:
                return Lineage(0)
            return manifest_chain.lineage(self._chain, version, self._layout, self._partition)

    def _require(self, version: int) -> None:
        oldest, latest = self.oldest_version(), self.latest_version()
        is_int = isinstance(version, int) and not isinstance(version, bool)
        if is_int and (version == 0 or oldest <= version <= latest):
            return
        if not latest:
            versions_in_words = "there is only the empty version 0"
        else:
            versions_in_words = f"there are versions {oldest} to {latest}" + (
                " and the empty version 0" if oldest else ""
            )
        if is_int and 0 < version < oldest:
            versions_in_words += "; older ones are no longer kept (min_versions_to_retain)"
        elif is_int and version > latest:
            litter = [p for p, _ in self._storage.list(self.directory) if version_in(p) == version]
            if litter:
                versions_in_words += (
                    f"; {self._storage.full_location(litter[0])} belongs to version {version}, but no manifest names "
                    "it: it was never committed, or its manifest was removed "
                    f"({self._storage.full_location(self._path(self._newest + 1))} or a later one)"
                )
        raise exceptions.VersionNotFoundError(f"Version {version!r} of {self._id} does not exist: {versions_in_words}.")

    def append(self, version: int, expected_head: str | None, attempt: str, changelog: FileRef) -> None:
        """Make ``version`` of the version below, if ``expected_head`` is still the newest changelog.

        Raises ``ConcurrentCommitError`` if another writer has committed since; nothing has changed then. Raises
        ``UnsupportedLocationError`` if the storage overwrites files.
        """
        with self._lock:
            while True:
                self.check_head(version, expected_head)
                below = {v: m for v, m in self._chain.items() if v < version}
                # Continuing from an older version must not lose the snapshots that only newer manifests name.
                snapshots = self._snapshots(below, self._chain.values())
                named = {s.file.path for s in self._snapshots(below)}
                entry = PartitionEntry(attempt, changelog, tuple(s for s in snapshots if s.file.path not in named))
                manifest = self._next(
                    version, entry, parent=below[version - 1].id if version > 1 else None, is_new_start=version == 1
                )
                fault_points.reached("commit:manifest")
                if self._put(manifest):
                    fault_points.reached("commit:committed")
                    return

    def record_maintenance(
        self,
        snapshot: SnapshotRef | None,
        reused: SnapshotRef | None,
        target: Callable[[int], int],
        is_sound: Callable[[SnapshotRef], bool],
    ) -> manifest_chain.Retention:
        """Name a new snapshot in a manifest, and give up the versions below ``target(latest version)``.

        ``reused`` is the snapshot whose files the new one shares: if ``reused`` is no longer kept, the new one does not
        count. ``is_sound`` returns whether all files of a snapshot exist. Returns the files that are kept.
        """
        with self._lock:
            while True:
                self.refresh()
                if self._head is None:
                    return manifest_chain.Retention(0, 1)
                partition = self._entry(self._chain, self._head.version)
                assert partition is not None
                entry = partition
                if snapshot is not None and self._may_name(snapshot, reused):
                    entry = replace(partition, snapshots=(*partition.snapshots, snapshot))
                manifest = self._next(self._head.version, entry, parent=self._head.parent)
                new_chain = {**self._chain, manifest.version: manifest}
                kept = manifest_chain.retain(
                    new_chain, [self._layout.operator], target(self._head.version), self._head.oldest, is_sound
                )
                if entry is partition and kept.oldest == self._head.oldest:
                    return kept
                manifest = replace(manifest, oldest=kept.oldest, chain_from=kept.chain_from)
                fault_points.reached("maintenance:manifest")
                if self._put(manifest):
                    fault_points.reached("maintenance:recorded")
                    return kept

    def _may_name(self, snapshot: SnapshotRef, reused: SnapshotRef | None) -> bool:
        snapshot_paths = {s.file.path for s in self.snapshots()}
        return (
            self.head_at(snapshot.version) == snapshot.head
            and snapshot.version > self.oldest_version()
            and snapshot.file.path not in snapshot_paths
            and (reused is None or reused.file.path in snapshot_paths)
        )

    def snapshots(self) -> list[SnapshotRef]:
        """Return the snapshots that are kept, ascending."""
        with self._lock:
            return self._snapshots(self._chain)

    def _snapshots(self, versions: manifest_chain.Chain, manifests: Iterable[Manifest] = ()) -> list[SnapshotRef]:
        segments = manifest_chain.segments(versions, self._layout.operator)
        return manifest_chain.snapshots(versions, segments[0], manifests).get(self._partition, []) if segments else []

    def _entry(self, versions: manifest_chain.Chain, version: int) -> PartitionEntry | None:
        return manifest_chain.entry(versions, version, self._layout.operator, self._partition)

    def head_at(self, version: int) -> str | None:
        """Return the changelog that made a version; None for the empty version 0, and for an unknown version."""
        with self._lock:
            return manifest_chain.head_of(self._chain, version, self._layout, self._partition)

    def check_head(self, version: int, expected_head: str | None) -> None:
        """Raise ``ConcurrentCommitError`` if the newest known commit is another one than ``expected_head``."""
        if self.head_at(self.latest_version()) != expected_head:
            raise exceptions.ConcurrentCommitError(
                f"Version {version} of {self._id} was not committed: another writer has committed since version "
                f"{version - 1} was opened. Open the store again, and make sure that it has only one writer."
            )

    def _next(self, version: int, entry: PartitionEntry, parent: int | None, *, is_new_start: bool = False) -> Manifest:
        head = self._head
        return Manifest(
            id=self._newest + 1,
            parent=parent,
            version=version,
            epoch=0,
            run_id="",
            created_ms=int(self._clock() * 1000),
            # The bytes of a standalone store have no schema.
            operators={
                self._id.operator_id: OperatorEntry.of(
                    num_partitions=self._layout.num_partitions,
                    schema_id="",
                    backend=self._layout.backend,
                    partitions={self._partition: entry},
                )
            },
            oldest=0 if head is None or is_new_start else head.oldest,
            chain_from=1 if head is None or is_new_start else head.chain_from,
        )

    def _put(self, manifest: Manifest) -> bool:
        """Write the next manifest. If that number already exists, read that manifest and return False."""
        _PROOFS.require(self._storage)
        try:
            self._storage.put_new(self._path(manifest.id), seal(manifest))
        except exceptions.FileExistsInStorageError:
            self.refresh()
            return False
        kept = {v: m for v, m in self._chain.items() if manifest.chain_from <= v < manifest.version}
        self._chain = {**kept, manifest.version: manifest}
        self._known = {m.id: m for m in self._chain.values()}
        self._head = manifest
        return True

    def garbage(self, kept: manifest_chain.Retention, files_of: Callable[[SnapshotRef], frozenset[str]]) -> list[str]:
        """Return the files that no kept version needs (``manifest_chain.garbage``), and obsolete manifests.

        No commit may be under way in this process.
        """
        with self._lock:
            manifests = f"{self.directory}/manifests/"
            listed = [p for p, _ in self._storage.list(self.directory)] + self._storage.unfinished(self.directory)
            files = [p for p in listed if not p.startswith(manifests)]
            garbage_files = manifest_chain.garbage(
                files, manifest_chain.needed_files(self._chain, kept, files_of), kept.oldest
            )
            for path in listed:
                number = path.removeprefix(manifests).partition(".")[0]
                if path.startswith(manifests) and number.isdecimal() and int(number) < self._newest:
                    garbage_files += [path] if int(number) not in self._known or "#" in path else []
            return garbage_files
