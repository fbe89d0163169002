"""Aggregates on Arrow columns against a plain Python computation, and independence of how rows are split."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_bridge.aggregates.aggregator import Aggregator, result_fields, results
from spark_bridge.aggregates.computation import Output
from spark_bridge.exceptions import SparkBridgeError
from tests.effort import examples
from tests.spark_bridge.aggregates.aggregation_runs import run, split

TS = pa.timestamp("us", "UTC")
EPOCH = datetime(2024, 1, 1, tzinfo=timezone.utc)
MONEY = pa.decimal128(12, 2)
PAIR = pa.struct([("a", pa.int32()), ("b", pa.string())])
ROWS = pa.schema(
    [
        ("key", pa.int64()),
        ("i", pa.int32()),
        ("x", pa.float64()),
        ("s", pa.string()),
        ("ts", TS),
        ("flag", pa.bool_()),
        ("m", MONEY),
        ("pair", PAIR),
    ]
)
OUTPUTS = [
    Output("rows", "count", None, None, None),
    Output("some.x", "count", "x", None, pa.null()),
    Output("true", "count_if", "flag", None, pa.bool_()),
    Output("total", "sum", "i", None, pa.int32()),
    Output("sum.x", "sum", "x", None, pa.float64()),
    Output("sum.m", "sum", "m", None, MONEY),
    Output("mean", "mean", "i", None, pa.int32()),
    Output("mean.m", "mean(12,2)", "m", None, MONEY),
    Output("low", "min", "x", None, pa.float64()),
    Output("high", "max", "x", None, pa.float64()),
    Output("word", "max", "s", None, pa.string()),
    Output("least flag", "min", "flag", None, pa.bool_()),
    Output("least pair", "min", "pair", None, PAIR),
    Output("cheapest", "min", "m", None, MONEY),
    Output("when", "max", "ts", None, TS),
    Output("first", "first", "s", "ts", pa.string(), TS),
    Output("last", "last", "s", "ts", pa.string(), TS),
    Output("last pair", "last", "pair", "x", PAIR, pa.float64()),
    Output("first i", "first", "i", "s", pa.int32(), pa.string()),
]
AGGREGATOR = Aggregator(OUTPUTS)

row = st.fixed_dictionaries(
    {
        "key": st.integers(-2, 2),
        "i": st.none() | st.integers(-(2**31), 2**31 - 1),
        "x": st.none() | st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf, -math.inf]) | st.floats(-1e6, 1e6),
        "s": st.none() | st.text(max_size=3),
        "ts": st.none() | st.integers(0, 3).map(lambda n: EPOCH + timedelta(seconds=n)),
        "flag": st.none() | st.booleans(),
        "m": st.none() | st.integers(-(10**12) + 1, 10**12 - 1).map(lambda n: Decimal(n).scaleb(-2)),
        "pair": st.none()
        | st.fixed_dictionaries({"a": st.none() | st.integers(0, 2), "b": st.none() | st.sampled_from(["", "a", "é"])}),
    }
)


def order(value: Any) -> Any:
    """A sort key in Spark's order: nulls first, NaN last, strings by their bytes, structs by their fields."""
    if value is None:
        return (0,)
    if isinstance(value, float):
        return (1, math.isnan(value), 0.0 if math.isnan(value) else value)
    if isinstance(value, str):
        return (1, value.encode())
    if isinstance(value, dict):
        return (1, order(value["a"]), order(value["b"]))
    return (1, value)


