"""What every provider must do, used alone: the contract of stores and providers (Spark: ``StateStoreSuiteBase``).

The cases of Spark's ``StateStoreSuiteBase`` and ``StateStoreSuite``, and where they are here:

    get, put, remove, commit, and all data iterator      test_versions_are_reloaded..., test_a_store_sees_its_own_writes...
    prefix scan                                          test_ranges_and_prefixes
    numKeys metrics                                      test_metrics, test_keys_are_counted_exactly
    removing while iterating                             test_removing_while_iterating
    abort                                                test_a_store_sees_its_own_writes..., test_an_ended_store_cannot_be_used
    getStore with invalid versions                       test_version_mistakes_say_what_there_is
    two concurrent StateStores - one for read-only ...   test_read_stores_stay_at_their_version_while_others_write
    retaining only two latest versions when MAX_...      test_versions_kept_in_memory_and_others_read_the_same
    failure after committing with MAX_VERSIONS_... = 1   test_a_version_may_be_made_again_from_its_base
    no cache data with MAX_VERSIONS_... set to 0         test_versions_kept_in_memory_and_others_read_the_same
    cleaning                                             test_maintenance_keeps_what_it_should_and_removes_the_rest
    snapshotting                                         test_a_snapshot_is_taken_when_it_is_due
    corrupted file handling                              test_corruption.py
    reports memory usage [on current version]            test_metrics
    expose metrics with custom metrics                   test_metrics
    StateStore.get, maintenance, unloadOnCommit          test_registry.py
    SPARK-21145: Restarted queries create new provider   test_registry.py
    SPARK-18342: commit fails when rename fails          test_a_failed_commit_changes_nothing
    SPARK-18416: do not create temp delta file until...  test_nothing_is_written_before_the_commit
    error writing [version].delta cancels the stream     test_a_failed_commit_changes_nothing, test_crash.py
    SPARK-35659: StateStore.put cannot put null value    test_keys_and_values_are_bytes
    colFamily operations, merge, valuesIterator          test_column_families, test_lists...
    readChangeFeed                                       test_change_feed...

Not here: cases about ``SparkEnv``, ``UnsafeRow`` formats and Hadoop's file manager, which have no counterpart.
A new provider joins by being added to ``PROVIDERS``.
"""

import os
import threading
import uuid
from pathlib import Path

import pyarrow as pa
import pytest

from backends import (
    FileStateStoreProvider,
    RocksDBStateStoreProvider,
    StateStoreConf,
    StateStoreId,
    StateStoreMetrics,
)
from backends.exceptions import (
    ConcurrentCommitError,
    InvalidStateStoreArgument,
    StorageError,
    StoreClosedError,
    UnsupportedLocationError,
    VersionNotFoundError,
)
from backends.local_files import LocalFiles
from backends.overlay import successor

from .third_provider import ThirdStateStoreProvider

PROVIDERS = [RocksDBStateStoreProvider, FileStateStoreProvider, ThirdStateStoreProvider]
CONF = StateStoreConf(fsync=False)


@pytest.fixture(params=PROVIDERS, ids=[p.backend for p in PROVIDERS])
def provider_class(request):
    return request.param


@pytest.fixture
def open_provider(provider_class, location):
    """Opens providers of the kind under test; closes them in the end."""
    made = []

    def opened(at=location, conf=CONF, **kwargs):
        made.append(provider_class(StateStoreId(at, "op", 0), conf, **kwargs))
        return made[-1]

    yield opened
    for provider in made:
        provider.close()


@pytest.fixture
def location(tmp_path):
    return str(tmp_path / "ck")


@pytest.fixture
def provider(open_provider):
    return open_provider()


def commit(provider, version, **pairs):
    store = provider.get_store(version)
    for key, value in pairs.items():
        if value is None:
            store.remove(key.encode())
        else:
            store.put(key.encode(), value.encode())
    return store.commit()


def content(store, column_family="default"):
    return {k.decode(): v.decode() for k, v in store.iterator(column_family)}


