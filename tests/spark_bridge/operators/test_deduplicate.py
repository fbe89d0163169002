"""Deduplication over batches against a plain model of what Spark does."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator_actor.messages import BatchTimes
from spark_bridge.operators import deduplicate
from spark_bridge.operators.deduplicate import DeduplicateLogic
from spark_bridge.state_format.layouts import EXPIRY_FAMILY, deduplicate_schema
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.state_task import EventTime
from tests.effort import examples, only_thorough
from tests.spark_bridge.operators.operator_runs import SECOND, TS, OperatorRun, Watermark, batch_of, seconds

ROWS = pa.schema([pa.field("ts", TS), pa.field("k", pa.string()), pa.field("v", pa.int64())])
SMALL = Limits(memory=1500, step_rows=3, step_bytes=500, fan_in=2)
DELAY = 10
NEVER = float("inf")

Row = tuple[Any, ...]
"""Time in seconds, key, value."""
events = st.lists(
    st.tuples(
        st.none() | st.integers(0, 100), st.sampled_from(["a", "b", "c", "d", None]), st.none() | st.integers(0, 3)
    ),
    max_size=12,
)


class Model:
    """Spark's StreamingDeduplicateExec and StreamingDeduplicateWithinWatermarkExec, given rows in the order that
    counts.
    """

    def __init__(self, by: tuple[str, ...], has_watermark: bool, within: int | None) -> None:
        self.by = [ROWS.get_field_index(name) for name in by]
        self.has_watermark = has_watermark
        self.within = within
        self.state: dict[Row, float] = {}
        self.late = self.removed = 0

    def batch(self, rows: list[Row], times: BatchTimes) -> list[Row]:
        late = [r for r in rows if self.has_watermark and r[0] is not None and r[0] * 1000 <= times.late_watermark_ms]
        self.late = len(late)
        passed = []
        for row in sorted((r for r in rows if r not in late), key=lambda r: NEVER if r[0] is None else r[0]):
            key = tuple(row[i] for i in self.by)
            if key not in self.state:
                self.state[key] = self.gone_at(row)
                passed.append(row)
        gone = [k for k, at in self.state.items() if at * 1000 <= times.watermark_ms]
        for key in gone:
            del self.state[key]
        self.removed = len(gone)
        return passed

    def gone_at(self, row: Row) -> float:
        if self.within is not None:
            return (row[0] or 0) + self.within
        return row[0] if self.has_watermark and 0 in self.by and row[0] is not None else NEVER


def run_of(
    by: tuple[str, ...], watermark: bool, within: int | None, partitions: int, limits: Any = None
) -> OperatorRun:
    time = EventTime("ts") if watermark else None
    key_time = time if "ts" in by and within is None else None
    stored = sorted(by, key=lambda name: name != "ts") if key_time else list(by)
    schema = deduplicate_schema(pa.schema([ROWS.field(n) for n in stored]), by, TS if within is not None else None)
    within_us = None if within is None else within * SECOND
    logic = DeduplicateLogic(
        schema, tuple(ROWS.names), tuple(n for n in ROWS.names if n not in by), time, key_time, within_us, limits
    )
    return OperatorRun(logic, schema, stored, partitions)


def check(run: OperatorRun, model: Model, batches: list[list[Row]], cut: int) -> None:
    watermark = Watermark(DELAY)
    for rows in [*batches, [], []]:
        times = watermark.times()
        emitted = [tuple(map(seconds, e.values())) for e in run.batch(batch_of(ROWS, rows), times, [cut, cut + 3])]
        expected = model.batch(rows, times)
        keys = [tuple(e[i] for i in model.by) for e in emitted]
        assert sorted(keys, key=repr) == sorted((tuple(e[i] for i in model.by) for e in expected), key=repr)
        assert set(emitted) <= set(rows)
        if model.has_watermark:
            times_of_keys = {tuple(e[i] for i in model.by): e[0] for e in expected}
            assert {tuple(e[i] for i in model.by): e[0] for e in emitted} == times_of_keys
        assert run.size("default") == len(model.state)
        assert run.figures.num_rows_dropped_by_watermark == model.late
        assert run.figures.num_rows_updated == len(expected)
        assert run.figures.num_rows_removed == model.removed
        assert run.figures.custom == {"numDroppedDuplicateRows": len(rows) - model.late - len(expected)}
        if model.within is not None:
            assert run.size(EXPIRY_FAMILY) == len(model.state)
        watermark.advance(r[0] for r in rows)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(events, max_size=5),
    st.sampled_from(
        [
            (("k",), False, None),
            (("k",), True, None),
            (("k", "ts"), True, None),
            (("k", "ts"), False, None),
            (("k",), True, DELAY),
            (("k",), True, 25),
            (("v", "k"), True, 5),
        ]
    ),
    st.sampled_from([1, 3]),
    st.integers(0, 5),
    st.booleans(),
)
def test_the_first_row_of_each_key_goes_through_as_in_spark(
    batches: list[list[Row]], how: Any, partitions: int, cut: int, small: bool
) -> None:
    check(run_of(*how, partitions, SMALL if small else None), Model(*how), batches, cut)


@settings(max_examples=examples(15), deadline=None)
@given(events, st.permutations(range(12)), st.integers(0, 5), st.booleans())
def test_which_row_goes_through_does_not_depend_on_the_order(
    rows: list[Row], order: list[int], cut: int, watermark: bool
) -> None:
    answers = []
    for some in (rows, [rows[i] for i in order if i < len(rows)]):
        run = run_of(("k",), watermark, None, 2)
        answers.append(sorted(map(repr, run.batch(batch_of(ROWS, some), BatchTimes(), [cut]))))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "limits", [only_thorough(None), Limits(memory=10_000, step_rows=50, step_bytes=4000, fan_in=3)]
)
def test_many_keys_in_small_steps(limits: Limits | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplicate, "DEDUPLICATE_KEYS_PER_STEP", 7)
    monkeypatch.setattr("spark_bridge.task.keyed_rows.ROWS_PER_PART", 50)
    how = (("k",), True, 30)
    batches = [[(base + i % 50, f"k{i % 211}", i) for i in range(600)] for base in (0, 40, 200)]
    check(run_of(*how, 2, limits), Model(*how), batches, 100)


def test_key_that_expires_in_its_own_batch_is_not_kept() -> None:
    run = run_of(("k",), True, 10, 1)
    times = BatchTimes(0, 20_000, 5_000)
    assert len(run.batch(batch_of(ROWS, [(10, "up", 1), (11, "stays", 1)]), times)) == 2
    assert [r["k"] for r in run.stored_keys("default")] == ["stays"]


def test_columns_of_types_that_state_cannot_hold_pass_through() -> None:
    run = run_of(("k",), False, None, 1)
    rows = batch_of(ROWS, [(1, "a", 2), (2, "a", 1)]).append_column("span", pa.array([1, 2], pa.duration("us")))
    logic = DeduplicateLogic(run.schema, (*ROWS.names, "span"), ("ts", "v"))
    (row,) = OperatorRun(logic, run.schema, ["k"], 1).batch(rows, BatchTimes())
    assert row["span"].total_seconds() * 1e6 == seconds(row["ts"])


@pytest.mark.parametrize(
    ("by", "within", "given_rows", "here", "in_spark"),
    [
        (
            ("ts", "k"),
            None,
            [[(40, "d")], [(60, "e")], [(41, "a")], [(42, "a")]],
            [["d"], ["e"], ["a"], []],
            [["d"], ["e"], [], []],
        ),
        (
            ("k",),
            2,
            [[(17, "a")], [(16, "a")], [(13, "a")], [(22, "b"), (21, "c")], [(21, "a")], [(22, "a")]],
            [["a"], [], [], ["b", "c"], [], ["a"]],
            [["a"], [], [], ["b", "c"], ["a"], []],
        ),
    ],
)
@pytest.mark.parametrize("is_spark", [False, True])
def test_the_examples_of_late_rows(
    by: tuple[str, ...],
    within: int | None,
    given_rows: list[list[Row]],
    here: list[list[str]],
    in_spark: list[list[str]],
    is_spark: bool,
) -> None:
    """Those of docs/explanation/differences.md. A batch without data behind each gives what Spark emits."""
    run, watermark, emitted = run_of(by, True, within, 1), Watermark(delay_s=2), []
    for rows in given_rows:
        found = run.batch(batch_of(ROWS, [(*row, 0) for row in rows]), watermark.times())
        emitted.append(sorted(row["k"] for row in found))
        watermark.advance(row[0] for row in rows)
        if is_spark and watermark.now_s > watermark.late_s:
            assert not run.batch(batch_of(ROWS, []), watermark.times())
            watermark.advance([])
    assert emitted == (in_spark if is_spark else here)
