"""``transform_with_state``: a processor with state of its own by key, as an ordinary streaming DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, GroupedData
from pyspark.sql import types as T

from backends.encoding.column_names import RESERVED_PREFIX
from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import StateStoreError
from coordinator_actor.messages import OperatorSpec
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.conf import key_group_count, partition_count
from spark_bridge.operators.declared_operators import check_operator_name, declare
from spark_bridge.operators.initial_state import InitialState
from spark_bridge.operators.key_columns import check_keys
from spark_bridge.operators.map_in_arrow import map_in_arrow
from spark_bridge.operators.partitioning import routed
from spark_bridge.operators.spark_types import arrow_type
from spark_bridge.operators.ticks import with_ticks
from spark_bridge.operators.watermark_columns import event_time_of
from spark_bridge.stateful.arrow_processor import ArrowLogic, ArrowStatefulProcessor, Declaring
from spark_bridge.stateful.ddl import struct_of
from spark_bridge.stateful.handle import EVENT_TIME, NONE, TIME_MODES
from spark_bridge.stateful.process_task import InitialStateLogic, Mode, ProcessLogic
from spark_bridge.stateful.processor_state import ProcessorState
from spark_bridge.stateful.task_input import TaskInput
from spark_bridge.task.state_task import Logic, StateTask
from spark_bridge.task.watermark import WATERMARK_METADATA, EventTime

KIND = "transform_with_state"
OUTPUT_MODES = ("update", "append")
_METHODS = ("init", "handleInputRows", "handleExpiredTimer", "close")


def transform_with_state(
    df: DataFrame,
    by: str | Sequence[str],
    processor: Any,
    output_schema: T.StructType | str,
    *,
    operator: str,
    output_mode: str = "update",
    time_mode: str = "none",
    initial_state: DataFrame | None = None,
    event_time_column: str | None = None,
    num_partitions: int | None = None,
) -> DataFrame:
    """Run a processor of rows over a stream by key, with its state in the state store.

    ``df`` is a streaming DataFrame, ``by`` its key column or columns. ``processor`` is an instance of a subclass of
    ``StatefulProcessor`` (PySpark's own will do), which is given each key's rows as ``pyspark.sql.Row`` and gives rows of
    ``output_schema``, a StructType or DDL text. ``operator`` is the name of this state in the checkpoint and in queries.

    ``time_mode`` is "none", "processingTime" (timers and TTL by the batch's time) or "eventTime" (timers by the
    watermark, which ``df`` must have; late rows are dropped). With one, a batch runs at every trigger, rows or not.
    ``output_mode`` ("update" or "append") tells whoever reads the program whether rows replace earlier ones; both run alike.

    ``initial_state`` is a batch DataFrame with the key columns, whose rows ``handleInitialState`` makes state of before
    the first batch. ``event_time_column`` names the output column that is the event time for what follows; a row
    that is behind the watermark is then an error. ``num_partitions`` is the number of state partitions, by default the
    session's ``spark.sql.shuffle.partitions``; it stays with the checkpoint.

    Raises ``InvalidOperatorError`` for whatever the arguments show to be wrong. The counterpart in Spark 4 is
    ``df.groupBy(by).transformWithState(...)``.
    """
    given = _checked(df, by, output_schema, operator, output_mode, time_mode, initial_state, event_time_column)
    return _of_rows(given, processor, "rows", num_partitions)


def transform_with_state_in_pandas(
    df: DataFrame,
    by: str | Sequence[str],
    processor: Any,
    output_schema: T.StructType | str,
    *,
    operator: str,
    output_mode: str = "update",
    time_mode: str = "none",
    initial_state: DataFrame | None = None,
    event_time_column: str | None = None,
    num_partitions: int | None = None,
) -> DataFrame:
    """As ``transform_with_state``, with pandas DataFrames for rows: those given, those of the output, and initial state.

    The counterpart in Spark 4 is ``df.groupBy(by).transformWithStateInPandas(...)``.
    """
    given = _checked(df, by, output_schema, operator, output_mode, time_mode, initial_state, event_time_column)
    return _of_rows(given, processor, "pandas", num_partitions)


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
    """As ``transform_with_state``, with a processor in columns: the fast way where the work can be done by Arrow or numpy.

    ``processor`` is an ``ArrowStatefulProcessor``, or what ``@arrow_processor(state)`` makes of a function: called once
    per partition and batch with all rows, their keys and the keys' state.
    """
    given = _checked(df, by, output_schema, operator, output_mode, time_mode, initial_state, event_time_column)
    if not isinstance(processor, ArrowStatefulProcessor):
        raise InvalidOperatorError(
            f"processor={processor!r} is no instance of a subclass of ArrowStatefulProcessor; make one, or one of a function "
            'by @arrow_processor("n long, total double").'
        )
    rows = pa.schema([pa.field(f.name, arrow_type(f.dataType)) for f in df.schema.fields])
    logic = ArrowLogic(processor, given.time_mode, given.input, rows, given.output, given.event_time)
    initial = None
    if given.initial_rows is not None:
        struct = given.initial_rows.schema
        initial = replace(
            logic,
            input=TaskInput(struct, given.input.keys),
            rows=pa.schema([pa.field(f.name, arrow_type(f.dataType)) for f in struct.fields]),
            is_initial=True,
        )
    return _transformed(given, Declaring(_copy(processor)), logic, initial, num_partitions)


@dataclass(frozen=True)
class _Given:
    """The arguments that all forms have in common, checked. ``initial_rows`` are a batch DataFrame's."""

    df: DataFrame
    operator: str
    time_mode: str
    input: TaskInput
    output: T.StructType
    event_time: EventTime | None
    initial_rows: DataFrame | None


def _checked(
    df: DataFrame,
    by: str | Sequence[str],
    output_schema: T.StructType | str,
    operator: str,
    output_mode: str,
    time_mode: str,
    initial_state: DataFrame | GroupedData | None,
    event_time_column: str | None,
) -> _Given:
    if not df.isStreaming:
        raise InvalidOperatorError(
            "transform_with_state takes a streaming DataFrame (spark.readStream); a batch DataFrame has no state."
        )
    check_operator_name(operator, df)
    if not isinstance(output_mode, str) or output_mode.lower() not in OUTPUT_MODES:
        raise InvalidOperatorError(
            f"output_mode={output_mode!r} is none of a processor's: {', '.join(OUTPUT_MODES)}. It emits what it gives, "
            "and cannot know all its keys."
        )
    if not isinstance(time_mode, str) or time_mode.lower() not in TIME_MODES:
        raise InvalidOperatorError(
            f'time_mode={time_mode!r} is unknown: choose "none", "processingTime" or "eventTime".'
        )
    keys = [by] if isinstance(by, str) else list(by)
    _check_names(df.schema, "The DataFrame")
    check_keys(df.schema, keys)
    key_schema = pa.schema([pa.field(k, arrow_type(df.schema[k].dataType)) for k in keys])
    is_timed = time_mode.lower() == EVENT_TIME
    # Several columns with a watermark are an error only where one is to be used.
    marked = event_time_of(df.schema, df.columns) if is_timed or event_time_column is not None else None
    if is_timed and marked is None:
        raise InvalidOperatorError(
            f'time_mode="{time_mode}" needs event time: put withWatermark("column", "delay") on the DataFrame first.'
        )
    output, event_time = _struct(output_schema), None
    if event_time_column is not None:
        output = _with_event_time(output, event_time_column, df.schema, marked)
        event_time = EventTime(event_time_column)
    return _Given(
        df,
        operator,
        time_mode.lower(),
        TaskInput(df.schema, key_schema, marked if is_timed else None),
        output,
        event_time,
        _initial_rows(initial_state, df.schema, keys),
    )


def _of_rows(given: _Given, processor: Any, mode: Mode, num_partitions: int | None) -> DataFrame:
    _check_processor(processor)
    zone = str(given.df.sparkSession.conf.get("spark.sql.session.timeZone", "UTC"))
    logic = ProcessLogic(processor, mode, given.time_mode, given.input, given.output, given.event_time, zone)
    initial = None
    if given.initial_rows is not None:
        rows = TaskInput(given.initial_rows.schema, given.input.keys)
        initial = InitialStateLogic(processor, mode, given.time_mode, rows, zone)
    return _transformed(given, _copy(processor), logic, initial, num_partitions)


def _transformed(
    given: _Given, declaring: Any, logic: Logic, initial: Logic | None, num_partitions: int | None
) -> DataFrame:
    """The output of the operator. ``declaring`` is a processor to be asked for its state variables."""
    df, keys = given.df, given.input.keys.names
    key_groups = key_group_count(df)
    partitions = partition_count(df, num_partitions, key_groups)
    schema = _declared(declaring, given)
    spec = OperatorSpec(given.operator, partitions, schema.to_json(), kind=KIND, uses_time=True)

    def prepared(rows: DataFrame) -> DataFrame:
        return routed(rows, keys, partitions, key_groups)

    state = None
    if initial is not None and given.initial_rows is not None:
        state = InitialState(prepared(given.initial_rows), tuple(keys), key_groups, initial)
    rows = df if given.time_mode == NONE else with_ticks(df)
    task = StateTask(given.operator, partitions, key_groups, tuple(keys), logic, uses_time=True)
    return map_in_arrow(prepared(rows), task, declare(spec, initial=state), given.output)


def _declared(processor: Any, given: _Given) -> OperatorSchema:
    """What ``init`` declares, as on Spark's driver: with a handle that can do nothing else."""
    state = ProcessorState(processor, given.input.keys, given.time_mode, None)
    try:
        processor.init(state.handle)
        # Timers of one mode would fire by the clock of the other.
        schema = OperatorSchema(state.declare(), settings={"time_mode": given.time_mode})
    except StateStoreError as error:
        raise InvalidOperatorError(f"Operator {given.operator!r}: {error}") from error
    processor.close()
    return schema


def _copy(processor: Any) -> Any:
    """A copy as tasks get it, so that ``init`` leaves nothing in the one that they are given."""
    try:
        return cloudpickle.loads(cloudpickle.dumps(processor))
    except Exception as error:
        raise InvalidOperatorError(
            f"The processor {type(processor).__name__} cannot be pickled, and so not be sent to tasks: {error}. Make in "
            "init() what cannot be pickled, such as connections and locks."
        ) from error


def _check_processor(processor: Any) -> None:
    if isinstance(processor, type):
        raise InvalidOperatorError(
            f"processor={processor.__name__} is a class: give an instance, {processor.__name__}()."
        )
    if isinstance(processor, ArrowStatefulProcessor):
        raise InvalidOperatorError(
            f"The processor {type(processor).__name__} works in columns: use transform_with_state_in_arrow."
        )
    missing = [name for name in _METHODS if not callable(getattr(processor, name, None))]
    if missing:
        raise InvalidOperatorError(
            f"processor={processor!r} has no {', '.join(missing)}: give an instance of a subclass of StatefulProcessor."
        )


def _check_names(schema: T.StructType, whose: str) -> None:
    """Refuse columns that a processor could not tell apart."""
    twice = sorted({n for n in schema.names if schema.names.count(n) > 1})
    if twice:
        raise InvalidOperatorError(f"{whose} has several columns named {', '.join(map(repr, twice))}: rename them.")
    own = [name for name in schema.names if name.startswith(RESERVED_PREFIX)]
    if own:
        raise InvalidOperatorError(
            f"{whose} has the columns {', '.join(own)}; names that begin with {RESERVED_PREFIX} are the state store's own: rename them."
        )


def _struct(schema: T.StructType | str) -> T.StructType:
    struct = struct_of(schema)
    if not struct.fields:
        raise InvalidOperatorError("output_schema has no fields; give what the processor emits.")
    _check_names(struct, "output_schema")
    for f in struct.fields:
        arrow_type(f.dataType)
    return struct


def _with_event_time(output: T.StructType, column: str, given: T.StructType, marked: EventTime | None) -> T.StructType:
    """The output with that column marked as Spark marks event time: with the delay of the input's watermark."""
    if marked is None:
        raise InvalidOperatorError(
            f"event_time_column={column!r} goes on with the watermark of the DataFrame, which has none: put "
            'withWatermark("column", "delay") on it first.'
        )
    if column not in output.names:
        raise InvalidOperatorError(
            f"event_time_column={column!r}: the output has no such column; it has {', '.join(output.names)}."
        )
    if not isinstance(output[column].dataType, (T.TimestampType, T.TimestampNTZType)):
        raise InvalidOperatorError(
            f"event_time_column={column!r} has type {output[column].dataType.simpleString()}; event time is a timestamp."
        )
    delay = given[marked.column].metadata[WATERMARK_METADATA]
    return T.StructType(
        [
            T.StructField(f.name, f.dataType, f.nullable, {**f.metadata, WATERMARK_METADATA: delay})
            if f.name == column
            else f
            for f in output.fields
        ]
    )


def _initial_rows(
    initial: DataFrame | GroupedData | None, given: T.StructType, keys: Sequence[str]
) -> DataFrame | None:
    """The rows of an initial state; grouped ones, as Spark takes them, as well."""
    rows = initial._df if isinstance(initial, GroupedData) else initial
    if rows is None:
        return None
    if not isinstance(rows, DataFrame):
        raise InvalidOperatorError(f"initial_state={initial!r} is no DataFrame.")
    if rows.isStreaming:
        raise InvalidOperatorError("initial_state is a streaming DataFrame: give a batch DataFrame (spark.read).")
    _check_names(rows.schema, "initial_state")
    for key in keys:
        if key not in rows.schema.names:
            raise InvalidOperatorError(
                f"initial_state lacks the key column {key!r}; it has {', '.join(rows.schema.names)}."
            )
        wanted, found = given[key].dataType.simpleString(), rows.schema[key].dataType.simpleString()
        if wanted != found:
            raise InvalidOperatorError(
                f"The key column {key!r} of initial_state has type {found}, and that of the stream {wanted}: cast one."
            )
    return rows
