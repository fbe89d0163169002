"""Expired state is removed, also that of keys in every batch; state that has not expired is found, also next to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_bridge.stateful import map_state
from tests.spark_bridge.host.local_partition import LocalPartition


def partition(tmp_path: Path, declared: dict[str, Any]) -> LocalPartition:
    def init(handle: Any) -> None:
        declared["list"] = handle.getListState("list", "x INT", ttlDurationMs=10)
        declared["map"] = handle.getMapState("map", "k INT", "x INT", ttlDurationMs=10)

    return LocalPartition(tmp_path, init, "processingtime")


def test_a_key_that_is_handled_in_every_batch_does_not_grow(tmp_path: Path) -> None:
    states: dict[str, Any] = {}
    keys = partition(tmp_path, states)
    for n in range(12):

        def write(key: Any, n: int = n) -> None:
            states["list"].appendList([(i,) for i in range(200)])
            for i in range(100):
                states["map"].updateValue((n * 100 + i,), (i,))

        keys.handle([("a", 1)], write, timestamp_ms=5 * n)
    assert len(keys.rows("list.-chunks")) <= 9  # three batches of at most three chunks
    assert len(keys.rows("map.-entries")) <= 300

    found: dict[str, Any] = {}

    def read(key: Any) -> None:
        found.update(elements=len(list(states["list"].get())), entries=len(list(states["map"].keys())))
        states["list"].clear()

    keys.handle([("a", 1)], read, timestamp_ms=57)
    assert found == {"elements": 400, "entries": 200}
    assert keys.rows("list.-chunks") == keys.rows("list") == []


def test_a_large_map_is_removed_and_added_again(tmp_path: Path) -> None:
    states: dict[str, Any] = {}
    keys = partition(tmp_path, states)
    put = lambda key: [states["map"].updateValue((i,), (i,)) for i in range(100)]  # noqa: E731
    keys.handle([("a", 1)], put, timestamp_ms=0)
    for now in (20, 21):  # its entries go, then its head
        keys.handle([("b", 1)], lambda key: None, timestamp_ms=now)
    assert keys.rows("map.-entries") == keys.rows("map") == []
    keys.handle([("a", 1)], put, timestamp_ms=22)
    keys.handle([("b", 1)], lambda key: None, timestamp_ms=40)
    # The sweep finds the head without entries in the very batch that writes one.
    keys.handle([("a", 1)], lambda key: states["map"].updateValue((7,), (7,)), timestamp_ms=41)
    found: list[Any] = []
    keys.handle([("a", 1)], lambda key: found.extend(states["map"].iterator()), timestamp_ms=42)
    assert found == [((7,), (7,))]


def test_entries_that_have_expired_do_not_hide_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_state, "_ENTRIES_LOADED", 150)
    states: dict[str, Any] = {}
    keys = partition(tmp_path, states)
    keys.handle([("a", 1)], lambda key: [states["map"].updateValue((i,), (i,)) for i in range(100)], timestamp_ms=0)
    keys.handle([("a", 1)], lambda key: [states["map"].updateValue((i,), (i,)) for i in range(90, 300)], timestamp_ms=5)
    found: list[Any] = []
    keys.handle([("a", 1)], lambda key: found.extend(states["map"].getValue((i,)) for i in range(300)), timestamp_ms=10)
    assert [f is not None for f in found] == [i >= 90 for i in range(300)]
