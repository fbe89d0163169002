"""``join_asof`` gives what pandas' ``merge_asof`` gives over all rows that are not late, whenever they come."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from backends import FileStateStoreProvider, RocksDBStateStoreProvider
from backends.providers.standalone_provider import LocalStateStoreProvider
from coordinator_actor.messages import BatchTimes
from spark_bridge.operators import waiting_rows
from spark_bridge.operators.asof_join import DIRECTIONS, Asof, asof_logic
from spark_bridge.operators.join_sides import Bounds
from spark_bridge.task.state_task import EventTime
from tests.effort import effort
from tests.spark_bridge.operators.join_model import (
    COLUMNS,
    KEY,
    Case,
    JoinRun,
    Pair,
    Row,
    check_event_time,
    random_rows,
)
from tests.spark_bridge.operators.operator_runs import SECOND, OperatorRun, Watermark


class AsofRun(JoinRun):
    """A join by nearest time on real providers."""

    def __init__(
        self, asof: Asof, partitions: int = 1, provider: type[LocalStateStoreProvider] = FileStateStoreProvider
    ) -> None:
        self.case = Case("left")
        left, right = EventTime("lt"), EventTime("rt")
        output = pa.schema([KEY, *COLUMNS[0], *COLUMNS[1]])
        self.logic = asof_logic(pa.schema([KEY]), COLUMNS, Bounds(left, right, left, right), output, asof)
        self.run = OperatorRun(self.logic, self.logic.schema, ["k"], partitions, provider)


def expected(asof: Asof, left: list[Row], right: list[Row]) -> list[Pair]:
    """What pandas makes of all rows; of right rows with one time and key, the order is that of their values."""
    frames = [
        pd.DataFrame(
            {"k": [r[0] for r in rows], "t": [r[1] for r in rows], "row": range(len(rows)), "v": [r[2] for r in rows]}
        ).sort_values(["t", "v"], kind="stable")
        for rows in ([r for r in left if usable(r)], [r for r in right if usable(r)])
    ]
    lefts = [r for r in left if usable(r)]
    rights = [r for r in right if usable(r)]
    pairs: list[Pair] = [(r, None) for r in left if not usable(r)]
    if not len(frames[1]) or not len(frames[0]):
        return pairs + [(r, None) for r in lefts]
    merged = pd.merge_asof(
        frames[0].astype({"t": "int64"}),
        frames[1].astype({"t": "int64"}),
        on="t",
        by="k",
        direction=asof.direction,
        allow_exact_matches=asof.allow_exact,
        tolerance=None if asof.tolerance_us is None else asof.tolerance_us // SECOND,
    )
    for at, other in zip(merged["row_x"], merged["row_y"], strict=True):
        pairs.append((lefts[at], None if pd.isna(other) else rights[int(other)]))
    return pairs


def usable(row: Row) -> bool:
    """Whether a row can match at all."""
    return row[0] is not None and row[1] is not None


def check(run: AsofRun, asof: Asof, seed: int, batches: int, most: int) -> None:
    random = np.random.default_rng(seed)
    watermark = Watermark(10)
    until = 0
    all_left: list[Row] = []
    all_right: list[Row] = []
    found: list[Pair] = []
    for _ in range(batches):
        until += int(random.integers(0, 15))
        keys = ["a", "b", "c", None][: int(random.integers(1, 5))]
        left = random_rows(random, int(random.integers(most)), until, keys, "left")
        right = random_rows(random, int(random.integers(most)), until, keys, "right")
        times = watermark.times()
        emitted = run.batch(left, right, times, random.integers(0, most, 2).tolist())
        check_event_time(emitted, asof.waits_ms, times.late_watermark_ms)
        found += emitted
        for rows, every in ((left, all_left), (right, all_right)):
            every += [r for r in rows if r[1] is None or r[1] * 1000 > times.late_watermark_ms]
        watermark.advance(row[1] for row in (*left, *right))
        if random.random() < 0.2:
            run.run.restart()
    # A row of each key far ahead, so that nothing has to wait for a row behind it.
    last = [(k, until + 300, "~") for k in ("a", "b", "c")]
    watermark.advance([])
    found += run.batch([], last, watermark.times())
    for _ in range(3):
        watermark.advance([until + 600])
        found += run.batch([], [], watermark.times())
    wanted = expected(asof, all_left, [*all_right, *last])
    assert sorted(found, key=repr) == sorted(wanted, key=repr), f"seed {seed}"
    left_waits, right_waits = run.num_waiting()
    assert left_waits == 0
    assert right_waits <= (0 if asof.direction == "forward" or asof.tolerance_us is not None else 3)
    assert run.num_entries("left") == 0 or asof.direction != "backward"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_are_those_of_pandas(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng()
    for _ in range(effort(1, 100)):
        tolerance = [None, 0, 3, 12][int(random.integers(4))]
        asof = Asof(direction, None if tolerance is None else tolerance * SECOND, bool(random.random() < 0.7))
        monkeypatch.setattr(waiting_rows, "WAITING_CHUNK_ROWS", int(random.choice([1, 3, 64])))
        rocks = random.random() < 0.2
        run = AsofRun(asof, int(random.choice([1, 3])), RocksDBStateStoreProvider if rocks else FileStateStoreProvider)
        try:
            check(run, asof, int(random.integers(1 << 30)), effort(6, 8), int(random.choice([3, 10, effort(10, 30)])))
        finally:
            run.run.close()


def at(watermark_s: int, late_s: int | None = None) -> BatchTimes:
    return BatchTimes(0, watermark_s * 1000, (watermark_s if late_s is None else late_s) * 1000)


def test_a_row_that_the_watermark_has_passed_already_comes_in_its_own_batch() -> None:
    """No later batch may raise the watermark."""
    run = AsofRun(Asof())
    row = ("a", 12, 1)
    assert run.batch([row], [("a", 11, "x")], at(20, late_s=10)) == [(row, ("a", 11, "x"))]


def test_earlier_of_two_equally_near_rows_is_taken() -> None:
    run = AsofRun(Asof("nearest"))
    row = ("a", 12, 1)
    assert run.batch([row], [("a", 14, "behind"), ("a", 10, "before")], at(0)) == []
    assert run.batch([], [], at(14, late_s=0)) == [(row, ("a", 10, "before"))]


def test_the_row_before_one_of_the_same_time_is_kept_for_a_row_that_may_not_take_that() -> None:
    run = AsofRun(Asof("nearest", allow_exact=False))
    row = ("a", 12, 1)
    assert run.batch([row], [("a", 8, "before"), ("a", 12, "same")], at(0)) == []
    assert run.batch([], [], at(13, late_s=0)) == [], "a row up to 16 would be nearer, or as near"
    assert run.batch([], [], at(16, late_s=13)) == [(row, ("a", 8, "before"))]


def test_unmatched_left_row_waits_for_the_first_row_after_it() -> None:
    for tolerance, comes in ((None, []), (5 * SECOND, [(("a", 12, 1), None)])):
        run = AsofRun(Asof("forward", tolerance))
        assert run.batch([("a", 12, 1)], [], at(0)) == []
        assert run.batch([], [], at(30, late_s=0)) == comes
        found = run.batch([], [("a", 40, "x")], at(30))
        found += run.batch([], [], at(41, late_s=30))
        assert found == ([] if comes else [(("a", 12, 1), ("a", 40, "x"))])
        assert run.num_waiting() == (0, 0)
