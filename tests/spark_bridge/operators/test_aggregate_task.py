"""Windowed and plain aggregates over batches against a plain model of what Spark does, in every output mode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from backends.encoding.operator_schema import OperatorSchema, evolved
from backends.encoding.schema import StateSchema
from backends.exceptions import IncompatibleSchemaError
from coordinator_actor.messages import BatchTimes
from spark_bridge import functions as S
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.computation import Output
from spark_bridge.exceptions import SparkBridgeError
from spark_bridge.operators import aggregate_task
from spark_bridge.operators.aggregate import output_of
from spark_bridge.operators.aggregate_task import AggregateLogic, PartialTask
from spark_bridge.operators.session_task import SessionLogic
from spark_bridge.state_format.layouts import session_schema
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.keyed_rows import empty, one_batch
from spark_bridge.task.state_task import EventTime
from tests.effort import examples, only_thorough
from tests.spark_bridge.operators.operator_runs import SECOND, TS, WINDOW, OperatorRun, Watermark, batch_of, seconds

AGGREGATOR = Aggregator(
    [
        Output("n", "count", None, None, None),
        Output("total", "sum", "v", None, pa.int64()),
        Output("last", "last", "v", "ts", pa.int64(), TS),
    ]
)
WINDOWED = pa.schema([pa.field("window", WINDOW), pa.field("k", pa.string())])
BY_TIME = pa.schema([pa.field("ts", TS), pa.field("k", pa.string())])
BY_KEY = pa.schema([pa.field("k", pa.string())])
SMALL = Limits(memory=2000, step_rows=3, step_bytes=500, fan_in=2)

Row = tuple[Any, ...]
events = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.none() | st.integers(0, 120), st.none() | st.integers(-5, 5)),
    max_size=12,
)


def logic_of(keys: pa.Schema, mode: str, event_time: EventTime | None, limits: Limits | None = None) -> AggregateLogic:
    output = pa.schema([*reversed(list(keys)), *AGGREGATOR.result_fields])
    return AggregateLogic(
        StateSchema(keys, AGGREGATOR.state_schema), AGGREGATOR, output, mode, event_time, limits=limits
    )


def run_of(logic: AggregateLogic, num_partitions: int) -> OperatorRun:
    schema = OperatorSchema.of_rows(logic.schema, tuple(reversed(logic.schema.key.names)))
    return OperatorRun(logic, schema, logic.schema.key.names, num_partitions)


def windows_of(ts: int | None, length: int, slide: int) -> list[tuple[int, int]]:
    """The windows that Spark puts a time into."""
    if ts is None:
        return []
    last = ts - ts % slide
    return [(start, start + length) for start in range(last, ts - length, -slide)]


class Model:
    """Spark's StateStoreSaveExec: rows by key, and the time of a key in seconds by its first part (None: never)."""

    def __init__(self, mode: str, time_of: Any) -> None:
        self.mode = mode
        self.time_of = time_of
        self.state: dict[Any, list[Row]] = {}
        self.late = self.removed = 0

    def batch(self, rows: list[tuple[Any, Row]], times: BatchTimes) -> dict[Any, Row]:
        def is_done(key: Any, watermark_ms: int) -> bool:
            time = self.time_of(key) if self.mode != "complete" else None
            return time is not None and time * 1000 <= watermark_ms

        kept = [(key, row) for key, row in rows if not is_done(key, times.late_watermark_ms)]
        self.late = len(rows) - len(kept)
        for key, row in kept:
            self.state.setdefault(key, []).append(row)
        done = [key for key in self.state if is_done(key, times.watermark_ms)]
        emitted = {"update": {key for key, _ in kept}, "append": done, "complete": list(self.state)}[self.mode]
        results = {key: self.results(self.state[key]) for key in emitted}
        for key in done:
            del self.state[key]
        self.removed = len(done)
        return results

    @staticmethod
    def results(rows: list[Row]) -> Row:
        values = [v for _, v in rows if v is not None]
        timed = [(ts, v is not None, v or 0) for ts, v in rows if ts is not None]
        _, some, last = max(timed, default=(0, False, 0))
        return len(rows), sum(values) if values else None, last if some else None


