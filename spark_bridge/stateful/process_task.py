"""The work of a processor of rows or DataFrames in a state task: one call for each key.

The order is that of PySpark's ``transformWithState``: the rows of a key, then the key's expired timers. The output of a
call is taken to its end before the next call.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from types import GeneratorType
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType

from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import StateVariable
from backends.encoding.user_values import is_missing, python_value
from coordinator_actor.messages import OperatorFigures
from spark_bridge.exceptions import InvalidOperatorError, StateDeclarationError, StatefulProcessorError
from spark_bridge.operators.map_in_arrow import NO_LIMIT
from spark_bridge.state_format.layouts import timers_variable
from spark_bridge.stateful.declaration import CLOSED, KeyStep, StateFigures
from spark_bridge.stateful.handle import EVENT_TIME, NONE, TIME_MODES, StatefulProcessorHandle, Timers, ValueState
from spark_bridge.stateful.list_state import ListState
from spark_bridge.stateful.map_state import MapState
from spark_bridge.stateful.pandas_values import FrameColumns, PandasCodec, rows_of_frame
from spark_bridge.stateful.state_values import RowCodec, shown
from spark_bridge.stateful.stateful_processor import ExpiredTimerInfo, TimerValues
from spark_bridge.stateful.ttl import stage_expired
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.external_sort import Limits, RowSorter, RowStep, with_keys
from spark_bridge.task.state_task import EventTime, late_rows_removed
from spark_bridge.task.task_store import Spool, StateAccess

# The output of a processor: checked against the declared schema, and made into Arrow batches.


ROWS_AT_ONCE = 1 << 14
"""Rows that are made into one batch, about."""


@dataclass
class OutputRows:
    """The output of a processor of rows: ``Row``s, whose fields go by name, or tuples, whose fields go by position."""

    codec: RowCodec
    sink: OutputSink
    _rows: list[Any] = field(default_factory=list)

    def take(self, result: Any) -> None:
        """Take all rows that a method of the processor has returned."""
        rows = result if type(result) is GeneratorType else _iterator(result, "Rows")
        if self._is_mutable:
            rows = map(detached, rows)
        self._rows.extend(islice(rows, ROWS_AT_ONCE))
        while len(self._rows) >= ROWS_AT_ONCE:
            self.flush()
            self._rows.extend(islice(rows, ROWS_AT_ONCE))

    @cached_property
    def _is_mutable(self) -> bool:
        """Return whether a row has values that the processor may change after it has given the row."""
        kinds = (ArrayType, MapType, StructType, BinaryType)
        return any(isinstance(f.dataType, kinds) for f in self.codec.struct.fields)

    def flush(self) -> None:
        """Yield the rows to the sink; raises ``StatefulProcessorError`` for rows that do not fit the schema."""
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        try:
            batch = self.codec.to_batch(_by_position(rows, self.codec.struct.names))
        except (TypeError, ValueError) as error:
            raise _mismatch(self.codec.struct, error) from error
        self.sink.add(batch)


@dataclass
class OutputFrames:
    """The output of a processor of pandas DataFrames."""

    codec: PandasCodec
    sink: OutputSink
    _frames: list[FrameColumns] = field(default_factory=list)
    _num_rows: int = 0

    def take(self, result: Any) -> None:
        """Take all DataFrames that a method of the processor has returned; raises ``StatefulProcessorError``."""
        for frame in result if type(result) is GeneratorType else _iterator(result, "pandas DataFrames"):
            if not isinstance(frame, pd.DataFrame):
                raise StatefulProcessorError(
                    f"The processor gave {shown(frame)} ({type(frame).__name__}) for output: give pandas DataFrames."
                )
            try:
                columns = self.codec.to_columns(frame)
            except ValueError as error:
                raise _mismatch(self.codec.struct, error) from error
            if len(columns) and len(columns[0]):
                self._frames.append(columns)
                self._num_rows += len(columns[0])
            if self._num_rows >= ROWS_AT_ONCE:
                self.flush()

    def flush(self) -> None:
        """Yield the rows to the sink; raises ``StatefulProcessorError`` for rows that do not fit the schema."""
        if not self._frames:
            return
        frames, self._frames, self._num_rows = self._frames, [], 0
        try:
            batch = self.codec.to_batch(frames)
        except (TypeError, ValueError) as error:
            raise _mismatch(self.codec.struct, error) from error
        self.sink.add(batch)


@dataclass(frozen=True)
class OutputSink:
    """Takes batches into the spool; no row's ``event_time`` may be late (at or before ``late_watermark_ms``)."""

    spool: Spool
    event_time: EventTime | None
    late_watermark_ms: int

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch; raises ``StatefulProcessorError`` if one of its rows is late."""
        if self.event_time is not None:
            is_late = self.event_time.is_done(batch, self.late_watermark_ms)
            if is_late.any():
                name = self.event_time.column
                late = python_value(batch.column(name).filter(pa.array(is_late))[0])
                raise StatefulProcessorError(
                    f"[EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED] The processor gave a row with {name}={late}, "
                    f"which is not after the watermark, {self.late_watermark_ms} ms since 1970: whatever follows would "
                    "take it for late. Give it a later event time, or leave event_time_column out."
                )
        self.spool.add(batch)


def _iterator(result: Any, what: str) -> Iterator[Any]:
    if result is None:
        return iter(())
    if isinstance(result, (tuple, str, bytes, dict, pd.DataFrame)) or not hasattr(result, "__iter__"):
        raise StatefulProcessorError(
            f"The processor returned {shown(result)} ({type(result).__name__}): return an iterator of {what}, for "
            "instance by yield."
        )
    return iter(result)


def detached(value: Any) -> Any:
    """Return the value with copies of all that can be changed in it, and with None for NaT and NA."""
    if isinstance(value, tuple):
        copy: Any = tuple.__new__(type(value), map(detached, value))
        if isinstance(value, Row) and "__fields__" in value.__dict__:
            copy.__fields__ = value.__fields__
        return copy
    if isinstance(value, list):
        return list(map(detached, value))
    if isinstance(value, dict):
        return {k: detached(v) for k, v in value.items()}
    if isinstance(value, (bytearray, np.ndarray)):
        return value.copy()
    return None if is_missing(value) else value


def _by_position(rows: list[Any], names: list[str]) -> Sequence[Sequence[Any]]:
    """Return the rows with their values in the order of ``names``; raises ``TypeError`` or ``ValueError``."""
    kinds = set(map(type, rows))
    for kind in kinds:
        if not issubclass(kind, (tuple, list)):
            wrong = next(r for r in rows if type(r) is kind)
            raise TypeError(f"{shown(wrong)} ({kind.__name__}) is not a Row.")
    if not any(issubclass(kind, Row) for kind in kinds):
        return rows
    last_fields: object = None
    places: list[int] | None = None
    for i, row in enumerate(rows):
        fields = getattr(row, "__fields__", names)
        # Rows of one maker, Row("a", "b"), share the object that names their fields.
        if fields is not last_fields:
            last_fields, places = fields, None if fields == names else _places(row, fields, names)
        if places is None:
            continue
        try:
            rows[i] = tuple([tuple.__getitem__(row, place) for place in places])
        except IndexError as error:
            raise ValueError(f"{shown(tuple(row))} has {len(row)} values for {', '.join(fields)}.") from error
    return rows


def _places(row: Any, own_fields: Sequence[str], names: list[str]) -> list[int] | None:
    """Return the positions of the fields ``names`` in a row, None if in their order; raises ``ValueError``."""
    fields = list(own_fields)
    if fields == names:
        return None
    if not set(names) <= set(fields):  # further fields are left out, as by Spark
        raise ValueError(f"{shown(row)} has the fields {', '.join(fields)}.")
    return [fields.index(name) for name in names]


def _mismatch(struct: StructType, error: Exception) -> StatefulProcessorError:
    return StatefulProcessorError(f"The processor's output does not fit its schema, {struct.simpleString()}: {error}")


# The state of one processor in one task: its variables, timers and TTL, in steps of sorted keys.
#
# The state of a step's keys is read when it is first asked for, for all keys at once. Changes are staged at the end
# of the step, whole columns at a time.


class ProcessorState:
    """The state variables and timers that a processor's ``handle`` declares and uses, over one partition's state.

    ``time_mode`` is "none", "processingtime" or "eventtime". Without ``store``, on the driver, the handle can only
    declare. With ``store``, the order of calls is: ``keys_with_expired_timers``; for each step ``begin``, for each key
    ``set_key``, then ``end``; at last ``finish``, and the store's commit.
    """

    def __init__(self, key_schema: pa.Schema, time_mode: str, store: StateAccess | None) -> None:
        if time_mode not in TIME_MODES:
            raise InvalidOperatorError(f"time_mode={time_mode!r} is unknown: choose one of {', '.join(TIME_MODES)}.")
        self._key_schema = key_schema
        self._time_mode = time_mode
        self._step = KeyStep(store)
        self._timers: Timers | None = None
        self.timer_values = TimerValues()
        if store is not None:
            self.timer_values = self._batch_times(store)
            if time_mode != NONE:
                self._timers = Timers(self._timers_variable(store), self._step, self._timers_due())
        self.handle = StatefulProcessorHandle(key_schema, time_mode, self._step, self._timers)
        self._is_swept = False

    def restart(self, store: StateAccess) -> None:
        """Move to another micro-batch and the variables that ``init`` has declared; a task has a single batch."""
        self._step.restart(store)
        self.timer_values = self._batch_times(store)
        self._is_swept = False
        if self._time_mode != NONE:
            self._timers = self._timers or Timers(self._timers_variable(store), self._step, 0)
            self._timers.until_ms = self._timers_due()
            self.handle._timers = self._timers

    @property
    def figures(self) -> StateFigures:
        return self._step.figures

    @property
    def states(self) -> dict[str, ValueState | ListState | MapState]:
        return self.handle._states

    def declare(self) -> tuple[StateVariable, ...]:
        """Return the variables that ``init`` has declared, those to delete first, and with a time mode the timers."""
        timers = [] if self._time_mode == NONE else [timers_variable(self._key_schema)]
        return (*self.handle._deleted.values(), *self.handle._variables.values(), *timers)

    def keys_with_expired_timers(self) -> pa.BinaryArray:
        """Return the grouping keys that have a stored timer that fires now, sorted; called before ``begin``."""
        return self._timers.keys_with_expired() if self._timers is not None else pa.array([], pa.binary())

    def begin(self, keys: pa.BinaryArray, key_rows: pa.RecordBatch) -> None:
        """Begin a step of the next keys, which are sorted, distinct, and after the keys of all earlier steps."""
        self._start_sweep()
        self._step.begin(keys)
        for state in self.states.values():
            state._begin()
        if self._timers is not None:
            self._timers.begin()

    def set_key(self, i: int) -> None:
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

    def _batch_times(self, store: StateAccess) -> TimerValues:
        times = store.times
        return TimerValues() if self._time_mode == NONE else TimerValues(times.timestamp_ms, times.watermark_ms)

    def _timers_due(self) -> int:
        times = self._step.store.times
        return times.watermark_ms if self._time_mode == EVENT_TIME else times.timestamp_ms

    def _timers_variable(self, store: StateAccess) -> StateVariable:
        timers = store.schema.timers
        if timers is None:
            raise StateDeclarationError("Timers are unavailable: the operator was started without a time mode.")
        return timers


# The input of a processor's task: the columns of the rows, the key among them, and which rows are late.


@dataclass(frozen=True)
class TaskInput:
    """The columns of the rows (``struct``) and of the key (``keys``).

    Rows that are late by ``event_time`` are dropped; None: no row is late.
    """

    struct: StructType
    keys: pa.Schema
    event_time: EventTime | None = None

    def read(
        self, batches: Iterable[pa.RecordBatch], sorter: RowSorter, late_watermark_ms: int, timer: StepTimer
    ) -> int:
        """Yield all rows that are not late to the sorter; return the number of late rows."""
        num_late = 0
        timer.restart()
        for batch in batches:
            timer.step("input_wait")
            rows, late = late_rows_removed(batch, self.event_time, late_watermark_ms)
            num_late += late
            sorter.add(rows)
            timer.step("sort_ms")
        timer.step("input_wait")
        return num_late


ROWS_PER_FRAME = 10_000
"""The most rows of a DataFrame for a processor: Spark's default of ``maxRecordsPerBatch``."""
Mode: TypeAlias = Literal["rows", "pandas"]
Taker: TypeAlias = Callable[[int, int], Iterator[Any]]
"""Yields the rows (as ``Row`` or DataFrames) from one number to another; called in order, each taken to its end."""


