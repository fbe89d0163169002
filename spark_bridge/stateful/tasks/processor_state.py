"""The state of one processor in one task: its variables, timers and TTL, in steps of sorted keys.

The state of a step's keys is read when it is first asked for, for all keys at once. Changes are staged at the end of
the step, whole columns at a time.
"""

from __future__ import annotations

import pyarrow as pa

from backends.encoding.operator_schema import StateVariable
from spark_bridge.exceptions import InvalidOperatorError, StateDeclarationError
from spark_bridge.state_format.layouts import timers_variable
from spark_bridge.stateful.stateful_processor import TimerValues
from spark_bridge.stateful.variables.handle import EVENT_TIME, NONE, TIME_MODES, StatefulProcessorHandle
from spark_bridge.stateful.variables.list_state import ListState
from spark_bridge.stateful.variables.map_state import MapState
from spark_bridge.stateful.variables.step import CLOSED, KeyStep, StateFigures
from spark_bridge.stateful.variables.timers import Timers
from spark_bridge.stateful.variables.ttl import stage_expired
from spark_bridge.stateful.variables.value_state import ValueState
from spark_bridge.task.state_access import StateAccess


class ProcessorState:
    """The state variables and timers that a processor's ``handle`` declares and uses, over one partition's state.

    ``time_mode`` is "none", "processingtime" or "eventtime". Without ``store``, on the driver, the handle can only
    declare. With ``store``, the order of calls is: ``keys_with_expired_timers``; for each step ``begin``, for each key
    ``set_key``, then ``end``; at last ``finish``, and the store's commit.
    """

    def __init__(self, processor: object, key_schema: pa.Schema, time_mode: str, store: StateAccess | None) -> None:
        if time_mode not in TIME_MODES:
            raise InvalidOperatorError(f"time_mode={time_mode!r} is unknown: choose one of {', '.join(TIME_MODES)}.")
        self._processor = processor
        self._key_schema = key_schema
        self._time_mode = time_mode
        self._step = KeyStep(store)
        self._timers: Timers | None = None
        self.timer_values = TimerValues()
        if store is not None:
            self.timer_values = _timer_values(time_mode, store)
            if time_mode != NONE:
                self._timers = Timers(self._timers_variable(store), self._step, self._timers_due())
        self.handle = StatefulProcessorHandle(key_schema, time_mode, self._step, self._timers)
        self._is_swept = False

    def restart(self, store: StateAccess) -> None:
        """Go on with another micro-batch and the variables that ``init`` has declared; a task has a single batch."""
        self._step.restart(store)
        self.timer_values = _timer_values(self._time_mode, store)
        self._is_swept = False
        if self._time_mode != NONE:
            self._timers = self._timers or Timers(self._timers_variable(store), self._step, 0)
            self._timers.until_ms = self._timers_due()
            self.handle._timers = self._timers

    @property
    def figures(self) -> StateFigures:
        """Return the counts of rows written and removed so far."""
        return self._step.figures

    @property
    def states(self) -> dict[str, ValueState | ListState | MapState]:
        """Return the state variables that ``init`` has declared, by name."""
        return self.handle._all_declared().states

    def declare(self) -> tuple[StateVariable, ...]:
        """Return the variables that ``init`` has declared, those to delete first, and with a time mode the timers."""
        timers = [] if self._time_mode == NONE else [timers_variable(self._key_schema)]
        return (*self.handle._all_declared().variables, *timers)

    def keys_with_expired_timers(self) -> pa.BinaryArray:
        """Return the grouping keys that have a stored timer that fires now, sorted; called before ``begin``."""
        return self._timers.keys_with_expired() if self._timers is not None else pa.array([], pa.binary())

    def begin(self, keys: pa.BinaryArray, key_rows: pa.RecordBatch) -> None:
        """Begin a step of the next keys, which are sorted, distinct, and after the keys of all earlier steps."""
        step = self._step
        self._start_sweep()
        step.begin(keys)
        for state in self.states.values():
            state._begin()
        if self._timers is not None:
            self._timers.begin()

    def set_key(self, i: int) -> None:
        """Make the step's key number ``i`` the current one."""
        self._step.index = i

    def expired_timers(self) -> list[int]:
        """Return the current key's timers that fire in this batch, ascending, those set in this batch included."""
        return self._timers.expired() if self._timers is not None else []

    def end(self) -> None:
        """Stage the step's changes; raises ``IllegalStateValueError`` for a value out of its type's range."""
        for state in self.states.values():
            state._end()
        if self._timers is not None:
            self._timers.end()
        self._step.begin(pa.array([], pa.binary()))

    def finish(self) -> None:
        """End the use of state. If there was no step, stage the sweep of expired and deleted state (see ``ttl``)."""
        self._start_sweep()
        self._step.index = CLOSED

    def _start_sweep(self) -> None:
        """Stage the sweep, once and before all other changes: of two changes of a key, the later one counts."""
        if not self._is_swept:
            self.handle._check_declared()
            stage_expired(self._step)
            self._is_swept = True

    def _timers_due(self) -> int:
        times = self._step.store.times
        return times.watermark_ms if self._time_mode == EVENT_TIME else times.timestamp_ms

    def _timers_variable(self, store: StateAccess) -> StateVariable:
        timers = store.schema.timers
        if timers is None:
            raise StateDeclarationError("There are no timers: the operator was started without a time mode.")
        return timers


def _timer_values(time_mode: str, store: StateAccess) -> TimerValues:
    times = store.times
    if time_mode == NONE:
        return TimerValues()
    return TimerValues(times.timestamp_ms, times.watermark_ms)
