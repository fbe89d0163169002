"""The change feed between two versions of a provider (see ``test_provider_behaviour.py``)."""

import random

import pytest

from backends.exceptions import (
    InvalidStateStoreArgument,
    VersionNotFoundError,
)
from tests.backends.providers.provider_cases import SOON, changes, commit, elements, shared

pytestmark = pytest.mark.in_turns("rocksdb", "file")


def test_change_feed_has_before_and_after_in_order(with_list):
    commit(with_list, 1, a="1", b="1")
    commit(with_list, 2, c="1", a="2")
    store = with_list.get_store(3)
    store.remove(b"a")
    store.merge(b"k", b"e", "list")
    store.put(b"a", b"1", "map")
    store.commit()
    commit(with_list, 4, a="3")
    assert changes(with_list, 1, 5) == [
        (2, "default", b"a", None, b"1"),
        (2, "default", b"b", None, b"1"),
        (3, "default", b"a", b"1", b"2"),
        (3, "default", b"c", None, b"1"),
        (4, "default", b"a", b"2", None),
        (4, "list", b"k", None, b"e"),
        (4, "map", b"a", None, b"1"),
        (5, "default", b"a", None, b"3"),
    ]
    assert changes(with_list, 3, 3) == []
    assert [row[0] for row in changes(with_list, 2, 4)] == [3, 3, 4, 4, 4]
    with pytest.raises(InvalidStateStoreArgument, match="from_version=4"):
        with_list.change_feed(4, 2)
    with pytest.raises(VersionNotFoundError):
        with_list.change_feed(4, 9)


@shared
def test_a_feed_applied_to_a_version_gives_the_other(with_list):
    versions = [None, {"default": {}, "list": {}}]
    rng = random.Random(5)
    for version in range(1, 7):
        store = with_list.get_store(version)
        for key in rng.sample([b"a", b"b", b"c", b"d"], 3):
            if rng.random() < 0.5:
                store.remove(key)
            else:
                store.put(key, b"%d" % version)
            store.merge(key, b"%d" % version, "list")
            store.merge(key, b"again", "list")
            if rng.random() < 0.5:
                store.remove(rng.choice([b"a", b"b"]), "list")
        versions.append({"default": dict(store.iterator()), "list": elements(store)})
        store.commit()
    for first, last in ((1, 7), (1, 4), (4, 7), (6, 7), (5, 6)):
        default, lists = dict(versions[first]["default"]), {k: list(v) for k, v in versions[first]["list"].items()}
        for _, family, key, before, after in changes(with_list, first, last):
            if family == "default":
                assert default.pop(key, None) == before
                default |= {} if after is None else {key: after}
            elif after is not None:
                lists.setdefault(key, []).append(after)
            elif before is not None:  # else it was appended and removed in one version
                lists[key].remove(before)
        assert {"default": default, "list": {k: v for k, v in lists.items() if v}} == versions[last]


@shared
def test_a_feed_under_way_keeps_what_it_needs(open_provider):
    provider = open_provider(conf=SOON)
    for version in range(12):
        commit(provider, version, a=str(version))
        if version == 3:
            feed = provider.change_feed(3, 4)
        provider.do_maintenance()
    assert [row["after"] for batch in feed for row in batch.to_pylist()] == [b"3"]


@shared
def test_a_feed_of_all_keeps_what_it_needs(open_provider):
    provider = open_provider(conf=SOON)
    for version in range(12):
        commit(provider, version, a=str(version))
        if version == 3:
            feed = provider.change_feed(0, 4)
        provider.do_maintenance()
    assert [row["after"] for batch in feed for row in batch.to_pylist()] == [b"0", b"1", b"2", b"3"]
