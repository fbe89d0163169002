"""The one way of this project's functions into a DataFrame's plan: ``mapInArrow`` over columns by their position.

Spark resolves names where this project has columns. It reads a dot as a field of a struct, and by default it refuses a
name if the DataFrame has another one that differs only in case. So no name of a user's column goes to Spark here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from spark_bridge.operators.partitioning import target_column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql import types as T

RunOnBatches: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""The work on the rows of one partition: Arrow batches in, Arrow batches out."""


@dataclass(frozen=True)
class KeyRouting:
    """Sends each row to the partition that owns the key group of the row's key; ``keys`` are in stored order.

    The rows carry neither key group nor partition: a task computes both from the keys, once for each key.
    """

    keys: Sequence[str]
    num_partitions: int
    key_groups: int


def map_in_arrow(
    df: DataFrame, run: RunOnBatches, name: str, schema: T.StructType | str, routing: KeyRouting | None = None
) -> DataFrame:
    """Return the rows that ``run`` makes of each partition; Spark's plan shows the function as ``name``.

    ``run`` gets the columns with their own names. With ``routing``, rows go to the partitions of their keys first.
    """
    names = df.columns
    by_position = df.toDF(*_positions(df))
    if routing is not None:
        columns = [_position(names.index(key)) for key in routing.keys]
        # The shuffle comes last: Spark 4.2 skips tasks of an operator that a projection separates from it.
        by_position = by_position.repartition(
            routing.num_partitions, target_column(columns, routing.num_partitions, routing.key_groups)
        )

    def run_with_names(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return run(batch.rename_columns(names) for batch in batches)

    run_with_names.__name__ = run_with_names.__qualname__ = name
    return by_position.mapInArrow(run_with_names, schema)


def columns_by_name(df: DataFrame) -> tuple[DataFrame, dict[str, Column]]:
    """Return the DataFrame with other names, and its columns by the names that they had.

    The columns are bare references: Spark keeps the watermark of a window over one, and drops it over an alias.
    """
    from pyspark.sql import functions as F

    positions = _positions(df)
    return df.toDF(*positions), {name: F.col(at) for name, at in zip(df.columns, positions, strict=True)}


def _positions(df: DataFrame) -> list[str]:
    return [_position(i) for i in range(len(df.columns))]


def _position(index: int) -> str:
    return f"column{index}"
