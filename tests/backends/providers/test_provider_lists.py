"""Values that are lists: appended to, replaced, scanned (see ``test_provider_behaviour.py``)."""

import pyarrow as pa
import pytest

from backends.exceptions import (
    InvalidStateStoreArgument,
)
from tests.backends.providers.provider_cases import content, elements

pytestmark = pytest.mark.in_turns("rocksdb", "file")


def test_lists_are_appended_to_in_order(with_list, open_provider):
    expected = {}
    for version in range(1, 300, 60):
        store = with_list.get_store(version if version == 1 else with_list.latest_version())
        for key, value in ((b"a", b"1"), (b"a\x00", b"2"), (b"", b"3"), (b"a", b"%d" % version), (b"\xff", b"")):
            store.merge(key, value, "list")
            expected.setdefault(key, []).append(value)
        keys = [b"bulk", b"a", b"bulk"]
        store.merge_many(pa.array(keys), pa.array([b"x", b"y", b"z"]), "list")
        for key, value in zip(keys, (b"x", b"y", b"z"), strict=True):
            expected.setdefault(key, []).append(value)
        assert elements(store) == expected
        assert [k for k, _ in store.iterator("list")] == sorted(k for k, v in expected.items() for _ in v)
        store.commit()
    reopened = open_provider()
    store = reopened.get_store(reopened.latest_version())
    assert elements(store) == expected
    assert list(store.values_iterator(b"none", "list")) == []
    assert {k for k, _ in store.prefix_scan(b"a", "list")} == {b"a", b"a\x00"}
    assert {k for k, _ in store.get_range(b"a\x00", b"bulk\x00", "list")} == {b"a\x00", b"bulk"}
    assert sum(len(b) for b in store.scan(column_family="list")) == sum(map(len, expected.values()))


def test_lists_are_replaced_removed_and_rolled_back(with_list):
    store = with_list.get_store(1)
    for value in (b"1", b"2"):
        store.merge(b"a", value, "list")
        store.merge(b"b", value, "list")
    store.commit()
    store = with_list.get_store(2)
    store.put(b"a", b"only", "list")
    store.merge(b"a", b"more", "list")
    store.remove(b"b", "list")
    store.put_many(pa.array([b"c", b"c"]), pa.array([b"1", b"2"]), "list")
    assert elements(store) == {b"a": [b"only", b"more"], b"c": [b"2"]}
    store.commit()
    assert elements(with_list.get_read_store(2)) == {b"a": [b"1", b"2"], b"b": [b"1", b"2"]}
    store = with_list.get_store(2)  # version 3 is made again
    store.merge(b"a", b"3", "list")
    store.remove_many(pa.array([b"b", b"none"]), "list")
    store.commit()
    assert elements(with_list.get_store(3)) == {b"a": [b"1", b"2", b"3"]}


def test_lists_under_keys_with_zero_bytes_are_scanned_in_order(with_list):
    keys = [
        b"",
        b"\x00",
        b"\x00\x00",
        b"\x00\xff",
        b"a",
        b"a\x00",
        b"a\x00\x00",
        b"a\x00\x01",
        b"a\x01",
        b"a\xff",
        b"\xff",
    ]
    for version in (1, 2):
        store = with_list.get_store(version)
        store.merge_many(pa.array(keys[::-1]), pa.array([b"%d" % version] * len(keys)), "list")
        values = [b"%d" % v for v in range(1, version + 1)]
        pairs = [(k, v) for k in keys for v in values]
        assert list(store.iterator("list")) == pairs
        for key in keys:
            assert list(store.values_iterator(key, "list")) == values
            assert list(store.prefix_scan(key, "list")) == [p for p in pairs if p[0].startswith(key)]
            for end in (None, *keys):
                inside = [p for p in pairs if p[0] >= key and (end is None or p[0] < end)]
                assert list(store.get_range(key, end, "list")) == inside
        store.commit()
        assert store.metrics.num_keys == len(pairs)
    store = with_list.get_store(3)
    store.remove(b"a", "list")
    store.put_many(pa.array([b"\x00", b"b", b"\x00"]), pa.array([b"x", b"y", b"z"]), "list")
    left = {k: [b"1", b"2"] for k in keys if k != b"a"} | {b"\x00": [b"z"], b"b": [b"y"]}
    assert elements(store) == left
    store.commit()
    assert elements(with_list.get_read_store(4)) == left
    assert elements(with_list.get_read_store(3)) == {k: [b"1", b"2"] for k in keys}


def test_lists_and_single_values_are_not_mixed_up(with_list):
    store = with_list.get_store(1)
    for use in (
        lambda: store.get(b"a", "list"),
        lambda: store.get_many(pa.array([b"a"]), "list"),
        lambda: store.create_column_family("list"),
        lambda: store.create_column_family("map", use_multiple_values_per_key=True),
        lambda: store.create_column_family("default", use_multiple_values_per_key=True),
        lambda: store.merge(b"a", b"1", "map"),
        lambda: store.merge(b"a", b"1"),
        lambda: store.merge_many(pa.array([b"a"]), pa.array([b"a"]), "map"),
        lambda: store.values_iterator(b"a", "map"),
        lambda: store.merge(b"a", None, "list"),
        lambda: store.merge(None, b"a", "list"),
        lambda: store.get(b"a", "list!list"),
        lambda: store.put(b"a", b"1", "other"),
    ):
        with pytest.raises(InvalidStateStoreArgument):
            use()
    assert elements(store) == {} and content(store, "map") == {}
