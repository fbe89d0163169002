"""``collect_list``, ``collect_set`` and ``top_k``: lists of all elements of a group, or of at most ``limit``.

An element is a value, or a value and what it is ordered ``by``. Lists are kept in their final order, which does not
depend on the order in which rows come, so that the state is the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from backends.encoding.columns import Integers, Mask, list_array, list_parts, null_mask, struct_array
from spark_bridge.aggregates.column_order import lexical_order, normalized, order_codes
from spark_bridge.aggregates.computation import Computation, OutputState, input_column, order_of
from spark_bridge.aggregates.groups import Groups
from spark_bridge.aggregates.outputs import DroppedElements, Output, split_function
from spark_bridge.aggregates.state_columns import split_state_column

_ITEMS, _PAIRS = "items", "pairs"
"""The state column of lists of values, and of lists of values with what they are ordered by."""


@dataclass(frozen=True)
class ListRule:
    """The rule by which elements are kept, and their order.

    ``limit``: the most elements; None: all, up to ``max_bytes``, beyond which ``ListTooLarge`` is raised.
    ``descending``: the greatest come first. ``keep_last``: where there are more than
    ``limit``, the first ones are dropped. ``distinct``: of equal values one is kept.
    """

    limit: int | None
    descending: bool = False
    keep_last: bool = False
    distinct: bool = False
    max_bytes: int = 0
    dropped: DroppedElements | None = None


class ListTooLarge(Exception):
    """Says that the list of a group is too large; ``Aggregator`` catches this and names the output."""

    def __init__(self, group: int, num_elements: int, num_bytes: int) -> None:
        super().__init__(group, num_elements, num_bytes)
        self.group, self.num_elements, self.num_bytes = group, num_elements, num_bytes


def list_type(value: pa.DataType, by: pa.DataType | None) -> pa.DataType:
    """Return the type of a list of values; with ``by`` the elements are structs of the order and the value."""
    if by is None:
        return pa.list_(pa.field("element", value))
    return pa.list_(pa.field("element", pa.struct([pa.field("by", by), pa.field("value", value)])))


def lists_of_rows(groups: Groups, rule: ListRule, value: pa.Array, by: pa.Array | None) -> pa.Array:
    """Return a list for each group, of the group's rows."""
    value = normalized(value)
    rows, offsets = _ranked(groups, rule, value, by)
    picked = pa.array(rows)
    kind = list_type(value.type, None if by is None else by.type)
    elements = value.take(picked)
    if by is not None:
        elements = struct_array([by.take(picked), elements], len(rows), None, kind.value_type)
    return _checked(list_array(elements, offsets, None, kind), rule)


def merged_lists(groups: Groups, rule: ListRule, lists: pa.Array, *, is_ordered_by: bool) -> pa.Array:
    """Return a list for each group, of the elements of the group's lists."""
    elements, offsets = list_parts(lists)
    of_elements = Groups(np.repeat(groups.ids, np.diff(offsets)), groups.num)
    by, value = elements.flatten() if is_ordered_by else (None, elements)
    rows, ends = _ranked(of_elements, rule, value, by)
    return _checked(list_array(elements.take(pa.array(rows)), ends, None, lists.type), rule)


def _checked(lists: pa.Array, rule: ListRule) -> pa.Array:
    """Return the lists of groups; raises ``ListTooLarge``."""
    if rule.limit is None and lists.nbytes > rule.max_bytes:
        elements, offsets = list_parts(lists)
        for group, (begin, end) in enumerate(pairwise(offsets.tolist())):
            num_bytes = elements.slice(begin, end - begin).nbytes
            if num_bytes > rule.max_bytes:
                raise ListTooLarge(group, end - begin, num_bytes)
    return lists


