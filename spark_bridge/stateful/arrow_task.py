"""The work of a processor in columns in a state task: one call for many keys, with their rows, state and timers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from backends.encoding.keys import decode_keys
from backends.encoding.schema import StateSchema
from spark_bridge.exceptions import StatefulProcessorError
from spark_bridge.state_format.layouts import TTL_COLUMN, family_of
from spark_bridge.stateful import stateful_processor
from spark_bridge.stateful.declaration import StateFigures
from spark_bridge.stateful.handle import StatefulProcessorHandle
from spark_bridge.stateful.process_task import OutputSink, ProcessorState, TaskInput, figures_of, started
from spark_bridge.stateful.state_values import RowCodec
from spark_bridge.stateful.ttl import alive_at, expiry_at
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.external_sort import Limits, RowSorter, RowStep, with_keys
from spark_bridge.task.keyed_rows import one_batch
from spark_bridge.task.state_task import EventTime
from spark_bridge.task.task_store import Spool, StateAccess

# Checks of the answers of a processor in columns: tables against schemas, masks against the number of keys.


def aligned(result: stateful_processor.Columns, schema: pa.Schema, what: str) -> pa.Table:
    """Return a table with the columns of the schema; raises ``StatefulProcessorError`` naming a mismatch."""
    if not isinstance(result, (pa.Table, pa.RecordBatch)):
        raise StatefulProcessorError(
            f"The processor returned a {type(result).__name__} for its {what}: return a table."
        )
    if sorted(result.schema.names) != sorted(schema.names):
        raise StatefulProcessorError(
            f"The processor's {what} has the columns {', '.join(result.schema.names) or '(none)'}; its schema has "
            f"{', '.join(schema.names)}."
        )
    table = result if isinstance(result, pa.Table) else pa.Table.from_batches([result])
    columns = []
    for f in schema:
        column = table.column(f.name)
        try:
            column = column if column.type == f.type else column.cast(f.type)
        except pa.ArrowException as error:
            raise StatefulProcessorError(
                f"Column {f.name!r} of the processor's {what} is of type {column.type}, not {f.type}, and cannot be "
                f"cast: {error}"
            ) from error
        if column.null_count and not f.nullable:
            raise StatefulProcessorError(
                f"Column {f.name!r} of the processor's {what} is declared not nullable, but has "
                f"{column.null_count} nulls."
            )
        columns.append(column)
    return pa.table(columns, schema=schema)


def flags_of(mask: stateful_processor.KeyMask | None, n: int, what: str, *, default: bool) -> stateful_processor.Flags:
    """Return a mask of n keys that the processor gave, or ``default`` for all; raises ``StatefulProcessorError``."""
    if mask is None:
        return np.full(n, default)
    if isinstance(mask, (pa.Array, pa.ChunkedArray)) and pa.types.is_boolean(mask.type):
        mask = mask.fill_null(False)
    flags = np.asarray(mask)
    if flags.dtype != np.bool_ or flags.shape != (n,):
        raise StatefulProcessorError(
            f"The processor gave {what}= with {flags.size} values of type {flags.dtype}: give {n} booleans, one per "
            "key."
        )
    return flags


# The declared state of a processor in columns: a row per key, read and written whole columns at a time.


@dataclass
class StateColumns:
    """The declared state of the keys of one step. ``family`` is None if no state is declared.

    ``keys`` are the stored keys of the step. ``rows`` has a row per key, of nulls where ``has_state`` is false.
    """

    store: StateAccess
    figures: StateFigures
    family: str | None = None
    schema: StateSchema = field(default_factory=lambda: StateSchema(pa.schema([]), pa.schema([])))
    ttl_ms: int | None = None
    keys: pa.BinaryArray = field(default_factory=lambda: pa.array([], pa.binary()))
    rows: pa.Table = field(default_factory=lambda: pa.table({}))
    has_state: stateful_processor.Flags = field(default_factory=lambda: np.zeros(0, np.bool_))

    @classmethod
    def of(cls, name: str | None, store: StateAccess, figures: StateFigures) -> StateColumns:
        """Return the columns of the state of that name (None: of no state)."""
        if name is None:
            return cls(store, figures)
        variable = store.schema.variable(name)
        return cls(store, figures, *family_of(variable), variable.ttl_ms)

    def begin(self, keys: pa.BinaryArray) -> None:
        self.keys = keys
        self.has_state = np.zeros(len(keys), np.bool_)
        if self.family is None:
            return
        stored = self.store.get_many(keys, self.family)
        rows = self.schema.decode_values(stored)
        is_stored = np.asarray(stored.is_valid())
        # Rows that have expired are removed by the sweep, see ``ttl``.
        is_alive = alive_at(rows, self.store.times.timestamp_ms) if self.ttl_ms is not None else True
        self.has_state = is_stored & is_alive
        names = [n for n in self.schema.value.names if n != TTL_COLUMN]
        self.rows = _blanked(pa.Table.from_batches([rows.select(names)]), is_stored & ~self.has_state)

    def apply(self, answer: stateful_processor.ArrowResult) -> None:
        """Stage the changes of an answer; raises ``StatefulProcessorError`` for an answer that does not fit."""
        if self.family is None:
            if answer.state is not None or answer.removed is not None:
                raise StatefulProcessorError(
                    "The processor gave state, but has declared none: call handle.declare_state in init()."
                )
            return
        n = len(self.keys)
        removed = flags_of(answer.removed, n, "removed", default=False)
        if answer.state is not None:
            if answer.state.num_rows != n:
                raise StatefulProcessorError(
                    f"The processor returned {answer.state.num_rows} rows of state for {n} keys: return one for each, "
                    "in the order of batch.keys; updated= selects those to write."
                )
            written = flags_of(answer.updated, n, "updated", default=True) & ~removed
            self._write(aligned(answer.state, self.rows.schema, "state"), written)
        if removed.any():
            keys = self.keys.filter(pa.array(removed))
            self.store.stage(keys, pa.nulls(len(keys), pa.binary()), self.family)
            self.figures.num_rows_removed += int((removed & self.has_state).sum())
            self.rows = _blanked(self.rows, removed)
            self.has_state = self.has_state & ~removed

    def _write(self, new: pa.Table, written: stateful_processor.Flags) -> None:
        n, keys, rows = len(self.keys), self.keys, new
        if self.ttl_ms is not None:
            expiry = expiry_at(self.store.times.timestamp_ms, self.ttl_ms)
            rows = rows.append_column(TTL_COLUMN, pa.array(np.full(n, expiry, np.int64)))
        if not written.all():
            chosen = pa.array(written)
            keys, rows = keys.filter(chosen), rows.filter(chosen)
            places = np.where(written, np.arange(n, 2 * n), np.arange(n))
            new = pa.concat_tables([self.rows, new]).take(pa.array(places))
        if len(keys):
            assert self.family is not None
            self.store.stage(keys, self.schema.encode_values(one_batch(rows.to_batches())), self.family)
        self.figures.num_rows_updated += len(keys)
        self.rows, self.has_state = new, self.has_state | written


def _blanked(rows: pa.Table, which: stateful_processor.Flags) -> pa.Table:
    """Return the rows, with nulls in those that ``which`` marks."""
    return rows.take(pa.array(np.arange(rows.num_rows), mask=which)) if which.any() else rows


TIMED_KEYS = 1 << 18
"""The most keys without rows but with an expired timer in one call."""


@dataclass
class Declaring:
    """A processor in columns in the form that ``ProcessorState`` takes; ``state`` is the name of the declared state."""

    processor: stateful_processor.ArrowStatefulProcessor
    state: str | None = None

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Let the processor declare its state."""
        own = stateful_processor.ArrowStatefulProcessorHandle(handle)
        self.processor.init(own)
        self.state = own.declared

    def close(self) -> None:
        self.processor.close()


