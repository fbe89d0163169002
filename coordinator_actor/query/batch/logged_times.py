"""The times of a run's batches, as Spark has logged them: moment, watermark and late watermark."""

from __future__ import annotations

from collections.abc import Callable

from coordinator_actor.messages import BatchTimes
from coordinator_actor.query.batch.spark_logs import SparkLogs


class LoggedTimes:
    """The times of the last batch whose tasks needed them. The lock of the run guards ``at`` alone.

    ``uses_time``: an operator of the query uses times; otherwise nothing is read.
    """

    def __init__(self, logs: SparkLogs, clock: Callable[[], float], *, uses_time: bool) -> None:
        self._logs = logs
        self._uses_time = uses_time
        self._known: tuple[int, BatchTimes] | None = None
        self._clock = clock
        self.rose_at: float | None = None
        """When the watermark was read that counts still, by the clock of the coordinator."""

    @property
    def last(self) -> BatchTimes | None:
        """The times that were read last, for people."""
        known = self._known
        return None if known is None else known[1]

    @property
    def watermark_ms(self) -> int:
        """The watermark of the batch whose times were read last, in ms since 1970; 0 without one."""
        known = self._known
        return 0 if known is None else known[1].watermark_ms

    def at(self, batch_id: int) -> BatchTimes | None:
        """Return the times of a batch; None if no operator uses them. Raises what ``SparkLogs.times`` raises."""
        if not self._uses_time:
            return None
        if self._known is None or self._known[0] != batch_id:
            times = self._logs.times(batch_id)
            if self.rose_at is None or times.watermark_ms != self.watermark_ms:
                self.rose_at = self._clock()
            self._known = (batch_id, times)
        return self._known[1]

    def needs_reading(self, batch_id: int) -> bool:
        """Return whether ``at`` will have to read the times of a batch."""
        known = self._known
        return self._uses_time and (known is None or known[0] != batch_id)
