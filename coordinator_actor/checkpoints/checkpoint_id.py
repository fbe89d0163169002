"""The counter that numbers a query's checkpoints and savepoints (Flink: ``CheckpointIDCounter``)."""

from __future__ import annotations

import threading

from coordinator_actor.exceptions import InvalidRequestError


class CheckpointIDCounter:
    """Ascending ids, shared by the checkpoints and savepoints of a query. Safe to use from many threads.

    The counter lives in memory. Its maker passes the first id above all ids in storage, so that ids ascend for good.
    """

    def __init__(self, first: int = 1) -> None:
        if first < 0:
            raise InvalidRequestError(f"The first checkpoint id is {first}; it must be 0 or more.")
        self._next = first
        self._lock = threading.Lock()

    def get_and_increment(self) -> int:
        """Take the next id."""
        with self._lock:
            taken = self._next
            self._next += 1
            return taken

    def get(self) -> int:
        """Return the id that will be taken next, without taking it."""
        with self._lock:
            return self._next

    def set_count(self, count: int) -> None:
        """Take ``count`` next. Raises ``InvalidRequestError`` if that would give an id out twice."""
        with self._lock:
            if count < self._next:
                raise InvalidRequestError(
                    f"The checkpoint id counter stands at {self._next} and cannot be set back to {count}: "
                    "ids may have been given out already. Set it to that or more."
                )
            self._next = count

    def ensure_above(self, checkpoint_id: int) -> None:
        """Never give out ``checkpoint_id`` or less from now on."""
        with self._lock:
            self._next = max(self._next, checkpoint_id + 1)