def test_versions_are_reloaded_from_nothing_but_the_checkpoint_location(provider, location, open_provider):
    assert provider.latest_version() == 0 and content(provider.get_store(0)) == {}
    assert commit(provider, 0, a="1", b="2") == 1
    assert commit(provider, 1, a=None, c="3") == 2
    assert commit(provider, 2) == 3  # nothing changed, still a version
    provider.close()
    again = open_provider(location)
    assert again.latest_version() == 3
    versions = [{}, {"a": "1", "b": "2"}, {"b": "2", "c": "3"}, {"b": "2", "c": "3"}]
    for version in (3, 1, 2, 0):
        store = again.get_store(version)
        assert (store.version, content(store)) == (version, versions[version])
    again.close()


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_other_locations(tmp_path, scheme, open_provider):
    location = f"memory://{uuid.uuid4().hex}" if scheme == "memory" else f"file://{tmp_path}/ck/"
    with open_provider(location) as first:
        commit(first, 0, a="1")
    with open_provider(location) as second:
        assert content(second.get_store(1)) == {"a": "1"}


def test_a_store_sees_its_own_writes_and_no_one_else_does(provider):
    commit(provider, 0, a="1", b="2", d="4")
    store = provider.get_store(1)
    store.put(b"c", b"3")
    store.put(b"a", b"new")
    store.remove(b"b")
    store.remove(b"never there")
    assert [store.get(k) for k in (b"a", b"b", b"c", b"d", b"e")] == [b"new", None, b"3", b"4", None]
    assert content(store) == {"a": "new", "c": "3", "d": "4"}
    assert list(store.get_range(b"b", b"d")) == [(b"c", b"3")]
    assert content(provider.get_store(1)) == content(provider.get_read_store(1)) == {"a": "1", "b": "2", "d": "4"}
    store.abort()
    store.abort()
    assert provider.latest_version() == 1 and not store.has_committed


def test_bulk_and_single_writes_keep_their_order(provider):
    store = provider.get_store(0)
    store.put(b"a", b"single")
    store.put_many(pa.array([b"b", b"a", b"b"]), pa.array([b"1", b"bulk", b"2"]))
    assert store.get_many(pa.array([b"b", b"a", b"x", b"b"])).to_pylist() == [b"2", b"bulk", None, b"2"]
    store.put(b"b", b"single")
    store.remove_many(pa.chunked_array([[b"a"], [b"zz"]], pa.binary()))
    assert list(store.iterator()) == [(b"b", b"single")]
    assert store.get(b"a") is None
    store.put_many(pa.array([], pa.binary()), pa.array([], pa.binary()))
    store.commit()
    assert content(provider.get_store(1)) == {"b": "single"}


def test_ranges_and_prefixes(provider):
    keys = [b"", b"a", b"a\x00", b"a\xff", b"a\xff\xff", b"b", b"\xff", b"\xff\xff", b"\xff\xff\x01"]
    store = provider.get_store(0)
    for key in keys[::2]:
        store.put(key, b"v")
    store.commit()
    store = provider.get_store(1)
    for key in keys[1::2]:
        store.put(key, b"v")
    assert [k for k, _ in store.iterator()] == sorted(keys)
    for prefix in (b"", b"a", b"a\xff", b"\xff", b"\xff\xff", b"c"):
        assert [k for k, _ in store.prefix_scan(prefix)] == sorted(k for k in keys if k.startswith(prefix))
    assert [k for k, _ in store.get_range(None, b"b")] == [b"", b"a", b"a\x00", b"a\xff", b"a\xff\xff"]
    assert list(store.get_range(b"b", b"b")) == list(store.get_range(b"c", b"b")) == []
    assert successor(b"a\xff") == b"b" and successor(b"\xff\xff") is None and successor(b"") is None


