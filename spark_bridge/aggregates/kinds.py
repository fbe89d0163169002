"""What each aggregate function keeps as state, and how it is made of rows, merged and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import fixed_values, null_mask, struct_array
from spark_bridge.aggregates.bounded_lists import (
    ListRule,
    list_type,
    list_values,
    lists_of_rows,
    merged_lists,
    value_type,
)
from spark_bridge.aggregates.central_moments import PARTS, merged_moment_pairs, merged_moments, moment_result, moments
from spark_bridge.aggregates.column_order import is_greater, plain
from spark_bridge.aggregates.distinct_sketch import estimates, merged_sketches, sketches_of_rows
from spark_bridge.aggregates.group_kernels import (
    Groups,
    better_pairs,
    chosen_pairs,
    extremes,
    integer_sums,
    narrowed,
    picked_rows,
    rows_taken,
    sum_pairs,
    sums,
)
from spark_bridge.aggregates.outputs import Output, split_function
from spark_bridge.aggregates.user_aggregate import state_result_type, states_as_result, user_merge, user_partial
from spark_bridge.exceptions import InvalidOperatorError

MAX_DECIMAL_PRECISION = 38
EXTRA_DIGITS = 4
"""How many more digits, and digits behind the point, a mean of decimals has than they have, as in Spark."""
WIDE_DIGITS = 76

State: TypeAlias = list[pa.Array]
"""The state columns of one output, one value per group."""
Arguments: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """One aggregate function, in whole columns.

    ``merge_pairs`` merges two states row by row (nulls being states of no rows); without it, ``merge`` does.
    """

    parts: Callable[[Output], Sequence[tuple[str, pa.DataType]]]
    of_rows: Callable[[Output, Groups, pa.RecordBatch], State]
    merge: Callable[[Output, Groups, State], State]
    merge_pairs: Callable[[Output, State, State], State] | None = None
    result_type: Callable[[str, Arguments, list[pa.Field]], pa.DataType] = lambda _, __, parts: parts[0].type
    result: Callable[[str, Arguments, list[pa.Field], State], pa.Array] = lambda _, __, ___, state: state[0]


def kind_of(function: str) -> Kind:
    """The kind of an output's function; raises ``InvalidOperatorError``."""
    name = split_function(function)[0]
    if name not in KINDS:
        raise InvalidOperatorError(f"Unknown aggregate function {function!r}; there are {', '.join(KINDS)}.")
    return KINDS[name]


def source_of(output: Output, rows: pa.RecordBatch) -> pa.Array:
    """The input of an output, in the type that it was declared with."""
    kind = output.type
    if output.columns and kind is not None:
        children = [_as_type(rows.column(c), kind.field(i).type) for i, c in enumerate(output.columns)]
        return struct_array(children, rows.num_rows, None, kind)
    return _as_type(rows.column(output.column), output.type)


def _as_type(column: pa.Array, kind: pa.DataType | None) -> pa.Array:
    column = plain(column)
    return column if kind is None or pa.types.is_null(kind) or column.type == kind else column.cast(kind)


def _by_of(output: Output, rows: pa.RecordBatch) -> pa.Array:
    return _as_type(rows.column(output.by), output.by_type)


# Counts


def _count_rows(output: Output, groups: Groups, rows: pa.RecordBatch) -> State:
    return [pa.array(groups.counts(None if output.column is None else null_mask(rows.column(output.column))))]


def _count_true(output: Output, groups: Groups, rows: pa.RecordBatch) -> State:
    is_true = np.asarray(source_of(output, rows).fill_null(False))
    return [pa.array(groups.counts(~is_true))]


def _add_counts(groups: Groups, counts: pa.Array) -> pa.Array:
    return pa.array(integer_sums(groups, fixed_values(counts, np.dtype(np.int64))))


def _add_count_pairs(a: pa.Array, b: pa.Array) -> pa.Array:
    return pa.array(fixed_values(a, np.dtype(np.int64)) + fixed_values(b, np.dtype(np.int64)))


# Sums and means


def sum_type(of: pa.DataType) -> pa.DataType:
    """The type of a sum, as in Spark: long, double, or a decimal of ten more digits."""
    if pa.types.is_integer(of):
        return pa.int64()
    if pa.types.is_decimal(of):
        return pa.decimal128(min(MAX_DECIMAL_PRECISION, of.precision + 10), of.scale)
    return pa.float64()


def _mean_sum_type(output: Output) -> pa.DataType:
    return sum_type(output.type) if split_function(output.function)[1] else pa.float64()


