"""``transform_with_state`` and its forms for DataFrames and tables: a processor's output as an ordinary streaming DataFrame."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from backends.exceptions import StateStoreError
from backends.operator_schema import OperatorSchema
from coordinator_actor.messages import OperatorSpec
from spark_bridge.aggregate_functions import arrow_type
from spark_bridge.event_time import WATERMARK_METADATA, EventTime
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.initial_state import InitialState
from spark_bridge.operator_input import (
    check_keys,
    columns_of,
    event_time_of,
    key_group_count,
    map_in_arrow,
    partition_count,
    routed,
    with_key_groups,
)
from spark_bridge.operators import check_operator_name, declare
from spark_bridge.partitioning import quote
from spark_bridge.state_task import Logic, StateTask
from spark_bridge.stateful.arrow_processor import ArrowLogic, ArrowStatefulProcessor, Declaring
from spark_bridge.stateful.ddl import struct_of
from spark_bridge.stateful.handle import EVENT_TIME, NONE, TIME_MODES
from spark_bridge.stateful.process_task import InitialStateLogic, Mode, ProcessLogic
from spark_bridge.stateful.processor_state import ProcessorState
from spark_bridge.stateful.row_values import RowCodec
from spark_bridge.stateful.stateful_processor import StatefulProcessor
from spark_bridge.stateful.task_input import TaskInput
from spark_bridge.ticks import with_ticks

log = logging.getLogger(__name__)

KIND = "transform_with_state"
TIME_ZONE_CONF = "spark.sql.session.timeZone"
_METHODS = ("init", "handleInputRows", "handleExpiredTimer", "handleInitialState", "close")


def transform_with_state(
    df: DataFrame,
    by: str | Sequence[str],
    processor: StatefulProcessor,
    output_schema: T.StructType | str,
    *,
    operator: str,
    output_mode: str = "update",
    time_mode: str = "none",
    initial_state: DataFrame | None = None,
    event_time_column: str | None = None,
    num_partitions: int | None = None,
) -> DataFrame:
    """Run a stateful processor over the rows of each key, and emit what it gives, rows of ``output_schema``.

    ``df`` is a streaming DataFrame, ``by`` its key column or columns (nulls are a key of their own), ``operator`` the name
    of this state in the checkpoint. ``processor`` has the interface of PySpark 4.2's ``StatefulProcessor``, and may be a
    subclass of that: it gets ``pyspark.sql.Row`` and gives rows or tuples. ``time_mode`` is "none", "processingTime" (for
    timers and TTL) or "eventTime" (for timers by the watermark; late rows are dropped); with either of these, a query runs a
    batch at every trigger, once a second at most, so that timers fire on a quiet stream. ``output_mode`` is "update" or
    "append"; it makes no difference here. ``event_time_column`` names a column of the output that carries event time on, to
    another operator behind this one: no row may be late by it.

    ``initial_state`` is a batch DataFrame with the key columns and any others; its rows are handed to ``handleInitialState``
    before the first batch, and no more when the query goes on. ``num_partitions`` is the number of state partitions, by
    default the session's ``spark.sql.shuffle.partitions``; a query may be restarted with another.

    Raises ``InvalidOperatorError`` and ``StateDeclarationError`` for what the DataFrame and ``processor.init`` show to be wrong.
    The counterpart in Spark is ``df.groupBy(by).transformWithState(...)``.
    """
    _check_processor(processor)
    given = _Operator.of(df, by, output_schema, operator, output_mode, time_mode, event_time_column, num_partitions)
    return given.rows_or_frames(processor, "rows", initial_state)


def transform_with_state_in_pandas(
    df: DataFrame,
    by: str | Sequence[str],
    processor: StatefulProcessor,
    output_schema: T.StructType | str,
    *,
    operator: str,
    output_mode: str = "update",
    time_mode: str = "none",
    initial_state: DataFrame | None = None,
    event_time_column: str | None = None,
    num_partitions: int | None = None,
) -> DataFrame:
    """As ``transform_with_state``, with pandas DataFrames of at most 10,000 rows in the place of rows.

    The counterpart in Spark is ``df.groupBy(by).transformWithStateInPandas(...)``.
    """
    _check_processor(processor)
    given = _Operator.of(df, by, output_schema, operator, output_mode, time_mode, event_time_column, num_partitions)
    return given.rows_or_frames(processor, "pandas", initial_state)


def transform_with_state_in_arrow(
    df: DataFrame,
    by: str | Sequence[str],
    processor: ArrowStatefulProcessor,
    output_schema: T.StructType | str,
    *,
    operator: str,
    output_mode: str = "update",
    time_mode: str = "none",
    initial_state: DataFrame | None = None,
    event_time_column: str | None = None,
    num_partitions: int | None = None,
) -> DataFrame:
    """As ``transform_with_state``, once per partition and batch with all its rows, keys and their state as Arrow tables.

    The processor is an ``ArrowStatefulProcessor``, or a function that ``arrow_processor`` has made one of. Much faster than the
    other forms, for nothing is done key by key.
    """
    if not isinstance(processor, ArrowStatefulProcessor):
        raise InvalidOperatorError(
            f"processor={processor!r} is no ArrowStatefulProcessor; subclass that, or decorate a function with "
            "@arrow_processor(<state schema>)."
        )
    given = _Operator.of(df, by, output_schema, operator, output_mode, time_mode, event_time_column, num_partitions)
    return given.tables(processor, initial_state)


@dataclass(frozen=True)
class _Operator:
    """The arguments that all forms share, checked."""

    df: DataFrame
    name: str
    keys: pa.Schema
    output: T.StructType
    time_mode: str
    input_time: EventTime | None
    output_time: EventTime | None
    key_groups: int
    num_partitions: int

    @classmethod
    def of(
        cls,
        df: DataFrame,
        by: str | Sequence[str],
        output_schema: T.StructType | str,
        name: str,
        output_mode: str,
        time_mode: str,
        event_time_column: str | None,
        num_partitions: int | None,
    ) -> _Operator:
        if not df.isStreaming:
            raise InvalidOperatorError(
                "transform_with_state takes a streaming DataFrame (spark.readStream); for a batch DataFrame use "
                "df.groupBy(...).applyInPandas(...)."
            )
        if output_mode not in ("update", "append"):
            raise InvalidOperatorError(
                f'output_mode={output_mode!r} is not supported by transform_with_state; use "update" or "append".'
            )
        mode = time_mode.lower() if isinstance(time_mode, str) else time_mode
        if mode not in TIME_MODES:
            raise InvalidOperatorError(
                f'[STATEFUL_PROCESSOR_UNKNOWN_TIME_MODE] time_mode={time_mode!r} is unknown; use "none", "processingTime" or '
                '"eventTime".'
            )
        check_operator_name(name, df)
        names = [by] if isinstance(by, str) else list(by)
        check_keys(df.schema, names)
        keys = pa.schema([pa.field(k, arrow_type(df.schema[k].dataType)) for k in names])
        # Spark lets rows be late only where the processor goes by event time.
        input_time = event_time_of(df.schema, df.columns) if mode == EVENT_TIME else None
        if mode == EVENT_TIME and input_time is None:
            log.warning("Operator %r goes by event time, but no column has a watermark: no timer of it will fire", name)
        output = struct_of(output_schema)
        key_groups = key_group_count(df)
        return cls(
            df if mode == NONE else with_ticks(df),
            name,
            keys,
            output,
            mode,
            input_time,
            None if event_time_column is None else _output_time(output, event_time_column),
            key_groups,
            partition_count(df, num_partitions, key_groups),
        )

    def rows_or_frames(self, processor: StatefulProcessor, mode: Mode, initial: DataFrame | None) -> DataFrame:
        """A processor that is called key by key."""
        zone = str(self.df.sparkSession.conf.get(TIME_ZONE_CONF, "UTC") or "UTC")
        logic = ProcessLogic(
            processor, mode, self.time_mode, self._input(self.df), self.output, self.output_time, time_zone=zone
        )
        begin = None
        if initial is not None:
            given = self._initial_input(initial)
            begin = InitialStateLogic(processor, mode, self.time_mode, given, time_zone=zone)
        return self._data_frame(processor, logic, initial, begin)

    def tables(self, processor: ArrowStatefulProcessor, initial: DataFrame | None) -> DataFrame:
        """A processor in columns."""

        def logic_for(given: TaskInput, *, is_initial: bool) -> ArrowLogic:
            rows = RowCodec(given.struct).schema
            return ArrowLogic(
                processor, self.time_mode, given, rows, self.output, self.output_time, is_initial=is_initial
            )

        logic = logic_for(self._input(self.df), is_initial=False)
        begin = None if initial is None else logic_for(self._initial_input(initial), is_initial=True)
        return self._data_frame(Declaring(processor), logic, initial, begin)

    def _input(self, df: DataFrame) -> TaskInput:
        return TaskInput(df.schema, self.keys, self.input_time)

    def _initial_input(self, initial: DataFrame) -> TaskInput:
        if initial.isStreaming:
            raise InvalidOperatorError(
                "initial_state= is a streaming DataFrame; give one of spark.read or createDataFrame."
            )
        check_keys(initial.schema, self.keys.names)
        for name in self.keys.names:
            here, there = initial.schema[name].dataType, self.df.schema[name].dataType
            if here != there:
                raise InvalidOperatorError(
                    f"Key column {name!r} of initial_state= has type {here.simpleString()}, and of the stream "
                    f"{there.simpleString()}; cast it."
                )
        return TaskInput(initial.schema, self.keys)

    def _data_frame(self, processor: Any, logic: Logic, initial: DataFrame | None, begin: Logic | None) -> DataFrame:
        state = ProcessorState(processor, self.keys, self.time_mode, None)
        processor.init(state.handle)
        variables = state.declare()
        processor.close()
        settings = {"time_mode": self.time_mode}
        try:
            schema = OperatorSchema(variables, settings=settings).to_json()
        except StateStoreError as error:
            raise InvalidOperatorError(f"Operator {self.name!r}: {error}") from error
        spec = OperatorSpec(self.name, self.num_partitions, schema, kind=KIND, uses_time=True)
        initial_state = None
        if initial is not None and begin is not None:
            initial_state = InitialState(self._routed(initial), begin)
        task = StateTask(self.name, self.num_partitions, logic)
        made = map_in_arrow(self._routed(self.df), task, declare(spec, initial_state), self.output)
        if self.output_time is None:
            return made
        name = self.output_time.column
        delay = self._delay()
        marked = F.col(quote(name)).alias(name, metadata={WATERMARK_METADATA: delay})
        return made.select(*[marked if c == name else column for c, column in self._columns(made)])

    def _routed(self, df: DataFrame) -> DataFrame:
        return routed(with_key_groups(df, self.keys.names, self.key_groups), self.num_partitions, self.key_groups)

    def _delay(self) -> int:
        metadata = [f.metadata or {} for f in self.df.schema.fields]
        return next((int(m[WATERMARK_METADATA]) for m in metadata if WATERMARK_METADATA in m), 0)

    @staticmethod
    def _columns(df: DataFrame) -> list[tuple[str, Any]]:
        return list(zip(df.columns, columns_of(df, df.columns), strict=True))


def _output_time(output: T.StructType, name: str) -> EventTime:
    if name not in output.names:
        raise InvalidOperatorError(
            f"event_time_column={name!r} is no column of the output, which has {', '.join(output.names)}."
        )
    kind = output[name].dataType
    if not isinstance(kind, T.TimestampType | T.TimestampNTZType | T.StructType):
        raise InvalidOperatorError(
            f"event_time_column={name!r} has type {kind.simpleString()}; event time is a timestamp, or a window."
        )
    return EventTime(name, isinstance(kind, T.StructType))


def _check_processor(processor: object) -> None:
    missing = [name for name in _METHODS if not callable(getattr(processor, name, None))]
    if isinstance(processor, type) or missing:
        what = (
            f"{processor.__name__} is a class: give an object of it"
            if isinstance(processor, type)
            else (f"{processor!r} has no {', '.join(missing)}: subclass StatefulProcessor")
        )
        raise InvalidOperatorError(f"processor={what}.")
