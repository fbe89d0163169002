"""Windows of event time as columns, computed by Spark's own functions; ``functions`` has their declarations."""

from __future__ import annotations

from typing import Any

from pyspark.errors import IllegalArgumentException
from pyspark.sql import Column
from pyspark.sql import functions as F

from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.functions import SessionWindow, Window

DAYS_PER_MONTH = 31
"""As in Spark's ``withWatermark``."""
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


def microseconds(spark: Any, duration: str) -> int:
    """Return the length of a duration as Spark reads it, months as 31 days; raises ``InvalidOperatorError``."""
    jvm = spark._jvm
    try:
        text = jvm.org.apache.spark.unsafe.types.UTF8String.fromString(duration)
        interval = jvm.org.apache.spark.sql.catalyst.util.IntervalUtils.stringToInterval(text)
    except IllegalArgumentException as error:
        raise InvalidOperatorError(f"{duration!r} is no duration; give one such as '10 minutes' or '1 day'.") from error
    period = interval.extractAsPeriod()
    days = int(period.toTotalMonths()) * DAYS_PER_MONTH + int(period.getDays())
    return days * MICROSECONDS_PER_DAY + int(interval.extractAsDuration().toNanos()) // 1000
