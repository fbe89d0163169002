"""Finds the columns of a DataFrame that have a watermark. ``task.watermark`` says which rows are late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import types as T

from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.task.watermark import WATERMARK_METADATA, EventTime

LAG_METADATA = "statestore.watermarkLagMs"
"""Where a column of rows that have waited has how far, in ms, they may be behind the watermark of the query.

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
            f"The columns {', '.join(marked)} all have a watermark, and only one can say what is late and done: leave "
            "the others out."
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
