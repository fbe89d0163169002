"""State variables, timers and TTL against a plain Python model, over a real store, batch by batch."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import tempfile
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row

from backends.encoding.operator_schema import OperatorSchema, StateVariable, evolved
from backends.ids import check_name
from spark_bridge.exceptions import StatefulProcessorError
from spark_bridge.queryable.client.state_views import state_view
from spark_bridge.stateful.tasks.processor_state import ProcessorState
from spark_bridge.stateful.variables import ttl as expiry
from spark_bridge.task.local_state import LocalStateAccess
from tests.effort import effort
from tests.spark_bridge.host.local_partition import KEY_GROUPS, LocalPartition, encoded, run_step, steps

KEYS: list[tuple[str | None, int]] = [("a", 1), ("a\x00b", 1), (None, 2), ("", 11), ("z", 18), ("q", -1)]
GROUPS = KEY_GROUPS[1] - KEY_GROUPS[0]


class Variables:
    """One variable of each kind."""

    def __init__(self, ttls: tuple[int | None, int | None, int | None]) -> None:
        self.ttls = ttls

    def init(self, handle: Any) -> None:
        value_ttl, list_ttl, map_ttl = self.ttls
        self.handle = handle
        self.value = handle.getValueState("value", "count BIGINT, tag STRING", value_ttl)
        self.list = handle.getListState("list", "x INT, text STRING", list_ttl)
        self.map = handle.getMapState("map", "user INT, part STRING", "v DOUBLE", map_ttl)


class Model:
    """What the variables should be: per key, values and when they expire."""

    def __init__(self, ttls: tuple[int | None, int | None, int | None]) -> None:
        self.ttls = ttls
        self.now = 0
        self.values: dict[Any, Any] = {}
        self.lists: dict[Any, list[Any]] = {}
        self.maps: dict[Any, dict[Any, Any]] = {}
        self.timers: dict[Any, set[int]] = {}

    def expiry(self, which: int) -> float:
        ttl = self.ttls[which]
        return float("inf") if ttl is None else self.now + ttl

    def value(self, key: Any) -> Any:
        value, until = self.values.get(key, (None, 0))
        return value if until > self.now else None

    def list(self, key: Any) -> list[Any]:
        return [value for value, until in self.lists.get(key, []) if until > self.now]

    def map(self, key: Any) -> dict[Any, Any]:
        alive = {k: v for k, (v, until) in self.maps.get(key, {}).items() if until > self.now}
        return dict(sorted(alive.items(), key=lambda item: (item[0][0], item[0][1] is not None, item[0][1] or "")))


def apply(op: tuple[Any, ...], key: Any, variables: Variables, model: Model) -> None:
    """One operation on the variables and on the model; where it reads, both must say the same."""
    value, a_list, a_map = variables.value, variables.list, variables.map
    match op:
        case ("value.get",):
            assert value.get() == model.value(key)
            assert value.exists() == (model.value(key) is not None)
        case ("value.update", new):
            value.update(new)
            model.values[key] = (new, model.expiry(0))
        case ("value.clear",):
            value.clear()
            model.values.pop(key, None)
        case ("list.get",):
            assert list(a_list.get()) == model.list(key)
        case ("list.exists",):
            assert a_list.exists() == bool(model.list(key))
        case ("list.append", n, size):
            for i in range(n):
                a_list.appendValue((i, "x" * size))
            model.lists.setdefault(key, []).extend(((i, "x" * size), model.expiry(1)) for i in range(n))
        case ("list.appendList", n, size):
            a_list.appendList([(i, "y" * size) for i in range(n)])
            model.lists.setdefault(key, []).extend(((i, "y" * size), model.expiry(1)) for i in range(n))
        case ("list.put", n, size):
            a_list.put([(i, "z" * size) for i in range(n)])
            model.lists[key] = [((i, "z" * size), model.expiry(1)) for i in range(n)]
        case ("list.clear",):
            a_list.clear()
            model.lists.pop(key, None)
        case ("map.all",):
            expected = model.map(key)
            assert list(a_map.iterator()) == list(expected.items())
            assert list(a_map.keys()) == list(expected)
            assert list(a_map.values()) == list(expected.values())
        case ("map.exists",):
            assert a_map.exists() == bool(model.map(key))
        case ("map.get", first, n):
            expected = model.map(key)
            for user in entry_keys(first, n):
                assert a_map.getValue(user) == expected.get(user)
                assert a_map.containsKey(user) == (user in expected)
        case ("map.update", first, n, v):
            for user in entry_keys(first, n):
                a_map.updateValue(user, (v,))
                model.maps.setdefault(key, {})[user] = ((v,), model.expiry(2))
        case ("map.remove", first, n):
            for user in entry_keys(first, n):
                a_map.removeKey(user)
                model.maps.get(key, {}).pop(user, None)
        case ("map.clear",):
            a_map.clear()
            model.maps.pop(key, None)
        case ("timer.register", after):
            variables.handle.registerTimer(model.now + after)
            model.timers.setdefault(key, set()).add(model.now + after)
        case ("timer.delete", which):
            timers = sorted(model.timers.get(key, ())) or [17]
            variables.handle.deleteTimer(timers[which % len(timers)])
            model.timers.get(key, set()).discard(timers[which % len(timers)])
        case ("timer.list",):
            assert list(variables.handle.listTimers()) == sorted(model.timers.get(key, ()))
        case _:
            raise AssertionError(op)


def entry_keys(first: int, n: int) -> list[tuple[int, str | None]]:
    return [(i, None if i % 5 == 0 else f"p{i % 3}") for i in range(first, first + n)]


counts = st.integers(1, 5) | st.sampled_from([63, 64, 65, 130, 300])
sizes = st.sampled_from([0, 3, 3, 400])
starts = st.integers(0, 60)
OPERATIONS = st.one_of(
    st.just(("value.get",)),
    st.tuples(
        st.just("value.update"),
        st.tuples(st.none() | st.integers(-(2**63), 2**63 - 1), st.none() | st.text(max_size=3)),
    ),
    st.just(("value.clear",)),
    st.just(("list.get",)),
    st.just(("list.exists",)),
    st.tuples(st.just("list.append"), counts, sizes),
    st.tuples(st.just("list.appendList"), counts, sizes),
    st.tuples(st.just("list.put"), counts, sizes),
    st.just(("list.clear",)),
    st.just(("map.all",)),
    st.just(("map.exists",)),
    st.tuples(st.just("map.get"), starts, counts),
    st.tuples(st.just("map.update"), starts, counts, st.floats(allow_nan=False)),
    st.tuples(st.just("map.remove"), starts, counts),
    st.just(("map.clear",)),
    st.tuples(st.just("timer.register"), st.integers(-5, 30)),
    st.tuples(st.just("timer.delete"), st.integers(0, 3)),
    st.just(("timer.list",)),
)
READS: list[tuple[Any, ...]] = [
    ("value.get",),
    ("list.exists",),
    ("list.get",),
    ("map.exists",),
    ("map.get", 0, 3),
    ("map.all",),
    ("timer.list",),
]
BATCHES = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.lists(st.integers(1, 3), min_size=1, max_size=3),
        st.dictionaries(st.sampled_from(KEYS), st.lists(OPERATIONS, min_size=1, max_size=4), min_size=1, max_size=4),
    ),
    min_size=2,
    max_size=6,
)
TTLS = st.tuples(*[st.sampled_from([None, 5, 20])] * 3)


@settings(max_examples=effort(4, 15), deadline=None)
@given(BATCHES, TTLS)
def test_variables_are_what_a_plain_model_says(batches: list[Any], ttls: Any) -> None:
    check_against_model(batches, ttls)


@pytest.mark.thorough  # otherwise: the test above
@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(BATCHES, TTLS)
def test_variables_are_what_a_plain_model_says_of_many_histories(batches: list[Any], ttls: Any) -> None:
    check_against_model(batches, ttls)


def check_against_model(batches: list[Any], ttls: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        variables, model = Variables(ttls), Model(ttls)
        partition = LocalPartition(Path(directory), variables.init, "processingtime")
        reads = [(1, [len(KEYS)], dict.fromkeys(KEYS, READS))]
        for elapsed, sizes_, work in [*batches, *reads]:
            model.now += elapsed
            run_batch(partition, variables, model, sizes_, work)
            assert_rows_belong_together(partition, model)
        # Nobody comes any more: what can expire goes, heads after the rows that they are the heads of.
        model.now += 1000
        for _ in range(3):
            model.now += 1
            run_batch(partition, variables, model, [1], {})
        for which, families in enumerate((["value"], ["list", "list.-chunks"], ["map", "map.-entries"])):
            left = sum(len(partition.rows(family)) for family in families)
            assert ttls[which] is None or left == 0


def run_batch(
    partition: LocalPartition, variables: Variables, model: Model, sizes_: list[int], work: dict[Any, list[Any]]
) -> None:
    """A batch as the task runs it: the keys with work and those whose timers fire, in steps."""

    def handle(state: ProcessorState, key: Any) -> None:
        for op in work.get(key, ()):
            apply(op, key, variables, model)
        fired = state.expired_timers()
        assert fired == sorted(t for t in model.timers.get(key, ()) if t <= model.now)
        for timer in fired:
            variables.handle.deleteTimer(timer)
            model.timers[key].discard(timer)

    with partition.batch(model.now) as state:
        firing = state.keys_with_expired_timers()
        due = [k for k in KEYS if any(t <= model.now for t in model.timers.get(k, ()))]
        assert firing.to_pylist() == sorted(encoded(due).to_pylist())
        for step in steps(list({**dict.fromkeys(due), **work}), *sizes_):
            run_step(state, step, lambda key: handle(state, key))


def assert_rows_belong_together(partition: LocalPartition, model: Model) -> None:
    """Rows of their own belong to heads, and timers by time are those by key."""
    lists = dict(partition.rows("list"))
    for (*key, number), row in partition.rows("list.-chunks"):
        assert number < lists[tuple(key)]["chunks"] or model.ttls[1] is not None
        assert 1 <= len(row["elements"]) <= 256
    maps = dict(partition.rows("map"))
    for (*key, _, _), _ in partition.rows("map.-entries"):
        assert maps[tuple(key)]["large"]
    for key, head in lists.items():
        assert len(head["tail"]) <= 64
        if model.ttls[1] is None:
            chunks = [row for (*owner, _), row in partition.rows("list.-chunks") if tuple(owner) == key]
            assert head["chunks"] == len(chunks)
            assert head["length"] == len(head["tail"]) + sum(len(row["elements"]) for row in chunks) > 0
    by_key = {(key, t) for key, row in partition.rows("timers.-keys") for t in row["expiries"]}
    by_expiry = {(tuple(key), t) for (t, *key), _ in partition.rows("timers.-expiry")}
    assert by_key == by_expiry == {(key, t) for key, timers in model.timers.items() for t in timers}


KEY = ("a", 1)
OTHER = ("b", -1)  # in the last key group, and its stored key ends with 0xFF


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


def partition_of(directory: Path, declare: Callable[[Any], Any], time_mode: str = "none") -> tuple[LocalPartition, Any]:
    """A partition with one state variable, and a holder of it in ``.state``."""

    class Holder:
        state: Any
        handle: Any

    def init(handle: Any) -> None:
        Holder.handle, Holder.state = handle, declare(handle)

    return LocalPartition(directory, init, time_mode), Holder


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


def check(what: bool) -> None:
    assert what


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
            assert len(recorder.reads) < 20  # whoever asks for many gets all at once

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


def test_what_was_written_is_what_is_read_whoever_reads_first(tmp_path: Path) -> None:
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
    # Heads of what is kept elsewhere go once the sweep has found that it has gone.
    assert left["value"] == 0 and max(left["list"], left["map"]) <= 2 * (n > 64)
    # Long lists and large maps lose their rows to the sweep, and their heads then.
    for _ in range(2):
        partition.handle([], see_none, timestamp_ms=116)
    assert [family for family in families if partition.rows(family)] == []


def test_what_is_written_over_expired_values_stays(tmp_path: Path) -> None:
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


def test_a_variable_called_timers_comes_and_goes_beside_the_timers(tmp_path: Path) -> None:
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


def test_a_text_stands_for_the_only_field(tmp_path: Path) -> None:
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


def test_a_field_that_is_not_nullable_takes_a_null_all_the_same(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("n", [10, 200])
def test_iterators_show_what_there_was_when_they_were_asked_for(tmp_path: Path, n: int) -> None:
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


def test_expired_rows_go_bit_by_bit_but_never_those_of_keys_at_hand(
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
    """Rows of keys that nobody touches, some expired and some not, lie beside each other in each key group."""
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


def test_what_deleted_variables_held_goes_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_variable_that_was_deleted_begins_anew(tmp_path: Path) -> None:
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
