"""The task of a processor: key by key, rows before timers, whole answers, late rows, one commit, bounded memory."""

from __future__ import annotations

import datetime as dt
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark import cloudpickle
from pyspark.sql import Row

from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.messages import BatchTimes
from spark_bridge.exceptions import StateDeclarationError, StatefulProcessorError
from spark_bridge.operators.conf import NO_LIMIT
from spark_bridge.stateful.arrow_processor import (
    ArrowBatch,
    ArrowResult,
    ArrowStatefulProcessor,
    ArrowStatefulProcessorHandle,
    arrow_processor,
)
from spark_bridge.stateful.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from spark_bridge.stateful.tasks import process_task
from spark_bridge.stateful.tasks.arrow_task import ArrowLogic, Declaring
from spark_bridge.stateful.tasks.process_task import InitialStateLogic, Mode, ProcessLogic, frozen
from spark_bridge.stateful.tasks.processor_state import ProcessorState
from spark_bridge.stateful.tasks.task_input import TaskInput
from spark_bridge.stateful.values.ddl import struct_of
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.state_task import Logic
from spark_bridge.task.watermark import EventTime
from tests.effort import examples
from tests.spark_bridge.operators.operator_runs import TS, OperatorRun, batch_of

KEYS = pa.schema([("user", pa.string())])
ROWS = pa.schema([("user", pa.string()), ("ts", TS), ("v", pa.int64())])
INPUT = TaskInput(struct_of("user string, ts timestamp, v long"), KEYS)
OUTPUT = struct_of("user string, n long, total long")
USERS = ["ann", "bob", "eve", None, ""]
TINY = Limits(memory=400, step_rows=3, step_bytes=300, fan_in=2)
NO_TIME = BatchTimes()
Answer = Iterator[Any] | list[Any] | None


class Totals(StatefulProcessor):
    """Number and sum of the rows of each key."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.state = handle.getValueState("totals", "n long, total long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
        n, total = self.state.get() or (0, 0)
        for row in rows:
            assert (row.user,) == key
            n, total = n + 1, total + row.v
        self.state.update((n, total))
        yield Row(total=total, user=key[0], n=n)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: TimerValues) -> None:
        n, total = self.state.get() or (0, 0)
        self.state.update((n + 1, total + initialState.v))


class PandasTotals(Totals):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
        n, total = self.state.get() or (0, 0)
        for frame in rows:
            assert frame.index.tolist() == list(range(len(frame)))
            assert set(frame["user"]) == {key[0]}
            n, total = n + len(frame), total + int(frame["v"].sum())
        self.state.update((n, total))
        yield pd.DataFrame({"total": [total], "user": [key[0]], "n": [n]})

    def handleInitialState(self, key: Any, initialState: Any, timerValues: TimerValues) -> None:
        n, total = self.state.get() or (0, 0)
        self.state.update((n + len(initialState), total + int(initialState["v"].sum())))


class ArrowTotals(ArrowStatefulProcessor):
    def init(self, handle: ArrowStatefulProcessorHandle) -> None:
        handle.declare_state("n long, total long", name="totals")

    def process(self, batch: ArrowBatch) -> ArrowResult:
        assert batch.rows["user"].combine_chunks() == batch.keys["user"].combine_chunks().take(batch.key_index)
        rows = batch.rows.append_column("key", batch.key_index).group_by("key", use_threads=False)
        sums = rows.aggregate([("user", "count", pc.CountOptions(mode="all")), ("v", "sum")])
        state = pa.table(
            {
                "total": pc.add(pc.fill_null(batch.state["total"], 0), sums["v_sum"]),
                "n": pc.add(pc.fill_null(batch.state["n"], 0), sums["user_count"]),
            }
        )
        return ArrowResult(output=state.append_column("user", batch.keys["user"]), state=state)

    def handle_initial_state(self, batch: ArrowBatch) -> ArrowResult:
        return ArrowResult(state=self.process(batch).state)


def run_of(logic: Logic, processor: Any, time_mode: str = "none", num_partitions: int = 1) -> OperatorRun:
    """An operator with what the processor declares."""
    driver = ProcessorState(processor, KEYS, time_mode, None)
    processor.init(driver.handle)
    return OperatorRun(logic, OperatorSchema(driver.declare()), KEYS.names, num_partitions)


def process(
    processor: Any,
    mode: Mode = "rows",
    *,
    output: str = "user string, n long, total long",
    time_mode: str = "none",
    num_partitions: int = 1,
    **fields: Any,
) -> OperatorRun:
    """A processor's operator. It reaches the tasks as Spark sends it."""
    declaring = cloudpickle.loads(cloudpickle.dumps(processor))
    logic = ProcessLogic(processor, mode, time_mode, fields.pop("input", INPUT), struct_of(output), **fields)
    return run_of(logic, declaring, time_mode, num_partitions)


