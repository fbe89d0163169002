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
    from spark_bridge.queryable.client.features import FeatureRows
    from spark_bridge.queryable.client.kafka_sink import KafkaSink
    from spark_bridge.queryable.client.scans import StateScan, VersionDiff
    from spark_bridge.queryable.client.watch import StateChange, StateWatch
    from spark_bridge.queryable.server.limits import RequestLimits
    from spark_bridge.queryable.server.proxy import KvStateClientProxy
    from spark_bridge.queryable.server.server import KvStateServer
    from spark_bridge.queryable.sql.sql import SqlLimits
    from spark_bridge.serving import StateServing, serve_state
    from spark_bridge.session.feature_views import declare_feature_view, drop_feature_view
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
    from spark_bridge.state_surgery.forget_keys import forget_keys
    from spark_bridge.state_surgery.mirror import mirror
    from spark_bridge.state_surgery.new_state import NewStateReport
    from spark_bridge.state_surgery.rewrite_state import bootstrap_state, rewrite_state
    from spark_bridge.state_surgery.take_over import take_over
    from spark_bridge.stateful.handle import StatefulProcessorHandle, ValueState
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
    "FeatureRows",
    "KafkaSink",
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
    "declare_feature_view",
    "deduplicate",
    "delete_savepoint",
    "describe_savepoint",
    "drop_feature_view",
    "forget_keys",
    "functions",
    "init_spark",
    "join",
    "join_asof",
    "list_savepoints",
    "lookup",
    "mirror",
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
    name: f"spark_bridge.{module}"
    for module, names in {
        "functions": "functions",
        "host_actor": "StateStoreHost",
        "lookups": "lookup state_as_of",
        "operators.aggregate": "aggregate",
        "operators.deduplicate": "deduplicate",
        "operators.join": "join join_asof",
        "queryable.client.async_client": "AsyncQueryableStateClient",
        "queryable.client.client": "QueryableStateClient",
        "queryable.client.features": "FeatureRows",
        "queryable.client.scans": "StateScan VersionDiff",
        "queryable.client.kafka_sink": "KafkaSink",
        "queryable.client.watch": "StateChange StateWatch",
        "queryable.server.limits": "RequestLimits",
        "queryable.server.proxy": "KvStateClientProxy",
        "queryable.server.server": "KvStateServer",
        "queryable.sql.sql": "SqlLimits",
        "serving": "StateServing serve_state",
        "session.feature_views": "declare_feature_view drop_feature_view",
        "session.lifecycle": "attach init_spark scale_hosts stop_spark",
        "session.progress": "CheckpointListener CheckpointProgress StateOperatorListener StateOperatorProgress "
        "add_state_operator_listener checkpoint_progress remove_state_operator_listener state_operator_progress",
        "session.ray_cluster": "setup_ray_on_spark",
        "session.savepoints": "delete_savepoint describe_savepoint list_savepoints rebalance restore_savepoint "
        "trigger_savepoint",
        "state_data.checkpoint_client": "CheckpointClient",
        "state_data.frames": "read_state read_state_changes state_batches state_changes_batches state_changes_table "
        "state_metadata state_metadata_table state_table",
        "state_data.ray_dataset": "read_state_dataset",
        "state_surgery.forget_keys": "forget_keys",
        "state_surgery.mirror": "mirror",
        "state_surgery.new_state": "NewStateReport",
        "state_surgery.rewrite_state": "bootstrap_state rewrite_state",
        "state_surgery.take_over": "take_over",
        "stateful.handle": "StatefulProcessorHandle ValueState",
        "stateful.list_state": "ListState",
        "stateful.map_state": "MapState",
        "stateful.stateful_processor": "ArrowBatch ArrowResult ArrowStatefulProcessor ExpiredTimerInfo "
        "StatefulProcessor TimerValues",
        "stateful.testing": "ProcessorTester",
        "stateful.transform_with_state": "transform_with_state transform_with_state_in_arrow "
        "transform_with_state_in_pandas",
        "transport.tls": "TlsConf",
    }.items()
    for name in names.split()
}

__getattr__ = lazy_names("spark_bridge", _HOMES)
