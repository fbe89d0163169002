"""Spark settings that stateful operators need, and those that the state store reads.

Spark takes a query with these operators for stateless. It drops operators that it thinks empty and still commits the
batch, so that their tasks would not run and their state would have no commit.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from backends.conf import MAX_STANDBY_REPLICAS
from backends.exceptions import InvalidStateStoreArgument

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EMPTY_RELATION_RULE = "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation"
EXCLUDED_RULES = "spark.sql.optimizer.excludedRules"
STATELESS_AQE = "spark.sql.adaptive.streaming.stateless.enabled"
AVAILABLE_NOW_WRAPPER = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"
MIN_BATCHES_CONF = "spark.sql.streaming.minBatchesToRetain"
STATE_LOCATION_CONF = "spark.statestore.location"
"""The location of the state of queries, if not in their checkpoint locations."""
SHARED_FILES_CONF = "spark.statestore.sharedFileSystem"
"""Set to true, it declares that all machines share the directories of checkpoint and state."""
STANDBY_REPLICAS_CONF = "spark.statestore.standbyReplicas"
"""The standby replicas of the queries that start from now on, instead of ``StateStoreConf.standby_replicas``."""
STORAGE_PRICES_CONF = "spark.statestore.storagePrices"
_STORAGE_PREFIXES = tuple(f"spark.hadoop.{name}" for name in ("fs.s3a.", "fs.defaultFS", "dfs.", "hadoop.security."))
_NAME_NODE_PREFIXES = ("dfs.ha.namenodes.", "dfs.namenode.rpc-address.", "dfs.client.failover.proxy.provider.")
"""Hadoop's settings that say which NameNodes a nameservice has."""


def excluded_rules(current: str | None) -> str:
    """Return the excluded optimizer rules with ``EMPTY_RELATION_RULE`` among them."""
    rules = [r.strip() for r in (current or "").split(",") if r.strip()]
    return ",".join(rules if EMPTY_RELATION_RULE in rules else [*rules, EMPTY_RELATION_RULE])


def redact(spark: SparkSession, name: str) -> None:
    """Keep a local property out of Spark's event log.

    Spark writes the local properties of each job into that log. It redacts properties with a name like token or secret,
    but only those that are in its configuration as well (``EventLoggingListener.redactProperties``).
    """
    spark.sparkContext._jsc.sc().conf().set(name, "given to each job")


def apply_settings(spark: SparkSession) -> None:
    """Set on a live session the settings that stateful operators need."""
    spark.conf.set(EXCLUDED_RULES, excluded_rules(spark.conf.get(EXCLUDED_RULES, None)))
    spark.conf.set(STATELESS_AQE, "false")
    # A rate source makes quiet streams tick. With it, availableNow of Spark 4.2 would make one batch of a backlog.
    spark.conf.set(AVAILABLE_NOW_WRAPPER, "true")


def unsafe_settings(spark: SparkSession) -> str | None:
    """Return why the session's settings would lose state, or None if they would not."""
    rules = [r.strip() for r in (spark.conf.get(EXCLUDED_RULES, "") or "").split(",")]
    if EMPTY_RELATION_RULE not in rules:
        return (
            f"{EXCLUDED_RULES} must contain {EMPTY_RELATION_RULE}, or Spark skips state tasks of empty inputs; it was "
            "changed after attach."
        )
    if str(spark.conf.get(STATELESS_AQE, "false")).lower() != "false":
        return (
            f"{STATELESS_AQE} must be false, or Spark skips state tasks of empty inputs; it was changed after attach."
        )
    return None


def standby_replicas(spark: SparkSession, default: int) -> int:
    """Return how many standby replicas a query that starts now has. Raises ``InvalidStateStoreArgument``."""
    if (text := spark.conf.get(STANDBY_REPLICAS_CONF, None)) is None:
        return default
    if not text.strip().isdecimal() or int(text) > MAX_STANDBY_REPLICAS:
        raise InvalidStateStoreArgument(
            f"{STANDBY_REPLICAS_CONF}={text!r} must be a number from 0 to {MAX_STANDBY_REPLICAS}: the copies that a "
            "query keeps of each partition."
        )
    return int(text)


def storage_settings(spark: SparkSession) -> dict[str, str]:
    """Return the session's settings of S3 and HDFS, by their Spark names.

    Those that the driver has from ``HADOOP_CONF_DIR`` say where HDFS is: Ray's nodes need no such directory for that.
    """
    own = {k: v for k, v in spark.sparkContext.getConf().getAll() if k.startswith(_STORAGE_PREFIXES)}
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    read = {
        f"spark.hadoop.{prefix}{name}": value
        for prefix in _NAME_NODE_PREFIXES
        for name, value in hadoop.getPropsWithPrefix(prefix).items()
    }
    default = str(hadoop.get("fs.defaultFS") or "")
    return {**read, **({"spark.hadoop.fs.defaultFS": default} if default.startswith("hdfs:") else {}), **own}


# Whether the session of this process is being shut down, by ``stop_spark`` or without it.
#
# A program may die of its own error, or stop Spark or Ray itself. Threads of the session then find Spark and
# Ray half stopped. No user can fix anything then, and log lines about it would bury the program's own error.


class Shutdown:
    """The end of one session. ``is_spark_over`` says whether its Spark has been stopped, or is being stopped."""

    def __init__(self, is_spark_over: Callable[[], bool] = lambda: False) -> None:
        self._is_spark_over = is_spark_over
        self._has_begun = threading.Event()
        # Exit handlers run in reverse order: this one before those of RayDP and Ray, which were registered earlier.
        atexit.register(self.begin)

    def begin(self) -> None:
        self._has_begun.set()
        atexit.unregister(self.begin)

    @property
    def is_over(self) -> bool:
        """Whether Ray must not be asked any more: its interface would start another cluster."""
        import ray  # not above: readers of state without Ray import the settings, too

        return self._has_begun.is_set() or not ray.is_initialized()

    @property
    def is_ending(self) -> bool:
        """Whether the session or its Spark ends: failures are then expected."""
        return self.is_over or self._is_spark_over()

    @property
    def log_level(self) -> int:
        """The level for problems of the session's threads: a warning, or nothing to see during a shutdown."""
        return logging.INFO if self.is_ending else logging.WARNING


def spark_is_over(spark: SparkSession) -> bool:
    """Return whether a Spark session has been stopped, or is being stopped, or its JVM is gone."""
    from py4j.protocol import Py4JError  # not above: savepoints are listed without Spark

    context = spark.sparkContext._jsc
    try:
        return context is None or bool(context.sc().isStopped())
    except (Py4JError, OSError):
        return True
