"""The built-in aggregates with a state of fixed size, from ``count`` and ``sum`` to ``stddev``, ``min`` and ``last``.

A sum that its type cannot hold is an error; it never wraps.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Context, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import Doubles, Integers, Mask, fixed_array, fixed_values, null_mask, one_array
from spark_bridge.aggregates.computation import (
    Computation,
    FunctionArguments,
    Groups,
    Output,
    OutputState,
    input_column,
    order_of,
    split_function,
)
from spark_bridge.aggregates.row_groups import is_absolute, is_greater, normalized, order_codes

MAX_DECIMAL_PRECISION = 38
EXTRA_DIGITS = 4
"""How many more digits, and digits after the point, a mean of decimals has than the decimals, as in Spark."""
WIDE_DECIMAL = 60
"""Digits of sums of decimals: more than 2**63 values of 38 digits need, and fewer than Arrow can hold."""
_EXACT = Context(prec=MAX_DECIMAL_PRECISION)
HALF_BITS = np.int64(32)
LOW_HALF = np.int64((1 << 32) - 1)


class SumOverflow(Exception):
    """A type cannot hold a sum; ``Aggregator`` catches this and names the output."""


def sums(groups: Groups, column: pa.Array) -> pa.Array:
    """Return the sum of each group's values, null for a group without values; the column has the type of the sum.

    Raises ``SumOverflow``.
    """
    kind, mask = column.type, null_mask(column)
    if pa.types.is_decimal(kind):
        return _decimal_sums(groups, column)
    if pa.types.is_floating(kind):
        values = fixed_values(column, np.dtype(np.float64))
        totals: npt.NDArray[Any] = np.bincount(groups.ids, values, groups.num)
    else:
        totals = integer_sums(groups, fixed_values(column, np.dtype(np.int64)))
    return fixed_array(totals, groups.counts(mask) == 0, kind)


def integer_sums(groups: Groups, values: Integers) -> Integers:
    """Return the sum of each group; raises ``SumOverflow`` for a sum that leaves 64 bits."""
    totals = np.zeros(groups.num, np.int64)
    np.add.at(totals, groups.ids, values)
    largest = max(abs(int(values.min(initial=0))), abs(int(values.max(initial=0))))
    if largest * len(values) >= 1 << 63:
        # Sums of upper and lower halves fit for sure, and their sum must fit into 64 bits.
        upper, lower = np.zeros(groups.num, np.int64), np.zeros(groups.num, np.int64)
        np.add.at(upper, groups.ids, values >> HALF_BITS)
        np.add.at(lower, groups.ids, values & LOW_HALF)
        upper += lower >> HALF_BITS
        if ((upper < -(1 << 31)) | (upper >= 1 << 31)).any():
            raise SumOverflow
    return totals


def _decimal_sums(groups: Groups, column: pa.Array) -> pa.Array:
    table = pa.table({"group": groups.ids, "value": column.cast(pa.decimal256(WIDE_DECIMAL, column.type.scale))})
    options = pc.ScalarAggregateOptions(min_count=1)
    answer = table.group_by("group", use_threads=False).aggregate([("value", "sum", options)])
    at = np.full(groups.num, -1, np.int64)
    at[answer.column("group").to_numpy()] = np.arange(len(answer))
    return narrowed(one_array(answer.column("value_sum").take(pa.array(at, mask=at < 0))), column.type)


def narrowed(wide: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return wide decimals in type ``kind``; raises ``SumOverflow`` for a decimal with too many digits."""
    try:
        return wide.cast(kind)
    except pa.ArrowInvalid as error:
        raise SumOverflow from error


