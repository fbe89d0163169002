"""The known files of a run's partitions in storage, so that not every maintenance has to list directories.

Manifests name the files that were needed and are not any more. Only a listing finds files that no manifest has named:
files of dead attempts and of earlier coordinators. A listing also shows snapshots that have lost files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from backends.formats.changelog_group import GROUPS_DIRECTORY
from backends.formats.file_names import version_in
from backends.formats.manifest import SnapshotRef
from backends.formats.snapshot_descriptor import SnapshotDescriptor
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.file_ref import FileRef

LISTED_EVERY = 10
"""Files are listed in the first maintenance of a run, and in one of this many: a page of a listing costs as a PUT."""


class KnownFiles:
    """The files of one run's partitions. Its one maintenance alone uses this.

    ``paths`` are those that are or were in storage and that this coordinator has not removed since. They are as many as
    the last listing had, and what manifests have named since. ``_sizes`` are those of the last listing, in bytes, which
    began when ``_listed`` was the completed version.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._listed = 0
        self._maintenances = 0

    @property
    def is_listing_due(self) -> bool:
        """Return whether the next ``look`` lists."""
        return self._maintenances % LISTED_EVERY == 0

    def look(self, storage: CheckpointStorage, completed: int) -> None:
        """List the files if it is time to. Raises ``StorageError``: then the next maintenance lists."""
        if self.is_listing_due:
            sizes = {
                path: size for directory in ("operators", GROUPS_DIRECTORY) for path, size in storage.list(directory)
            }
            unfinished = [
                path for directory in ("operators", GROUPS_DIRECTORY) for path in storage.unfinished(directory)
            ]
            self._sizes, self._listed, self.paths = sizes, completed, {*sizes, *unfinished}
        self._maintenances += 1

    def list_again(self) -> None:
        """Have the next ``look`` list: files have come of which no host has told."""
        self._maintenances = 0

    def needed(self, paths: Iterable[str]) -> None:
        """Take note of files that manifests name."""
        self.paths.update(paths)

    def removed(self, paths: Collection[str]) -> None:
        """Take note that files are gone."""
        self.paths.difference_update(paths)
        for path in paths:
            self._sizes.pop(path, None)

    def is_whole(self, ref: SnapshotRef, descriptor: SnapshotDescriptor | None) -> bool:
        """Return whether a snapshot can be loaded; not if its descriptor is unknown.

        The last listing must have shown all its files in full size, but for those of later versions: hosts say that a
        snapshot is there when it is durable.
        """
        if descriptor is None:
            return False
        return all(map(self._is_there, [ref.file, *(f.file for f in descriptor.files if f.file is not None)]))

    def _is_there(self, file: FileRef) -> bool:
        return version_in(file.stored_in) > self._listed or file.is_in(self._sizes)
