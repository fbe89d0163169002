"""Single keys and values: exactly what the columns give, or nothing."""

import datetime as dt
import math
from decimal import Decimal
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.schema import StateSchema
from backends.encoding.single_rows import KeyEncoder, ValueDecoder
from backends.encoding.values import encode_values
from backends.exceptions import InvalidStateStoreArgument, SchemaMismatchError
from tests.backends.strategies import BINARIES, LADDERS, LEAVES, STRINGS, comparable, values_of
from tests.effort import examples

NESTED = [pa.list_(pa.int8()), pa.struct([("a", pa.int8())])]
ZONES = [dt.timezone.utc, ZoneInfo("UTC"), ZoneInfo("Europe/London"), dt.timezone(dt.timedelta(hours=-5))]
DECIMALS = (
    st.decimals(allow_nan=True, allow_infinity=True)
    | st.decimals(-1000, 1000, places=2)
    | st.sampled_from(
        [Decimal(text) for text in ("1E+2", "1.500", "0.000", "-0", "0E-50", "0E+50", "1E+6", "9999999.99", "99999999")]
    )
)
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65) | st.integers(-200, 200),
    st.floats() | st.sampled_from([1e300, 1e-50, -1e-50, 1.0, 16777217.0]),
    DECIMALS,
    STRINGS | st.just("\ud800"),
    BINARIES,
    st.dates(),
    st.datetimes(),
    st.datetimes(timezones=st.sampled_from(ZONES)),
    st.integers(-200, 200).map(np.int64),
    st.lists(st.integers(), max_size=1),
)
"""Values that a caller may give for a key, whatever the column's type."""

leaf_kinds = st.sampled_from(list(LEAVES))
group_numbers = st.sampled_from([1, 2, 7, 1000, 1024, 1 << 16])


def schema_of(kinds):
    return pa.schema([(f"c{i}", kind) for i, kind in enumerate(kinds)])


def columnar_key(schema, num_groups, key):
    columns = [pa.array([value], field.type) for value, field in zip(key, schema, strict=True)]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    return encode_keys(batch, key_groups(batch, num_groups))[0].as_py()


@st.composite
def rows(draw, values, max_columns=6):
    kinds = draw(st.lists(leaf_kinds, min_size=1, max_size=max_columns))
    return schema_of(kinds), tuple(draw(values(kind)) for kind in kinds)


@settings(deadline=None, max_examples=examples(100))
@given(rows(values_of, 4), group_numbers)
def test_keys_are_those_of_the_columns(row, num_groups):
    schema, key = row
    assert KeyEncoder.of(schema, num_groups).encode(key) == columnar_key(schema, num_groups, key)


@pytest.mark.parametrize("kind", LEAVES, ids=str)
def test_each_value_likely_to_go_wrong(kind):
    schema = schema_of([kind])
    encoder = KeyEncoder.of(schema, 1000)
    for value in [None, *LADDERS[kind], *([-0.0, -1e-46] if pa.types.is_floating(kind) else [])]:
        expected = columnar_key(schema, 1000, (value,))
        assert encoder.encode((value,)) == encoder.encode(value) == expected, value


@settings(deadline=None, max_examples=examples(200))
@given(leaf_kinds, ANYTHING, group_numbers)
def test_values_that_columns_refuse_are_never_encoded(kind, value, num_groups):
    schema = schema_of([kind])
    encoded = KeyEncoder.of(schema, num_groups).encode((value,))
    if encoded is not None:
        assert encoded == columnar_key(schema, num_groups, (value,))


@settings(deadline=None, max_examples=examples(150))
@given(st.sampled_from([(1, 0), (9, 2), (9, 9), (18, 0), (19, 3), (38, 38), (5, -2)]), DECIMALS)
def test_decimals_of_any_scale(kind, value):
    schema = schema_of([pa.decimal128(*kind)])
    encoded = KeyEncoder.of(schema, 1024).encode(value)
    if encoded is not None:
        assert encoded == columnar_key(schema, 1024, (value,))


def test_all_usual_values_are_encoded():
    kinds = [pa.decimal128(9, 2), pa.timestamp("us", tz="UTC"), pa.timestamp("us", tz="UTC"), pa.float32()]
    utc = dt.datetime(2013, 1, 1, tzinfo=ZoneInfo("UTC"))
    key = (Decimal("1.5"), utc, utc.replace(tzinfo=None), 0.1)
    assert KeyEncoder.of(schema_of(kinds), 1024).encode(key) is not None


