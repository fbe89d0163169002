"""Groups rows by key: the distinct stored keys, and for each row the place of its key.

Only distinct keys are encoded and sorted. Rows are told apart by integers (differences to the least value, or
dictionary codes); the integers of several columns are combined into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import Integers, fixed_values, null_mask
from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from spark_bridge.aggregates.column_order import DENSE, MAX_SPAN, byte_order, combined, is_absolute, order_codes, plain


@dataclass(frozen=True)
class RowGroups:
    """Rows by key. Row r has the key ``keys[ids[r]]``; the key's columns are row ``ids[r]`` of ``columns``."""

    keys: pa.BinaryArray
    """Distinct encoded keys, strictly ascending."""
    columns: pa.RecordBatch
    ids: Integers


def group_rows(rows: pa.RecordBatch, keys: pa.Schema, num_key_groups: int) -> RowGroups:
    """Return the rows by their columns ``keys``; stored keys begin with one of ``num_key_groups`` key groups."""
    columns = [_as_type(rows.column(f.name), f.type) for f in keys]
    ids, at = distinct_rows(columns)
    picked = pa.array(at)
    distinct = pa.RecordBatch.from_arrays([c.take(picked) for c in columns], schema=keys)
    encoded = encode_keys(distinct, key_groups(distinct, num_key_groups))
    order = byte_order(encoded)
    if order is None:
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
    order = byte_order(distinct)
    if order is None:
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
    """Return integers from 0 to the span - 1, equal for equal values, and the span; a null is a value of its own."""
    kind = column.type
    if not len(column):
        return np.zeros(0, np.int64), 1
    if pa.types.is_struct(kind):
        mask = null_mask(column)
        codes, span = (np.zeros(len(column), np.int64), 1) if mask is None else (mask.astype(np.int64), 2)
        ids = distinct_rows([pa.array(codes), *(plain(child) for child in column.flatten())])[0]
        return ids, int(ids.max()) + 1
    if not is_absolute(kind):
        encoded = _comparable(column).dictionary_encode(null_encoding="encode")
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


def _comparable(column: pa.Array) -> pa.Array:
    """Return the column, or for a nested type the bytes that stand for its values."""
    if not pa.types.is_nested(column.type):
        return column
    return encode_keys(pa.record_batch({"key": column}), np.zeros(len(column), np.uint16))


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


def _as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    column = plain(column)
    return column if column.type == kind else column.cast(kind)