def test_column_families(provider, location, open_provider):
    store = provider.get_store(0)
    with pytest.raises(InvalidStateStoreArgument, match=r"'timers'.*create_column_family"):
        store.put(b"k", b"v", "timers")
    store.create_column_family("timers")
    store.create_column_family("timers")
    store.create_column_family("empty")
    store.put(b"k", b"timer", "timers")
    store.put(b"k", b"value")
    store.commit()
    for bad in ("__statestore__", "a/b", ""):
        with pytest.raises(InvalidStateStoreArgument):
            provider.get_store(1).create_column_family(bad)
    provider.close()
    with open_provider(location) as again:
        store = again.get_store(1)
        assert store.get(b"k", "timers") == b"timer" and store.get(b"k") == b"value"
        assert content(store, "empty") == {}
        store.create_column_family("timers")
        assert store.get_many(pa.array([b"k"]), "timers").to_pylist() == [b"timer"]
        with pytest.raises(InvalidStateStoreArgument, match="timers"):
            again.get_store(0).get(b"k", "timers")


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_ended_store_cannot_be_used(provider, end):
    store = provider.get_store(0)
    store.put(b"a", b"1")
    pending = store.iterator()
    getattr(store, end)()
    assert store.has_committed == (end == "commit") and store.version == 0
    assert isinstance(store.metrics, StateStoreMetrics)
    uses = (
        lambda: store.get(b"a"),
        lambda: store.put(b"a", b"1"),
        lambda: store.remove(b"a"),
        store.iterator,
        lambda: store.prefix_scan(b"a"),
        lambda: store.get_many(pa.array([b"a"])),
        lambda: store.put_many(pa.array([b"a"]), pa.array([b"a"])),
        lambda: store.create_column_family("x"),
        store.commit,
        lambda: next(pending),
    )
    for use in uses:
        with pytest.raises(StoreClosedError, match=f"version 0 was {end}"):
            use()


@pytest.mark.parametrize("wrong", [None, "text", 1, bytearray(b"x")])
def test_keys_and_values_are_bytes(provider, wrong):
    store = provider.get_store(0)
    for use in (
        lambda: store.get(wrong),
        lambda: store.put(wrong, b"v"),
        lambda: store.put(b"k", wrong),
        lambda: store.remove(wrong),
        lambda: store.prefix_scan(wrong),
    ):
        with pytest.raises(InvalidStateStoreArgument, match="bytes"):
            use()
    for use in (
        lambda: store.put_many(pa.array([b"a", None]), pa.array([b"a", b"b"])),
        lambda: store.put_many(pa.array([b"a", b"b"]), pa.array([b"a", None])),
        lambda: store.get_many(pa.array([None], pa.binary())),
        lambda: store.remove_many(pa.array(["text"])),
        lambda: store.put_many(pa.array([b"a"]), pa.array([], pa.binary())),
    ):
        with pytest.raises(InvalidStateStoreArgument):
            use()
    assert list(store.iterator()) == []


@pytest.mark.parametrize("version", [3, -1, 2**70, True, "1", None, 1.0])
def test_version_mistakes_say_what_there_is(provider, version):
    commit(provider, 0, a="1")
    commit(provider, 1, a="2")
    for open_store in (provider.get_store, provider.get_read_store):
        with pytest.raises(VersionNotFoundError, match="there are versions 0 to 2"):
            open_store(version)


def test_a_version_may_be_made_again_from_its_base(provider, location, open_provider):
    commit(provider, 0, a="1")
    commit(provider, 1, a="2", x="2")
    commit(provider, 2, a="3")
    old = provider.get_read_store(3)
    assert commit(provider, 1, a="other") == 2
    assert provider.latest_version() == 2
    assert content(provider.get_store(2)) == {"a": "other"}
    assert content(old) == {"a": "3", "x": "2"}
    with pytest.raises(VersionNotFoundError, match="0 to 2"):
        provider.get_store(3)
    with open_provider(location) as again:
        assert content(again.get_store(2)) == {"a": "other"}


def test_read_stores_stay_at_their_version_while_others_write(provider):
    stores = {0: provider.get_read_store(0)}
    for version in range(1, 6):
        commit(provider, version - 1, v=str(version))
        stores[version] = provider.get_read_store(version)
    for version, store in stores.items():
        expected = {"v": str(version)} if version else {}
        assert content(store) == expected and store.version == version
        assert content(provider.get_read_store(version)) == expected
        for change in (lambda s=store: s.put(b"a", b"1"), store.commit, lambda s=store: s.create_column_family("x")):
            with pytest.raises(StoreClosedError, match="read-only"):
                change()
    for store in stores.values():
        store.abort()


