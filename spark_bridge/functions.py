"""Aggregate functions and windows for ``aggregate``, named after ``pyspark.sql.functions``.

    from spark_bridge import functions as S
    aggregate(df, by="user", operator="totals", n=S.count(), last=S.last("page", by="ts"))

No result depends on the order of the rows, or on how they are split into batches and partitions; sums, means and
variances of floating point numbers are the same up to rounding. ``aggregate`` raises ``InvalidOperatorError`` for a
column that does not exist or that has a type that the function does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_bridge.aggregates.lists_and_sketches import BILLION, MAX_PRECISION, MILLION, MIN_PRECISION, precision_of
from spark_bridge.exceptions import InvalidOperatorError

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = [
    "AggregateFunction",
    "approx_count_distinct",
    "avg",
    "collect_list",
    "collect_set",
    "count",
    "count_if",
    "first",
    "last",
    "max",
    "mean",
    "merge",
    "min",
    "percentile_approx",
    "session_window",
    "stddev",
    "stddev_pop",
    "stddev_samp",
    "sum",
    "top_k",
    "var_pop",
    "var_samp",
    "variance",
    "window",
]


def as_list(given: Any) -> list[Any]:
    """Return one thing or several as a list; a Column, which cannot be iterated, is one."""
    try:
        return [given] if isinstance(given, str) else list(given)
    except TypeError:
        return [given]


def checked_names(where: str, given: Any) -> list[str]:
    """Return one name of a column or several as a list; raises ``InvalidOperatorError`` for anything else."""
    names = as_list(given)
    for name in names:
        if not isinstance(name, str):
            raise InvalidOperatorError(
                f"{where}{name!r} is not the name of a column: give the column's name, as 'amount' for "
                "F.col('amount'). Put an expression into a column first (withColumn)."
            )
    return names


@dataclass(frozen=True)
class UserFunctions:
    """The arguments of ``merge``; ``state`` and ``result`` are types as the user wrote them."""

    state: Any
    partial: Callable[[pa.Table], pa.Table]
    merge: Callable[[pa.Table], pa.Table]
    finish: Callable[[pa.Table], pa.Array | pa.ChunkedArray] | None
    result: Any


MAX_LIST_BYTES = 64 << 20
"""The most bytes of a key's list in ``collect_list`` and ``collect_set``, unless ``max_bytes`` sets another limit."""
_FORMER_LIMIT = 1000


@dataclass(frozen=True)
class AggregateFunction:
    """A declared aggregate function: its name, input ``column`` (None for ``count()``) and ordering column ``by``.

    ``columns`` are several input columns instead of ``column``. ``arguments`` are further arguments that the state
    depends on. A list with ``max_bytes`` keeps all elements. ``horizons`` are those of ``rolling``. Make one with the
    functions of this module.
    """

    name: str
    column: str | None = None
    by: str | None = None
    columns: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    user: UserFunctions | None = None
    max_bytes: int | None = None
    horizons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        needs_column = self.name != "count" and self.user is None and not self.columns
        if needs_column or self.column is not None:
            checked_names(f"S.{self.name}: ", [self.column])
        checked_names(f"S.{self.name}: ", self.columns)
        if self.by is not None:
            checked_names(f"S.{self.name}: by=", [self.by])

    def rolling(self, *horizons: str) -> AggregateFunction:
        """Return the same aggregate over the last time of each key, as of the time of the request.

            aggregate(df, by="card", operator="cards", event_time="ts",
                      n=S.count().rolling("10 minutes", "1 hour"), spent=S.sum("amount").rolling("1 hour"))

        The outputs are ``n_10m``, ``n_1h`` and ``spent_1h``. As of a moment, a horizon h has the rows after
        ``moment - h`` and up to the moment. Its begin is rounded down to a multiple of its hop, which is at most a
        tenth of h (10 minutes: 1 minute; 1 hour: 5 minutes; 1 day: 2 hours). A sum of no rows is 0.

        Not for ``merge``, and lists need a ``limit``. After the sawtooth windows of Chronon. Raises
        ``InvalidOperatorError``.
        """
        if not horizons:
            raise InvalidOperatorError(f"{self.name}: rolling() names no horizon; give one, such as '10 minutes'.")
        if self.user is not None:
            raise InvalidOperatorError(
                "merge: hosts merge the tiles of a horizon when they answer, and do not have your functions. Use the "
                "built-in aggregates, or keep the rows in a processor."
            )
        if self.max_bytes is not None:
            raise InvalidOperatorError(f"{self.name}: a list over a horizon needs limit=, which bounds each tile.")
        return replace(self, horizons=horizons)