def check(logic: AggregateLogic, model: Model, batches: list[list[tuple[Any, Row]]], partitions: int, cut: int) -> None:
    """Rows come as (key columns as stored, (ts, v))."""
    names = logic.schema.key.names
    rest = [] if "ts" in names else [pa.field("ts", TS)]
    schema = pa.schema([*logic.schema.key, *rest, pa.field("v", pa.int64())])
    run, watermark = run_of(logic, partitions), Watermark(delay_s=10)
    for rows in [*batches, [], []]:
        times = watermark.times()
        flat = [(*key, *(row if rest else row[1:])) for key, row in rows]
        emitted = run.batch(batch_of(schema, flat), times, [cut, cut + 2])
        expected = model.batch(rows, times)
        got = {tuple(seconds(e[n]) for n in names): (e["n"], e["total"], e["last"]) for e in emitted}
        assert got == expected
        assert len(emitted) == len(got), "a key was emitted twice"
        assert [list(e) for e in emitted[:1]] in ([], [logic.output.names])
        assert run.size("default") == len(model.state)
        assert run.figures.num_rows_dropped_by_watermark == model.late
        assert run.figures.num_rows == len(rows) - model.late
        assert run.figures.num_rows_removed == model.removed
        watermark.advance(row[0] for _, row in rows)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(events, max_size=4),
    st.sampled_from(["update", "append", "complete"]),
    st.sampled_from([(10, 10), (20, 5), (30, 20)]),
    st.sampled_from([1, 3]),
    st.integers(0, 6),
    st.booleans(),
)
def test_windows_in_every_output_mode_as_in_spark(
    batches: list[list[Row]], mode: str, length: tuple[int, int], partitions: int, cut: int, small: bool
) -> None:
    limits = SMALL if small else None
    logic = logic_of(WINDOWED, mode, EventTime("window", True, length[0] * SECOND), limits)
    rows = [[((w, k), (ts, v)) for k, ts, v in batch for w in windows_of(ts, *length)] for batch in batches]
    check(logic, Model(mode, lambda key: key[0][1]), rows, partitions, cut)


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(events, max_size=4), st.sampled_from(["update", "append", "complete"]), st.sampled_from([1, 3]))
def test_windows_of_several_lengths_go_by_their_ends(batches: list[list[Row]], mode: str, partitions: int) -> None:
    """As an upstream operator's sessions may be: nothing is known of their lengths."""
    logic = logic_of(WINDOWED, mode, EventTime("window", True))
    rows = [[(((ts, ts + 5 + 7 * (v or 0) % 40), k), (ts, v)) for k, ts, v in b if ts is not None] for b in batches]
    check(logic, Model(mode, lambda key: key[0][1]), rows, partitions, 2)


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(events, max_size=4), st.sampled_from(["update", "append", "complete"]), st.sampled_from([1, 3]))
def test_event_time_itself_as_a_key(batches: list[list[Row]], mode: str, partitions: int) -> None:
    rows = [[((ts, k), (ts, v)) for k, ts, v in batch] for batch in batches]
    check(logic_of(BY_TIME, mode, EventTime("ts")), Model(mode, lambda key: key[0]), rows, partitions, 3)


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(events, max_size=4), st.sampled_from(["update", "complete"]), st.sampled_from([1, 3]), st.booleans())
def test_keys_without_event_time_are_kept(batches: list[list[Row]], mode: str, partitions: int, small: bool) -> None:
    rows = [[((k,), (ts, v)) for k, ts, v in batch] for batch in batches]
    check(logic_of(BY_KEY, mode, None, SMALL if small else None), Model(mode, lambda _: None), rows, partitions, 1)


STEPS = Limits(memory=20_000, step_rows=100, step_bytes=4000, fan_in=3)


@pytest.mark.parametrize(
    ("mode", "limits"),
    [
        ("update", None),
        ("append", STEPS),
        *(
            only_thorough(*one)
            for one in [("append", None), ("complete", None), ("complete", STEPS), ("update", STEPS)]
        ),
    ],
)
def test_many_keys_in_small_steps(mode: str, limits: Limits | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate_task, "FIXED_KEYS_PER_STEP", 7)
    monkeypatch.setattr("spark_bridge.task.keyed_rows.ROWS_PER_PART", 50)
    logic = logic_of(WINDOWED, mode, EventTime("window", True, 10 * SECOND), limits)
    batches = [
        [(((w, w + 10), f"k{i % 61}"), (w + i % 10, i)) for i in range(700) for w in [base + i % 7 * 10]]
        for base in (0, 30, 200)
    ]
    check(logic, Model(mode, lambda key: key[0][1]), batches, 2, 100)


