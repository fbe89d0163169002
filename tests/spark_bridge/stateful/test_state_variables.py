"""State variables, timers and TTL against a plain Python model, over a real store, batch by batch.

On Spark 4.2 the objects that a processor is given are instances of PySpark's own classes.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import Row

from backends.conf import check_name
from backends.encoding.operator_schema import OperatorSchema, StateVariable, evolved
from spark_bridge.exceptions import StatefulProcessorError
from spark_bridge.queryable.client.state_views import state_view
from spark_bridge.stateful.handle import StatefulProcessorHandle, ValueState
from spark_bridge.stateful.list_state import ListState
from spark_bridge.stateful.map_state import MapState
from spark_bridge.stateful.stateful_processor import ExpiredTimerInfo, TimerValues
from tests.spark_bridge.host.local_partition import (
    KEY,
    OTHER,
    LocalPartition,
    Variables,
    encoded,
    partition_of,
    run_step,
    steps,
)

ZONED = dt.datetime(2024, 3, 1, 12, tzinfo=dt.timezone.utc)


TYPES = (
    "b BOOLEAN, y TINYINT, s SMALLINT, i INT, l BIGINT, f FLOAT, d DOUBLE, t STRING, x BINARY, day DATE, ts TIMESTAMP, "
    "ntz TIMESTAMP_NTZ, dec DECIMAL(10,2), a ARRAY<INT>, m MAP<STRING, ARRAY<INT>>, "
    "r STRUCT<p: INT, q: STRUCT<z: STRING>>"
)


GIVEN = (
    np.bool_(True),
    1,
    np.int16(2),
    np.int64(3),
    4,
    0.1,
    5,
    "t",
    bytearray(b"x"),
    dt.date(2024, 1, 1),
    ZONED,
    dt.datetime(2024, 1, 1, 1),
    Decimal("1.5"),
    (1, np.int32(2)),
    {"k": [1, None]},
    {"p": 1, "q": ("z",)},
)


COMES_BACK = (
    True,
    1,
    2,
    3,
    4,
    float(np.float32(0.1)),
    5.0,
    "t",
    b"x",
    dt.date(2024, 1, 1),
    ZONED.astimezone().replace(tzinfo=None),
    dt.datetime(2024, 1, 1, 1),
    Decimal("1.50"),
    [1, 2],
    {"k": [1, None]},
    Row(p=1, q=Row(z="z")),
)


def test_values_of_all_types_come_back_in_one_form_at_once_and_later(tmp_path: Path) -> None:
    def init(handle: Any) -> None:
        held["value"] = handle.getValueState("value", TYPES)
        held["list"] = handle.getListState("list", TYPES)
        held["map"] = handle.getMapState("map", "k ARRAY<INT>, ts TIMESTAMP", TYPES)

    held: dict[str, Any] = {}
    partition = LocalPartition(tmp_path, init)
    nothing = (None,) * len(GIVEN)

    def write(_: Any) -> None:
        held["value"].update(list(GIVEN))
        held["list"].put(iter([GIVEN, nothing]))
        held["map"].updateValue(((1, 2), ZONED), Row(*GIVEN))
        held["map"].updateValue((None, None), nothing)
        read(_)

    def read(_: Any) -> None:
        assert_same(held["value"].get(), COMES_BACK)
        for found, expected in zip(held["list"].get(), [COMES_BACK, nothing], strict=True):
            assert_same(found, expected)
        moment = ZONED.astimezone().replace(tzinfo=None)
        assert list(held["map"].keys()) == [(None, None), ([1, 2], moment)]
        assert_same(held["map"].getValue(([1, 2], moment)), COMES_BACK)
        assert held["map"].getValue(([1, 2], moment)).r.q.z == "z"
        assert held["map"].getValue((None, None)) == nothing

    partition.handle([KEY], write)
    partition.handle([KEY], read)


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Equal, and of the same types."""
    assert tuple(found) == expected
    assert [type(v) for v in found if not isinstance(v, Row)] == [type(v) for v in expected if not isinstance(v, Row)]


