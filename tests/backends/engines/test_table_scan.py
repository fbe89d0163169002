"""Scans from the files of a RocksDB database: what RocksDB's own iterator gives, or an error, or left to RocksDB."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import rocksdict
import xxhash
from rocksdict import Checkpoint, DBCompressionType, Options, Rdict, SstFileWriter

from backends.conf import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines import rocksdb_files, sst_reader
from backends.engines.rocksdb import LocalRocksDB
from backends.engines.rocksdb_files import RocksDBScan
from backends.engines.sst_reader import (
    DamagedTableError,
    Table,
    TableFile,
    TableScan,
    UnknownTableError,
    listed_tables,
    part_of,
)
from backends.exceptions import LocalStateDamagedError, StoreClosedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from tests.effort import effort
from tests.patience import PATIENCE

Pairs = list[tuple[bytes, bytes]]
SMALL_MEMTABLES = {"rocksdb_memtable_bytes": 64 << 10, "rocksdb_write_buffer_bytes": 1 << 20}


@pytest.fixture(autouse=True)
def few_pairs_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb_files, "FEW_PAIRS", 1)


class Database:
    """A database, its expected content, and its version."""

    def __init__(self, path: Path, **conf: object) -> None:
        self.path = path
        self.engine = LocalRocksDB(path, StateStoreConf(**conf))  # type: ignore[arg-type]
        self.held: dict[bytes, bytes] = {}
        self.version = 0

    def write(self, changes: dict[bytes, bytes | None]) -> None:
        self.version += 1
        made = Changes({"default": SortedPairs.from_dict(changes)})
        self.engine.prepare(made)(LocalState(self.version, str(self.version), None))
        for key, value in changes.items():
            if value is None:
                self.held.pop(key, None)
            else:
                self.held[key] = value

    def write_files(self, tmp_path: Path) -> None:
        """Have all pairs in files."""
        self.engine.capture(Path(tempfile.mkdtemp(dir=tmp_path)))

    def scan(self, start: bytes | None = None, end: bytes | None = None) -> TableScan:
        scan = self.engine.scan(start, end)
        assert isinstance(scan, TableScan)
        return scan

    def tables(self) -> list[Table]:
        tables = listed_tables(self.engine._db.property_value("rocksdb.sstables"))
        assert tables is not None
        return tables


def pairs_of(batches: Iterator[pa.RecordBatch]) -> Pairs:
    return [
        (key, value)
        for batch in batches
        for key, value in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)
    ]


def key_of(rng: random.Random, even: bool) -> bytes:
    group = rng.randrange(64).to_bytes(2, "big")
    if even:
        return group + b"\x01" + rng.randrange(3000).to_bytes(8, "big")
    length = rng.choice([300, 3000]) if rng.random() < 0.01 else rng.choice([0, 0, 3, 7, 8, 9, 120, 130])
    return group + b"k" * length + str(rng.randrange(500)).encode()


def value_of(rng: random.Random, even: bool) -> bytes:
    if even:
        return rng.randbytes(17)
    return rng.randbytes(rng.choice([0, 1, 20, 127, 128, 200])) * (40 if rng.random() < 0.05 else 1)


@pytest.mark.parametrize("seed", range(effort(4, 20)))
def test_random_pairs_match_those_of_rocksdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    even = seed % 3 == 0
    monkeypatch.setattr(sst_reader, "STEP_BLOCKS", rng.choice([1, 3, 256]))
    monkeypatch.setattr(sst_reader, "STEP_BYTES", rng.choice([4_000, 20_000, 1 << 20]))
    monkeypatch.setattr(sst_reader, "LONG_KEY_BYTES", rng.choice([30, 256]))
    monkeypatch.setattr(sst_reader, "MEAN_KEY_BYTES", 1 << 20)  # a small file may have long keys only
    compression = rng.choice(["none", "lz4", "zstd"])
    bits = rng.choice([0, 10])
    db = Database(tmp_path / "db", rocksdb_compression=compression, rocksdb_bloom_filter_bits=bits, **SMALL_MEMTABLES)
    for _ in range(rng.randrange(1, 8)):
        changes: dict[bytes, bytes | None] = {}
        for _ in range(rng.randrange(1, 800)):
            changes[key_of(rng, even)] = value_of(rng, even) if rng.random() < 0.8 else None
        if rng.random() < 0.3:
            changes |= dict.fromkeys(list(db.held)[: len(db.held) // 2])
        db.write(changes)
        if rng.random() < 0.5:
            db.write_files(tmp_path)
    db.write({b"\x00\x01last": b"one"})
    db.write_files(tmp_path)
    expected = sorted(db.held.items())
    assert pairs_of(db.scan()) == expected
    assert pairs_of(RocksDBScan(db.engine._db, None, None, db.engine._failure)) == expected
    bounds = [None, b"\x00", b"\x00\x10", b"\x00\x20", b"\x00\x3f", b"\x00\x40"]
    for start, end in [
        (None, b"\x00\x10"),
        (b"\x00\x10", None),
        *((rng.choice(bounds), rng.choice(bounds)) for _ in "abcdef"),
    ]:
        found = pairs_of(db.engine.scan(start, end))
        assert found == [(k, v) for k, v in expected if (start is None or k >= start) and (end is None or k < end)]
    db.engine.close()


def test_levels_and_files_that_are_taken_over_are_read(tmp_path: Path) -> None:
    """Sorted files are at the bottom level; later writes and removals are above them in several files."""
    db = Database(tmp_path / "db")
    below = {i.to_bytes(4, "big"): b"old" for i in range(20_000)}
    db.engine.load_sorted([("default", SortedPairs.from_dict(below))], LocalState.unfinished("x"))
    db.held = dict(below)
    for step in range(3):
        db.write({i.to_bytes(4, "big"): None if i % 2 else b"new" for i in range(step * 100, 20_000, 7 + step)})
        db.write_files(tmp_path)
    assert len({table.level for table in db.tables()}) > 1 and sum(t.level == 0 for t in db.tables()) >= 2
    assert pairs_of(db.scan()) == sorted(db.held.items())
    db.engine.close()


def test_pairs_in_memory_leave_the_scan_to_rocksdb(tmp_path: Path) -> None:
    db = Database(tmp_path / "db")
    db.write({b"\x00\x01a": b"1"})
    db.write_files(tmp_path)
    assert isinstance(db.engine.scan(None, None), TableScan)
    db.write({b"\x00\x01b": b"2"})
    scan = db.engine.scan(None, None)
    assert isinstance(scan, RocksDBScan) and pairs_of(scan) == sorted(db.held.items())
    db.engine.close()


def test_very_many_pairs_are_written_to_files_for_a_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb_files, "FLUSH_PAIRS", 1000)
    db = Database(tmp_path / "db")
    db.write({i.to_bytes(2, "big") + b"k": b"v" for i in range(998)})
    db.write_files(tmp_path)
    db.write({b"\x00\x01k": b"new", b"\x00\x02k": None, b"\x03\xe7k": b"v"})
    assert isinstance(db.engine.scan(None, None), RocksDBScan), "999 pairs"
    both = {"default": {b"\x03\xe8k": b"v", b"\x03\xe9k": b"v"}, "other": {b"\x00\x01k": b"of another family"}}
    db.version += 1
    changes = Changes({family: SortedPairs.from_dict(its) for family, its in both.items()})
    db.engine.prepare(changes)(LocalState(db.version, str(db.version), None))
    db.held.update(both["default"])
    monkeypatch.setattr(rocksdb_files, "FLUSH_PAIRS", 400)
    assert isinstance(db.engine.scan(b"\x02", None), RocksDBScan), "less than half of all"
    scan = db.engine.scan(None, None)
    assert isinstance(scan, TableScan)
    db.write({b"\x00\x03k": b"later"})
    assert dict(pairs_of(scan)) == {**db.held, b"\x00\x03k": b"v"}
    # A process that dies now leaves one version behind, of all families: not the last one, which was in memory.
    shutil.copytree(tmp_path / "db", tmp_path / "copy")
    assert not (tmp_path / "db" / rocksdb_files.FLUSH_DIRECTORY).exists()
    left = tmp_path / "copy" / f"{rocksdb_files.FLUSH_DIRECTORY}.tmp"  # by a process that died in the middle of it
    left.mkdir()
    copy = LocalRocksDB(tmp_path / "copy", StateStoreConf())
    assert copy.state.version == db.version - 1
    assert dict(pairs_of(copy.scan(None, None))) == {**db.held, b"\x00\x03k": b"v"}
    assert dict(pairs_of(copy.scan(None, None, "other"))) == both["other"]
    assert not left.exists()
    copy.close()
    db.engine.close()


def with_one_pair_in_memory(tmp_path: Path) -> Database:
    """Make a database of a hundred pairs in files, and write one of them again."""
    db = Database(tmp_path / "db")
    db.write({i.to_bytes(2, "big") + b"k": b"v" for i in range(100)})
    db.write_files(tmp_path)
    db.write({b"\x00\x01k": b"new"})
    return db


def test_a_scan_does_without_files_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb_files, "FLUSH_PAIRS", 1)
    db = with_one_pair_in_memory(tmp_path)

    def by_rocksdb() -> None:
        scan = db.engine.scan(None, None)
        assert isinstance(scan, RocksDBScan) and dict(pairs_of(scan)) == db.held

    (tmp_path / "db" / rocksdb_files.FLUSH_DIRECTORY).write_text(
        "no directory"
    )  # RocksDB's checkpoint refuses to begin
    by_rocksdb()
    (tmp_path / "db" / rocksdb_files.FLUSH_DIRECTORY).unlink()
    asked: list[Rdict] = []
    with monkeypatch.context() as patched:
        patched.setattr(rocksdict, "Checkpoint", asked.append)
        with patched.context() as full:
            full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
            by_rocksdb()
        with patched.context() as crowded:
            crowded.setattr(rocksdb_files, "FLUSHED_FILES", 1)
            by_rocksdb()
    assert not asked
    assert dict(pairs_of(db.scan())) == db.held
    db.engine.close()


def test_scans_opened_side_by_side_have_files_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb_files, "FLUSH_PAIRS", 1)
    db = with_one_pair_in_memory(tmp_path)
    both_ask = threading.Event()
    asked: list[str] = []
    checkpoints: list[Rdict] = []

    class NotedLock:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            asked.append(threading.current_thread().name)
            if len(asked) == 2:
                both_ask.set()
            self.lock.acquire()

        def __exit__(self, *error: object) -> None:
            self.lock.release()

    def checkpoint(database: Rdict) -> Checkpoint:
        checkpoints.append(database)
        assert both_ask.wait(PATIENCE)
        return Checkpoint(database)

    monkeypatch.setattr(rocksdict, "Checkpoint", checkpoint)
    monkeypatch.setattr(db.engine._file_scans, "_flushing", NotedLock())
    with ThreadPoolExecutor(2) as threads:
        for scan in [threads.submit(db.scan) for _ in range(2)]:
            assert dict(pairs_of(scan.result())) == db.held
    assert len(checkpoints) == 1
    db.engine.close()


def test_few_pairs_and_narrow_ranges_are_left_to_rocksdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = Database(tmp_path / "db")
    db.write({i.to_bytes(2, "big") + b"k": b"v" for i in range(1000)})
    db.write_files(tmp_path)
    assert isinstance(db.engine.scan(None, None), TableScan)
    assert isinstance(db.engine.scan(b"\x00\x01k", b"\x03\x00"), RocksDBScan), "a bound within a key group"
    monkeypatch.setattr(rocksdb_files, "FEW_PAIRS", 500)
    assert isinstance(db.engine.scan(b"\x01", None), TableScan), "744 of 1000"
    assert isinstance(db.engine.scan(b"\x02", b"\x03"), RocksDBScan), "256 of 1000"
    db.engine.close()


def test_a_scan_shows_the_pairs_of_its_call_though_rocksdb_removes_the_files(tmp_path: Path) -> None:
    db = Database(tmp_path / "db", **SMALL_MEMTABLES)
    db.write({i.to_bytes(4, "big"): b"old" for i in range(5000)})
    db.write_files(tmp_path)
    expected = sorted(db.held.items())
    scan = db.scan()
    before = {table.number for table in db.tables()}
    db.write({i.to_bytes(4, "big"): b"new" for i in range(5000)})
    db.write_files(tmp_path)
    db.engine._db.compact_range(None, None)
    assert not before & {table.number for table in db.tables()}
    assert pairs_of(scan) == expected != sorted(db.held.items())
    db.engine.close()


def test_files_that_rocksdb_replaces_while_they_are_opened_are_listed_again(tmp_path: Path) -> None:
    db = Database(tmp_path / "db")
    db.write({i.to_bytes(4, "big"): b"v" for i in range(100)})
    db.write_files(tmp_path)
    tables = db.tables()
    gone = [table._replace(number=999_999) for table in tables]
    answers = [gone, gone, tables]
    scan = sst_reader.open_scan(db.path, lambda: answers.pop(0), None, None, db.engine._failure)
    assert scan is not None and not answers and pairs_of(scan) == sorted(db.held.items())
    assert sst_reader.open_scan(db.path, lambda: gone, None, None, db.engine._failure) is None
    db.engine.close()


def test_rocksdb_scans_if_no_more_files_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = Database(tmp_path / "db")
    db.write({i.to_bytes(4, "big"): b"v" for i in range(100)})
    db.write_files(tmp_path)

    def refused(path: Path, size: int) -> TableFile:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(sst_reader, "TableFile", refused)
    scan = db.engine.scan(None, None)
    assert isinstance(scan, RocksDBScan) and pairs_of(scan) == sorted(db.held.items())
    db.engine.close()


def test_a_store_that_is_closed_ends_its_scans(tmp_path: Path) -> None:
    db = Database(tmp_path / "db")
    db.write({i.to_bytes(4, "big"): b"v" * 100 for i in range(20_000)})
    db.write_files(tmp_path)
    scan = db.scan()
    next(scan)
    db.engine.close()
    with pytest.raises(StoreClosedError):
        next(scan)


def test_a_block_that_has_changed_is_an_error_and_no_value(tmp_path: Path) -> None:
    db = Database(tmp_path / "db")
    db.write({i.to_bytes(4, "big"): i.to_bytes(30, "big") for i in range(5000)})
    db.write_files(tmp_path)
    path = db.path / f"{db.tables()[0].number:06}.sst"
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(effort(20, 200)):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        (tmp_path / "damaged.sst").write_bytes(damaged)
        try:
            file = TableFile(tmp_path / "damaged.sst", len(whole))
        except (DamagedTableError, UnknownTableError):
            continue
        try:
            found = [
                pair
                for step in file.pairs(None, None)
                for pair in zip(step.keys.to_pylist(), step.values.to_pylist(), strict=True)
            ]
        except DamagedTableError:
            continue
        assert found == sorted(db.held.items()), "the filter, or what names the file"
    damaged = bytearray(whole)
    damaged[100] ^= 1
    path.write_bytes(damaged)
    scan = db.scan()
    for _ in range(3):  # and never an end, as if these were all pairs
        with pytest.raises(LocalStateDamagedError, match="has changed"):
            pairs_of(scan)
    path.write_bytes(whole)
    scan = db.scan()
    os.truncate(path, 1000)
    with pytest.raises(LocalStateDamagedError, match="bytes at"):
        pairs_of(scan)
    db.engine.close()


def sst_files(directory: Path) -> list[str]:
    """Return the files of a database that the process has open."""
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return sorted(link for link in links if link.startswith(str(directory.resolve())) and link.endswith(".sst"))


def test_a_damaged_file_lets_go_of_those_opened_before_it(tmp_path: Path) -> None:
    db = Database(tmp_path / "db")
    for version in range(2):
        db.write({i.to_bytes(4, "big"): bytes([version]) for i in range(100)})
        db.write_files(tmp_path)
    tables = db.tables()
    assert len(tables) == 2
    path = db.path / f"{tables[1].number:06}.sst"
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"leveldb.BytewiseComparator")] ^= 1
    path.write_bytes(damaged)
    before = sst_files(db.path)
    with pytest.raises(LocalStateDamagedError, match="has changed") as raised:
        db.engine.scan(None, None)
    assert sst_files(db.path) == before, raised
    db.engine.close()


def test_content_that_cannot_be_decoded_is_a_read_failure(tmp_path: Path) -> None:
    """A defective writer may have produced the file: then the checksum is right, and the content wrong."""
    db = Database(tmp_path / "db", rocksdb_compression="none")
    db.write({i.to_bytes(4, "big"): b"v" for i in range(100)})
    db.write_files(tmp_path)
    (table,) = db.tables()
    path = db.path / f"{table.number:06}.sst"
    file = TableFile(path, table.size)
    ((offset, size),) = file._handles(None, None)
    content = bytearray(path.read_bytes())
    content[offset + size - 4 : offset + size] = (100_000).to_bytes(4, "little")  # so many restart points
    place = file._context ^ offset if file._context else 0
    checksum = (xxhash.xxh3_64_intdigest(content[offset : offset + size]) + place) & 0xFFFFFFFF
    content[offset + size + 1 : offset + size + 5] = checksum.to_bytes(4, "little")
    path.write_bytes(content)
    scan = db.scan()
    for _ in range(2):
        with pytest.raises(LocalStateDamagedError) as raised:
            next(scan)
        assert isinstance(raised.value.__cause__, IndexError)
    file.close()
    db.engine.close()


def test_a_scan_that_was_interrupted_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = Database(tmp_path / "db")
    db.write({i.to_bytes(4, "big"): b"v" * 100 for i in range(5000)})
    db.write_files(tmp_path)
    scan = db.scan()
    next(scan)

    def interrupted(blocks: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sst_reader, "decoded_blocks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(scan)
    with pytest.raises(KeyboardInterrupt):
        next(scan)
    db.engine.close()


def test_few_long_keys_do_not_slow_the_short_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys of a step take the memory of the longest one of those that are decoded together."""
    most_words = 0
    keys = sst_reader._Entries.keys

    def watched(self: sst_reader._Entries) -> tuple[pa.BinaryArray, npt.NDArray[np.uint8]]:
        nonlocal most_words
        most_words = max(most_words, self._num_words)
        return keys(self)

    monkeypatch.setattr(sst_reader._Entries, "keys", watched)
    db = Database(tmp_path / "db", **SMALL_MEMTABLES)
    rng = random.Random(0)
    changes: dict[bytes, bytes | None] = {rng.randbytes(20): rng.randbytes(8) for _ in range(3000)}
    changes |= {rng.randbytes(2) + b"k" * 3000 + bytes([i]): b"long" for i in range(8)}
    changes |= {b"\x80\x00" + b"k" * 100_000 + bytes([i]): b"longer" for i in range(20)}
    monkeypatch.setattr(sst_reader, "MEAN_KEY_BYTES", 1 << 20)
    db.write(changes)
    db.write_files(tmp_path)
    removed = [key for i, key in enumerate(sorted(changes)) if i % 3 == 0 or len(key) == 3003]
    db.write(dict.fromkeys(removed[:-100]))
    db.write_files(tmp_path)
    assert pairs_of(db.scan()) == sorted(db.held.items())
    assert 0 < most_words <= sst_reader.LONG_KEY_BYTES // 8
    db.engine.close()


