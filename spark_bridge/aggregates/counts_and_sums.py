"""``count``, ``count_if``, ``sum`` and ``mean``. A sum that its type cannot hold is an error; it never wraps."""

from __future__ import annotations

from dataclasses import replace
from decimal import Context, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import Integers, fixed_array, fixed_values, null_mask
from spark_bridge.aggregates.computation import Computation, FunctionArguments, OutputState, input_column
from spark_bridge.aggregates.groups import Groups
from spark_bridge.aggregates.outputs import Output, split_function

MAX_DECIMAL_PRECISION = 38
EXTRA_DIGITS = 4
"""How many more digits, and digits after the point, a mean of decimals has than the decimals, as in Spark."""
WIDE_DECIMAL = 60
"""Digits in which decimals are summed: more than 2**63 values of 38 digits need, and fewer than Arrow can hold."""
_EXACT = Context(prec=MAX_DECIMAL_PRECISION)
HALF_BITS = np.int64(32)
LOW_HALF = np.int64((1 << 32) - 1)


class SumOverflow(Exception):
    """Says that a type cannot hold a sum; ``Aggregator`` catches this and names the output."""


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
    wide = column.cast(pa.decimal256(WIDE_DECIMAL, column.type.scale))
    return narrowed(_arrow_grouped(groups, wide, "sum", pc.ScalarAggregateOptions(min_count=1)), column.type)


def narrowed(wide: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return wide decimals in type ``kind``; raises ``SumOverflow`` for a decimal with too many digits."""
    try:
        return wide.cast(kind)
    except pa.ArrowInvalid as error:
        raise SumOverflow from error


def sum_pairs(a: pa.Array, b: pa.Array) -> pa.Array:
    """Return, row by row, the sum of two sums, of which either may be null; raises ``SumOverflow``."""
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


def _arrow_grouped(groups: Groups, column: pa.Array, function: str, options: object = None) -> pa.Array:
    table = pa.table({"group": groups.ids, "value": column})
    answer = table.group_by("group", use_threads=False).aggregate([("value", function, options)])
    at = np.full(groups.num, -1, np.int64)
    at[answer.column("group").to_numpy()] = np.arange(len(answer))
    taken = answer.column(f"value_{function}").take(pa.array(at, mask=at < 0))
    return taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken


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


def _sum_rows(output: Output, groups: Groups, rows: pa.RecordBatch) -> OutputState:
    source = input_column(output, rows).cast(sum_type(output.type))
    return [sums(groups, source)]


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
    """Return the means; null where there is no value, or where the type of the mean cannot hold it."""
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
    of_rows=_sum_rows,
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
