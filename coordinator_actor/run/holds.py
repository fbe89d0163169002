"""Holds: batches that wait for a rewrite or a savepoint, and files that retention must not remove yet."""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from backends.formats.changelog import GROUPS_DIRECTORY
from backends.formats.manifest import SnapshotDescriptor, SnapshotRef, version_in
from backends.formats.manifest_chain import Layout
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from coordinator_actor.checkpoints.pending_checkpoint import TaskKey

TOLD_SECONDS = 60.0
"""For this many seconds the version whose files were exchanged is announced to hosts again: an answer to a heartbeat
may be lost.
"""


@dataclass(frozen=True)
class Hold:
    """A hold: its identity, its owner, its end in seconds by the coordinator's clock, and the first batch that waits.

    ``batch_id`` None: no batch waits yet. During a hold no snapshot is uploaded, and no file removed: a program that
    rewrites files of kept versions has written files of these versions that no manifest names yet.
    """

    id: str
    holder: str
    batch_id: int | None
    until: float

    def holds(self, batch_id: int) -> bool:
        return self.batch_id is not None and batch_id >= self.batch_id


class RewritingHold:
    """The hold of one run, only in memory. The lock of the run guards it.

    If the holder dies, its hold lapses and the run continues. A lapsed hold never comes back, because retention may
    have removed the files that were written under it. So the coordinator exchanges files only under a hold that has
    lasted since before the first of them was written.
    """

    def __init__(self) -> None:
        self._hold: Hold | None = None
        self._told_until = -math.inf
        self._clean: frozenset[str] = frozenset()

    def at(self, now: float) -> Hold | None:
        """Return the hold; None if there is none.

        A hold past its end is dropped here, and stays dropped if the clock goes back.
        """
        if self._hold is not None and now >= self._hold.until:
            self._hold = None
        return self._hold

    def begin(self, holder: str, now: float, seconds: float) -> Hold:
        """Begin a hold. The same holder gets its existing hold: the message may be a repetition."""
        current = self.at(now)
        is_known = current is not None and current.holder == holder
        self._hold = Hold(current.id if current and is_known else uuid.uuid4().hex, holder, None, now + seconds)
        return self._hold

    def renew(self, hold: Hold, now: float, seconds: float, batch_id: int | None) -> Hold:
        """Prolong the hold that ``at`` has returned; the batches from ``batch_id`` on wait."""
        self._hold = replace(hold, batch_id=batch_id, until=now + seconds)
        return self._hold

    def end(self, holder: str) -> None:
        """Release the batches, if this holder has held them."""
        if self._hold is not None and self._hold.holder == holder:
            self._hold = None

    def exchanged(self, now: float) -> None:
        """Record that files were exchanged: hosts must learn that the same version has other heads."""
        self._clean = frozenset()
        self._told_until = now + TOLD_SECONDS

    def is_to_be_told(self, now: float) -> bool:
        """Return whether the completed version is announced to hosts that already have it."""
        return now < self._told_until

    def note_clean(self, host_id: str) -> None:
        """Record that a host no longer has any of the files from before the exchange. Needs no lock."""
        if host_id not in self._clean:
            self._clean |= {host_id}

    def is_clean(self, host_id: str) -> bool:
        """Return whether a host has reported that since the exchange. Needs no lock."""
        return host_id in self._clean


# Holds a run's batches while the run is being stopped with a savepoint.


@dataclass(frozen=True)
class SavepointHold:
    """The hold of one run; its record in storage outlives the coordinator.

    ``batch_id`` is the first batch that must wait; None if no batch must. ``record_id`` is the savepoint whose record
    holds the run, if an earlier coordinator has begun the hold.
    """

    batch_id: int | None = None
    record_id: int | None = None

    def holds(self, batch_id: int) -> bool:
        return self.batch_id is not None and batch_id >= self.batch_id


# The partitions of a run whose files are being read or written: retention must not remove these files.


BUSY_SECONDS = 900.0
"""Timeout of a load or an upload without renewal, in seconds."""
FILES_RENEW_SECONDS = 300.0
"""Interval of a load's renewals: two of these messages may be lost."""
UPLOAD = "upload"
"""The use of files by the upload of a snapshot; a load by the owner of a partition has the owner's host id."""


@dataclass(frozen=True)
class _Use:
    """The files that one load or upload uses, ``until`` a time of the coordinator's clock.

    ``oldest`` is the lowest version whose changelogs are read. ``is_rescaling``: files of an earlier layout are read.
    """

    until: float
    is_rescaling: bool
    oldest: float


