"""What is RocksDB's own: the local directory that is used again."""

from pathlib import Path

import pytest

from backends import RocksDBStateStoreProvider, StateStoreConf, StateStoreId, fault_points, rocksdb
from backends.exceptions import LocalStateDamagedError, MissingFileError

from .test_provider_behaviour import commit, content


@pytest.fixture
def location(tmp_path):
    return str(tmp_path / "ck")


def open_provider(location, **kwargs):
    return RocksDBStateStoreProvider(StateStoreId(location, "op", 0), StateStoreConf(fsync=False), **kwargs)


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


@pytest.fixture
def ends_midway(monkeypatch):
    """Has the next version that is written end between its write batches, what was written being on the disk; says what that left."""
    monkeypatch.setattr(rocksdb, "WRITE_ROWS", 2)
    engines, open_engine = [], rocksdb.LocalRocksDB._open

    def opened(engine):
        engines.append(engine)
        open_engine(engine)

    monkeypatch.setattr(rocksdb.LocalRocksDB, "_open", opened)

    def reach(point):
        if point == "apply:batch":
            engines[-1]._db.flush()
            fault_points.set_hook(None)
            raise OSError("no space left on device")

    yield lambda: fault_points.set_hook(reach)
    fault_points.set_hook(None)


def test_a_write_that_ends_midway_shows_nobody_what_it_has_written(location, tmp_path, ends_midway):
    with open_provider(location, local_dir=tmp_path / "local") as provider:
        commit(provider, 0, a="1", b="1", c="1", d="1")
        store = provider.get_store(1)
        ends_midway()
        with pytest.raises(LocalStateDamagedError, match="no space left"):
            commit(provider, 1, a="2", b="2", c="2", d="2", e="2")
        with pytest.raises(LocalStateDamagedError, match="no space left"):
            content(store)


def test_a_process_that_ended_while_it_wrote_leaves_no_version_to_the_next_one(location, tmp_path, ends_midway):
    with open_provider(location, local_dir=tmp_path / "local") as provider:
        commit(provider, 0, a="1", b="1", c="1", d="1")
        ends_midway()
        with pytest.raises(LocalStateDamagedError):
            commit(provider, 1, a="2", b="2", c="2", d="2", e="2")
    with open_provider(location, local_dir=tmp_path / "local") as again:
        assert content(again.get_store(1)) == dict.fromkeys("abcd", "1")
        assert again.latest_version() == 2  # its changelog and manifest were durable before
        assert content(again.get_store(2)) == dict.fromkeys("abcde", "2")
        commit(again, 2, a=None)
        assert content(again.get_store(3)) == dict.fromkeys("bcde", "2")