@dataclass(frozen=True)
class ArrowLogic:
    """The logic of an operator with a processor in columns; ``ProcessLogic`` explains fields of the same names.

    ``rows`` is the schema of the rows. ``is_initial`` marks them as the rows of an initial state.
    """

    processor: stateful_processor.ArrowStatefulProcessor
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
            expired = _expired_timers(state, step.keys[:0] if step.is_part else step.keys, due)
            answer = self._answer(
                stateful_processor.ArrowBatch(
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

    def _answer(self, batch: stateful_processor.ArrowBatch) -> stateful_processor.ArrowResult:
        answer = (self.processor.handle_initial_state if self.is_initial else self.processor.process)(batch)
        if answer is None:
            return stateful_processor.ArrowResult()
        if isinstance(answer, (pa.Table, pa.RecordBatch)):
            answer = stateful_processor.ArrowResult(output=answer)
        if not isinstance(answer, stateful_processor.ArrowResult):
            raise StatefulProcessorError(
                f"{type(self.processor).__name__} returned a {type(answer).__name__}: return an ArrowResult, a "
                "table (output alone) or None."
            )
        if self.is_initial and answer.output is not None:
            raise StatefulProcessorError("An initial state has no output: leave output= out.")
        return answer


def _expired_timers(state: ProcessorState, keys: pa.BinaryArray, due: pa.BinaryArray) -> pa.Table:
    """Return the timers of ``keys`` that fire in this batch, as in ``TIMERS_SCHEMA``; ``due`` are all such keys."""
    indices: list[int] = []
    expiries: list[int] = []
    for i in np.flatnonzero(np.asarray(pc.is_in(keys, value_set=due))).tolist():
        state.set_key(i)
        timers = state.expired_timers()
        indices += [i] * len(timers)
        expiries += timers
    columns = [pa.array(values, pa.int64()) for values in (indices, expiries)]
    return pa.table(columns, schema=stateful_processor.TIMERS_SCHEMA)


def _each_timer(
    state: ProcessorState, timers: stateful_processor.Columns | None, num_keys: int, apply: Callable[[int], None]
) -> None:
    """Apply a function to the expiry of each timer while its key is the current key."""
    if timers is None:
        return
    table = aligned(timers, stateful_processor.TIMERS_SCHEMA, "timers")
    indices, expiries = (c.to_pylist() for c in table.columns)
    for i, expiry in zip(indices, expiries, strict=True):
        if i is None or expiry is None or not 0 <= i < num_keys:
            raise StatefulProcessorError(
                f"The processor gave a timer with key_index={i} and expiry_ms={expiry}: key_index is the number of one "
                f"of the {num_keys} keys, expiry_ms a time in ms since 1970."
            )
        state.set_key(i)
        apply(expiry)