def expected_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def some(column: str) -> list[Any]:
        return [r[column] for r in rows if r[column] is not None]

    def extreme(column: str, choose: Callable[..., Any]) -> Any:
        return choose(some(column), key=order, default=None)

    def picked(column: str, by: str, choose: Callable[..., Any]) -> Any:
        ordered = [r for r in rows if r[by] is not None]
        if not ordered:
            return None
        best = choose(order(r[by]) for r in ordered)
        return max((r[column] for r in ordered if order(r[by]) == best), key=order)

    def total(column: str) -> Any:
        return sum(some(column)[1:], some(column)[0]) if some(column) else None

    with localcontext() as context, np.errstate(invalid="ignore"):
        context.prec = 60
        cents = total("m")
        mean = None if cents is None else (cents / len(some("m"))).quantize(Decimal("0.000001"), ROUND_HALF_UP)
        return {
            "rows": len(rows),
            "some.x": len(some("x")),
            "true": some("flag").count(True),
            "total": total("i"),
            "sum.x": total("x"),
            "sum.m": cents,
            "mean": total("i") / len(some("i")) if some("i") else None,
            "mean.m": mean,
            "low": extreme("x", min),
            "high": extreme("x", max),
            "word": extreme("s", max),
            "least flag": extreme("flag", min),
            "least pair": extreme("pair", min),
            "cheapest": extreme("m", min),
            "when": extreme("ts", max),
            "first": picked("s", "ts", min),
            "last": picked("s", "ts", max),
            "last pair": picked("pair", "x", max),
            "first i": picked("i", "s", min),
        }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-6) or a == b
    return bool(a == b)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(row, min_size=1, max_size=30), st.lists(st.integers(0, 30), max_size=3), st.booleans())
def test_aggregates_equal_a_plain_computation_however_rows_are_split(
    rows: list[dict[str, Any]], cuts: list[int], by_pairs: bool
) -> None:
    batches = [pa.RecordBatch.from_pylist(part, schema=ROWS) for part in split(rows, cuts)]
    answer = run(AGGREGATOR, batches, by_pairs=by_pairs)
    assert sorted(answer) == sorted({r["key"] for r in rows})
    for key, got in answer.items():
        expected = expected_of([r for r in rows if r["key"] == key])
        assert {k: (v, expected[k]) for k, v in got.items() if not same(v, expected[k])} == {}


def test_result_names_and_types_come_from_the_state_schema_alone() -> None:
    fields = result_fields(AGGREGATOR.state_schema)
    assert [f.name for f in fields] == [o.name for o in AGGREGATOR.outputs]
    assert [str(f.type) for f in fields[:9]] == [
        *("int64", "int64", "int64", "int64", "double", "decimal128(22, 2)"),
        *("double", "decimal128(16, 6)", "double"),
    ]
    assert result_fields(AGGREGATOR.state_schema) == AGGREGATOR.result_fields


def test_states_that_a_released_version_has_written_are_read_by_the_same_names() -> None:
    assert AGGREGATOR.state_schema.names[:4] == [
        *("rows.count.count", "some.x.count.count", "true.count_if.count", "total.sum.sum"),
    ]
    mean = Aggregator([Output("mean", "mean", "m", None, MONEY)])
    assert [str(f.type) for f in mean.state_schema] == ["double", "int64"]
    rows = pa.record_batch({"m": pa.array([Decimal("1.00"), Decimal("2.00")], MONEY)})
    assert results(mean.partial(pa.array([0, 0], pa.int32()), 1, rows))[0].to_pylist() == [1.5]


def test_a_key_without_state_gives_nulls() -> None:
    missing = pa.RecordBatch.from_arrays(
        [pa.nulls(1, f.type) for f in AGGREGATOR.state_schema], AGGREGATOR.state_schema.names
    )
    assert [column.to_pylist() for column in results(missing)] == [[None]] * len(OUTPUTS)


def long_sum(values: list[int], groups: list[int]) -> list[int]:
    total = Aggregator([Output("total", "sum", "v", None, pa.int64())])
    states = total.partial(
        pa.array(groups, pa.int32()), max(groups) + 1, pa.record_batch({"v": pa.array(values, pa.int64())})
    )
    return results(states)[0].to_pylist()  # type: ignore[no-any-return]


def test_a_sum_beyond_64_bits_is_an_error_and_one_that_just_fits_is_not() -> None:
    assert long_sum([2**62, 2**62 - 1, -5], [0, 0, 1]) == [2**63 - 1, -5]
    assert long_sum([-(2**63), 2**63 - 1, 2**62, -(2**62)], [0, 0, 0, 0]) == [-1]
    for too_much in ([2**62, 2**62], [-(2**63), -1], [2**63 - 1] * 5):
        with pytest.raises(SparkBridgeError, match="'total' has left the range"):
            long_sum(too_much, [0] * len(too_much))


