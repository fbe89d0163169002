"""State that expires: unseen at once, and removed bit by bit; so is what deleted variables held."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.encoding.operator_schema import OperatorSchema, evolved
from spark_bridge.stateful import ttl as expiry
from spark_bridge.stateful.testing import LocalStateAccess
from tests.effort import effort
from tests.spark_bridge.host.local_partition import KEY, KEY_GROUPS, OTHER, LocalPartition, Variables, check

GROUPS = KEY_GROUPS[1] - KEY_GROUPS[0]


@pytest.mark.parametrize("n", [3, 200])
def test_expired_values_are_invisible_at_once_and_go_when_their_key_is_handled(tmp_path: Path, n: int) -> None:
    variables = Variables((10, 10, 10))
    partition = LocalPartition(tmp_path, variables.init, "processingtime")
    families = ["value", "list", "list.-chunks", "map", "map.-entries"]

    def write(_: Any) -> None:
        variables.value.update((1, "a"))
        variables.list.appendList([(i, "e") for i in range(n)])
        for i in range(n):
            variables.map.updateValue((i, "k"), (1.0,))

    def write_one(_: Any) -> None:
        variables.value.update((2, "b"))
        variables.list.appendValue((-1, "e"))
        variables.map.updateValue((1, "k"), (2.0,))

    def see_one(_: Any) -> None:
        assert variables.value.get() == (2, "b")
        assert variables.list.exists()
        assert list(variables.list.get()) == [(-1, "e")]
        assert variables.map.exists()
        assert variables.map.getValue((0, "k")) is None
        assert not variables.map.containsKey((2, "k"))
        assert variables.map.getValue((1, "k")) == (2.0,)
        assert list(variables.map.iterator()) == [((1, "k"), (2.0,))]

    def see_none(_: Any) -> None:
        assert variables.value.get() is None
        assert not variables.value.exists()
        assert not variables.list.exists()
        assert list(variables.list.get()) == []
        assert not variables.map.exists()
        assert variables.map.getValue((1, "k")) is None
        assert list(variables.map.keys()) == []

    partition.handle([KEY, OTHER], write, timestamp_ms=100)
    partition.handle([KEY], write_one, timestamp_ms=105)
    partition.handle([KEY], see_one, timestamp_ms=110)
    partition.handle([KEY, OTHER], see_none, timestamp_ms=115)
    left = {family: len(partition.rows(family)) for family in ("value", "list", "map")}
    # Heads of separately stored rows are removed once the sweep has found that these rows are gone.
    assert left["value"] == 0 and max(left["list"], left["map"]) <= 2 * (n > 64)
    # Long lists and large maps lose their rows to the sweep, and their heads then.
    for _ in range(2):
        partition.handle([], see_none, timestamp_ms=116)
    assert [family for family in families if partition.rows(family)] == []


def test_values_written_over_expired_ones_are_kept(tmp_path: Path) -> None:
    variables = Variables((10, 10, 10))
    partition = LocalPartition(tmp_path, variables.init, "processingtime")

    def write(_: Any) -> None:
        assert (variables.value.get(), list(variables.list.get()), list(variables.map.keys())) == (None, [], [])
        variables.value.update((1, "a"))
        variables.list.appendValue((1, "e"))
        variables.map.updateValue((1, "k"), (1.0,))

    for batch in (1, 2, 3):
        partition.handle([KEY], write, timestamp_ms=batch * 100)
        for family in ("value", "list", "map"):
            assert len(partition.rows(family)) == 1


def test_expired_rows_are_swept_gradually_except_for_current_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "SWEPT_ROWS", 125)
    variables = Variables((10, 10, 10))
    partition = LocalPartition(tmp_path, variables.init, "processingtime")
    keys = [("u", i) for i in range(30)]
    families = ["value", "list", "list.-chunks", "map", "map.-entries"]

    def write(key: Any) -> None:
        variables.value.update((key[1], "v"))
        variables.list.put([(i, "e") for i in range(100 if key[1] % 20 == 0 else 2)])
        for i in range(100 if key[1] % 20 == 0 else 2):
            variables.map.updateValue((i, "k"), (1.0,))

    def rows() -> tuple[int, dict[Any, Any]]:
        """How many there are, and those of the value."""
        values = dict(partition.rows("value"))
        return len(values) + sum(len(partition.rows(family)) for family in families[1:]), values

    partition.handle(keys, write, timestamp_ms=1)
    before, _ = rows()
    again = keys[::7]
    for batch in range(effort(3, 4) * GROUPS):
        partition.handle(again, write, timestamp_ms=100 + batch)
        now, values = rows()
        assert before - now <= 125  # a batch is not to take long
        before = now
        for key in again:
            assert values[key] == {"count": key[1], "tag": "v", "__ttl_expiration_ms": 110 + batch}
    assert {key for key, _ in partition.rows("value")} == set(again)
    assert {key for key, _ in partition.rows("list")} == set(again)
    assert {key for key, _ in partition.rows("map")} == set(again)
    assert len(partition.rows("map.-entries")) == 100 * sum(key[1] % 20 == 0 for key in again)


def test_a_sweep_leaves_rows_that_have_not_expired(tmp_path: Path) -> None:
    """Each key group holds expired and unexpired rows of untouched keys, next to each other."""
    variables = Variables((10, 10, 10))
    partition = LocalPartition(tmp_path, variables.init, "processingtime")
    keys = [("u", i) for i in range(4 * GROUPS)]

    def write(key: Any) -> None:
        variables.value.update((key[1], "v"))
        variables.list.put([(i, "e") for i in range(3)])
        for i in range(3):
            variables.map.updateValue((i, "k"), (1.0,))

    partition.handle(keys[: 2 * GROUPS], write, timestamp_ms=1)
    partition.handle(keys[2 * GROUPS :], write, timestamp_ms=5)
    for at in (6, 12):
        for _ in range(GROUPS):
            partition.handle([("u", 1000)], lambda key: None, timestamp_ms=at)
        for family in ("value", "list", "map"):
            assert {key for key, _ in partition.rows(family)} == set(keys if at == 6 else keys[2 * GROUPS :])


def test_a_sweep_reads_no_more_rows_however_many_a_key_group_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "SWEPT_ROWS", 50)
    variables = Variables((10, None, None))
    partition = LocalPartition(tmp_path, variables.init, "processingtime")
    in_one_group = [("u", i * GROUPS) for i in range(120)]
    alive = in_one_group[:60]  # these come first, and no sweep gets by them at one go
    read: list[int] = []
    scan = LocalStateAccess.scan

    def counted(self: LocalStateAccess, *args: Any) -> Iterator[pa.RecordBatch]:
        for batch in scan(self, *args):
            read[-1] += batch.num_rows
            yield batch

    def write(key: Any) -> None:
        variables.value.update((key[1], "v"))

    monkeypatch.setattr(LocalStateAccess, "scan", counted)
    for batch in range(3 * GROUPS + 1):
        read.append(0)
        partition.handle(alive if batch else in_one_group, write, timestamp_ms=batch * 100)
    assert max(read) == 50
    assert {key for key, _ in partition.rows("value")} == set(alive)


def test_state_of_deleted_variables_is_swept_gradually(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "SWEPT_ROWS", 30)
    variables = Variables((None, None, None))
    partition = LocalPartition(tmp_path, variables.init)

    def write(key: Any) -> None:
        variables.value.update((1, "a"))
        variables.list.put([(i, "e") for i in range(100)])

    partition.handle([("u", i) for i in range(50)], write)
    kept = partition.schema.variables
    deleted = tuple(dataclasses.replace(v, deleted=v.name != "value") for v in kept)
    partition.schema = dataclasses.replace(partition.schema, variables=deleted)
    partition.init = lambda handle: setattr(
        variables, "value", handle.getValueState("value", "count BIGINT, tag STRING")
    )
    for left in (70, 40, 10, 0):
        partition.handle([], lambda _: None)
        assert len(partition.rows("list") + partition.rows("list.-chunks")) == left
    assert len(partition.rows("value")) == 50


def test_redeclared_variable_begins_empty(tmp_path: Path) -> None:
    variables = Variables((None, None, None))
    partition = LocalPartition(tmp_path, variables.init, "processingtime")

    def write(_: Any) -> None:
        variables.list.put([(i, "e") for i in range(100)])
        for i in range(100):
            variables.map.updateValue((i, "k"), (1.0,))

    def again(handle: Any) -> None:
        handle.deleteIfExists("list")
        handle.deleteIfExists("map")
        handle.deleteIfExists("value")
        handle.deleteIfExists("never")
        variables.list = handle.getMapState("list", "k INT", "v INT")
        variables.map = handle.getListState("map", "x INT")

    def write_again(_: Any) -> None:
        assert not variables.list.exists()
        assert not variables.map.exists()
        for i in range(100):
            variables.list.updateValue((i,), (i,))
        variables.map.put([(i,) for i in range(100)])

    partition.handle([KEY, OTHER], write)
    declared = LocalPartition(tmp_path / "other", again, "processingtime").schema
    partition.schema = OperatorSchema.from_json(evolved(partition.schema, declared).to_json())
    partition.init = again
    partition.handle([], lambda _: None)
    partition.handle([KEY], write_again)
    for family in ("list", "list.-chunks", "map", "map.-entries"):
        assert partition.rows(family) == []
    partition.handle([KEY], lambda _: check(list(variables.list.keys()) == list(variables.map.get())))
