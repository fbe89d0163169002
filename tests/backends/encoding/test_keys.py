"""Encoded keys: the order of bytes is the order of values, and the values come back.

Keys are sorted in Arrow's order, whatever prefix they share and however long they are.
"""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding import sorted_pairs as module
from backends.encoding.keys import decode_keys, encode_keys
from backends.encoding.sorted_pairs import key_order
from backends.exceptions import InvalidStateStoreArgument, SchemaMismatchError, UnsupportedTypeError
from tests.backends.strategies import LADDERS, LEAVES, batches, comparable, hide, kinds, normal, sort_key, values_of
from tests.effort import effort, examples


def encoded(values, kind, group=0):
    batch = pa.record_batch([pa.array(values, kind)], names=["k"])
    return encode_keys(batch, np.full(len(values), group, np.int32)).to_pylist()


@settings(deadline=None, max_examples=examples(25))
@pytest.mark.parametrize("kind", LEAVES, ids=str)
@given(data=st.data())
def test_order_of_bytes_is_order_of_values(kind, data):
    values = data.draw(st.lists(values_of(kind), min_size=2, max_size=6))
    keys = encoded(values, kind)
    for a, key_a in zip(values, keys, strict=True):
        for b, key_b in zip(values, keys, strict=True):
            assert (sort_key(a) < sort_key(b)) == (key_a < key_b), (a, b)
            assert (sort_key(a) == sort_key(b)) == (key_a == key_b), (a, b)


@settings(deadline=None, max_examples=examples(60))
@given(kinds(maps=False).flatmap(lambda t: st.tuples(st.just(t), st.lists(values_of(t), min_size=2, max_size=5))))
def test_order_holds_inside_structs_and_arrays(drawn):
    kind, values = drawn
    ordered = sorted(zip(encoded(values, kind), values, strict=True), key=lambda pair: pair[0])
    as_values = [sort_key(value) for _, value in ordered]
    assert as_values == sorted(as_values)


@settings(deadline=None, max_examples=examples(60))
@given(batches())
def test_columns_are_compared_one_after_the_other(batch):
    keys = encode_keys(batch, np.zeros(batch.num_rows, np.int32)).to_pylist()
    rows = list(map(sort_key, batch.to_pylist()))
    for row_a, key_a in zip(rows, keys, strict=True):
        for row_b, key_b in zip(rows, keys, strict=True):
            assert (row_a < row_b, row_a == row_b) == (key_a < key_b, key_a == key_b), (row_a, row_b)


@pytest.mark.parametrize("kind", LADDERS, ids=str)
def test_every_type_has_its_order_whatever_follows_it(kind):
    ladder = [None, *LADDERS[kind]]
    behind = pa.array([-128, None, 127] * len(ladder), pa.int8())
    steps = pa.array([value for value in ladder for _ in range(3)], kind)
    batch = pa.record_batch([steps, behind, steps], names=["a", "b", "c"])
    keys = encode_keys(batch, np.zeros(len(behind), np.int32))
    triples = list(zip(*[iter(keys.to_pylist())] * 3, strict=True))
    expected = [key for low, null, high in triples for key in (null, low, high)]
    assert all(a < b for a, b in pairwise(expected))
    decoded = decode_keys(keys, batch.schema)
    decoded.validate(full=True)
    assert comparable(decoded.to_pylist()) == comparable(batch.to_pylist())


@pytest.mark.parametrize("kind", LADDERS, ids=str)
def test_bytes_under_a_null_are_not_in_the_key(kind):
    values = LADDERS[kind][-2:]
    hidden = pa.record_batch([hide(values, kind, [True, False])], names=["k"])
    assert encode_keys(hidden, np.zeros(2, np.int32)).to_pylist() == encoded([None, values[1]], kind)


def test_arrays_of_many_lengths_round_trip():
    rng = np.random.default_rng(3)
    rows = [
        None if i % 7 == 0 else [[f"{i}\0{k}" for k in range(rng.integers(0, 40))] for _ in range(rng.integers(0, 5))]
        for i in range(200)
    ]
    kind = pa.list_(pa.list_(pa.string()))
    batch = pa.record_batch([pa.array(rows, kind), pa.array(range(200)), pa.array(rows, kind)], names=list("abc"))
    decoded = decode_keys(encode_keys(batch, np.zeros(200, np.int32)), batch.schema)
    decoded.validate(full=True)
    assert decoded.to_pylist() == batch.to_pylist()


@settings(deadline=None, max_examples=examples(60))
@given(batches())
def test_keys_round_trip(batch):
    groups = np.arange(batch.num_rows, dtype=np.int32) * 7
    keys = encode_keys(batch, groups)
    decoded = decode_keys(keys, batch.schema)
    decoded.validate(full=True)
    assert decoded.schema.types == batch.schema.types
    assert comparable(decoded.to_pylist()) == comparable(normal(batch.to_pylist()))
    assert [int.from_bytes(k[:2], "big") for k in keys.to_pylist()] == groups.tolist()
    doubled = pa.chunked_array([keys, keys.slice(1)]) if len(keys) else pa.chunked_array([], pa.binary())
    again = decode_keys(doubled, batch.schema).to_pylist()
    assert comparable(again) == comparable(normal(batch.to_pylist() + batch.to_pylist()[1:]))