def in_arrow(processor: ArrowStatefulProcessor, *, time_mode: str = "none", **fields: Any) -> OperatorRun:
    """The operator of a processor in columns."""
    num_partitions = fields.pop("num_partitions", 1)
    logic = ArrowLogic(processor, time_mode, INPUT, ROWS, fields.pop("output", OUTPUT), **fields)
    return run_of(logic, Declaring(processor), time_mode, num_partitions)


FORMS: dict[str, Callable[..., OperatorRun]] = {
    "rows": lambda **f: process(Totals(), "rows", **f),
    "pandas": lambda **f: process(PandasTotals(), "pandas", **f),
    "arrow": lambda **f: in_arrow(ArrowTotals(), **f),
}


def rows(*given: tuple[str | None, int]) -> pa.RecordBatch:
    return batch_of(ROWS, [(user, None, v) for user, v in given])


def stored(run: OperatorRun, family: str) -> list[dict[str, Any]]:
    """Keys and values of a family."""
    found = []
    schema = run.schema.families[family]
    for provider in run.providers:
        store = provider.get_read_store(provider.latest_version())
        for pairs in store.scan(b"", None, family):
            keys = decode_keys(pairs.column(0), schema.key).to_pylist()
            found += [{**k, **v} for k, v in zip(keys, schema.decode_values(pairs.column(1)).to_pylist(), strict=True)]
        store.abort()
    return found


def in_order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda row: (row["user"] is not None, row["user"], *map(str, row.values())))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(12), deadline=None)
@given(
    batches=st.lists(
        st.lists(st.tuples(st.sampled_from(USERS), st.integers(-5, 5)), max_size=30), min_size=1, max_size=4
    ),
    cuts=st.lists(st.integers(0, 30), max_size=3),
    num_partitions=st.integers(1, 3),
    limits=st.sampled_from([Limits(), TINY]),
)
def test_running_totals_in_every_form(
    form: str, batches: list[list[tuple[str | None, int]]], cuts: list[int], num_partitions: int, limits: Limits
) -> None:
    run = FORMS[form](num_partitions=num_partitions, limits=limits)
    totals: dict[str | None, tuple[int, int]] = {}
    for batch in batches:
        for user, v in batch:
            n, total = totals.get(user, (0, 0))
            totals[user] = (n + 1, total + v)
        found = run.batch(rows(*batch), NO_TIME, cuts)
        touched = {user for user, _ in batch}
        last = {row["user"]: row for row in found}  # in columns, a key in parts is given one after the other
        assert in_order(list(last.values())) == in_order(
            [{"user": u, "n": totals[u][0], "total": totals[u][1]} for u in touched]
        )
        assert form == "arrow" or len(found) == len(last)
        assert run.figures.num_rows == len(batch)
    expected = [{"user": u, "n": n, "total": total} for u, (n, total) in totals.items()]
    assert in_order(stored(run, "totals")) == in_order(expected)


