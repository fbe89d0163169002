"""``transform_with_state``: a processor with state by key, as an ordinary streaming DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import DataFrame, GroupedData
from pyspark.sql import types as T

from backends.encoding.columns import RESERVED_PREFIX
from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.messages import OperatorSpec
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.functions import checked_names
from spark_bridge.operators import columns, map_in_arrow
from spark_bridge.stateful.arrow_task import ArrowLogic, Declaring
from spark_bridge.stateful.ddl import struct_of
from spark_bridge.stateful.handle import EVENT_TIME, NONE, TIME_MODES
from spark_bridge.stateful.process_task import Mode, ProcessLogic, ProcessorState, TaskInput
from spark_bridge.stateful.stateful_processor import ArrowStatefulProcessor, call_problem
from spark_bridge.task.state_task import EventTime, Logic

# The arguments that all forms of ``transform_with_state`` have in common, and checking them.


PROCESSOR_OUTPUT_MODES = ("update", "append")


@dataclass(frozen=True)
class TransformArguments:
    """The checked arguments; ``time_mode`` is in lower case, and ``initial_rows`` are a batch DataFrame.

    ``lag_ms`` is how far behind the watermark of the query rows may be by their event time.
    """

    df: DataFrame
    operator: str
    routing: map_in_arrow.KeyRouting
    time_mode: str
    input: TaskInput
    output: T.StructType
    event_time: EventTime | None
    initial_rows: DataFrame | None
    lag_ms: int


def checked_arguments(
    df: DataFrame,
    by: str | Sequence[str],
    output_schema: T.StructType | str,
    operator: str,
    output_mode: str,
    time_mode: str,
    initial_state: DataFrame | GroupedData | None,
    event_time_column: str | None,
    num_partitions: int | None,
) -> TransformArguments:
    """Return the arguments, checked; raises ``InvalidOperatorError`` for all that they show to be wrong."""
    if not df.isStreaming:
        raise InvalidOperatorError(
            "transform_with_state takes a streaming DataFrame (spark.readStream): state belongs to a checkpoint. Over "
            "a batch DataFrame, Spark 4 runs a processor once: df.groupBy(...).transformWithState(...)."
        )
    layout = map_in_arrow.state_layout(operator, num_partitions, df)
    if not isinstance(output_mode, str) or output_mode.lower() not in PROCESSOR_OUTPUT_MODES:
        raise InvalidOperatorError(
            f"output_mode={output_mode!r} is not one of {', '.join(PROCESSOR_OUTPUT_MODES)}: a processor emits the "
            "rows that it returns, and cannot know all its keys."
        )
    if not isinstance(time_mode, str) or time_mode.lower() not in TIME_MODES:
        raise InvalidOperatorError(
            f'time_mode={time_mode!r} is unknown: choose "none", "processingTime" or "eventTime".'
        )
    keys = checked_names("by=", by)
    _check_names(df.schema, "The DataFrame")
    columns.check_keys(df.schema, keys)
    key_schema = columns.arrow_schema([df.schema[key] for key in keys])
    is_timed = time_mode.lower() == EVENT_TIME
    # Several columns with a watermark are an error only if one of them is used.
    marked = columns.event_time_of(df.schema, df.columns) if is_timed or event_time_column is not None else None
    if is_timed and marked is None:
        raise InvalidOperatorError(
            f'time_mode="{time_mode}" needs event time: put withWatermark("column", "delay") on the DataFrame first.'
        )
    output, event_time = _struct(output_schema), None
    if event_time_column is not None:
        output = _with_event_time(output, event_time_column, df.schema, marked)
        event_time = EventTime(event_time_column)
    return TransformArguments(
        df,
        operator,
        map_in_arrow.KeyRouting(keys, *layout),
        time_mode.lower(),
        TaskInput(df.schema, key_schema, marked if is_timed else None),
        output,
        event_time,
        _initial_rows(initial_state, df.schema, keys),
        columns.watermark_lag_ms(df.schema, marked),
    )


def _check_names(schema: T.StructType, whose: str) -> None:
    """Raise ``InvalidOperatorError`` for columns that a processor could not distinguish."""
    if twice := sorted({n for n in schema.names if schema.names.count(n) > 1}):
        raise InvalidOperatorError(f"{whose} has several columns named {', '.join(map(repr, twice))}: rename them.")
    if own := [name for name in schema.names if name.startswith(RESERVED_PREFIX)]:
        raise InvalidOperatorError(
            f"{whose} has the columns {', '.join(own)}; names that begin with {RESERVED_PREFIX} are the state "
            "store's own: rename them."
        )


def _struct(schema: T.StructType | str) -> T.StructType:
    struct = struct_of(schema)
    if not struct.fields:
        raise InvalidOperatorError("output_schema has no fields; give the fields that the processor emits.")
    _check_names(struct, "output_schema")
    for f in struct.fields:
        columns.arrow_type(f.dataType)
    return struct


def _with_event_time(output: T.StructType, column: str, schema: T.StructType, marked: EventTime | None) -> T.StructType:
    """Return the output schema with that column marked as Spark marks event time: with the delay of the watermark."""
    if marked is None:
        raise InvalidOperatorError(
            f"event_time_column={column!r} continues the watermark of the DataFrame, which has none: put "
            'withWatermark("column", "delay") on it first.'
        )
    if column not in output.names:
        raise InvalidOperatorError(
            f"event_time_column={column!r}: the output has no such column; it has {', '.join(output.names)}."
            f"{columns.other_case([column], output.names)}"
        )
    if not isinstance(output[column].dataType, (T.TimestampType, T.TimestampNTZType)):
        raise InvalidOperatorError(
            f"event_time_column={column!r} has type {output[column].dataType.simpleString()}; event time is a "
            "timestamp."
        )
    source, lag_ms = schema[marked.column], columns.watermark_lag_ms(schema, marked)
    return T.StructType([columns.with_event_time(f, source, lag_ms) if f.name == column else f for f in output.fields])


def _initial_rows(
    initial: DataFrame | GroupedData | None, schema: T.StructType, keys: Sequence[str]
) -> DataFrame | None:
    """Return the rows of an initial state, which may be grouped, as Spark takes them; None if there are none."""
    rows = initial._df if isinstance(initial, GroupedData) else initial
    if rows is None:
        return None
    if not isinstance(rows, DataFrame):
        raise InvalidOperatorError(f"initial_state={initial!r} is not a DataFrame.")
    if rows.isStreaming:
        raise InvalidOperatorError("initial_state is a streaming DataFrame: give a batch DataFrame (spark.read).")
    _check_names(rows.schema, "initial_state")
    for key in keys:
        if key not in rows.schema.names:
            raise InvalidOperatorError(
                f"initial_state lacks the key column {key!r}; it has {', '.join(rows.schema.names)}."
                f"{columns.other_case([key], rows.schema.names)}"
            )
        stream_type, initial_type = schema[key].dataType.simpleString(), rows.schema[key].dataType.simpleString()
        if stream_type != initial_type:
            raise InvalidOperatorError(
                f"The key column {key!r} of initial_state has type {initial_type}, and that of the stream "
                f"{stream_type}: cast one."
            )
    return rows


KIND = "transform_with_state"
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
    """Run a processor of rows over a stream by key; the processor's state is in the state store.

    The counterpart in Spark 4 is ``df.groupBy(by).transformWithState(...)``. The result is an ordinary streaming
    DataFrame of ``output_schema``.

    Arguments:

    - ``df``: a streaming DataFrame.
    - ``by``: the key column or columns.
    - ``processor``: an instance of a subclass of ``StatefulProcessor`` (PySpark's own works as well). It receives the
      rows of each key as ``pyspark.sql.Row``, and returns the rows to emit.
    - ``output_schema``: the schema of the rows to emit, a StructType or DDL text.
    - ``operator``: the name of this state in the checkpoint and in queries.
    - ``output_mode``: "update" or "append". It tells readers of the program whether rows replace earlier rows; both run
      alike.
    - ``time_mode``: "none"; "processingTime" (timers and TTL by the time of the batch); or "eventTime" (timers by the
      watermark, which ``df`` must have; late rows are dropped). Except with "none", a batch runs at every trigger, even
      without new rows.
    - ``initial_state``: a batch DataFrame with the key columns. ``handleInitialState`` makes state of its rows before
      the first batch.
    - ``event_time_column``: the output column that is the event time of operators after this one. A row that is behind
      the watermark is then an error.
    - ``num_partitions``: the number of state partitions, by default the session's ``spark.sql.shuffle.partitions``. The
      number stays with the checkpoint.

    Raises ``InvalidOperatorError`` for every mistake that the arguments show.
    """
    arguments = checked_arguments(
        df, by, output_schema, operator, output_mode, time_mode, initial_state, event_time_column, num_partitions
    )
    return _of_rows(arguments, processor, "rows")


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
    """Run a processor of pandas DataFrames over a stream by key; the processor's state is in the state store.

    The arguments are those of ``transform_with_state``. The rows that the processor receives and returns,
    and those of the initial state are pandas DataFrames. One has at most
    ``spark.sql.execution.arrow.maxRecordsPerBatch`` rows (and on Spark 4 ``maxBytesPerBatch`` bytes), as the session
    says when this is called. Structs and maps are dicts in them, arrays numpy arrays, and timestamps naive times in
    the session's time zone. The counterpart in Spark 4 is ``df.groupBy(by).transformWithStateInPandas(...)``.
    """
    arguments = checked_arguments(
        df, by, output_schema, operator, output_mode, time_mode, initial_state, event_time_column, num_partitions
    )
    return _of_rows(arguments, processor, "pandas")


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
    """Run a processor in columns over a stream by key; the processor's state is in the state store.

    This is the fastest form where Arrow or numpy can do the work. ``processor`` is an ``ArrowStatefulProcessor`` or a
    function with the decorator ``@arrow_processor(state)``. It is called once per partition and batch, with all rows,
    their keys, and the state of the keys. The other arguments are those of ``transform_with_state``. Spark has no
    counterpart.
    """
    arguments = checked_arguments(
        df, by, output_schema, operator, output_mode, time_mode, initial_state, event_time_column, num_partitions
    )
    if not isinstance(processor, ArrowStatefulProcessor):
        raise InvalidOperatorError(
            f"processor={processor!r} is not an instance of a subclass of ArrowStatefulProcessor; make one, or one of "
            'a function by @arrow_processor("n long, total double").'
        )
    rows = columns.arrow_schema(df.schema.fields)
    logic = ArrowLogic(processor, arguments.time_mode, arguments.input, rows, arguments.output, arguments.event_time)
    initial = None
    if arguments.initial_rows is not None:
        struct = arguments.initial_rows.schema
        task_input, rows = TaskInput(struct, arguments.input.keys), columns.arrow_schema(struct.fields)
        initial = replace(logic, input=task_input, rows=rows, is_initial=True)
    return _transformed(arguments, Declaring(_copy(processor)), logic, initial)


def _of_rows(arguments: TransformArguments, processor: Any, mode: Mode) -> DataFrame:
    _check_processor(processor, arguments.time_mode)
    zone = str(arguments.df.sparkSession.conf.get("spark.sql.session.timeZone", "UTC"))
    frame_rows, frame_bytes = map_in_arrow.frame_limits(arguments.df.sparkSession)
    logic = ProcessLogic(
        processor,
        mode,
        arguments.time_mode,
        arguments.input,
        arguments.output,
        arguments.event_time,
        zone,
        frame_rows=frame_rows,
        frame_bytes=frame_bytes,
    )
    initial = None
    if arguments.initial_rows is not None:
        rows = TaskInput(arguments.initial_rows.schema, arguments.input.keys)
        initial = replace(logic, input=rows, event_time=None, is_initial=True)
    return _transformed(arguments, _copy(processor), logic, initial)


def _transformed(arguments: TransformArguments, declaring: Any, logic: Logic, initial: Logic | None) -> DataFrame:
    """Return the output of the operator; ``declaring`` is a copy of the processor, whose ``init`` is called here."""
    routing, initial_rows = arguments.routing, arguments.initial_rows
    declared = ProcessorState(arguments.input.keys, arguments.time_mode, None)  # its handle can only declare
    with map_in_arrow.refusing(arguments.operator):
        declaring.init(declared.handle)
        # The mode stays with the state: in another mode, its timers would fire by another clock.
        schema = OperatorSchema(declared.declare(), settings={"time_mode": arguments.time_mode})
    declaring.close()
    spec = OperatorSpec(arguments.operator, routing.num_partitions, schema.to_json(), kind=KIND, uses_time=True)
    state = None
    if initial is not None and initial_rows is not None:
        state = map_in_arrow.InitialState(initial_rows, routing, initial)
    rows = arguments.df if arguments.time_mode == NONE else map_in_arrow.with_ticks(arguments.df, arguments.operator)
    operator = map_in_arrow.DeclaredOperator(spec, initial=state)
    return map_in_arrow.stateful_operator(rows, operator, routing, logic, arguments.output, arguments.lag_ms)


def _copy(processor: Any) -> Any:
    """Return a copy such as tasks get, so that ``init`` changes nothing in the processor that is sent to them."""
    try:
        return cloudpickle.loads(cloudpickle.dumps(processor))
    except Exception as error:
        raise InvalidOperatorError(
            f"The processor {type(processor).__name__} cannot be pickled, and so not be sent to tasks: {error}. Create "
            "objects that cannot be pickled, such as connections and locks, in init()."
        ) from error


def _check_processor(processor: Any, time_mode: str) -> None:
    if isinstance(processor, type):
        raise InvalidOperatorError(
            f"processor={processor.__name__} is a class: give an instance, {processor.__name__}()."
        )
    if isinstance(processor, ArrowStatefulProcessor):
        raise InvalidOperatorError(
            f"The processor {type(processor).__name__} works in columns: use transform_with_state_in_arrow."
        )
    if missing := [name for name in _METHODS if not callable(getattr(processor, name, None))]:
        raise InvalidOperatorError(
            f"processor={processor!r} has no {', '.join(missing)}: give an instance of a subclass of StatefulProcessor."
        )
    if (problem := call_problem(processor, has_timers=time_mode != NONE)) is not None:
        raise InvalidOperatorError(problem)
