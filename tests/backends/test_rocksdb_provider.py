"""The RocksDB provider used alone: the contract of stores and providers, on local disk and in memory."""

import shutil
import threading
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from backends import RocksDBStateStoreProvider, StateStoreConf, StateStoreId, StateStoreMetrics
from backends.exceptions import (
    ConcurrentCommitError,
    DamagedFileError,
    InvalidStateStoreArgument,
    MissingFileError,
    StorageError,
    StoreClosedError,
    UnsupportedLocationError,
    VersionNotFoundError,
)
from backends.local_files import LocalFiles
from backends.overlay import successor

CONF = StateStoreConf(fsync=False)


@pytest.fixture
def location(tmp_path):
    return str(tmp_path / "ck")


@pytest.fixture
def provider(location):
    made = open_provider(location)
    yield made
    made.close()


def open_provider(location, **kwargs):
    return RocksDBStateStoreProvider(StateStoreId(location, "op", 0), CONF, **kwargs)


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


def test_versions_are_reloaded_from_nothing_but_the_checkpoint_location(provider, location):
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
def test_other_locations(tmp_path, scheme):
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


def test_column_families(provider, location):
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


def test_a_version_may_be_made_again_from_its_base(provider, location):
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


def test_of_two_providers_of_one_location_one_is_refused(provider, location):
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


def test_racing_providers_never_mix(location):
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


def test_two_providers_in_one_local_directory_are_refused(location, tmp_path):
    with open_provider(location, local_dir=tmp_path / "local"), pytest.raises(ConcurrentCommitError, match="local"):
        open_provider(location, local_dir=tmp_path / "local")
    open_provider(location, local_dir=tmp_path / "local").close()


def test_a_local_directory_is_used_again_if_it_proves_right(location, tmp_path):
    with open_provider(location, local_dir=tmp_path / "local") as first:
        commit(first, 0, a="1")
        commit(first, 1, b="2")
    for changelog in Path(location).rglob("*.changelog"):
        changelog.unlink()
    with open_provider(location, local_dir=tmp_path / "local") as again:
        assert content(again.get_store(2)) == {"a": "1", "b": "2"}
        with pytest.raises(MissingFileError, match=r"\.changelog"):
            again.get_store(1)


@pytest.mark.parametrize("kind", ["changelog", "json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "swap", "delete"])
def test_damage_of_any_file_is_named(provider, location, kind, damage):
    for version in range(4):
        commit(provider, version, **{f"k{version}": "v"})
    provider.close()
    files = sorted(Path(location).rglob(f"*.{kind}"), key=lambda p: p.name)
    victim = files[1]
    good = victim.read_bytes()
    if damage == "flip":
        victim.write_bytes(good[:60] + bytes([good[60] ^ 2]) + good[61:])
    elif damage == "truncate":
        victim.write_bytes(good[:-2])
    elif damage == "empty":
        victim.write_bytes(b"")
    elif damage == "swap":
        shutil.copy(files[2], victim)
    else:
        victim.unlink()
    error = MissingFileError if damage == "delete" else DamagedFileError
    with pytest.raises(error) as raised, open_provider(location) as again:
        again.get_store(4)
    assert str(victim) in str(raised.value)


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


def test_close_removes_temporary_files_and_is_final(location):
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


def test_a_dropped_provider_leaves_no_directory(location):
    provider = open_provider(location)
    local = provider._local_dir
    provider.close()
    del provider
    assert not local.exists()


def test_unsupported_locations_are_refused_with_the_remedy():
    with pytest.raises(UnsupportedLocationError, match="state_location="):
        open_provider("hdfs://nn/ck")


KEYS = st.binary(max_size=2)
VALUES = st.binary(max_size=3)
FAMILY = st.sampled_from(["default", "other"])


class Model(RuleBasedStateMachine):
    """Random work against a plain dict per version."""

    @initialize()
    def start(self):
        self.location = f"memory://{uuid.uuid4().hex}"
        self.provider = open_provider(self.location)
        self.versions = [{"default": {}, "other": None}]
        self.open(0)

    def open(self, version):
        self.store = self.provider.get_store(version)
        self.expected = {n: None if f is None else dict(f) for n, f in self.versions[version].items()}

    def family(self, name):
        if self.expected[name] is None:
            self.store.create_column_family(name)
            self.expected[name] = {}
        return self.expected[name]

    @rule(key=KEYS, value=VALUES, name=FAMILY)
    def put(self, key, value, name):
        self.family(name)[key] = value
        self.store.put(key, value, name)

    @rule(key=KEYS, name=FAMILY)
    def remove(self, key, name):
        self.family(name).pop(key, None)
        self.store.remove(key, name)

    @rule(pairs=st.lists(st.tuples(KEYS, VALUES), max_size=6), name=FAMILY)
    def put_many(self, pairs, name):
        self.family(name).update(pairs)
        self.store.put_many(
            pa.array([k for k, _ in pairs], pa.binary()), pa.array([v for _, v in pairs], pa.binary()), name
        )

    @rule(keys=st.lists(KEYS, max_size=4), name=FAMILY)
    def remove_many(self, keys, name):
        for key in keys:
            self.family(name).pop(key, None)
        self.family(name)
        self.store.remove_many(pa.array(keys, pa.binary()), name)

    @rule(keys=st.lists(KEYS, max_size=4), name=FAMILY)
    def get(self, keys, name):
        family = self.family(name)
        expected = [family.get(k) for k in keys]
        assert self.store.get_many(pa.array(keys, pa.binary()), name).to_pylist() == expected
        assert [self.store.get(k, name) for k in keys] == expected

    @rule(start=st.none() | KEYS, end=st.none() | KEYS)
    def get_range(self, start, end):
        inside = {
            k: v
            for k, v in self.expected["default"].items()
            if (start is None or k >= start) and (end is None or k < end)
        }
        assert list(self.store.get_range(start, end)) == sorted(inside.items())

    @rule()
    def commit(self):
        version = self.store.commit()
        self.versions[version:] = [self.expected]
        assert self.store.metrics.num_keys == sum(len(f or {}) for f in self.expected.values())
        self.open(version)

    @rule()
    def abort(self):
        version = self.store.version
        self.store.abort()
        self.open(version)

    @rule(data=st.data())
    def roll_back(self, data):
        self.store.abort()
        self.open(data.draw(st.integers(0, len(self.versions) - 1)))

    @rule(data=st.data())
    def read_old(self, data):
        version = data.draw(st.integers(0, len(self.versions) - 1))
        store = self.provider.get_read_store(version)
        assert dict(store.iterator()) == self.versions[version]["default"]
        store.abort()

    @precondition(lambda self: len(self.versions) > 1)
    @rule()
    def reload(self):
        self.provider.close()
        self.provider = open_provider(self.location)
        assert self.provider.latest_version() == len(self.versions) - 1
        self.open(len(self.versions) - 1)

    @invariant()
    def all_pairs(self):
        for name, pairs in self.expected.items():
            if pairs is not None:
                assert list(self.store.iterator(name)) == sorted(pairs.items())

    def teardown(self):
        if hasattr(self, "provider"):
            self.provider.close()


def test_a_model_of_dicts():
    run_state_machine_as_test(Model, settings=settings(deadline=None, max_examples=8, stateful_step_count=20))
