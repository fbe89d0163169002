"""Counts, sums, extremes and chosen rows per group of rows, whole columns at a time."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import fixed_array, fixed_values, null_mask
from spark_bridge.aggregates.column_order import Integers, Mask, is_absolute, is_greater, normalized, order_codes

WIDE_DECIMAL = 60
"""Digits in which decimals are summed: more than 2**63 values of 38 digits need, and fewer than Arrow can hold."""
LEAST = np.iinfo(np.int64).min
HALF_BITS = np.int64(32)
LOW_HALF = np.int64((1 << 32) - 1)


class Groups:
    """Rows in ``num`` groups: ``ids`` has the group of each row, 0 to ``num`` - 1."""

    def __init__(self, ids: Integers, num: int) -> None:
        self.ids = ids
        self.num = num

    @cached_property
    def sizes(self) -> Integers:
        """The number of rows in each group."""
        return np.bincount(self.ids, minlength=self.num)

    def counts(self, mask: Mask | None) -> Integers:
        """The number of rows in each group where ``mask``, of nulls, is not set."""
        return self.sizes if mask is None else np.bincount(self.ids[~mask], minlength=self.num)

    def where(self, chosen: Mask) -> Groups:
        """The same groups of some of the rows."""
        return Groups(self.ids[chosen], self.num)


class SumOverflow(Exception):
    """A sum that its type cannot hold; the caller names the output."""


def sums(groups: Groups, column: pa.Array) -> pa.Array:
    """The sum of each group's values, null where it has none; the column's type is that of the sum.

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
    """The sum of each group; raises ``SumOverflow`` where it leaves 64 bits."""
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
    """Decimals in their own type again; raises ``SumOverflow`` where one has too many digits."""
    try:
        return wide.cast(kind)
    except pa.ArrowInvalid as error:
        raise SumOverflow from error


def sum_pairs(a: pa.Array, b: pa.Array) -> pa.Array:
    """Row by row the sum of two sums, of which either may be null; raises ``SumOverflow``."""
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


def rows_taken(rows: Integers, *columns: pa.Array) -> list[pa.Array]:
    """The columns at the given rows, null where the row is -1."""
    indices = pa.array(rows, mask=rows < 0)
    return [column.take(indices) for column in columns]


def extremes(groups: Groups, column: pa.Array, *, greatest: bool) -> pa.Array:
    """The least or greatest value of each group, null where it has none."""
    column = normalized(column)
    return rows_taken(extreme_rows(groups, column, greatest=greatest), column)[0]


def extreme_rows(groups: Groups, column: pa.Array, *, greatest: bool) -> Integers:
    """For each group a row that has its least or greatest value; -1 where it has none."""
    chosen = _candidates(groups, column, greatest=greatest)
    rows = np.full(groups.num, -1, np.int64)
    rows[groups.ids[chosen]] = chosen
    return rows


def _candidates(groups: Groups, column: pa.Array, *, greatest: bool) -> Integers:
    """All rows that have the least or greatest value of their group."""
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


def picked_rows(groups: Groups, value: pa.Array, by: pa.Array, *, greatest: bool) -> Integers:
    """For each group the row with the least or greatest ``by``; -1 where no row has one.

    Ties go to the greater value, a null being the least, so that the answer does not depend on the
    order of rows (DESIGN, rule 8).
    """
    chosen = _candidates(groups, by, greatest=greatest)
    rows = np.full(groups.num, -1, np.int64)
    rows[groups.ids[chosen]] = chosen
    num_found = int((rows >= 0).sum())
    if num_found < len(chosen):
        among = groups.ids[chosen]
        best = extreme_rows(Groups(among, groups.num), value.take(pa.array(chosen)), greatest=True)
        rows = np.where(best >= 0, chosen[best], rows)
    return rows


def better_pairs(a: pa.Array, b: pa.Array, *, greatest: bool) -> Mask:
    """Row by row, whether ``a`` is to be preferred to ``b``: a value to a null, else the greater or lesser one."""
    if greatest:
        return is_greater(a, b)
    no_a, no_b = null_mask(a), null_mask(b)
    less = is_greater(b, a)
    if no_a is not None:
        less &= ~no_a
    if no_b is not None:
        less |= no_b if no_a is None else no_b & ~no_a
    return less


def chosen_pairs(first: Mask, a: pa.Array, b: pa.Array) -> pa.Array:
    """Row by row ``a`` where ``first`` is set, else ``b``."""
    if first.all():
        return a
    if not first.any():
        return b
    if is_absolute(a.type) or not pa.types.is_nested(a.type):
        return pc.if_else(pa.array(first), a, b)
    n = len(first)
    return pa.concat_arrays([a, b]).take(pa.array(np.where(first, np.arange(n), np.arange(n) + n)))
