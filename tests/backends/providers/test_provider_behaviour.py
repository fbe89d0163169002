"""What every provider must do, used alone: the contract of stores and providers (Spark: ``StateStoreSuiteBase``).

A new provider joins by being added to ``PROVIDERS``. The cases of Spark, and where they are here:

StateStoreSuiteBase
    get, put, remove, commit, and all data iterator      test_versions_are_reloaded..., test_a_store_sees_its_own...
    prefix scan                                          test_ranges_and_prefixes, test_own_writes_are_seen...
    numKeys metrics                                      test_keys_are_counted_exactly, test_metrics
    removing while iterating                             test_removing_while_iterating
    abort                                                test_abort_leaves_nothing_behind, test_an_ended_store...
    getStore with invalid versions                       test_version_mistakes_say_what_there_is
    two concurrent StateStores - one for read-only ...   test_read_stores_stay..., test_readers_of_many_versions...
    SPARK-18342: commit fails when rename fails          test_a_failed_commit_changes_nothing
    SPARK-38320: state store iterator behavior           test_an_iterator_shows_what_there_was_when_it_was_made
    StateStore.get                                       test_registry.py: test_get_loads_a_provider...
    reports memory usage                                 test_metrics, test_metrics_of_loading_reading_and_snapshots
    SPARK-35659: StateStore.put cannot put null value    test_keys_and_values_are_bytes
    SPARK-48997: maintenance threads with exceptions     test_registry.py: test_an_instance_that_fails...
    with every compression codec                         test_changelog.py
    SPARK-34270, SPARK-35763: combined metrics, SQL ones none: figures are not combined here, and there is no SQL metric
    SPARK-42572, (de)serialization of encoder specs      none: bytes have no row format; schemas are in test_values.py

StateStoreSuite
    retaining only two latest versions ..., no cache ... test_versions_kept_in_memory_and_others_read_the_same
    failure after committing with MAX_BATCHES_... = 1    test_a_version_may_be_made_again_from_its_base
    operations on non-default col family should fail,    none: every provider has column families and ranges
    running with range scan encoder should fail
    cleaning                                             test_maintenance_keeps_what_it_should..., test_litter...
    snapshotting                                         test_a_snapshot_is_taken_when_it_is_due
    SPARK-19677: a delta file atop an existing one       test_a_version_may_be_made_again...: names are unique
    corrupted file handling                              test_corruption.py
    reports memory usage on current version              test_metrics_of_loading_reading_and_snapshots
    SPARK-48105: unload or close during maintenance      test_registry.py: test_an_instance_unloaded_in_the_middle...;
                                                         a scan of a closed provider is an error here
    maintenance                                          test_registry.py: test_the_thread_maintains..., test_what_...
    SPARK-40492: maintenance before unload               none: what is not cleaned is cleaned by the next owner
    SPARK-18416: do not create temp delta file until ... test_nothing_is_written_before_the_commit
    SPARK-21145: restarted queries create new providers  test_registry.py: test_a_restarted_query...
    error writing [version].delta cancels the stream     test_a_failed_commit_changes_nothing, test_crash.py
    expose metrics with custom metrics                   test_metrics, test_metrics_are_those_of_the_version_opened

RocksDBStateStoreSuite
    version encoding, range scan of typed columns        test_keys.py, test_values.py: rows are encoded above the store
    RocksDB confs are passed correctly                   test_settings.py
    rocksdb file manager metrics exposed                 test_metrics_of_loading..., test_a_snapshot_uploads_only...
    values iterator correctness                          test_lists_...
    column family creation with invalid names            test_column_families
    operations on absent column family                   test_column_families, test_lists_and_single_values...
    get, put, iterator, ... multiple column families     test_column_families, test_readers_of_many_versions...
    removeColFamilyIfExists, ids after removal           none: a column family is not removed, and has no id

Not here either: cases about ``SparkEnv`` and Hadoop's file manager, which have no counterpart.
"""

import random
import uuid
from pathlib import Path

import pyarrow as pa
import pytest

from backends import (
    StateStore,
    StateStoreConf,
    StateStoreId,
    StateStoreMetrics,
)
from backends.exceptions import (
    InvalidStateStoreArgument,
    StorageError,
    StoreClosedError,
    UnsupportedLocationError,
    VersionNotFoundError,
)
from backends.providers.overlay import successor
from backends.storage.local_files import LocalFiles
from tests.backends.providers.provider_cases import shared
from tests.backends.providers.providers import commit, content

pytestmark = pytest.mark.in_turns("rocksdb", "file")


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


