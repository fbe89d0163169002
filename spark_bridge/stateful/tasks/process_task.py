"""The work of a processor of rows or DataFrames in a state task: one call for each key.

The order is that of PySpark's ``transformWithState``: the rows of a key, then the key's expired timers. The output of a
call is taken to its end before the next call.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, TypeAlias

import pyarrow as pa
from pyspark.sql.types import StructType

from backends.encoding.keys import decode_keys
from coordinator_actor.messages import OperatorFigures
from spark_bridge.operators.conf import NO_LIMIT
from spark_bridge.stateful.stateful_processor import ExpiredTimerInfo
from spark_bridge.stateful.tasks.processor_output import OutputFrames, OutputRows, OutputSink
from spark_bridge.stateful.tasks.processor_state import ProcessorState
from spark_bridge.stateful.tasks.task_input import TaskInput
from spark_bridge.stateful.values.pandas_values import PandasCodec, rows_of_frame
from spark_bridge.stateful.values.row_values import RowCodec
from spark_bridge.task.external_sort import Limits, RowSorter, RowStep, with_keys
from spark_bridge.task.output_spool import Spool
from spark_bridge.task.state_access import StateAccess
from spark_bridge.task.step_timer import StepTimer
from spark_bridge.task.watermark import EventTime

ROWS_PER_FRAME = 10_000
"""The most rows of a DataFrame for a processor: Spark's default of ``maxRecordsPerBatch``."""
Mode: TypeAlias = Literal["rows", "pandas"]
Taker: TypeAlias = Callable[[int, int], Iterator[Any]]
"""Yields the rows (as ``Row`` or DataFrames) from one number to another; called in order, each taken to its end."""


