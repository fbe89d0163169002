"""The processor in columns: called once per partition and batch with all rows, their keys, and the keys' prior state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from backends.encoding.keys import decode_keys
from backends.encoding.schema import StateSchema
from backends.encoding.spark_types import to_spark_type
from backends.exceptions import StateStoreError
from spark_bridge.exceptions import StateDeclarationError, StatefulProcessorError
from spark_bridge.state_format.families import family_of
from spark_bridge.state_format.layouts import TTL_COLUMN
from spark_bridge.stateful.handle import StatefulProcessorHandle
from spark_bridge.stateful.process_task import figures_of, started
from spark_bridge.stateful.processor_output import OutputSink
from spark_bridge.stateful.processor_state import ProcessorState
from spark_bridge.stateful.row_values import RowCodec
from spark_bridge.stateful.stateful_processor import TimerValues
from spark_bridge.stateful.step import INT64_MAX, StateFigures
from spark_bridge.stateful.task_input import TaskInput
from spark_bridge.stateful.ttl import alive_at
from spark_bridge.task.sorted_runs import Limits, RowSorter, RowStep, with_keys
from spark_bridge.task.spool import Spool
from spark_bridge.task.state_access import StateAccess
from spark_bridge.task.state_task import StepTimer
from spark_bridge.task.watermark import EventTime

Columns: TypeAlias = pa.Table | pa.RecordBatch
Flags: TypeAlias = npt.NDArray[np.bool_]
Mask: TypeAlias = pa.BooleanArray | Flags

TIMED_KEYS = 1 << 18
"""Keys that have no rows but a timer that has expired, in one call."""
TIMERS_SCHEMA = pa.schema([("key_index", pa.int64()), ("expiry_ms", pa.int64())])
"""Timers: for which of the batch's keys, and when, in ms since 1970."""


@dataclass(frozen=True)
class ArrowBatch:
    """What a processor is given: m keys, their n rows, and what state they have.

    ``keys`` has the key columns, a row per key; keys without rows are those with a timer that has expired. ``rows``
    has all columns, sorted by key, a key's rows in the order of arrival: ``key_index`` (int64, one per row) is each row's
    key, and the rows of key i are ``offsets[i]`` to ``offsets[i + 1]``. ``state`` has a row per key, of nulls where
    ``has_state`` is false. ``expired_timers`` are those that fire now, as in ``TIMERS_SCHEMA``; they are deleted afterwards.
    """

    keys: pa.Table
    rows: pa.Table
    key_index: pa.Int64Array
    offsets: npt.NDArray[np.int64]
    state: pa.Table
    has_state: pa.BooleanArray
    expired_timers: pa.Table
    timer_values: TimerValues

    @property
    def num_keys(self) -> int:
        """The number of keys."""
        return int(self.keys.num_rows)


@dataclass(frozen=True)
class ArrowResult:
    """What a processor answers.

    ``output``: the rows to emit, in any number. ``state``: a row per key, in the order of the batch's keys; None leaves all
    as it is. Only keys in the mask ``updated`` are written (None: all); those in the mask ``removed`` lose their state.
    ``timers`` are set and ``deleted_timers`` deleted, as in ``TIMERS_SCHEMA``. Columns go by name.
    """

    output: Columns | None = None
    state: Columns | None = None
    updated: Mask | None = None
    removed: Mask | None = None
    timers: Columns | None = None
    deleted_timers: Columns | None = None