def test_a_file_of_long_keys_is_left_to_rocksdb(tmp_path: Path) -> None:
    for length, kind in [(sst_reader.MEAN_KEY_BYTES - 8, TableScan), (sst_reader.MEAN_KEY_BYTES - 7, RocksDBScan)]:
        db = Database(tmp_path / str(length))
        db.write({i.to_bytes(2, "big") + b"k" * (length - 2): b"v" for i in range(100)})
        db.write_files(tmp_path)
        scan = db.engine.scan(None, None)
        assert isinstance(scan, kind) and pairs_of(scan) == sorted(db.held.items())
        db.engine.close()


def test_a_missing_property_of_rocksdb_is_not_taken_for_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = Database(tmp_path / "db")
    db.write({i.to_bytes(4, "big"): b"v" for i in range(100)})
    db.write_files(tmp_path)
    asked: list[Rdict] = []
    for name in rocksdb_files._IN_MEMORY:
        with monkeypatch.context() as patched:
            patched.setattr(rocksdb_files, "_IN_MEMORY", ("rocksdb.no-such-property", name))
            patched.setattr(rocksdb_files, "FLUSH_PAIRS", 1)
            patched.setattr(rocksdict, "Checkpoint", asked.append)
            assert isinstance(db.engine.scan(None, None), RocksDBScan) and not asked
    assert isinstance(db.engine.scan(None, None), TableScan)
    monkeypatch.setattr(rocksdb_files, "_TABLES", "rocksdb.no-such-property")
    assert rocksdb_files.described_tables(db.engine._db) is None
    assert isinstance(db.engine.scan(None, None), RocksDBScan)
    db.engine.close()


