"""The settings of a Spark session that stateful operators read: the numbers of key groups and of state partitions."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

from backends.encoding.key_groups import DEFAULT_KEY_GROUPS, MAX_KEY_GROUPS
from spark_bridge.exceptions import InvalidOperatorError

KEY_GROUPS_CONF = "spark.statestore.keyGroups"
"""The number of key groups of a new query, 1 to 65536; a query goes on with the number in its checkpoint only."""
SHUFFLE_PARTITIONS_CONF = "spark.sql.shuffle.partitions"


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