class ArrowStatefulProcessorHandle:
    """Declares, in ``init``, the state that a key has."""

    def __init__(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self.declared: str | None = None

    def declare_state(
        self, schema: StructType | pa.Schema | str, *, name: str = "state", ttl_ms: int | None = None
    ) -> None:
        """A row of ``schema`` (a StructType, an Arrow schema, or DDL text) per key; with ``ttl_ms``, for so long.

        It is kept as a value state of that name. Raises ``StateDeclarationError``.
        """
        if self.declared is not None:
            raise StateDeclarationError(
                f"State is declared twice, as {self.declared!r} and {name!r}: a processor in columns has one row of state "
                "per key, of as many columns as it likes."
            )
        self._handle.getValueState(name, _struct(schema), ttl_ms)
        self.declared = name

    def delete_if_exists(self, name: str) -> None:
        """Remove the state that an earlier form of the processor has declared by that name."""
        self._handle.deleteIfExists(name)


class ArrowStatefulProcessor(ABC):
    """The logic of ``transform_with_state_in_arrow``."""

    @abstractmethod
    def init(self, handle: ArrowStatefulProcessorHandle) -> None:
        """Declare the state, by ``handle.declare_state``; called before anything else."""

    @abstractmethod
    def process(self, batch: ArrowBatch) -> ArrowResult | Columns | None:
        """Handle the rows of many keys; an answer that is a table is output alone.

        Called once per partition and micro-batch. Where there are more rows than memory is allowed, it is called
        for some keys after the other; and if those of one key alone are more, for this key several times, each time
        with the state that it had left the last time, and with its expired timers at last.
        """

    def handle_initial_state(self, batch: ArrowBatch) -> ArrowResult | None:
        """Make state of initial rows, given as ``rows``; what it gives for output is refused."""
        raise NotImplementedError(
            f"{type(self).__name__} is given an initial state, but has no handle_initial_state(batch)."
        )

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release what ``init`` has acquired; called last."""


def arrow_processor(
    state: StructType | pa.Schema | str, *, name: str = "state", ttl_ms: int | None = None
) -> Callable[[Callable[[ArrowBatch], ArrowResult | Columns | None]], ArrowStatefulProcessor]:
    """Make a processor of a function of a batch: ``@arrow_processor("n long, total double")``."""

    def made(function: Callable[[ArrowBatch], ArrowResult | Columns | None]) -> ArrowStatefulProcessor:
        return _FunctionProcessor(function, state, name, ttl_ms)

    return made


@dataclass
class _FunctionProcessor(ArrowStatefulProcessor):
    function: Callable[[ArrowBatch], ArrowResult | Columns | None]
    state: StructType | pa.Schema | str
    name: str
    ttl_ms: int | None

    def init(self, handle: ArrowStatefulProcessorHandle) -> None:
        handle.declare_state(self.state, name=self.name, ttl_ms=self.ttl_ms)

    def process(self, batch: ArrowBatch) -> ArrowResult | Columns | None:
        return self.function(batch)


@dataclass
class Declaring:
    """A processor in columns as ``ProcessorState`` takes it: something that declares state variables."""

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
    """A processor in columns, for one operator. See ``ProcessLogic`` for the fields that have the same names.

    ``rows`` is the schema of the rows that it is given. ``is_initial``: it is given the rows of an initial state.
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
        """Call the processor for all keys, commit, and give its output."""
        times = store.times
        schema = RowCodec(self.output).schema
        # As many rows in one call as memory has.
        limits = replace(self.limits, step_rows=1 << 31, step_bytes=self.limits.memory)
        with RowSorter(self.input.keys, store.num_key_groups, limits) as sorter, Spool(schema) as spool:
            num_late = self.input.read(batches, sorter, times.late_watermark_ms, timer)
            sink = OutputSink(spool, self.event_time, times.late_watermark_ms)
            declaring = Declaring(self.processor)
            with started(declaring, self.input.keys, self.time_mode, store) as state:
                columns = _StateColumns.of(declaring.state, store, state.figures)
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
        columns: _StateColumns,
        due: pa.BinaryArray,
        sink: OutputSink,
    ) -> None:
        """One step; a key in several parts with all of them."""
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
                for part in _aligned(answer.output, RowCodec(self.output).schema, "output").to_batches():
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
                f"{type(self.processor).__name__} answered with a {type(answer).__name__}: give an ArrowResult, a table "
                "(output alone) or None."
            )
        if self.is_initial and answer.output is not None:
            raise StatefulProcessorError("An initial state has no output: give no output= for it.")
        return answer


