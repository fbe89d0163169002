"""Summaries of operators, ready for JSON: the state variables that can be queried, and their columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.messages import RunningOperator
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_format.windowed_keys import window_place


def operator_summary(found: RunningOperator) -> dict[str, Any]:
    """Return the summary of one operator: its query, its versions, its state variables with their columns."""
    schema = OperatorSchema.from_json(found.operator.schema)
    return {
        "operator": found.operator.name,
        "kind": found.operator.kind,
        "query_name": found.query_name,
        "query_id": found.query_id,
        "run_id": found.run_id,
        "partitions": found.operator.num_partitions,
        "key_groups": found.key_groups,
        "backend": found.operator.backend,
        "oldest_version": found.oldest_version,
        "completed_version": found.completed_version,
        "ended": found.ended,
        "state": variables_summary(schema),
    }


def variables_summary(schema: OperatorSchema) -> list[dict[str, Any]]:
    """Return the summary of each state variable that is in use."""
    return [_described(VariableRows(schema, v)) for v in schema.in_use]


def _described(rows: VariableRows) -> dict[str, Any]:
    window = window_place(rows.variable)
    described: dict[str, Any] = {
        "name": rows.variable.name,
        "kind": rows.kind,
        "key": _columns([rows.key.field(i) for i in rows.key_order]),
        "value": _columns(rows.value),
    }
    if len(rows.inner):
        described["inner"] = _columns(rows.inner)
    if window is not None:
        described["window"] = rows.key.field(window).name
    if rows.variable.ttl_ms is not None:
        described["ttl_ms"] = rows.variable.ttl_ms
    return described


def _columns(fields: pa.Schema | list[pa.Field]) -> dict[str, str]:
    return {field.name: str(field.type) for field in fields}