def sum_pairs(a: pa.Array, b: pa.Array) -> pa.Array:
    """Return, row by row, the sum of two sums; either may be null. Raises ``SumOverflow``."""
    kind = a.type
    no_a, no_b = null_mask(a), null_mask(b)
    if pa.types.is_decimal(kind):
        wide = pa.decimal256(WIDE_DECIMAL, kind.scale)
        total = pc.add(pc.coalesce(a, b).cast(wide), pc.if_else(pc.is_valid(a), b, None).fill_null(0).cast(wide))
        return narrowed(total, kind)
    dtype = np.dtype(np.float64 if pa.types.is_floating(kind) else np.int64)
    left, right = fixed_values(a, dtype), fixed_values(b, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        both = left + right
    if dtype.kind == "i" and (((left ^ both) & (right ^ both)) < 0).any():
        raise SumOverflow
    return fixed_array(both, None if no_a is None or no_b is None else no_a & no_b, kind)


# -- counts ------------------------------------------------------------------------------------


def _count_rows(output: Output, groups: Groups, rows: pa.RecordBatch) -> OutputState:
    return [pa.array(groups.counts(None if output.column is None else null_mask(rows.column(output.column))))]


def _count_true(output: Output, groups: Groups, rows: pa.RecordBatch) -> OutputState:
    is_true = np.asarray(input_column(output, rows).fill_null(False))
    return [pa.array(groups.counts(~is_true))]


def _add_counts(groups: Groups, counts: pa.Array) -> pa.Array:
    return pa.array(integer_sums(groups, fixed_values(counts, np.dtype(np.int64))))


def _add_count_pairs(a: pa.Array, b: pa.Array) -> pa.Array:
    return pa.array(fixed_values(a, np.dtype(np.int64)) + fixed_values(b, np.dtype(np.int64)))


COUNT = Computation(
    parts=lambda _: [("count", pa.int64())],
    of_rows=_count_rows,
    merge=lambda _, groups, state: [_add_counts(groups, state[0])],
    merge_pairs=lambda _, a, b: [_add_count_pairs(a[0], b[0])],
)
COUNT_IF = replace(COUNT, of_rows=_count_true)

# -- sums and means ----------------------------------------------------------------------------


def sum_type(of: pa.DataType) -> pa.DataType:
    """Return the type of a sum, as in Spark: long, double, or a decimal of ten more digits."""
    if pa.types.is_integer(of):
        return pa.int64()
    if pa.types.is_decimal(of):
        return pa.decimal128(min(MAX_DECIMAL_PRECISION, of.precision + 10), of.scale)
    return pa.float64()


def _mean_sum_type(output: Output) -> pa.DataType:
    return sum_type(output.type) if split_function(output.function)[1] else pa.float64()


def _mean_rows(output: Output, groups: Groups, rows: pa.RecordBatch) -> OutputState:
    source = input_column(output, rows)
    values = source.cast(_mean_sum_type(output), safe=False)
    return [sums(groups, values), pa.array(groups.counts(null_mask(source)))]


def mean_type(arguments: FunctionArguments) -> pa.DataType:
    """Return the type of a mean: double; of decimals a decimal with more digits, cut off at 38 as in Spark.

    ``arguments`` are the precision and the scale of the decimals, and none for other types.
    """
    if not arguments:
        return pa.float64()
    precision, scale = (min(MAX_DECIMAL_PRECISION, int(a) + EXTRA_DIGITS) for a in arguments)
    return pa.decimal128(precision, scale)


def _mean(arguments: FunctionArguments, state: OutputState) -> pa.Array:
    """Return the means; null if a group has no value, or if the type of the mean cannot hold it."""
    total, count = state
    some = pc.if_else(pc.equal(count, 0), pa.scalar(None, pa.int64()), count)
    kind = mean_type(arguments)
    if not arguments:
        return pc.divide(total, some.cast(kind))
    # Arrow cuts the quotient off, twenty digits after the dividend's; so it is rounded to those of the result.
    quotient = pc.divide(
        total.cast(pa.decimal256(MAX_DECIMAL_PRECISION, total.type.scale)), some.cast(pa.decimal256(19, 0))
    )
    rounded = pc.round(quotient, ndigits=kind.scale, round_mode="half_towards_infinity")
    try:
        return rounded.cast(kind)
    except pa.ArrowInvalid:
        # As Spark without ANSI mode: the state has sum and count, and a later mean may fit.
        greatest = pa.scalar(Decimal(10**kind.precision - 1).scaleb(-kind.scale, _EXACT), kind).cast(rounded.type)
        return pc.if_else(pc.less_equal(pc.abs(rounded), greatest), rounded, None).cast(kind)


SUM = Computation(
    parts=lambda output: [("sum", sum_type(output.type))],
    of_rows=lambda output, groups, rows: [sums(groups, input_column(output, rows).cast(sum_type(output.type)))],
    merge=lambda output, groups, state: [sums(groups, state[0])],
    merge_pairs=lambda output, a, b: [sum_pairs(a[0], b[0])],
)
MEAN = Computation(
    parts=lambda output: [("sum", _mean_sum_type(output)), ("count", pa.int64())],
    of_rows=_mean_rows,
    merge=lambda output, groups, state: [sums(groups, state[0]), _add_counts(groups, state[1])],
    merge_pairs=lambda output, a, b: [sum_pairs(a[0], b[0]), _add_count_pairs(a[1], b[1])],
    result_type=lambda _, arguments, __: mean_type(arguments),
    result=lambda _, arguments, __, state: _mean(arguments, state),
)


# Variance and standard deviation: per group the count, the mean, and the sum of squared distances to the mean.
#
# Means are computed from distances to some value of the group, and states are merged by the formula of Chan, Golub
# and LeVeque (1979), so that large values that differ little lose no digits. Spark's counterpart is
# ``CentralMomentAgg``.


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
        totals: Doubles = np.bincount(ids, counts, num).astype(np.float64)  # without rows, bincount returns integers
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


# ``min``, ``max``, ``first`` and ``last``: the least or greatest value, or the value with the least or greatest
# order.
#
# Results do not depend on the order of the rows: if two rows of a group have the same order, ``first`` and
# ``last`` take the greater value, a null being less than any value.


LEAST = np.iinfo(np.int64).min


def _rows_taken(rows: Integers, *columns: pa.Array) -> list[pa.Array]:
    """Return the columns at the given rows, null for row -1."""
    indices = pa.array(rows, mask=rows < 0)
    return [column.take(indices) for column in columns]


def _extremes(groups: Groups, column: pa.Array, *, greatest: bool) -> pa.Array:
    """Return the least or greatest value of each group, null for a group without values."""
    column = normalized(column)
    return _rows_taken(_extreme_rows(groups, column, greatest=greatest), column)[0]


def _extreme_rows(groups: Groups, column: pa.Array, *, greatest: bool) -> Integers:
    """Return for each group a row that has its least or greatest value; -1 for a group without values."""
    chosen = _candidates(groups, column, greatest=greatest)
    rows = np.full(groups.num, -1, np.int64)
    rows[groups.ids[chosen]] = chosen
    return rows


def _candidates(groups: Groups, column: pa.Array, *, greatest: bool) -> Integers:
    """Return all rows that have the least or greatest value of their group."""
    mask = null_mask(column)
    codes = order_codes(column)
    if not greatest:
        codes = ~codes  # unlike the negative, there is one for each
    best = np.full(groups.num, LEAST)
    if mask is None:
        np.maximum.at(best, groups.ids, codes)
        return np.flatnonzero(codes == best[groups.ids])
    np.maximum.at(best, groups.ids[~mask], codes[~mask])
    return np.flatnonzero((codes == best[groups.ids]) & ~mask)


def _picked_rows(groups: Groups, value: pa.Array, by: pa.Array, *, greatest: bool) -> Integers:
    """Return for each group the row with the least or greatest ``by``; -1 for a group without any ``by``.

    Of rows with the same ``by``, the one with the greater value is taken, a null being the least value.
    """
    chosen = _candidates(groups, by, greatest=greatest)
    rows = np.full(groups.num, -1, np.int64)
    rows[groups.ids[chosen]] = chosen
    if int((rows >= 0).sum()) < len(chosen):
        among = groups.ids[chosen]
        best = _extreme_rows(Groups(among, groups.num), value.take(pa.array(chosen)), greatest=True)
        rows = np.where(best >= 0, chosen[best], rows)
    return rows


def _is_better(a: pa.Array, b: pa.Array, *, greatest: bool) -> Mask:
    """Return, row by row, whether ``a`` is greater (or less) than ``b``; any value is better than a null."""
    if greatest:
        return is_greater(a, b)
    no_a, no_b = null_mask(a), null_mask(b)
    less = is_greater(b, a)
    if no_a is not None:
        less &= ~no_a
    if no_b is not None:
        less |= no_b if no_a is None else no_b & ~no_a
    return less


def _chosen(first: Mask, a: pa.Array, b: pa.Array) -> pa.Array:
    """Return, row by row, ``a`` where ``first`` is set, else ``b``."""
    if first.all():
        return a
    if not first.any():
        return b
    if is_absolute(a.type) or not pa.types.is_nested(a.type):
        return pc.if_else(pa.array(first), a, b)
    n = len(first)
    return pa.concat_arrays([a, b]).take(pa.array(np.where(first, np.arange(n), np.arange(n) + n)))


def _pick(groups: Groups, value: pa.Array, by: pa.Array, *, greatest: bool) -> OutputState:
    return _rows_taken(_picked_rows(groups, value, by, greatest=greatest), value, by)


def _pick_pairs(a: OutputState, b: OutputState, *, greatest: bool) -> OutputState:
    a_first = _is_better(a[1], b[1], greatest=greatest)
    undecided = ~a_first & ~_is_better(b[1], a[1], greatest=greatest)
    if undecided.any():
        a_first |= undecided & is_greater(a[0], b[0])
    return [_chosen(a_first, a[0], b[0]), _chosen(a_first, a[1], b[1])]


def _extreme(*, greatest: bool) -> Computation:
    return Computation(
        parts=lambda output: [("value", output.type)],
        of_rows=lambda output, groups, rows: [_extremes(groups, input_column(output, rows), greatest=greatest)],
        merge=lambda _, groups, state: [_extremes(groups, state[0], greatest=greatest)],
        merge_pairs=lambda _, a, b: [_chosen(_is_better(a[0], b[0], greatest=greatest), a[0], b[0])],
    )


def _ordered(*, greatest: bool) -> Computation:
    return Computation(
        parts=lambda output: [("value", output.type), ("by", output.by_type)],
        of_rows=lambda output, groups, rows: _pick(
            groups, input_column(output, rows), order_of(output, rows), greatest=greatest
        ),
        merge=lambda _, groups, state: _pick(groups, state[0], state[1], greatest=greatest),
        merge_pairs=lambda _, a, b: _pick_pairs(a, b, greatest=greatest),
    )


MIN, MAX = _extreme(greatest=False), _extreme(greatest=True)
FIRST, LAST = _ordered(greatest=False), _ordered(greatest=True)
