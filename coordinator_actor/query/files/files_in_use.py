"""The partitions of a run whose files are being read or written: retention must not remove these files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from backends.formats.changelog_group import GROUPS_DIRECTORY
from backends.formats.manifest_chain import Layout
from coordinator_actor.checkpoints.tasks import TaskKey

BUSY_SECONDS = 900.0
"""How long a load or an upload is believed to go on if nothing more is heard of it."""
FILES_RENEW_SECONDS = 300.0
"""A load says so often that it goes on: two of these messages may be lost."""
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
    is a use of its own, named by whoever loads, and ends no other one. Times are in seconds, by the coordinator's
    clock. There are as many entries as loads in ``BUSY_SECONDS``; those that are over go when retention looks.
    """

    def __init__(self) -> None:
        self._uses: dict[tuple[TaskKey, str], _Use] = {}
        self._all_until = -math.inf

    def await_renewals(self, now: float) -> None:
        """Take all files for being used: loads that an earlier coordinator knew of have yet to say that they go on."""
        self._all_until = now + BUSY_SECONDS

    def begin(self, task: TaskKey, use: str, now: float, *, is_rescaling: bool, oldest: float) -> None:
        """Take note that a host loads a partition with the changelogs of versions from ``oldest`` on.

        ``is_rescaling``: from the files of an earlier layout.
        """
        self._uses[task, use] = _Use(now + BUSY_SECONDS, is_rescaling, oldest)

    def renew(self, task: TaskKey, use: str, now: float) -> bool:
        """Take note that a load goes on. Return False if it is not known, or was given up: then files may be gone."""
        known = self._uses.get((task, use))
        if known is None or known.until <= now:
            return False
        self._uses[task, use] = replace(known, until=now + BUSY_SECONDS)
        return True

    def end(self, task: TaskKey, use: str, now: float = math.inf) -> bool:
        """End a load or an upload. Return whether it may have lasted until ``now``: else files may have gone since."""
        known = self._uses.pop((task, use), None)
        return now < self._all_until or (known is not None and now < known.until)

    def is_uploading(self, now: float) -> bool:
        """Return whether a snapshot is being uploaded, or may be: an earlier coordinator has known of it."""
        return now < self._all_until or any(use == UPLOAD and held.until > now for (_, use), held in self._uses.items())

    def oldest(self, now: float) -> float:
        """Return the lowest version of which changelogs are being read; infinite if none is.

        Groups of changelogs lie in no partition's directory.
        """
        return min((use.oldest for use in self._uses.values() if use.until > now), default=math.inf)

    def directories(self, layouts: Mapping[str, Layout], now: float) -> tuple[str, ...]:
        """Return the directories in which nothing may be removed now."""
        self._uses = {key: use for key, use in self._uses.items() if use.until > now}
        if now < self._all_until or any(use.is_rescaling for use in self._uses.values()):
            # New partitions are being made from the files of the old ones, whichever these are.
            return ("operators/", f"{GROUPS_DIRECTORY}/")
        return tuple({f"{layouts[o].directory(p)}/" for (o, p), _ in self._uses})
