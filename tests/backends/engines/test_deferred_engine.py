"""A database that was loaded is opened for writing only when there is something worth writing."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from rocksdict import AccessType

from backends.conf import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines import engine as buffered_engine
from backends.engines.engine import DeferredEngine, StateEngine
from backends.engines.rocksdb import LocalRocksDB
from backends.exceptions import ConcurrentCommitError, LocalStateDamagedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from backends.formats.manifest import ChangelogRef, Lineage
from backends.host_memory import PEAK_OF_COPY, host_memory
from backends.partition.partition_state import PartitionState, open_partition
from backends.storage.checkpoint_storage import CheckpointStorage
from tests.backends.partition.partition_steps import changes, commit
from tests.patience import PATIENCE

CONF = StateStoreConf(fsync=False, rocksdb_row_cache_bytes=1 << 20)
DIRECTORY = "operators/op/1/0/default"
KEYS = [b"%03d" % i for i in range(100)]
READ, WRITE = "for reading", "for writing"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For what databases have been opened."""
    found: list[str] = []
    open_database = LocalRocksDB._open

    def noted(engine: LocalRocksDB, *access: AccessType, **options: Any) -> None:
        found.append(READ if access else WRITE)
        open_database(engine, *access, **options)

    monkeypatch.setattr(LocalRocksDB, "_open", noted)
    return found


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """A snapshot of ``KEYS`` with the value "old"."""
    engine = LocalRocksDB(tmp_path / "first", CONF)
    engine.prepare(changes(dict.fromkeys(KEYS, b"old")))(LocalState(1, "head 1"))
    (directory := tmp_path / "captured").mkdir()
    engine.capture(directory)()
    engine.close()
    return directory


@pytest.fixture
def restored(tmp_path: Path, captured: Path) -> Iterator[DeferredEngine]:
    engine = DeferredEngine(tmp_path / "engine", CONF)
    engine.restore(captured)
    yield engine
    engine.close()


def write(engine: StateEngine, version: int, pairs: dict[bytes, bytes | None]) -> None:
    engine.prepare(changes(pairs))(LocalState(version, f"head {version}"))


def read(engine: StateEngine, keys: list[bytes] = KEYS) -> list[bytes | None]:
    found: list[bytes | None] = engine.get_many(pa.array(keys, pa.binary()), "default").to_pylist()
    return found


def rows(scan: Iterator[pa.RecordBatch]) -> dict[bytes, bytes]:
    return {row["key"]: row["value"] for batch in scan for row in batch.to_pylist()}


def capture(engine: StateEngine, directory: Path) -> None:
    directory.mkdir()
    engine.capture(directory)()


def test_a_partition_of_a_host_is_opened_for_writing_by_its_first_snapshot(tmp_path: Path, opened: list[str]) -> None:
    storage = CheckpointStorage.open(str(tmp_path / "durable"), fsync=False)
    state = open_partition(tmp_path / "first", storage, DIRECTORY, CONF)
    refs = [ChangelogRef(*commit(state, {b"a": b"%d" % i})) for i in range(3)]
    assert opened == []
    snapshot = state.snapshots.store(None)
    assert opened == [WRITE]
    refs += [ChangelogRef(*commit(state, {b"b": b"%d" % i})) for i in range(2)]
    state.close()
    opened.clear()

    def loaded() -> PartitionState:
        loaded = open_partition(tmp_path / "second", storage, DIRECTORY, CONF)
        loaded.load(Lineage(5, tuple(refs), (snapshot,)))
        assert loaded.version == 5 and rows(loaded.reads.scan()) == {b"a": b"2", b"b": b"1"}
        return loaded

    state = loaded()
    assert opened == [READ]
    commit(state, {b"a": None})
    state.close()  # as if the process had ended: unwritten changes are in the changelogs
    state = loaded()
    commit(state, {b"a": None})
    opened.clear()
    state.snapshots.store(snapshot)
    assert opened == [WRITE] and rows(state.reads.scan()) == {b"b": b"1"}
    commit(state, {b"c": b"3"})
    assert opened == [WRITE] and rows(state.reads.scan()) == {b"b": b"1", b"c": b"3"}
    state.close()


