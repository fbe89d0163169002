"""Encoded values: every type comes back exactly."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from backends.encoding.columns import from_spark_type
from backends.encoding.values import decode_values, encode_values
from backends.exceptions import InvalidStateStoreArgument, SchemaMismatchError, UnsupportedTypeError
from tests.backends.strategies import LADDERS, batches, comparable, hide
from tests.effort import examples


@settings(deadline=None, max_examples=examples(60))
@given(batches(maps=True))
def test_values_round_trip(batch):
    values = encode_values(batch)
    decoded = decode_values(values, batch.schema)
    decoded.validate(full=True)
    assert decoded.schema.types == batch.schema.types
    assert comparable(decoded.to_pylist()) == comparable(batch.to_pylist())
    again = decode_values(pa.chunked_array([values.slice(1), values], pa.binary()), batch.schema)
    assert comparable(again.to_pylist()) == comparable(batch.to_pylist()[1:] + batch.to_pylist())


@pytest.mark.parametrize("n", [1, 2])
def test_decoded_rows_are_aligned_for_arrows_query_engine(n, capfd):
    """The fields of one stored row lie at odd places. ``group_by`` printed "An input buffer was poorly aligned"."""
    kinds = {"flag": pa.bool_(), "n": pa.int64(), "x": pa.float64(), "day": pa.date32(), "cost": pa.decimal128(20, 2)}
    rows = pa.table({name: pa.array([0] * n, pa.int64()).cast(pa.int32()).cast(kind) for name, kind in kinds.items()})
    texts = rows.append_column("text", [["some text"] * n]).append_column("list", [[[1, 2, 3]] * n])
    for table in (rows, texts):
        (batch,) = table.combine_chunks().to_batches()
        decoded = pa.Table.from_batches([decode_values(encode_values(batch), batch.schema)])
        assert decoded.equals(table)
        decoded.group_by("flag").aggregate([(name, "count") for name in decoded.column_names])
    assert "aligned" not in capfd.readouterr().err


def test_nulls_of_more_columns_than_a_byte_has_bits_round_trip():
    width = 20
    columns = [pa.array([None if row == i else row for row in range(width)], pa.int32()) for i in range(width)]
    batch = pa.RecordBatch.from_arrays(columns, names=[f"c{i}" for i in range(width)])
    assert decode_values(encode_values(batch), batch.schema).to_pylist() == batch.to_pylist()


@settings(deadline=None, max_examples=examples(30))
@given(batches(maps=True))
def test_a_missing_value_is_a_row_of_nulls(batch):
    values = encode_values(batch)
    mixed = pa.array([x for v in values.to_pylist() for x in (v, None)], pa.binary())
    decoded = decode_values(mixed, batch.schema)
    decoded.validate(full=True)
    nothing = dict.fromkeys(batch.schema.names)
    expected = [x for row in batch.to_pylist() for x in (row, nothing)]
    assert comparable(decoded.to_pylist()) == comparable(expected)


@settings(deadline=None, max_examples=examples(30))
@given(batches(maps=True))
def test_equal_rows_give_equal_bytes(batch):
    """The bytes under a null in Arrow's buffers do not matter."""
    again = pa.record_batch(
        [pa.array(column.to_pylist(), column.type) for column in batch.columns], names=batch.schema.names
    )
    assert encode_values(batch).equals(encode_values(again))


@pytest.mark.parametrize("kind", LADDERS, ids=str)
def test_every_type_round_trips(kind):
    values = [None, *LADDERS[kind], None]
    entries = [None, [], [("a\0", x) for x in values], [("", None)]]
    arrays = [pa.array(values, kind), pa.array([values, None, [], values[:2]], pa.list_(kind))]
    arrays.append(pa.array(entries, pa.map_(pa.string(), kind)))
    for array in arrays:
        batch = pa.record_batch([array, array], names=["a", "b"])
        decoded = decode_values(encode_values(batch), batch.schema)
        decoded.validate(full=True)
        assert comparable(decoded.to_pylist()) == comparable(batch.to_pylist())


def test_values_keep_the_bits_of_floats():
    bits = np.array([0xFFF8000000000001, 0x7FF0000000000123, 1 << 63, 0], np.uint64)
    batch = pa.record_batch([pa.array(bits.view(np.float64))], names=["v"])
    decoded = decode_values(encode_values(batch), batch.schema).column(0)
    assert decoded.to_numpy().view(np.uint64).tolist() == bits.tolist()


@pytest.mark.parametrize("kind", LADDERS, ids=str)
def test_bytes_under_a_null_are_not_stored(kind):
    values = LADDERS[kind][-2:]
    hidden, plain = hide(values, kind, [True, False]), pa.array([None, values[1]], kind)
    batches = [pa.record_batch([column], names=["v"]) for column in (hidden, plain)]
    assert encode_values(batches[0]).to_pylist() == encode_values(batches[1]).to_pylist()


def test_garbage_under_nulls_is_not_stored():
    column = pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(np.array([1, 99]))])
    values = encode_values(pa.record_batch([column], names=["v"])).to_pylist()
    assert values == [b"\x00\x00\x00" + (1).to_bytes(8, "little"), b"\x00\x00\x01" + bytes(8)]


