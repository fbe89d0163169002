"""The changes of attempts at the running batch: made durable, then accepted or discarded."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from backends import fault_points
from backends.exceptions import LineageMismatchError
from backends.formats.changelog import ChangelogMeta, Changes, write_changelog
from backends.formats.file_names import changelog_name
from backends.host_memory import CHANGELOGS, KEPT_OF_COMMIT, STAGED, HostMemory
from backends.partition import background
from backends.partition.before_images import BeforeImages
from backends.partition.context import PartitionContext
from backends.partition.held_versions import HeldVersions
from backends.partition.layers import Delta
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.file_ref import FileRef

WriteChangelog = Callable[[CheckpointStorage, ChangelogMeta, str, bytes], FileRef]
"""Stores the bytes of a changelog under a name that never existed."""


def put_changelog(storage: CheckpointStorage, meta: ChangelogMeta, path: str, data: bytes) -> FileRef:
    """Store a changelog as a file of its own."""
    return storage.put_unique(path, data)


class BatchAttempts:
    """Takes the changes that tasks commit to a partition. Many threads may stage at once.

    ``bytes_written`` adds up over all changelogs, by the lock of ``HeldVersions``; ``changelog_ms`` is the time of the
    last one, in milliseconds.
    """

    def __init__(
        self, context: PartitionContext, versions: HeldVersions, before_images: BeforeImages, memory: HostMemory
    ) -> None:
        self._context = context
        self._versions = versions
        self._before_images = before_images
        self._memory = memory
        self.bytes_written = 0
        self.changelog_ms = 0.0

    def stage(self, meta: ChangelogMeta, changes: Changes, write: WriteChangelog = put_changelog) -> FileRef:
        """Make an attempt's changes durable and keep them, invisible until accepted.

        ``write`` stores the changelog, perhaps together with others, and returns when it is durable. Raises
        ``LineageMismatchError`` if ``meta.base`` is not held here as the version below, ``HostMemoryError`` if there is
        no room for the changes. Changes that come again are never refused for room.
        """
        started = time.perf_counter()
        storage, directory = self._context.storage, self._context.directory
        self._versions.check_base(meta)
        nbytes = KEPT_OF_COMMIT * changes.nbytes
        with self._versions.changed:
            is_repeated = self._versions.pending.is_held(meta.version)
        if is_repeated:
            # It comes in the place of changes that stay until the version is completed, for which it is needed.
            claim = self._memory.note(STAGED, nbytes)
        else:
            claim = self._memory.claim(STAGED, nbytes, f"The commit of version {meta.version} of {directory}")
        apply = background.submit(self._context.engine.prepare, changes)
        before = background.submit(self._before_images.when_staged, meta, changes)
        path = f"{directory}/{changelog_name(meta.version, uuid.uuid4().hex)}"
        fault_points.reached("commit:changelog")
        changelog = write_changelog(changes, meta, self._context.conf.compression)
        written = self._memory.note(CHANGELOGS, len(changelog))
        ref = write(storage, meta, path, changelog)
        del changelog, written
        fault_points.reached("commit:durable")
        with self._versions.changed:
            self._versions.pending.stage(Delta(meta, ref, changes, before, apply, claim))
            self.bytes_written += ref.size
            self.changelog_ms = (time.perf_counter() - started) * 1e3
        return ref

    def accept(self, version: int, attempt: str) -> None:
        """Have readers of ``version`` see an attempt that was acknowledged, in place of any attempt before it.

        Raises ``LineageMismatchError`` if nothing of that attempt is held.
        """
        with self._versions.changed:
            if not self._versions.pending.accept(version, attempt):
                held = ", ".join(f"{m.version}:{m.attempt}" for m, _, _ in self.pending()) or "none"
                raise LineageMismatchError(
                    f"No changes of attempt {attempt!r} to version {version} of {self._context.directory} are held "
                    f"here; held are version {self._versions.version} and the attempts {held}."
                )

    def discard(self, version: int, attempt: str) -> None:
        """Drop an attempt's staged changes; if there are none, its accepted ones. No error if it has neither."""
        with self._versions.changed:
            self._versions.pending.discard(version, attempt)

    def pending(self) -> list[tuple[ChangelogMeta, FileRef, bool]]:
        """Return the changes over the completed version, and whether they are accepted; in the order of versions."""
        with self._versions.changed:
            return self._versions.pending.listed()
