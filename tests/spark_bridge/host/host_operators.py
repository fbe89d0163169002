"""Queries of operators with several column families, in the form that hosts receive."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from backends.encoding.operator_schema import OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from coordinator_actor.messages import OperatorSpec
from tests.coordinator_actor.coordinator_world import World
from tests.spark_bridge.host.host_steps import plan_spark

SCHEMA = OperatorSchema(
    (
        StateVariable("a", "value", {"a": StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("v", pa.int64())]))}),
        StateVariable("b", "value", {"b": StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("v", pa.int64())]))}),
    )
).to_json()


def binary(*values: bytes | None) -> pa.BinaryArray:
    return pa.array(values, pa.binary())


def spec(n: int = 2, backend: str = "file", **changes: Any) -> OperatorSpec:
    return OperatorSpec("op", n, SCHEMA, backend=backend, kind="transform_with_state", **changes)


def reg_of(w: World, *specs: OperatorSpec, run: str = "run1") -> Any:
    return w.registration(run, 2, operators=specs)


def write_offsets(w: World, batch: int, watermark: int, timestamp: int) -> None:
    plan_spark(w, batch)
    path = w.root / "ck" / "offsets" / str(batch)
    path.write_text(f'v1\n{{"batchWatermarkMs":{watermark},"batchTimestampMs":{timestamp},"conf":{{}}}}\n{{}}')
