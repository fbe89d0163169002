"""Snapshots of the completed version: captured between two writes, and uploaded while commits and reads go on."""

from __future__ import annotations

import logging
import threading

from backends import fault_points
from backends.exceptions import DamagedFileError, MissingFileError, VersionNotFoundError
from backends.formats import snapshot
from backends.formats.manifest import SnapshotRef
from backends.formats.snapshot import PreparedSnapshot
from backends.formats.snapshot_descriptor import SnapshotDescriptor
from backends.partition.context import PartitionContext
from backends.partition.held_versions import HeldVersions
from backends.tracing.spans import Pool

log = logging.getLogger(__name__)


class SnapshotUploads:
    """Uploads snapshots, one at a time.

    Locks: ``_uploading`` is held for a whole upload, and taken first. ``mutation`` is the partition's, held while the
    engine is captured, so that nothing is written then.
    """

    def __init__(self, context: PartitionContext, versions: HeldVersions, mutation: threading.Lock) -> None:
        self._context = context
        self._versions = versions
        self._mutation = mutation
        self._uploading = threading.Lock()
        self._digests = snapshot.Digests()
        self._last: SnapshotDescriptor | None = None

    def prepare(
        self, earlier: SnapshotRef | None, small_bytes: int, listed: dict[str, dict[str, int]] | None
    ) -> PreparedSnapshot:
        """Upload the large files of what the engine holds, but for those that ``earlier`` has.

        See ``PartitionState.prepare_snapshot``.
        """
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
            log.warning("All of %s is uploaded, for an earlier snapshot is no help: %s", directory, error)
            return None

    def stored(self, descriptor: SnapshotDescriptor) -> None:
        """Take note of what was stored: the next snapshot may share its files."""
        self._last = descriptor.without_content

    def close(self) -> None:
        """Wait for an upload under way, which ends with the file that it is at, and remove the local files."""
        with self._uploading:
            self._context.scratch.clear()