def test_more_than_a_little_is_written_at_once(
    restored: DeferredEngine, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffered_engine, "UNWRITTEN_BYTES", 1000)
    write(restored, 2, {KEYS[0]: b"x" * 900})
    assert opened == []
    write(restored, 3, {KEYS[1]: b"y" * 200})
    write(restored, 4, {KEYS[2]: None})
    assert opened == [WRITE] and not restored._buffer.families
    assert read(restored, KEYS[:4]) == [b"x" * 900, b"y" * 200, None, b"old"] and restored.state.version == 4


def test_a_snapshot_bears_the_version_of_batches_that_changed_nothing(restored: DeferredEngine, tmp_path: Path) -> None:
    restored.prepare(Changes({}))(LocalState(2, "head 2"))
    restored.prepare(Changes({}))(LocalState(3, "head 3"))
    capture(restored, tmp_path / "again")
    copy = LocalRocksDB(tmp_path / "copy", CONF)
    copy.restore(tmp_path / "again")
    assert copy.state == LocalState(3, "head 3")
    copy.close()


def test_a_scan_continues_with_the_files_that_it_began_with(restored: DeferredEngine, tmp_path: Path) -> None:
    scans = [restored.scan(None, None, "default"), restored.scan_ranges([(b"", None)], "default")]
    files = set((tmp_path / "engine").glob("*.sst"))
    write(restored, 2, dict.fromkeys(KEYS, b"new"))
    capture(restored, tmp_path / "again")
    below: Any = restored._below
    below._db.compact_range(None, None)
    assert not files <= set((tmp_path / "engine").glob("*.sst")), "its files are still there"
    assert [rows(scan) for scan in scans] == [dict.fromkeys(KEYS, b"old")] * 2
    assert read(restored) == [b"new"] * len(KEYS)