def test_keys_of_another_width_are_left_to_the_columns():
    one, two = (KeyEncoder.of(schema_of([pa.int64()] * n), 1024) for n in (1, 2))
    assert one.encode((1, 2)) is one.encode(()) is two.encode((1,)) is two.encode(1) is two.encode([1, 2]) is None


def test_other_keys_have_no_encoder():
    for kind in NESTED:
        assert KeyEncoder.of(schema_of([pa.int64(), kind]), 1024) is None
    assert KeyEncoder.of(pa.schema([]), 1024) is None
    with pytest.raises(InvalidStateStoreArgument, match="70000"):
        KeyEncoder.of(schema_of([pa.int64()]), 70_000)


@settings(deadline=None, max_examples=examples(100))
@given(rows(values_of, 10))
def test_values_are_those_of_the_columns(row):
    schema, values = row
    batch = pa.RecordBatch.from_arrays(
        [pa.array([value], field.type) for value, field in zip(values, schema, strict=True)], schema=schema
    )
    (stored,) = encode_values(batch).to_pylist()
    expected = StateSchema(pa.schema([]), schema).decode_values(pa.array([stored])).to_pylist()
    decoded = ValueDecoder.of(schema).decode(stored)
    assert list(decoded) == schema.names
    assert comparable(decoded) == comparable(expected[0])
    for name, value in expected[0].items():
        assert type(decoded[name]) is type(value)
        assert str(decoded[name]) == str(value) or math.isnan(value)
        if isinstance(value, dt.datetime):
            assert decoded[name].tzinfo is value.tzinfo


def test_values_that_python_has_no_object_for_are_left_to_the_columns():
    for kind, unit in ((pa.date32(), np.int32), (pa.timestamp("us"), np.int64)):
        schema = schema_of([kind])
        far = pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(np.array([np.iinfo(unit).max]))])
        (stored,) = encode_values(pa.RecordBatch.from_arrays([far], schema=schema)).to_pylist()
        assert ValueDecoder.of(schema).decode(stored) is None


@settings(deadline=None, max_examples=examples(100))
@given(rows(values_of, 4), st.data())
def test_damaged_values_are_left_to_the_columns_or_read_alike(row, data):
    schema, values = row
    batch = pa.RecordBatch.from_arrays(
        [pa.array([value], field.type) for value, field in zip(values, schema, strict=True)], schema=schema
    )
    stored = bytearray(encode_values(batch)[0].as_py())
    at = data.draw(st.integers(0, len(stored) - 1))
    kept = data.draw(st.sampled_from([len(stored), at, len(stored)]))
    stored[at] ^= data.draw(st.integers(1, 255))
    damaged = bytes(stored[:kept]) + data.draw(st.sampled_from([b"", b"", b"x"]))
    decoded = ValueDecoder.of(schema).decode(damaged)
    if decoded is not None:
        assert comparable(decoded) == comparable(
            StateSchema(pa.schema([]), schema).decode_values(pa.array([damaged])).to_pylist()[0]
        )


def test_rows_of_an_earlier_schema_are_left_to_the_columns():
    earlier, newest = schema_of([pa.int32()]), schema_of([pa.int64()])
    old, new = (
        encode_values(pa.record_batch([pa.array([7], s.field(0).type)], schema=s), n)[0].as_py()
        for n, s in enumerate([earlier, newest])
    )
    decoder = ValueDecoder.of(newest, [earlier])
    assert decoder.decode(old) is None
    assert decoder.decode(new) == {"c0": 7}


def test_other_values_have_no_decoder():
    for kind in (*NESTED, pa.map_(pa.string(), pa.int8())):
        assert ValueDecoder.of(schema_of([pa.int64(), kind])) is None
    assert ValueDecoder.of(pa.schema([])) is None
    assert ValueDecoder.of(pa.schema([("a", pa.int8()), ("a", pa.int8())])) is None


def test_bytes_that_are_not_a_row_are_left_to_the_columns():
    schema = schema_of([pa.string(), pa.int64()])
    for wrong in (b"", b"\0\0", bytes(15), bytes(14)):
        decoded = ValueDecoder.of(schema).decode(wrong)
        if decoded is None:
            with pytest.raises(SchemaMismatchError):
                StateSchema(pa.schema([]), schema).decode_values(pa.array([wrong]))