def test_state_changes_by_updates_only(tmp_path: Path) -> None:
    def init(handle: Any) -> None:
        held["value"] = handle.getValueState("value", "a ARRAY<INT>")
        held["list"] = handle.getListState("list", "a ARRAY<INT>")
        held["map"] = handle.getMapState("map", "k INT", "a ARRAY<INT>")

    def work(_: Any) -> None:
        numbers = [1]
        held["value"].update((numbers,))
        held["list"].appendValue((numbers,))
        held["map"].updateValue((1,), (numbers,))
        numbers.append(2)
        read(_)

    def read(_: Any) -> None:
        for found in (held["value"].get(), next(held["list"].get()), held["map"].getValue((1,)), *held["map"].values()):
            assert found == ([1],)
            found[0].append(3)
        assert held["value"].get() == next(held["list"].get()) == held["map"].getValue((1,)) == ([1],)

    held: dict[str, Any] = {}
    partition = LocalPartition(tmp_path, init)
    partition.handle([KEY], work)
    partition.handle([KEY], read)


def test_each_key_of_a_step_reads_its_own_value(tmp_path: Path) -> None:
    partition, held = partition_of(tmp_path, lambda h: h.getValueState("v", "x INT"))

    def write_then_read(key: Any) -> None:
        if key == first:
            held.state.update((2,))
        assert held.state.get() == ((2,) if key == first else (1,))
        if key == last:
            held.state.clear()
            assert not held.state.exists()

    first, last = steps([KEY, OTHER], 2)[0]
    partition.handle([KEY, OTHER], lambda _: held.state.update((1,)))
    partition.handle([KEY, OTHER], write_then_read)
    assert partition.rows("v") == [(first, {"x": 2})]


@pytest.mark.parametrize("name", ["größe", "a b/c", "timers", "a.-chunks", "-x", "..", "n.-2"])
def test_variables_have_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    def init(handle: Any) -> None:
        held["value"] = handle.getValueState(name, "x INT")
        held["list"] = handle.getListState(f"{name} 1", "x INT")
        held["map"] = handle.getMapState(f"{name}\n/2", "k INT", "v INT")
        held["other"] = handle.getListState("a", "x INT")
        held["handle"] = handle

    def write(_: Any) -> None:
        held["value"].update((1,))
        for a_list in (held["list"], held["other"]):
            a_list.put([(i,) for i in range(200)])
        for i in range(100):
            held["map"].updateValue((i,), (i,))
        held["handle"].registerTimer(10**6)

    def read(_: Any) -> None:
        assert held["value"].get() == (1,)
        assert len(list(held["list"].get())) == len(list(held["other"].get())) == 200
        assert len(list(held["map"].keys())) == 100
        assert list(held["handle"].listTimers()) == [10**6]

    held: dict[str, Any] = {}
    partition = LocalPartition(tmp_path, init, "processingtime")
    partition.handle([KEY], write)
    partition.handle([KEY], read)
    families = partition.schema.families
    assert len(families) == 1 + 2 + 2 + 2 + 2, "no two have one name"
    assert [check_name("a family", family) for family in families]
    view = state_view("op", partition.schema, 16, name)
    assert (view.variable.name, view.schema.value.names) == (name, ["x"])


def test_variable_called_timers_does_not_affect_timers(tmp_path: Path) -> None:
    plain = LocalPartition(tmp_path / "a", lambda handle: None, "processingtime").schema
    both = LocalPartition(tmp_path / "b", lambda handle: handle.getMapState("timers", "k INT", "v INT"), "eventtime")
    schema = dataclasses.replace(both.schema, settings={})
    grown = evolved(dataclasses.replace(plain, settings={}), schema)
    assert grown.timers == plain.timers and grown.variable("timers").kind == "map"
    assert [v.kind for v in grown.in_use] == ["map"]
    gone = evolved(
        grown, dataclasses.replace(plain, variables=(StateVariable("timers", "value", {}, deleted=True), plain.timers))
    )
    assert gone.timers == plain.timers and [v.kind for v in gone.in_use] == ["timers"]