def test_a_second_commit_from_the_same_version_is_refused(provider):
    one, two = provider.get_store(0), provider.get_store(0)
    one.put(b"a", b"one")
    two.put(b"a", b"two")
    two.put(b"b", b"two")
    assert one.commit() == 1
    with pytest.raises(ConcurrentCommitError, match=r"Version 1 .* was not committed"):
        two.commit()
    assert not two.has_committed and two.get(b"a") == b"two"
    assert content(provider.get_store(1)) == {"a": "one"}


def test_of_two_providers_of_one_location_one_is_refused(provider, location, open_provider):
    commit(provider, 0, a="0")
    with open_provider(location) as other:
        mine, theirs = provider.get_store(1), other.get_store(1)
        mine.put(b"a", b"mine")
        theirs.put(b"a", b"theirs")
        assert theirs.commit() == 2
        with pytest.raises(ConcurrentCommitError, match="one writer"):
            mine.commit()
        assert content(provider.get_store(2)) == content(other.get_store(2)) == {"a": "theirs"}
        assert commit(provider, 2, a="after") == 3
        assert content(other.get_store(3)) == {"a": "after"}
    changelogs = list(Path(location).rglob("*.changelog"))
    assert len(changelogs) == 3, "the refused one is removed"


def test_racing_providers_never_mix(location, open_provider):
    providers = [open_provider(location) for _ in range(3)]
    results = []

    def work(i):
        for _ in range(10):
            version = providers[i].latest_version()
            try:
                store = providers[i].get_store(version)
                if providers[i].latest_version() != version:
                    continue  # made meanwhile by another: this would be rolling it back
                before = int(store.get(b"n") or b"0")
                assert before == version
                store.put(b"n", str(before + 1).encode())
                results.append(store.commit())
            except ConcurrentCommitError:
                continue

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(results) == list(range(1, len(results) + 1)), "every version was made once"
    assert content(providers[0].get_store(len(results))) == {"n": str(len(results))}
    for p in providers:
        p.close()


def test_two_providers_in_one_local_directory_are_refused(location, tmp_path, open_provider):
    with open_provider(location, local_dir=tmp_path / "local"), pytest.raises(ConcurrentCommitError, match="local"):
        open_provider(location, local_dir=tmp_path / "local")
    open_provider(location, local_dir=tmp_path / "local").close()


def test_a_failed_commit_changes_nothing(provider, location, monkeypatch):
    commit(provider, 0, a="1")
    store = provider.get_store(1)
    store.put(b"a", b"2")

    real = LocalFiles.put_new
    for suffix in (".changelog", ".json"):

        def fail(self, path, data, suffix=suffix):
            if path.endswith(suffix):
                raise OSError(28, "No space left on device")
            real(self, path, data)

        with monkeypatch.context() as patched:
            patched.setattr(LocalFiles, "put_new", fail)
            with pytest.raises(StorageError, match="No space left"):
                store.commit()
        assert not store.has_committed
        assert provider.latest_version() == 1 and content(provider.get_read_store(1)) == {"a": "1"}
    assert store.commit() == 2
    assert content(provider.get_store(2)) == {"a": "2"}


def test_metrics(provider):
    store = provider.get_store(0)
    store.put_many(pa.array([b"a", b"b", b"c"]), pa.array([b"1"] * 3))
    store.commit()
    assert store.metrics.num_keys == 3 and store.metrics.memory_bytes > 0
    assert store.metrics.custom["bytes_written"] > 0
    store = provider.get_store(1)
    store.remove(b"a")
    store.put(b"b", b"2")
    store.commit()
    assert store.metrics.num_keys == 2


def test_close_removes_temporary_files_and_is_final(location, open_provider):
    provider = open_provider(location)
    commit(provider, 0, a="1")
    commit(provider, 1, a="2")
    old, local = provider.get_read_store(0), provider._local_dir
    assert content(old) == {}
    store = provider.get_store(2)
    assert local.is_dir()
    provider.close()
    provider.close()
    assert not local.exists()
    for use in (lambda: provider.get_store(1), provider.latest_version, lambda: store.get(b"a"), lambda: old.get(b"a")):
        with pytest.raises(StoreClosedError):
            use()


