"""A disk that is really full: a small file system in memory, which takes the right to mount."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backends.conf import StateStoreConf
from backends.engines.rocksdb import LocalRocksDB
from backends.exceptions import LocalDiskFullError
from backends.formats.local_state import LocalState
from backends.formats.manifest import ChangelogRef, Lineage
from backends.partition.partition_state import open_partition
from backends.storage.checkpoint_storage import CheckpointStorage
from tests.backends.partition.partition_steps import changes, commit
from tests.patience import PATIENCE

MIB = 1 << 20
ROOM = 24
DIRECTORY = "operators/op/1/0/default"
CONF = StateStoreConf(fsync=False, compression="none", rocksdb_compression="none")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}m", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes a right that this user has not got")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture
def storage(tmp_path: Path) -> CheckpointStorage:
    return CheckpointStorage.open(str(tmp_path / "durable"), fsync=False)


def written(storage: CheckpointStorage, local: Path) -> Lineage:
    """Eight versions of 1 MiB each, and a snapshot of the last one."""
    random = Random(18)  # not to be compressed
    state = open_partition(local, storage, DIRECTORY, CONF)
    chain: list[ChangelogRef] = []
    for version in range(1, 9):
        pairs = {b"%d-%d" % (version, i): random.randbytes(MIB // 10) for i in range(10)}
        chain.append(ChangelogRef(*commit(state, pairs)))
    snapshot = state.snapshots.store(None)
    state.destroy()
    return Lineage(8, tuple(chain), (snapshot,))


def test_a_load_that_finds_the_disk_full_says_so_and_resumes_when_there_is_room(
    small: Path, tmp_path: Path, storage: CheckpointStorage
) -> None:
    lineage = written(storage, tmp_path / "large")
    filler = small / "filler"
    filler.write_bytes(bytes((ROOM - 4) * MIB))
    state = open_partition(small / "local", storage, DIRECTORY, CONF)
    with pytest.raises(LocalDiskFullError, match=rf"The disk of {small}/local.* of {ROOM}.0 MiB are free"):
        state.load(lineage)
    filler.unlink()
    state.load(lineage)
    assert (state.version, sum(b.num_rows for b in state.reads.scan())) == (8, 80)
    state.destroy()


def test_a_disk_that_becomes_full_while_memtables_are_written_stops_no_writer_for_ever(small: Path) -> None:
    """RocksDB's recovery waits for a writer that waits for a flush: about one attempt in three stood still."""
    conf = StateStoreConf(rocksdb_compression="none", rocksdb_memtable_bytes=MIB // 4)
    random = Random(19)
    versions = [changes({random.randbytes(16): random.randbytes(500) for _ in range(64)}) for _ in range(60)]

    def fill(database: LocalRocksDB) -> None:
        with suppress(LocalDiskFullError):
            for i, apply in enumerate([database.prepare(version) for version in versions]):
                apply(LocalState(i + 2))

    for _ in range(4):
        database = LocalRocksDB(small / "db", conf)
        database.prepare(changes({b"k": b"v"}))(LocalState(1))
        filler = small / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(small).free - 40_000))
        filling = threading.Thread(target=fill, args=(database,), daemon=True)
        filling.start()
        filling.join(PATIENCE)
        assert not filling.is_alive()
        assert database.state == LocalState.unfinished(None), "the write that found the disk full has failed"
        database.close()
        filler.unlink()
        shutil.rmtree(small / "db")


class FullDatabase:
    """A database that has found the disk full: from then on RocksDB refuses all writes, until it is reopened."""

    def __init__(self, db: Any) -> None:
        self._db = db

    def write(self, *args: Any) -> None:
        raise Exception("IO error: No space left on device: While appending to file: 000015.sst")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def test_a_database_that_has_found_the_disk_full_is_reopened_by_the_next_load(
    tmp_path: Path, storage: CheckpointStorage
) -> None:
    chain = written(storage, tmp_path / "a").changelogs
    state = open_partition(tmp_path / "b", storage, DIRECTORY, CONF)
    state.load(Lineage(4, chain[:4]))
    state.write_out()
    engine: Any = state._engine
    engine._below._db = FullDatabase(engine._below._db)
    with pytest.raises(LocalDiskFullError, match="Make room there"):
        state.load(Lineage(8, chain))
    state.load(Lineage(8, chain))
    assert (state.version, sum(b.num_rows for b in state.reads.scan())) == (8, 80)
    state.destroy()


def test_a_first_write_that_finds_the_disk_full_says_so_and_the_next_load_resumes_when_there_is_room(
    small: Path, tmp_path: Path, storage: CheckpointStorage
) -> None:
    first = open_partition(tmp_path / "first", storage, DIRECTORY, CONF)
    refs = [ChangelogRef(*commit(first, {b"a": b"1"}))]
    snapshot = first.snapshots.store(None)
    state = open_partition(small / "local", storage, DIRECTORY, CONF)
    state.load(Lineage(1, tuple(refs), (snapshot,)))
    refs.append(ChangelogRef(*commit(state, {b"b": b"2"})))
    filler = small / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert [state.reads.get_one(key) for key in (b"a", b"b")] == [b"1", b"2"]
    with pytest.raises(LocalDiskFullError, match=rf"The disk of {small}/local.* is full"):
        state.snapshots.store(snapshot)
    filler.unlink()
    lineage = Lineage(2, tuple(refs), (snapshot,))
    state.load(lineage)
    again = state.snapshots.store(snapshot)
    state.destroy()
    first.load(Lineage(2, tuple(refs), (again,)))
    assert [first.reads.get_one(key) for key in (b"a", b"b")] == [b"1", b"2"]
    first.destroy()