def test_own_writes_are_seen_by_every_read_in_order(provider):
    rng = random.Random(7)
    keys = [b"", *(bytes([a, b]) for a in b"\x00a\xff" for b in b"\x00b\xff"), b"a", b"\xff"]
    store = provider.get_store(0)
    state = dict.fromkeys(keys[::2], b"below")
    store.put_many(pa.array(list(state), pa.binary()), pa.array(list(state.values())))
    store.commit()
    store = provider.get_store(1)
    for i in range(60):
        some, value = rng.choices(keys, k=rng.randint(0, 4)), b"%d" % i
        kind = rng.randrange(4)
        if kind == 0:
            for key in some:
                store.put(key, value)
        elif kind == 1:
            for key in some:
                store.remove(key)
        elif kind == 2:
            store.put_many(pa.array(some, pa.binary()), pa.array([value] * len(some), pa.binary()))
        else:
            store.remove_many(pa.array(some, pa.binary()))
        for key in some:
            state.pop(key, None)
            if kind in (0, 2):
                state[key] = value
        pairs = sorted(state.items())
        assert list(store.iterator()) == pairs
        assert [
            p for b in store.scan() for p in zip(b["key"].to_pylist(), b["value"].to_pylist(), strict=True)
        ] == pairs
        asked = rng.choices(keys, k=5)
        assert [store.get(k) for k in asked] == [state.get(k) for k in asked]
        assert store.get_many(pa.array(asked)).to_pylist() == [state.get(k) for k in asked]
        start, end = rng.choice([None, *keys]), rng.choice([None, *keys])
        inside = [p for p in pairs if (start is None or p[0] >= start) and (end is None or p[0] < end)]
        assert list(store.get_range(start, end)) == inside
        prefix = rng.choice(keys)[:1]
        assert list(store.prefix_scan(prefix)) == [p for p in pairs if p[0].startswith(prefix)]
    store.commit()
    assert list(provider.get_read_store(2).iterator()) == pairs


def test_an_iterator_shows_what_there_was_when_it_was_made(provider):
    commit(provider, 0, a="1", b="1")
    store = provider.get_store(1)
    before = store.iterator()
    store.put(b"a", b"2")
    store.put(b"c", b"1")
    between = store.iterator()
    store.remove(b"b")
    store.put(b"c", b"2")
    assert list(before) == [(b"a", b"1"), (b"b", b"1")]
    assert list(between) == [(b"a", b"2"), (b"b", b"1"), (b"c", b"1")]
    assert content(store) == {"a": "2", "c": "2"}


def test_arrow_arrays_of_every_shape(provider):
    keys = [b"%03d" % i for i in range(40)]
    shuffled = random.Random(3).sample(keys, len(keys))
    store = provider.get_store(0)
    store.put_many(pa.array([b"xxx", *shuffled, b"yyy"]).slice(1, 40), pa.chunked_array([keys[:7], [], keys[7:]]))
    written = dict(zip(shuffled, keys, strict=True))
    for _ in range(2):  # uncommitted, then committed
        asked = [b"039", b"000", b"none", b"007", b"000", b"039"]
        expected = [written.get(k) for k in asked]
        for array in (
            pa.array(asked),
            pa.array([b"zzz", *asked, b"zzz"]).slice(1, 6),
            pa.chunked_array([asked[:2], [], asked[2:]], pa.binary()),
            pa.chunked_array([asked]),
            pa.array(asked, pa.large_binary()),
        ):
            found = store.get_many(array)
            assert found.to_pylist() == expected and found.type == pa.binary()
        assert store.get_many(pa.array([b"001", b"002"], pa.binary(3))).to_pylist() == [
            written[b"001"],
            written[b"002"],
        ]
        for empty in (pa.array([], pa.binary()), pa.chunked_array([], pa.binary()), pa.array(asked).slice(3, 0)):
            assert store.get_many(empty).to_pylist() == []
        if not store.version:
            store.commit()
            store = provider.get_store(1)
    store.put_many(pa.chunked_array([[b"a", b"b"], [b"a"]]), pa.chunked_array([[b"1"], [b"2", b"3"]]))
    store.remove_many(pa.array([b"000", *keys[3:], b"000"]).slice(1, 37))
    assert [k for k, _ in store.iterator()] == [*keys[:3], b"a", b"b"]
    assert store.get_many(pa.array([b"b", b"a"])).to_pylist() == [b"2", b"3"]
    store.put_many(pa.array([], pa.binary()), pa.chunked_array([], pa.binary()))
    store.commit()
    assert store.metrics.num_keys == 5


