"""Aggregate functions for ``aggregate``, named after ``pyspark.sql.functions``.

from spark_bridge import functions as S
aggregate(df, by="user", operator="totals", n=S.count(), last=S.last("page", by="ts"))

Every result is independent of the order in which rows come and of how they are split into batches
and partitions; sums, means and variances of floating point numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from spark_bridge.aggregates.distinct_sketch import MAX_PRECISION, MIN_PRECISION, precision_of
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.windows import session_window, window

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


@dataclass(frozen=True)
class UserFunctions:
    """What ``merge`` was given: types as the user wrote them."""

    state: Any
    partial: Callable[[pa.Table], pa.Table]
    merge: Callable[[pa.Table], pa.Table]
    finish: Callable[[pa.Table], pa.Array | pa.ChunkedArray] | None
    result: Any


@dataclass(frozen=True)
class AggregateFunction:
    """A declared aggregation: its name, input column (None for ``count()``) and ordering column.

    ``columns``: several input columns instead of one. ``arguments``: what else its state depends on.
    """

    name: str
    column: str | None = None
    by: str | None = None
    columns: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    user: UserFunctions | None = None


def count(column: str | None = None) -> AggregateFunction:
    """Rows per key, or rows whose ``column`` is not null. Result: long, never null."""
    return AggregateFunction("count", None if column == "*" else column)


def count_if(column: str) -> AggregateFunction:
    """Rows whose boolean ``column`` is true. Result: long, never null."""
    return AggregateFunction("count_if", column)


def sum(column: str) -> AggregateFunction:
    """Sum of the non-null values; null if there is none. Result: long, double or decimal, as in Spark.

    A sum of integers beyond 64 bits fails the batch instead of wrapping around.
    """
    return AggregateFunction("sum", column)


def min(column: str) -> AggregateFunction:
    """Least non-null value; NaN counts as greater than every other number, as in Spark."""
    return AggregateFunction("min", column)


def max(column: str) -> AggregateFunction:
    """Greatest non-null value; NaN counts as greater than every other number, as in Spark."""
    return AggregateFunction("max", column)


def mean(column: str) -> AggregateFunction:
    """Arithmetic mean of the non-null values, null if there is none.

    Result: double; of decimals a decimal with four more digits behind the point, as in Spark.
    """
    return AggregateFunction("mean", column)


avg = mean


def stddev_samp(column: str) -> AggregateFunction:
    """Standard deviation of the values as a sample, as a double; null of less than two values."""
    return AggregateFunction("stddev_samp", column)


stddev = stddev_samp


def stddev_pop(column: str) -> AggregateFunction:
    """Standard deviation of the values as a whole population, as a double; null if there is none."""
    return AggregateFunction("stddev_pop", column)


def var_samp(column: str) -> AggregateFunction:
    """Variance of the values as a sample, as a double; null of less than two values."""
    return AggregateFunction("var_samp", column)


variance = var_samp


def var_pop(column: str) -> AggregateFunction:
    """Variance of the values as a whole population, as a double; null if there is none."""
    return AggregateFunction("var_pop", column)


def first(column: str, by: str | None = None) -> AggregateFunction:
    """Value of the row with the least ``by`` (event time); null values count, rows without ``by`` do not.

    ``by`` defaults to the DataFrame's watermark column. Of rows with the same ``by`` the greatest value wins.
    """
    return AggregateFunction("first", column, by)


def last(column: str, by: str | None = None) -> AggregateFunction:
    """Value of the row with the greatest ``by`` (event time); null values count, rows without ``by`` do not.

    ``by`` defaults to the DataFrame's watermark column. Of rows with the same ``by`` the greatest value wins.
    """
    return AggregateFunction("last", column, by)


def collect_list(column: str, by: str | None = None, *, limit: int = 1000) -> AggregateFunction:
    """The non-null values as an array, ordered by ``by`` and then by value; of more than ``limit`` the last ones.

    ``by`` defaults to the DataFrame's watermark column; without one, values are ordered by themselves. The array is empty,
    not null, if there is no value.
    """
    return AggregateFunction("collect_list", column, by, arguments=(_positive("collect_list", "limit", limit),))


def collect_set(column: str, *, limit: int = 1000) -> AggregateFunction:
    """The distinct non-null values as an array in ascending order; of more than ``limit`` the least ones.

    The array is empty, not null, if there is no value.
    """
    return AggregateFunction("collect_set", column, arguments=(_positive("collect_set", "limit", limit),))


def top_k(column: str | Sequence[str], k: int, by: str | None = None, *, descending: bool = True) -> AggregateFunction:
    """The ``k`` greatest values (with ``descending=False`` the least) as an array in that order.

    With ``by`` the values of the rows with the greatest ``by``: then null values count, and rows without ``by`` do not.
    Several columns give an array of structs, which without ``by`` are ordered by their fields. Of rows with
    the same ``by``, those with the greatest value (with ``descending=False`` the least) come first.
    """
    columns = (None, tuple(column)) if not isinstance(column, str) else (column, ())
    arguments = (_positive("top_k", "k", k), *(() if descending else ("ascending",)))
    return AggregateFunction("top_k", columns[0], by, columns[1], arguments)


def approx_count_distinct(column: str, rsd: float = 0.05) -> AggregateFunction:
    """About how many distinct non-null values there are, by HyperLogLog++ as in Spark. Result: long, never null.

    ``rsd`` is the relative standard deviation allowed, 0.0022 to 0.39. A key's state takes at most 2**p bytes with
    p = ceil(2 log2(1.106 / rsd)), which are 512 bytes for 0.05, and less as long as the count is small.
    """
    precision = precision_of(rsd) if 0 < rsd < 1 else 0
    if not MIN_PRECISION <= precision <= MAX_PRECISION:
        raise InvalidOperatorError(f"approx_count_distinct: rsd={rsd!r} is out of range; it must be 0.0022 to 0.39.")
    return AggregateFunction("approx_count_distinct", column, arguments=(str(precision),))


def merge(
    columns: str | Sequence[str],
    *,
    state: Any,
    partial: Callable[[pa.Table], pa.Table],
    merge: Callable[[pa.Table], pa.Table],
    finish: Callable[[pa.Table], pa.Array | pa.ChunkedArray] | None = None,
    result: Any = None,
) -> AggregateFunction:
    """An aggregate of your own, as functions on whole Arrow tables.

    ``state`` declares the columns kept per key (a ``pyarrow.Schema``, a ``StructType``, or DDL such as
    ``"product double"``). ``partial`` gets the rows as a table of ``columns`` and the int64 column ``group_id``, and gives
    one row of ``group_id`` and the state columns for each ``group_id`` that it was given. ``merge`` gets and gives such
    states: all those of a ``group_id`` become one. Both are called once for many keys, and ``merge`` any number of
    times, so it must not matter in which order and how often. ``finish`` gets the states without ``group_id`` and gives an
    array of one result per row, of the type ``result`` (an Arrow or Spark type, or DDL such as ``"double"``). Without
    ``finish`` the result is the state column, or a struct of several; this is also what query clients see.

        S.merge("x", state="s double", partial=lambda rows: rows.group_by("group_id").aggregate([("x", "product")])
                .rename_columns(["group_id", "s"]), merge=...)
    """
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    for what, function in (("partial", partial), ("merge", merge), ("finish", finish)):
        if not callable(function) and (what != "finish" or function is not None):
            raise InvalidOperatorError(f"merge: {what}={function!r} is no function of an Arrow table.")
    if (finish is None) != (result is None):
        raise InvalidOperatorError("merge: finish= and result= (the type that it gives) must be given together.")
    return AggregateFunction("merge", columns=names, user=UserFunctions(state, partial, merge, finish, result))


def _positive(function: str, name: str, value: int) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidOperatorError(f"{function}: {name}={value!r} must be a positive integer.")
    return str(value)
