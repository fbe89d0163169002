"""PySpark streams with versioned, fault-tolerant, queryable state in Ray.

Names are loaded when first used: PySpark workers import this package and need neither Ray nor all of PySpark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_bridge import functions
    from spark_bridge.aggregate_operator import aggregate
    from spark_bridge.deduplicate import deduplicate
    from spark_bridge.host_actor import StateStoreHost
    from spark_bridge.operator_progress import (
        StateOperatorListener,
        StateOperatorProgress,
        add_state_operator_listener,
        remove_state_operator_listener,
        state_operator_progress,
    )
    from spark_bridge.queryable.async_client import AsyncQueryableStateClient
    from spark_bridge.queryable.client import QueryableStateClient
    from spark_bridge.queryable.client_proxy import KvStateClientProxy
    from spark_bridge.queryable.client_scans import StateScan
    from spark_bridge.queryable.limits import RequestLimits
    from spark_bridge.queryable.server import KvStateServer
    from spark_bridge.queryable.tls import TlsConf
    from spark_bridge.queryable.watch import StateChange, StateWatch
    from spark_bridge.savepoints import (
        delete_savepoint,
        describe_savepoint,
        list_savepoints,
        rebalance,
        restore_savepoint,
        trigger_savepoint,
    )
    from spark_bridge.session import attach, init_spark, stop_spark
    from spark_bridge.state_data import read_state, read_state_changes, state_metadata
    from spark_bridge.state_tables import (
        state_batches,
        state_changes_batches,
        state_changes_table,
        state_metadata_table,
        state_table,
    )
    from spark_bridge.stateful.arrow_processor import ArrowBatch, ArrowResult, ArrowStatefulProcessor
    from spark_bridge.stateful.handle import StatefulProcessorHandle
    from spark_bridge.stateful.list_state import ListState
    from spark_bridge.stateful.map_state import MapState
    from spark_bridge.stateful.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
    from spark_bridge.stateful.tester import ProcessorTester
    from spark_bridge.stateful.transform_with_state import (
        transform_with_state,
        transform_with_state_in_arrow,
        transform_with_state_in_pandas,
    )
    from spark_bridge.stateful.value_state import ValueState

__all__ = [
    "ArrowBatch",
    "ArrowResult",
    "ArrowStatefulProcessor",
    "AsyncQueryableStateClient",
    "ExpiredTimerInfo",
    "KvStateClientProxy",
    "KvStateServer",
    "ListState",
    "MapState",
    "ProcessorTester",
    "QueryableStateClient",
    "RequestLimits",
    "StateChange",
    "StateOperatorListener",
    "StateOperatorProgress",
    "StateScan",
    "StateStoreHost",
    "StateWatch",
    "StatefulProcessor",
    "StatefulProcessorHandle",
    "TimerValues",
    "TlsConf",
    "ValueState",
    "add_state_operator_listener",
    "aggregate",
    "attach",
    "deduplicate",
    "delete_savepoint",
    "describe_savepoint",
    "functions",
    "init_spark",
    "list_savepoints",
    "read_state",
    "read_state_changes",
    "rebalance",
    "remove_state_operator_listener",
    "restore_savepoint",
    "state_batches",
    "state_changes_batches",
    "state_changes_table",
    "state_metadata",
    "state_metadata_table",
    "state_operator_progress",
    "state_table",
    "stop_spark",
    "transform_with_state",
    "transform_with_state_in_arrow",
    "transform_with_state_in_pandas",
    "trigger_savepoint",
]

_HOMES = {
    "ArrowBatch": "spark_bridge.stateful.arrow_processor",
    "ArrowResult": "spark_bridge.stateful.arrow_processor",
    "ArrowStatefulProcessor": "spark_bridge.stateful.arrow_processor",
    "AsyncQueryableStateClient": "spark_bridge.queryable.async_client",
    "ExpiredTimerInfo": "spark_bridge.stateful.stateful_processor",
    "KvStateClientProxy": "spark_bridge.queryable.client_proxy",
    "KvStateServer": "spark_bridge.queryable.server",
    "ListState": "spark_bridge.stateful.list_state",
    "MapState": "spark_bridge.stateful.map_state",
    "ProcessorTester": "spark_bridge.stateful.tester",
    "QueryableStateClient": "spark_bridge.queryable.client",
    "StateChange": "spark_bridge.queryable.watch",
    "RequestLimits": "spark_bridge.queryable.limits",
    "StateOperatorListener": "spark_bridge.operator_progress",
    "StateOperatorProgress": "spark_bridge.operator_progress",
    "StateScan": "spark_bridge.queryable.client_scans",
    "StateStoreHost": "spark_bridge.host_actor",
    "StateWatch": "spark_bridge.queryable.watch",
    "StatefulProcessor": "spark_bridge.stateful.stateful_processor",
    "StatefulProcessorHandle": "spark_bridge.stateful.handle",
    "TimerValues": "spark_bridge.stateful.stateful_processor",
    "TlsConf": "spark_bridge.queryable.tls",
    "ValueState": "spark_bridge.stateful.value_state",
    "add_state_operator_listener": "spark_bridge.operator_progress",
    "aggregate": "spark_bridge.aggregate_operator",
    "attach": "spark_bridge.session",
    "deduplicate": "spark_bridge.deduplicate",
    "delete_savepoint": "spark_bridge.savepoints",
    "describe_savepoint": "spark_bridge.savepoints",
    "init_spark": "spark_bridge.session",
    "list_savepoints": "spark_bridge.savepoints",
    "read_state": "spark_bridge.state_data",
    "read_state_changes": "spark_bridge.state_data",
    "rebalance": "spark_bridge.savepoints",
    "remove_state_operator_listener": "spark_bridge.operator_progress",
    "restore_savepoint": "spark_bridge.savepoints",
    "state_batches": "spark_bridge.state_tables",
    "state_changes_batches": "spark_bridge.state_tables",
    "state_changes_table": "spark_bridge.state_tables",
    "state_metadata": "spark_bridge.state_data",
    "state_metadata_table": "spark_bridge.state_tables",
    "state_operator_progress": "spark_bridge.operator_progress",
    "state_table": "spark_bridge.state_tables",
    "stop_spark": "spark_bridge.session",
    "transform_with_state": "spark_bridge.stateful.transform_with_state",
    "transform_with_state_in_arrow": "spark_bridge.stateful.transform_with_state",
    "transform_with_state_in_pandas": "spark_bridge.stateful.transform_with_state",
    "trigger_savepoint": "spark_bridge.savepoints",
}


def __getattr__(name: str) -> Any:
    if name == "functions":
        return import_module("spark_bridge.functions")
    if name not in _HOMES:
        raise AttributeError(f"module 'spark_bridge' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
