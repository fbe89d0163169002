"""``join`` gives what Spark's stream-stream join gives: against a reference in plain Python, at random."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from backends import FileStateStoreProvider, RocksDBStateStoreProvider
from backends.encoding.operator_schema import evolved
from backends.exceptions import IncompatibleSchemaError
from coordinator_actor.messages import BatchTimes
from spark_bridge.operators import waiting_rows
from spark_bridge.operators.join_sides import JOIN_TYPES
from spark_bridge.stateful.testing import LocalStateAccess
from spark_bridge.task.external_sort import Limits
from tests.effort import effort, only_thorough
from tests.spark_bridge.operators.join_model import Case, JoinRun, Model, check_event_time, random_rows
from tests.spark_bridge.operators.operator_runs import Watermark

SMALL = Limits(memory=1500, step_rows=3, step_bytes=500, fan_in=2)
CASES = {how: [Case(how, *bounds) for bounds in ((0, 20), (-10, 5), (5, 5), (-30, -10))] for how in JOIN_TYPES}
CASES["key"] = [Case(how, in_key=True) for how in JOIN_TYPES]
CASES["open"] = [
    Case("inner", timed=False),
    Case("inner", 5, None),
    Case("inner", None, 5),
    Case("left", None, 5),
    Case("left_anti", None, 5),
    Case("right", 5, None),
]


def check(run: JoinRun, model: Model, seed: int, batches: int, most: int, delay: int = 10) -> None:
    """Run batches at random, and some without rows at the end; compare output, state and figures of each."""
    random = np.random.default_rng(seed)
    watermark = Watermark(delay)
    until = 0
    for i in range(batches + 4):
        until += int(random.integers(0, 15))
        keys = ["a", "b", "c", None, "long key"][: int(random.integers(1, 6))]
        left, right = (
            random_rows(random, int(random.integers(most)) if i < batches else 0, until, keys, side)
            for side in ("left", "right")
        )
        if i == batches:
            watermark.now_s = until + 200
        times = watermark.times() if model.case.timed else BatchTimes()
        order = random.permutation(len(left) + len(right)).tolist()
        cuts = random.integers(0, most, 2).tolist()
        emitted = run.batch(left, right, times, cuts, order)
        expected = model.batch(left, right, times)
        assert sorted(emitted, key=repr) == sorted(expected, key=repr), f"batch {i} of seed {seed}"
        assert run.run.figures.num_rows_dropped_by_watermark == model.late
        check_event_time(emitted, model.case.bounds.waits_ms, times.late_watermark_ms)
        check_state(run, model)
        watermark.advance(row[1] for row in (*left, *right))
        if random.random() < 0.2:
            run.run.restart()


def check_state(run: JoinRun, model: Model) -> None:
    """Nothing waits that has no match to wait for."""
    case = model.case
    stored = run.num_waiting()
    keeps = (case.how in ("left", "full", "left_anti"), case.how in ("right", "full"))
    for count, waiting, keeps_nulls in zip(stored, (model.left, model.right), keeps, strict=True):
        expected = [w for w in waiting if keeps_nulls or w.row[0] is not None]
        if case.how == "left_anti" and waiting is model.left:
            expected = [w for w in expected if not w.matched]
        assert count == len(expected)


# Rows of the inner join are among those of the full one; the hows of the right side are its mirror.
USUAL = ("full", "left_semi", "left_anti", "open")


@pytest.mark.parametrize("cases", [name if name in USUAL else only_thorough(name) for name in CASES])
def test_rows_are_those_of_the_reference(cases: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng()
    for _ in range(effort(1, 100)):
        case = CASES[cases][int(random.integers(len(CASES[cases])))]
        seed = int(random.integers(1 << 30))
        monkeypatch.setattr(waiting_rows, "WAITING_CHUNK_ROWS", int(random.choice([1, 2, 5, 64])))
        rocks = random.random() < 0.2
        run = JoinRun(
            case,
            int(random.choice([1, 3])),
            RocksDBStateStoreProvider if rocks else FileStateStoreProvider,
            SMALL if random.random() < 0.3 else None,
        )
        try:
            check(run, Model(case), seed, batches=effort(6, 8), most=int(random.choice(effort([4, 12], [4, 12, 40]))))
        finally:
            run.run.close()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Case("left", 0, 20), "how cannot change from 'inner' to 'left'"),
        (Case("inner", 0, 21), "within cannot change from 'rt - lt from 0 to 20000000 us'"),
        (Case("inner", timed=False), "within cannot change from .* to 'no bounds'"),
    ],
    ids=["how", "within", "no bounds"],
)
def test_a_restart_as_another_join_is_refused(other: Case, words: str) -> None:
    stored = Case("inner", 0, 20).logic().schema
    assert evolved(stored, Case("inner", 0, 20).logic().schema) == stored
    with pytest.raises(IncompatibleSchemaError, match=words):
        evolved(stored, other.logic().schema)


def test_key_of_many_rows_is_not_rewritten_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row more reads and writes the last rows of its key only, unless a row of the other side asks for all."""
    run = JoinRun(Case("left", 0, 100_000))
    times = BatchTimes()
    for n in range(5):
        run.batch([("a", 1000 + n, i) for i in range(1000)], [], times)
    read: list[int] = []
    get_many = LocalStateAccess.get_many

    def counted(store: LocalStateAccess, keys: pa.BinaryArray, column_family: str = "default") -> pa.BinaryArray:
        values = get_many(store, keys, column_family)
        read.append(values.nbytes)
        return values

    monkeypatch.setattr(LocalStateAccess, "get_many", counted)
    assert run.batch([("a", 2000, 1)], [], times) == []
    assert sum(read) < 32 << 10
    assert len(run.batch([], [("a", 2000, "x")], times)) == 5001
    assert sum(read) > 5000 * 8


def test_gaps_in_chunk_numbers_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one row waits, others come and go. Chunks are renumbered, so gaps in the numbers do not accumulate."""
    monkeypatch.setattr(waiting_rows, "WAITING_CHUNK_ROWS", 1)
    run = JoinRun(Case("left", 0, 5))
    run.batch([("a", 10_000, 0), ("a", 10_000, 1)], [], BatchTimes())
    for n in range(1, 20):
        now, late = n * 10_000, (n - 1) * 10_000
        run.batch([("a", n * 10 + 1, i) for i in range(2)], [("a", n * 10 + 9, "x")], BatchTimes(0, now, late))
    schema = run.run.schema.families["left"]
    ((_, values),) = run.pairs("left")
    assert schema.decode_values(values).column("chunks").to_pylist()[0] < 15
    assert run.num_waiting()[0] == 4
