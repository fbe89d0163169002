"""The task of a processor that gets the state of all keys in columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from coordinator_actor.messages import BatchTimes
from spark_bridge.exceptions import StateDeclarationError, StatefulProcessorError
from spark_bridge.stateful.stateful_processor import (
    ArrowBatch,
    ArrowResult,
    ArrowStatefulProcessor,
    ArrowStatefulProcessorHandle,
    arrow_processor,
)
from spark_bridge.task.external_sort import Limits
from tests.spark_bridge.stateful.task_runs import NO_TIME, ROWS, ArrowTotals, in_arrow, in_order, rows, stored


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
    # State of untouched keys is removed as well, in some batch.
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
        (5, ["returned a int", "ArrowResult"]),
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
def test_in_columns_values_that_do_not_fit_are_an_error(answer: Any, words: list[str]) -> None:
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
