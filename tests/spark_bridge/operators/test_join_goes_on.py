"""A join continues with other partitions and another backend, on the real coordinator and host; waiting rows stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from backends.encoding.key_groups import key_groups
from spark_bridge.operators import waiting_rows
from spark_bridge.operators.join_sides import FULL, JOIN_TYPES
from spark_bridge.operators.join_task import JoinLogic
from spark_bridge.task.executor import StepTimer
from tests.effort import effort, only_thorough
from tests.spark_bridge.operators.join_model import Case, Model, Pair, Row, pair_of, random_rows, shared_rows
from tests.spark_bridge.operators.operator_runs import Watermark
from tests.spark_bridge.state_flows import G, HostAccess, Query

BATCHES = effort(3, 6)


def started(root: Path, logic: JoinLogic, random: np.random.Generator, number: int) -> Query:
    """Start a run of the query with a new layout."""
    backend = str(random.choice(["rocksdb", "file"]))
    return Query(root, logic.schema, "join", int(random.choice([1, 2, 5])), backend, f"run{number}")


def batch(query: Query, logic: JoinLogic, left: list[Row], right: list[Row], watermark_ms: int) -> list[Pair]:
    """Run a batch and return the output of the join."""
    rows = shared_rows(logic, left, right)
    groups = key_groups(rows.select(logic.keys.names), G)
    found: list[Pair] = []

    def work(access: HostAccess, p: int) -> None:
        own = rows.filter(pa.array(groups * query.n // G == p))
        for output in logic.process(iter([own] if own.num_rows else []), access, StepTimer()):
            found.extend(map(pair_of, output.to_pylist()))

    query.run_batch(1000, watermark_ms, work)
    return found


@pytest.mark.parametrize("how", [how if how == FULL else only_thorough(how) for how in JOIN_TYPES])
def test_rows_are_those_of_the_reference_whatever_the_layout(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in np.random.default_rng().integers(1 << 30, size=effort(1, 5)).tolist():
        random = np.random.default_rng(seed)
        monkeypatch.setattr(waiting_rows, "WAITING_CHUNK_ROWS", int(random.choice([1, 3, 64])))
        case = Case(how, 0, 20) if random.random() < 0.8 else Case(how, in_key=True)
        logic, model, watermark = case.logic(), Model(case), Watermark(10)
        root = tmp_path / str(seed)
        root.mkdir()
        query, until = started(root, logic, random, 0), 0
        for number in range(1, BATCHES + 3):
            until += int(random.integers(0, 15)) if number <= BATCHES else 200
            count = 20 if number <= BATCHES else 1
            left, right = (random_rows(random, count, until, ["a", "b", "c", None], side) for side in ("left", "right"))
            times = watermark.times()
            found = batch(query, logic, left, right, times.watermark_ms)
            assert sorted(found, key=repr) == sorted(model.batch(left, right, times), key=repr), (seed, number)
            watermark.advance(row[1] for row in (*left, *right))
            if random.random() < 0.5:
                query.stop()
                query = started(root, logic, random, number)
        query.stop()