def test_string_is_accepted_for_the_only_field(tmp_path: Path) -> None:
    def init(handle: Any) -> None:
        held["value"] = handle.getValueState("value", "x STRING")
        held["list"] = handle.getListState("list", "x STRING")
        held["map"] = handle.getMapState("map", "k STRING", "v STRING")

    def use(_: Any) -> None:
        held["value"].update("a text")
        held["list"].put(["1", ("22",)])
        held["list"].appendValue("333")
        held["map"].updateValue("1", "one")
        held["map"].updateValue("22", ("two",))
        assert held["value"].get() == ("a text",)
        assert list(held["list"].get()) == [("1",), ("22",), ("333",)]
        assert held["map"].containsKey("22") and held["map"].getValue("1") == ("one",)
        held["map"].removeKey("1")
        assert list(held["map"].iterator()) == [(("22",), ("two",))]

    held: dict[str, Any] = {}
    LocalPartition(tmp_path, init).handle([KEY], use)


def test_non_nullable_field_accepts_a_null(tmp_path: Path) -> None:
    """A later schema may add fields, which are null in what was stored before."""

    def init(handle: Any) -> None:
        held["value"] = handle.getValueState("value", "x INT NOT NULL")
        held["list"] = handle.getListState("list", "x INT NOT NULL")
        held["map"] = handle.getMapState("map", "k INT NOT NULL", "v INT NOT NULL")

    def write(_: Any) -> None:
        held["value"].update((None,))
        held["list"].put([(1,), (None,)])
        held["map"].updateValue((1,), (None,))

    def read(_: Any) -> None:
        assert held["value"].get() == (None,)
        assert list(held["list"].get()) == [(1,), (None,)]
        assert list(held["map"].iterator()) == [((1,), (None,))]

    held: dict[str, Any] = {}
    partition = LocalPartition(tmp_path, init)
    partition.handle([KEY], write)
    partition.handle([KEY], read)


def test_event_time_timers_fire_by_the_watermark(tmp_path: Path) -> None:
    partition, held = partition_of(tmp_path, lambda h: h.getValueState("v", "x INT"), "eventtime")
    fired: list[Any] = []

    def run(keys: list[Any], watermark_ms: int, due: list[int]) -> None:
        with partition.batch(timestamp_ms=10**12, watermark_ms=watermark_ms) as state:
            assert state.timer_values.getCurrentProcessingTimeInMs() == 10**12
            assert state.timer_values.getCurrentWatermarkInMs() == watermark_ms
            expired = state.keys_with_expired_timers()
            assert expired.to_pylist() == (sorted(encoded([KEY, OTHER]).to_pylist()) if not keys else [])

            def work(key: Any) -> None:
                for timer in due:
                    held.handle.registerTimer(timer)
                for timer in state.expired_timers():
                    fired.append((key, timer))
                    held.handle.registerTimer(timer + 1)  # due as well, but fires in the next batch
                    held.handle.deleteTimer(timer)

            for step in steps(keys or [KEY, OTHER], 1):
                run_step(state, step, work)

    run([KEY, OTHER], 0, [50, 60, 100, 51, 50, 2**62])
    assert fired == []
    run([], 51, [])
    assert fired == [(KEY, 50), (KEY, 51), (OTHER, 50), (OTHER, 51)]
    fired.clear()
    run([], 59, [])
    assert fired == [(KEY, 52), (OTHER, 52)]
    assert partition.figures["numExpiredTimers"] == 2
    assert len(partition.rows("timers.-expiry")) == 8


def test_a_timer_due_already_fires_in_the_batch_that_sets_it(tmp_path: Path) -> None:
    partition, held = partition_of(tmp_path, lambda h: h.getValueState("v", "x INT"), "eventtime")
    with partition.batch(watermark_ms=100) as state:

        def work(_: Any) -> None:
            held.handle.registerTimer(state.timer_values.getCurrentWatermarkInMs())
            held.handle.registerTimer(101)
            assert state.expired_timers() == [100]

        run_step(state, [KEY], work)


def test_figures(tmp_path: Path) -> None:
    variables = Variables((None, None, None))
    partition = LocalPartition(tmp_path, variables.init, "processingtime")

    def write(_: Any) -> None:
        variables.value.update((1, "a"))
        variables.value.update((2, "a"))
        variables.list.appendList([(i, "e") for i in range(100)])
        for i in range(70):
            variables.map.updateValue((i, "k"), (1.0,))
        variables.handle.registerTimer(10**6)

    def remove(_: Any) -> None:
        variables.value.clear()
        variables.list.clear()
        variables.map.removeKey((1, "k"))
        variables.handle.deleteTimer(10**6)

    partition.handle([KEY, OTHER], write)
    assert partition.figures == {"updated": 342, "removed": 0, "numRegisteredTimers": 2}
    partition.handle([KEY], remove)
    assert partition.figures == {"updated": 0, "removed": 102, "numDeletedTimers": 1}
    partition.handle([OTHER], lambda _: variables.map.clear())
    assert partition.figures == {"updated": 0, "removed": 70}


