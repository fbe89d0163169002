"""The ``handle`` of a ``ProcessorTester``: state and timers of a key outside a call of the processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from spark_bridge.stateful.handle import StatefulProcessorHandle


class TesterHandle:
    """Chooses a key, whose state variables and timers a test may then use; names are those of ``TwsTester.handle``.

    The state variables are the objects that the processor's ``init`` was given. What a test changes by them and here
    is kept with the tester's next call.
    """

    def __init__(
        self,
        select: Callable[[Any], object],
        selected: Callable[[], StatefulProcessorHandle],
        forget: Callable[[str], None],
    ) -> None:
        self._select = select
        self._selected = selected
        self._forget = forget

    def setGroupingKey(self, key: Any) -> None:
        """Make a key the current one until the tester's next call."""
        self._select(key)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Set a timer of the current key; see ``StatefulProcessorHandle.registerTimer``."""
        self._selected().registerTimer(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Delete a timer of the current key, if the key has it."""
        self._selected().deleteTimer(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """Yield the timers of the current key, ascending."""
        return self._selected().listTimers()

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a state variable with the values of all keys; the processor cannot use it any more."""
        self._forget(stateName)
