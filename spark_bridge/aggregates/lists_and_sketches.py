"""``collect_list``, ``collect_set``, ``top_k`` (lists of elements), ``approx_count_distinct``, ``percentile_approx``.

An element is a value, or a value and its order ``by``. Lists are kept in their final order, which does not
depend on the order of the rows, so that the state is the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding import columns
from backends.encoding.key_groups import spark_xxhash64
from spark_bridge.aggregates import computation
from spark_bridge.aggregates.row_groups import lexical_order, normalized, order_codes

_ITEMS, _PAIRS = "items", "pairs"
"""The state column of lists of values, and of lists of values with their order."""
LISTS_BY_ORDER = f".{_PAIRS}"
"""Ends the name of the state column of lists of values with their order."""


@dataclass(frozen=True)
class ListRule:
    """Which elements are kept, and their order.

    ``limit``: the most elements; None: all, up to ``max_bytes``, beyond which ``ListTooLarge`` is raised.
    ``descending``: the greatest come first. ``keep_last``: if there are more than
    ``limit``, the first ones are dropped. ``distinct``: of equal values one is kept.
    """

    limit: int | None
    descending: bool = False
    keep_last: bool = False
    distinct: bool = False
    max_bytes: int = 0
    dropped: computation.DroppedElements | None = None


class ListTooLarge(Exception):
    """The list of a group is too large; ``Aggregator`` catches this and names the output."""

    def __init__(self, group: int, num_elements: int, num_bytes: int) -> None:
        super().__init__(group, num_elements, num_bytes)
        self.group, self.num_elements, self.num_bytes = group, num_elements, num_bytes


def list_type(value: pa.DataType, by: pa.DataType | None) -> pa.DataType:
    """Return the type of a list of values; with ``by`` the elements are structs of the order and the value."""
    if by is None:
        return pa.list_(pa.field("element", value))
    return pa.list_(pa.field("element", pa.struct([pa.field("by", by), pa.field("value", value)])))


def lists_of_rows(groups: computation.Groups, rule: ListRule, value: pa.Array, by: pa.Array | None) -> pa.Array:
    """Return a list for each group, of the group's rows."""
    value = normalized(value)
    rows, offsets = _ranked(groups, rule, value, by)
    picked = pa.array(rows)
    kind = list_type(value.type, None if by is None else by.type)
    elements = value.take(picked)
    if by is not None:
        elements = columns.struct_array([by.take(picked), elements], len(rows), None, kind.value_type)
    return _checked(columns.list_array(elements, offsets, None, kind), rule)


def merged_lists(groups: computation.Groups, rule: ListRule, lists: pa.Array, *, is_ordered_by: bool) -> pa.Array:
    """Return a list for each group, of the elements of the group's lists."""
    elements, offsets = columns.list_parts(lists)
    of_elements = computation.Groups(np.repeat(groups.ids, np.diff(offsets)), groups.num)
    by, value = elements.flatten() if is_ordered_by else (None, elements)
    rows, ends = _ranked(of_elements, rule, value, by)
    return _checked(columns.list_array(elements.take(pa.array(rows)), ends, None, lists.type), rule)


def _checked(lists: pa.Array, rule: ListRule) -> pa.Array:
    """Return the lists of groups; raises ``ListTooLarge``."""
    if rule.limit is None and lists.nbytes > rule.max_bytes:
        elements, offsets = columns.list_parts(lists)
        for group, (begin, end) in enumerate(pairwise(offsets.tolist())):
            num_bytes = elements.slice(begin, end - begin).nbytes
            if num_bytes > rule.max_bytes:
                raise ListTooLarge(group, end - begin, num_bytes)
    return lists


