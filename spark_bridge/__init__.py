"""PySpark streams with versioned, fault-tolerant, queryable state in Ray.

Names are loaded when first used: PySpark workers import this package and need neither Ray nor all of PySpark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_bridge import functions
    from spark_bridge.aggregate_operator import aggregate
    from spark_bridge.client import QueryableStateClient
    from spark_bridge.host_actor import StateStoreHost
    from spark_bridge.savepoints import (
        delete_savepoint,
        describe_savepoint,
        list_savepoints,
        rebalance,
        restore_savepoint,
        trigger_savepoint,
    )
    from spark_bridge.session import attach, init_spark, stop_spark

__all__ = [
    "QueryableStateClient",
    "StateStoreHost",
    "aggregate",
    "attach",
    "delete_savepoint",
    "describe_savepoint",
    "functions",
    "init_spark",
    "list_savepoints",
    "rebalance",
    "restore_savepoint",
    "stop_spark",
    "trigger_savepoint",
]

_HOMES = {
    "QueryableStateClient": "spark_bridge.client",
    "StateStoreHost": "spark_bridge.host_actor",
    "aggregate": "spark_bridge.aggregate_operator",
    "attach": "spark_bridge.session",
    "delete_savepoint": "spark_bridge.savepoints",
    "describe_savepoint": "spark_bridge.savepoints",
    "init_spark": "spark_bridge.session",
    "list_savepoints": "spark_bridge.savepoints",
    "rebalance": "spark_bridge.savepoints",
    "restore_savepoint": "spark_bridge.savepoints",
    "stop_spark": "spark_bridge.session",
    "trigger_savepoint": "spark_bridge.savepoints",
}


def __getattr__(name: str) -> Any:
    if name == "functions":
        return import_module("spark_bridge.functions")
    if name not in _HOMES:
        raise AttributeError(f"module 'spark_bridge' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
