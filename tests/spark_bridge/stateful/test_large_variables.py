"""Lists, maps and values that are large: no more of them is read and written than changes."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row

from spark_bridge.stateful.process_task import ProcessorState
from tests.spark_bridge.host.local_partition import (
    KEY,
    KEYS,
    OTHER,
    LocalPartition,
    Variables,
    check,
    partition_of,
    run_step,
    steps,
)


class Recorder:
    """A real store that notes what is asked of it: (family, keys read, rows scanned or staged)."""

    def __init__(self, state: ProcessorState) -> None:
        store = state._step.store
        self.reads: list[tuple[str, int]] = []
        self.staged: list[tuple[str, int]] = []
        self.scanned = 0
        get_many, scan, stage = store.get_many, store.scan, store.stage

        def noted_get(keys: pa.BinaryArray, column_family: str) -> pa.BinaryArray:
            self.reads.append((column_family, len(keys)))
            return get_many(keys, column_family)

        def noted_scan(ranges: Any, column_family: str, limit: int | None = None) -> Any:
            for batch in scan(ranges, column_family, limit):
                self.scanned += batch.num_rows
                yield batch

        def noted_stage(keys: pa.BinaryArray, values: pa.BinaryArray, column_family: str) -> None:
            self.staged.append((column_family, len(keys)))
            stage(keys, values, column_family)

        store.get_many, store.scan, store.stage = noted_get, noted_scan, noted_stage  # type: ignore[method-assign]


def test_an_append_to_a_long_list_reads_and_writes_one_row(tmp_path: Path) -> None:
    partition, held = partition_of(tmp_path, lambda h: h.getListState("long", "x INT"))
    partition.handle([KEY], lambda _: held.state.put([(i,) for i in range(10_000)]))
    with partition.batch() as state:
        recorder = Recorder(state)
        run_step(state, [KEY], lambda _: held.state.appendValue((10_000,)))
    assert recorder.reads == [("long", 1)]
    assert [s for s in recorder.staged if s[1]] == [("long", 1)]
    with partition.batch() as state:
        recorder = Recorder(state)

        def read_some(_: Any) -> None:
            assert list(islice(held.state.get(), 300)) == [(i,) for i in range(300)]
            assert held.state.exists()

        run_step(state, [KEY], read_some)
    assert recorder.reads == [("long", 1), ("long.-chunks", 4)]
    partition.handle([KEY], lambda _: check(list(held.state.get()) == [(i,) for i in range(10_001)]))
    partition.handle([KEY], lambda _: held.state.put([(i,) for i in range(500)]))
    assert [key[-1] for key, _ in partition.rows("long.-chunks")] == [0, 1]
    partition.handle([KEY], lambda _: check(list(held.state.get()) == [(i,) for i in range(500)]))
    partition.handle([KEY], lambda _: held.state.clear())
    assert partition.rows("long") == partition.rows("long.-chunks") == []


def test_a_large_map_is_read_by_entry_and_bit_by_bit(tmp_path: Path) -> None:
    partition, held = partition_of(tmp_path, lambda h: h.getMapState("large", "k INT", "v INT"))

    def fill(_: Any) -> None:
        for i in range(5000):
            held.state.updateValue((i,), (i,))

    partition.handle([OTHER], fill)
    assert len(partition.rows("large.-entries")) == 5000
    with partition.batch() as state:
        recorder = Recorder(state)

        def look(_: Any) -> None:
            assert held.state.getValue((17,)) == (17,)
            assert not held.state.containsKey((5000,))
            held.state.updateValue((17,), (18,))
            held.state.removeKey((18,))
            assert recorder.reads == [("large", 1), ("large.-entries", 1), ("large.-entries", 1)]
            assert recorder.scanned == 0
            for i in [*range(100, 200), 0, 4999]:
                assert held.state.getValue((i,)) == (i,)
            assert len(recorder.reads) < 20  # many lookups load all entries at once

        run_step(state, [OTHER], look)
    assert sorted(s for s in recorder.staged if s[1]) == [("large.-entries", 1), ("large.-entries", 1)]
    partition.handle(
        [OTHER], lambda _: check(held.state.getValue((17,)).v == 18 and held.state.getValue((18,)) is None)
    )
    partition.handle([OTHER], lambda _: held.state.clear())
    assert partition.rows("large") == partition.rows("large.-entries") == []


def test_heads_of_a_step_are_read_at_once_and_only_if_asked_for(tmp_path: Path) -> None:
    variables = Variables((None, None, None))
    partition = LocalPartition(tmp_path, variables.init, "processingtime")
    with partition.batch() as state:
        recorder = Recorder(state)

        def work(_: Any) -> None:
            variables.value.update((1, "a"))
            variables.map.getValue((1, "a"))
            assert state.expired_timers() == []

        run_step(state, steps(KEYS, len(KEYS))[0], work)
    assert sorted(recorder.reads) == [("map", len(KEYS)), ("timers.-keys", len(KEYS))]


@pytest.mark.parametrize("n", [10, 200])
def test_iterators_show_the_state_at_their_creation(tmp_path: Path, n: int) -> None:
    def init(handle: Any) -> None:
        held["list"] = handle.getListState("list", "x INT")
        held["map"] = handle.getMapState("map", "k INT", "v INT")
        held["handle"] = handle

    def fill(_: Any) -> None:
        held["list"].put([(i,) for i in range(n)])
        for i in reversed(range(n)):
            held["map"].updateValue((i,), (i,))
            held["handle"].registerTimer(100 + i)

    def change(_: Any) -> None:
        a_list, a_map = held["list"], held["map"]
        elements, entries = a_list.get(), a_map.iterator()
        for i, (key,) in enumerate(a_map.keys()):
            assert key == i
            a_map.removeKey((key,))
            a_map.updateValue((key + n,), (0,))
            a_list.appendValue((key,))
        for timer in held["handle"].listTimers():
            held["handle"].deleteTimer(timer)
        a_list.put([(0,)])
        replaced = a_list.get()
        a_list.appendValue((1,))
        assert list(replaced) == [(0,)]
        a_list.put([(0,)])
        a_map.clear()
        assert list(elements) == [(i,) for i in range(n)]
        assert list(entries) == [((i,), (i,)) for i in range(n)]
        assert list(a_list.get()) == [(0,)]
        assert not a_map.exists()
        assert list(held["handle"].listTimers()) == []

    held: dict[str, Any] = {}
    partition = LocalPartition(tmp_path, init, "processingtime")
    partition.handle([KEY], fill)
    partition.handle([KEY], change)
    assert partition.rows("map") == partition.rows("map.-entries") == partition.rows("list.-chunks") == []
    assert partition.rows("timers.-keys") == partition.rows("timers.-expiry") == []


@pytest.mark.parametrize("filler", [0, 100])
def test_entries_have_one_order_in_small_and_large_maps(tmp_path: Path, filler: int) -> None:
    partition, held = partition_of(tmp_path, lambda h: h.getMapState("map", "a DOUBLE, b STRUCT<c: STRING>", "v INT"))
    keys = [
        (None, None),
        (-math.inf, None),
        (-1.5, Row(c=None)),
        (-1.5, Row(c="")),
        (2.0, Row(c="x")),
        (math.nan, None),
    ]
    more = [(1e9 + i, None) for i in range(filler)]
    ordered = [*keys[:-1], *more, keys[-1]]

    def write(_: Any) -> None:
        for key in [*reversed(keys), *more]:
            held.state.updateValue(key, (1,))
        read(_)

    def read(_: Any) -> None:
        assert str(list(held.state.keys())) == str(ordered)
        held.state.updateValue((float("nan"), None), (2,))
        assert held.state.getValue((float("nan"), None)) == (2,)
        assert len(list(held.state.keys())) == len(ordered)

    partition.handle([KEY], write)
    partition.handle([KEY], read)
    partition.handle([KEY], read)
    assert partition.rows("map")[0][1]["large"] == (filler > 0)


def test_large_values_leave_the_head(tmp_path: Path) -> None:
    def init(handle: Any) -> None:
        held["list"] = handle.getListState("list", "x STRING")
        held["map"] = handle.getMapState("map", "k INT", "v STRING")

    held: dict[str, Any] = {}
    partition = LocalPartition(tmp_path, init)
    big = "x" * 9000

    def add(_: Any) -> None:
        for i in range(3):
            held["list"].appendValue((big + str(i),))
        held["map"].updateValue((1,), (big,))

    def add_another(_: Any) -> None:
        held["map"].updateValue((2,), (big * 3,))
        held["list"].appendValue((big * 3,))

    partition.handle([KEY], add)
    ((_, head),) = partition.rows("list")
    assert head["chunks"] == 2
    assert head["tail"] == [{"x": big + "2"}]
    assert not partition.rows("map")[0][1]["large"]
    partition.handle([KEY], add_another)
    ((_, head),) = partition.rows("list")
    assert (head["chunks"], head["tail"], head["length"]) == (4, [], 4)
    assert partition.rows("map")[0][1]["large"]
    assert len(partition.rows("map.-entries")) == 2