def test_a_dropped_provider_leaves_no_directory(location, open_provider):
    provider = open_provider(location)
    local = provider._local_dir
    provider.close()
    del provider
    assert not local.exists()


def test_unsupported_locations_are_refused_with_the_remedy(open_provider):
    with pytest.raises(UnsupportedLocationError, match="state_location="):
        open_provider("hdfs://nn/ck")


def test_nothing_is_written_before_the_commit(provider, location):
    store = provider.get_store(0)
    store.put(b"a", b"1")
    store.put_many(pa.array([b"b"]), pa.array([b"2"]))
    assert not Path(location).exists()
    store.commit()
    assert len(list(Path(location).rglob("*.changelog"))) == len(list(Path(location).rglob("*.json"))) == 1


def test_only_changed_pairs_are_written(provider, location):
    store = provider.get_store(0)
    store.put_many(pa.array([b"%06d" % i for i in range(10_000)]), pa.array([b"%06d" % i for i in range(10_000)]))
    store.commit()
    commit(provider, 1, a="1")
    commit(provider, 2)
    sizes = {int(f.name.split("-")[0]): f.stat().st_size for f in Path(location).rglob("*.changelog")}
    assert sizes[1] > 20_000 and sizes[2] < 2_500 and sizes[3] < 2_500


def test_removing_while_iterating(provider):
    store = provider.get_store(0)
    keys = [b"%03d" % i for i in range(300)]
    for key in keys:
        store.put(key, b"v")
    store.commit()
    store = provider.get_store(1)
    seen = []
    for key, _ in store.iterator():
        seen.append(key)
        store.remove(key)
        store.remove(keys[-1])  # an iterator shows what there was when it was made
    assert seen == keys and list(store.iterator()) == []
    store.commit()
    assert list(provider.get_store(2).iterator()) == []


def test_versions_kept_in_memory_and_others_read_the_same(open_provider):
    for kept in (0, 1, 5):
        conf = StateStoreConf(fsync=False, max_versions_in_memory=kept)
        provider = open_provider(f"memory://{uuid.uuid4().hex}", conf)
        expected = [{}]
        for version in range(8):
            expected.append({**expected[-1], f"k{version}": str(version), "all": str(version)})
            expected[-1].pop(f"k{version - 2}", None)
            commit(provider, version, **{f"k{version}": str(version), "all": str(version), f"k{version - 2}": None})
        for version in (8, 7, 3, 6, 0, 5):
            store = provider.get_read_store(version)
            assert content(store) == expected[version]
            keys = pa.array([b"all", b"k3", b"k7", b"never"])
            values = [expected[version].get(k.decode()) for k in keys.to_pylist()]
            assert [v and v.decode() for v in store.get_many(keys).to_pylist()] == values
            store.abort()
        assert content(provider.get_store(8)) == expected[8]


def test_scans_show_what_there_was_when_they_began(provider):
    store = provider.get_store(0)
    store.put_many(pa.array([b"%06d" % i for i in range(50_000)]), pa.array([b"1"] * 50_000))
    store.commit()
    reader = provider.get_read_store(1)
    scan = reader.scan()
    first = next(scan)
    for version in (1, 2, 3):
        store = provider.get_store(version)
        store.put_many(pa.array([b"%06d" % i for i in range(0, 50_000, 7)]), pa.array([b"2"] * 7143))
        store.commit()
        provider.do_maintenance()
    values = pa.concat_arrays([b.column(1) for b in (first, *scan)])
    assert len(values) == 50_000 and values.value_counts().to_pylist() == [{"values": b"1", "counts": 50_000}]


def test_keys_are_counted_exactly(provider):
    count = 0
    for version, pairs in enumerate(
        [{"a": "1", "b": "1"}, {"a": "2"}, {"a": None, "c": "1"}, {"zz": None}, {"b": None}]
    ):
        store = provider.get_store(version)
        for key, value in pairs.items():
            store.remove(key.encode()) if value is None else store.put(key.encode(), value.encode())
        store.commit()
        count = len(content(provider.get_store(version + 1)))
        assert store.metrics.num_keys == count
    store = provider.get_store(5)
    store.get_many(pa.array([b"c", b"d"]))  # what has been read need not be looked up again
    store.put_many(pa.array([b"c", b"d"]), pa.array([b"1", b"1"]))
    store.commit()
    assert store.metrics.num_keys == 2