def test_the_key_group_is_the_first_part_of_a_key():
    assert encoded([5], pa.int64(), group=1) < encoded([4], pa.int64(), group=2)
    assert encoded([7], pa.int8(), group=65535) == [b"\xff\xff\x01\x87"]


@pytest.mark.parametrize(
    ("bits", "values"),
    [
        (np.array([0xFFF8000000000001, 0x7FF0000000000123, 0x7FFFFFFFFFFFFFFF], np.uint64), np.float64),
        (np.array([0xFFC00001, 0x7F800123, 0x7FFFFFFF], np.uint32), np.float32),
    ],
    ids=["double", "float"],
)
def test_zeros_and_nans_are_one_key_each(bits, values):
    floats = pa.array(np.concatenate([np.array([0.0, -0.0, np.nan, np.inf], values), bits.view(values)]))
    keys = encode_keys(pa.record_batch([floats], names=["f"]), np.zeros(len(floats), np.int32)).to_pylist()
    assert keys[0] == keys[1]
    assert set(keys[4:]) == {keys[2]} and keys[2] > keys[3]


@pytest.mark.parametrize(
    ("kind", "value", "content"),
    [
        (pa.bool_(), True, "01"),
        (pa.int16(), -2, "7ffe"),
        (pa.int64(), 5, "8000000000000005"),
        (pa.float32(), 1.5, "bfc00000"),
        (pa.float64(), -1.5, "4007ffffffffffff"),
        (pa.date32(), dt.date(1969, 12, 31), "7fffffff"),
        (pa.timestamp("us"), dt.datetime(1970, 1, 1, 0, 0, 1), "80000000000f4240"),
        (pa.decimal128(9, 2), Decimal("-0.02"), "7ffffffffffffffffffffffffffffffe"),
        (pa.string(), "a\0ÿ", "6100ffc3bf0000"),
        (pa.binary(), b"\0", "00ff0000"),
        (pa.struct([("a", pa.int8()), ("b", pa.string())]), {"a": None, "b": "x"}, "000001780000"),
        (pa.list_(pa.string()), ["x", None], "01017800000100000000"),
    ],
    ids=str,
)
def test_the_bytes_stay_as_checkpoints_have_them(kind, value, content):
    assert [key.hex() for key in encoded([value], kind, group=258)] == ["010201" + content]


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


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (pa.int8(), "0180", "0780"),
        (pa.string(), "010000", "0161000162 0000"),
        (pa.string(), "010000", "0161"),
        (pa.list_(pa.int8()), "0101018100", "01010181010100"),
        (pa.list_(pa.int8()), "0101018100", "0101018102"),
        (pa.list_(pa.string()), "01010161000000", "010101610001620000 00"),
        (pa.list_(pa.string()), "01010161000000", "0101"),
        (pa.list_(pa.list_(pa.string())), "010101010161000000 00", "0101010101610000"),
    ],
    ids=str,
)
def test_the_broken_key_is_named(kind, good, bad):
    keys = pa.array([bytes.fromhex("0000" + key) for key in (good, good, bad, good)])
    schema = pa.schema([("k", kind)])
    assert decode_keys(keys.take([0, 1, 3]), schema).num_rows == 3
    for given_keys in (keys, keys.slice(0, 3)):
        with pytest.raises(SchemaMismatchError, match=r"Row 2 of the stored keys is not of the schema \[k: "):
            decode_keys(given_keys, schema)


@pytest.fixture
def few_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEYS_BY_COMPARISON", 2)
    monkeypatch.setattr(module, "COMPARED_BYTES", 12)


KEYS = {
    "of one length": lambda rng: rng.randbytes(11),
    "with few bytes that differ": lambda rng: b"user:" + bytes([rng.randrange(3), 7, rng.randrange(3)]) + b"x" * 20,
    "that differ behind what is looked at": lambda rng: b"a prefix of many bytes " + rng.randbytes(2),
    "of any length": lambda rng: rng.randbytes(rng.randint(0, 20)),
    "of zeros": lambda rng: b"\0" * rng.randint(0, 15),
    "that are others' beginnings": lambda rng: b"abcdefghijklm"[: rng.randint(0, 13)] + b"\0" * rng.randint(0, 2),
    "of little": lambda rng: bytes(rng.choices(b"\0\1\xff", k=rng.randint(0, 4))),
    "that are equal": lambda rng: b"the same key",
}


@pytest.mark.usefixtures("few_and_short")
@pytest.mark.parametrize("kind", KEYS)
def test_the_order_is_that_of_bytes_and_stable(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(effort(20, 300)):
        values = [KEYS[kind](rng) for _ in range(rng.choice([3, 10, 200]))]
        keys = pa.array([b"before", *values, b"behind"], pa.binary())[1:-1]
        for some in (keys, keys.take(pc.sort_indices(keys))):
            assert np.asarray(key_order(some)).tolist() == np.asarray(pc.sort_indices(some)).tolist()


@pytest.mark.usefixtures("few_and_short")
def test_no_keys_and_one() -> None:
    assert key_order(pa.array([], pa.binary())).to_pylist() == []
    assert key_order(pa.array([b"a"])).to_pylist() == [0]