def _sum_rows(output: Output, groups: Groups, rows: pa.RecordBatch) -> State:
    source = source_of(output, rows).cast(sum_type(output.type))
    return [sums(groups, source)]


def _mean_rows(output: Output, groups: Groups, rows: pa.RecordBatch) -> State:
    source = source_of(output, rows)
    values = source.cast(_mean_sum_type(output), safe=False)
    return [sums(groups, values), pa.array(groups.counts(null_mask(source)))]


def mean_type(arguments: Arguments) -> pa.DataType:
    """The type of a mean: double, or of decimals (whose precision and scale are the arguments) one with more digits.

    Digits are cut as in Spark's ``DecimalType.bounded``.
    """
    if not arguments:
        return pa.float64()
    precision, scale = (min(MAX_DECIMAL_PRECISION, int(a) + EXTRA_DIGITS) for a in arguments)
    return pa.decimal128(precision, scale)


def _mean(arguments: Arguments, state: State) -> pa.Array:
    total, count = state
    some = pc.if_else(pc.equal(count, 0), pa.scalar(None, pa.int64()), count)
    kind = mean_type(arguments)
    if not arguments:
        return pc.divide(total, some.cast(kind))
    # Arrow cuts the quotient off, twenty digits behind the dividend's; so it is rounded to those of the result.
    quotient = pc.divide(
        total.cast(pa.decimal256(MAX_DECIMAL_PRECISION, total.type.scale)), some.cast(pa.decimal256(19, 0))
    )
    rounded = pc.round(quotient, ndigits=kind.scale, round_mode="half_towards_infinity")
    return narrowed(rounded, kind)


# Least, greatest, first and last


def _value_pairs(a: State, b: State, *, greatest: bool) -> State:
    return [chosen_pairs(better_pairs(a[0], b[0], greatest=greatest), a[0], b[0])]


def _pick(groups: Groups, value: pa.Array, by: pa.Array, *, greatest: bool) -> State:
    return rows_taken(picked_rows(groups, value, by, greatest=greatest), value, by)


def _pick_pairs(a: State, b: State, *, greatest: bool) -> State:
    a_first = better_pairs(a[1], b[1], greatest=greatest)
    undecided = ~a_first & ~better_pairs(b[1], a[1], greatest=greatest)
    if undecided.any():
        a_first |= undecided & is_greater(a[0], b[0])
    return [chosen_pairs(a_first, a[0], b[0]), chosen_pairs(a_first, a[1], b[1])]


def _extreme_kind(*, greatest: bool) -> Kind:
    return Kind(
        parts=lambda output: [("value", output.type)],
        of_rows=lambda output, groups, rows: [extremes(groups, source_of(output, rows), greatest=greatest)],
        merge=lambda _, groups, state: [extremes(groups, state[0], greatest=greatest)],
        merge_pairs=lambda _, a, b: _value_pairs(a, b, greatest=greatest),
    )


def _picking_kind(*, greatest: bool) -> Kind:
    return Kind(
        parts=lambda output: [("value", output.type), ("by", output.by_type)],
        of_rows=lambda output, groups, rows: _pick(
            groups, source_of(output, rows), _by_of(output, rows), greatest=greatest
        ),
        merge=lambda _, groups, state: _pick(groups, state[0], state[1], greatest=greatest),
        merge_pairs=lambda _, a, b: _pick_pairs(a, b, greatest=greatest),
    )


# Variances


def _moments_kind() -> Kind:
    return Kind(
        parts=lambda _: PARTS,
        of_rows=lambda output, groups, rows: moments(groups, source_of(output, rows).cast(pa.float64(), safe=False)),
        merge=lambda _, groups, state: merged_moments(groups, state),
        merge_pairs=lambda _, a, b: merged_moment_pairs(a, b),
        result_type=lambda *_: pa.float64(),
        result=lambda function, _, __, state: moment_result(function, state),
    )


# Lists


def _rule_of(function: str) -> ListRule:
    name, (limit, *options) = split_function(function)
    if name == "top_k":
        return ListRule(int(limit), descending="ascending" not in options)
    return ListRule(int(limit), keep_last=name == "collect_list", distinct=name == "collect_set")


def _list_rows(output: Output, groups: Groups, rows: pa.RecordBatch) -> State:
    value = source_of(output, rows)
    by = None if output.by is None else _by_of(output, rows)
    # A list by itself has no nulls; the k first rows have those that are there, but only rows with an order.
    mask = null_mask(by) if by is not None and _is_top_k(output) else null_mask(value)
    if mask is not None:
        keep = pa.array(~mask)
        groups, value = groups.where(~mask), value.filter(keep)
        by = None if by is None else by.filter(keep)
    return [lists_of_rows(groups, _rule_of(output.function), value, by)]


