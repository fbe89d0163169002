"""Groups rows by key: the distinct stored keys, and for each row the place of its key.

Only distinct keys are encoded and sorted. Rows are compared as integers (differences to the least value, or
dictionary codes); the integers of several columns are combined into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import Integers, Mask, binary_content, fixed_array, fixed_dtype, fixed_values, null_mask
from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys

# The order of values as integers, used for grouping, minimum and maximum, and ordered lists.
#
# The order is Spark's: NaN is the greatest number and equal to itself, -0.0 equals 0.0, strings compare by their
# bytes, structs and arrays by their fields and elements, with nulls first.


WORD = 8
MAX_WORDS = 6
"""The most words of eight bytes that keys are compared by; Arrow's sort, which reads bytes as needed, takes longer
keys.
"""
DENSE = 4
"""Integers whose span is at most this many times their number are counted in a table instead of a hash map."""
MAX_SPAN = 1 << 62
"""The least product of spans that ``combined`` refuses."""


def plain(column: pa.Array) -> pa.Array:
    """Return a column without a dictionary, and with timestamps in UTC regardless of the session's zone."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp("us", "UTC"))
    return column


def as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column in its declared type: Spark renames the fields of lists, and sets the session's zone in times."""
    column = plain(column)
    return column if column.type == kind else column.cast(kind)


def normalized(column: pa.Array) -> pa.Array:
    """Return a column whose equal values have the same bits: -0.0 becomes 0.0, and every NaN the same NaN."""
    if not pa.types.is_floating(column.type):
        return column
    return fixed_array(_normalized_floats(column), null_mask(column), column.type)


def _normalized_floats(column: pa.Array) -> npt.NDArray[Any]:
    floats = fixed_values(column, np.dtype(f"f{column.type.bit_width // 8}"))
    with np.errstate(invalid="ignore"):
        values: npt.NDArray[Any] = floats + floats.dtype.type(0)  # -0.0 becomes 0.0
    values[np.isnan(values)] = np.nan
    return values


def order_codes(column: pa.Array) -> Integers:
    """Return integers whose order and equality are those of the column's values; a null has any integer.

    Codes of two columns can be compared only if ``is_absolute`` is true of their type.
    """
    kind = column.type
    if pa.types.is_floating(kind):
        bits: npt.NDArray[Any] = _normalized_floats(column).view(np.int64 if kind.bit_width == 64 else np.int32)
        codes: npt.NDArray[Any] = np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)
        return codes.astype(np.int64)
    dtype = fixed_dtype(kind)
    if dtype is not None and is_absolute(kind):
        return fixed_values(column, dtype).astype(np.int64)
    if pa.types.is_decimal(kind):
        return _decimal_codes(column)
    if pa.types.is_nested(kind):
        column = encode_keys(pa.record_batch({"value": column}), np.zeros(len(column), np.uint16))
    encoded = column.dictionary_encode()
    ranks = np.empty(len(encoded.dictionary), np.int64)
    ranks[np.asarray(pc.sort_indices(encoded.dictionary))] = np.arange(len(ranks))
    if not len(ranks):
        return np.zeros(len(column), np.int64)
    ordered: Integers = ranks[fixed_values(encoded.indices, np.dtype(np.int32))]
    return ordered


def _decimal_codes(column: pa.Array) -> Integers:
    words = np.ascontiguousarray(fixed_values(column, np.dtype("V16"))).view(np.int64).reshape(-1, 2)
    lower, upper = words[:, 0], words[:, 1]
    if (upper == lower >> 63).all():
        small: Integers = lower.copy()
        return small
    return combined(*ranks_of(upper), *ranks_of(lower.view(np.uint64)))


def is_absolute(kind: pa.DataType) -> bool:
    """Return whether codes of this type mean the same in every column."""
    return fixed_dtype(kind) is not None and not pa.types.is_decimal(kind)


