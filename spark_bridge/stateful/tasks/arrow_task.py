"""The work of a processor in columns in a state task: one call for many keys, with their rows, state and timers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from backends.encoding.keys import decode_keys
from spark_bridge.exceptions import StatefulProcessorError
from spark_bridge.stateful.arrow_processor import (
    TIMERS_SCHEMA,
    ArrowBatch,
    ArrowResult,
    ArrowStatefulProcessor,
    ArrowStatefulProcessorHandle,
    Columns,
)
from spark_bridge.stateful.tasks.arrow_answers import aligned
from spark_bridge.stateful.tasks.arrow_state import StateColumns
from spark_bridge.stateful.tasks.process_task import figures_of, started
from spark_bridge.stateful.tasks.processor_output import OutputSink
from spark_bridge.stateful.tasks.processor_state import ProcessorState
from spark_bridge.stateful.tasks.task_input import TaskInput
from spark_bridge.stateful.values.row_values import RowCodec
from spark_bridge.stateful.variables.handle import StatefulProcessorHandle
from spark_bridge.task.external_sort import Limits, RowSorter, RowStep, with_keys
from spark_bridge.task.output_spool import Spool
from spark_bridge.task.state_access import StateAccess
from spark_bridge.task.step_timer import StepTimer
from spark_bridge.task.watermark import EventTime

TIMED_KEYS = 1 << 18
"""Keys without rows but with an expired timer that one call is given, at most."""


@dataclass
class Declaring:
    """A processor in columns in the form that ``ProcessorState`` takes; ``state`` is the name of the declared state."""

    processor: ArrowStatefulProcessor
    state: str | None = None

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Have the processor declare its state."""
        own = ArrowStatefulProcessorHandle(handle)
        self.processor.init(own)
        self.state = own.declared

    def close(self) -> None:
        """Close the processor."""
        self.processor.close()


@dataclass(frozen=True)
class ArrowLogic:
    """The logic of an operator with a processor in columns; ``ProcessLogic`` explains fields of the same names.

    ``rows`` is the schema of the rows. ``is_initial`` says that they are the rows of an initial state.
    """

    processor: ArrowStatefulProcessor
    time_mode: str
    input: TaskInput
    rows: pa.Schema
    output: StructType
    event_time: EventTime | None = None
    limits: Limits = field(default_factory=Limits)
    is_initial: bool = False

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        """Call the processor for all keys, commit, and yield its output."""
        times = store.times
        schema = RowCodec(self.output).schema
        # One call has as many rows as the task may hold in memory.
        limits = replace(self.limits, step_rows=1 << 31, step_bytes=self.limits.memory)
        with RowSorter(self.input.keys, store.num_key_groups, limits) as sorter, Spool(schema) as spool:
            num_late = self.input.read(batches, sorter, times.late_watermark_ms, timer)
            sink = OutputSink(spool, self.event_time, times.late_watermark_ms)
            declaring = Declaring(self.processor)
            with started(declaring, self.input.keys, self.time_mode, store) as state:
                columns = StateColumns.of(declaring.state, store, state.figures)
                due = pa.array([], pa.binary()) if self.is_initial else state.keys_with_expired_timers()
                steps = with_keys(sorter.steps(), due, TIMED_KEYS)
                for step in steps:
                    self._handle(step, steps, state, columns, due, sink)
                state.finish()
            timer.step("process_ms")
            store.commit(figures_of(state, sorter.num_rows, num_late), timer.milliseconds)
            yield from spool.batches()

    def _handle(
        self,
        step: RowStep,
        steps: Iterator[RowStep],
        state: ProcessorState,
        columns: StateColumns,
        due: pa.BinaryArray,
        sink: OutputSink,
    ) -> None:
        """Handle one step; if its key comes in several parts, all of them."""
        keys = decode_keys(step.keys, self.input.keys)
        state.begin(step.keys, keys)
        columns.begin(step.keys)
        while True:
            expired = _expired_timers(state, step.keys, due) if not step.is_part else TIMERS_SCHEMA.empty_table()
            answer = self._answer(
                ArrowBatch(
                    keys=pa.Table.from_batches([keys]),
                    rows=self._rows(step.rows),
                    key_index=pa.array(np.repeat(np.arange(len(step.keys), dtype=np.int64), np.diff(step.offsets))),
                    offsets=step.offsets,
                    state=columns.rows,
                    has_state=pa.array(columns.has_state),
                    expired_timers=expired,
                    timer_values=state.timer_values,
                )
            )
            if answer.output is not None:
                for part in aligned(answer.output, RowCodec(self.output).schema, "output").to_batches():
                    sink.add(part)
            columns.apply(answer)
            _each_timer(state, expired, len(step.keys), state.handle.deleteTimer)
            _each_timer(state, answer.deleted_timers, len(step.keys), state.handle.deleteTimer)
            _each_timer(state, answer.timers, len(step.keys), state.handle.registerTimer)
            if not step.is_part:
                break
            step = next(steps)
        state.end()

    def _rows(self, rows: pa.RecordBatch) -> pa.Table:
        if not rows.num_columns:
            return self.rows.empty_table()
        table = pa.Table.from_batches([rows])
        return table if table.schema.equals(self.rows) else table.cast(self.rows)

    def _answer(self, batch: ArrowBatch) -> ArrowResult:
        handle = self.processor.handle_initial_state if self.is_initial else self.processor.process
        answer = handle(batch)
        if answer is None:
            return ArrowResult()
        if isinstance(answer, (pa.Table, pa.RecordBatch)):
            answer = ArrowResult(output=answer)
        if not isinstance(answer, ArrowResult):
            raise StatefulProcessorError(
                f"{type(self.processor).__name__} answered with a {type(answer).__name__}: give an ArrowResult, a "
                "table (output alone) or None."
            )
        if self.is_initial and answer.output is not None:
            raise StatefulProcessorError("An initial state has no output: give no output= for it.")
        return answer


def _expired_timers(state: ProcessorState, keys: pa.BinaryArray, due: pa.BinaryArray) -> pa.Table:
    """Return the timers of ``keys`` that fire in this batch, as in ``TIMERS_SCHEMA``; ``due`` are all such keys."""
    indices: list[int] = []
    expiries: list[int] = []
    for i in np.flatnonzero(np.asarray(pc.is_in(keys, value_set=due))).tolist():
        state.set_key(i)
        found = state.expired_timers()
        indices += [i] * len(found)
        expiries += found
    return pa.table([pa.array(indices, pa.int64()), pa.array(expiries, pa.int64())], schema=TIMERS_SCHEMA)


def _each_timer(state: ProcessorState, timers: Columns | None, num_keys: int, apply: Callable[[int], None]) -> None:
    """Apply a function to the expiry of each timer while its key is the current key."""
    if timers is None:
        return
    table = aligned(timers, TIMERS_SCHEMA, "timers")
    indices, expiries = (c.to_pylist() for c in table.columns)
    for i, expiry in zip(indices, expiries, strict=True):
        if i is None or expiry is None or not 0 <= i < num_keys:
            raise StatefulProcessorError(
                f"The processor gave a timer with key_index={i} and expiry_ms={expiry}: key_index is the number of one "
                f"of the {num_keys} keys, expiry_ms a time in ms since 1970."
            )
        state.set_key(i)
        apply(expiry)