@pytest.mark.parametrize("num_keys", [3, 500])
def test_preaggregated_rows_give_the_same_result_as_rows(num_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_bridge.task.keyed_rows.ROWS_PER_PART", 100)
    logic = logic_of(WINDOWED, "update", EventTime("window", True, 10 * SECOND))
    schema = pa.schema([*WINDOWED, pa.field("ts", TS), pa.field("v", pa.int64())])
    rows = batch_of(schema, [((w, w + 10), f"k{i % num_keys}", w + i % 9, i) for i in range(400) for w in [i % 3 * 10]])
    direct = run_of(logic, 2).batch(rows, BatchTimes())

    columns = pa.schema([*WINDOWED, *AGGREGATOR.state_schema])
    ahead = list(PartialTask(logic, columns).run(rows.slice(i, 100) for i in range(0, 400, 100)))
    assert sum(part.num_rows for part in ahead) == (400 if num_keys == 500 else 4 * 3)
    together = one_batch(ahead)
    merged = run_of(replace(logic, is_partial=True), 2).batch(together, BatchTimes())
    assert sorted(map(repr, merged)) == sorted(map(repr, direct))


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize("mode", ["update", "complete"])
def test_an_aggregate_over_all_rows_emits_one_row_for_each_batch(mode: str, is_partial: bool) -> None:
    """Also for a batch without rows, and for the first one, as Spark's aggregate without keys."""
    keys = pa.schema([pa.field("all_rows", pa.bool_())])
    rows = pa.schema([*keys, pa.field("ts", TS), pa.field("v", pa.int64())])
    output = pa.schema(AGGREGATOR.result_fields)
    logic = AggregateLogic(StateSchema(keys, AGGREGATOR.state_schema), AGGREGATOR, output, mode, is_global=True)
    ahead = PartialTask(logic, pa.schema([*keys, *AGGREGATOR.state_schema]))
    run = OperatorRun(replace(logic, is_partial=is_partial), OperatorSchema.of_rows(logic.schema), keys.names, 1)
    found = []
    for values in ([], [(True, 1, 5), (True, 9, None)], [], [(True, 3, 7)], []):
        given = batch_of(rows, values)
        if is_partial:
            given = one_batch([empty(ahead.columns), *ahead.run(iter([given]))])
        found.append([tuple(row.values()) for row in run.batch(given, BatchTimes())])
    assert found == [[(0, None, None)], [(2, 5, None)], [(2, 5, None)], [(3, 12, None)], [(3, 12, None)]]
    assert run.stored_keys("default") == [{"all_rows": True}]


LIST_SCHEMA = T.StructType().add("k", "string").add("v", "string")


def lists_of(is_partial: bool = False, **functions: S.AggregateFunction) -> tuple[AggregateLogic, OperatorRun]:
    """A run of an aggregate by ``k`` of rows with ``k`` and ``v``."""
    aggregator = Aggregator([output_of(LIST_SCHEMA, name, f, None) for name, f in functions.items()])
    output = pa.schema([*BY_KEY, *aggregator.result_fields])
    logic = AggregateLogic(StateSchema(BY_KEY, aggregator.state_schema), aggregator, output, is_partial=is_partial)
    return logic, OperatorRun(logic, OperatorSchema.of_rows(logic.schema), ["k"], 1)


def rows_of_lists(key: str, values: Sequence[str | None]) -> pa.RecordBatch:
    return batch_of(pa.schema([*BY_KEY, pa.field("v", pa.string())]), [(key, v) for v in values])


@pytest.mark.parametrize("is_partial", [False, True])
def test_lists_keep_all_elements_or_count_those_that_their_limit_drops(is_partial: bool) -> None:
    every = [f"{i:05}" for i in range(2500)]
    logic, run = lists_of(
        is_partial,
        all=S.collect_list("v"),
        distinct=S.collect_set("v"),
        few=S.collect_list("v", limit=1000),
        least=S.collect_set("v", limit=2),
        top=S.top_k("v", 2),
    )
    assert logic.aggregator.state_schema.names[:3] == [
        "all.collect_list(1000).items",
        "distinct.collect_set(1000).items",
        "few.collect_list(1000).items",
    ], "queries that began while 1,000 was the default keep it"
    ahead = PartialTask(
        replace(logic, aggregator=logic.aggregator.unlimited(), is_partial=False),
        pa.schema([*BY_KEY, *logic.aggregator.state_schema]),
    )
    dropped = []
    for part in (every[:1200], [*every[1200:], None], every[:1]):
        rows = rows_of_lists("a", part)
        if is_partial:
            rows = one_batch(list(ahead.run(rows.slice(at, 500) for at in range(0, len(rows), 500))))
        (row,) = run.batch(rows, BatchTimes())
        dropped.append(run.figures.custom["numDroppedElements"])
    assert row["all"] == sorted([*every, every[0]]) and row["distinct"] == every
    assert row["few"] == every[-1000:] and row["least"] == every[:2] and row["top"] == every[:-3:-1]
    assert dropped == [200 + 1198, 1300 + 1300, 1]
    _, without = lists_of(all=S.collect_list("v"), top=S.top_k("v", 1))
    without.batch(rows_of_lists("a", every), BatchTimes())
    assert without.figures.custom == {}


def test_a_list_of_too_many_bytes_is_refused_before_anything_changes() -> None:
    _, run = lists_of(all=S.collect_list("v", max_bytes=1000), n=S.count())
    for key in ("a", "b", "c"):
        run.batch(rows_of_lists(key, ["x" * 90] * 9), BatchTimes())
    with pytest.raises(SparkBridgeError) as raised:
        run.batch(one_batch([rows_of_lists("a", ["y"]), rows_of_lists("b", ["y" * 90] * 3)]), BatchTimes())
    for words in ("{'k': 'b'}", "collect_list of output 'all'", "12 elements", "max_bytes=1,000", "limit="):
        assert words in str(raised.value)
    (row,) = run.batch(rows_of_lists("b", ["z"]), BatchTimes())
    assert row["n"] == 10
    with pytest.raises(SparkBridgeError, match="collect_set of output 'one'"):
        lists_of(one=S.collect_set("v", max_bytes=10))[1].batch(rows_of_lists("a", ["x" * 11]), BatchTimes())


def test_a_session_with_a_list_of_too_many_bytes_is_refused() -> None:
    by_key = pa.schema([pa.field("k", pa.string())])
    aggregator = Aggregator([output_of(LIST_SCHEMA, "all", S.collect_list("v", max_bytes=130), None)])
    limited = Aggregator([output_of(LIST_SCHEMA, "all", S.collect_list("v", limit=2), None)])
    rows = pa.schema([*by_key, pa.field("session_window", WINDOW), pa.field("v", pa.string())])
    for one in (limited, aggregator):
        schema = session_schema(by_key, TS, one.state_schema)
        output = pa.schema([*by_key, pa.field("session_window", WINDOW), *one.result_fields])
        run = OperatorRun(SessionLogic(schema, one, output, "session_window", "update"), schema, ["k"], 1)
        run.batch(batch_of(rows, [("a", (0, 10), "x" * 50), ("b", (0, 10), "x" * 50)]), BatchTimes())
        more = batch_of(rows, [("b", (5, 15), "y" * 50), ("b", (6, 12), "z" * 50)])
        if one is limited:
            run.batch(more, BatchTimes())
            assert run.figures.custom == {"numDroppedElements": 1}
        else:
            with pytest.raises(
                SparkBridgeError, match=r"\{'k': 'b'\}: The collect_list of output 'all' has 3 elements"
            ):
                run.batch(more, BatchTimes())


CHANGING = T.StructType().add("k", "string").add("ts", "timestamp").add("v", "long")
EVERY_FUNCTION = {
    "n": S.count(),
    "some": S.count_if("flag"),
    "total": S.sum("v"),
    "mean": S.mean("v"),
    "spread": S.stddev("v"),
    "least": S.min("v"),
    "first": S.first("v", by="v"),
    "distinct": S.approx_count_distinct("v"),
    "all": S.collect_list("v"),
    "set": S.collect_set("v"),
    "top": S.top_k("v", 2),
    "product": S.merge(
        "v",
        state=pa.schema([("p", pa.float64())]),
        partial=lambda rows: _product(rows, "v"),
        merge=lambda states: _product(states, "p"),
    ),
}
OF_NO_ROWS = {"n": 0, "some": 0, "distinct": 0, "all": [], "set": [], "top": []}


def _product(rows: pa.Table, column: str) -> pa.Table:
    return rows.group_by("group_id").aggregate([(column, "product")]).rename_columns(["group_id", "p"])


class ChangingOutputs:
    """An aggregate by ``k``, in windows or sessions or neither, whose program changes its outputs from run to run."""

    def __init__(self, window: str | None, mode: str) -> None:
        self.window, self.mode = window, mode
        self.run: OperatorRun | None = None

    def program(self, **functions: S.AggregateFunction) -> None:
        """Continue with these outputs."""
        fields = T.StructType([*CHANGING.fields, T.StructField("flag", T.BooleanType())])
        aggregator = Aggregator([output_of(fields, name, f, None) for name, f in functions.items()])
        keys = [] if self.window is None else [pa.field("window", WINDOW)]
        output = pa.schema([*keys, *BY_KEY, *aggregator.result_fields])
        logic: Any
        if self.window == "session":
            schema = session_schema(BY_KEY, TS, aggregator.state_schema, aggregator.zeros)
            logic = SessionLogic(schema, aggregator, output, "window", self.mode)
        else:
            state = StateSchema(pa.schema([*keys, *BY_KEY]), aggregator.state_schema, zeros=aggregator.zeros)
            schema = OperatorSchema.of_rows(state)
            event_time = None if self.window is None else EventTime("window", is_window=True)
            logic = AggregateLogic(state, aggregator, output, self.mode, event_time)
        if self.run is None:
            self.run = OperatorRun(logic, schema, ["k"], 1)
        else:
            self.run.logic = logic
            self.run.schema = evolved(self.run.schema, OperatorSchema.from_json(schema.to_json()), "aggregate")

    def batch(
        self, *rows: tuple[str, int | None], watermark_ms: int = 0, late_ms: int = 0
    ) -> dict[str, dict[str, Any]]:
        """Process rows of the window from 0 s to 10 s; return what is emitted, by ``k``."""
        assert self.run is not None
        window = [] if self.window is None else [pa.field("window", WINDOW)]
        schema = pa.schema([*window, *BY_KEY, pa.field("v", pa.int64()), pa.field("flag", pa.bool_())])
        values = [(*([(0, 10)] if window else []), k, v, True) for k, v in rows]
        times = BatchTimes(watermark_ms=watermark_ms, late_watermark_ms=late_ms)
        emitted = self.run.batch(batch_of(schema, values), times)
        return {row["k"]: {n: v for n, v in row.items() if n not in ("k", "window")} for row in emitted}


@pytest.mark.parametrize("window", [None, "window", "session"])
@pytest.mark.parametrize("name", EVERY_FUNCTION)
def test_an_output_that_is_added_begins_as_the_function_over_no_rows(name: str, window: str | None) -> None:
    function = EVERY_FUNCTION[name]
    changing, fresh = ChangingOutputs(window, "complete"), ChangingOutputs(window, "complete")
    changing.program(count=S.count())
    changing.batch(("a", 5), ("b", 6))
    changing.program(**{name: function}, count=S.count())
    fresh.program(**{name: function})
    after = changing.batch(("a", 7), ("a", 2), ("c", 4))
    alone = fresh.batch(("a", 7), ("a", 2), ("c", 4))
    assert after == {
        "a": {name: alone["a"][name], "count": 3},
        "b": {name: OF_NO_ROWS.get(name), "count": 1},
        "c": {name: alone["c"][name], "count": 1},
    }
    again = changing.batch(("b", 3), ("a", 1))
    assert (again["b"], again["a"]["count"]) == ({name: fresh.batch(("b", 3), ("a", 1))["b"][name], "count": 2}, 4)


@pytest.mark.parametrize("window", [None, "window", "session"])
def test_outputs_are_removed_reordered_and_reset_when_added_back(window: str | None) -> None:
    changing = ChangingOutputs(window, "complete")
    changing.program(n=S.count(), total=S.sum("v"), all=S.collect_list("v"))
    changing.batch(("a", 1), ("b", 2))
    changing.program(total=S.sum("v"), n=S.count())
    assert changing.batch(("a", 10)) == {"a": {"total": 11, "n": 2}, "b": {"total": 2, "n": 1}}
    changing.program(all=S.collect_list("v"), n=S.count())
    assert changing.batch(("a", 20)) == {"a": {"all": [20], "n": 3}, "b": {"all": [], "n": 1}}
    changing.program(n=S.count(), total=S.sum("v"), all=S.collect_list("v"))
    expected = {"a": {"n": 4, "total": 30, "all": [20, 30]}, "b": {"n": 1, "total": None, "all": []}}
    assert changing.batch(("a", 30)) == expected
    changing.program(n=S.count(), total=S.sum("v"), all=S.collect_list("v"))
    expected["c"] = {"n": 1, "total": 5, "all": [5]}
    assert changing.batch(("c", 5)) == expected, "a restart without a change changes nothing"


def test_remedies_for_an_oversized_list_let_the_query_continue() -> None:
    changing = ChangingOutputs(None, "update")
    changing.program(all=S.collect_list("v", max_bytes=100))
    changing.batch(("a", 1), ("a", 2))
    with pytest.raises(SparkBridgeError, match=r"with a greater max_bytes=.*another name.*limit=\)") as refused:
        changing.batch(*[("a", i) for i in range(3, 23)])
    named = re.search(r"more than max_bytes=([\d,]+)\.", str(refused.value))
    assert named is not None
    changing.program(all=S.collect_list("v", max_bytes=10 * int(named[1].replace(",", ""))))
    assert changing.batch(*[("a", i) for i in range(3, 23)]) == {"a": {"all": list(range(1, 23))}}
    changing.program(last=S.collect_list("v", limit=2))
    assert changing.batch(*[("a", i) for i in range(3, 23)]) == {"a": {"last": [21, 22]}}


def test_remedies_for_an_overflowed_sum_let_the_query_continue() -> None:
    changing = ChangingOutputs(None, "update")
    changing.program(total=S.sum("v"))
    changing.batch(("a", 1 << 62))
    with pytest.raises(
        SparkBridgeError, match=r"left the range of int64\. Cast its input.*rewrite_state.*another name"
    ):
        changing.batch(("a", 1 << 62))
    assert changing.run is not None

    def declared(name: str) -> OperatorSchema:
        doubles = Aggregator([Output(name, "sum", "v", None, pa.float64())])
        return OperatorSchema.of_rows(StateSchema(BY_KEY, doubles.state_schema, zeros=doubles.zeros))

    assert evolved(changing.run.schema, declared("wide"), "aggregate")
    # test_rewrite_state.py follows the call that this refusal becomes.
    with pytest.raises(IncompatibleSchemaError, match=r"'total.sum.sum' was long and is double"):
        evolved(changing.run.schema, declared("total"), "aggregate")


@pytest.mark.parametrize("window", ["window", "session"])
def test_windows_from_before_an_output_close_with_it(window: str) -> None:
    changing = ChangingOutputs(window, "append")
    changing.program(n=S.count())
    changing.batch(("a", 1), ("b", 2))
    changing.program(n=S.count(), all=S.collect_list("v"), total=S.sum("v"))
    changing.batch(("a", 3))
    assert changing.batch(watermark_ms=20_000) == {
        "a": {"n": 2, "all": [3], "total": 3},
        "b": {"n": 1, "all": [], "total": None},
    }


def test_changes_that_need_a_rewrite_are_rejected() -> None:
    changing = ChangingOutputs(None, "update")
    changing.program(n=S.count(), total=S.sum("v"))
    with pytest.raises(
        IncompatibleSchemaError, match=r"output 'n' was count and is sum: give the new one another name"
    ):
        changing.program(n=S.sum("v"), total=S.sum("v"))
    doubles = Aggregator([Output("total", "sum", "v", None, pa.float64()), Output("n", "count", None, None, None)])
    state = OperatorSchema.of_rows(StateSchema(BY_KEY, doubles.state_schema))
    assert changing.run is not None
    with pytest.raises(IncompatibleSchemaError, match=r"'total.sum.sum' was long and is double: the input of output"):
        evolved(changing.run.schema, state, "aggregate")
    with pytest.raises(IncompatibleSchemaError):
        evolved(changing.run.schema, state, "deduplicate")