def test_a_task_freezes_what_there_is_unless_somebody_has_and_counts_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count frozen objects takes 10 ms in a worker process, and a task no longer than 100 ms."""
    monkeypatch.setattr(process_task, "_frozen_by", "nobody")
    count, counts = gc.get_freeze_count, list[int]()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    gc.freeze()
    for _ in range(3):
        with frozen():
            pass
    assert len(counts) == 1 and count() > 0, "what was frozen before stays so"
    monkeypatch.setattr(process_task, "_frozen_by", "nobody")
    gc.unfreeze()
    try:
        for _ in range(2):
            with frozen(), frozen():
                assert count() > 0
            assert count() == 0
    finally:
        gc.freeze()
    assert len(counts) == 3


@pytest.mark.parametrize("mode", ["rows", "pandas"])
def test_rows_are_given_lazily_and_may_be_left(mode: Mode) -> None:
    class First(Totals):
        seen: list[Any] = []

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
            first = next(rows)
            self.seen.append((key[0], int(first["v"].iloc[0]) if mode == "pandas" else first.v))
            return None

    for limits in (Limits(), TINY):
        First.seen = []
        run = process(First(), mode, limits=limits)
        given = [("bob", i) for i in range(50)] + [("ann", 100), ("eve", 200)]
        assert run.batch(rows(*given), NO_TIME) == []
        assert sorted(First.seen) == [("ann", 100), ("bob", 0), ("eve", 200)]


def test_the_rows_of_a_key_keep_their_order_and_all_their_columns() -> None:
    class Orders(Totals):
        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
            given = list(rows)
            assert [r.asDict().keys() for r in given] == [{"user", "ts", "v"}] * len(given)
            yield from ((key[0], r.v, r.ts.second) for r in given)

    given = [(user, s, v) for v, (user, s) in enumerate([("a", 3), ("b", 9), ("a", 1), ("b", 7), ("a", 2)] * 20)]
    for limits in (Limits(), TINY):
        found = process(Orders(), limits=limits).batch(batch_of(ROWS, given), NO_TIME, [7, 31])
        for name in "ab":
            assert [(r["n"], r["total"]) for r in found if r["user"] == name] == [
                (v, s) for u, s, v in given if u == name
            ]


def test_frames_have_ten_thousand_rows_at_most_and_pandas_types() -> None:
    class Frames(Totals):
        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
            for frame in rows:
                assert list(map(str, frame.dtypes)) == ["object", "datetime64[ns]", "int64"]
                frame["v"] *= 2
                yield pd.DataFrame([[key[0], len(frame), frame["v"].sum()]])

    at = dt.datetime(2020, 7, 1, 12, tzinfo=dt.timezone.utc)
    seconds = int(at.timestamp())
    given = batch_of(ROWS, [("a", seconds, 1)] * 25_000 + [("b", seconds, 7)])
    run = process(Frames(), "pandas", time_zone="Europe/Berlin")
    found = run.batch(given, NO_TIME)
    assert [r["n"] for r in found if r["user"] == "a"] == [10_000, 10_000, 5_000]
    assert sorted(r["total"] for r in found) == [14, 10_000, 20_000, 20_000]


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"frame_rows": 4}, [4, 4, 2]),
        ({"frame_rows": NO_LIMIT}, [10]),
        # A row of these has 8 bytes for the time, 8 for the number, 4 for the text's place and 1 for the text.
        ({"frame_bytes": 21 * 3}, [3, 3, 3, 1]),
        ({"frame_rows": 2, "frame_bytes": 21 * 3}, [2, 2, 2, 2, 2]),
        ({"frame_bytes": 1}, [1] * 10),
    ],
)
def test_frames_have_as_many_rows_and_bytes_as_the_session_says(limits: dict[str, int], sizes: list[int]) -> None:
    class Sizes(Totals):
        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
            for frame in rows:
                yield pd.DataFrame([[key[0], len(frame), 0]])

    found = process(Sizes(), "pandas", **limits).batch(batch_of(ROWS, [("a", 0, 1)] * 10), NO_TIME)
    assert [r["n"] for r in found] == sizes


class Alarms(StatefulProcessor):
    """Sets a timer ``v`` ms after the batch's time for each row, and says what happens in which order."""

    rows_before_timers: list[Any]

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
        for row in rows:
            self.handle.registerTimer(row.v)
            yield (key[0], row.v, 0)

    def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo) -> Any:
        n = (self.count.get() or (0,))[0] + 1
        self.count.update((n,))
        expiry = expiredTimerInfo.getExpiryTimeInMs()
        if expiry == 4007:
            self.handle.registerTimer(expiry + 10_000)
        yield (key[0], expiry, n)


