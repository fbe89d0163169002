"""Aggregates on Arrow columns against a plain Python computation, and independence of how rows are split."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_bridge.aggregation import Aggregator, Output, result_fields, results
from spark_bridge.exceptions import SparkBridgeError

TS = pa.timestamp("us", "UTC")
ROWS = pa.schema([("i", pa.int32()), ("x", pa.float64()), ("s", pa.string()), ("ts", TS)])
AGGREGATOR = Aggregator(
    [
        Output("rows", "count", None, None, None),
        Output("some.x", "count", "x", None, pa.null()),
        Output("total", "sum", "i", None, pa.int32()),
        Output("mean", "mean", "i", None, pa.int32()),
        Output("low", "min", "x", None, pa.float64()),
        Output("high", "max", "x", None, pa.float64()),
        Output("word", "max", "s", None, pa.string()),
        Output("first", "first", "s", "ts", pa.string(), TS),
        Output("last", "last", "s", "ts", pa.string(), TS),
    ]
)

rows_strategy = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.none() | st.integers(-(2**31), 2**31 - 1),
        st.none() | st.floats(allow_infinity=True, allow_nan=True, width=32),
        st.none() | st.text(max_size=3),
        st.none() | st.integers(0, 3),
    ),
    min_size=1,
    max_size=40,
)


def states_of(rows: list[tuple[Any, ...]], ids: dict[int, int]) -> pa.RecordBatch:
    batch = pa.RecordBatch.from_arrays(
        [pa.array([r[i + 1] for r in rows], type=f.type) for i, f in enumerate(ROWS)], schema=ROWS
    )
    return AGGREGATOR.partial(pa.array([ids[r[0]] for r in rows], pa.int32()), len(ids), batch)


def expected_of(rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    def spark_order(x: float) -> tuple[bool, float]:
        return (math.isnan(x), 0.0 if math.isnan(x) else x)

    def by_time(last: bool) -> Any:
        timed = [(r[4], r[3] is not None, r[3] or "") for r in rows if r[4] is not None]
        if not timed:
            return None
        time = (max if last else min)(t for t, _, _ in timed)
        _, some, value = max(t for t in timed if t[0] == time)
        return value if some else None

    ints = [r[1] for r in rows if r[1] is not None]
    floats = [r[2] for r in rows if r[2] is not None]
    words = [r[3] for r in rows if r[3] is not None]
    return {
        "rows": len(rows),
        "some.x": len(floats),
        "total": sum(ints) if ints else None,
        "mean": sum(ints) / len(ints) if ints else None,
        "low": min(floats, key=spark_order) if floats else None,
        "high": max(floats, key=spark_order) if floats else None,
        "word": max(words, key=lambda w: w.encode()) if words else None,
        "first": by_time(last=False),
        "last": by_time(last=True),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-9) or a == b
    return bool(a == b)


@settings(max_examples=150, deadline=None)
@given(rows_strategy, st.integers(0, 40))
def test_aggregates_equal_a_plain_computation_however_rows_are_split(rows: list[tuple[Any, ...]], cut: int) -> None:
    groups = sorted({r[0] for r in rows})
    parts = []
    labels: list[int] = []
    for part in (rows[:cut], rows[cut:]):
        if part:
            ids = {g: i for i, g in enumerate(dict.fromkeys(r[0] for r in part))}
            parts.append(states_of(part, ids))
            labels += [groups.index(g) for g in ids]
    both = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
    merged = AGGREGATOR.merge(pa.array(labels, pa.int32()), len(groups), both)
    answer = pa.RecordBatch.from_arrays(results(merged), schema=pa.schema(result_fields(merged.schema))).to_pylist()
    for group, got in zip(groups, answer, strict=True):
        expected = expected_of([r for r in rows if r[0] == group])
        assert {k: v for k, v in got.items() if not same(v, expected[k])} == {}, expected


def test_result_names_and_types_come_from_the_state_schema_alone() -> None:
    fields = result_fields(AGGREGATOR.state_schema)
    assert [f.name for f in fields] == [o.name for o in AGGREGATOR.outputs]
    assert [str(f.type) for f in fields[:6]] == ["int64", "int64", "int64", "double", "double", "double"]


def test_a_sum_beyond_64_bits_is_an_error_and_one_that_just_fits_is_not() -> None:
    total = Aggregator([Output("total", "sum", "v", None, pa.int64())])
    big = pa.record_batch({"v": pa.array([2**62, 2**62 - 1, -5], pa.int64())})
    assert results(total.partial(pa.array([0, 0, 1], pa.int32()), 2, big))[0].to_pylist() == [2**63 - 1, -5]
    with pytest.raises(SparkBridgeError, match="'total' has left the range"):
        total.partial(
            pa.array([0, 0, 0], pa.int32()),
            1,
            pa.record_batch({"v": pa.array([2**62, 2**62, 1], pa.int64())}),
        )


def test_decimal_sums_keep_ten_more_digits_and_overflow_is_an_error() -> None:
    kind = pa.decimal128(30, 2)
    total = Aggregator([Output("total", "sum", "v", None, kind)])
    assert total.state_schema.field(0).type == pa.decimal128(38, 2)
    rows = pa.record_batch({"v": pa.array(["1.25", None, "2.50"]).cast(kind)})
    assert str(results(total.partial(pa.array([0, 0, 0], pa.int32()), 1, rows))[0][0]) == "3.75"


def test_negative_zero_and_nan_order_as_in_spark() -> None:
    ends = Aggregator([Output("lo", "min", "v", None, pa.float32()), Output("hi", "max", "v", None, pa.float32())])
    values = pa.array(
        [np.float32(np.nan), np.float32(-0.0), np.float32(-np.inf), None], pa.float32(), from_pandas=False
    )
    low, high = results(ends.partial(pa.array([0, 0, 0, 0], pa.int32()), 1, pa.record_batch({"v": values})))
    assert low[0].as_py() == -math.inf
    assert math.isnan(high[0].as_py())
    assert low.type == high.type == pa.float32()