def test_steps_must_ascend(tmp_path: Path) -> None:
    partition, held = partition_of(tmp_path, lambda h: h.getValueState("v", "x INT"))
    with partition.batch() as state:
        run_step(state, [KEY], lambda _: held.state.update((1,)))
        with pytest.raises(StatefulProcessorError, match="changes would be lost"):
            run_step(state, [KEY], lambda _: held.state.update((2,)))


def test_state_is_read_after_its_schema_has_evolved(tmp_path: Path) -> None:
    def old(handle: Any) -> None:
        held["value"] = handle.getValueState("value", "a INT, b STRING", 10)
        held["list"] = handle.getListState("list", "a INT, b STRING", 10)
        held["map"] = handle.getMapState("map", "k INT", "a INT, b STRING", 10)

    def new(handle: Any) -> None:
        held["value"] = handle.getValueState("value", "c DOUBLE, a BIGINT", 5)
        held["list"] = handle.getListState("list", "c DOUBLE, a BIGINT", 5)
        held["map"] = handle.getMapState("map", "k INT", "c DOUBLE, a BIGINT", 5)

    def write(_: Any) -> None:
        held["value"].update((1, "b"))
        held["list"].put([(i, "b") for i in range(100)])
        held["map"].updateValue((1,), (1, "b"))

    def read(_: Any) -> None:
        assert held["value"].get() == (None, 1)
        assert list(held["list"].get()) == [(None, i) for i in range(100)]
        assert list(held["map"].iterator()) == [((1,), (None, 1))]
        held["list"].appendValue((0.5, 2**40))
        held["map"].updateValue((2,), (0.5, 2**40))

    def read_again(_: Any) -> None:
        assert list(held["list"].get()) == [(None, i) for i in range(100)]
        assert list(held["map"].iterator()) == [((1,), (None, 1))]

    held: dict[str, Any] = {}
    partition = LocalPartition(tmp_path, old, "processingtime")
    partition.handle([KEY], write, timestamp_ms=100)
    declared = LocalPartition(tmp_path / "other", new, "processingtime").schema
    partition.schema = OperatorSchema.from_json(evolved(partition.schema, declared).to_json())
    partition.init = new
    partition.handle([KEY], read, timestamp_ms=101)
    partition.handle([KEY], read_again, timestamp_ms=107)  # the TTL is that of the batch that wrote


OURS = [ValueState, ListState, MapState, StatefulProcessorHandle, TimerValues, ExpiredTimerInfo]


@pytest.mark.spark42
@pytest.mark.parametrize("ours", OURS)
def test_each_is_of_pysparks_class_and_inherits_no_method(ours: Any) -> None:
    pyspark = pytest.importorskip("pyspark.sql.streaming.stateful_processor", reason="This Spark has no such classes.")
    theirs = getattr(pyspark, ours.__name__)
    assert issubclass(ours, theirs)
    assert [name for name in vars(theirs) if not name.startswith("_") and name not in vars(ours)] == []


@pytest.mark.spark42
def test_processor_receives_objects_of_these_classes(tmp_path: Path) -> None:
    pyspark = pytest.importorskip("pyspark.sql.streaming.stateful_processor", reason="This Spark has no such classes.")
    given: dict[str, Any] = {}

    def init(handle: Any) -> None:
        given.update(
            StatefulProcessorHandle=handle,
            ValueState=handle.getValueState("v", "x INT"),
            ListState=handle.getListState("l", "x INT"),
            MapState=handle.getMapState("m", "k INT", "x INT"),
        )

    with LocalPartition(tmp_path, init).batch() as state:
        given.update(TimerValues=state.timer_values)
    assert {name: isinstance(one, getattr(pyspark, name)) for name, one in given.items()} == dict.fromkeys(given, True)
