"""Aggregate functions for ``aggregate``, named after ``pyspark.sql.functions``.

from spark_bridge import functions as S
aggregate(df, by="user", operator="totals", n=S.count(), last=S.last("page", by="ts"))
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AggregateFunction:
    """A declared aggregation: its name, input column (None for ``count()``) and ordering column."""

    name: str
    column: str | None = None
    by: str | None = None


def count(column: str | None = None) -> AggregateFunction:
    """Rows per key, or rows whose ``column`` is not null. Result: long, never null."""
    return AggregateFunction("count", None if column == "*" else column)


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
    """Arithmetic mean of the non-null values as a double; null if there is none."""
    return AggregateFunction("mean", column)


avg = mean


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
