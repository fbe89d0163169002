"""Session windows over batches against a plain model of what Spark does; declared windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator_actor.messages import BatchTimes
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.computation import Output
from spark_bridge.functions import SessionWindow, Window, session_window, window
from spark_bridge.operators import session_task
from spark_bridge.operators.session_task import SessionLogic, joined_sessions
from spark_bridge.state_format.layouts import ENDS_FAMILY, session_schema
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.state_task import between
from tests.effort import examples, only_thorough
from tests.spark_bridge.operators.operator_runs import TS, WINDOW, OperatorRun, Watermark, batch_of, seconds

KEYS = pa.schema([pa.field("k", pa.string())])
ROWS = pa.schema([*KEYS, pa.field("session_window", WINDOW), pa.field("ts", TS), pa.field("v", pa.int64())])
AGGREGATOR = Aggregator(
    [
        Output("n", "count", None, None, None),
        Output("total", "sum", "v", None, pa.int64()),
        Output("word", "max", "k", None, pa.string()),
    ]
)
OUTPUT = pa.schema([pa.field("session_window", WINDOW), *KEYS, *AGGREGATOR.result_fields])
SMALL = Limits(memory=1500, step_rows=3, step_bytes=500, fan_in=2)

Row = tuple[Any, ...]
"""Key, time and length in seconds, value."""
events = st.lists(
    st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 150), st.integers(1, 25), st.integers(-3, 3)),
    max_size=10,
)


class Model:
    """Spark's SessionWindowStateStoreRestoreExec, MergingSessionsExec and SessionWindowStateStoreSaveExec."""

    def __init__(self, mode: str, evicts: bool = True) -> None:
        self.mode = mode
        self.evicts = evicts
        self.state: dict[Any, list[tuple[int, int, list[Row]]]] = {}
        self.late = 0

    def batch(self, rows: list[Row], times: BatchTimes) -> dict[Any, Row]:
        kept = [r for r in rows if not self.evicts or (r[1] + r[2]) * 1000 > times.late_watermark_ms]
        self.late = len(rows) - len(kept)
        touched = set()
        for key in {r[0] for r in kept}:
            new = [(ts, ts + length, [(k, ts, length, v)]) for k, ts, length, v in kept if k == key]
            self.state[key] = self.merged([*self.state.get(key, []), *new])
            for start, end, _ in self.state[key]:
                if any(start <= r[0] <= end for r in new):
                    touched.add((key, start, end))
        every = {(key, start, end): of for key, found in self.state.items() for start, end, of in found}
        done = {s for s in every if self.evicts and self.mode != "complete" and s[2] * 1000 <= times.watermark_ms}
        for key in list(self.state):
            self.state[key] = [s for s in self.state[key] if (key, s[0], s[1]) not in done]
            if not self.state[key]:
                del self.state[key]
        emitted = {"update": touched, "append": done, "complete": set(every)}[self.mode]
        return {s: (len(every[s]), sum(r[3] for r in every[s]), s[0]) for s in emitted}

    @staticmethod
    def merged(sessions: list[tuple[int, int, list[Row]]]) -> list[tuple[int, int, list[Row]]]:
        found: list[tuple[int, int, list[Row]]] = []
        for start, end, rows in sorted(sessions, key=lambda s: s[0]):
            if found and start <= found[-1][1]:
                begun, ended, before = found[-1]
                found[-1] = (begun, max(ended, end), [*before, *rows])
            else:
                found.append((start, end, rows))
        return found


def run_of(mode: str, partitions: int, *, evicts: bool = True, limits: Limits | None = None) -> OperatorRun:
    schema = session_schema(KEYS, TS, AGGREGATOR.state_schema)
    logic = SessionLogic(schema, AGGREGATOR, OUTPUT, "session_window", mode, evicts, limits=limits)
    return OperatorRun(logic, schema, KEYS.names, partitions)


