"""percentile_approx against the exact percentiles, and whatever the order of merging is."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from spark_bridge import functions as S
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.computation import Output
from spark_bridge.exceptions import InvalidOperatorError

QS = [0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 1.0]


def aggregator(accuracy: float, *percentages: float) -> Aggregator:
    function = S.percentile_approx("v", list(percentages), accuracy)
    text = f"{function.name}({','.join(function.arguments)})"
    return Aggregator([Output("q", text, "v", None, pa.float64())])


def exact(values: np.ndarray, percentage: float) -> float:
    return float(np.sort(values)[math.floor(percentage * (len(values) - 1))])


@pytest.mark.parametrize("accuracy", [0.0001, 0.01, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_results_are_within_the_accuracy_in_any_order_of_merging(seed: int, accuracy: float) -> None:
    """Values of both signs and many sizes, zeros and nulls; parts merged in two orders give the same bytes."""
    rng = np.random.default_rng(seed)
    values = rng.choice([-1, 1], 3000) * np.exp(rng.normal(0, 9, 3000))
    values[rng.random(3000) < 0.05] = 0.0
    ids = rng.integers(0, 20, 3000)
    column = pa.array(values, mask=rng.random(3000) < 0.1)
    of = aggregator(accuracy, *QS)
    whole = of.partial(ids, 20, pa.record_batch({"v": column}))
    part_of = rng.integers(0, 7, 3000)
    parts = [
        of.partial(ids[part_of == p], 20, pa.record_batch({"v": column.filter(pa.array(part_of == p))}))
        for p in range(7)
    ]
    for order in (range(7), rng.permutation(7)):
        merged = parts[next(iter(order))]
        for p in list(order)[1:]:
            both = pa.concat_arrays([merged.column(0), parts[p].column(0)])
            merged = of.merge(np.tile(np.arange(20), 2), 20, pa.record_batch([both], schema=of.state_schema))
        assert merged.column(0).to_pylist() == whole.column(0).to_pylist()
    (results,) = of.results(whole)
    known = np.asarray(column.is_valid())
    for i, result in enumerate(results.to_pylist()):
        own = values[known & (ids == i)]
        for percentage, estimate in zip(QS, result, strict=True):
            truth = exact(own, percentage)
            assert abs(estimate - truth) <= accuracy * abs(truth) * (1 + 1e-9), (percentage, truth, estimate)


def test_extremes_nulls_and_special_numbers() -> None:
    """The least and greatest doubles have buckets; NaN is the greatest; no value gives null."""
    special = [5e-324, 1.7976931348623157e308, -1.7976931348623157e308, math.inf, -math.inf, math.nan]
    of = aggregator(0.01, 0.0)
    states = of.partial(np.arange(6), 8, pa.record_batch({"v": pa.array(special)}))
    results = [None if r is None else r[0] for r in of.results(states)[0].to_pylist()]
    assert results[3:5] == [math.inf, -math.inf] and math.isnan(results[5]) and results[6:] == [None, None]
    assert all(abs(results[i] - special[i]) <= 0.01 * abs(special[i]) + 5e-324 for i in range(3))


def test_wrong_arguments_are_refused() -> None:
    """The message says which numbers are right."""
    for percentage in (1.5, -0.1, [], [0.5, "x"], "0.5"):
        with pytest.raises(InvalidOperatorError, match="from 0 to 1"):
            S.percentile_approx("v", percentage)  # type: ignore[arg-type]
    with pytest.raises(InvalidOperatorError, match=r"accuracy=10000 is out of range; it is the relative error"):
        S.percentile_approx("v", 0.5, 10000)


def test_the_rank_is_exact() -> None:
    """0.29 of 100 is 29, although the product of the doubles is less."""
    of = aggregator(0.0001, 0.29, 0.57)
    states = of.partial(np.zeros(101, np.int64), 1, pa.record_batch({"v": pa.array(np.arange(101.0))}))
    (result,) = of.results(states)[0].to_pylist()
    assert [round(value) for value in result] == [29, 57]


def test_a_sketch_counts_more_values_than_a_product_of_64_bits_can_rank() -> None:
    """Of 21 billion values, three tenths are 1 and the others 100."""
    of = aggregator(0.01, 0.0, 0.29, 0.31, 0.5, 0.99, 1.0)
    one = of.partial(np.zeros(10, np.int64), 1, pa.record_batch({"v": pa.array([1.0] * 3 + [100.0] * 7)}))
    states = one
    for _ in range(31):  # twice as many values each time
        both = pa.concat_arrays([states.column(0), states.column(0)])
        states = of.merge(np.zeros(2, np.int64), 1, pa.record_batch([both], schema=of.state_schema))
    (result,) = of.results(states)[0].to_pylist()
    assert [round(value) for value in result] == [1, 1, 100, 100, 100, 100]
