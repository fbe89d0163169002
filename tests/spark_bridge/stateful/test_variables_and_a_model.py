"""Random operations on all kinds of state variables give what a plain model of dicts and lists says."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_bridge.stateful.process_task import ProcessorState
from tests.effort import effort
from tests.spark_bridge.host.local_partition import KEYS, LocalPartition, Variables, encoded, run_step, steps


class Model:
    """The expected variables: values and expiry times per key."""

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
def test_variables_match_a_plain_model(batches: list[Any], ttls: Any) -> None:
    check_against_model(batches, ttls)


@pytest.mark.thorough  # otherwise: the test above
@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(BATCHES, TTLS)
def test_variables_match_a_plain_model_over_many_histories(batches: list[Any], ttls: Any) -> None:
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
        # No key is handled any more: all rows with a TTL expire, heads after their rows.
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
    """Assert that separate rows belong to heads, and that timers by time equal timers by key."""
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
