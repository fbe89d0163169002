"""Spark settings that stateful operators need, since Spark takes such a query for stateless.

Spark drops operators that it thinks empty and still commits the batch, so that their tasks, and
their commits, never happen (DESIGN, section 8).
"""

from __future__ import annotations

from pyspark.sql import SparkSession

EMPTY_RELATION_RULE = "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation"
EXCLUDED_RULES = "spark.sql.optimizer.excludedRules"
STATELESS_AQE = "spark.sql.adaptive.streaming.stateless.enabled"
AVAILABLE_NOW_WRAPPER = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"


def excluded_rules(current: str | None) -> str:
    """The excluded optimizer rules with ours among them."""
    rules = [r.strip() for r in (current or "").split(",") if r.strip()]
    return ",".join(rules if EMPTY_RELATION_RULE in rules else [*rules, EMPTY_RELATION_RULE])


def redact(spark: SparkSession, name: str) -> None:
    """Keep a local property out of Spark's event log.

    Spark writes the local properties of each job into it, and redacts, of those with a name like token or secret, only the ones
    that are in its configuration as well (``EventLoggingListener.redactProperties``).
    """
    spark.sparkContext._jsc.sc().conf().set(name, "given to each job")


def apply_settings(spark: SparkSession) -> None:
    """Set on a live session what stateful operators need."""
    spark.conf.set(EXCLUDED_RULES, excluded_rules(spark.conf.get(EXCLUDED_RULES, None)))
    spark.conf.set(STATELESS_AQE, "false")
    # Spark 4.2 makes one batch of the whole backlog for availableNow beside a rate source, which makes quiet streams tick.
    spark.conf.set(AVAILABLE_NOW_WRAPPER, "true")


def unsafe_settings(spark: SparkSession) -> str | None:
    """Why the session's settings would lose state, or None."""
    rules = [r.strip() for r in (spark.conf.get(EXCLUDED_RULES, "") or "").split(",")]
    if EMPTY_RELATION_RULE not in rules:
        return f"{EXCLUDED_RULES} must contain {EMPTY_RELATION_RULE}, or Spark skips state tasks of empty inputs; it was changed after attach."
    if str(spark.conf.get(STATELESS_AQE, "false")).lower() != "false":
        return (
            f"{STATELESS_AQE} must be false, or Spark skips state tasks of empty inputs; it was changed after attach."
        )
    return None