def test_timers_fire_after_the_rows_in_order_and_once() -> None:
    run = process(Alarms(), time_mode="processingtime", limits=Limits(step_rows=2))
    first = run.batch(rows(("ann", 3000), ("bob", 1000), ("ann", 2000), ("eve", 500)), BatchTimes(1000))
    assert [(r["user"], r["n"], r["total"]) for r in in_order(first)] == [
        ("ann", 2000, 0),
        ("ann", 3000, 0),
        ("bob", 1000, 0),
        ("bob", 1000, 1),
        ("eve", 500, 0),
        ("eve", 500, 1),
    ]
    assert [r["total"] for r in first if r["user"] == "eve"] == [0, 1], "its row comes before its timer"
    # A quiet stream, then keys with rows and timers between those with timers alone.
    assert run.batch(rows(), BatchTimes(1999)) == []
    second = run.batch(rows(("ann", 9000), ("kim", 4007)), BatchTimes(4007))
    assert [tuple(r.values()) for r in second if r["user"] == "ann"] == [
        ("ann", 9000, 0),
        ("ann", 2000, 1),
        ("ann", 3000, 2),
    ]
    assert [tuple(r.values()) for r in second if r["user"] == "kim"] == [("kim", 4007, 0), ("kim", 4007, 1)]
    third = run.batch(rows(), BatchTimes(20_000))
    assert in_order(third) == in_order(
        [{"user": "ann", "n": 9000, "total": 3}, {"user": "kim", "n": 14_007, "total": 2}]
    )
    assert run.batch(rows(), BatchTimes(90_000)) == []
    assert stored(run, "timers.-keys") == stored(run, "timers.-expiry") == []


def test_event_timers_go_by_the_watermark_and_late_rows_are_dropped() -> None:
    class Late(Alarms):
        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
            assert timerValues.getCurrentWatermarkInMs() == 5000
            yield from super().handleInputRows(key, rows, timerValues)

    given = TaskInput(INPUT.struct, KEYS, EventTime("ts"))
    run = process(Late(), time_mode="eventtime", input=given)
    times = BatchTimes(timestamp_ms=99_000, watermark_ms=5000, late_watermark_ms=3000)
    found = run.batch(batch_of(ROWS, [("a", 3, 7001), ("a", 4, 7002), ("b", None, 7003), ("b", 2, 7004)]), times)
    assert sorted(r["n"] for r in found) == [7002, 7003]
    assert (run.figures.num_rows, run.figures.num_rows_dropped_by_watermark) == (2, 2)
    later = BatchTimes(timestamp_ms=99_000, watermark_ms=7002, late_watermark_ms=5000)
    assert [r["n"] for r in run.batch(rows(), later)] == [7002]


