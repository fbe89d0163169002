"""The columns of a DataFrame for a stateful operator: keys and their checks, types, watermarks, windows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.errors import IllegalArgumentException
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from backends.encoding.columns import RESERVED_PREFIX, from_spark_type, spark_struct_json
from backends.exceptions import StateStoreError
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.functions import SessionWindow, Window
from spark_bridge.task.state_task import WATERMARK_METADATA, EventTime

# Types of Spark as Arrow types and back, and which of them have an order.


NUMERIC = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType, T.DoubleType, T.DecimalType)
ORDERED = (*NUMERIC, T.BooleanType, T.StringType, T.BinaryType, T.DateType, T.TimestampType, T.TimestampNTZType)


def is_ordered(kind: T.DataType) -> bool:
    """Return whether values of the type can be compared: all but maps, and types that contain a map."""
    if isinstance(kind, T.StructType):
        return all(is_ordered(f.dataType) for f in kind.fields)
    if isinstance(kind, T.ArrayType):
        return is_ordered(kind.elementType)
    return isinstance(kind, ORDERED)


PLAIN_COLLATION = "UTF8_BINARY"
"""The collation of plain strings, which are compared by their bytes."""


def is_collated(kind: T.DataType) -> bool:
    """Return whether Spark compares values of the type, or strings in them, by other rules than their bytes."""
    if isinstance(kind, T.StructType):
        return any(is_collated(f.dataType) for f in kind.fields)
    if isinstance(kind, T.ArrayType):
        return is_collated(kind.elementType)
    return bool(getattr(kind, "collation", PLAIN_COLLATION) != PLAIN_COLLATION)


def plain_type(kind: T.DataType) -> str:
    """Return the type without collations, as ``cast`` takes it."""
    return re.sub(r" collate \w+", "", kind.simpleString())


def column_type(schema: T.StructType, column: str, where: str) -> T.DataType:
    """Return the type of a column, which must be in the schema once; raises ``InvalidOperatorError``.

    ``where`` begins the message of the error.
    """
    names = schema.names
    if names.count(column) != 1:
        problem = "is ambiguous" if column in names else "does not exist"
        raise InvalidOperatorError(
            f"{where}{column!r}: the column {problem}; the DataFrame has {', '.join(names)}."
            f"{other_case([column], names)}"
        )
    return schema[column].dataType


def other_case(wanted: Sequence[str], names: Sequence[str]) -> str:
    """Return a sentence for an error if ``names`` has a wanted name in another case only; "" if it has none.

    Spark resolves names without regard to case by default. State and its clients tell names apart by case.
    """
    missing = {name.casefold() for name in wanted if name not in names}
    if not (alike := [name for name in names if name.casefold() in missing]):
        return ""
    return (
        f" Names are case-sensitive here, whatever spark.sql.caseSensitive says: write {', '.join(map(repr, alike))}."
    )


def column_literal(name: str) -> str:
    """Return a column name as code gives it to Spark's ``col`` and ``withWatermark``: in quotes, as Spark resolves it.

    Spark takes a dot outside backticks for a field of a struct.
    """
    return repr("`" + name.replace("`", "``") + "`" if "." in name or "`" in name else name)


def arrow_type(kind: T.DataType) -> pa.DataType:
    """Return the Arrow type that a Spark type is kept as; raises ``InvalidOperatorError`` if there is none."""
    try:
        return from_spark_type(kind.jsonValue())
    except StateStoreError as error:
        raise InvalidOperatorError(f"The type {kind.simpleString()} cannot be kept as state: {error}") from error


def arrow_schema(fields: Sequence[T.StructField]) -> pa.Schema:
    """Return the columns as Arrow has them."""
    return pa.schema([pa.field(f.name, arrow_type(f.dataType)) for f in fields])


def spark_struct(fields: pa.Schema) -> T.StructType:
    """Return Arrow fields as Spark's fields; raises ``StateStoreError`` for a type that Spark does not have."""
    return T.StructType.fromJson(spark_struct_json(list(fields)))


def check_keys(schema: T.StructType, keys: Sequence[str]) -> None:
    """Raise ``InvalidOperatorError`` for key columns that do not exist, come twice, or cannot be compared."""
    if not keys:
        raise InvalidOperatorError("by= names no key column; give one column name or a list of them.")
    if len(set(keys)) != len(keys):
        raise InvalidOperatorError(f"by={list(keys)!r} names a key column twice.")
    for key in keys:
        kind = column_type(schema, key, "by=")
        if not is_ordered(kind):
            raise InvalidOperatorError(f"Key column {key!r} has type {kind.simpleString()}, which cannot be a key.")
        if is_collated(kind):
            raise InvalidOperatorError(
                f"Key column {key!r} has type {kind.simpleString()}, and keys are compared by their bytes: cast it "
                f"to {plain_type(kind)}, or group by an expression such as lower()."
            )
        if key.startswith(RESERVED_PREFIX):
            raise InvalidOperatorError(
                f"Key column {key!r} has a name of the state store's own, which begin with {RESERVED_PREFIX}: "
                "rename it."
            )


# Finds the columns of a DataFrame that have a watermark. ``task.state_task`` decides which rows are late.


LAG_METADATA = "statestore.watermarkLagMs"
"""The key in a column's metadata for how far, in ms, rows that have waited may be behind the query's watermark.

Operators of this project take the watermark so much earlier (``StateTask.watermark_lag_ms``). Spark's own, which would
take such rows for late, find no watermark on the column.
"""


