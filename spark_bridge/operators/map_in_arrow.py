"""The function of a stateful operator's tasks, put into a DataFrame's plan by ``mapInArrow``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as T


class Task(Protocol):
    """The work on the rows of one partition."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows made of the given rows."""


def map_in_arrow(df: DataFrame, task: Task, name: str, schema: T.StructType) -> DataFrame:
    """Return the rows that the task makes of each partition; the plan shows the function under ``name``."""
    names = df.columns
    # Spark's own mapInArrow takes a dot in a column's name for the field of a struct.
    is_plain = all(c not in column for column in names for c in ".`")
    if not is_plain:
        df = df.toDF(*(f"column{i}" for i in range(len(names))))

    def run(batches: Any) -> Any:
        return task.run(batches if is_plain else (b.rename_columns(names) for b in batches))

    run.__name__ = run.__qualname__ = name
    return df.mapInArrow(run, schema)
