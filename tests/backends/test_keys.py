"""Encoded keys: the order of bytes is the order of values, and the values come back."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.exceptions import InvalidStateStoreArgument, SchemaMismatchError, UnsupportedTypeError
from backends.keys import decode_keys, encode_keys
from tests.backends.strategies import LEAVES, batches, kinds, normal, sort_key, values_of


def encoded(values, kind, group=0):
    batch = pa.record_batch([pa.array(values, kind)], names=["k"])
    return encode_keys(batch, np.full(len(values), group, np.int32)).to_pylist()


@settings(deadline=None, max_examples=40)
@pytest.mark.parametrize("kind", LEAVES, ids=str)
@given(data=st.data())
def test_order_of_bytes_is_order_of_values(kind, data):
    values = data.draw(st.lists(values_of(kind), min_size=2, max_size=6))
    keys = encoded(values, kind)
    for a, key_a in zip(values, keys, strict=True):
        for b, key_b in zip(values, keys, strict=True):
            assert (sort_key(a) < sort_key(b)) == (key_a < key_b), (a, b)
            assert (sort_key(a) == sort_key(b)) == (key_a == key_b), (a, b)


@settings(deadline=None, max_examples=80)
@given(kinds(maps=False).flatmap(lambda t: st.tuples(st.just(t), st.lists(values_of(t), min_size=2, max_size=5))))
def test_order_holds_inside_structs_and_arrays(drawn):
    kind, values = drawn
    ordered = sorted(zip(encoded(values, kind), values, strict=True), key=lambda pair: pair[0])
    as_values = [sort_key(value) for _, value in ordered]
    assert as_values == sorted(as_values)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(values_of(pa.string()), values_of(pa.int16()), values_of(pa.binary())), max_size=6))
def test_columns_are_compared_one_after_the_other(rows):
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    arrays = [pa.array(c, t) for c, t in zip(columns, (pa.string(), pa.int16(), pa.binary()), strict=True)]
    keys = encode_keys(pa.record_batch(arrays, names=list("abc")), np.zeros(len(rows), np.int32)).to_pylist()
    by_key = [row for _, row in sorted(zip(keys, rows, strict=True), key=lambda pair: pair[0])]
    assert [tuple(map(sort_key, r)) for r in by_key] == sorted(tuple(map(sort_key, r)) for r in rows)


@settings(deadline=None, max_examples=80)
@given(batches())
def test_keys_come_back(batch):
    groups = np.arange(batch.num_rows, dtype=np.int32) * 7
    keys = encode_keys(batch, groups)
    decoded = decode_keys(keys, batch.schema)
    decoded.validate(full=True)
    assert decoded.schema.types == batch.schema.types
    assert normal(decoded.to_pylist()) == normal(batch.to_pylist())
    assert [int.from_bytes(k[:2], "big") for k in keys.to_pylist()] == groups.tolist()
    doubled = pa.chunked_array([keys, keys.slice(1)]) if len(keys) else pa.chunked_array([], pa.binary())
    again = decode_keys(doubled, batch.schema).to_pylist()
    assert normal(again) == normal(batch.to_pylist() + batch.to_pylist()[1:])


def test_the_key_group_comes_first():
    assert encoded([5], pa.int64(), group=1) < encoded([4], pa.int64(), group=2)
    assert encoded([7], pa.int8(), group=65535) == [b"\xff\xff\x01\x87"]


def test_zeros_and_nans_are_one_key_each():
    negative_nan = np.array([0xFFF8000000000001], np.uint64).view(np.float64)
    values = pa.array(np.concatenate([[0.0, -0.0, np.nan], negative_nan]))
    keys = encode_keys(pa.record_batch([values], names=["f"]), np.zeros(4, np.int32)).to_pylist()
    assert keys[0] == keys[1] and keys[2] == keys[3]
    assert keys[3] > encoded([float("inf")], pa.float64())[0]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_other_forms_of_a_type_give_the_same_keys(kind):
    values = ["b", None, "", "b\x00c"]
    given_form = pa.record_batch([pa.array(values, pa.string()).cast(kind)], names=["k"]).slice(1)
    keys = encode_keys(given_form, np.zeros(3, np.int64))
    assert keys.to_pylist() == encoded(values[1:], pa.string())
    assert decode_keys(keys, given_form.schema).column(0).to_pylist() == values[1:]


def test_unsupported_types_are_named():
    with pytest.raises(UnsupportedTypeError, match=r"'m'.*map<"):
        encoded_map = pa.record_batch([pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))], names=["m"])
        encode_keys(encoded_map, np.zeros(1, int))
    with pytest.raises(UnsupportedTypeError, match=r"'u'.*uint64"):
        encode_keys(pa.record_batch([pa.array([1], pa.uint64())], names=["u"]), np.zeros(1, int))


def test_wrong_groups_are_refused():
    batch = pa.record_batch({"k": [1, 2]})
    with pytest.raises(InvalidStateStoreArgument, match="2 rows came with 1"):
        encode_keys(batch, np.zeros(1, int))
    with pytest.raises(InvalidStateStoreArgument, match="65535, not 0 to 65536"):
        encode_keys(batch, np.array([0, 65536]))


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.string(), pa.struct([("a", pa.string())]), pa.list_(pa.int8())], ids=str
)
@pytest.mark.parametrize(
    "key", [b"", b"\x00\x00\x01", b"\x00\x00\x01abc", b"\x00\x00\x01abcdefgh\x00\x00\x00", b"\x00\x00\x07" * 9]
)
def test_bytes_of_another_schema_are_refused(kind, key):
    with pytest.raises(SchemaMismatchError, match="not of the schema"):
        decode_keys(pa.array([key]), pa.schema([("k", kind)]))