@dataclass(frozen=True)
class Window:
    """Windows of one length, one every ``slide``; ``name`` is the name of the grouping column. See ``window``."""

    time_column: str
    duration: str
    slide: str | None = None
    start_time: str | None = None
    name: str = "window"

    def __post_init__(self) -> None:
        checked_names("S.window: ", [self.time_column])

    def alias(self, name: str) -> Window:
        """Return the same windows under another column name."""
        return replace(self, name=name)


@dataclass(frozen=True)
class SessionWindow:
    """Windows of activity: a key's session ends when no row has arrived for ``gap``. See ``session_window``."""

    time_column: str
    gap: str | Column
    name: str = "session_window"

    def __post_init__(self) -> None:
        checked_names("S.session_window: ", [self.time_column])

    def alias(self, name: str) -> SessionWindow:
        """Return the same windows under another column name."""
        return replace(self, name=name)


def window(time_column: str, duration: str, slide: str | None = None, start_time: str | None = None) -> Window:
    """Group by tumbling windows of ``duration``, or with ``slide`` by sliding ones; a key of ``aggregate``.

    The counterpart is ``pyspark.sql.functions.window``. A window includes its start and not its end. Windows are
    aligned to 1970-01-01 UTC plus ``start_time``. Durations are strings such as ``"10 minutes"``. ``time_column`` is a
    timestamp, or the window column of an operator before this one.

    The grouping column is a struct of the timestamps ``start`` and ``end``, named "window"; ``.alias(name)`` renames
    it.
    """
    return Window(time_column, duration, slide, start_time)


def session_window(time_column: str, gap: str | Column) -> SessionWindow:
    """Group by sessions, the windows of a key's activity; a key of ``aggregate``, which also needs another key.

    The counterpart is ``pyspark.sql.functions.session_window``. A session ends ``gap`` after its last row. A ``gap`` is
    a duration such as ``"10 minutes"``, or a Column with the gap of each row.

    The grouping column is a struct of the timestamps ``start`` and ``end``, named "session_window"; ``.alias(name)``
    renames it.
    """
    return SessionWindow(time_column, gap)


def count(column: str | None = None) -> AggregateFunction:
    """Count the rows of each key, or those whose ``column`` is not null. Result: long, never null."""
    return AggregateFunction("count", None if isinstance(column, str) and column == "*" else column)


def count_if(column: str) -> AggregateFunction:
    """Count the rows whose boolean ``column`` is true. Result: long, never null."""
    return AggregateFunction("count_if", column)


def sum(column: str) -> AggregateFunction:
    """Sum up the non-null values. Result: long, double or decimal, as in Spark; null without values.

    A sum of integers that leaves 64 bits fails the batch (``SparkBridgeError``) instead of wrapping around.
    """
    return AggregateFunction("sum", column)


def min(column: str) -> AggregateFunction:
    """Find the least non-null value, of the type of ``column``; null if there is none.

    NaN counts as greater than every other number, as in Spark.
    """
    return AggregateFunction("min", column)


def max(column: str) -> AggregateFunction:
    """Find the greatest non-null value, of the type of ``column``; null if there is none.

    NaN counts as greater than every other number, as in Spark.
    """
    return AggregateFunction("max", column)


def mean(column: str) -> AggregateFunction:
    """Compute the arithmetic mean of the non-null values; null if there is none.

    Result: double; of decimals, a decimal with four more digits after the point, as in Spark.
    """
    return AggregateFunction("mean", column)


avg = mean


def stddev_samp(column: str) -> AggregateFunction:
    """Compute the standard deviation of a sample. Result: double; null for fewer than two values."""
    return AggregateFunction("stddev_samp", column)


stddev = stddev_samp


def stddev_pop(column: str) -> AggregateFunction:
    """Compute the standard deviation of a whole population. Result: double; null without values."""
    return AggregateFunction("stddev_pop", column)


def var_samp(column: str) -> AggregateFunction:
    """Compute the variance of a sample. Result: double; null for fewer than two values."""
    return AggregateFunction("var_samp", column)


variance = var_samp