def watermark_columns(schema: T.StructType) -> list[str]:
    """Return the columns that have a watermark: event times, and windows of event times."""
    return [f.name for f in schema.fields if _event_time_metadata(f)]


def watermark_lag_ms(schema: T.StructType, event_time: EventTime | None) -> int:
    """Return how far behind the watermark of the query rows may be by their event time, in ms."""
    return 0 if event_time is None else _event_time_metadata(schema[event_time.column]).get(LAG_METADATA, 0)


def with_event_time(field: T.StructField, source: T.StructField, lag_ms: int) -> T.StructField:
    """Return an output column as event time by the watermark of ``source``; rows may be ``lag_ms`` behind that."""
    own = {LAG_METADATA: lag_ms} if lag_ms else _event_time_metadata(source)
    return T.StructField(field.name, field.dataType, field.nullable, {**without_event_time(field).metadata, **own})


def without_event_time(field: T.StructField) -> T.StructField:
    """Return a column without a watermark."""
    marks = _event_time_metadata(field)
    metadata = {k: v for k, v in (field.metadata or {}).items() if k not in marks}
    return T.StructField(field.name, field.dataType, field.nullable, metadata)


def _event_time_metadata(field: T.StructField) -> dict[str, Any]:
    return {k: v for k, v in (field.metadata or {}).items() if k in (WATERMARK_METADATA, LAG_METADATA)}


def event_time_of(schema: T.StructType, columns: Sequence[str]) -> EventTime | None:
    """Return the one of the columns that has a watermark, None if no column has one.

    Raises ``InvalidOperatorError`` if several columns have one, as Spark does.
    """
    marked = [name for name in columns if name in watermark_columns(schema)]
    if len(marked) > 1:
        raise InvalidOperatorError(
            f"The columns {', '.join(marked)} all have a watermark, and only one can decide which rows are late and "
            "done: leave the others out."
        )
    if not marked:
        return None
    return EventTime(marked[0], isinstance(schema[marked[0]].dataType, T.StructType))


def session_event_time(schema: T.StructType, columns: Sequence[str], window: str, output_mode: str) -> EventTime | None:
    """Return the event time of the session window among the columns, None if it has no watermark.

    Raises ``InvalidOperatorError`` if another of the columns has the watermark: sessions end by their own time alone,
    so that none would ever end, and late rows would not be known. In "complete" none ends anyway.
    """
    event_time = event_time_of(schema, columns)
    if event_time is None or event_time.column == window:
        return event_time
    if output_mode == "complete":
        return None
    raise InvalidOperatorError(
        f"The key {event_time.column!r} has the watermark and the session window {window!r} has none, so that no "
        f"session would ever end: put withWatermark on the column of {window!r} instead, or leave "
        f"{event_time.column!r} out of by=."
    )


# Windows of event time as columns, computed by Spark's own functions; ``functions`` has their declarations.


DAYS_PER_MONTH = 31
"""As in Spark's ``withWatermark``."""
WINDOW_TIMES = (T.TimestampType, T.TimestampNTZType, T.DateType, T.StringType)
"""Spark casts dates and strings."""
MICROSECONDS_PER_DAY = 86_400_000_000


def window_column(window: Window | SessionWindow, time: Column) -> Column:
    """Return the window or windows of each row, structs of start and end; rows without a time or a gap are dropped.

    Of sessions, it is the session that each row would be alone.
    """
    if isinstance(window, SessionWindow):
        return F.session_window(time, window.gap).alias(window.name)
    slide, start_time = window.slide, window.start_time
    arguments = [a for a in (slide or (start_time and window.duration), start_time) if a]
    return F.window(time, window.duration, *arguments).alias(window.name)


def check_time_window(spark: Any, schema: T.StructType, window: Window | SessionWindow) -> None:
    """Raise ``InvalidOperatorError`` for a window of a column that has no time, or with a duration that is none."""
    where = f"S.{'session_window' if isinstance(window, SessionWindow) else 'window'}: "
    kind = column_type(schema, window.time_column, where)
    is_window = isinstance(kind, T.StructType) and kind.names == ["start", "end"]
    if not all(isinstance(of, WINDOW_TIMES) for of in ([f.dataType for f in kind.fields] if is_window else [kind])):
        raise InvalidOperatorError(
            f"{where}column {window.time_column!r} has type {kind.simpleString()}; it must be a timestamp, or the "
            "window of an operator before this one."
        )
    given = (window.gap,) if isinstance(window, SessionWindow) else (window.duration, window.slide, window.start_time)
    for duration in given:
        if isinstance(duration, str):
            microseconds(spark, duration)


def microseconds(spark: Any, duration: str) -> int:
    """Return the length of a duration as Spark reads it, months as 31 days; raises ``InvalidOperatorError``."""
    jvm = spark._jvm
    try:
        text = jvm.org.apache.spark.unsafe.types.UTF8String.fromString(duration)
        interval = jvm.org.apache.spark.sql.catalyst.util.IntervalUtils.stringToInterval(text)
    except IllegalArgumentException as error:
        raise InvalidOperatorError(
            f"{duration!r} is not a duration; give one such as '10 minutes' or '1 day'."
        ) from error
    period = interval.extractAsPeriod()
    days = int(period.toTotalMonths()) * DAYS_PER_MONTH + int(period.getDays())
    return days * MICROSECONDS_PER_DAY + int(interval.extractAsDuration().toNanos()) // 1000
