"""Which columns of a DataFrame have a watermark. Which rows are late and which keys are done: ``task.watermark``."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import types as T

from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.task.watermark import WATERMARK_METADATA, EventTime


def watermark_columns(schema: T.StructType) -> list[str]:
    """Return the columns that have a watermark: event times, and windows of event times."""
    return [f.name for f in schema.fields if WATERMARK_METADATA in (f.metadata or {})]


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
