"""What every provider must do, used alone: the contract of stores and providers (Spark: ``StateStoreSuiteBase``).

A new provider joins by being added to ``PROVIDERS``. The cases of Spark, and where they are here:

StateStoreSuiteBase
    get, put, remove, commit, and all data iterator      test_versions_are_reloaded..., test_a_store_sees_its_own...
    prefix scan                                          test_ranges_and_prefixes, test_own_writes_are_seen...
    numKeys metrics                                      test_keys_are_counted_exactly, test_metrics
    removing while iterating                             test_removing_while_iterating
    abort                                                test_abort_leaves_nothing_behind, test_an_ended_store...
    getStore with invalid versions                       test_errors_about_versions_name_the_existing_ones
    two concurrent StateStores - one for read-only ...   test_read_stores_stay..., test_readers_of_many_versions...
    SPARK-18342: commit fails when rename fails          test_a_failed_commit_changes_nothing
    SPARK-38320: state store iterator behavior           test_an_iterator_shows_the_rows_of_the_moment_it_was_made
    StateStore.get                                       test_registry.py: test_get_loads_a_provider...
    reports memory usage                                 test_metrics, test_metrics_of_loading_reading_and_snapshots
    SPARK-35659: StateStore.put cannot put null value    test_keys_and_values_are_bytes
    SPARK-48997: maintenance threads with exceptions     test_registry.py: test_an_instance_that_fails...
    with every compression codec                         test_changelog.py
    SPARK-34270, SPARK-35763: combined metrics, SQL ones none: figures are not combined, and SQL metrics do not exist
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
    maintenance                                          test_registry.py: test_the_thread_maintains_loaded_instances
    SPARK-40492: maintenance before unload               none: the next owner cleans the rest
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

from backends import StateStoreConf
from backends.encoding.keys import first_key_after
from backends.exceptions import InvalidStateStoreArgument
from tests.backends.providers.provider_cases import commit, content, shared

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


def test_an_iterator_shows_the_rows_of_the_moment_it_was_made(provider):
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
    assert first_key_after(b"a\xff") == b"b" and first_key_after(b"\xff\xff") is None and first_key_after(b"") is None


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


def test_scans_show_the_rows_of_the_moment_they_began(provider):
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