def test_files_are_not_listed_while_pairs_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listings = 0
    tables = rocksdb_files.described_tables

    def listed(db: Rdict) -> list[Table] | None:
        nonlocal listings
        listings += 1
        return tables(db)

    monkeypatch.setattr(rocksdb_files, "described_tables", listed)
    db = Database(tmp_path / "db")
    db.write({b"\x00\x01a": b"1"})
    assert isinstance(db.engine.scan(None, None), RocksDBScan) and listings == 0
    db.write_files(tmp_path)
    assert isinstance(db.engine.scan(None, None), TableScan) and listings == 2
    db.engine.close()


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_the_compressions_of_the_settings_are_read(tmp_path: Path, compression: str) -> None:
    db = Database(tmp_path / "db", rocksdb_compression=compression)
    db.write({i.to_bytes(4, "big"): b"v" * 50 for i in range(100)})
    db.write_files(tmp_path)
    assert pairs_of(db.scan()) == sorted(db.held.items())
    db.engine.close()


def test_another_compression_and_another_size_are_left_to_rocksdb(tmp_path: Path) -> None:
    options = Options(raw_mode=True)
    options.set_compression_type(DBCompressionType.snappy())
    path = tmp_path / "snappy.sst"
    writer = SstFileWriter(options=options)
    writer.open(str(path))
    writer[b"\x00\x01a"] = b"v" * 1000
    writer.finish()
    with pytest.raises(UnknownTableError, match="b'Snappy'"):
        TableFile(path, path.stat().st_size)

    db = Database(tmp_path / "db")
    db.write({i.to_bytes(4, "big"): b"v" for i in range(100)})
    db.write_files(tmp_path)
    (table,) = db.tables()
    other = [table._replace(size=table.size + 1)]
    assert sst_reader.open_scan(db.path, lambda: other, None, None, db.engine._failure) is None
    db.engine.close()