def var_pop(column: str) -> AggregateFunction:
    """Compute the variance of a whole population. Result: double; null without values."""
    return AggregateFunction("var_pop", column)


def first(column: str, by: str | None = None) -> AggregateFunction:
    """Find the value of the row with the least ``by``, such as the event time. Null values count.

    ``by`` is by default the DataFrame's watermark column; rows without ``by`` do not count. Of rows with the same
    ``by``, the one with the greatest value is taken.
    """
    return AggregateFunction("first", column, by)


def last(column: str, by: str | None = None) -> AggregateFunction:
    """Find the value of the row with the greatest ``by``, such as the event time. Null values count.

    ``by`` is by default the DataFrame's watermark column; rows without ``by`` do not count. Of rows with the same
    ``by``, the one with the greatest value is taken.
    """
    return AggregateFunction("last", column, by)


def collect_list(
    column: str, by: str | None = None, *, limit: int | None = None, max_bytes: int | None = None
) -> AggregateFunction:
    """Collect the non-null values into an array, ordered by ``by`` and then by value.

    ``by`` is by default the DataFrame's watermark column; without one, values are ordered by themselves. The array is
    empty, not null, without values. All values are kept, as in Spark; a batch fails if the list of a key takes
    more than ``max_bytes`` (default 64 MiB). With ``limit`` only that many values are kept, the last ones; the operator
    counts the others as ``numDroppedElements`` in its progress. Either may change at a restart. Raises
    ``InvalidOperatorError`` for a number that is not positive, or for both.
    """
    return AggregateFunction("collect_list", column, by, **_bounds("collect_list", limit, max_bytes))


def collect_set(column: str, *, limit: int | None = None, max_bytes: int | None = None) -> AggregateFunction:
    """Collect the distinct non-null values into an array, in ascending order.

    The array is empty, not null, without values. All values are kept, as in Spark; a batch fails if the set of a
    key takes more than ``max_bytes`` (default 64 MiB). With ``limit`` only that many values are kept, the least ones;
    the operator counts the others as ``numDroppedElements`` in its progress. Raises ``InvalidOperatorError`` for a
    number that is not positive, or for both.
    """
    return AggregateFunction("collect_set", column, **_bounds("collect_set", limit, max_bytes))


def top_k(column: str | Sequence[str], k: int, by: str | None = None, *, descending: bool = True) -> AggregateFunction:
    """Collect the ``k`` greatest values (with ``descending=False`` the least) into an array, in that order.

    With ``by``, they are the values of the rows with the greatest ``by``: null values count, and rows without ``by`` do
    not. Of rows with the same ``by``, those with the greatest value (with ``descending=False`` the least) come first.
    Several columns make an array of structs; without ``by``, these are ordered by their fields. Raises
    ``InvalidOperatorError`` unless ``k`` is a positive integer.
    """
    columns = (column, ()) if isinstance(column, str) else (None, tuple(checked_names("S.top_k: ", column)))
    arguments = (_positive("top_k", "k", k), *(() if descending else ("ascending",)))
    return AggregateFunction("top_k", columns[0], by, columns[1], arguments)


def approx_count_distinct(column: str, rsd: float = 0.05) -> AggregateFunction:
    """Estimate the number of distinct non-null values, by HyperLogLog++ as in Spark. Result: long, never null.

    ``rsd`` is the relative standard deviation that is allowed, 0.0022 to 0.39. The state of a key takes at most 2**p
    bytes with p = ceil(2 log2(1.106 / rsd)), which are 512 bytes for 0.05, and less while the count is small. Raises
    ``InvalidOperatorError`` for another ``rsd``. After Heule, Nunkesser and Hall, "HyperLogLog in Practice" (2013).
    """
    precision = precision_of(rsd) if 0 < rsd < 1 else 0
    if not MIN_PRECISION <= precision <= MAX_PRECISION:
        raise InvalidOperatorError(f"approx_count_distinct: rsd={rsd!r} is out of range; it must be 0.0022 to 0.39.")
    return AggregateFunction("approx_count_distinct", column, arguments=(str(precision),))


