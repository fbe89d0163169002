"""Variances and standard deviations against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.computation import Output
from tests.effort import examples
from tests.spark_bridge.aggregates.aggregation_runs import run, split

FUNCTIONS = ("var_pop", "var_samp", "stddev_pop", "stddev_samp")
AGGREGATOR = Aggregator([Output(f, f, "v", None, pa.float64()) for f in FUNCTIONS])


def batch_of(rows: list[tuple[int, float | None]]) -> pa.RecordBatch:
    keys, values = zip(*rows, strict=True)
    return pa.record_batch({"key": pa.array(keys, pa.int64()), "v": pa.array(values, pa.float64(), from_pandas=False)})


def expected_of(values: list[float]) -> dict[str, Any]:
    exact = [Fraction(v) for v in values]
    mean = sum(exact) / len(exact) if exact else Fraction(0)
    squares = sum((v - mean) ** 2 for v in exact)
    population = float(squares / len(exact)) if exact else None
    sample = float(squares / (len(exact) - 1)) if len(exact) > 1 else None
    return {
        "var_pop": population,
        "var_samp": sample,
        "stddev_pop": None if population is None else math.sqrt(population),
        "stddev_samp": None if sample is None else math.sqrt(sample),
    }


# Values far from zero and close to each other, where sums of squares would lose everything.
near_a_billion = st.integers(-1000, 1000).map(lambda n: 1e9 + n / 8)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.none() | near_a_billion | st.floats(-1e3, 1e3)), min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=3),
    st.booleans(),
)
def test_variances_equal_exact_ones_however_rows_are_split(
    rows: list[tuple[int, float | None]], cuts: list[int], by_pairs: bool
) -> None:
    answer = run(AGGREGATOR, [batch_of(part) for part in split(rows, cuts)], by_pairs=by_pairs)
    for key, got in answer.items():
        expected = expected_of([v for k, v in rows if k == key and v is not None])
        for name, value in got.items():
            if expected[name] is None:
                assert value is None
            else:
                assert value == pytest.approx(expected[name], rel=1e-9, abs=1e-300), name


@pytest.mark.parametrize("by_pairs", [True, False])
def test_equal_values_have_no_variance_however_large(by_pairs: bool) -> None:
    rows: list[tuple[int, float | None]] = [(0, 1e308)] * 5
    assert run(AGGREGATOR, [batch_of(rows), batch_of(rows[:2])], by_pairs=by_pairs)[0] == dict.fromkeys(FUNCTIONS, 0.0)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("by_pairs", [True, False])
def test_non_finite_values_give_nan(odd: float, by_pairs: bool) -> None:
    for batches in ([[(0, 1.0), (0, odd)]], [[(0, odd)], [(0, 1.0)]], [[(0, None)], [(0, odd)], [(0, odd)]]):
        answer = run(AGGREGATOR, [batch_of(b) for b in batches], by_pairs=by_pairs)[0]
        assert all(np.isnan(v) for v in answer.values())
