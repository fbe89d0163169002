"""The interface for users of ``transform_with_state``: a processor of rows by key.

Names and meaning are those of PySpark 4.2; any supported PySpark will do.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spark_bridge.stateful.variables.pyspark_classes import PySparkExpiredTimerInfo, PySparkTimerValues

if TYPE_CHECKING:
    from spark_bridge.stateful.variables.handle import StatefulProcessorHandle


class TimerValues(PySparkTimerValues):
    """Processing time and watermark of the batch, in ms since 1970; -1 where there is none."""

    __slots__ = ("_processing_time_ms", "_watermark_ms")

    def __init__(self, currentProcessingTimeInMs: int = -1, currentWatermarkInMs: int = -1) -> None:
        self._processing_time_ms = currentProcessingTimeInMs
        self._watermark_ms = currentWatermarkInMs

    def getCurrentProcessingTimeInMs(self) -> int:
        """Return the batch's processing time, in ms since 1970; -1 with time mode "none"."""
        return self._processing_time_ms

    def getCurrentWatermarkInMs(self) -> int:
        """Return the batch's watermark, in ms since 1970; -1 with time mode "none"."""
        return self._watermark_ms


class ExpiredTimerInfo(PySparkExpiredTimerInfo):
    """The timer that ``handleExpiredTimer`` is called for."""

    __slots__ = ("_expiry_ms",)

    def __init__(self, expiryTimeInMs: int = -1) -> None:
        self._expiry_ms = expiryTimeInMs

    def getExpiryTimeInMs(self) -> int:
        """Return when the timer was to fire, in ms since 1970."""
        return self._expiry_ms


def call_problem(processor: Any, *, has_timers: bool) -> str | None:
    """Return why a method of a processor cannot be called as tasks call it, or None if all can.

    Tasks call ``handleExpiredTimer`` by the names of its parameters, as Spark does, and the others by position.
    """
    calls: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        ("handleInputRows", ("key", "rows", "timerValues"), ()),
        ("handleInitialState", ("key", "initialState", "timerValues"), ()),
    ]
    if has_timers:
        calls.append(("handleExpiredTimer", (), ("key", "timerValues", "expiredTimerInfo")))
    for name, by_position, by_name in calls:
        try:
            signature = inspect.signature(getattr(processor, name))
        except (AttributeError, TypeError, ValueError):
            continue  # a method that the processor does not need, or whose signature Python does not know
        try:
            signature.bind(*by_position, **dict.fromkeys(by_name))
        except TypeError as error:
            how = "by name, as Spark calls it" if by_name else "by position"
            return (
                f"{type(processor).__name__}.{name}{signature} cannot be called: {error}. It is called with "
                f"{', '.join((*by_position, *by_name))} {how}: declare {name}(self, "
                f"{', '.join((*by_position, *by_name))})."
            )
    return None


class StatefulProcessor(ABC):
    """The logic of ``transform_with_state``: called for each key with its rows, and keeping state between batches.

    A subclass has ``init`` and ``handleInputRows``, and other methods as needed. Rows, output and initial state are
    ``pyspark.sql.Row``; with ``transform_with_state_in_pandas`` they are pandas DataFrames. A subclass of PySpark's own
    ``StatefulProcessor`` serves as well.
    """

    @abstractmethod
    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state variables, by ``handle.getValueState`` and so on; called before all else.

        It is called on the driver as well as in each task and batch, and must declare the same variables every time.
        """

    @abstractmethod
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Any]:
        """Handle the rows that one key (a tuple) has in the batch, and yield the rows to emit."""

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Any]:
        """Handle an expired timer of the key, and yield the rows to emit; the timer is deleted afterwards."""
        return iter(())

    def handleInitialState(self, key: Any, initialState: Any, timerValues: TimerValues) -> None:
        """Make state of one row (or DataFrame) of the key's initial state; called before the first batch only."""
        return

    def close(self) -> None:
        """Release what ``init`` has acquired; called last."""
        return