def test_null_lists_with_elements_below_them():
    hidden = pa.ListArray.from_arrays(pa.array([0, 2, 3]), pa.array([1, 2, 3]), mask=pa.array([True, False]))
    batch = pa.record_batch([hidden], names=["v"])
    assert decode_values(encode_values(batch), batch.schema).column(0).to_pylist() == [None, [3]]


@pytest.mark.parametrize("is_null", [False, True])
def test_the_entries_of_maps_may_be_a_slice(is_null):
    kind = pa.map_(pa.string(), pa.int32())
    entries = pa.array([(key, i) for i, key in enumerate("xabc")], pa.struct([kind.key_field, kind.item_field]))
    offsets = pa.array([0, 1, 1 if is_null else 2, 3], pa.int32()).buffers()[1]
    mask = pa.array([True, not is_null, True]).buffers()[1]
    sliced = pa.Array.from_buffers(kind, 3, [mask, offsets], children=[entries.slice(1)])
    rows = pa.record_batch({"m": sliced})
    # Arrow's own Python values have the fault that this is about; a stream of batches has the entries.
    sent = pa.ipc.read_record_batch(rows.serialize(), rows.schema)
    values = [[("a", 1)], None if is_null else [("b", 2)], [("b", 2), ("c", 3)] if is_null else [("c", 3)]]
    assert sent.to_pydict() == {"m": values}
    assert decode_values(encode_values(rows), rows.schema).to_pydict() == {"m": values}


def test_the_schema_number_is_checked():
    batch = pa.record_batch({"v": [1]})
    stored = bytearray(encode_values(batch)[0].as_py())
    assert stored[:2] == b"\x00\x00"
    stored[0] = 1
    with pytest.raises(SchemaMismatchError, match="schema number 1"):
        decode_values(pa.array([bytes(stored)]), batch.schema)


@pytest.mark.parametrize("num_columns", [1, 7, 8, 9, 48, 49, 60])
def test_rows_without_nulls_are_those_with_them(num_columns):
    """The former take a shorter way; where the nulls of many columns go beyond a word, another one."""
    columns = {f"c{i}": pa.array([i, -i, 7], (pa.int8(), pa.int64(), pa.int32())[i % 3]) for i in range(num_columns)}
    batch = pa.record_batch(columns)
    assert decode_values(encode_values(batch), batch.schema).equals(batch)
    for column in (0, num_columns - 1):
        nulls = dict(columns)
        nulls[f"c{column}"] = pa.array([1, None, 7], columns[f"c{column}"].type)
        batch_with_null = pa.record_batch(nulls)
        assert decode_values(encode_values(batch_with_null), batch.schema).equals(batch_with_null)


def test_rows_of_an_earlier_schema_of_the_same_width_are_not_taken_for_the_newest():
    batch = pa.record_batch({"a": pa.array([1, 2, 3])})
    newest = pa.schema([("b", pa.int64())])
    stored = pa.concat_arrays([encode_values(batch, 0), encode_values(batch.rename_columns(["b"]), 1)])
    assert decode_values(stored, newest, [batch.schema]).column("b").to_pylist() == [None, None, None, 1, 2, 3]
    assert decode_values(stored[3:], newest, [batch.schema]).column("b").to_pylist() == [1, 2, 3]
    assert decode_values(stored[:3], newest, [batch.schema]).column("b").to_pylist() == [None, None, None]


def test_bytes_of_another_schema_are_refused():
    stored = encode_values(pa.record_batch({"a": [1, 2], "b": ["x", "yy"]}))
    for other in (
        pa.schema([("a", pa.int64())]),
        pa.schema([("a", pa.string())]),
        pa.schema([("a", pa.list_(pa.int8()))]),
    ):
        with pytest.raises(SchemaMismatchError, match=r"Row 0.*a: "):
            decode_values(stored, other)
    with pytest.raises(SchemaMismatchError, match="values"):
        decode_values(pa.array([b""]), pa.schema([("a", pa.int64())]))


def test_unsupported_types_are_named():
    with pytest.raises(UnsupportedTypeError, match=r"'s\.t'.*time64"):
        kind = pa.struct([("t", pa.time64("us"))])
        encode_values(pa.record_batch([pa.array([None], kind)], names=["s"]))
    with pytest.raises(UnsupportedTypeError, match=r"'d'.*duration"):
        decode_values(pa.array([], pa.binary()), pa.schema([("d", pa.duration("us"))]))


@pytest.mark.parametrize(
    ("spark", "remedy"),
    [
        ("interval day to second", "extract(DAY FROM i) * 86400L"),
        ("interval year to month", "extract(YEAR FROM i) * 12"),
        ("variant", "Cast the column"),
    ],
)
def test_types_of_spark_that_state_cannot_have_are_named_with_those_that_it_can(spark: str, remedy: str) -> None:
    struct = {"type": "struct", "fields": [{"name": "took", "type": spark, "nullable": True, "metadata": {}}]}
    for one in (spark, struct):
        with pytest.raises(InvalidStateStoreArgument) as raised:
            from_spark_type(one)
        for words in (f"{spark!r} is not a type that state can have", "timestamp_ntz, decimal(p,s), array", remedy):
            assert words in str(raised.value)
    assert "Field 'took'" in str(raised.value)