@dataclass(frozen=True)
class ProcessLogic:
    """The logic of an operator with a processor of rows (``pyspark.sql.Row``) or of pandas DataFrames.

    ``time_mode`` is one of ``handle.TIME_MODES``. ``event_time`` is the column of the output that must be after the
    watermark for late rows. ``time_zone`` is the session's; DataFrames have their timestamps in it. ``frame_rows``
    and ``frame_bytes`` are the most rows and bytes of a DataFrame for the processor, see ``frame_size``. With
    ``is_initial``, ``handleInitialState`` makes state of each row or DataFrame, and there is no output.
    """

    processor: Any
    mode: Mode
    time_mode: str
    input: TaskInput
    output: StructType
    event_time: EventTime | None = None
    time_zone: str = "UTC"
    limits: Limits = field(default_factory=Limits)
    frame_rows: int = ROWS_PER_FRAME
    frame_bytes: int = NO_LIMIT
    is_initial: bool = False

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        times = store.times
        codec = RowCodec(self.output)
        sorting = RowSorter(self.input.keys, store.num_key_groups, self.limits)
        with sorting as sorter, Spool(codec.schema) as spool:
            num_late = self.input.read(batches, sorter, times.late_watermark_ms, timer)
            sink = OutputSink(spool, self.event_time, times.late_watermark_ms)
            output: OutputRows | OutputFrames = OutputRows(codec, sink)
            if self.mode == "pandas":
                output = OutputFrames(PandasCodec(self.output, self.time_zone), sink)
            with started(self.processor, self.input.keys, self.time_mode, store) as state:
                self._process(state, sorter, output)
                state.finish()
            timer.step("process_ms")
            store.commit(figures_of(state, sorter.num_rows, num_late), timer.milliseconds)
            yield from spool.batches()

    def _process(self, state: ProcessorState, sorter: RowSorter, output: OutputRows | OutputFrames) -> None:
        processor, times = self.processor, state.timer_values

        def handle_rows(key: tuple[Any, ...], rows: Iterator[Any]) -> None:
            if self.is_initial:
                for row in rows:
                    processor.handleInitialState(key, row, times)
            else:
                output.take(processor.handleInputRows(key, rows, times))

        def handle_timers(key: tuple[Any, ...]) -> None:
            for expiry in state.expired_timers():
                timer = ExpiredTimerInfo(expiry)
                output.take(processor.handleExpiredTimer(key=key, timerValues=times, expiredTimerInfo=timer))
                state.handle.deleteTimer(expiry)

        steps = sorter.steps()
        has_timers = self.time_mode != NONE and not self.is_initial
        if has_timers:
            steps = with_keys(steps, state.keys_with_expired_timers(), self.limits.step_rows)
        for_each_key(state, steps, self.input, self._opened, handle_rows, handle_timers if has_timers else None)
        output.flush()

    def _opened(self, rows: pa.RecordBatch) -> Taker:
        """Return what converts Arrow rows to the form that the processor takes."""
        if self.mode == "rows":
            rows_of_batch = RowCodec(self.input.struct).iter_rows(rows)
            return lambda start, stop: islice(rows_of_batch, stop - start)
        frame = PandasCodec(self.input.struct, self.time_zone).to_frame(rows)
        size = frame_size(rows, self.frame_rows, self.frame_bytes)
        return lambda start, stop: (rows_of_frame(frame, i, min(i + size, stop)) for i in range(start, stop, size))


