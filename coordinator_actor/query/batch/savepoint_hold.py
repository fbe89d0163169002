"""Lets a run's batches wait while the run is being stopped with a savepoint."""

from __future__ import annotations

from coordinator_actor.durable.savepoint_records import SavepointRecords


class SavepointHold:
    """The hold of one run. The lock of the run guards writes; its record in storage outlives the coordinator.

    ``batch_id`` is the first batch that must wait; None if no batch must. ``record_id`` is the savepoint whose record
    holds the run, where an earlier coordinator has begun the hold.
    """

    def __init__(self, records: SavepointRecords) -> None:
        self._records = records
        self.batch_id: int | None = None
        self.record_id: int | None = None

    def holds(self, batch_id: int) -> bool:
        """Return whether a batch waits."""
        return self.batch_id is not None and batch_id >= self.batch_id

    def begin(self, batch_id: int) -> None:
        """Let the tasks of a batch wait."""
        self.batch_id, self.record_id = batch_id, None

    def take_over(self, run_id: str) -> None:
        """Go on with the hold that an earlier coordinator has begun and not ended, if there is one."""
        hold = self._records.hold_of(run_id)
        if hold is not None:
            self.batch_id, self.record_id = hold.version, hold.checkpoint_id

    def end(self) -> None:
        """Let all batches go on."""
        self.batch_id, self.record_id = None, None

    def end_recorded(self) -> None:
        """End a hold that an earlier coordinator began: its savepoint has failed before that could be written."""
        if self.record_id is not None:
            self._records.release(self.record_id)
            self.end()
