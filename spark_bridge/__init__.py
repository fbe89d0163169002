"""PySpark streams with versioned, fault-tolerant, queryable state in Ray.

Names are loaded when first used: PySpark workers import this package and need neither Ray nor all of PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.lazy_names import lazy_names

if TYPE_CHECKING:
    from spark_bridge import functions
    from spark_bridge.host_actor import StateStoreHost
    from spark_bridge.lookups import lookup, state_as_of
    from spark_bridge.operators.aggregate import aggregate
    from spark_bridge.operators.deduplicate import deduplicate
    from spark_bridge.operators.join import join, join_asof
    from spark_bridge.queryable.client.async_client import AsyncQueryableStateClient
    from spark_bridge.queryable.client.client import QueryableStateClient
    from spark_bridge.queryable.client.scans import StateScan, VersionDiff
    from spark_bridge.queryable.client.watch import StateChange, StateWatch
    from spark_bridge.queryable.server.limits import RequestLimits
    from spark_bridge.queryable.server.proxy import KvStateClientProxy
    from spark_bridge.queryable.server.server import KvStateServer
    from spark_bridge.queryable.sql.sql import SqlLimits
    from spark_bridge.serving import StateServing, serve_state
    from spark_bridge.session.lifecycle import attach, init_spark, scale_hosts, stop_spark
    from spark_bridge.session.progress import (
        CheckpointListener,
        CheckpointProgress,
        StateOperatorListener,
        StateOperatorProgress,
        add_state_operator_listener,
        checkpoint_progress,
        remove_state_operator_listener,
        state_operator_progress,
    )
    from spark_bridge.session.ray_cluster import setup_ray_on_spark
    from spark_bridge.session.savepoints import (
        delete_savepoint,
        describe_savepoint,
        list_savepoints,
        rebalance,
        restore_savepoint,
        trigger_savepoint,
    )
    from spark_bridge.state_data.checkpoint_client import CheckpointClient
    from spark_bridge.state_data.frames import (
        read_state,
        read_state_changes,
        state_batches,
        state_changes_batches,
        state_changes_table,
        state_metadata,
        state_metadata_table,
        state_table,
    )
    from spark_bridge.state_data.ray_dataset import read_state_dataset
    from spark_bridge.state_surgery.bootstrap_state import bootstrap_state
    from spark_bridge.state_surgery.forget_keys import forget_keys
    from spark_bridge.state_surgery.new_state import NewStateReport
    from spark_bridge.state_surgery.rewrite_state import rewrite_state
    from spark_bridge.state_surgery.take_over import take_over
    from spark_bridge.stateful.handle import StatefulProcessorHandle
    from spark_bridge.stateful.list_state import ListState
    from spark_bridge.stateful.map_state import MapState
    from spark_bridge.stateful.stateful_processor import (
        ArrowBatch,
        ArrowResult,
        ArrowStatefulProcessor,
        ExpiredTimerInfo,
        StatefulProcessor,
        TimerValues,
    )
    from spark_bridge.stateful.testing import ProcessorTester
    from spark_bridge.stateful.transform_with_state import (
        transform_with_state,
        transform_with_state_in_arrow,
        transform_with_state_in_pandas,
    )
    from spark_bridge.stateful.value_state import ValueState
    from spark_bridge.transport.tls import TlsConf

__all__ = [
    "ArrowBatch",
    "ArrowResult",
    "ArrowStatefulProcessor",
    "AsyncQueryableStateClient",
    "CheckpointClient",
    "CheckpointListener",
    "CheckpointProgress",
    "ExpiredTimerInfo",
    "KvStateClientProxy",
    "KvStateServer",
    "ListState",
    "MapState",
    "NewStateReport",
    "ProcessorTester",
    "QueryableStateClient",
    "RequestLimits",
    "SqlLimits",
    "StateChange",
    "StateOperatorListener",
    "StateOperatorProgress",
    "StateScan",
    "StateServing",
    "StateStoreHost",
    "StateWatch",
    "StatefulProcessor",
    "StatefulProcessorHandle",
    "TimerValues",
    "TlsConf",
    "ValueState",
    "VersionDiff",
    "add_state_operator_listener",
    "aggregate",
    "attach",
    "bootstrap_state",
    "checkpoint_progress",
    "deduplicate",
    "delete_savepoint",
    "describe_savepoint",
    "forget_keys",
    "functions",
    "init_spark",
    "join",
    "join_asof",
    "list_savepoints",
    "lookup",
    "read_state",
    "read_state_changes",
    "read_state_dataset",
    "rebalance",
    "remove_state_operator_listener",
    "restore_savepoint",
    "rewrite_state",
    "scale_hosts",
    "serve_state",
    "setup_ray_on_spark",
    "state_as_of",
    "state_batches",
    "state_changes_batches",
    "state_changes_table",
    "state_metadata",
    "state_metadata_table",
    "state_operator_progress",
    "state_table",
    "stop_spark",
    "take_over",
    "transform_with_state",
    "transform_with_state_in_arrow",
    "transform_with_state_in_pandas",
    "trigger_savepoint",
]

_HOMES = {
    "ArrowBatch": "spark_bridge.stateful.stateful_processor",
    "ArrowResult": "spark_bridge.stateful.stateful_processor",
    "ArrowStatefulProcessor": "spark_bridge.stateful.stateful_processor",
    "AsyncQueryableStateClient": "spark_bridge.queryable.client.async_client",
    "CheckpointClient": "spark_bridge.state_data.checkpoint_client",
    "CheckpointListener": "spark_bridge.session.progress",
    "CheckpointProgress": "spark_bridge.session.progress",
    "ExpiredTimerInfo": "spark_bridge.stateful.stateful_processor",
    "KvStateClientProxy": "spark_bridge.queryable.server.proxy",
    "KvStateServer": "spark_bridge.queryable.server.server",
    "ListState": "spark_bridge.stateful.list_state",
    "MapState": "spark_bridge.stateful.map_state",
    "NewStateReport": "spark_bridge.state_surgery.new_state",
    "ProcessorTester": "spark_bridge.stateful.testing",
    "QueryableStateClient": "spark_bridge.queryable.client.client",
    "RequestLimits": "spark_bridge.queryable.server.limits",
    "SqlLimits": "spark_bridge.queryable.sql.sql",
    "StateChange": "spark_bridge.queryable.client.watch",
    "StateOperatorListener": "spark_bridge.session.progress",
    "StateOperatorProgress": "spark_bridge.session.progress",
    "StateScan": "spark_bridge.queryable.client.scans",
    "StateServing": "spark_bridge.serving",
    "StateStoreHost": "spark_bridge.host_actor",
    "StateWatch": "spark_bridge.queryable.client.watch",
    "StatefulProcessor": "spark_bridge.stateful.stateful_processor",
    "StatefulProcessorHandle": "spark_bridge.stateful.handle",
    "TimerValues": "spark_bridge.stateful.stateful_processor",
    "TlsConf": "spark_bridge.transport.tls",
    "ValueState": "spark_bridge.stateful.value_state",
    "VersionDiff": "spark_bridge.queryable.client.scans",
    "add_state_operator_listener": "spark_bridge.session.progress",
    "aggregate": "spark_bridge.operators.aggregate",
    "attach": "spark_bridge.session.lifecycle",
    "bootstrap_state": "spark_bridge.state_surgery.bootstrap_state",
    "checkpoint_progress": "spark_bridge.session.progress",
    "deduplicate": "spark_bridge.operators.deduplicate",
    "delete_savepoint": "spark_bridge.session.savepoints",
    "describe_savepoint": "spark_bridge.session.savepoints",
    "forget_keys": "spark_bridge.state_surgery.forget_keys",
    "functions": "spark_bridge.functions",
    "init_spark": "spark_bridge.session.lifecycle",
    "join": "spark_bridge.operators.join",
    "join_asof": "spark_bridge.operators.join",
    "list_savepoints": "spark_bridge.session.savepoints",
    "lookup": "spark_bridge.lookups",
    "read_state": "spark_bridge.state_data.frames",
    "read_state_changes": "spark_bridge.state_data.frames",
    "read_state_dataset": "spark_bridge.state_data.ray_dataset",
    "rebalance": "spark_bridge.session.savepoints",
    "remove_state_operator_listener": "spark_bridge.session.progress",
    "restore_savepoint": "spark_bridge.session.savepoints",
    "rewrite_state": "spark_bridge.state_surgery.rewrite_state",
    "scale_hosts": "spark_bridge.session.lifecycle",
    "serve_state": "spark_bridge.serving",
    "setup_ray_on_spark": "spark_bridge.session.ray_cluster",
    "state_as_of": "spark_bridge.lookups",
    "state_batches": "spark_bridge.state_data.frames",
    "state_changes_batches": "spark_bridge.state_data.frames",
    "state_changes_table": "spark_bridge.state_data.frames",
    "state_metadata": "spark_bridge.state_data.frames",
    "state_metadata_table": "spark_bridge.state_data.frames",
    "state_operator_progress": "spark_bridge.session.progress",
    "state_table": "spark_bridge.state_data.frames",
    "stop_spark": "spark_bridge.session.lifecycle",
    "take_over": "spark_bridge.state_surgery.take_over",
    "transform_with_state": "spark_bridge.stateful.transform_with_state",
    "transform_with_state_in_arrow": "spark_bridge.stateful.transform_with_state",
    "transform_with_state_in_pandas": "spark_bridge.stateful.transform_with_state",
    "trigger_savepoint": "spark_bridge.session.savepoints",
}

__getattr__ = lazy_names("spark_bridge", _HOMES)