def _is_top_k(output: Output) -> bool:
    return output.function.startswith("top_k(")


def _lists_kind() -> Kind:
    return Kind(
        parts=lambda output: [("items" if output.by is None else "pairs", list_type(output.type, output.by_type))],
        of_rows=_list_rows,
        merge=lambda output, groups, state: [
            merged_lists(groups, _rule_of(output.function), state[0], is_ordered_by=output.by is not None)
        ],
        result_type=lambda _, __, parts: value_type(parts[0].type, is_ordered_by=_has_pairs(parts)),
        result=lambda _, __, parts, state: list_values(
            state[0], value_type(state[0].type, is_ordered_by=_has_pairs(parts))
        ),
    )


def _has_pairs(parts: list[pa.Field]) -> bool:
    return bool(parts[0].name.endswith(".pairs"))


# Sketches


def _precision(function: str) -> int:
    return int(split_function(function)[1][0])


def _sketch_kind() -> Kind:
    return Kind(
        parts=lambda _: [("sketch", pa.binary())],
        of_rows=lambda output, groups, rows: [
            sketches_of_rows(groups, _precision(output.function), source_of(output, rows))
        ],
        merge=lambda output, groups, state: [merged_sketches(groups, _precision(output.function), state[0])],
        result_type=lambda *_: pa.int64(),
        result=lambda _, arguments, __, state: estimates(int(arguments[0]), state[0]),
    )


# The user's own


def _user_rows(output: Output, groups: Groups, rows: pa.RecordBatch) -> State:
    assert output.user is not None
    return user_partial(output.name, output.user, groups, {c: plain(rows.column(c)) for c in output.columns})


def _user_merge(output: Output, groups: Groups, state: State) -> State:
    assert output.user is not None
    return user_merge(output.name, output.user, groups, state)


def _user_parts(output: Output) -> list[tuple[str, pa.DataType]]:
    assert output.user is not None
    return [(f.name, f.type) for f in output.user.state]


def _as_declared(parts: list[pa.Field]) -> pa.Schema:
    return pa.schema([f.with_name(f.name.rsplit(".", 1)[1]) for f in parts])


KINDS: dict[str, Kind] = {
    "count": Kind(
        parts=lambda _: [("count", pa.int64())],
        of_rows=_count_rows,
        merge=lambda _, groups, state: [_add_counts(groups, state[0])],
        merge_pairs=lambda _, a, b: [_add_count_pairs(a[0], b[0])],
    ),
    "count_if": Kind(
        parts=lambda _: [("count", pa.int64())],
        of_rows=_count_true,
        merge=lambda _, groups, state: [_add_counts(groups, state[0])],
        merge_pairs=lambda _, a, b: [_add_count_pairs(a[0], b[0])],
    ),
    "sum": Kind(
        parts=lambda output: [("sum", sum_type(output.type))],
        of_rows=_sum_rows,
        merge=lambda output, groups, state: [sums(groups, state[0])],
        merge_pairs=lambda output, a, b: [sum_pairs(a[0], b[0])],
    ),
    "mean": Kind(
        parts=lambda output: [("sum", _mean_sum_type(output)), ("count", pa.int64())],
        of_rows=_mean_rows,
        merge=lambda output, groups, state: [
            sums(groups, state[0]),
            _add_counts(groups, state[1]),
        ],
        merge_pairs=lambda output, a, b: [
            sum_pairs(a[0], b[0]),
            _add_count_pairs(a[1], b[1]),
        ],
        result_type=lambda _, arguments, __: mean_type(arguments),
        result=lambda _, arguments, __, state: _mean(arguments, state),
    ),
    "min": _extreme_kind(greatest=False),
    "max": _extreme_kind(greatest=True),
    "first": _picking_kind(greatest=False),
    "last": _picking_kind(greatest=True),
    "stddev_samp": _moments_kind(),
    "stddev_pop": _moments_kind(),
    "var_samp": _moments_kind(),
    "var_pop": _moments_kind(),
    "collect_list": _lists_kind(),
    "collect_set": _lists_kind(),
    "top_k": _lists_kind(),
    "approx_count_distinct": _sketch_kind(),
    "merge": Kind(
        parts=_user_parts,
        of_rows=_user_rows,
        merge=_user_merge,
        result_type=lambda _, __, parts: state_result_type(_as_declared(parts)),
        result=lambda _, __, parts, state: states_as_result(state, _as_declared(parts)),
    ),
}
