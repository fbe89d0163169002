"""Windows of event time, as grouping keys of ``aggregate``: declared here, computed by Spark's own functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.partitioning import quote

if TYPE_CHECKING:
    from pyspark.sql import Column


@dataclass(frozen=True)
class Window:
    """Windows of one length, one every ``slide``; the grouping column that they make is called ``name``."""

    time_column: str
    duration: str
    slide: str | None = None
    start_time: str | None = None
    name: str = "window"

    def alias(self, name: str) -> Window:
        """The same windows under another column name."""
        return replace(self, name=name)

    def column(self) -> Column:
        """The window or windows of each row: a struct of start and end; rows without a time go."""
        from pyspark.sql import functions as F

        arguments = [a for a in (self.slide or (self.start_time and self.duration), self.start_time) if a]
        return F.window(F.col(quote(self.time_column)), self.duration, *arguments).alias(self.name)


@dataclass(frozen=True)
class SessionWindow:
    """Windows of activity, one per key until nothing has come for ``gap``."""

    time_column: str
    gap: str | Column
    name: str = "session_window"

    def alias(self, name: str) -> SessionWindow:
        """The same windows under another column name."""
        return replace(self, name=name)

    def column(self) -> Column:
        """The session that each row would be by itself: a struct of start and end; rows without time or gap go."""
        from pyspark.sql import functions as F

        return F.session_window(F.col(quote(self.time_column)), self.gap).alias(self.name)


def window(time_column: str, duration: str, slide: str | None = None, start_time: str | None = None) -> Window:
    """Tumbling windows of ``duration``, or with ``slide`` sliding ones, as a key of ``aggregate``.

    As ``pyspark.sql.functions.window``: a window has its start and not its end, windows are aligned to 1970-01-01 UTC plus
    ``start_time``, and durations are such as ``"10 minutes"``. ``time_column`` may also be the window column of an
    operator upstream.
    """
    return Window(time_column, duration, slide, start_time)


def session_window(time_column: str, gap: str | Column) -> SessionWindow:
    """Session windows as a key of ``aggregate``, which needs another key besides.

    As ``pyspark.sql.functions.session_window``: a session ends ``gap`` after its last row. A ``gap`` that is a Column
    gives each row its own.
    """
    return SessionWindow(time_column, gap)


def microseconds(spark: Any, duration: str) -> int:
    """A duration as Spark reads it, months as 31 days like ``withWatermark``; raises ``InvalidOperatorError``."""
    from pyspark.errors import IllegalArgumentException

    jvm = spark._jvm
    try:
        text = jvm.org.apache.spark.unsafe.types.UTF8String.fromString(duration)
        interval = jvm.org.apache.spark.sql.catalyst.util.IntervalUtils.stringToInterval(text)
    except IllegalArgumentException as error:
        raise InvalidOperatorError(f"{duration!r} is no duration; give one such as '10 minutes' or '1 day'.") from error
    period = interval.extractAsPeriod()
    days = int(period.toTotalMonths()) * 31 + int(period.getDays())
    return days * 86_400_000_000 + int(interval.extractAsDuration().toNanos()) // 1000
