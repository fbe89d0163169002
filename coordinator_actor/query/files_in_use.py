"""The partitions of a run whose files are being read or written: retention must not remove these files."""

from __future__ import annotations

from collections.abc import Mapping

from backends.formats.manifest_chain import Layout
from coordinator_actor.checkpoints.tasks import TaskKey

BUSY_SECONDS = 900.0
"""How long a load or an upload is believed to go on if nothing more is heard of it."""


class FilesInUse:
    """The partitions that are being loaded or uploaded. The lock of the run guards everything here.

    Times are in seconds, by the coordinator's clock.
    """

    def __init__(self) -> None:
        self._busy: dict[TaskKey, float] = {}
        self._rescaling: dict[TaskKey, float] = {}

    def begin(self, task: TaskKey, now: float, *, is_rescaling: bool) -> None:
        """Take note that a host loads a partition; ``is_rescaling``: from the files of an earlier layout."""
        self._busy[task] = now + BUSY_SECONDS
        if is_rescaling:
            self._rescaling[task] = now + BUSY_SECONDS

    def uploaded(self, task: TaskKey) -> None:
        """Take note that a host has uploaded a snapshot of a partition."""
        self._busy.pop(task, None)

    def acknowledged(self, task: TaskKey) -> None:
        """Take note that a host has changed a partition: the partition is loaded, and rescaled if need be."""
        self._busy.pop(task, None)
        self._rescaling.pop(task, None)

    def directories(self, layouts: Mapping[str, Layout], now: float) -> tuple[str, ...]:
        """Return the directories in which nothing may be removed now."""
        if any(until > now for until in self._rescaling.values()):
            # New partitions are being made from the files of the old ones, whichever these are.
            return ("operators/",)
        return tuple(f"{layouts[o].directory(p)}/" for (o, p), until in self._busy.items() if until > now)