def percentile_approx(column: str, percentage: float | Sequence[float], accuracy: float = 0.01) -> AggregateFunction:
    """Estimate percentiles of the non-null values, by DDSketch. Result: double, or an array of doubles for several.

    ``percentage`` is 0 to 1, as in Spark. ``accuracy`` is the greatest relative error of a result, 0.0001 to 0.1; of
    Spark's function of this name it is the inverse of the error of the rank. The state of a key takes 12 bytes for each
    bucket in use: at 1 %, values between 1 and a million have at most 691. The result is null without values. Raises
    ``InvalidOperatorError``. After Masson, Rim and Lee, "DDSketch" (2019), whose results do not depend on the order of
    merging.
    """
    percentages = list(percentage) if isinstance(percentage, Sequence) else [percentage]
    wrong = [p for p in percentages if not isinstance(p, int | float) or not 0 <= p <= 1]
    if wrong or not percentages:
        raise InvalidOperatorError(
            f"percentile_approx: percentage={percentage!r} must be numbers from 0 to 1, such as 0.99."
        )
    if not isinstance(accuracy, int | float) or not 0.0001 <= accuracy <= 0.1:
        raise InvalidOperatorError(
            f"percentile_approx: accuracy={accuracy!r} is out of range; it is the relative error, 0.0001 to 0.1."
        )
    form = "array" if isinstance(percentage, Sequence) else "one"
    scaled = (str(round(float(p) * BILLION)) for p in percentages)
    return AggregateFunction("percentile_approx", column, arguments=(str(round(accuracy * MILLION)), form, *scaled))


def merge(
    columns: str | Sequence[str],
    *,
    state: Any,
    partial: Callable[[pa.Table], pa.Table],
    merge: Callable[[pa.Table], pa.Table],
    finish: Callable[[pa.Table], pa.Array | pa.ChunkedArray] | None = None,
    result: Any = None,
) -> AggregateFunction:
    """Declare an aggregate of your own, made of functions on whole Arrow tables.

    - ``columns``: the input column or columns.
    - ``state``: the columns that are kept for each key: a ``pyarrow.Schema``, a ``StructType``, or DDL text such as
      ``"product double"``.
    - ``partial``: makes states of rows. It takes a table of ``columns`` and the int64 column ``group_id``, and
      returns one row of ``group_id`` and the state columns for each ``group_id``.
    - ``merge``: makes one state of several. It takes a table of ``group_id`` and the state columns, and returns one
      row for each ``group_id``.
    - ``finish``: makes results of states. It takes a table of the state columns, and returns an array with one
      result per row. Without ``finish``, the result is the state column, or a struct of several; query clients see this
      result in any case.
    - ``result``: the type of the results of ``finish``: an Arrow or Spark type, or DDL text such as ``"double"``.

    Each call is for many keys. ``merge`` is called any number of times, so that the order and the number of calls must
    not matter. Raises ``InvalidOperatorError`` for arguments that do not fit together.

        S.merge("x", state="s double", partial=lambda rows: rows.group_by("group_id").aggregate([("x", "product")])
                .rename_columns(["group_id", "s"]), merge=...)
    """
    names = tuple(checked_names("S.merge: ", columns))
    for what, function in (("partial", partial), ("merge", merge), ("finish", finish)):
        if not callable(function) and (what != "finish" or function is not None):
            raise InvalidOperatorError(f"merge: {what}={function!r} is not a function of an Arrow table.")
    if (finish is None) != (result is None):
        raise InvalidOperatorError("merge: finish= and result= (the type that it gives) must be given together.")
    return AggregateFunction("merge", columns=names, user=UserFunctions(state, partial, merge, finish, result))


def _bounds(function: str, limit: int | None, max_bytes: int | None) -> dict[str, Any]:
    """Return the arguments of a list. Without a limit, it has the same name in the state as with a limit of 1,000.

    The default was a limit of 1,000: queries that began with it can continue.
    """
    if limit is not None and max_bytes is not None:
        raise InvalidOperatorError(
            f"{function}: limit={limit!r} and max_bytes={max_bytes!r}: give limit to drop elements, or max_bytes to "
            "keep all of them up to that size."
        )
    if limit is not None:
        return {"arguments": (_positive(function, "limit", limit),)}
    most = MAX_LIST_BYTES if max_bytes is None else int(_positive(function, "max_bytes", max_bytes))
    return {"arguments": (str(_FORMER_LIMIT),), "max_bytes": most}


def _positive(function: str, name: str, value: int) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidOperatorError(f"{function}: {name}={value!r} must be a positive integer.")
    return str(value)
