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
