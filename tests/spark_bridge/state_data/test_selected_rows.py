"""Conditions on rows in storage: skipped partitions and key ranges have no matching row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from coordinator_actor.reading.stored_versions import find_state
from spark_bridge.exceptions import RequestError
from spark_bridge.state_data.frames import state_changes_table, state_table
from spark_bridge.state_data.state_sources import StateSource, selected, state_source
from tests.effort import effort
from tests.spark_bridge.state_flows import NAMES, Flow
from tests.spark_bridge.variable_operations import random_batch

COMPARISONS = ["=", "<", "<=", ">", ">="]


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flow]:
    rng = random.Random(7)
    made = Flow(tmp_path_factory.mktemp("selected"), n=4, backend="file")
    for _ in range(4):
        made.batch(random_batch(rng))
    yield made
    made.close()


def rows_of(source: StateSource) -> list[Any]:
    found = [batch for piece in source.pieces for batch in source.batches(piece)]
    return sorted(map(repr, pa.Table.from_batches(found, source.schema).to_pylist()))


def passes(row: dict[str, Any], where: list[tuple[Any, ...]]) -> bool:
    checks = {
        "=": lambda v, w: v == w,
        "in": lambda v, w: v in w,
        "<": lambda v, w: v < w,
        "<=": lambda v, w: v <= w,
        ">": lambda v, w: v > w,
        ">=": lambda v, w: v >= w,
    }
    return all(row[column] is not None and checks[operator](row[column], value) for column, operator, value in where)


@pytest.mark.parametrize("name", NAMES)
def test_skipped_rows_do_not_match_the_conditions(worked: Flow, name: str) -> None:
    source = state_source(find_state(worked.location), "op", name, None)
    rows = state_table(worked.location, "op", name).to_pylist()
    assert rows
    rng = random.Random(3)
    pruned = 0
    for _ in range(effort(18, 60)):
        one, other = rng.choice(rows), rng.choice(rows)
        where: list[tuple[Any, ...]] = rng.choice(
            [
                [("user", "=", one["user"])],
                [("user", "=", one["user"]), ("shard", "=", one["shard"])],
                [("user", "in", [one["user"], other["user"]]), ("shard", "in", [one["shard"], other["shard"]])],
                [("user", "=", one["user"]), ("shard", rng.choice(["<", "<=", ">", ">="]), other["shard"])],
                [("user", rng.choice(["<", "<=", ">", ">="]), one["user"])],
                [("user", ">=", one["user"]), ("user", "<", other["user"])],
                [("shard", "<", one["shard"])],
                [("user", "=", one["user"]), ("shard", rng.choice(COMPARISONS), (one["shard"] or 0) + 0.5)],
                [("user", "=", one["user"]), ("shard", rng.choice(COMPARISONS), rng.choice([2**70, -(2**70)]))],
                [("user", "=", one["user"]), ("shard", "in", [one["shard"], 0.5, 2**70])],
            ]
        )
        if any(value is None or (isinstance(value, list) and None in value) for _, _, value in where):
            continue
        chosen = selected(source, None, where)
        pruned += len(chosen.pieces) < 4
        assert rows_of(chosen) == sorted(repr(row) for row in rows if passes(row, where)), where
    assert pruned


def test_columns_are_those_wanted(worked: Flow) -> None:
    source = state_source(find_state(worked.location), "op", "total", None)
    assert selected(source, ["n", "user"]).schema.names == ["n", "user"]
    assert selected(source).schema == source.schema
    with pytest.raises(RequestError, match="no column 'x'"):
        selected(source, ["x"])
    with pytest.raises(RequestError, match="cannot be compared"):
        selected(source, None, [("shard", "=", "x")])


@pytest.mark.parametrize("name", NAMES)
def test_the_rows_of_a_version_as_inserts_are_its_changes_from_nothing(worked: Flow, name: str) -> None:
    """A stream that begins with them has the columns of what follows, and the values as the changes would show them."""
    source = state_source(find_state(worked.location), "op", name, 1, inserts=True)
    found = [batch for piece in source.reading.pieces for batch in source.batches(piece)]
    table = pa.Table.from_batches(found, source.schema)
    expected = state_changes_table(worked.location, "op", name, from_version=0, to_version=1)
    assert table.schema == expected.schema
    assert sorted(map(repr, table.to_pylist())) == sorted(map(repr, expected.to_pylist()))
