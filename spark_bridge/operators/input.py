"""What all stateful operators do with their DataFrame: check keys, find event time, route rows to their partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from backends.encoding.key_groups import DEFAULT_KEY_GROUPS, MAX_KEY_GROUPS
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.partitioning import quote, target_column
from spark_bridge.operators.types import column_type, is_ordered
from spark_bridge.task.watermark import WATERMARK_METADATA, EventTime

OWN_COLUMNS = "__statestore_"
BY_BYTES = "UTF8_BINARY"
"""The collation of plain strings."""
KEY_GROUPS_CONF = "spark.statestore.keyGroups"


class Task(Protocol):
    """The function of a ``mapInArrow``."""

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows in, rows out."""


def key_group_count(df: DataFrame) -> int:
    """The number of key groups that the session asks for; raises ``InvalidOperatorError``."""
    key_groups = int(df.sparkSession.conf.get(KEY_GROUPS_CONF, str(DEFAULT_KEY_GROUPS)) or DEFAULT_KEY_GROUPS)
    if not 1 <= key_groups <= MAX_KEY_GROUPS:
        raise InvalidOperatorError(f"{KEY_GROUPS_CONF}={key_groups} is out of range; it must be 1 to {MAX_KEY_GROUPS}.")
    return key_groups


def partition_count(df: DataFrame, given: int | None, key_groups: int) -> int:
    """The number of state partitions: as given, or as the session shuffles; raises ``InvalidOperatorError``."""
    n = given if given is not None else int(df.sparkSession.conf.get("spark.sql.shuffle.partitions", "200") or 200)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidOperatorError(f"num_partitions={given!r} must be a positive integer.")
    if n > key_groups:
        raise InvalidOperatorError(
            f"num_partitions={n} is greater than the number of key groups, {key_groups}; lower it, or start a new "
            f"checkpoint with a greater {KEY_GROUPS_CONF}."
        )
    return n


def check_keys(schema: T.StructType, keys: Sequence[str]) -> None:
    """Refuse key columns that do not exist, come twice or have no order; raises ``InvalidOperatorError``."""
    if not keys:
        raise InvalidOperatorError("by= names no key column; give one column name or a list of them.")
    if len(set(keys)) != len(keys):
        raise InvalidOperatorError(f"by={list(keys)!r} names a key column twice.")
    for key in keys:
        kind = column_type(schema, key, "by=")
        if not is_ordered(kind):
            raise InvalidOperatorError(f"Key column {key!r} has type {kind.simpleString()}, which cannot be a key.")
        if getattr(kind, "collation", BY_BYTES) != BY_BYTES:
            raise InvalidOperatorError(
                f"Key column {key!r} has type {kind.simpleString()}, and keys are told apart by their bytes: cast it to string, or "
                "group by an expression such as lower()."
            )
        if key.startswith(OWN_COLUMNS):
            raise InvalidOperatorError(
                f"Key column {key!r} has a name of the state store's own, which begin with {OWN_COLUMNS}: rename it."
            )


def watermark_columns(schema: T.StructType) -> list[str]:
    """The columns that have a watermark: event times, and windows of them."""
    return [f.name for f in schema.fields if WATERMARK_METADATA in (f.metadata or {})]


def event_time_of(schema: T.StructType, columns: Sequence[str]) -> EventTime | None:
    """The one of the columns that has a watermark; raises ``InvalidOperatorError`` if there are several, as Spark does."""
    marked = [name for name in columns if name in watermark_columns(schema)]
    if len(marked) > 1:
        raise InvalidOperatorError(
            f"The columns {', '.join(marked)} all have a watermark, and only one can say what is late and done: leave the "
            "others out."
        )
    if not marked:
        return None
    return EventTime(marked[0], isinstance(schema[marked[0]].dataType, T.StructType))


def routed(df: DataFrame, keys: Sequence[str], num_partitions: int, key_groups: int) -> DataFrame:
    """The rows in the partitions that own the key groups of their keys, which are given in the order in which they are stored.

    Neither group nor partition goes along: a task finds both out from the keys, of each key once.
    """
    return df.repartition(num_partitions, target_column(list(keys), num_partitions, key_groups))


def map_in_arrow(df: DataFrame, task: Task, name: str, schema: T.StructType) -> DataFrame:
    """The rows that the task makes of each partition; the plan shows the function under ``name``."""
    names = df.columns
    # Spark's own mapInArrow takes the dot of such a name for a field of a struct.
    is_plain = all(c not in column for column in names for c in ".`")
    if not is_plain:
        df = df.toDF(*(f"column{i}" for i in range(len(names))))

    def run(batches: Any) -> Any:
        return task.run(batches if is_plain else (b.rename_columns(names) for b in batches))

    run.__name__ = run.__qualname__ = name
    return df.mapInArrow(run, schema)


def columns_of(df: DataFrame, names: Sequence[str]) -> list[Any]:
    """Columns by name, whatever characters the names have."""
    return [F.col(quote(name)) for name in names]
