"""The ``handle`` of a ``ProcessorTester``: state and timers of a key outside a call of the processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pyspark.sql.types import StructType

from spark_bridge.stateful.variables.handle import State, StatefulProcessorHandle
from spark_bridge.stateful.variables.list_state import ListState
from spark_bridge.stateful.variables.map_state import MapState
from spark_bridge.stateful.variables.value_state import ValueState


class VariableFinder(Protocol):
    """Finds the state variables of a tester's processor."""

    def __call__(self, kind: type[State], name: str, /) -> State:
        """Return the variable of that kind and name; raise ``ProcessorTesterError`` if there is none."""


class TesterHandle:
    """Chooses a key, whose state variables and timers a test may then use; names are those of ``TwsTester.handle``.

    The state variables are the objects that the processor's ``init`` was given, whatever schema and TTL a test names.
    What a test changes by them and here is kept with the tester's next call. Raises ``ProcessorTesterError`` for a
    variable that ``init`` has not declared, and for timers without a time mode or a current key.
    """

    def __init__(
        self,
        select: Callable[[Any], object],
        timers: Callable[[], StatefulProcessorHandle],
        declared: VariableFinder,
        clear: Callable[[str], None],
        forget: Callable[[str], None],
        set_watermark: Callable[[int], None],
    ) -> None:
        self._select = select
        self._timers = timers
        self._declared = declared
        self._clear = clear
        self._forget = forget
        self._set_watermark = set_watermark
        self.grouping_key: Any = None
        """The key that ``setGroupingKey`` has made the current one last; None before."""

    def setGroupingKey(self, key: Any) -> None:
        """Make a key the current one until the tester's next call."""
        self._select(key)
        self.grouping_key = key

    def setWatermark(self, watermarkMs: int) -> None:
        """Move the watermark to ``watermarkMs`` (since 1970) without firing timers: the next call fires them."""
        self._set_watermark(watermarkMs)

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ValueState:
        """Return a value that ``init`` has declared."""
        return self._declared(ValueState, stateName)

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ListState:
        """Return a list that ``init`` has declared."""
        return self._declared(ListState, stateName)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        """Return a map that ``init`` has declared."""
        return self._declared(MapState, stateName)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Set a timer of the current key; see ``StatefulProcessorHandle.registerTimer``."""
        self._timers().registerTimer(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Delete a timer of the current key, if the key has it."""
        self._timers().deleteTimer(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """Yield the timers of the current key, ascending."""
        return self._timers().listTimers()

    def deleteState(self, stateName: str) -> None:
        """Remove the current key's value, list or map."""
        self._clear(stateName)

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a state variable with the values of all keys; the processor cannot use it any more."""
        self._forget(stateName)