def is_greater(a: pa.Array, b: pa.Array) -> Mask:
    """Return, row by row, whether ``a`` is greater than ``b``; a null is less than any value."""
    no_a, no_b = null_mask(a), null_mask(b)
    if is_absolute(a.type):
        greater: Mask = order_codes(a) > order_codes(b)
    elif pa.types.is_nested(a.type):
        codes = order_codes(pa.concat_arrays([a, b]))
        greater = codes[: len(a)] > codes[len(a) :]
    else:
        compared = pc.greater(a, b)
        greater = np.asarray(compared.fill_null(False) if compared.null_count else compared)
    if no_b is not None:
        greater = greater | no_b
    return greater if no_a is None else greater & ~no_a


def lexical_order(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.intp]:
    """Return the order of rows by the first column, of equal ones by the second, and so on. Not stable.

    One column of 64 bits is sorted at a time, which numpy does with vector instructions. Stops at
    the column where all rows are distinct.
    """
    codes = columns[0]
    for following in columns[1:]:
        codes, distinct = ranks_of(codes)
        if distinct == len(codes):
            break
        codes = combined(codes, distinct, *ranks_of(following))
    return np.argsort(codes)


def ranks_of(codes: npt.NDArray[Any]) -> tuple[Integers, int]:
    """Return each code's place among the distinct codes, and the number of distinct codes."""
    order = np.argsort(codes)
    ordered = codes[order]
    is_new = np.empty(len(codes), np.bool_)
    is_new[:1] = False
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    ranks = np.empty(len(codes), np.int64)
    ranks[order] = np.cumsum(is_new)
    return ranks, int(is_new.sum()) + 1 if len(codes) else 0


def combined(first: Integers, first_span: int, second: Integers, second_span: int) -> Integers:
    """Return one code for each pair of codes, in the order of the pairs; codes are 0 to their span - 1.

    The product of the spans must be less than ``MAX_SPAN``.
    """
    assert first_span * second_span < MAX_SPAN
    return first * second_span + second


def byte_order(keys: pa.BinaryArray) -> npt.NDArray[np.intp] | None:
    """Return the order that sorts distinct keys by their bytes; None if they are sorted.

    No key may be the beginning of another, which is true of the keys that ``encode_keys`` makes.
    """
    if (words := _words(keys)) is None:
        order = np.asarray(pc.sort_indices(keys)).astype(np.intp)
        return None if (order == np.arange(len(order))).all() else order
    if not words or (len(words) == 1 and (words[0][1:] >= words[0][:-1]).all()):
        return None
    return lexical_order(words)


def _words(keys: pa.BinaryArray) -> list[npt.NDArray[np.uint64]] | None:
    """Return the bytes that differ between keys, as big-endian numbers; None if there are too many."""
    content, offsets = binary_content(keys)
    n = len(keys)
    lengths = np.diff(offsets)
    width = int(lengths.max(initial=0))
    if width > MAX_WORDS * WORD * 2:
        return None
    if len(content) == n * width:
        matrix = content.reshape(n, width)
    else:
        matrix = np.zeros((n, width), np.uint8)
        matrix[np.arange(width) < lengths[:, None]] = content
    differing = [i for i in range(width) if (matrix[:, i] != matrix[0, i]).any()]
    if len(differing) > MAX_WORDS * WORD:
        return None
    words = []
    for start in range(0, len(differing), WORD):
        word = np.zeros((n, WORD), np.uint8)
        for place, column in enumerate(differing[start : start + WORD]):
            word[:, place] = matrix[:, column]
        words.append(word.view(">u8").reshape(-1).astype(np.uint64))
    return words


@dataclass(frozen=True)
class RowGroups:
    """Rows by key. Row r has the key ``keys[ids[r]]``; the key's columns are row ``ids[r]`` of ``columns``."""

    keys: pa.BinaryArray
    """Distinct encoded keys, strictly ascending."""
    columns: pa.RecordBatch
    ids: Integers


