"""Wrong use of stores and providers is an error that says what there is (see ``test_provider_behaviour.py``)."""

import pyarrow as pa
import pytest

from backends import StateStore, StateStoreMetrics
from backends.exceptions import (
    InvalidStateStoreArgument,
    StoreClosedError,
    UnsupportedLocationError,
    VersionNotFoundError,
)
from tests.backends.providers.provider_cases import commit, shared

pytestmark = pytest.mark.in_turns("rocksdb", "file")


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_ended_store_cannot_be_used(provider, end):
    store = provider.get_store(0)
    store.put(b"a", b"1")
    pending = store.iterator()
    getattr(store, end)()
    store.abort()
    assert store.has_committed == (end == "commit") and store.version == 0 and store.id == provider.id
    assert isinstance(store.metrics, StateStoreMetrics)
    for use in (*uses(store).values(), lambda: next(pending)):
        with pytest.raises(StoreClosedError, match=f"version 0 was {end}"):
            use()


CHANGES = {"put", "remove", "put_many", "remove_many", "merge", "merge_many", "create_column_family", "commit"}


def uses(store):
    """A call of every method that an ended store must refuse."""
    key, keys = b"a", pa.array([b"a"])
    calls = {
        "get": lambda: store.get(key),
        "put": lambda: store.put(key, b"1"),
        "remove": lambda: store.remove(key),
        "get_range": lambda: store.get_range(key, None),
        "prefix_scan": lambda: store.prefix_scan(key),
        "iterator": store.iterator,
        "get_many": lambda: store.get_many(keys),
        "put_many": lambda: store.put_many(keys, keys),
        "remove_many": lambda: store.remove_many(keys),
        "scan": store.scan,
        "create_column_family": lambda: store.create_column_family("x"),
        "merge": lambda: store.merge(key, b"1", "list"),
        "merge_many": lambda: store.merge_many(keys, keys, "list"),
        "values_iterator": lambda: store.values_iterator(key, "list"),
        "commit": store.commit,
    }
    assert calls.keys() == StateStore.__abstractmethods__ - {"id", "version", "has_committed", "metrics", "abort"}
    return calls


def test_a_read_store_refuses_every_change(with_list):
    store = with_list.get_read_store(1)
    calls = uses(store)
    for name in CHANGES:
        with pytest.raises(StoreClosedError, match="read-only"):
            calls[name]()
    for name in calls.keys() - CHANGES:
        calls[name]()
    store.abort()
    assert with_list.latest_version() == 1


def uses_of_bytes(store, given):
    limits = (
        lambda: store.get_range(given, None),
        lambda: store.get_range(None, given, "list"),
        lambda: store.scan(None, given),
    )
    return (
        lambda: store.get(given),
        lambda: store.put(given, b"v"),
        lambda: store.put(b"k", given),
        lambda: store.remove(given),
        lambda: store.prefix_scan(given),
        lambda: store.values_iterator(given, "list"),
        lambda: store.merge(given, b"v", "list"),
        lambda: store.merge(b"k", given, "list"),
        lambda: store.put(b"k", given, "list"),
        lambda: store.remove(given, "list"),
        *(() if given is None else limits),
    )


def test_keys_and_values_are_bytes(with_list):
    store = with_list.get_store(1)
    for wrong in (None, "text", 1, bytearray(b"x")):
        for use in uses_of_bytes(store, wrong):
            with pytest.raises(InvalidStateStoreArgument, match="bytes"):
                use()
    for use in (
        lambda: store.put_many(pa.array([b"a", None]), pa.array([b"a", b"b"])),
        lambda: store.put_many(pa.array([b"a", b"b"]), pa.array([b"a", None])),
        lambda: store.get_many(pa.array([None], pa.binary())),
        lambda: store.remove_many(pa.array(["text"])),
        lambda: store.put_many(pa.array([b"a"]), pa.array([], pa.binary())),
        lambda: store.get_many([b"a"]),
        lambda: store.get_many(None),
        lambda: store.get_many(pa.array([None])),
        lambda: store.put_many(pa.array([b"a"]), pa.array([1])),
        lambda: store.merge_many(pa.array([b"a", None]), pa.array([b"a", b"b"]), "list"),
        lambda: store.merge_many(pa.array([b"a", b"b"]), pa.array([b"a", None]), "list"),
        lambda: store.merge_many(pa.array([b"a"]), pa.array([], pa.binary()), "list"),
        lambda: store.put_many(pa.array([b"a", b"b"]), pa.array([b"a", None]), "list"),
        lambda: store.remove_many(pa.array([None], pa.binary()), "list"),
    ):
        with pytest.raises(InvalidStateStoreArgument):
            use()
    assert list(store.iterator()) == list(store.iterator("list")) == []


def test_a_column_family_is_named_by_a_string(provider):
    store = provider.get_store(0)
    for wrong in (None, b"default", 1):
        for use in (store.iterator, lambda w: store.get(b"a", w), lambda w: store.put(b"a", b"1", w)):
            with pytest.raises(InvalidStateStoreArgument):
                use(wrong)


@shared
def test_errors_about_versions_name_the_existing_ones(provider):
    commit(provider, 0, a="1")
    commit(provider, 1, a="2")
    for version in (3, -1, 2**70, True, "1", None, 1.0):
        for open_store in (provider.get_store, provider.get_read_store, lambda v: provider.change_feed(0, v)):
            with pytest.raises(VersionNotFoundError, match="there are versions 0 to 2"):
                open_store(version)


def test_unsupported_locations_are_refused_with_the_remedy(open_provider):
    with pytest.raises(UnsupportedLocationError, match="state_location="):
        open_provider("webhdfs://nn/ck")
