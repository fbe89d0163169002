"""RocksDB alone: it uses its local directory again.

A store that is closed by one thread while another one scans it.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends import RocksDBStateStoreProvider, StateStoreConf, StateStoreId, fault_points
from backends.engines import rocksdb, rocksdb_files
from backends.exceptions import LocalStateDamagedError, MissingFileError, StoreClosedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from tests.backends.partition.partition_steps import changes
from tests.backends.providers.provider_cases import commit, content
from tests.patience import HANG, PATIENCE


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
    """Make the next write of a version end between its write batches, with the first ones on disk; say what is left."""
    monkeypatch.setattr(rocksdb_files, "WRITE_ROWS", 2)
    engines, errors, open_engine = [], [], rocksdb.LocalRocksDB._open

    def opened(engine, *access, **options):
        engines.append(engine)
        open_engine(engine, *access, **options)

    monkeypatch.setattr(rocksdb.LocalRocksDB, "_open", opened)

    def reach(point):
        if point == "apply:batch":
            engines[-1]._db.flush()
            fault_points.set_hook(None)
            raise errors.pop()

    def end(error):
        errors.append(error)
        fault_points.set_hook(reach)

    yield end
    fault_points.set_hook(None)


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt("no space left on device")])
def test_a_write_that_ends_midway_stays_invisible(location, tmp_path, ends_midway, error):
    with open_provider(location, local_dir=tmp_path / "local") as provider:
        commit(provider, 0, a="1", b="1", c="1", d="1")
        store = provider.get_store(1)
        ends_midway(error)
        with pytest.raises((LocalStateDamagedError, KeyboardInterrupt), match="no space left"):
            commit(provider, 1, a="2", b="2", c="2", d="2", e="2")
        for _ in range(2):
            with pytest.raises(LocalStateDamagedError, match="no space left"):
                content(store)
        # The state is loaded again on the next request for a version, even for the same one.
        assert content(provider.get_store(1)) == dict.fromkeys("abcd", "1")
        assert content(provider.get_store(2)) == dict.fromkeys("abcde", "2")
        commit(provider, 2, a=None)
        assert content(provider.get_store(3)) == dict.fromkeys("bcde", "2")


def test_after_a_write_that_ended_midway_loading_takes_another_way(location, tmp_path, ends_midway):
    with open_provider(location) as provider:
        for version in range(4):
            commit(provider, version, a=str(version), b=str(version), c=str(version))
    with open_provider(location, local_dir=tmp_path / "local") as provider:
        commit(provider, 4, a="4")
    with open_provider(location, local_dir=tmp_path / "local") as again:
        commit(again, 5, a="5", b="5", c="5")
    with open_provider(location, local_dir=tmp_path / "other") as other:
        ends_midway(OSError("no space left on device"))
        try:
            assert content(other.get_store(6)) == dict.fromkeys("abc", "5")
        except LocalStateDamagedError:  # there was one way only; the next attempt starts it again
            assert content(other.get_store(6)) == dict.fromkeys("abc", "5")


def test_a_process_that_ended_while_it_wrote_leaves_no_version_to_the_next_one(location, tmp_path, ends_midway):
    with open_provider(location, local_dir=tmp_path / "local") as provider:
        commit(provider, 0, a="1", b="1", c="1", d="1")
        ends_midway(OSError("no space left on device"))
        with pytest.raises(LocalStateDamagedError):
            commit(provider, 1, a="2", b="2", c="2", d="2", e="2")
    with open_provider(location, local_dir=tmp_path / "local") as again:
        assert content(again.get_store(1)) == dict.fromkeys("abcd", "1")
        assert again.latest_version() == 2  # its changelog and manifest were durable before
        assert content(again.get_store(2)) == dict.fromkeys("abcde", "2")
        commit(again, 2, a=None)
        assert content(again.get_store(3)) == dict.fromkeys("bcde", "2")


def test_a_database_that_closes_with_an_error_is_closed_and_lets_go_of_its_directory(location, tmp_path, caplog):
    """As where a compaction has met a damaged file: reads and loads say so, and ``close`` ends all the same."""
    provider = open_provider(location, local_dir=tmp_path / "local")
    commit(provider, 0, a="1")
    engine = provider.main._engine

    class Damaged:
        def __init__(self, handle):
            self._handle = handle

        def close(self):
            self._handle.close()
            raise Exception("Corruption: block checksum mismatch")  # as rocksdict does

        def __getattr__(self, name):
            return getattr(self._handle, name)

    engine._db = Damaged(engine._db)
    provider.close()
    assert "was closed with an error" in caplog.text and str(tmp_path / "local") in caplog.text
    with open_provider(location, local_dir=tmp_path / "local") as again:
        assert content(again.get_store(1)) == {"a": "1"}


def test_a_partition_that_is_restored_opens_its_database_for_writing_once(location, monkeypatch):
    conf = StateStoreConf(fsync=False, deltas_per_snapshot=2)
    with RocksDBStateStoreProvider(StateStoreId(location, "op", 0), conf) as provider:
        for version in range(3):
            commit(provider, version, a=str(version))
            provider.do_maintenance()
    assert list(Path(location).rglob("*.snapshot"))
    opened, open_engine = [], rocksdb.LocalRocksDB._open

    def open_counted(engine, *access, **options):
        opened.append("for reading" if access else "for writing")
        open_engine(engine, *access, **options)

    monkeypatch.setattr(rocksdb.LocalRocksDB, "_open", open_counted)
    with open_provider(location) as again:
        assert content(again.get_store(3)) == {"a": "2"}
        assert opened == ["for reading", "for writing"], "the snapshot, and the changelog behind it"


@pytest.mark.parametrize(("removed", "error"), [("*", "had version 1 before and has version 0 now"), ("CURRENT", "")])
def test_files_removed_under_a_database_that_was_only_read_lose_no_key(location, tmp_path, removed, error):
    """RocksDB creates an empty database there. A commit to it would keep its own changes and nothing else."""
    local = tmp_path / "local"
    with open_provider(location, local_dir=local) as provider:
        commit(provider, 0, a="1", b="1")
    with open_provider(location, local_dir=local) as again:
        assert content(again.get_store(1)) == {"a": "1", "b": "1"}
        (directory,) = (file.parent for file in local.rglob("CURRENT"))
        for file in directory.glob(removed):
            file.unlink()
        with pytest.raises(LocalStateDamagedError, match=f"cannot be opened.*{error}"):
            commit(again, 1, a="2")
        assert content(again.get_store(2)) == {"a": "2", "b": "1"}, "its changelog was stored first"
        assert content(again.get_store(1)) == {"a": "1", "b": "1"}


def test_a_partition_that_is_empty_is_read_without_a_database(location, tmp_path):
    with open_provider(location, local_dir=tmp_path / "local") as provider:
        assert content(provider.get_store(0)) == {}
        assert provider.metrics().num_keys == 0
        assert not list((tmp_path / "local").rglob("CURRENT"))
        commit(provider, 0, a="1")
        assert content(provider.get_store(1)) == {"a": "1"}


def test_the_copy_of_a_database_keeps_its_identity_file(tmp_path):
    conf, captured = StateStoreConf(), tmp_path / "captured"
    engine = rocksdb.LocalRocksDB(tmp_path / "first", conf)
    engine.prepare(changes({b"k": b"1"}))(LocalState(1, "head"))
    captured.mkdir()
    engine.capture(captured)()
    engine.close()
    written = (captured / rocksdb.IDENTITY).stat()
    again = rocksdb.LocalRocksDB(tmp_path / "second", conf)
    again.restore(captured)
    assert again.get_one(b"k") == b"1" and again.state == LocalState(1, "head")
    again.close()
    assert (tmp_path / "second" / rocksdb.IDENTITY).stat().st_ino == written.st_ino


def test_a_local_directory_that_an_error_says_to_remove_is_loaded_again(location, tmp_path, ends_midway):
    with open_provider(location, local_dir=tmp_path / "local") as provider:
        commit(provider, 0, a="1", b="1", c="1", d="1")
        ends_midway(OSError("Input/output error"))
        with pytest.raises(LocalStateDamagedError, match="loaded again from the checkpoint location") as damaged:
            commit(provider, 1, a="2", b="2", c="2", d="2", e="2")
    directory = re.search(r"RocksDB could not \w+ in (\S+): .*remove the directory", str(damaged.value))
    assert directory is not None
    shutil.rmtree(directory[1])
    with open_provider(location, local_dir=tmp_path / "local") as again:
        assert content(again.get_store(2)) == dict.fromkeys("abcde", "2")


@pytest.mark.parametrize("kind", [rocksdb_files.RocksDBScan, rocksdb_files.RocksDBRangesScan])
def test_closing_waits_for_the_batch_that_is_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    engine = rocksdb.LocalRocksDB(tmp_path / "db", StateStoreConf())
    engine.prepare(Changes.of(pa.array([b"a", b"b"]), pa.array([b"1", b"2"])))(LocalState(1, "head", 2))
    one = kind is rocksdb_files.RocksDBScan
    scan: Any = engine.scan(None, None) if one else engine.scan_ranges([(b"", None)], "default")
    reading, go_on = threading.Event(), threading.Event()
    check: Callable[[Any, Any], None] = kind._check_end

    def slow(self: Any, cursor: Any) -> None:
        reading.set()
        assert go_on.wait(HANG)
        check(self, cursor)

    monkeypatch.setattr(kind, "_check_end", slow)
    batches: list[Any] = []
    reader = threading.Thread(target=lambda: batches.append(next(scan)))
    reader.start()
    assert reading.wait(PATIENCE)
    closer = threading.Thread(target=engine.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    go_on.set()
    reader.join(PATIENCE)
    closer.join(PATIENCE)
    assert [batch.num_rows for batch in batches] == [2]
    with pytest.raises(StoreClosedError):
        next(scan)
