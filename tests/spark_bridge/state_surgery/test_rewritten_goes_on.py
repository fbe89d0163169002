"""A query continues from rewritten state, with changed keys too, on the real coordinator and host."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from coordinator_actor.messages import OperatorSpec
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from spark_bridge.state_data.frames import state_table
from spark_bridge.state_surgery import rewrite_state, shuffle
from tests.effort import effort
from tests.spark_bridge.state_flows import NAMES, Flow
from tests.spark_bridge.state_surgery.surgery_steps import OwnWorkers
from tests.spark_bridge.variable_operations import flat, in_order, random_batch


@pytest.mark.parametrize("seed", range(effort(2, 10)))
def test_query_continues_from_rewritten_state(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    backend, other = rng.sample(["rocksdb", "file"], 2)
    monkeypatch.setattr(shuffle, "RUN_BYTES", rng.choice([1, 500, 1 << 20]))
    monkeypatch.setattr(shuffle, "FLUSH_BYTES", rng.choice([1, 4_000, 1 << 20]))
    monkeypatch.setattr(shuffle, "REWRITE_CHUNK_BYTES", rng.choice([1, 4_000, 1 << 20]))
    monkeypatch.setattr(rewrite_state, "new_query_id", lambda: "q")  # the id of the test's queries
    flow = Flow(tmp_path / "old", n=rng.choice([1, 3]), backend=backend)
    for _ in range(6):
        flow.batch(random_batch(rng))
    flow.stop()

    def same(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    def renamed(batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rename the user ``a`` to ``z``, which belongs to another key group."""
        users = batch["user"]
        return batch.set_column(0, "user", pc.if_else(pc.equal(users, "a"), "z", users))

    function = rng.choice([same, renamed])
    spec = OperatorSpec("op", flow.n, _schema(flow), backend, "transform_with_state")
    n = rng.choice([1, 2, 5])
    rewrite_state.rewrite_state(
        flow.location,
        "op",
        dict.fromkeys(NAMES, function),
        str(tmp_path / "new" / "ck"),
        program=[spec],
        num_partitions=n,
        backend=other,
        workers=OwnWorkers(),
    )
    if function is renamed:
        for name in NAMES:
            of = getattr(flow.model, name).of
            for key in [key for key in of if key[0] == "a"]:
                of["z", key[1]] = of.pop(key)
    again = Flow(tmp_path / "new", n=n, backend=other, run="run2")
    again.model = flow.model
    assert again.version == 6
    for _ in range(4):
        again.batch(random_batch(rng))
        held = again.model.snapshot()
        for name in NAMES:
            table = state_table(again.location, "op", name).drop_columns(["key_group", "partition_id"])
            rows = [tuple(row.values()) for row in table.to_pylist()]
            assert in_order(rows) == in_order(flat(name, held[name])), (name, again.version)
    again.stop()


def _schema(flow: Flow) -> str:
    """Return the schema that the program declares."""
    versions = StateVersions.look(find_state(flow.location))
    return versions.schema(versions.operators(versions.completed)["op"]).to_json()