def list_values(lists: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the values without their order, as lists of type ``kind``; null lists stay null."""
    elements, offsets = columns.list_parts(lists)
    if lists.type != kind:
        elements = elements.flatten()[1]
    return columns.list_array(elements, offsets, columns.null_mask(lists), kind)


def value_type(kind: pa.DataType, *, is_ordered_by: bool) -> pa.DataType:
    """Return the type of the lists that ``list_values`` makes of lists of type ``kind``."""
    return list_type(kind.value_type.field("value").type, None) if is_ordered_by else kind


def _ranked(
    groups: computation.Groups, rule: ListRule, value: pa.Array, by: pa.Array | None
) -> tuple[columns.Integers, columns.Integers]:
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
    return kept, columns.offsets_of(np.minimum(counts, rule.limit))


def _codes(column: pa.Array, descending: bool) -> columns.Integers:
    """Return codes in the order that is asked for, a null being the least value."""
    codes, mask = order_codes(column), columns.null_mask(column)
    if mask is not None:
        least = int(codes[~mask].min(initial=0))
        if least > np.iinfo(np.int64).min:
            codes = np.where(mask, least - 1, codes)
        else:
            codes = np.where(mask, 0, np.unique(codes, return_inverse=True)[1] + 1)
    return ~codes if descending else codes


def _rule_of(output: computation.Output) -> ListRule:
    name, (limit, *options) = computation.split_function(output.function)
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


def counts_dropped(output: computation.Output) -> bool:
    """Return whether an output drops elements that people may want to know of: those of ``top_k`` are meant to go."""
    return output.max_bytes is None and output.function.startswith(("collect_list(", "collect_set("))


def _list_rows(output: computation.Output, groups: computation.Groups, rows: pa.RecordBatch) -> computation.OutputState:
    value = computation.input_column(output, rows)
    by = None if output.by is None else computation.order_of(output, rows)
    # A list of values has no nulls. With ``top_k(by=...)`` null values count, and rows without an order do not.
    is_by_order = by is not None and output.function.startswith("top_k(")
    if (mask := columns.null_mask(by if is_by_order else value)) is not None:
        keep = pa.array(~mask)
        groups, value = groups.where(~mask), value.filter(keep)
        by = None if by is None else by.filter(keep)
    return [lists_of_rows(groups, _rule_of(output), value, by)]


def _has_order(parts: list[pa.Field]) -> bool:
    """Return whether the elements of the lists are structs of a value and its order."""
    return computation.split_state_column(parts[0].name).part == _PAIRS


LISTS = computation.Computation(
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


# ``approx_count_distinct``: HyperLogLog++ sketches with the same registers as Spark's.
#
# The first ``precision`` bits of a hash choose a register. The register keeps the greatest number of leading zeros
# (plus one) of the bits that follow. A sketch is stored sparsely, as sorted uint32 (register << 6 | content, little-
# endian) of the registers in use, until a byte per register is not longer.
#
# After Heule, Nunkesser and Hall, "HyperLogLog in Practice" (2013), with Spark's hash and rounding. The bias of
# middle-sized estimates is computed from the model behind the paper's tables.


Registers: TypeAlias = npt.NDArray[np.uint8]

MIN_PRECISION, MAX_PRECISION = 4, 18
RANK_BITS = 6
RANK = (1 << RANK_BITS) - 1
SPARSE = np.dtype("<u4")
REGISTER_CHUNK_BYTES = 1 << 24
"""Bytes of registers that are spread out at once."""
LINEAR_COUNTING_UP_TO = (*(10, 20, 40, 80, 220, 400, 900, 1800, 3100, 6500), *(11500, 20000, 50000, 120000, 350000))
"""The greatest count for which linear counting is the better estimate, by precision from 4 on; from the paper."""


def precision_of(rsd: float) -> int:
    """Return the number of index bits for a relative standard deviation, as Spark chooses it."""
    return math.ceil(2.0 * math.log(1.106 / rsd) / math.log(2.0))


def sketches_of_rows(groups: computation.Groups, precision: int, column: pa.Array) -> pa.Array:
    """Return the sketch of the non-null values of each group."""
    if (mask := columns.null_mask(column)) is not None:
        groups, column = groups.where(~mask), column.drop_null()
    if not pa.types.is_nested(column.type):
        # Strings are hashed one by one: distinct ones only.
        encoded = column.dictionary_encode()
        places, column = columns.fixed_values(encoded.indices, np.dtype(np.int32)), encoded.dictionary
    else:
        places = np.arange(len(column))
    return _encoded(_entries(groups.ids, precision, _marks(column, precision)[places]), groups.num, precision)


def merged_sketches(groups: computation.Groups, precision: int, sketches: pa.Array) -> pa.Array:
    """Return one sketch for the sketches of each group."""
    content, offsets = columns.binary_content(sketches.fill_null(b"") if sketches.null_count else sketches)
    lengths = np.diff(offsets)
    registers = 1 << precision
    is_dense = lengths == registers
    sparse_bytes = np.repeat(~is_dense, lengths)
    marks = content[sparse_bytes].view(SPARSE).astype(np.int64)
    entries = _entries(np.repeat(groups.ids[~is_dense], lengths[~is_dense] // SPARSE.itemsize), precision, marks)
    if not is_dense.any():
        return _encoded(entries, groups.num, precision)
    spread = content[~sparse_bytes].reshape(-1, registers)
    return _with_dense(entries, groups.num, precision, groups.ids[is_dense], spread)


def estimates(precision: int, sketches: pa.Array) -> pa.Array:
    """Return how many distinct values each sketch has seen, as Spark estimates it; null for a null."""
    mask = columns.null_mask(sketches)
    content, offsets = columns.binary_content(sketches.fill_null(b"") if mask is not None else sketches)
    lengths = np.diff(offsets)
    registers = 1 << precision
    is_dense = lengths == registers
    used, inverse_sum = np.zeros(len(lengths), np.int64), np.zeros(len(lengths))
    powers = 0.5 ** np.arange(RANK + 1)

    of_byte = np.repeat(is_dense, lengths)
    marks = content[~of_byte].view(SPARSE)
    owner = np.repeat(np.arange(len(lengths))[~is_dense], lengths[~is_dense] // SPARSE.itemsize)
    used += np.bincount(owner, minlength=len(lengths))
    inverse_sum += np.bincount(owner, powers[marks & RANK], len(lengths))

    step = max(1, REGISTER_CHUNK_BYTES // registers)
    dense = np.flatnonzero(is_dense)
    spread = content[of_byte].reshape(-1, registers)
    for start in range(0, len(dense), step):
        part, rows = spread[start : start + step], dense[start : start + step]
        used[rows] = np.count_nonzero(part, axis=1)
        inverse_sum[rows] = (powers[part] * (part > 0)).sum(axis=1)
    counts = _cardinality(precision, registers - used, inverse_sum + (registers - used))
    return columns.fixed_array(counts, mask, pa.int64())


def _marks(column: pa.Array, precision: int) -> columns.Integers:
    """Return register and content of each value, as ``register << 6 | content``."""
    hashes = spark_xxhash64(pa.record_batch({"value": column})).view(np.uint64)
    register = (hashes >> np.uint64(64 - precision)).astype(np.int64)
    # A bit set after the last one stops the count of zeros.
    rest = (hashes << np.uint64(precision)) | np.uint64(1 << (precision - 1))
    upper = (rest >> np.uint64(32)).astype(np.float64)
    lower = (rest & np.uint64(0xFFFFFFFF)).astype(np.float64)
    # frexp returns the number of bits of an integer, as a double holds these integers exactly.
    bits = np.where(upper > 0, np.frexp(upper)[1] + 32, np.frexp(lower)[1])
    marks: columns.Integers = (register << RANK_BITS) | (65 - bits)
    return marks


def _entries(ids: columns.Integers, precision: int, marks: columns.Integers) -> columns.Integers:
    """Return group, register and content as one number, sorted; of each register only the greatest content."""
    entries = np.sort((ids << (precision + RANK_BITS)) | marks)
    is_last = np.ones(len(entries), np.bool_)
    is_last[:-1] = (entries[1:] >> RANK_BITS) != (entries[:-1] >> RANK_BITS)
    greatest: columns.Integers = entries[is_last]
    return greatest


def _encoded(entries: columns.Integers, num: int, precision: int) -> pa.Array:
    """Return the sketches of groups 0 to ``num`` - 1, from their registers in use."""
    ids = entries >> (precision + RANK_BITS)
    counts = np.bincount(ids, minlength=num)
    if (counts * SPARSE.itemsize >= 1 << precision).any():
        return _with_dense(entries, num, precision, np.zeros(0, np.int64), np.zeros((0, 1 << precision), np.uint8))
    return _sparse(entries, counts, precision)


def _sparse(entries: columns.Integers, counts: columns.Integers, precision: int) -> pa.Array:
    marks = (entries & ((1 << (precision + RANK_BITS)) - 1)).astype(SPARSE)
    return columns.binary_array(marks.view(np.uint8), columns.offsets_of(counts * SPARSE.itemsize))


def _with_dense(
    entries: columns.Integers, num: int, precision: int, dense_ids: columns.Integers, dense: Registers
) -> pa.Array:
    """Return the sketches of groups; some have, or now get, a byte per register."""
    registers = 1 << precision
    ids = entries >> (precision + RANK_BITS)
    counts = np.bincount(ids, minlength=num)
    is_dense = counts * SPARSE.itemsize >= registers
    is_dense[dense_ids] = True
    sparse = _sparse(entries[~is_dense[ids]], np.where(is_dense, 0, counts), precision)

    groups = np.flatnonzero(is_dense)
    place = np.full(num, -1, np.int64)
    place[groups] = np.arange(len(groups))
    spread = np.zeros((len(groups), registers), np.uint8)
    order = np.argsort(dense_ids, kind="stable")
    if len(order):
        starts = np.flatnonzero(np.diff(dense_ids[order], prepend=-1))
        spread[place[dense_ids[order][starts]]] = np.maximum.reduceat(dense[order], starts, axis=0)
    more = entries[is_dense[ids]]
    at = place[more >> (precision + RANK_BITS)] * registers + ((more >> RANK_BITS) & (registers - 1))
    np.maximum.at(spread.reshape(-1), at, (more & RANK).astype(np.uint8))
    full = columns.binary_array(spread.reshape(-1), np.arange(len(groups) + 1, dtype=np.int64) * registers)
    rows = np.where(is_dense, num + place, np.arange(num))
    return pa.concat_arrays([sparse, full]).take(pa.array(rows))


def _cardinality(precision: int, unused: columns.Integers, inverse_sum: columns.Doubles) -> columns.Integers:
    registers = 1 << precision
    raw = _alpha(registers) * registers * registers / inverse_sum
    linear = registers * np.log(registers / np.maximum(unused, 1))
    is_small = (unused > 0) & ((linear <= LINEAR_COUNTING_UP_TO[precision - MIN_PRECISION]) | (raw <= 2.5 * registers))
    grid_raw, grid_true = _bias_curve(precision)
    large = np.where(raw < 5.0 * registers, np.interp(raw, grid_raw, grid_true), raw)
    return np.floor(np.where(is_small, linear, large) + 0.5).astype(np.int64)


def _alpha(registers: int) -> float:
    small = {16: 0.673, 32: 0.697, 64: 0.709}
    return small.get(registers, 0.7213 / (1.0 + 1.079 / registers))


@lru_cache
def _bias_curve(precision: int) -> tuple[columns.Doubles, columns.Doubles]:
    """Return expected raw estimates, ascending, and the numbers of values that they belong to.

    Interpolation between them corrects the bias of a raw estimate. With n values and m registers, the content of a
    register is at most k with probability exp(-n / m / 2**k), nearly independently of the other registers. The
    expectation of the estimate is taken to second order.
    """
    registers = 1 << precision
    true = np.linspace(0.5, 6.0, 1101) * registers
    contents = np.arange(64 - precision + 2)
    up_to: npt.NDArray[Any] = np.exp(-(true / registers)[:, None] / 2.0**contents)
    up_to[:, -1] = 1.0
    probability = np.diff(up_to, prepend=0.0, axis=1)
    mean = (probability * 0.5**contents).sum(axis=1)
    variance = (probability * 0.25**contents).sum(axis=1) - mean**2
    raw = _alpha(registers) * registers / mean * (1.0 + variance / (registers * mean**2))
    return raw, true


def _precision(function: str) -> int:
    return int(computation.split_function(function)[1][0])


SKETCH = computation.Computation(
    parts=lambda _: [("sketch", pa.binary())],
    of_rows=lambda output, groups, rows: [
        sketches_of_rows(groups, _precision(output.function), computation.input_column(output, rows))
    ],
    merge=lambda output, groups, state: [merged_sketches(groups, _precision(output.function), state[0])],
    result_type=lambda *_: pa.int64(),
    result=lambda _, arguments, __, state: estimates(int(arguments[0]), state[0]),
)


# ``percentile_approx``: DDSketch. A value belongs to a bucket by its logarithm, and a sketch counts the values of each.
#
# All values of a bucket are within the relative accuracy of its middle. Sketches merge by adding counts: neither the
# order nor the grouping of the values matters. Stored are the buckets in use, ascending, with their counts. After
# Masson, Rim and Lee, "DDSketch" (2019). Unlike there, no buckets are merged to bound their number: values between 1
# and a million have 691 of them at an accuracy of 1 %.


_BUCKETS = np.dtype([("code", "<i4"), ("count", "<u8")])
_FIRST_CODE = 1 << 29
"""Added to the number of a bucket of positive numbers, and subtracted with the number from that of negative ones."""
_INFINITE, _NAN = (1 << 31) - 2, (1 << 31) - 1
MILLION, BILLION = 1_000_000, 1_000_000_000


def quantile_sketches_of_rows(groups: computation.Groups, accuracy: float, column: pa.Array) -> pa.Array:
    """Return the sketch of the non-null values of each group; ``column`` has doubles."""
    mask = columns.null_mask(column)
    values = columns.fixed_values(column, np.dtype(np.float64))
    ids = groups.ids
    if mask is not None:
        ids, values = ids[~mask], values[~mask]
    return _counted(ids, _codes_of_values(values, accuracy), np.ones(len(ids), np.uint64), groups.num)


def merged_quantile_sketches(groups: computation.Groups, sketches: pa.Array) -> pa.Array:
    """Return one sketch for the sketches of each group."""
    buckets, lengths = _stored_buckets(sketches)
    return _counted(np.repeat(groups.ids, lengths), buckets["code"].astype(np.int64), buckets["count"], groups.num)


def quantiles(accuracy: float, percentages: list[float], sketches: pa.Array) -> list[pa.Array]:
    """Return for each percentage (0 to 1) the value below which that part of each sketch's values is; null without any.

    It is the middle of the bucket that has the value of rank ``percentage * (n - 1)``, rounded down.
    """
    buckets, lengths = _stored_buckets(sketches)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    totals = np.concatenate([[0], np.cumsum(buckets["count"].astype(np.int64))])
    num_values = totals[ends] - totals[begins]
    is_empty = num_values == 0
    middles = _middles(buckets["code"].astype(np.int64), accuracy)
    answers = []
    for percentage in percentages:
        # Exact, unlike a product of floats. In two parts: the product of both would leave 64 bits above nine billion
        # values, which a key gets in a day at 100,000 rows a second.
        billions, rest = np.divmod(np.maximum(num_values - 1, 0), BILLION)
        share = round(percentage * BILLION)
        rank = share * billions + share * rest // BILLION
        place = np.searchsorted(totals, totals[begins] + rank, "right") - 1
        place = np.minimum(place, max(0, len(middles) - 1))
        found = middles[place] if len(middles) else np.zeros(len(place))
        answers.append(columns.fixed_array(found, is_empty, pa.float64()))
    return answers


def _stored_buckets(sketches: pa.Array) -> tuple[npt.NDArray[Any], columns.Integers]:
    """Return the buckets of all sketches, and how many each sketch has; a null has none."""
    content, offsets = columns.binary_content(sketches.fill_null(b"") if sketches.null_count else sketches)
    return np.ascontiguousarray(content).view(_BUCKETS), np.diff(offsets) // _BUCKETS.itemsize


def _counted(ids: columns.Integers, codes: columns.Integers, counts: npt.NDArray[np.uint64], num: int) -> pa.Array:
    """Return the sketches of groups 0 to ``num`` - 1, from the codes that values of each group have."""
    keys = (ids << 32) + (codes + (1 << 31))
    order = np.argsort(keys)
    ordered = keys[order]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(ordered) else order
    buckets = np.empty(len(begins), _BUCKETS)
    buckets["code"] = codes[order][begins]
    buckets["count"] = np.add.reduceat(counts[order], begins) if len(begins) else 0
    sizes = np.bincount(ids[order][begins], minlength=num) * _BUCKETS.itemsize
    return columns.binary_array(buckets.view(np.uint8).reshape(-1), columns.offsets_of(sizes))


def _codes_of_values(values: columns.Doubles, accuracy: float) -> columns.Integers:
    """Return the codes of the buckets of values, in the order of the values; NaN is the greatest."""
    size = np.abs(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        number = np.ceil(np.log(size) / math.log((1 + accuracy) / (1 - accuracy)))
    is_plain = np.isfinite(values) & (size > 0)
    code = np.where(is_plain, np.where(is_plain, number, 0).astype(np.int64) + _FIRST_CODE, 0)
    code = np.where(np.isinf(values), _INFINITE, code)
    code = np.where(values < 0, -code, code)
    return np.where(np.isnan(values), _NAN, code)


def _middles(codes: columns.Integers, accuracy: float) -> columns.Doubles:
    """Return the values that stand for buckets."""
    gamma = (1 + accuracy) / (1 - accuracy)
    number = (np.abs(codes) - _FIRST_CODE).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        # Halves of the exponent, because the upper end of the greatest bucket may be above all doubles.
        size = np.exp(number / 2 * math.log(gamma)) * (2 / (1 + gamma)) * np.exp(number / 2 * math.log(gamma))
    middle = np.where(codes == 0, 0.0, np.sign(codes) * size)
    middle[codes == _INFINITE], middle[codes == -_INFINITE] = np.inf, -np.inf
    return np.where(codes == _NAN, np.nan, middle)


def _accuracy(arguments: computation.FunctionArguments) -> float:
    return int(arguments[0]) / MILLION


def _quantile_result(arguments: computation.FunctionArguments, sketches: pa.Array) -> pa.Array:
    form, *percentages = arguments[1:]
    answers = quantiles(_accuracy(arguments), [int(p) / BILLION for p in percentages], sketches)
    if form == "one":
        return answers[0]
    by_sketch = np.arange(len(answers) * len(sketches)).reshape(len(answers), -1).T.ravel()
    flat = pa.concat_arrays(answers).take(pa.array(by_sketch))
    offsets = np.arange(len(sketches) + 1, dtype=np.int64) * len(answers)
    return columns.list_array(flat, offsets, np.asarray(answers[0].is_null()), list_type(pa.float64(), None))


PERCENTILES = computation.Computation(
    parts=lambda _: [("buckets", pa.binary())],
    of_rows=lambda output, groups, rows: [
        quantile_sketches_of_rows(
            groups,
            _accuracy(computation.split_function(output.function)[1]),
            computation.input_column(output, rows).cast(pa.float64(), safe=False),
        )
    ],
    merge=lambda _, groups, state: [merged_quantile_sketches(groups, state[0])],
    result_type=lambda _, arguments, __: pa.float64() if arguments[1] == "one" else list_type(pa.float64(), None),
    result=lambda _, arguments, __, state: _quantile_result(arguments, state[0]),
)
