"""Variance and standard deviation: per group the count, the mean, and the sum of squared distances to the mean.

Means are computed from distances to some value of the group, and states are merged by the formula of Chan, Golub and
LeVeque (1979), so that large values that differ little lose no digits. Spark's counterpart is ``CentralMomentAgg``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import Doubles, fixed_array, fixed_values, null_mask
from spark_bridge.aggregates.computation import Computation, input_column
from spark_bridge.aggregates.groups import Groups

PARTS = (("count", pa.int64()), ("mean", pa.float64()), ("m2", pa.float64()))


def moments(groups: Groups, values: pa.Array) -> list[pa.Array]:
    """Return count, mean and sum of squared distances of each group's non-null doubles."""
    mask, numbers = null_mask(values), fixed_values(values, np.dtype(np.float64))
    if mask is not None:
        groups, numbers = groups.where(~mask), numbers[~mask]
    return _merged(groups, np.ones(len(numbers)), numbers, np.zeros(len(numbers)))


def merged_moments(groups: Groups, states: list[pa.Array]) -> list[pa.Array]:
    """Return one state for the states of each group."""
    counts, means, squares = _numbers(states)
    some = counts > 0
    return _merged(groups.where(some), counts[some], means[some], squares[some])


def _merged(groups: Groups, counts: Doubles, means: Doubles, squares: Doubles) -> list[pa.Array]:
    ids, num = groups.ids, groups.num
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        base = np.zeros(num)
        base[ids] = means
        totals: Doubles = np.bincount(ids, counts, num).astype(np.float64)  # without rows, bincount gives integers
        distances = means - base[ids]
        shifts = np.bincount(ids, counts * distances, num) / np.where(totals == 0, 1, totals)
        distances -= shifts[ids]
        spread = np.bincount(ids, squares + counts * distances * distances, num)
        return _columns(totals, base + shifts, spread)


def merged_moment_pairs(a: list[pa.Array], b: list[pa.Array]) -> list[pa.Array]:
    """Return, row by row, one state of two."""
    count_a, mean_a, squares_a = _numbers(a)
    count_b, mean_b, squares_b = _numbers(b)
    total = count_a + count_b
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        distance = mean_b - mean_a
        share = count_b / np.where(total == 0, 1, total)
        mean = mean_a + distance * share
        between = np.where((count_a == 0) | (count_b == 0), 0.0, distance * distance * count_a * share)
        squares = squares_a + squares_b + between
    return _columns(total, mean, squares)


def moment_result(function: str, state: list[pa.Array]) -> pa.Array:
    """Return ``var_pop``, ``var_samp``, ``stddev_pop`` or ``stddev_samp``; null for too few values, as in Spark."""
    counts, _, squares = _numbers(state)
    divisor = counts - (1 if function.endswith("samp") else 0)
    with np.errstate(invalid="ignore"):
        result = squares / np.where(divisor > 0, divisor, 1)
        if function.startswith("stddev"):
            result = np.sqrt(result)
    return fixed_array(result, divisor <= 0, pa.float64())


def _numbers(state: list[pa.Array]) -> tuple[Doubles, Doubles, Doubles]:
    counts = fixed_values(state[0], np.dtype(np.int64)).astype(np.float64)
    return counts, fixed_values(state[1], np.dtype(np.float64)), fixed_values(state[2], np.dtype(np.float64))


def _columns(counts: Doubles, means: Doubles, squares: npt.NDArray[Any]) -> list[pa.Array]:
    return [pa.array(counts.astype(np.int64)), pa.array(means), pa.array(squares)]


MOMENTS = Computation(
    parts=lambda _: PARTS,
    of_rows=lambda output, groups, rows: moments(groups, input_column(output, rows).cast(pa.float64(), safe=False)),
    merge=lambda _, groups, state: merged_moments(groups, state),
    merge_pairs=lambda _, a, b: merged_moment_pairs(a, b),
    result_type=lambda *_: pa.float64(),
    result=lambda function, _, __, state: moment_result(function, state),
)
