"""The task of a processor: key by key, rows before timers, whole answers, late rows, one commit, bounded memory."""

from __future__ import annotations

import datetime as dt
import gc
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row

from coordinator_actor.messages import BatchTimes
from spark_bridge.exceptions import StatefulProcessorError
from spark_bridge.operators.map_in_arrow import NO_LIMIT
from spark_bridge.stateful import process_task
from spark_bridge.stateful.arrow_task import ArrowLogic
from spark_bridge.stateful.process_task import Mode, ProcessLogic, TaskInput, frozen
from spark_bridge.stateful.stateful_processor import (
    ArrowStatefulProcessor,
    ExpiredTimerInfo,
    StatefulProcessor,
    TimerValues,
)
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.state_task import EventTime, Logic
from tests.effort import examples
from tests.spark_bridge.operators.operator_runs import batch_of
from tests.spark_bridge.stateful.task_runs import (
    FORMS,
    INPUT,
    KEYS,
    NO_TIME,
    OUTPUT,
    ROWS,
    TINY,
    USERS,
    ArrowTotals,
    PandasTotals,
    Totals,
    in_order,
    process,
    rows,
    run_of,
    stored,
)


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


def test_task_freezes_live_objects_once_unless_already_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count frozen objects takes 10 ms in a worker process, and a task no longer than 100 ms."""
    monkeypatch.setattr(process_task, "_frozen_by", "nobody")
    count, counts = gc.get_freeze_count, list[int]()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    gc.freeze()
    for _ in range(3):
        with frozen():
            pass
    assert len(counts) == 1 and count() > 0, "objects that were frozen before stay frozen"
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
def test_limits_bound_rows_and_bytes_of_frames(limits: dict[str, int], sizes: list[int]) -> None:
    class Sizes(Totals):
        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
            for frame in rows:
                yield pd.DataFrame([[key[0], len(frame), 0]])

    found = process(Sizes(), "pandas", **limits).batch(batch_of(ROWS, [("a", 0, 1)] * 10), NO_TIME)
    assert [r["n"] for r in found] == sizes


class Alarms(StatefulProcessor):
    """Sets a timer ``v`` ms after the batch's time for each row, and emits the order of events."""

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


def test_output_older_than_the_watermark_is_an_error() -> None:
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


@pytest.mark.parametrize("form", FORMS)
def test_initial_state_exists_before_the_first_batch(form: str) -> None:
    run = FORMS[form](num_partitions=2)
    processor = {"rows": Totals(), "pandas": PandasTotals(), "arrow": ArrowTotals()}[form]
    first: Logic = (
        ArrowLogic(processor, "none", INPUT, ROWS, OUTPUT, is_initial=True)
        if isinstance(processor, ArrowStatefulProcessor)
        else ProcessLogic(processor, "pandas" if form == "pandas" else "rows", "none", INPUT, OUTPUT, is_initial=True)
    )
    then, run.logic = run.logic, first
    assert run.batch(rows(("a", 5), ("b", 1), ("a", 6)), NO_TIME) == []
    run.logic = then
    assert in_order(run.batch(rows(("a", 1), ("c", 1)), NO_TIME)) == [
        {"user": "a", "n": 3, "total": 12},
        {"user": "c", "n": 1, "total": 1},
    ]