@dataclass
class _StateColumns:
    """The declared state of a partition, columns at a time. ``family`` None: none is declared.

    ``rows`` are those of the keys at hand, of nulls where ``has_state`` is false.
    """

    store: StateAccess
    figures: StateFigures
    family: str | None = None
    schema: StateSchema = field(default_factory=lambda: StateSchema(pa.schema([]), pa.schema([])))
    ttl_ms: int | None = None
    keys: pa.BinaryArray = field(default_factory=lambda: pa.array([], pa.binary()))
    rows: pa.Table = field(default_factory=lambda: pa.table({}))
    has_state: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))

    @classmethod
    def of(cls, name: str | None, store: StateAccess, figures: StateFigures) -> _StateColumns:
        """The state of that name."""
        if name is None:
            return cls(store, figures)
        variable = store.schema.variable(name)
        return cls(store, figures, *family_of(variable), variable.ttl_ms)

    def begin(self, keys: pa.BinaryArray) -> None:
        """Read the state of the next keys."""
        self.keys = keys
        self.has_state = np.zeros(len(keys), np.bool_)
        if self.family is None:
            return
        stored = self.store.get_many(keys, self.family)
        rows = self.schema.decode_values(stored)
        is_stored = np.asarray(stored.is_valid())
        # What has expired is left to the sweep.
        is_alive = alive_at(rows, self.store.times.timestamp_ms) if self.ttl_ms is not None else True
        self.has_state = is_stored & is_alive
        names = [n for n in self.schema.value.names if n != TTL_COLUMN]
        self.rows = _blanked(pa.Table.from_batches([rows.select(names)]), is_stored & ~self.has_state)

    def apply(self, answer: ArrowResult) -> None:
        """Stage what the processor has changed; raises ``StatefulProcessorError`` for what does not fit."""
        if self.family is None:
            if answer.state is not None or answer.removed is not None:
                raise StatefulProcessorError(
                    "The processor gave state, but has declared none: call handle.declare_state in init()."
                )
            return
        n = len(self.keys)
        removed = _flags(answer.removed, n, "removed", default=False)
        if answer.state is not None:
            if answer.state.num_rows != n:
                raise StatefulProcessorError(
                    f"The processor gave {answer.state.num_rows} rows of state for {n} keys: give one for each, in the "
                    "order of batch.keys; updated= says which of them are to be written."
                )
            self._write(
                _aligned(answer.state, self.rows.schema, "state"),
                _flags(answer.updated, n, "updated", default=True) & ~removed,
            )
        if removed.any():
            keys = self.keys.filter(pa.array(removed))
            self.store.stage(keys, pa.nulls(len(keys), pa.binary()), self.family)
            self.figures.num_rows_removed += int((removed & self.has_state).sum())
            self.rows = _blanked(self.rows, removed)
            self.has_state = self.has_state & ~removed

    def _write(self, new: pa.Table, written: Flags) -> None:
        n, keys, rows = len(self.keys), self.keys, new
        if self.ttl_ms is not None:
            expiry = min(self.store.times.timestamp_ms + self.ttl_ms, INT64_MAX)
            rows = rows.append_column(TTL_COLUMN, pa.array(np.full(n, expiry, np.int64)))
        if not written.all():
            chosen = pa.array(written)
            keys, rows = keys.filter(chosen), rows.filter(chosen)
            places = np.where(written, np.arange(n, 2 * n), np.arange(n))
            new = pa.concat_tables([self.rows, new]).take(pa.array(places))
        if len(keys):
            (batch,) = rows.combine_chunks().to_batches()
            assert self.family is not None
            self.store.stage(keys, self.schema.encode_values(batch), self.family)
        self.figures.num_rows_updated += len(keys)
        self.rows, self.has_state = new, self.has_state | written