@dataclass(frozen=True)
class ProcessLogic:
    """The logic of an operator with a processor of rows (``pyspark.sql.Row``) or of pandas DataFrames.

    ``time_mode`` is one of ``handle.TIME_MODES``. ``event_time`` is the column of the output that must be after the
    watermark for late rows. ``time_zone`` is the session's, in which DataFrames have their timestamps. ``frame_rows``
    and ``frame_bytes`` are the most rows and bytes of a DataFrame that the processor is given, see ``frame_size``.
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

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        """Call the processor for all keys, commit, and yield its output."""
        times = store.times
        codec = RowCodec(self.output)
        sorting = RowSorter(self.input.keys, store.num_key_groups, self.limits)
        with sorting as sorter, Spool(codec.schema) as spool:
            num_late = self.input.read(batches, sorter, times.late_watermark_ms, timer)
            sink = OutputSink(spool, self.event_time, times.late_watermark_ms)
            output = (
                OutputRows(codec, sink)
                if self.mode == "rows"
                else OutputFrames(PandasCodec(self.output, self.time_zone), sink)
            )
            with started(self.processor, self.input.keys, self.time_mode, store) as state:
                self._process(state, sorter, output)
                state.finish()
            timer.step("process_ms")
            store.commit(figures_of(state, sorter.num_rows, num_late), timer.milliseconds)
            yield from spool.batches()

    def _process(self, state: ProcessorState, sorter: RowSorter, output: OutputRows | OutputFrames) -> None:
        processor, times = self.processor, state.timer_values

        def handle_rows(key: tuple[Any, ...], rows: Iterator[Any]) -> None:
            output.take(processor.handleInputRows(key, rows, times))

        def handle_timers(key: tuple[Any, ...]) -> None:
            for expiry in state.expired_timers():
                output.take(
                    processor.handleExpiredTimer(key=key, timerValues=times, expiredTimerInfo=ExpiredTimerInfo(expiry))
                )
                state.handle.deleteTimer(expiry)

        steps = sorter.steps()
        open_rows = opener(self.input, self.mode, self.time_zone, self.frame_rows, self.frame_bytes)
        if self.time_mode == "none":
            for_each_key(state, steps, self.input, open_rows, handle_rows)
        else:
            steps = with_keys(steps, state.keys_with_expired_timers(), self.limits.step_rows)
            for_each_key(state, steps, self.input, open_rows, handle_rows, handle_timers)
        output.flush()


@dataclass(frozen=True)
class InitialStateLogic:
    """The logic that makes an initial state: ``handleInitialState`` is called for each row or DataFrame."""

    processor: Any
    mode: Mode
    time_mode: str
    input: TaskInput
    time_zone: str = "UTC"
    limits: Limits = field(default_factory=Limits)
    frame_rows: int = ROWS_PER_FRAME
    frame_bytes: int = NO_LIMIT

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        """Call the processor for all rows, and commit; there is no output."""
        processor = self.processor
        with RowSorter(self.input.keys, store.num_key_groups, self.limits) as sorter:
            self.input.read(batches, sorter, 0, timer)
            with started(processor, self.input.keys, self.time_mode, store) as state:

                def handle_rows(key: tuple[Any, ...], rows: Iterator[Any]) -> None:
                    for row in rows:
                        processor.handleInitialState(key, row, state.timer_values)

                open_rows = opener(self.input, self.mode, self.time_zone, self.frame_rows, self.frame_bytes)
                for_each_key(state, sorter.steps(), self.input, open_rows, handle_rows)
                state.finish()
            timer.step("process_ms")
            store.commit(figures_of(state, sorter.num_rows, 0), timer.milliseconds)
        return iter(())


@contextmanager
def started(processor: Any, keys: pa.Schema, time_mode: str, store: StateAccess) -> Iterator[ProcessorState]:
    """Initialise a processor, and give its state; the processor is closed at the end, whatever happens."""
    state = ProcessorState(processor, keys, time_mode, store)
    processor.init(state.handle)
    try:
        with frozen():
            yield state
    finally:
        processor.close()


_frozen_by: Literal["nobody", "us", "others"] = "nobody"


@contextmanager
def frozen() -> Iterator[None]:
    """Keep the garbage collector from the objects that there are, unless somebody has frozen some already.

    Rows make many objects, for which the collector would visit the objects of all modules many times.
    """
    global _frozen_by
    is_ours = False
    # The interpreter counts frozen objects one by one: 10 ms for those of a worker process, so it counts them once.
    if _frozen_by == "nobody":
        is_ours = gc.get_freeze_count() == 0
        _frozen_by = "us" if is_ours else "others"
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()
            _frozen_by = "nobody"


def opener(
    given: TaskInput, mode: Mode, time_zone: str, frame_rows: int, frame_bytes: int
) -> Callable[[pa.RecordBatch], Taker]:
    """Return a function that gives Arrow rows the form in which a processor takes them."""

    def open_rows(rows: pa.RecordBatch) -> Taker:
        made = RowCodec(given.struct).iter_rows(rows)
        return lambda start, stop: islice(made, stop - start)

    def open_frames(rows: pa.RecordBatch) -> Taker:
        frame = PandasCodec(given.struct, time_zone).to_frame(rows)
        size = frame_size(rows, frame_rows, frame_bytes)
        return lambda start, stop: (rows_of_frame(frame, i, min(i + size, stop)) for i in range(start, stop, size))

    return open_rows if mode == "rows" else open_frames


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
    given: TaskInput,
    open_rows: Callable[[pa.RecordBatch], Taker],
    handle_rows: Callable[[tuple[Any, ...], Iterator[Any]], None],
    handle_timers: Callable[[tuple[Any, ...]], None] | None = None,
) -> None:
    """Go through the keys of all steps: for each key, handle its rows, if it has any, and then its timers."""
    key_codec = RowCodec(given.key_struct)
    for step in steps:
        key_rows = decode_keys(step.keys, given.keys)
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
    return OperatorFigures(
        num_rows=num_rows,
        num_rows_updated=state.figures.num_rows_updated,
        num_rows_removed=state.figures.num_rows_removed,
        num_rows_dropped_by_watermark=num_late,
        custom=state.figures.custom,
    )


def _all_parts(
    step: RowStep, take: Taker, steps: Iterator[RowStep], open_rows: Callable[[pa.RecordBatch], Taker]
) -> Iterator[Any]:
    """Yield the rows of a single key that go on in the next steps, and take these steps on the way."""
    yield from take(0, step.rows.num_rows)
    while step.is_part:
        step = next(steps)
        yield from open_rows(step.rows)(0, step.rows.num_rows)