class FilesInUse:
    """The files of loads and uploads that are under way. The lock of the run guards everything here.

    A partition may be loaded several times at once: by its owner, for a savepoint, for readers of older versions. Each
    is a separate use, named by its loader, and ends no other one. Times are in seconds, by the coordinator's clock.
    There are as many entries as loads in ``BUSY_SECONDS``; expired entries are dropped when retention looks.
    """

    def __init__(self) -> None:
        self._uses: dict[tuple[TaskKey, str], _Use] = {}
        self._all_until = -math.inf

    def await_renewals(self, now: float) -> None:
        """Treat all files as in use: loads that an earlier coordinator knew have yet to renew."""
        self._all_until = now + BUSY_SECONDS

    def begin(self, task: TaskKey, use: str, now: float, *, is_rescaling: bool, oldest: float) -> None:
        """Record that a host loads a partition with the changelogs of versions from ``oldest`` on.

        ``is_rescaling``: from the files of an earlier layout.
        """
        self._uses[task, use] = _Use(now + BUSY_SECONDS, is_rescaling, oldest)

    def renew(self, task: TaskKey, use: str, now: float) -> bool:
        """Renew a load. Return False if it is not known, or has expired: then files may be gone."""
        current = self._uses.get((task, use))
        if current is None or current.until <= now:
            return False
        self._uses[task, use] = replace(current, until=now + BUSY_SECONDS)
        return True

    def end(self, task: TaskKey, use: str, now: float = math.inf) -> bool:
        """End a load or an upload.

        Return whether its files were protected until ``now``: else some may have been removed.
        """
        current = self._uses.pop((task, use), None)
        return now < self._all_until or (current is not None and now < current.until)

    def is_uploading(self, now: float) -> bool:
        """Return whether a snapshot is being uploaded, or may be: an earlier coordinator may have known of it."""
        return now < self._all_until or any(
            use == UPLOAD and upload.until > now for (_, use), upload in self._uses.items()
        )

    def oldest(self, now: float) -> float:
        """Return the lowest version with changelogs that are being read; infinite if there is none.

        Groups of changelogs are in no partition's directory.
        """
        return min((use.oldest for use in self._uses.values() if use.until > now), default=math.inf)

    def directories(self, layouts: Mapping[str, Layout], now: float) -> tuple[str, ...]:
        """Return the directories where no file may be removed now."""
        self._uses = {key: use for key, use in self._uses.items() if use.until > now}
        if now < self._all_until or any(use.is_rescaling for use in self._uses.values()):
            # New partitions are being made from the files of the old ones, whichever these are.
            return ("operators/", f"{GROUPS_DIRECTORY}/")
        return tuple({f"{layouts[o].directory(p)}/" for (o, p), _ in self._uses})


# The known files of a run's partitions in storage, so that not every maintenance has to list directories.
#
# Manifests name the files that were needed and no longer are. Only a listing finds files that no manifest has named:
# files of dead attempts and of earlier coordinators. A listing also shows snapshots that have lost files.


LISTED_EVERY = 10
"""Files are listed in the first maintenance of a run, and in one of this many: a page of a listing costs as a PUT."""


class KnownFiles:
    """The files of one run's partitions. Only the run's single maintenance uses this.

    ``paths`` are those that are or were in storage and that this coordinator has not removed since. Their number is
    that of the last listing, plus what manifests have named since. ``_sizes`` are those of the last listing, in bytes,
    which began when ``_listed`` was the completed version.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._sizes: dict[str, int] = {}
        self._listed = 0
        self._maintenances = 0

    def look(self, storage: CheckpointStorage, completed: int) -> None:
        """List the files if it is time to. Raises ``StorageError``: then the next maintenance lists."""
        if self._maintenances % LISTED_EVERY == 0:
            directories = ("operators", GROUPS_DIRECTORY)
            sizes = {path: size for directory in directories for path, size in storage.list(directory)}
            unfinished = [path for directory in directories for path in storage.unfinished(directory)]
            self._sizes, self._listed, self.paths = sizes, completed, {*sizes, *unfinished}
        self._maintenances += 1

    def list_again(self) -> None:
        """Make the next ``look`` list: there are new files that no host has reported."""
        self._maintenances = 0

    def needed(self, paths: Iterable[str]) -> None:
        """Add files that manifests name."""
        self.paths.update(paths)

    def removed(self, paths: Collection[str]) -> None:
        """Drop files that were removed."""
        self.paths.difference_update(paths)
        for path in paths:
            self._sizes.pop(path, None)

    def is_whole(self, ref: SnapshotRef, descriptor: SnapshotDescriptor | None) -> bool:
        """Return whether a snapshot can be loaded; not if its descriptor is unknown.

        The last listing must have shown all its files in full size, except those of later versions: hosts report a
        snapshot only when it is durable.
        """
        if descriptor is None:
            return False
        return all(map(self._is_there, [ref.file, *(f.file for f in descriptor.files if f.file is not None)]))

    def _is_there(self, file: FileRef) -> bool:
        return version_in(file.stored_in) > self._listed or file.is_in(self._sizes)