@contextmanager
def started(processor: Any, keys: pa.Schema, time_mode: str, store: StateAccess) -> Iterator[ProcessorState]:
    """Initialise a processor, and yield its state; the processor is always closed at the end."""
    state = ProcessorState(keys, time_mode, store)
    processor.init(state.handle)
    try:
        with frozen():
            yield state
    finally:
        processor.close()


_frozen_by: Literal["nobody", "us", "others"] = "nobody"


@contextmanager
def frozen() -> Iterator[None]:
    """Freeze the existing objects for the garbage collector, unless some objects are frozen already.

    Rows make many objects, and the collector would visit the objects of all modules many times for them.
    """
    global _frozen_by
    # The interpreter counts frozen objects one by one: 10 ms for those of a worker process, so it counts them once.
    is_ours = _frozen_by == "nobody" and gc.get_freeze_count() == 0
    if is_ours:
        _frozen_by = "us"
        gc.freeze()
    elif _frozen_by == "nobody":
        _frozen_by = "others"
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()
            _frozen_by = "nobody"


def frame_size(rows: pa.RecordBatch, most_rows: int, most_bytes: int) -> int:
    """Return how many rows a DataFrame has: ``most_rows``, or fewer where these are likely to reach ``most_bytes``.

    As in PySpark, the rows count as of one size, and the row that reaches the limit is the last one of its DataFrame.
    """
    num_rows, num_bytes = int(rows.num_rows), int(rows.nbytes)
    if most_bytes == NO_LIMIT or not num_bytes:
        return most_rows
    return max(1, min(most_rows, -(-most_bytes * num_rows // num_bytes)))


def for_each_key(
    state: ProcessorState,
    steps: Iterator[RowStep],
    task_input: TaskInput,
    open_rows: Callable[[pa.RecordBatch], Taker],
    handle_rows: Callable[[tuple[Any, ...], Iterator[Any]], None],
    handle_timers: Callable[[tuple[Any, ...]], None] | None = None,
) -> None:
    """Go through the keys of all steps: for each key, handle its rows, if it has any, and then its timers."""
    key_codec = RowCodec(StructType([task_input.struct[name] for name in task_input.keys.names]))
    for step in steps:
        key_rows = decode_keys(step.keys, task_input.keys)
        state.begin(step.keys, key_rows)
        take = open_rows(step.rows) if step.rows.num_rows else None
        bounds = step.offsets.tolist()
        for i, key in enumerate(key_codec.to_tuples(key_rows)):
            state.set_key(i)
            start, stop = bounds[i], bounds[i + 1]
            if take is not None and start < stop:
                rows = _all_parts(step, take, steps, open_rows) if step.is_part else take(start, stop)
                handle_rows(key, rows)
                for _ in rows:
                    pass  # rows that the processor has not taken
            if handle_timers is not None:
                handle_timers(key)
        state.end()


def figures_of(state: ProcessorState, num_rows: int, num_late: int) -> OperatorFigures:
    """Return the figures of a task."""
    of = state.figures
    return OperatorFigures(num_rows, of.num_rows_updated, of.num_rows_removed, num_late, of.custom)


def _all_parts(
    step: RowStep, take: Taker, steps: Iterator[RowStep], open_rows: Callable[[pa.RecordBatch], Taker]
) -> Iterator[Any]:
    """Yield the rows of a single key that continue in the next steps, and take these steps on the way."""
    yield from take(0, step.rows.num_rows)
    while step.is_part:
        step = next(steps)
        yield from open_rows(step.rows)(0, step.rows.num_rows)