# -- lists -------------------------------------------------------------------------------------


@pytest.fixture
def with_list(provider):
    store = provider.get_store(0)
    store.create_column_family("list", use_multiple_values_per_key=True)
    store.create_column_family("map")
    store.commit()
    return provider


def elements(store):
    found = {}
    for key, value in store.iterator("list"):
        found.setdefault(key, []).append(value)
    assert all(list(store.values_iterator(k, "list")) == v for k, v in found.items())
    return found


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


# -- change feed -------------------------------------------------------------------------------


def changes(provider, first, last):
    return [tuple(row.values()) for batch in provider.change_feed(first, last) for row in batch.to_pylist()]


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


# -- maintenance -------------------------------------------------------------------------------

SOON = StateStoreConf(fsync=False, deltas_per_snapshot=3, min_versions_to_retain=4)


def files(location, kind):
    return sorted(int(f.name.partition("-")[0]) for f in Path(location).rglob(f"*.{kind}"))


def test_a_snapshot_is_taken_when_it_is_due(open_provider, location):
    provider = open_provider(conf=SOON)
    provider.do_maintenance()
    for version in range(7):
        commit(provider, version, **{f"k{version}": "v"})
        provider.do_maintenance()
    assert files(location, "snapshot") == [3, 6]
    # What a snapshot covers is not read again.
    for changelog in Path(location).rglob("*.changelog"):
        if int(changelog.name.partition("-")[0]) <= 6:
            changelog.unlink()
    fresh = open_provider(conf=SOON)
    assert content(fresh.get_store(7)) == {f"k{v}": "v" for v in range(7)}
    assert fresh.get_store(7).metrics.num_keys == 7


def test_maintenance_keeps_what_it_should_and_removes_the_rest(open_provider, location):
    provider = open_provider(conf=SOON)
    for version in range(20):
        commit(provider, version, **{f"k{version % 5}": str(version)})
        provider.do_maintenance()
    # Of version 20, four and the base of an uncommitted batch: from 15 on, which is a snapshot's version.
    assert files(location, "changelog") == [16, 17, 18, 19, 20] and files(location, "snapshot") == [15, 18]
    assert len(list(Path(location).rglob("*.json"))) <= 8
    for one in (provider, open_provider(conf=SOON)):
        for version in range(15, 21):
            last = {f"k{v % 5}": str(v) for v in range(version)}
            assert content(one.get_read_store(version)) == last
        for version in (1, 14):
            with pytest.raises(VersionNotFoundError, match=r"versions 15 to 20 .*min_versions_to_retain"):
                one.get_read_store(version)
        assert content(one.get_store(0)) == {}
        with pytest.raises(VersionNotFoundError, match="no longer kept"):
            one.change_feed(0, 16)
        assert changes(one, 15, 16) == [(16, "default", b"k0", b"10", b"15")]


def test_an_open_read_store_keeps_its_version(open_provider, location):
    provider = open_provider(conf=SOON)
    for version in range(4):
        commit(provider, version, a=str(version))
    provider.do_maintenance()
    reader = provider.get_read_store(4)
    for version in range(4, 20):
        commit(provider, version, a=str(version))
        provider.do_maintenance()
    assert min(files(location, "snapshot")) == 4
    assert content(reader) == {"a": "3"}
    reader.abort()
    commit(provider, 20, a="20")
    provider.do_maintenance()
    assert min(files(location, "snapshot")) > 4


def test_going_back_after_maintenance(open_provider, location):
    provider = open_provider(conf=SOON)
    for version in range(20):
        commit(provider, version, **{f"k{version}": "v"})
        provider.do_maintenance()
    assert commit(provider, 16, other="1") == 17
    for version in range(17, 30):
        expected = {**{f"k{v}": "v" for v in range(16)}, "other": str(version - 16)}
        assert content(open_provider(conf=SOON).get_store(version)) == expected
        commit(provider, version, other=str(version - 15))
        provider.do_maintenance()
        with pytest.raises(VersionNotFoundError, match="no longer kept"):
            provider.get_read_store(14)
    assert commit(provider, 0, fresh="1") == 1
    provider.do_maintenance()
    assert content(open_provider(conf=SOON).get_store(1)) == {"fresh": "1"}
    assert provider.latest_version() == 1