def test_unsupported_tables_are_left_to_rocksdb(tmp_path: Path) -> None:
    db = Database(tmp_path / "db")
    db.write({i.to_bytes(4, "big"): b"v" for i in range(3000)})
    db.write_files(tmp_path)
    db.engine._db.delete_range(b"\x00\x00\x01", b"\x00\x00\x02")
    db.write_files(tmp_path)
    scan = db.engine.scan(None, None)
    assert isinstance(scan, RocksDBScan), "a range that is removed"
    assert len(pairs_of(scan)) == 3000 - 256
    assert listed_tables("--- level 0 --- version# 1 ---\n 7:100 something else") is None
    assert listed_tables("") is None
    assert listed_tables("--- level 0 --- version# 1 ---\n") is None
    db.engine.close()


def table(level: int, newest: int, smallest: bytes, largest: bytes) -> str:
    return (
        f"--- level {level} --- version# 1 ---\n 7:100[1 .. {newest}]['{smallest.hex().upper()}' seq:1, type:1 .. "
        f"'{largest.hex().upper()}' seq:2, type:1](0)\n"
    )


def test_files_in_another_order_are_left_to_rocksdb() -> None:
    assert listed_tables(table(0, 9, b"a", b"z") + table(0, 5, b"a", b"z")) is not None
    assert listed_tables(table(0, 5, b"a", b"z") + table(0, 9, b"a", b"z")) is None
    assert listed_tables(table(1, 5, b"a", b"c") + table(1, 9, b"d", b"z")) is not None
    assert listed_tables(table(1, 5, b"a", b"d") + table(1, 9, b"d", b"z")) is None


def test_the_share_of_the_keys_in_a_range_is_estimated_by_key_groups() -> None:
    tables = listed_tables(table(6, 1, b"\x00\x00a", b"\x00\x63z"))
    assert tables is not None
    assert part_of(tables, None, None) == 1.0
    assert part_of(tables, b"\x00\x32", None) == part_of(tables, None, b"\x00\x32") == 0.5
    assert part_of(tables, b"\x00\x64", None) == part_of(tables, b"\x00\x32", b"\x00\x32") == 0.0
    assert part_of(tables, b"\x00\x01a", None) == part_of([], None, None) == 0.0
