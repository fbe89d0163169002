"""Ids, options and schemas: wrong ones are refused at once, with the value and the remedy."""

import pickle

import pyarrow as pa
import pytest
from hypothesis import given, settings

import backends
from backends import StateStoreConf, StateStoreId, StateStoreProviderId, exceptions
from backends.encoding.schema import StateSchema
from backends.exceptions import InvalidStateStoreArgument, UnsupportedTypeError
from tests.backends.strategies import batches
from tests.effort import examples


def test_public_names_exist():
    for name in backends.__all__:
        assert getattr(backends, name) is not None


def test_every_error_is_a_state_store_error_and_can_be_rebuilt_from_its_message():
    kinds = [k for k in vars(exceptions).values() if isinstance(k, type) and issubclass(k, Exception)]
    assert len(kinds) >= 14
    for kind in kinds:
        assert issubclass(kind, exceptions.StateStoreError)
        assert str(pickle.loads(pickle.dumps(kind("what was wrong")))) == "what was wrong"


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-x", "a b", "x" * 201, None, "a\n"])
def test_names_that_cannot_be_a_directory_are_refused(name):
    with pytest.raises(InvalidStateStoreArgument, match="operator"):
        StateStoreId("ck", name, 0)
    with pytest.raises(InvalidStateStoreArgument, match="store"):
        StateStoreId("ck", "op", 0, name)


@pytest.mark.parametrize("partition", [-1, "0", 1.0, True, None])
def test_partition_ids_are_ints(partition):
    with pytest.raises(InvalidStateStoreArgument, match="partition_id"):
        StateStoreId("ck", "op", partition)


def test_ids_compare_by_value():
    one = StateStoreProviderId(StateStoreId("ck", "op", 0), "run")
    assert one == StateStoreProviderId(StateStoreId("ck", "op", 0, "default"), "run")
    assert hash(one) == hash(StateStoreProviderId(StateStoreId("ck", "op", 0), "run"))
    assert one != StateStoreProviderId(StateStoreId("ck", "op", 0), "other")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("provider", "leveldb"),
        ("compression", "gzip"),
        ("fsync", 1),
        ("load_threads", 0),
        ("load_threads", True),
        ("rocksdb_row_cache_bytes", -1),
        ("rocksdb_block_cache_bytes", 0),
        ("rocksdb_memtable_bytes", "1MB"),
        ("rocksdb_bloom_filter_bits", -1),
    ],
)
def test_wrong_options_are_refused_with_name_and_value(option, value):
    with pytest.raises(InvalidStateStoreArgument, match=f"{option}.*{value!r}"):
        StateStoreConf(**{option: value})


@settings(deadline=None, max_examples=examples(60))
@given(batches(maps=True))
def test_schemas_round_trip_through_json(batch):
    schema = StateSchema(pa.schema([("k", pa.int64())]), batch.schema)
    again = StateSchema.from_json(schema.to_json())
    assert again == schema and again.id == schema.id
    assert again.value.types == batch.schema.types


def test_schemas_are_written_in_sparks_names():
    kinds = [
        ("a", pa.int8(), "byte"),
        ("b", pa.large_string(), "string"),
        ("c", pa.timestamp("us", tz="Europe/Berlin"), "timestamp"),
        ("d", pa.timestamp("us"), "timestamp_ntz"),
        ("e", pa.decimal128(10, 2), "decimal(10,2)"),
    ]
    written = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([(n, t) for n, t, _ in kinds])).to_json()
    for name, _, spark in kinds:
        assert f'{{"metadata":{{}},"name":"{name}","nullable":true,"type":"{spark}"}}' in written
    assert StateSchema.from_json(written).value.field("c").type == pa.timestamp("us", tz="UTC")


def test_schema_ids_depend_on_names_types_and_order():
    def made(*fields):
        return StateSchema(pa.schema([("k", pa.int64())]), pa.schema(fields)).id

    ids = [
        made(("a", pa.int64())),
        made(("b", pa.int64())),
        made(("a", pa.int32())),
        made(("a", pa.int64()), ("b", pa.int64())),
        made(("b", pa.int64()), ("a", pa.int64())),
    ]
    assert len(set(ids)) == len(ids)
    assert made(("a", pa.string())) == made(("a", pa.large_string()))


def test_unsupported_types_are_refused_when_the_schema_is_made():
    value = pa.schema([("v", pa.int64())])
    with pytest.raises(UnsupportedTypeError, match=r"'k'.*uint8"):
        StateSchema(pa.schema([("k", pa.uint8())]), value)
    with pytest.raises(UnsupportedTypeError, match=r"'k\.m'.*map"):
        StateSchema(pa.schema([("k", pa.struct([("m", pa.map_(pa.string(), pa.int8()))]))]), value)
    with pytest.raises(InvalidStateStoreArgument, match="same name: v, v"):
        StateSchema(value, pa.schema([("v", pa.int64()), ("v", pa.int8())]))
    for text in ("", "{}", '{"key": {"fields": []}}', '{"key": {"fields": [1]}, "value": {"fields": []}}'):
        with pytest.raises(InvalidStateStoreArgument):
            StateSchema.from_json(text)