def _expired_timers(state: ProcessorState, keys: pa.BinaryArray, due: pa.BinaryArray) -> pa.Table:
    """The timers of the keys that fire now; ``due`` are all keys that have one."""
    indices: list[int] = []
    expiries: list[int] = []
    for i in np.flatnonzero(np.asarray(pc.is_in(keys, value_set=due))).tolist():
        state.set_key(i)
        found = state.expired_timers()
        indices += [i] * len(found)
        expiries += found
    return pa.table([pa.array(indices, pa.int64()), pa.array(expiries, pa.int64())], schema=TIMERS_SCHEMA)


def _each_timer(state: ProcessorState, timers: Columns | None, num_keys: int, apply: Callable[[int], None]) -> None:
    if timers is None:
        return
    table = _aligned(timers, TIMERS_SCHEMA, "timers")
    indices, expiries = (c.to_pylist() for c in table.columns)
    for i, expiry in zip(indices, expiries, strict=True):
        if i is None or expiry is None or not 0 <= i < num_keys:
            raise StatefulProcessorError(
                f"The processor gave a timer with key_index={i} and expiry_ms={expiry}: key_index is the number of one of "
                f"the {num_keys} keys, expiry_ms a time in ms since 1970."
            )
        state.set_key(i)
        apply(expiry)


def _aligned(given: Columns, schema: pa.Schema, what: str) -> pa.Table:
    """A table with the columns of the schema; raises ``StatefulProcessorError`` naming what does not fit."""
    if not isinstance(given, (pa.Table, pa.RecordBatch)):
        raise StatefulProcessorError(f"The processor gave a {type(given).__name__} for its {what}: give a table.")
    if sorted(given.schema.names) != sorted(schema.names):
        raise StatefulProcessorError(
            f"The processor's {what} has the columns {', '.join(given.schema.names) or '(none)'}; its schema has "
            f"{', '.join(schema.names)}."
        )
    table = given if isinstance(given, pa.Table) else pa.Table.from_batches([given])
    columns = []
    for f in schema:
        column = table.column(f.name)
        try:
            column = column if column.type == f.type else column.cast(f.type)
        except pa.ArrowException as error:
            raise StatefulProcessorError(
                f"Column {f.name!r} of the processor's {what} is of type {column.type}, not {f.type}, and cannot be cast: "
                f"{error}"
            ) from error
        if column.null_count and not f.nullable:
            raise StatefulProcessorError(
                f"Column {f.name!r} of the processor's {what} is declared not nullable, but has {column.null_count} nulls."
            )
        columns.append(column)
    return pa.table(columns, schema=schema)


def _flags(given: Mask | None, n: int, what: str, *, default: bool) -> Flags:
    """A mask of the processor's, or all ``default``."""
    if given is None:
        return np.full(n, default)
    if isinstance(given, (pa.Array, pa.ChunkedArray)) and pa.types.is_boolean(given.type):
        given = given.fill_null(False)
    flags = np.asarray(given)
    if flags.dtype != np.bool_ or flags.shape != (n,):
        raise StatefulProcessorError(
            f"The processor gave {what}= with {flags.size} values of type {flags.dtype}: give {n} booleans, one per key."
        )
    return flags


def _blanked(rows: pa.Table, which: Flags) -> pa.Table:
    """The rows with nulls for some of them."""
    return rows.take(pa.array(np.arange(rows.num_rows), mask=which)) if which.any() else rows


def _struct(schema: StructType | pa.Schema | str) -> StructType | str:
    if not isinstance(schema, pa.Schema):
        return schema
    try:
        fields = [
            {"name": f.name, "type": to_spark_type(f.name, f.type), "nullable": f.nullable, "metadata": {}}
            for f in schema
        ]
    except StateStoreError as error:
        raise StateDeclarationError(f"The schema of the state cannot be kept: {error}") from error
    return StructType.fromJson({"type": "struct", "fields": fields})