def test_abort_leaves_nothing_behind(provider, location):
    commit(provider, 0, a="1")
    there = sorted(Path(location).rglob("*"))
    store = provider.get_store(1)
    store.put(b"a", b"2")
    store.create_column_family("new")
    store.put(b"a", b"1", "new")
    store.abort()
    assert sorted(Path(location).rglob("*")) == there
    store = provider.get_store(1)
    with pytest.raises(InvalidStateStoreArgument, match="'new'"):
        store.get(b"a", "new")
    assert content(store) == {"a": "1"}
    store.create_column_family("new", use_multiple_values_per_key=True)
    assert store.commit() == 2
    store.abort()
    assert store.has_committed and content(provider.get_read_store(2), "new") == {}


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
    for limits in ((None, b""), (b"", b""), (b"\xff\xff\x02", None)):
        assert list(store.get_range(*limits)) == []
    for limits in ((), (None, None), (b"", None)):
        assert [k for k, _ in store.get_range(*limits)] == sorted(keys)
    assert [k for k, _ in store.get_range(b"a\xff", b"\xff\xff")] == [b"a\xff", b"a\xff\xff", b"b", b"\xff"]
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
def test_version_mistakes_say_what_there_is(provider):
    commit(provider, 0, a="1")
    commit(provider, 1, a="2")
    for version in (3, -1, 2**70, True, "1", None, 1.0):
        for open_store in (provider.get_store, provider.get_read_store, lambda v: provider.change_feed(0, v)):
            with pytest.raises(VersionNotFoundError, match="there are versions 0 to 2"):
                open_store(version)


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
    counts = {"bytes_written", "snapshot_bytes_written", "snapshots", "files"}
    assert all(name.endswith(("_ms", "_bytes")) or name in counts for name in store.metrics.custom)
    assert {"load_ms", "get_ms", "put_ms", "commit_ms"} <= store.metrics.custom.keys()
    assert all(store.metrics.custom[name] > 0 for name in ("put_ms", "commit_ms", "changelog_ms", "apply_ms"))
    store = provider.get_store(1)
    store.remove(b"a")
    store.put(b"b", b"2")
    store.commit()
    assert store.metrics.num_keys == 2


def test_metrics_of_loading_reading_and_snapshots(provider, location, open_provider):
    commit(provider, 0, a="1", b="1")
    fresh = open_provider(conf=StateStoreConf(fsync=False, deltas_per_snapshot=1))
    store = fresh.get_store(1)
    assert (store.metrics.num_keys, store.metrics.custom["snapshots"]) == (2, 0)
    store.get_many(pa.array([b"a"]))
    assert store.metrics.custom["load_ms"] > 0 and store.metrics.custom["get_ms"] > 0
    fresh.do_maintenance()
    custom = fresh.get_read_store(1).metrics.custom
    assert custom["snapshots"] == 1 and custom["snapshot_ms"] > 0 and custom["snapshot_bytes_written"] > 0
    small = store.metrics.memory_bytes
    store.put_many(pa.array([b"%05d" % i for i in range(2000)]), pa.array([bytes(100)] * 2000))
    store.commit()
    assert store.metrics.num_keys == 2002 and store.metrics.memory_bytes > small + 100_000


def test_metrics_are_those_of_the_version_opened(provider):
    commit(provider, 0, a="1")
    reader = provider.get_read_store(1)
    commit(provider, 1, b="1")
    assert content(reader) == {"a": "1"} and reader.metrics.num_keys == 1


def test_ending_a_store_loads_nothing(open_provider, tmp_path):
    provider = open_provider(conf=StateStoreConf(fsync=False, max_versions_in_memory=0), local_dir=tmp_path / "local")
    commit(provider, 0, a="1")
    reader = provider.get_read_store(1)
    made = []
    partition = provider._partition
    provider._partition = lambda name: made.append(name) or partition(name)
    for version in range(1, 4):
        commit(provider, version, a=str(version))
    reader.abort()
    assert made == []


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
    for use in (
        lambda: provider.get_store(1),
        lambda: provider.get_read_store(1),
        lambda: provider.change_feed(0, 1),
        provider.latest_version,
        provider.do_maintenance,
        lambda: store.get(b"a"),
        store.commit,
        lambda: list(store.iterator()),
        lambda: old.get(b"a"),
    ):
        with pytest.raises(StoreClosedError):
            use()
    assert provider.id == store.id == StateStoreId(location, "op", 0)


def test_a_store_may_be_aborted_after_its_provider_was_closed(provider):
    for store in (provider.get_store(0), provider.get_read_store(0)):
        provider.close()
        store.abort()
        assert not store.has_committed


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


@shared
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
    store.put_many(pa.array([b"%06d" % i for i in range(20_000)]), pa.array([b"1"] * 20_000))
    store.commit()
    reader = provider.get_read_store(1)
    scan = reader.scan()
    first = next(scan)
    for version in (1, 2, 3):
        store = provider.get_store(version)
        store.put_many(pa.array([b"%06d" % i for i in range(0, 20_000, 7)]), pa.array([b"2"] * 2858))
        store.commit()
        provider.do_maintenance()
    values = pa.concat_arrays([b.column(1) for b in (first, *scan)])
    assert len(values) == 20_000 and values.value_counts().to_pylist() == [{"values": b"1", "counts": 20_000}]


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
