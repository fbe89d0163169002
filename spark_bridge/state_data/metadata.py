"""Tables of the operators and state variables in storage, their schemas, and the versions that can be read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import pyarrow as pa

from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.spark_types import to_spark_type
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from spark_bridge.aggregates.aggregator import is_aggregate_state
from spark_bridge.state_format.layouts import MAP, ROWS, SESSIONS
from spark_bridge.state_format.stored_rows import VariableRows

METADATA_SCHEMA = pa.schema(
    [
        pa.field("operatorName", pa.string()),
        pa.field("operatorKind", pa.string()),
        pa.field("stateVarName", pa.string()),
        pa.field("stateVariableType", pa.string()),
        pa.field("ttlMs", pa.int64()),
        pa.field("keySchema", pa.string()),
        pa.field("userKeySchema", pa.string()),
        pa.field("valueSchema", pa.string()),
        pa.field("numPartitions", pa.int32()),
        pa.field("numKeyGroups", pa.int32()),
        pa.field("provider", pa.string()),
        pa.field("minVersion", pa.int64()),
        pa.field("maxVersion", pa.int64()),
        pa.field("minBatchId", pa.int64()),
        pa.field("maxBatchId", pa.int64()),
    ]
)
"""The columns of ``state_metadata``, with the names of Spark's state metadata source where that source has them."""


def state_metadata_table(
    checkpoint_location: str,
    *,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.Table:
    """Return a row per state variable of every operator, as of the last completed version.

    ``keySchema``, ``userKeySchema`` (of a map) and ``valueSchema`` are in Spark's JSON. Versions ``minVersion`` to
    ``maxVersion`` can be read: the states after batches ``minBatchId`` to ``maxBatchId`` (-1: no batch is committed).
    Raises ``VersionNotFoundError`` if there is no version, ``MissingFileError``, ``DamagedFileError``.
    """
    return metadata_of(StateVersions.look(find_state(checkpoint_location, state_location, storage_options)))


def metadata_of(versions: StateVersions) -> pa.Table:
    """Return the table of ``state_metadata_table``."""
    there = versions.readable
    oldest, newest = (there[0], there[-1]) if there else (0, versions.resolve(None))
    rows = []
    for operator, entry in sorted(versions.operators(newest).items()):
        schema = versions.schema(entry)
        for variable in schema.variables:
            if variable.deleted:
                continue
            of = VariableRows(schema, variable)
            rows.append(
                {
                    "operatorName": operator,
                    "operatorKind": operator_kind(schema),
                    "stateVarName": variable.name,
                    "stateVariableType": variable.kind,
                    "ttlMs": variable.ttl_ms,
                    "keySchema": _json([of.key.field(i) for i in of.key_order]),
                    "userKeySchema": _json(of.inner) if variable.kind == MAP else None,
                    "valueSchema": _json(of.value) if len(of.value) else None,
                    "numPartitions": entry.num_partitions,
                    "numKeyGroups": versions.key_groups,
                    "provider": entry.backend,
                    "minVersion": oldest,
                    "maxVersion": newest,
                    "minBatchId": max(0, oldest - 1),
                    "maxBatchId": newest - 1,
                }
            )
    return pa.Table.from_pylist(rows, schema=METADATA_SCHEMA)


def operator_kind(schema: OperatorSchema) -> str:
    """Return the kind of operator that makes such state, as in ``OperatorSpec``, as far as the schema tells."""
    if any(v.kind != ROWS for v in schema.variables):
        return "transform_with_state"
    (variable,) = schema.variables
    rows = VariableRows(schema, variable)
    if not is_aggregate_state(rows.stored_value):
        return "deduplicate"
    return "session_aggregate" if rows.kind == SESSIONS else "aggregate"


def _json(fields: Iterable[pa.Field]) -> str:
    """Return a struct of the fields in Spark's JSON."""
    return json.dumps(to_spark_type("the columns", pa.struct(list(fields))), separators=(",", ":"), ensure_ascii=False)