def list_values(lists: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the values without what they are ordered by, as lists of type ``kind``; null lists stay null."""
    elements, offsets = list_parts(lists)
    if lists.type != kind:
        elements = elements.flatten()[1]
    return list_array(elements, offsets, null_mask(lists), kind)


def value_type(kind: pa.DataType, *, is_ordered_by: bool) -> pa.DataType:
    """Return the type of the lists that ``list_values`` makes of lists of type ``kind``."""
    return list_type(kind.value_type.field("value").type, None) if is_ordered_by else kind


def _ranked(groups: Groups, rule: ListRule, value: pa.Array, by: pa.Array | None) -> tuple[Integers, Integers]:
    """Return the rows to keep, group by group in their order, and where each group begins among them (n+1 offsets)."""
    codes = [_codes(column, rule.descending) for column in ([value] if by is None else [by, value])]
    order = lexical_order([groups.ids, *codes])
    ids = groups.ids[order]
    if rule.distinct:
        ordered = codes[-1][order]
        is_new = np.ones(len(order), np.bool_)
        is_new[1:] = (ids[1:] != ids[:-1]) | (ordered[1:] != ordered[:-1])
        order, ids = order[is_new], ids[is_new]
    counts = np.bincount(ids, minlength=groups.num)
    ends = np.cumsum(counts)
    if rule.limit is None:
        return order, np.concatenate([[0], ends])
    places = np.arange(len(ids))
    ahead = ends[ids] - 1 - places if rule.keep_last else places - (ends - counts)[ids]
    kept = order[ahead < rule.limit]
    if rule.dropped is not None:
        rule.dropped.num += len(order) - len(kept)
    offsets = np.zeros(groups.num + 1, np.int64)
    np.cumsum(np.minimum(counts, rule.limit), out=offsets[1:])
    return kept, offsets


def _codes(column: pa.Array, descending: bool) -> Integers:
    """Return codes in the order that is asked for, a null being the least value."""
    codes, mask = order_codes(column), null_mask(column)
    if mask is not None:
        codes = _below_all(codes, mask)
    return ~codes if descending else codes


def _below_all(codes: Integers, mask: Mask) -> Integers:
    least = int(codes[~mask].min(initial=0))
    if least > np.iinfo(np.int64).min:
        return np.where(mask, least - 1, codes)
    ranks = np.unique(codes, return_inverse=True)[1] + 1
    return np.where(mask, 0, ranks)


def _rule_of(output: Output) -> ListRule:
    name, (limit, *options) = split_function(output.function)
    if name == "top_k":
        return ListRule(int(limit), descending="ascending" not in options)
    most = int(limit) if output.max_bytes is None else None
    return ListRule(
        most,
        keep_last=name == "collect_list",
        distinct=name == "collect_set",
        max_bytes=output.max_bytes or 0,
        dropped=output.dropped,
    )


def counts_dropped(output: Output) -> bool:
    """Return whether an output drops elements that people may want to know of: those of ``top_k`` are meant to go."""
    return output.max_bytes is None and output.function.startswith(("collect_list(", "collect_set("))


def _list_rows(output: Output, groups: Groups, rows: pa.RecordBatch) -> OutputState:
    value = input_column(output, rows)
    by = None if output.by is None else order_of(output, rows)
    # A list of values has no nulls. With ``top_k(by=...)`` null values count, and rows without an order do not.
    mask = null_mask(by) if by is not None and _is_top_k(output) else null_mask(value)
    if mask is not None:
        keep = pa.array(~mask)
        groups, value = groups.where(~mask), value.filter(keep)
        by = None if by is None else by.filter(keep)
    return [lists_of_rows(groups, _rule_of(output), value, by)]


def _is_top_k(output: Output) -> bool:
    return output.function.startswith("top_k(")


def _has_order(parts: list[pa.Field]) -> bool:
    """Return whether the elements of the lists are structs of a value and what it is ordered by."""
    return split_state_column(parts[0].name).part == _PAIRS


LISTS = Computation(
    parts=lambda output: [(_ITEMS if output.by is None else _PAIRS, list_type(output.type, output.by_type))],
    of_rows=_list_rows,
    merge=lambda output, groups, state: [
        merged_lists(groups, _rule_of(output), state[0], is_ordered_by=output.by is not None)
    ],
    result_type=lambda _, __, parts: value_type(parts[0].type, is_ordered_by=_has_order(parts)),
    result=lambda _, __, parts, state: list_values(
        state[0], value_type(state[0].type, is_ordered_by=_has_order(parts))
    ),
)
