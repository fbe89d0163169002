"""What users write: a processor of keyed rows, with PySpark 4.2's names and meaning, on any PySpark."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_bridge.stateful.handle import StatefulProcessorHandle


class TimerValues:
    """Processing time and watermark of the batch, in ms since 1970; -1 where there is none."""

    __slots__ = ("_processing_time_ms", "_watermark_ms")

    def __init__(self, currentProcessingTimeInMs: int = -1, currentWatermarkInMs: int = -1) -> None:
        self._processing_time_ms = currentProcessingTimeInMs
        self._watermark_ms = currentWatermarkInMs

    def getCurrentProcessingTimeInMs(self) -> int:
        """The batch's processing time; -1 with time mode "none"."""
        return self._processing_time_ms

    def getCurrentWatermarkInMs(self) -> int:
        """The batch's watermark; -1 without one."""
        return self._watermark_ms


class ExpiredTimerInfo:
    """The timer that ``handleExpiredTimer`` is called for."""

    __slots__ = ("_expiry_ms",)

    def __init__(self, expiryTimeInMs: int = -1) -> None:
        self._expiry_ms = expiryTimeInMs

    def getExpiryTimeInMs(self) -> int:
        """When the timer was to fire, in ms since 1970."""
        return self._expiry_ms


class StatefulProcessor(ABC):
    """The logic of ``transform_with_state``: called per key with its rows, keeping state between batches.

    With ``transform_with_state_in_pandas``, rows, output and initial state are pandas DataFrames, else
    ``pyspark.sql.Row``. A subclass of PySpark's own ``StatefulProcessor`` serves as well.
    """

    @abstractmethod
    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state variables, by ``handle.getValueState`` and so on; called before anything else."""

    @abstractmethod
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Any]:
        """Handle the rows that one key (a tuple) has in the batch, and give the rows to emit."""

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Any]:
        """Handle a timer of the key that has expired, and give the rows to emit."""
        return iter(())

    def handleInitialState(self, key: Any, initialState: Any, timerValues: TimerValues) -> None:
        """Take over one row (or DataFrame) of the key's initial state; called before the first batch only."""
        return

    def close(self) -> None:
        """Release what ``init`` has acquired; called last."""
        return