def test_a_sum_that_leaves_64_bits_only_with_the_stored_one_is_an_error_too() -> None:
    total = Aggregator([Output("total", "sum", "v", None, pa.int64())])

    def batch(value: int) -> pa.RecordBatch:
        return pa.record_batch({"key": pa.array([1], pa.int64()), "v": pa.array([value], pa.int64())})

    for by_pairs in (True, False):
        assert run(total, [batch(2**62), batch(2**62 - 1)], by_pairs=by_pairs) == {1: {"total": 2**63 - 1}}
        for value in (2**62, -(2**62) - 1):
            with pytest.raises(SparkBridgeError, match="'total' has left the range of int64"):
                run(total, [batch(value), batch(value)], by_pairs=by_pairs)


def test_decimal_sums_keep_ten_more_digits_and_overflow_is_an_error() -> None:
    kind = pa.decimal128(38, 2)
    total = Aggregator([Output("total", "sum", "v", None, kind), Output("mean", "mean(38,2)", "v", None, kind)])
    assert total.state_schema.field(0).type == kind
    assert [f.type for f in total.result_fields] == [kind, pa.decimal128(38, 6)]

    def batch(*values: str | None) -> pa.RecordBatch:
        numbers = [None if v is None else Decimal(v) for v in values]
        return pa.record_batch({"key": pa.array([0] * len(values), pa.int64()), "v": pa.array(numbers, kind)})

    for by_pairs in (True, False):
        answer = run(total, [batch("1.25", None), batch("2.50")], by_pairs=by_pairs)
        assert answer == {0: {"total": Decimal("3.75"), "mean": Decimal("1.875000")}}
        big = "9" * 36
        for batches in ([batch(big, big)], [batch(big), batch(big)]):
            with pytest.raises(SparkBridgeError, match="'total' has left the range"):
                run(total, batches, by_pairs=by_pairs)


def test_a_mean_of_decimals_that_its_type_cannot_hold_is_null_and_its_sum_an_error() -> None:
    kind = pa.decimal128(38, 2)
    mean = Aggregator([Output("m", "mean(38,2)", "v", None, kind)])

    def batch(rows: list[tuple[int, str]]) -> pa.RecordBatch:
        keys, values = zip(*rows, strict=True)
        return pa.record_batch({"key": pa.array(keys, pa.int64()), "v": pa.array(map(Decimal, values), kind)})

    widest, fitting = "9" * 36, "9" * 32 + ".99"
    rows = [(0, widest), (1, fitting), (2, f"-{widest}"), (3, f"1{'0' * 32}"), (4, f"-{fitting}"), (5, "1.25")]
    for by_pairs in (True, False):
        found = {key: row["m"] for key, row in run(mean, [batch(rows)], by_pairs=by_pairs).items()}
        assert found == {
            0: None,
            1: Decimal(fitting + "0000"),
            2: None,
            3: None,
            4: Decimal(f"-{fitting}0000"),
            5: Decimal("1.250000"),
        }
        # The state has not lost anything: with another value the mean fits.
        again = run(mean, [batch(rows), batch([(0, f"-{widest}"), (3, "0")])], by_pairs=by_pairs)
        assert (again[0]["m"], again[3]["m"]) == (Decimal("0.000000"), Decimal(f"5{'0' * 31}.000000"))
        with pytest.raises(SparkBridgeError, match=r"sum behind the mean of output 'm'.*decimal128\(38, 2\)"):
            run(mean, [batch([(0, widest)]), batch([(0, widest)])], by_pairs=by_pairs)


def test_means_of_decimals_are_rounded_half_up() -> None:
    mean = Aggregator([Output("mean", "mean(12,2)", "v", None, MONEY)])
    for cents, expected in ((1, "0.000313"), (-1, "-0.000313"), (3, "0.000938"), (64, "0.020000")):
        values = pa.array([Decimal(cents).scaleb(-2), *[Decimal(0)] * 31], MONEY)
        states = mean.partial([0] * 32, 1, pa.record_batch({"v": values}))
        assert results(states)[0].to_pylist() == [Decimal(expected)]