def test_a_reader_of_the_time_before_leaves_no_old_rows_in_the_cache(
    restored: DeferredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked the family up before the database is opened for writing, and reads when the changes are written."""
    below: Any = restored._below
    family = below._families["default"]
    write(restored, 2, dict.fromkeys(KEYS, b"new"))
    restored._write_below()
    keys = pa.array(KEYS, pa.binary())
    assert family.cache.get_many(keys, lambda missing: below._read(family, missing)).to_pylist() == [b"old"] * 100
    assert read(restored) == [b"new"] * len(KEYS)


def test_reads_during_the_first_write_show_the_changes(
    restored: DeferredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each moment: before the changes are below, when they are, and when they are no longer held."""
    write(restored, 2, dict.fromkeys(KEYS[:50], b"new"))
    expected = [b"new"] * 50 + [b"old"] * 50
    below, at_gate, may_go = restored._below, threading.Event(), threading.Event()
    get_many = below.get_many

    def gated(keys: pa.BinaryArray, family: str, *, keep: bool = True) -> pa.BinaryArray:
        found = get_many(keys, family, keep=keep)
        if threading.current_thread() is reader:
            at_gate.set()
            assert may_go.wait(PATIENCE)
        return found

    monkeypatch.setattr(below, "get_many", gated)
    answers: list[list[bytes | None]] = []
    reader = threading.Thread(target=lambda: answers.append(read(restored)))
    reader.start()
    assert at_gate.wait(PATIENCE)
    capture(restored, tmp_path / "again")
    may_go.set()
    reader.join(PATIENCE)
    assert answers == [expected] and read(restored) == expected


def test_changes_that_were_prepared_before_a_load_are_not_below_those_that_it_holds(
    restored: DeferredEngine, tmp_path: Path
) -> None:
    capture(restored, captured := tmp_path / "again")
    prepared = restored.prepare(changes({KEYS[0]: b"third"}))  # straight into the database, as it was then
    restored.restore(captured)
    write(restored, 2, {KEYS[0]: b"second"})
    prepared(LocalState(3, "head 3"))
    assert read(restored, KEYS[:2]) == [b"third", b"old"] and restored.state.version == 3
    capture(restored, tmp_path / "later")
    assert read(restored, KEYS[:2]) == [b"third", b"old"]


def test_a_database_that_cannot_be_opened_for_writing_is_not_resumed_from(
    restored: DeferredEngine, captured: Path, tmp_path: Path
) -> None:
    write(restored, 2, {KEYS[0]: b"new"})
    (tmp_path / "engine" / "CURRENT").write_text("nothing of RocksDB's")
    assert read(restored, KEYS[:2]) == [b"new", b"old"]
    with pytest.raises(LocalStateDamagedError, match="cannot be opened"):
        capture(restored, tmp_path / "again")
    assert restored.state == LocalState.unfinished("head 1")
    with pytest.raises(LocalStateDamagedError, match="cannot be opened"):
        read(restored)
    with pytest.raises(LocalStateDamagedError, match="cannot be opened"):
        write(restored, 3, {KEYS[1]: b"newer"})
    assert restored.state == LocalState.unfinished("head 1")


def test_damage_that_a_snapshot_finds_while_nothing_is_held_is_noted(restored: DeferredEngine, tmp_path: Path) -> None:
    (tmp_path / "engine" / "CURRENT").write_text("nothing of RocksDB's")
    with pytest.raises(LocalStateDamagedError, match="cannot be opened"):
        capture(restored, tmp_path / "again")
    assert restored.state == LocalState.unfinished("head 1")


def test_a_process_that_is_still_there_keeps_the_database_from_being_opened_for_writing(
    restored: DeferredEngine, tmp_path: Path
) -> None:
    other = LocalRocksDB(tmp_path / "engine", CONF)
    write(other, 1, {})
    write(restored, 2, {KEYS[0]: b"new"})
    with pytest.raises(ConcurrentCommitError, match="is open in another provider"):
        capture(restored, tmp_path / "refused")
    assert read(restored, KEYS[:2]) == [b"new", b"old"] and restored.state.version == 2
    other.close()
    capture(restored, tmp_path / "again")
    assert read(restored, KEYS[:2]) == [b"new", b"old"]


def test_changes_are_added_to_no_other_version_than_the_one_that_was_read(
    restored: DeferredEngine, tmp_path: Path
) -> None:
    other = LocalRocksDB(tmp_path / "engine", CONF)
    write(other, 2, {KEYS[1]: b"other"})
    other.close()
    write(restored, 2, {KEYS[0]: b"new"})
    with pytest.raises(LocalStateDamagedError, match="had version 1 before and has version 2 now"):
        capture(restored, tmp_path / "refused")
    assert restored.state.is_unfinished


def written(engine: DeferredEngine) -> int:
    """Return the version of the underlying engine."""
    return engine._below.state.version


def test_changes_of_the_same_keys_are_gathered(restored: DeferredEngine, tmp_path: Path) -> None:
    """From the first snapshot on: until another snapshot, or changes of other keys."""
    capture(restored, tmp_path / "first snapshot")
    for version in range(2, 7):
        write(restored, version, dict.fromkeys(KEYS[: 60 + version], b"%d" % version))
        assert read(restored, [KEYS[0], KEYS[59 + version], KEYS[-1]]) == [b"%d" % version, b"%d" % version, b"old"]
        assert restored.get_one(KEYS[1], "default") == b"%d" % version
    assert written(restored) == 2 and restored.state.version == 6
    assert host_memory(CONF).held()["copies"] < 2 * PEAK_OF_COPY * restored._buffer.nbytes, "merged, not added up"
    write(restored, 7, dict.fromkeys(KEYS[90:], b"7"))
    assert written(restored) == 7 and not restored._buffer.families
    write(restored, 8, {**dict.fromkeys(KEYS[85:]), KEYS[0]: b"8"})
    assert written(restored) == 7
    expected = {**dict.fromkeys(KEYS[:66], b"6"), **dict.fromkeys(KEYS[66:85], b"old"), KEYS[0]: b"8"}
    assert rows(restored.scan(None, None, "default")) == expected
    assert rows(restored.scan_ranges([(KEYS[60], KEYS[70]), (KEYS[75], None)], "default")) == {
        key: value for key, value in expected.items() if KEYS[60] <= key < KEYS[70] or KEYS[75] <= key
    }
    capture(restored, tmp_path / "second snapshot")
    assert written(restored) == 8 and host_memory(CONF).held()["copies"] == 0
    assert rows(restored.scan(None, None, "default")) == expected
    write(restored, 9, dict.fromkeys(KEYS, b"9"))
    assert written(restored) == 9, "most of these keys are others than the last version's"


def test_gathered_changes_are_written_when_they_are_many(
    restored: DeferredEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffered_engine, "GATHERED_BYTES", 2_000)
    capture(restored, tmp_path / "snapshot")
    for version in range(2, 12):  # each has ten keys more
        write(restored, version, dict.fromkeys(KEYS[: 10 * (version - 1)], b"%09d" % version))
        assert restored._buffer.nbytes <= 2_000
    assert 2 < written(restored) < 11 and read(restored) == [b"%09d" % 11] * 100


def test_gathering_leaves_memory_to_copies(restored: DeferredEngine, tmp_path: Path) -> None:
    memory = host_memory(CONF)
    capture(restored, tmp_path / "snapshot")
    write(restored, 2, dict.fromkeys(KEYS, b"2"))
    claim = memory.claim_copy(memory.copies_bytes // PEAK_OF_COPY // 2)
    assert claim is not None
    write(restored, 3, dict.fromkeys(KEYS, b"3"))
    assert written(restored) == 3 and read(restored) == [b"3"] * 100
    del claim
    write(restored, 4, dict.fromkeys(KEYS, b"4"))
    assert written(restored) == 3 and read(restored) == [b"4"] * 100


def test_changes_that_were_prepared_for_the_database_follow_gathered_ones(
    restored: DeferredEngine, tmp_path: Path
) -> None:
    capture(restored, tmp_path / "snapshot")
    write(restored, 2, dict.fromkeys(KEYS[:50], b"2"))
    prepared = restored.prepare(changes(dict.fromkeys([KEYS[0], *KEYS[60:]], b"4")))
    write(restored, 3, dict.fromkeys(KEYS[:50], b"3"))
    assert written(restored) == 2
    prepared(LocalState(4, "head 4"))
    assert written(restored) == 4
    assert read(restored, [KEYS[0], KEYS[1], KEYS[55], KEYS[60]]) == [b"4", b"3", b"old", b"4"]


def test_a_partition_closes_though_its_gathered_changes_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = CheckpointStorage.open(str(tmp_path / "durable"), fsync=False)
    state = open_partition(tmp_path / "local", storage, DIRECTORY, CONF)
    refs = [ChangelogRef(*commit(state, {b"a": b"1"}))]
    snapshot = state.snapshots.store(None)
    refs += [ChangelogRef(*commit(state, {b"a": b"%d" % version})) for version in (2, 3)]

    def full(engine: LocalRocksDB, changes: Changes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LocalRocksDB, "prepare", full)
        state.close()
    assert f"The local files of {DIRECTORY} lack its last versions" in caplog.text
    again = open_partition(tmp_path / "local", storage, DIRECTORY, CONF)
    assert again.version == 1
    again.load(Lineage(3, tuple(refs), (snapshot,)))
    assert rows(again.reads.scan()) == {b"a": b"3"}
    again.close()


DYING = """
import os, sys
from pathlib import Path

import msgspec

from backends import fault_points
from backends.engines import rocksdb_files as write_batches
from backends.formats.manifest import ChangelogRef, Lineage
from backends.partition.partition_state import open_partition
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.decoders import keep_pandas_out
from tests.backends.engines.test_deferred_engine import CONF, DIRECTORY
from tests.backends.partition.partition_steps import commit

write_batches.WRITE_ROWS = 2

def work(root, point, number):
    seen = []

    def reach(name):
        seen.append(name)
        if seen.count(point) == number:
            os._exit(9)

    fault_points.set_hook(reach)
    storage = CheckpointStorage.open(str(root / "durable"), fsync=False)
    state = open_partition(root / "local", storage, DIRECTORY, CONF)
    state.load(msgspec.json.decode((root / "lineage").read_bytes(), type=Lineage))
    with (root / "refs").open("ab", buffering=0) as refs:
        for version in (4, 5, 6):
            ref = ChangelogRef(*commit(state, {b"%d" % i: b"%d" % version for i in range(version)}))
            refs.write(msgspec.json.encode(ref) + b"\\n")
            if version >= 5:
                state.snapshots.store(None)

keep_pandas_out()
for job in sys.stdin:
    root, point, number = job.split()
    child = os.fork()
    if child == 0:
        try:
            work(Path(root), point, int(number))
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Forks processes that take a host's partition over at version 3, and die at a point that they reach the nth time."""


@pytest.fixture(scope="module")
def die_in_fork() -> Iterator[Callable[..., int]]:
    """Returns how a process ended that was to die. One process forks them all: to start one takes longer than it works.

    That process has no threads: neither RocksDB's nor those of a pool live on in a fork.
    """
    command = [sys.executable, "-c", DYING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        ask, answer = process.stdin, process.stdout

        def die(root: Path, point: str, number: int) -> int:
            print(root, point, number, file=ask)
            return int(answer.readline())

        yield die


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "number"),
    [
        ("load:downloaded", 1),
        ("commit:durable", 2),
        ("apply", 2),
        ("apply:batch", 1),
        ("apply:batch", 3),
        ("snapshot:captured", 1),
        ("snapshot:uploaded", 1),
        ("apply", 3),
    ],
)
def test_a_process_that_dies_before_or_in_the_first_write_loses_nothing(
    die_in_fork: Callable[..., int], tmp_path: Path, point: str, number: int
) -> None:
    storage = CheckpointStorage.open(str(tmp_path / "durable"), fsync=False)
    first = open_partition(tmp_path / "first", storage, DIRECTORY, CONF)
    refs = [ChangelogRef(*commit(first, {b"a": b"%d" % version})) for version in (1, 2)]
    snapshots = (first.snapshots.store(None),)
    refs.append(ChangelogRef(*commit(first, {b"b": b"3"})))
    first.destroy()
    (tmp_path / "lineage").write_bytes(msgspec.json.encode(Lineage(3, tuple(refs), snapshots)))
    assert die_in_fork(tmp_path, point, number) == 9, f"{point} is not reached"
    told = (tmp_path / "refs").read_bytes() if (tmp_path / "refs").exists() else b""
    refs += [msgspec.json.decode(line, type=ChangelogRef) for line in told.splitlines()]
    for _ in range(2):
        state = open_partition(tmp_path / "local", storage, DIRECTORY, CONF)
        state.load(Lineage(len(refs), tuple(refs), snapshots))
        newest = {b"%d" % i: b"%d" % version for version in range(4, len(refs) + 1) for i in range(version)}
        assert rows(state.reads.scan()) == {b"a": b"2", b"b": b"3", **newest}
        state.snapshots.store(snapshots[0])
        state.close()


def test_a_gathered_commit_keeps_no_more_than_its_own_bytes(restored: DeferredEngine) -> None:
    """Its pairs may be slices of a whole message; the claims count the pairs alone."""
    before = pa.total_allocated_bytes()
    values = pa.array([bytes(1 << 16)] * 64, pa.binary())
    pairs = SortedPairs(pa.array([b"000"], pa.binary()), values.slice(7, 1))
    restored.prepare(Changes({"default": pairs}))(LocalState(2, "head 2"))
    assert read(restored, [b"000", b"001"]) == [bytes(1 << 16), b"old"]
    del values, pairs
    assert 1 << 16 <= pa.total_allocated_bytes() - before < 1 << 20
