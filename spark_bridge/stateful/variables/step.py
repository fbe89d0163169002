"""Objects that the state variables of a processor share: the keys of the step, the current key, the store, figures."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from spark_bridge.exceptions import HandleStateError, StatefulProcessorError
from spark_bridge.task.state_access import StateAccess

INT64_MAX = (1 << 63) - 1


@dataclass
class StateFigures:
    """Counts of a processor's work on its state: rows written and removed, and further figures under Spark's names."""

    num_rows_updated: int = 0
    num_rows_removed: int = 0
    custom: dict[str, float] = field(default_factory=dict)

    def count(self, name: str, n: int = 1) -> None:
        """Add n to one of the custom figures."""
        self.custom[name] = self.custom.get(name, 0) + n


@dataclass(frozen=True)
class NoKey:
    """Stands for the number of the current key while there is none: use as a number raises ``HandleStateError``."""

    phase: str

    def __index__(self) -> int:
        raise invalid_handle_state("access to a state variable", self.phase)


PRE_INIT = NoKey("PRE_INIT")
CREATED = NoKey("CREATED")
INITIALIZED = NoKey("INITIALIZED")
CLOSED = NoKey("CLOSED")
_IN_INIT = (
    "init() only declares state variables: use them in handleInputRows, handleExpiredTimer or handleInitialState."
)
_REMEDIES = {
    "PRE_INIT": _IN_INIT,
    "CREATED": _IN_INIT,
    "CLOSED": "The batch is over: close() can use no state.",
}


def invalid_handle_state(operation: str, phase: str) -> HandleStateError:
    """Return the error for an operation that the phase does not allow; ``phase`` is in Spark's words."""
    remedy = _REMEDIES.get(phase, "Declare state variables in init() only, and use them only while a key is handled.")
    return HandleStateError(
        f"[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE] Cannot perform {operation} with "
        f"invalid handle state={phase}. {remedy}"
    )


class KeyStep:
    """The sorted distinct stored keys of one step; ``index`` is the number of the current key, or a ``NoKey``.

    ``store`` None: on the driver, where state variables are declared only.
    """

    __slots__ = ("_last", "_store", "figures", "index", "keys", "timestamp_ms")

    def __init__(self, store: StateAccess | None) -> None:
        self._store = store
        self.timestamp_ms = store.times.timestamp_ms if store is not None else 0
        self.figures = StateFigures()
        self.keys: pa.BinaryArray = pa.array([], pa.binary())
        self.index: Any = PRE_INIT if store is None else CREATED
        self._last = b""

    @property
    def store(self) -> StateAccess:
        """Return the partition's state; raises ``HandleStateError`` on the driver."""
        if self._store is None:
            raise invalid_handle_state("access to the state store", "PRE_INIT")
        return self._store

    def restart(self, store: StateAccess) -> None:
        """Go on with another micro-batch and its state, at its first key."""
        self._store = store
        self.timestamp_ms = store.times.timestamp_ms
        self.figures = StateFigures()
        self._last = b""
        self.begin(pa.array([], pa.binary()))

    def begin(self, keys: pa.BinaryArray) -> None:
        """Go on to other keys; raises ``StatefulProcessorError`` unless they are after all earlier keys."""
        if len(keys):
            if self._last and keys[0].as_py() <= self._last:
                raise StatefulProcessorError(
                    f"The keys of a step begin with {keys[0].as_py().hex()}, which is not after {self._last.hex()}, "
                    "the last one of the step before: a key's changes would be lost."
                )
            self._last = keys[-1].as_py()
        self.keys = keys
        self.index = INITIALIZED

    @property
    def current(self) -> int:
        """Return the number of the current key; raises ``HandleStateError`` if there is none."""
        return operator.index(self.index)

    def stage(self, keys: pa.BinaryArray, values: pa.BinaryArray | None, family: str) -> None:
        """Add the values of keys to the commit; with ``values`` None, the removal of the keys."""
        if len(keys):
            self.store.stage(keys, pa.nulls(len(keys), pa.binary()) if values is None else values, family)
