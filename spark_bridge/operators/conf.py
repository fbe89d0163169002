"""The settings of a Spark session that stateful operators read: key groups, state partitions, the size of frames."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

from backends.encoding.key_groups import DEFAULT_KEY_GROUPS, MAX_KEY_GROUPS
from spark_bridge.exceptions import InvalidOperatorError

KEY_GROUPS_CONF = "spark.statestore.keyGroups"
"""The number of key groups of a new query, 1 to 65536; a query goes on with the number in its checkpoint only."""
SHUFFLE_PARTITIONS_CONF = "spark.sql.shuffle.partitions"
FRAME_ROWS_CONF = "spark.sql.execution.arrow.maxRecordsPerBatch"
FRAME_BYTES_CONF = "spark.sql.execution.arrow.maxBytesPerBatch"
"""Since Spark 4.0."""
NO_LIMIT = (1 << 31) - 1
"""Stands for no limit of the rows or bytes of a frame, as in Spark."""
MOST_FRAME_BYTES = NO_LIMIT - 1
"""The highest value that Spark takes for ``FRAME_BYTES_CONF``."""


def configured_key_groups(spark: SparkSession) -> int:
    """Return the number of key groups that the session asks for, whatever it is."""
    return int(spark.conf.get(KEY_GROUPS_CONF, str(DEFAULT_KEY_GROUPS)) or DEFAULT_KEY_GROUPS)


def key_group_count(df: DataFrame) -> int:
    """Return the number of key groups that the DataFrame's session asks for; raises ``InvalidOperatorError``."""
    key_groups = configured_key_groups(df.sparkSession)
    if not 1 <= key_groups <= MAX_KEY_GROUPS:
        raise InvalidOperatorError(f"{KEY_GROUPS_CONF}={key_groups} is out of range; it must be 1 to {MAX_KEY_GROUPS}.")
    return key_groups


def partition_count(df: DataFrame, given: int | None, key_groups: int) -> int:
    """Return the number of state partitions: ``given``, or that of the session's shuffles.

    Raises ``InvalidOperatorError``.
    """
    n = given if given is not None else int(df.sparkSession.conf.get(SHUFFLE_PARTITIONS_CONF, "200") or 200)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidOperatorError(f"num_partitions={given!r} must be a positive integer.")
    if n > key_groups:
        raise InvalidOperatorError(
            f"num_partitions={n} is greater than the number of key groups, {key_groups}; lower it, or start a new "
            f"checkpoint with a greater {KEY_GROUPS_CONF}."
        )
    return n


def frame_limits(spark: SparkSession) -> tuple[int, int]:
    """Return the most rows and the most bytes of a DataFrame for a processor, as the session sets them for Arrow.

    What is zero or less is no limit, as in Spark. Bytes may have a unit, such as ``64MB``.
    """
    rows = int(spark.conf.get(FRAME_ROWS_CONF, "10000") or 10_000)
    # Spark checks the default as well, where it knows the setting: what is no limit must be right as one.
    text = spark.conf.get(FRAME_BYTES_CONF, str(MOST_FRAME_BYTES)) or MOST_FRAME_BYTES
    num_bytes = int(spark._jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes(str(text)))
    return _or_no_limit(rows), _or_no_limit(num_bytes)


def _or_no_limit(limit: int) -> int:
    return limit if 0 < limit < MOST_FRAME_BYTES else NO_LIMIT
