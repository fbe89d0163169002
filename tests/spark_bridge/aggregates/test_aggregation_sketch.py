"""approx_count_distinct against registers in a dict, and against the truth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding.key_groups import spark_xxhash64
from spark_bridge.aggregates.aggregator import Aggregator, results
from spark_bridge.aggregates.computation import Output
from spark_bridge.aggregates.lists_and_sketches import LINEAR_COUNTING_UP_TO, precision_of
from tests.effort import examples, only_thorough
from tests.spark_bridge.aggregates.aggregation_runs import run, split


def counter(precision: int, kind: pa.DataType) -> Aggregator:
    return Aggregator([Output("d", f"approx_count_distinct({precision})", "v", None, kind)])


def registers_of(values: pa.Array, precision: int) -> dict[int, int]:
    """The registers by their definition, from binary digits."""
    registers: dict[int, int] = {}
    for number in spark_xxhash64(pa.record_batch({"v": values})).tolist():
        digits = format(number % 2**64, "064b")
        index, rest = int(digits[:precision], 2), digits[precision:] + "1"
        registers[index] = max(registers.get(index, 0), rest.index("1") + 1)
    return registers


def linear_count(registers: dict[int, int], precision: int) -> int:
    return round(2**precision * math.log(2**precision / (2**precision - len(registers))))


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.none() | st.text("ab", max_size=4)), min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=3),
    st.booleans(),
    st.sampled_from([4, 5, 9, 14]),
)
def test_small_counts_equal_those_of_registers_in_a_dict(
    rows: list[tuple[int, str | None]], cuts: list[int], by_pairs: bool, precision: int
) -> None:
    batches = [
        pa.record_batch({"key": pa.array([r[0] for r in part], pa.int64()), "v": pa.array([r[1] for r in part], "str")})
        for part in split(rows, cuts)
    ]
    for key, got in run(counter(precision, pa.string()), batches, by_pairs=by_pairs).items():
        values = pa.array([v for k, v in rows if k == key and v is not None], "str")
        registers = registers_of(values, precision)
        if linear_count(registers, precision) <= LINEAR_COUNTING_UP_TO[precision - 4]:
            assert got["d"] == linear_count(registers, precision)


@pytest.mark.parametrize("by_pairs", [True, False])
def test_registers_are_the_greatest_of_all_parts_in_sparse_and_dense_form(by_pairs: bool) -> None:
    rng = np.random.default_rng(5)
    distinct = counter(5, pa.int64())
    for sizes in ([2, 40, 3], [40, 40], [1, 1, 1], [200]):
        parts = [rng.integers(0, 10**6, n) for n in sizes]
        batches = [pa.record_batch({"key": pa.array([0] * len(p), pa.int64()), "v": pa.array(p)}) for p in parts]
        once = pa.concat_arrays([b.column(1) for b in batches])
        states = distinct.partial(np.zeros(len(once), np.int64), 1, pa.record_batch({"v": once}))
        stored = states.column(0)[0].as_py()
        registers = registers_of(once, 5)
        if len(stored) == 32:
            assert {i: r for i, r in enumerate(stored) if r} == registers
        else:
            marks = np.frombuffer(stored, "<u4").tolist()
            assert marks == sorted(i << 6 | r for i, r in registers.items())
        assert run(distinct, batches, by_pairs=by_pairs)[0]["d"] == results(states)[0][0].as_py()


@pytest.mark.parametrize(
    ("size", "num_keys"),
    [
        (1, 50),
        (400, 100),
        (1300, 100),
        (2200, 100),
        (20_000, 20),
        *(only_thorough(*one) for one in [(1300, 400), (1600, 400), (2200, 200), (3000, 200), (20_000, 50)]),
    ],
)
def test_counts_of_any_size_are_about_right_and_without_bias(size: int, num_keys: int) -> None:
    rng = np.random.default_rng(size)
    keys = np.repeat(np.arange(num_keys), size)
    values = pa.array(rng.integers(-(2**62), 2**62, num_keys * size))
    distinct = counter(9, pa.int64())
    found = np.asarray(results(distinct.partial(keys, num_keys, pa.record_batch({"v": values})))[0])
    errors = found / size - 1
    assert np.sqrt((errors**2).mean()) < 0.06
    assert abs(errors.mean()) < 3 * 0.05 / np.sqrt(num_keys)


@given(st.floats(0.0026, 0.38))
def test_the_precision_is_enough_for_the_deviation(rsd: float) -> None:
    precision = precision_of(rsd)
    assert 4 <= precision <= 18
    assert 1.106 / math.sqrt(2**precision) <= rsd < 1.106 / math.sqrt(2 ** (precision - 1)) + 1e-9


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.float64(), [0.0, -0.0, math.nan, float("nan"), 1.0]),
        (pa.list_(pa.int32()), [[1], [1], [], [1, 2]]),
        (pa.bool_(), [True, False, None]),
        (pa.decimal128(30, 2), [1, 2, 2, None]),
    ],
)
def test_values_are_told_apart_as_in_spark(kind: pa.DataType, values: list[Any]) -> None:
    column = pa.array(values, kind, from_pandas=False)
    states = counter(9, kind).partial(np.zeros(len(values), np.int64), 2, pa.record_batch({"v": column}))
    expected = {"double": 3, "bool": 2, "decimal128(30, 2)": 2}.get(str(kind), 3)
    assert results(states)[0].to_pylist() == [expected, 0]