def test_litter_is_removed_when_its_version_is_no_longer_kept(open_provider, location):
    provider = open_provider(conf=SOON)
    for version in range(3):
        commit(provider, version, a="1")
    directory = next(Path(location).rglob("*.changelog")).parent
    for name in ("3-dead.changelog", "3-dead.sst", "3-dead.snapshot", "12-running.changelog"):
        (directory / name).write_bytes(b"what an attempt left that died")
    for version in range(3, 11):
        provider.do_maintenance()
        commit(provider, version, a="1")
    provider.do_maintenance()
    assert not list(directory.glob("3-dead.*")) and (directory / "12-running.changelog").exists()


def test_commits_and_reads_go_on_while_a_snapshot_is_uploaded(open_provider, location, monkeypatch):
    provider = open_provider(conf=SOON)
    for version in range(3):
        commit(provider, version, a=str(version))
    uploading, go = threading.Event(), threading.Event()
    monkeypatch.setattr(
        "backends.fault_points._hook", lambda p: (uploading.set(), go.wait(10)) if p == "snapshot:descriptor" else None
    )
    maintenance = threading.Thread(target=provider.do_maintenance)
    maintenance.start()
    assert uploading.wait(10)
    for version in range(3, 9):
        commit(provider, version, a=str(version))
        assert content(provider.get_read_store(version + 1)) == {"a": str(version)}
    go.set()
    maintenance.join(10)
    provider.do_maintenance()
    fresh = open_provider(conf=SOON)
    assert content(fresh.get_store(9)) == {"a": "8"} and content(fresh.get_read_store(3)) == {"a": "2"}
    # Only the manifest of a later version names the snapshot; going back must not lose it.
    assert commit(provider, 5, a="other") == 6
    for changelog in Path(location).rglob("*.changelog"):
        if int(changelog.name.partition("-")[0]) <= 3:
            changelog.unlink()
    assert content(open_provider(conf=SOON).get_store(6)) == {"a": "other"}


def test_a_snapshot_uploads_only_what_is_new(open_provider, location):
    """Random values: what is written is about as large as the state."""
    conf = StateStoreConf(fsync=False, deltas_per_snapshot=1, file_snapshot_part_bytes=4 << 10)
    provider = open_provider(conf=conf)
    store = provider.get_store(0)
    for i in range(500):
        store.put(b"%04d" % i, os.urandom(320))
    store.commit()
    provider.do_maintenance()
    first = provider.metrics().custom["snapshot_bytes_written"]
    commit(provider, 1, zzz="1")
    provider.do_maintenance()
    second = provider.metrics().custom["snapshot_bytes_written"] - first
    assert first > 150_000
    if provider.backend == "rocksdb":
        assert second < first / 10
    assert len(list(open_provider(conf=conf).get_read_store(2).iterator())) == 501


def test_backends_are_not_mixed_up(provider_class, open_provider, location):
    provider = open_provider(conf=SOON)
    for version in range(3):
        commit(provider, version, a=str(version))
    provider.do_maintenance()
    other = next(p for p in PROVIDERS if p is not provider_class)
    said = f"written by the provider '{provider.backend}'"
    with other(StateStoreId(location, "op", 0), SOON) as wrong, pytest.raises(InvalidStateStoreArgument, match=said):
        wrong.get_store(3)


def test_a_provider_is_named_by_its_import_path(location):
    conf = StateStoreConf(provider="tests.backends.third_provider.ThirdStateStoreProvider")
    assert conf.provider_class() is ThirdStateStoreProvider
    assert StateStoreConf(provider="file").provider_class() is FileStateStoreProvider
    for wrong in ("no.such.module.Class", "backends.file.NoSuchClass", "backends.file.lists_of"):
        with pytest.raises(InvalidStateStoreArgument, match="cannot be imported"):
            StateStoreConf(provider=wrong).provider_class()
    with pytest.raises(InvalidStateStoreArgument, match="choose one of rocksdb, file"):
        StateStoreConf(provider="hdfs")