def group_rows(rows: pa.RecordBatch, keys: pa.Schema, num_key_groups: int) -> RowGroups:
    """Return the rows by their columns ``keys``; stored keys begin with one of ``num_key_groups`` key groups."""
    columns = [as_type(rows.column(f.name), f.type) for f in keys]
    ids, at = distinct_rows(columns)
    picked = pa.array(at)
    distinct = pa.RecordBatch.from_arrays([c.take(picked) for c in columns], schema=keys)
    encoded = encode_keys(distinct, key_groups(distinct, num_key_groups))
    if (order := byte_order(encoded)) is None:
        return RowGroups(encoded, distinct, ids)
    places = pa.array(order)
    return RowGroups(encoded.take(places), distinct.take(places), _inverse(order)[ids])


def merge_keys(parts: Sequence[pa.BinaryArray]) -> tuple[pa.BinaryArray, Integers, Integers]:
    """Return the distinct keys of all parts, strictly ascending, and two arrays of places.

    The first has, for each key of the parts (one part after the other), its place among the distinct keys; the second,
    for each distinct key, the place of one such key in the parts.
    """
    keys = pa.concat_arrays(parts)
    ids, at = distinct_rows([keys])
    distinct = keys.take(pa.array(at))
    if (order := byte_order(distinct)) is None:
        return distinct, ids, at
    return distinct.take(pa.array(order)), _inverse(order)[ids], at[order]


def distinct_rows(columns: Sequence[pa.Array]) -> tuple[Integers, Integers]:
    """Return an id for each row, 0 to m - 1, equal for equal rows, and for each id one of its rows. Nulls are equal."""
    codes, span = _codes(columns[0])
    for column in columns[1:]:
        more, more_span = _codes(column)
        if span * more_span >= MAX_SPAN:
            codes, span = _compact(codes, span)
        if span * more_span >= MAX_SPAN:
            more, more_span = _compact(more, more_span)
        codes, span = combined(codes, span, more, more_span), span * more_span
    ids, count = _compact(codes, span)
    at = np.empty(count, np.int64)
    at[ids] = np.arange(len(ids))
    return ids, at


def _codes(column: pa.Array) -> tuple[Integers, int]:
    """Return integers from 0 to the span - 1, equal for equal values, and the span; null counts as one value."""
    kind = column.type
    if not len(column):
        return np.zeros(0, np.int64), 1
    if pa.types.is_struct(kind):
        mask = null_mask(column)
        codes, span = (np.zeros(len(column), np.int64), 1) if mask is None else (mask.astype(np.int64), 2)
        ids = distinct_rows([pa.array(codes), *(plain(child) for child in column.flatten())])[0]
        return ids, int(ids.max()) + 1
    if not is_absolute(kind):
        if pa.types.is_nested(kind):
            column = encode_keys(pa.record_batch({"key": column}), np.zeros(len(column), np.uint16))
        encoded = column.dictionary_encode(null_encoding="encode")
        return fixed_values(encoded.indices, np.dtype(np.int32)).astype(np.int64), len(encoded.dictionary)
    codes = order_codes(column)
    mask = null_mask(column)
    low, high = int(codes.min()), int(codes.max())
    if high - low + 2 >= MAX_SPAN:
        codes, span = _hashed(codes)
    else:
        codes, span = codes - low, high - low + 1
    if mask is not None:
        codes = np.where(mask, span, codes)
    return codes, span + 1


def _compact(codes: Integers, span: int) -> tuple[Integers, int]:
    """Return the codes as 0 to m - 1 without gaps, and m."""
    if span > DENSE * len(codes) + (1 << 10):
        return _hashed(codes)
    present = np.zeros(span, np.bool_)
    present[codes] = True
    places = np.flatnonzero(present)
    table = np.empty(span, np.int64)
    table[places] = np.arange(len(places))
    return table[codes], len(places)


def _hashed(codes: Integers) -> tuple[Integers, int]:
    encoded = pa.array(codes).dictionary_encode()
    return fixed_values(encoded.indices, np.dtype(np.int32)).astype(np.int64), len(encoded.dictionary)


def _inverse(order: npt.NDArray[np.intp]) -> Integers:
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return places
