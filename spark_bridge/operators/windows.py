"""Windows of event time as grouping keys of ``aggregate``: declared here, computed by Spark's own functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.partitioning import quote

if TYPE_CHECKING:
    from pyspark.sql import Column

DAYS_PER_MONTH = 31
"""As in Spark's ``withWatermark``."""
MICROSECONDS_PER_DAY = 86_400_000_000


@dataclass(frozen=True)
class Window:
    """Windows of one length, one every ``slide``; ``name`` is the name of the grouping column."""

    time_column: str
    duration: str
    slide: str | None = None
    start_time: str | None = None
    name: str = "window"

    def alias(self, name: str) -> Window:
        """Return the same windows under another column name."""
        return replace(self, name=name)

    def column(self) -> Column:
        """Return the window or windows of each row as structs of start and end; rows without a time are dropped."""
        from pyspark.sql import functions as F

        arguments = [a for a in (self.slide or (self.start_time and self.duration), self.start_time) if a]
        return F.window(F.col(quote(self.time_column)), self.duration, *arguments).alias(self.name)


@dataclass(frozen=True)
class SessionWindow:
    """Windows of activity: a key's session ends when no row has come for ``gap``."""

    time_column: str
    gap: str | Column
    name: str = "session_window"

    def alias(self, name: str) -> SessionWindow:
        """Return the same windows under another column name."""
        return replace(self, name=name)

    def column(self) -> Column:
        """Return the session that each row would be alone, as a struct of start and end.

        Rows without a time or a gap are dropped.
        """
        from pyspark.sql import functions as F

        return F.session_window(F.col(quote(self.time_column)), self.gap).alias(self.name)


def window(time_column: str, duration: str, slide: str | None = None, start_time: str | None = None) -> Window:
    """Group by tumbling windows of ``duration``, or with ``slide`` by sliding ones; a key of ``aggregate``.

    The counterpart is ``pyspark.sql.functions.window``. A window includes its start and not its end. Windows are
    aligned to 1970-01-01 UTC plus ``start_time``. Durations are texts such as ``"10 minutes"``. ``time_column`` is a
    timestamp, or the window column of an operator before this one.

    The grouping column is a struct of the timestamps ``start`` and ``end``, named "window"; ``.alias(name)`` renames
    it.
    """
    return Window(time_column, duration, slide, start_time)


def session_window(time_column: str, gap: str | Column) -> SessionWindow:
    """Group by sessions, the windows of a key's activity; a key of ``aggregate``, which needs another key besides.

    The counterpart is ``pyspark.sql.functions.session_window``. A session ends ``gap`` after its last row. A ``gap`` is
    a duration such as ``"10 minutes"``, or a Column that gives each row its own gap.

    The grouping column is a struct of the timestamps ``start`` and ``end``, named "session_window"; ``.alias(name)``
    renames it.
    """
    return SessionWindow(time_column, gap)


def microseconds(spark: Any, duration: str) -> int:
    """Return the length of a duration as Spark reads it, months as 31 days; raises ``InvalidOperatorError``."""
    from pyspark.errors import IllegalArgumentException

    jvm = spark._jvm
    try:
        text = jvm.org.apache.spark.unsafe.types.UTF8String.fromString(duration)
        interval = jvm.org.apache.spark.sql.catalyst.util.IntervalUtils.stringToInterval(text)
    except IllegalArgumentException as error:
        raise InvalidOperatorError(f"{duration!r} is no duration; give one such as '10 minutes' or '1 day'.") from error
    period = interval.extractAsPeriod()
    days = int(period.toTotalMonths()) * DAYS_PER_MONTH + int(period.getDays())
    return days * MICROSECONDS_PER_DAY + int(interval.extractAsDuration().toNanos()) // 1000
