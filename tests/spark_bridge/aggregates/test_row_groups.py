"""Grouping rows by key: distinct keys as they are stored, sorted, and each row's place among them."""

from __future__ import annotations

import math
from datetime import date, datetime, timezone
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from spark_bridge.aggregates.row_groups import byte_order, group_rows, lexical_order, merge_keys
from tests.effort import examples

WINDOW = pa.struct([("start", pa.timestamp("us", "UTC")), ("end", pa.timestamp("us", "UTC"))])
TIMES = st.sampled_from([datetime(2024, 1, 1, tzinfo=timezone.utc), datetime(1969, 1, 1, 5, tzinfo=timezone.utc)])
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "long": (pa.int64(), st.integers(-3, 3) | st.sampled_from([-(2**63), 2**63 - 1, 2**40])),
    "byte": (pa.int8(), st.integers(-128, 127)),
    "flag": (pa.bool_(), st.booleans()),
    "double": (pa.float64(), st.sampled_from([0.0, -0.0, math.nan, -math.inf, 1.5, -1.5])),
    "float": (pa.float32(), st.sampled_from([0.0, -0.0, math.nan, math.inf, 1.5, -1.5])),
    "text": (pa.string(), st.text(max_size=2) | st.sampled_from(["user-1000001", "user-1000002", "x" * 200])),
    "bytes": (pa.binary(), st.binary(max_size=3)),
    "money": (pa.decimal128(20, 2), st.integers(-5, 5).map(lambda n: Decimal(n).scaleb(-2))),
    "day": (pa.date32(), st.sampled_from([date(2024, 2, 29), date(1960, 1, 1)])),
    "window": (WINDOW, st.fixed_dictionaries({"start": TIMES, "end": st.none() | TIMES})),
    "list": (pa.list_(pa.int32()), st.lists(st.none() | st.integers(0, 2), max_size=3)),
}


@st.composite
def key_batches(draw: st.DrawFn) -> pa.RecordBatch:
    names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3, unique=True))
    n = draw(st.integers(0, 25))
    columns = [
        pa.array(draw(st.lists(st.none() | KINDS[c][1], min_size=n, max_size=n)), KINDS[c][0], from_pandas=False)
        for c in names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([(c, KINDS[c][0]) for c in names]))


@settings(max_examples=examples(150), deadline=None)
@given(key_batches(), st.integers(0, 5))
def test_rows_are_grouped_as_their_encoded_keys_are(batch: pa.RecordBatch, offset: int) -> None:
    batch = batch.slice(min(offset, batch.num_rows))
    encoded = encode_keys(batch, key_groups(batch, 8))
    found = group_rows(batch, batch.schema, 8)
    assert found.keys.to_pylist() == sorted(set(encoded.to_pylist()))
    assert found.keys.take(pa.array(found.ids)).equals(encoded)
    assert encode_keys(found.columns, key_groups(found.columns, 8)).equals(found.keys)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(key_batches(), min_size=1, max_size=1), st.lists(st.integers(0, 25), max_size=3))
def test_keys_of_several_parts_are_merged_sorted(batches: list[pa.RecordBatch], cuts: list[int]) -> None:
    (batch,) = batches
    bounds = sorted([0, *(min(c, batch.num_rows) for c in cuts), batch.num_rows])
    pieces = [batch.slice(a, b - a) for a, b in pairwise(bounds)]
    parts = [group_rows(p, p.schema, 8).keys for p in pieces]
    keys, ids, at = merge_keys(parts)
    every = pa.concat_arrays(parts)
    assert keys.to_pylist() == sorted(set(every.to_pylist()))
    assert keys.take(pa.array(ids)).equals(every)
    assert every.take(pa.array(at)).equals(keys)


@pytest.mark.parametrize("width", [1, 3, 8, 9, 20, 48, 60, 200])
def test_keys_of_any_length_are_sorted_by_their_bytes(width: int) -> None:
    draw = np.random.default_rng(width)
    # Ended by zeros as encoded strings are, none the beginning of another.
    texts = {bytes(draw.integers(1, 4, draw.integers(0, width + 1), np.uint8)) + b"\0\0" for _ in range(500)}
    keys = pa.array(draw.permutation(np.array(sorted(texts), object)), pa.binary())
    order = byte_order(keys)
    assert (keys if order is None else keys.take(pa.array(order))).to_pylist() == sorted(texts)
    assert byte_order(pa.array(sorted(texts), pa.binary())) is None or width > 6


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2)] * 3), max_size=30))
def test_rows_are_sorted_by_the_first_column_and_ties_by_the_next(rows: list[tuple[int, int, int]]) -> None:
    columns = [np.array([r[i] for r in rows], np.int64) for i in range(3)]
    assert [rows[i] for i in lexical_order(columns)] == sorted(rows)


def test_one_key_many_rows_and_no_rows_at_all() -> None:
    schema = pa.schema([("k", pa.int64())])
    one = group_rows(pa.record_batch({"k": pa.array([7] * 1000)}), schema, 8)
    assert len(one.keys) == 1
    assert not one.ids.any()
    none = group_rows(pa.record_batch({"k": pa.array([], pa.int64())}), schema, 8)
    assert len(none.keys) == len(none.ids) == none.columns.num_rows == 0