def test_output_behind_the_watermark_is_an_error() -> None:
    class Echo(Totals):
        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
            yield from (Row(at=r.ts) for r in rows)

    run = process(Echo(), output="at timestamp", event_time=EventTime("at"))
    times = BatchTimes(0, 9000, 5000)
    at = dt.datetime(1970, 1, 1, 0, 0, 6, tzinfo=dt.timezone.utc)
    assert run.batch(batch_of(ROWS, [("a", 6, 0), ("a", None, 0)]), times) == [{"at": at}, {"at": None}]
    with pytest.raises(StatefulProcessorError, match=r"OLDER_THAN_WATERMARK.*at=1970-01-01 00:00:05.*5000 ms"):
        run.batch(batch_of(ROWS, [("a", 6, 0), ("a", 5, 0)]), times)


class Closing(Totals):
    """Counts its calls."""

    calls: list[str]

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.calls.append("init")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
        for row in rows:
            yield (key[0], 1 // row.v, 0)
        self.state.update((1, 1))

    def close(self) -> None:
        self.calls.append("close")


def test_init_and_close_once_and_no_commit_after_an_error() -> None:
    Closing.calls = []
    processor = Closing()
    run = run_of(ProcessLogic(processor, "rows", "none", INPUT, OUTPUT, limits=TINY), processor)
    Closing.calls.clear()
    run.batch(rows(*[(f"u{i}", 1) for i in range(20)]), NO_TIME)
    assert Closing.calls == ["init", "close"]
    with pytest.raises(ZeroDivisionError):
        run.batch(rows(*[(f"w{i}", 1) for i in range(20)], ("x", 0)), NO_TIME)
    assert Closing.calls == ["init", "close"] * 2
    assert run.providers[0].latest_version() == 1
    assert {r["user"][0] for r in stored(run, "totals")} == {"u"}
    run.batch(rows(), NO_TIME)
    assert Closing.calls == ["init", "close"] * 3


class Giving(StatefulProcessor):
    """Gives what it is told to."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
        return self.answer()


ONE = {"user": "a", "n": 1, "total": 2}


@pytest.mark.parametrize(
    "answer",
    [
        lambda: iter([Row(**ONE)]),
        lambda: [Row("total", "user", "n")(2, "a", 1)],
        lambda: (["a", 1, 2] for _ in range(1)),
        lambda: {("a", 1, 2)},
        lambda: [Row("a", 1, 2)],
        lambda: [Row(more=0, **ONE)],
    ],
)
def test_rows_go_by_name_and_tuples_by_position(answer: Callable[[], Any]) -> None:
    assert process(Giving(answer)).batch(rows(("k", 1)), NO_TIME) == [ONE]


def test_rows_of_several_makers_may_be_mixed() -> None:
    in_order, turned = Row("user", "n", "total"), Row("total", "more", "user", "n")
    given = [in_order("a", 1, 2), turned(2, 0, "a", 1), turned(2, 1, "a", 1), ("a", 1, 2), in_order("a", 1, 2)]
    given += [Row(**ONE), turned(2, 2, "a", 1), Row(total=2, n=1, user="a")]
    assert process(Giving(lambda: given)).batch(rows(("k", 1)), NO_TIME) == [ONE] * len(given)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda: Row(**ONE), ["returned Row(user='a'", "iterator of Rows"]),
        (lambda: 5, ["returned 5 (int)", "iterator"]),
        (lambda: "text", ["'text' (str)"]),
        (lambda: [5], ["5 (int) is no Row", "user:string,n:bigint,total:bigint"]),
        (lambda: [ONE], ["(dict) is no Row"]),
        (lambda: [Row(user="a", n=1)], ["Row(user='a', n=1) has the fields user, n"]),
        (lambda: [Row(user="a", n=1, totals=2)], ["has the fields user, n, totals"]),
        (lambda: [Row("total", "user", "n")(2, "a")], ["(2, 'a') has 2 values for total, user, n"]),
        (lambda: [Row("user", "n", "total")("a", 1)], ["has 2 values", "3 fields (user, n, total)"]),
        (lambda: [("a", 1)], ["('a', 1) has 2 values", "3 fields (user, n, total)"]),
        (lambda: [("a", 1, 2), ("b", "x", 3)], ["'n'", "long", "'x' (str)"]),
        (lambda: [pd.DataFrame([ONE])], ["(DataFrame) is no Row"]),
    ],
)
def test_rows_that_do_not_fit_are_an_error(answer: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(StatefulProcessorError) as raised:
        process(Giving(answer)).batch(rows(("k", 1)), NO_TIME)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda: pd.DataFrame([ONE]), ["iterator of pandas DataFrames"]),
        (lambda: [Row(**ONE)], ["(Row) for output: give pandas DataFrames"]),
        (lambda: [pd.DataFrame({"user": ["a"], "n": [1]})], ["has the columns user, n", "total:bigint"]),
        (lambda: [pd.DataFrame([["a", 1]])], ["has 2 columns"]),
        (lambda: [pd.DataFrame([["a", "x", 1]])], ["'n'", "'x' (str)"]),
        (lambda: [pd.DataFrame([["a", 1.5, 1]])], ["'n'", "1.5"]),
    ],
)
def test_frames_that_do_not_fit_are_an_error(answer: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(StatefulProcessorError) as raised:
        process(Giving(answer), "pandas").batch(rows(("k", 1)), NO_TIME)
    for word in words:
        assert word in str(raised.value)


def test_frames_without_rows_or_columns_are_nothing() -> None:
    given = [pd.DataFrame(), pd.DataFrame(columns=["total", "n", "user"]), pd.DataFrame([ONE]).assign(more=0)]
    assert process(Giving(lambda: iter(given)), "pandas").batch(rows(("k", 1)), NO_TIME) == [ONE]


def test_what_is_changed_after_it_was_given_is_not_changed_in_the_output() -> None:
    def growing() -> Iterator[Any]:
        items: list[int] = []
        by_name: dict[str, list[int]] = {"i": items}
        for i in range(3):
            items.append(i)
            yield Row(items=items, deep=Row(inner=by_name))

    output = "items array<int>, deep struct<inner:map<string,array<int>>>"
    found = process(Giving(growing), output=output).batch(rows(("k", 1)), NO_TIME)
    assert [r["items"] for r in found] == [[0], [0, 1], [0, 1, 2]]
    assert [dict(r["deep"]["inner"])["i"] for r in found] == [[0], [0, 1], [0, 1, 2]]

    def one_frame() -> Iterator[Any]:
        frame = pd.DataFrame([ONE])
        for i in range(3):
            frame.loc[0, "n"] = i
            yield frame

    assert [r["n"] for r in process(Giving(one_frame), "pandas").batch(rows(("k", 1)), NO_TIME)] == [0, 1, 2]


def test_a_key_may_emit_more_than_fits_at_once() -> None:
    run = process(Giving(lambda: (("a", i, 0) for i in range(20_000))), limits=TINY)
    found = run.batch(rows(("k", 1), ("l", 1)), NO_TIME)
    assert [r["n"] for r in found] == [*range(20_000)] * 2


@pytest.mark.parametrize("form", FORMS)
def test_an_initial_state_is_there_before_the_first_batch(form: str) -> None:
    run = FORMS[form](num_partitions=2)
    processor = {"rows": Totals(), "pandas": PandasTotals(), "arrow": ArrowTotals()}[form]
    first: Logic = (
        ArrowLogic(processor, "none", INPUT, ROWS, OUTPUT, is_initial=True)
        if isinstance(processor, ArrowStatefulProcessor)
        else InitialStateLogic(processor, "pandas" if form == "pandas" else "rows", "none", INPUT)
    )
    then, run.logic = run.logic, first
    assert run.batch(rows(("a", 5), ("b", 1), ("a", 6)), NO_TIME) == []
    run.logic = then
    assert in_order(run.batch(rows(("a", 1), ("c", 1)), NO_TIME)) == [
        {"user": "a", "n": 3, "total": 12},
        {"user": "c", "n": 1, "total": 1},
    ]


def test_in_columns_state_is_written_or_removed_by_mask() -> None:
    @arrow_processor(pa.schema([("last", pa.int64()), ("tags", pa.list_(pa.string()))]), name="last")
    def lasts(batch: ArrowBatch) -> ArrowResult:
        values = batch.rows["v"].combine_chunks().take(pa.array(batch.offsets[1:] - 1))
        seen = pa.table({"user": batch.keys["user"], "n": batch.state["last"], "total": batch.has_state.cast("int64")})
        state = pa.table({"last": values, "tags": pa.array([["x"]] * batch.num_keys)})
        return ArrowResult(
            output=seen, state=state, updated=pc.greater(values, 0), removed=pc.less(values, 0).to_numpy(False)
        )

    run = in_arrow(lasts)
    run.batch(rows(("a", 1), ("b", 2), ("c", 0)), NO_TIME)
    assert (run.figures.num_rows_updated, run.figures.num_rows_removed) == (2, 0)
    found = run.batch(rows(("a", 0), ("b", 5), ("b", -1), ("c", 9)), NO_TIME)
    assert [tuple(r.values()) for r in in_order(found)] == [("a", 1, 1), ("b", 2, 1), ("c", None, 0)]
    assert (run.figures.num_rows_updated, run.figures.num_rows_removed) == (1, 1)
    assert in_order(stored(run, "last")) == [
        {"user": "a", "last": 1, "tags": ["x"]},
        {"user": "c", "last": 9, "tags": ["x"]},
    ]


def test_in_columns_state_lives_as_long_as_its_ttl() -> None:
    @arrow_processor("n long", ttl_ms=1000)
    def counts(batch: ArrowBatch) -> ArrowResult:
        keep = pc.is_null(batch.state["n"])
        return ArrowResult(
            output=pa.table({"user": batch.keys["user"], "n": batch.state["n"], "total": batch.state["n"]}),
            state=pa.table({"n": pa.array([7] * batch.num_keys)}),
            updated=keep.combine_chunks(),
        )

    run = in_arrow(counts, time_mode="processingtime")
    seen = [run.batch(rows(("a", 1)), BatchTimes(t))[0]["n"] for t in (1000, 1999, 2000, 2999)]
    assert seen == [None, 7, None, 7]
    # What nobody touches is removed as well, in some batch.
    for t in range(16):
        run.batch(rows(), BatchTimes(5000 + t))
    assert stored(run, "state") == []


def test_in_columns_a_key_too_large_for_one_call_is_given_in_several() -> None:
    run = in_arrow(ArrowTotals(), limits=Limits(memory=2000, fan_in=2))
    given = [("hot", 1)] * 300 + [("cold", 5)]
    found = run.batch(rows(*given), NO_TIME, [50, 100, 150, 200, 250])
    totals = [r["total"] for r in found if r["user"] == "hot"]
    assert len(totals) > 3
    assert (totals, totals[-1]) == (sorted(totals), 300)
    assert in_order(stored(run, "totals")) == [
        {"user": "cold", "n": 1, "total": 5},
        {"user": "hot", "n": 300, "total": 300},
    ]


def test_in_columns_timers_are_set_and_fire() -> None:
    class Timed(ArrowStatefulProcessor):
        def init(self, handle: ArrowStatefulProcessorHandle) -> None:
            pass

        def process(self, batch: ArrowBatch) -> ArrowResult:
            due = batch.expired_timers
            timers = pa.table({"key_index": batch.key_index, "expiry_ms": batch.rows["v"]})
            is_even = pc.equal(pc.bit_wise_and(batch.rows["v"], 1), 0)
            return ArrowResult(
                output=pa.table(
                    {
                        "user": batch.keys["user"].take(due["key_index"]),
                        "n": due["expiry_ms"],
                        "total": pa.array([batch.num_keys] * due.num_rows, pa.int64()),
                    }
                ),
                timers=timers.filter(is_even),
                deleted_timers=timers.filter(pc.invert(is_even)).set_column(
                    1, "expiry_ms", pa.array([4000] * sum(not e for e in is_even.to_pylist()), pa.int64())
                ),
            )

    run = in_arrow(Timed(), time_mode="processingtime")
    assert run.batch(rows(("a", 2000), ("a", 4000), ("b", 4000), ("c", 8000)), BatchTimes(1000)) == []
    assert run.batch(rows(("d", 4000)), BatchTimes(2000)) == [{"user": "a", "n": 2000, "total": 2}]
    assert run.batch(rows(("a", 1)), BatchTimes(3000)) == []
    assert [r["user"] for r in in_order(run.batch(rows(), BatchTimes(5000)))] == ["b", "d"]
    assert run.batch(rows(), BatchTimes(6000)) == []
    assert [r["user"] for r in stored(run, "timers.-keys")] == ["c"]


def test_in_columns_one_call_takes_all_that_fits() -> None:
    calls = []

    @arrow_processor("n long")
    def watched(batch: ArrowBatch) -> None:
        calls.append((batch.num_keys, batch.rows.num_rows, batch.rows.schema, batch.state.num_rows))

    run = in_arrow(watched)
    run.batch(rows(*[(f"u{i % 500}", i) for i in range(30_000)]), NO_TIME, [5, 20_000])
    assert calls == [(500, 30_000, ROWS, 500)]
    calls.clear()
    run.batch(rows(), NO_TIME)
    assert calls == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (5, ["answered with a int", "ArrowResult"]),
        (pa.table({"user": ["a"]}), ["output has the columns user", "user, n, total"]),
        (pa.table({"user": ["a"], "n": ["x"], "total": [1]}), ["'n'", "string", "int64", "'x'"]),
        (ArrowResult(output=7), ["a int for its output"]),  # type: ignore[arg-type]
        (ArrowResult(state=pa.table({"n": [1, 2]})), ["2 rows of state for 1 keys"]),
        (ArrowResult(state=pa.table({"m": [1]})), ["state has the columns m", "has n"]),
        (ArrowResult(state=pa.table({"n": [1]}), updated=pa.array([True, True])), ["updated= with 2 values"]),
        (ArrowResult(removed=pa.array([1])), ["removed= with 1 values of type int64", "booleans"]),
        (ArrowResult(timers=pa.table({"key_index": [0], "expiry_ms": [5]})), ["time"]),
        (ArrowResult(timers=pa.table({"key_index": [1], "expiry_ms": [5]})), ["key_index=1", "1 keys"]),
        (ArrowResult(deleted_timers=pa.table({"key_index": [0]})), ["timers has the columns key_index", "expiry_ms"]),
    ],
)
def test_in_columns_what_does_not_fit_is_an_error(answer: Any, words: list[str]) -> None:
    run = in_arrow(arrow_processor("n long")(lambda _: answer))
    with pytest.raises(StatefulProcessorError) as raised:
        run.batch(rows(("a", 1)), NO_TIME)
    for word in words:
        assert word in str(raised.value)


def test_in_columns_state_is_declared_once() -> None:
    class Twice(ArrowTotals):
        def init(self, handle: ArrowStatefulProcessorHandle) -> None:
            handle.declare_state("n long")
            handle.declare_state("m long", name="other")

    with pytest.raises(StateDeclarationError, match="twice, as 'state' and 'other'"):
        in_arrow(Twice())

    class Never(ArrowTotals):
        def init(self, handle: ArrowStatefulProcessorHandle) -> None:
            pass

        def process(self, batch: ArrowBatch) -> ArrowResult:
            return ArrowResult(state=pa.table({"n": [1]}))

    with pytest.raises(StatefulProcessorError, match="has declared none"):
        in_arrow(Never()).batch(rows(("a", 1)), NO_TIME)
