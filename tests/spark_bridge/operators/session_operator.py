"""An aggregate by session windows: its schema, its logic, and the schema of its rows."""

from __future__ import annotations

import pyarrow as pa

from backends.encoding.operator_schema import OperatorSchema
from spark_bridge.operators.session_task import SessionLogic
from spark_bridge.state_format.layouts import session_schema
from tests.spark_bridge.operators.operator_runs import TS, WINDOW
from tests.spark_bridge.variable_operations import AGGREGATOR


def session_operator() -> tuple[OperatorSchema, SessionLogic, pa.Schema]:
    """Return count and mean by ``k`` and ``session_window`` of rows with a value ``v``."""
    by_key = pa.schema([pa.field("k", pa.string())])
    schema = session_schema(by_key, TS, AGGREGATOR.state_schema)
    output = pa.schema([*by_key, pa.field("session_window", WINDOW), *AGGREGATOR.result_fields])
    logic = SessionLogic(schema, AGGREGATOR, output, "session_window", "update")
    return schema, logic, pa.schema([*by_key, pa.field("session_window", WINDOW), pa.field("v", pa.float64())])
