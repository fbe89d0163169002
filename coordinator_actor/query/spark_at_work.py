"""Since when Spark works on a batch, as its driver says.

The checkpoint of a batch begins when a task opens the state. Before that Spark plans the batch and reads the source,
and behind the last acknowledgement the sink writes: whatever takes long there would look as if no batch ran.
"""

from __future__ import annotations

from coordinator_actor.checkpoints.pending_checkpoint import PendingCheckpoint


class SparkAtWork:
    """What the heartbeats of a run's driver say, one a second. The lock of the run guards it."""

    def __init__(self) -> None:
        self._behind: int | None = None
        self._since = 0.0
        self._made: tuple[int, float] | None = None

    def heard(self, is_at_work: bool, completed: int, now: float) -> None:
        """Take note of a heartbeat. ``completed`` is the completed version: behind it, another batch is at work."""
        if self._behind is not None and completed == self._behind + 1:
            self._made = (completed, self._since)
        if not is_at_work:
            self._behind = None
        elif self._behind != completed:
            self._behind, self._since = completed, now

    def began(self, completed: int, pending: PendingCheckpoint | None) -> float | None:
        """Return when the batch behind the completed version began, at the latest; None if there is none."""
        known = [] if pending is None else [pending.started]
        if self._behind == completed:
            known.append(self._since)
        return min(known, default=None)

    def began_of(self, version: int) -> float | None:
        """Return when the batch of the newest completed version began; None for one that heartbeats did not see."""
        return self._made[1] if self._made is not None and self._made[0] == version else None
