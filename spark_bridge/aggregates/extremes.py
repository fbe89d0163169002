"""``min``, ``max``, ``first`` and ``last``: the least or greatest value, or the value with the least or greatest order.

Results do not depend on the order in which rows come: where two rows of a group have the same order, ``first`` and
``last`` take the greater value, a null being less than any value.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import Integers, Mask, null_mask
from spark_bridge.aggregates.column_order import is_absolute, is_greater, normalized, order_codes
from spark_bridge.aggregates.computation import Computation, OutputState, input_column, order_of
from spark_bridge.aggregates.groups import Groups

LEAST = np.iinfo(np.int64).min


def _rows_taken(rows: Integers, *columns: pa.Array) -> list[pa.Array]:
    """Return the columns at the given rows, null where the row is -1."""
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
    num_found = int((rows >= 0).sum())
    if num_found < len(chosen):
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


def _value_pairs(a: OutputState, b: OutputState, *, greatest: bool) -> OutputState:
    return [_chosen(_is_better(a[0], b[0], greatest=greatest), a[0], b[0])]


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
        merge_pairs=lambda _, a, b: _value_pairs(a, b, greatest=greatest),
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