def check(run: OperatorRun, model: Model, batches: list[list[Row]], cut: int) -> None:
    watermark = Watermark(delay_s=10)
    for rows in [*batches, [], []]:
        times = watermark.times()
        batch = batch_of(ROWS, [(k, (ts, ts + length), ts, v) for k, ts, length, v in rows])
        emitted = run.batch(batch, times, [cut, cut + 3])
        got = {(e["k"], *seconds(e["session_window"])): (e["n"], e["total"], e["word"]) for e in emitted}
        assert got == model.batch(rows, times)
        assert len(got) == len(emitted), "a session was emitted twice"
        assert run.size("default") == len(model.state)
        assert run.size(ENDS_FAMILY) == len(model.state), "each key is to be found once by when it is due"
        assert run.figures.num_rows_dropped_by_watermark == model.late
        watermark.advance(r[1] for r in rows)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(events, max_size=5),
    st.sampled_from(["update", "append", "complete"]),
    st.sampled_from([1, 3]),
    st.integers(0, 5),
    st.none() | st.just(10),
    st.booleans(),
)
def test_sessions_in_every_output_mode_as_in_spark(
    batches: list[list[Row]], mode: str, partitions: int, cut: int, gap: int | None, small: bool
) -> None:
    rows = [[(k, ts, gap or length, v) for k, ts, length, v in batch] for batch in batches]
    check(run_of(mode, partitions, limits=SMALL if small else None), Model(mode), rows, cut)


@settings(max_examples=examples(10), deadline=None)
@given(st.lists(events, max_size=4), st.sampled_from(["update", "complete"]))
def test_sessions_without_a_watermark_are_kept(batches: list[list[Row]], mode: str) -> None:
    check(run_of(mode, 2, evicts=False), Model(mode, evicts=False), batches, 2)


STEPS = Limits(memory=20_000, step_rows=100, step_bytes=4000, fan_in=3)


@pytest.mark.parametrize(
    ("mode", "limits"),
    [("append", STEPS), *(only_thorough(*one) for one in [("append", None), ("complete", STEPS), ("complete", None)])],
)
def test_many_sessions_in_small_steps(mode: str, limits: Limits | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_task, "SESSION_KEYS_PER_STEP", 5)
    monkeypatch.setattr("spark_bridge.task.keyed_rows.ROWS_PER_PART", 50)
    batches = [[(f"k{i % 37}", base + i * 7 % 60, 3 + i % 5, i) for i in range(400)] for base in (0, 50, 300)]
    check(run_of(mode, 2, limits=limits), Model(mode), batches, 100)


def test_extended_session_keeps_its_old_due_time_until_the_watermark_passes_it() -> None:
    run = run_of("append", 1)

    def due() -> list[int]:
        return [seconds(r["__due"]) for r in run.stored_keys(ENDS_FAMILY)]

    for i in range(4):
        run.batch(batch_of(ROWS, [("a", (i, i + 10), i, 1)]), BatchTimes())
    assert due() == [10]
    assert run.batch(batch_of(ROWS, []), BatchTimes(0, 12_000, 0)) == []
    assert due() == [13]
    ended = run.batch(batch_of(ROWS, []), BatchTimes(0, 13_000, 12_000))
    assert [seconds(e["session_window"]) for e in ended] == [(0, 13)]
    assert due() == []


def test_a_session_before_those_known_is_due_before_them() -> None:
    run = run_of("append", 1)
    run.batch(batch_of(ROWS, [("a", (40, 50), 40, 1)]), BatchTimes())
    run.batch(batch_of(ROWS, [("a", (10, 20), 10, 1)]), BatchTimes())
    ended = run.batch(batch_of(ROWS, []), BatchTimes(0, 20_000, 0))
    assert [seconds(e["session_window"]) for e in ended] == [(10, 20)]


def test_sessions_join_where_one_begins_as_the_other_ends() -> None:
    ids = np.array([0, 0, 0, 1])
    starts, ends = np.array([20, 0, 10, 25]), np.array([30, 10, 19, 26])
    of_rows, keys, begun, ended = joined_sessions(ids, starts, ends)
    assert of_rows.tolist() == [1, 0, 0, 2]
    assert (keys.tolist(), begun.tolist(), ended.tolist()) == ([0, 0, 1], [0, 20, 25], [19, 30, 26])


def test_ranges_are_cut_to_what_a_step_covers() -> None:
    ranges = [(b"a", b"b"), (b"c", b"d"), (b"e", None)]
    assert between(ranges, None, None) == ranges
    assert between(ranges, None, b"c") == [(b"a", b"b"), (b"c", b"c\x00")]
    assert between(ranges, b"c", b"d") == [(b"c\x00", b"d")]
    assert between(ranges, b"d", None) == [(b"e", None)]


def test_windows_are_declared_as_in_spark() -> None:
    assert window("ts", "10 minutes", "5 minutes").alias("w") == Window("ts", "10 minutes", "5 minutes", None, "w")
    assert session_window("ts", "5 minutes").alias("s") == SessionWindow("ts", "5 minutes", "s")