def test_of_rows_with_the_same_time_the_greatest_value_wins_in_any_batch() -> None:
    def batch(value: str | None) -> pa.RecordBatch:
        rows = {"key": 0, "s": value, "ts": EPOCH}
        return pa.RecordBatch.from_pylist([rows], schema=pa.schema([ROWS.field(c) for c in rows]))

    ends = Aggregator([Output(f, f, "s", "ts", pa.string(), TS) for f in ("first", "last")])
    for values in (["a", "b"], ["b", "a"], [None, "b"], ["b", None], ["b", "b"]):
        for by_pairs in (True, False):
            found = run(ends, [batch(v) for v in values], by_pairs=by_pairs)
            assert found == {0: {"first": "b", "last": "b"}}


def test_negative_zero_and_nan_order_as_in_spark() -> None:
    ends = Aggregator([Output("lo", "min", "v", None, pa.float32()), Output("hi", "max", "v", None, pa.float32())])
    values = pa.array(
        [np.float32(np.nan), np.float32(-0.0), np.float32(-np.inf), None], pa.float32(), from_pandas=False
    )
    low, high = results(ends.partial(pa.array([0, 0, 0, 0], pa.int32()), 1, pa.record_batch({"v": values})))
    assert low[0].as_py() == -math.inf
    assert math.isnan(high[0].as_py())
    assert low.type == high.type == pa.float32()


@pytest.mark.parametrize("kind", [pa.int64(), pa.decimal128(38, 0)])
def test_the_least_and_greatest_numbers_of_a_type_are_in_order_too(kind: pa.DataType) -> None:
    ends = Aggregator([Output("lo", "min", "v", None, kind), Output("hi", "max", "v", None, kind)])
    for low, high in ((-(2**63), 2**63 - 1), (-(2**63), 0), (-1, 2**63 - 1)):
        values = pa.array([Decimal(v) if kind != pa.int64() else v for v in (low, 7, high, -1)], kind)
        states = ends.partial([0, 0, 0, 0], 1, pa.record_batch({"v": values}))
        assert [int(c[0].as_py()) for c in results(states)] == [low, max(high, 7)]


def test_decimals_beyond_64_bits_are_in_order() -> None:
    kind = pa.decimal128(38, 0)
    numbers = [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**37, -(10**37), -(2**63), -(2**63) - 1, -(2**64)]
    listed = Aggregator([Output("v", "collect_list(100)", "v", None, kind)])
    rows = pa.record_batch({"v": pa.array(list(map(Decimal, numbers)), kind)})
    assert results(listed.partial([0] * len(numbers), 1, rows))[0].to_pylist() == [sorted(numbers)]


def test_every_nan_is_the_same() -> None:
    odd = np.array([0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000003], np.uint64).view(np.float64)
    outputs = [Output("set", "collect_set(9)", "v", None, pa.float64()), Output("hi", "max", "v", None, pa.float64())]
    sets = Aggregator([*outputs, Output("lo", "min", "v", None, pa.float64())])
    rows = pa.record_batch({"v": pa.array(np.append(odd, 1.0))})
    found, high, low = results(sets.partial([0, 0, 0, 0], 1, rows))
    assert repr(found.to_pylist()) == "[[1.0, nan]]"
    assert math.isnan(high[0].as_py())
    assert low.to_pylist() == [1.0]


def test_columns_come_as_spark_sends_them_too() -> None:
    kind = pa.timestamp("us", "Europe/Berlin")
    latest = Aggregator([Output("ts", "max", "ts", None, TS), Output("s", "max", "s", None, pa.string())])
    rows = pa.record_batch(
        {"ts": pa.array([EPOCH, None], kind), "s": pa.array(["b", "a"]).dictionary_encode(), "other": [1, 2]}
    ).slice(0, 2)
    states = latest.partial(np.array([0, 0]), 1, rows)
    assert [c.to_pylist() for c in latest.results(states)] == [[EPOCH], ["b"]]
