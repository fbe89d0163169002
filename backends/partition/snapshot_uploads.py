"""Snapshots of the completed version: captured between two writes, and uploaded concurrently with commits and reads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from backends import fault_points
from backends.exceptions import DamagedFileError, MissingFileError, VersionNotFoundError
from backends.formats import snapshot
from backends.formats.manifest import SnapshotDescriptor, SnapshotRef
from backends.formats.snapshot import PreparedSnapshot, StoredSnapshot
from backends.partition.held_versions import HeldVersions
from backends.partition.local_directory import PartitionContext
from backends.spans import Pool

log = logging.getLogger(__name__)


class SnapshotUploads:
    """Uploads snapshots of one partition, one at a time.

    Locks: ``_uploading`` is held for a whole upload, and taken first. ``mutation`` is the partition's, held during the
    capture of the engine, so that nothing is written then. The lock of ``HeldVersions`` guards the figures: ``count``
    and ``bytes_written`` add up over all snapshots, ``milliseconds`` is the time of the last upload.
    """

    def __init__(self, context: PartitionContext, versions: HeldVersions, mutation: threading.Lock) -> None:
        self._context = context
        self._versions = versions
        self._mutation = mutation
        self._uploading = threading.Lock()
        self._digests = snapshot.Digests()
        self._last: SnapshotDescriptor | None = None
        self.count = 0
        self.bytes_written = 0
        self.milliseconds = 0.0

    def store(self, earlier: SnapshotRef | None) -> SnapshotRef:
        """Upload the completed version, except the files that ``earlier`` has.

        Commits and reads continue during the upload.

        The returned snapshot counts once a manifest names it. Raises ``StorageError``, ``StoreClosedError`` if the
        state is closed during the upload, ``VersionNotFoundError`` for the empty version 0.
        """
        (stored,) = store_snapshots([(self, self.prepare(earlier))])
        return stored.ref

    def prepare(
        self, earlier: SnapshotRef | None, small_bytes: int = 0, listed: dict[str, dict[str, int]] | None = None
    ) -> PreparedSnapshot:
        """Do the part of ``store`` that concerns only this partition: ``store_snapshots`` does the rest.

        Small files, up to ``small_bytes`` together, are left for that. ``listed``: see ``backends.formats.snapshot``.
        Raises as ``store`` does.
        """
        started = time.perf_counter()
        prepared = self._upload(earlier, small_bytes, listed)
        with self._versions.changed:
            self.milliseconds = (time.perf_counter() - started) * 1e3
        return prepared

    def _upload(
        self, earlier: SnapshotRef | None, small_bytes: int, listed: dict[str, dict[str, int]] | None
    ) -> PreparedSnapshot:
        context = self._context
        storage, directory, engine = context.storage, context.directory, context.engine
        with self._uploading, context.scratch.directory() as local:
            with self._mutation:
                self._versions.check_open()
                state = engine.state
                if state.head is None:
                    raise VersionNotFoundError(f"{directory} is at the empty version 0: there is nothing to keep.")
                finish = engine.capture(local)
            fault_points.reached("snapshot:captured")
            finish()
            with Pool(context.conf.upload_threads, thread_name_prefix="statestore-upload") as pool:
                return snapshot.prepare(
                    storage,
                    directory,
                    context.backend,
                    local,
                    state,
                    earlier=None if earlier is None else self._descriptor(earlier),
                    digests=self._digests,
                    pool=pool,
                    is_cancelled=lambda: self._versions.is_closed,
                    small_bytes=small_bytes,
                    listed=listed,
                )

    def _descriptor(self, ref: SnapshotRef) -> SnapshotDescriptor | None:
        last = self._last
        if last is not None and last.path == ref.file.path:
            return last
        try:
            return snapshot.read_descriptor(self._context.storage, ref)
        except (MissingFileError, DamagedFileError) as error:
            directory = self._context.directory
            log.warning("All of %s is uploaded, because an earlier snapshot cannot be used: %s", directory, error)
            return None

    def _note(self, stored: StoredSnapshot) -> None:
        """Record a stored snapshot: the next snapshot may share its files."""
        self._last = stored.descriptor.without_content
        with self._versions.changed:
            self.count += 1
            self.bytes_written += stored.written
        log.info(
            "Written snapshot file for version %d of %s at %s",
            stored.ref.version,
            self._context.directory,
            self._context.storage.full_location(stored.ref.file.stored_in),
        )

    def close(self) -> None:
        """Wait for an upload under way, which ends with its current file, and remove the local files."""
        with self._uploading:
            self._context.scratch.clear()


def store_snapshots(prepared: Sequence[tuple[SnapshotUploads, PreparedSnapshot]]) -> list[StoredSnapshot]:
    """Finish snapshots of partitions with the same state location, with one request. Raises ``StorageError``."""
    snapshots = snapshot.store_together(prepared[0][0]._context.storage, [one for _, one in prepared])
    for (uploads, _), stored in zip(prepared, snapshots, strict=True):
        uploads._note(stored)
    return snapshots
