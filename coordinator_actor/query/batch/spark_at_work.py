"""The time since which Spark works on a batch, as the driver reports it.

The checkpoint of a batch begins when a task opens the state. Before that Spark plans the batch and reads the source;
after the last acknowledgement the sink writes. By the checkpoint alone it would look as if no batch ran meanwhile.
"""

from __future__ import annotations

from coordinator_actor.checkpoints.pending_checkpoint import PendingCheckpoint
from coordinator_actor.messages import InputPace


class SparkAtWork:
    """The reports of a run's driver, in a heartbeat a second. The lock of the run must be held for ``heard`` alone."""

    def __init__(self) -> None:
        self.pace: InputPace | None = None
        """The pace of the input in the last batch that the driver knows."""
        # The completed version, and since when Spark is at the batch after it;
        self._running: tuple[int, float] | None = None
        # the version that was completed last, and since when Spark was at its batch. Others may read beside ``heard``.
        self._made: tuple[int, float] | None = None

    def heard(self, is_at_work: bool, completed: int, now: float) -> None:
        """Take note of a heartbeat. ``completed`` is the completed version: after it, another batch is at work."""
        running = self._running
        if running is not None and completed == running[0] + 1:
            self._made = (completed, running[1])
        if not is_at_work:
            self._running = None
        elif running is None or running[0] != completed:
            self._running = (completed, now)

    def began(self, completed: int, pending: PendingCheckpoint | None) -> float | None:
        """Return when the batch after the completed version began, at the latest; None if there is none."""
        known = [] if pending is None else [pending.started]
        running = self._running
        if running is not None and running[0] == completed:
            known.append(running[1])
        return min(known, default=None)

    def began_of(self, version: int) -> float | None:
        """Return when the batch of the newest completed version began; None for one that heartbeats did not see."""
        made = self._made
        return made[1] if made is not None and made[0] == version else None
