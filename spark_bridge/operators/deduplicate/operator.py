"""``deduplicate``: of the rows with one key, only the first goes through, as an ordinary streaming DataFrame."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import DataFrame

from backends.exceptions import StateStoreError
from coordinator_actor.messages import OperatorSpec
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.conf import key_group_count, partition_count
from spark_bridge.operators.declared_operators import check_operator_name, declare
from spark_bridge.operators.deduplicate.deduplicate_task import DeduplicateLogic
from spark_bridge.operators.key_columns import check_keys
from spark_bridge.operators.map_in_arrow import KeyRouting, map_in_arrow
from spark_bridge.operators.spark_types import arrow_type, is_ordered
from spark_bridge.operators.watermark_columns import event_time_of, watermark_lag_ms
from spark_bridge.operators.windows import microseconds
from spark_bridge.state_format.layouts import deduplicate_schema
from spark_bridge.task.state_task import StateTask


def deduplicate(
    df: DataFrame,
    by: str | Sequence[str],
    *,
    operator: str,
    within: str | None = None,
    num_partitions: int | None = None,
) -> DataFrame:
    """Drop the rows of a stream whose key has come before; the other rows keep all their columns.

    The counterparts in Spark are ``dropDuplicates`` and, with ``within``, ``dropDuplicatesWithinWatermark``.

    Arguments:

    - ``df``: a streaming DataFrame. Where it has a watermark, late rows are dropped.
    - ``by``: the key column or columns. Of the rows that have one key in a batch, the one with the least event time
      goes through.
    - ``operator``: the name of this state in the checkpoint and in queries.
    - ``within``: a duration such as ``"10 minutes"``; a key is forgotten that long after the event time of its first
      row. With the delay of the watermark this is ``dropDuplicatesWithinWatermark``. Without ``within``, keys are
      remembered for good, or, if the watermark column is one of them, until the watermark passes it.
    - ``num_partitions``: the number of state partitions, by default the session's ``spark.sql.shuffle.partitions``. The
      number stays with the checkpoint.

    Raises ``InvalidOperatorError`` for everything that the DataFrame and the arguments show to be wrong.
    """
    keys = [by] if isinstance(by, str) else list(by)
    if not df.isStreaming:
        raise InvalidOperatorError(
            "deduplicate takes a streaming DataFrame (spark.readStream); for a batch DataFrame use "
            "df.dropDuplicates(...)."
        )
    check_keys(df.schema, keys)
    if len(set(df.columns)) != len(df.columns):
        raise InvalidOperatorError(f"The DataFrame has two columns of one name: {', '.join(df.columns)}.")
    check_operator_name(operator, df)
    key_groups = key_group_count(df)
    partitions = partition_count(df, num_partitions, key_groups)
    event_time = event_time_of(df.schema, df.columns)
    expiry, within_us = None, None
    if within is not None:
        if event_time is None or event_time.is_window:
            raise InvalidOperatorError(
                f"within={within!r} counts from the event time of a key's first row: put withWatermark on a time "
                "column first."
            )
        within_us = microseconds(df.sparkSession, within)
        if within_us < 0:
            raise InvalidOperatorError(f"within={within!r} is less than nothing; give a duration such as '10 minutes'.")
        expiry = arrow_type(df.schema[event_time.column].dataType)
    key_time = event_time if within is None and event_time is not None and event_time.column in keys else None
    stored = sorted(keys, key=lambda name: key_time is None or name != key_time.column)
    key_schema = pa.schema([pa.field(n, arrow_type(df.schema[n].dataType)) for n in stored])
    try:
        schema = deduplicate_schema(key_schema, tuple(keys), expiry)
    except StateStoreError as error:
        raise InvalidOperatorError(f"Operator {operator!r}: {error}") from error
    uses_time = event_time is not None
    spec = OperatorSpec(operator, partitions, schema.to_json(), kind="deduplicate", uses_time=uses_time)
    compared = tuple(f.name for f in df.schema.fields if f.name not in keys and is_ordered(f.dataType))
    logic = DeduplicateLogic(schema, tuple(df.columns), compared, event_time, key_time, within_us)
    lag_ms = watermark_lag_ms(df.schema, event_time)
    task = StateTask(operator, partitions, key_groups, tuple(stored), logic, uses_time, lag_ms)
    return map_in_arrow(df, task.run, declare(spec), df.schema, KeyRouting(stored, partitions, key_groups))
