"""Commits, figures and the end of a provider (see ``test_provider_behaviour.py``)."""

from pathlib import Path

import pyarrow as pa
import pytest

from backends import StateStoreConf, StateStoreId
from backends.exceptions import StorageError, StoreClosedError
from backends.storage.local_files import LocalFiles
from tests.backends.providers.provider_cases import commit, content

pytestmark = pytest.mark.in_turns("rocksdb", "file")


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
