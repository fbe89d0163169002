"""The arguments that all forms of ``transform_with_state`` have in common, and checking them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, GroupedData
from pyspark.sql import types as T

from backends.encoding.column_names import RESERVED_PREFIX
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.declared_operators import check_operator_name
from spark_bridge.operators.key_columns import check_keys
from spark_bridge.operators.spark_types import arrow_type, other_case
from spark_bridge.operators.watermark_columns import event_time_of, watermark_lag_ms, with_event_time
from spark_bridge.stateful.tasks.task_input import TaskInput
from spark_bridge.stateful.values.ddl import struct_of
from spark_bridge.stateful.variables.handle import EVENT_TIME, TIME_MODES
from spark_bridge.task.watermark import EventTime

PROCESSOR_OUTPUT_MODES = ("update", "append")


@dataclass(frozen=True)
class TransformArguments:
    """The checked arguments; ``time_mode`` is in lower case, and ``initial_rows`` are a batch DataFrame.

    ``lag_ms`` is how far behind the watermark of the query rows may be by their event time.
    """

    df: DataFrame
    operator: str
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
) -> TransformArguments:
    """Return the arguments, checked; raises ``InvalidOperatorError`` for all that they show to be wrong."""
    if not df.isStreaming:
        raise InvalidOperatorError(
            "transform_with_state takes a streaming DataFrame (spark.readStream): state belongs to a checkpoint. Over "
            "a batch DataFrame, Spark 4 runs a processor once: df.groupBy(...).transformWithState(...)."
        )
    check_operator_name(operator, df)
    if not isinstance(output_mode, str) or output_mode.lower() not in PROCESSOR_OUTPUT_MODES:
        raise InvalidOperatorError(
            f"output_mode={output_mode!r} is none of a processor's: {', '.join(PROCESSOR_OUTPUT_MODES)}. A processor "
            "emits what it gives, and cannot know all its keys."
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
    # Several columns with a watermark are an error only where one of them is used.
    marked = event_time_of(df.schema, df.columns) if is_timed or event_time_column is not None else None
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
        time_mode.lower(),
        TaskInput(df.schema, key_schema, marked if is_timed else None),
        output,
        event_time,
        _initial_rows(initial_state, df.schema, keys),
        watermark_lag_ms(df.schema, marked),
    )


def _check_names(schema: T.StructType, whose: str) -> None:
    """Raise ``InvalidOperatorError`` for columns that a processor could not tell apart."""
    twice = sorted({n for n in schema.names if schema.names.count(n) > 1})
    if twice:
        raise InvalidOperatorError(f"{whose} has several columns named {', '.join(map(repr, twice))}: rename them.")
    own = [name for name in schema.names if name.startswith(RESERVED_PREFIX)]
    if own:
        raise InvalidOperatorError(
            f"{whose} has the columns {', '.join(own)}; names that begin with {RESERVED_PREFIX} are the state "
            "store's own: rename them."
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
    """Return the output schema with that column marked as Spark marks event time: with the delay of the watermark."""
    if marked is None:
        raise InvalidOperatorError(
            f"event_time_column={column!r} goes on with the watermark of the DataFrame, which has none: put "
            'withWatermark("column", "delay") on it first.'
        )
    if column not in output.names:
        raise InvalidOperatorError(
            f"event_time_column={column!r}: the output has no such column; it has {', '.join(output.names)}."
            f"{other_case([column], output.names)}"
        )
    if not isinstance(output[column].dataType, (T.TimestampType, T.TimestampNTZType)):
        raise InvalidOperatorError(
            f"event_time_column={column!r} has type {output[column].dataType.simpleString()}; event time is a "
            "timestamp."
        )
    source, lag_ms = given[marked.column], watermark_lag_ms(given, marked)
    return T.StructType([with_event_time(f, source, lag_ms) if f.name == column else f for f in output.fields])


def _initial_rows(
    initial: DataFrame | GroupedData | None, given: T.StructType, keys: Sequence[str]
) -> DataFrame | None:
    """Return the rows of an initial state, which may be grouped, as Spark takes them; None if there are none."""
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
                f"{other_case([key], rows.schema.names)}"
            )
        wanted, found = given[key].dataType.simpleString(), rows.schema[key].dataType.simpleString()
        if wanted != found:
            raise InvalidOperatorError(
                f"The key column {key!r} of initial_state has type {found}, and that of the stream {wanted}: cast one."
            )
    return rows
