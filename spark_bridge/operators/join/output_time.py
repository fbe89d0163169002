"""The event time of a join's output: which column has it, and how far its rows may be behind the query's watermark.

A row that has waited comes when the watermark is long after its time. So the column says by how much, and operators
after the join take the watermark so much earlier. Spark's counterpart is the watermark that an operator hands on to
the next one (``WatermarkPropagator``), which Spark knows for its own operators only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.join.asof_matching import Asof
from spark_bridge.operators.join.sides import Bounds
from spark_bridge.operators.spark_types import other_case
from spark_bridge.operators.watermark_columns import with_event_time, without_event_time


@dataclass(frozen=True)
class SideTime:
    """A side's column of event time, and how long its rows wait at most, in ms; None: for good."""

    field: T.StructField
    waits_ms: int | None


def side_times(left: DataFrame, right: DataFrame, bounds: Bounds) -> list[SideTime]:
    """Return the times of both sides of a ``join``; none if it has no bounds."""
    if bounds.left is None or bounds.right is None:
        return []
    fields = (left.schema[bounds.left.column], right.schema[bounds.right.column])
    return [SideTime(field, wait) for field, wait in zip(fields, bounds.waits_ms, strict=True)]


def asof_times(left: DataFrame, right: DataFrame, bounds: Bounds, asof: Asof) -> list[SideTime]:
    """Return the times of both sides of a ``join_asof``."""
    assert bounds.left is not None and bounds.right is not None
    fields = (left.schema[bounds.left.column], right.schema[bounds.right.column])
    return [SideTime(field, wait) for field, wait in zip(fields, asof.waits_ms, strict=True)]


def timed_output(
    output: T.StructType, column: str | None, times: Sequence[SideTime], lag_ms: int, *, made_by_apply: bool = False
) -> T.StructType:
    """Return the columns of the output, ``column`` alone as event time; ``lag_ms`` is that of the rows that are joined.

    With ``made_by_apply``, any column of the type of the times may be it, and has values of one of the sides.
    Raises ``InvalidOperatorError`` for a column that has no event time.
    """
    output = T.StructType([without_event_time(f) for f in output.fields])
    if column is None:
        return output
    named = f"event_time_column={column!r}"
    if column not in output.names:
        raise InvalidOperatorError(
            f"{named}: the output has no such column; it has {', '.join(output.names)}."
            f"{other_case([column], output.names)}"
        )
    if not times:
        raise InvalidOperatorError(
            f"{named} needs to know how long rows wait: put withWatermark on both sides and give within=, or put the "
            "watermark on a key column, such as a window."
        )
    if made_by_apply:
        sources = list(times)
        if output[column].dataType != times[0].field.dataType:
            raise InvalidOperatorError(
                f"{named} has type {output[column].dataType.simpleString()}; the event time of the sides is "
                f"{times[0].field.dataType.simpleString()}."
            )
    else:
        sources = [t for t in times if t.field.name == column]
    if not sources:
        raise InvalidOperatorError(
            f"{named} is no event time of a side; these are {', '.join(dict.fromkeys(t.field.name for t in times))}."
        )
    waits = [t.waits_ms for t in sources if t.waits_ms is not None]
    if len(waits) < len(sources):
        raise InvalidOperatorError(
            f"{named}: rows of that side wait for good, so that an operator after the join would never be done with a "
            "time. Give both bounds of within=, or tolerance= of join_asof."
        )
    source = sources[0].field
    return T.StructType(
        [with_event_time(f, source, lag_ms + max(waits)) if f.name == column else f for f in output.fields]
    )
