"""A RocksDB database: its options and memory, scans by RocksDB or from its files, and files that it ingests."""

from __future__ import annotations

import logging
import shutil
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import rocksdict

from backends.conf import StateStoreConf
from backends.encoding.keys import KEY_GROUP_BYTES, KeyRange
from backends.encoding.sorted_pairs import PAIRS_SCHEMA, SortedPairs, to_bytes_list
from backends.engines.sst_reader import FEW_PAIRS, OnFailure, Table, TableScan, listed_tables, open_scan, part_of
from backends.exceptions import StoreClosedError
from backends.formats.changelog import Changes
from backends.host_memory import BLOCK_CACHE, WRITE_BUFFERS, HostMemory, host_memory

log = logging.getLogger(__name__)

# Properties of a column family in an open RocksDB: numbers of keys and bytes, what is only in memory, and the files.


_IN_MEMORY = ("rocksdb.num-entries-active-mem-table", "rocksdb.num-entries-imm-mem-tables")
_TABLES = "rocksdb.sstables"


def estimated_keys(db: rocksdict.Rdict) -> int:
    """Return RocksDB's estimate of the number of keys."""
    return int(db.property_int_value("rocksdb.estimate-num-keys") or 0)


def write_buffer_bytes(db: rocksdict.Rdict) -> int:
    """Return the bytes of the pairs that are not in files yet."""
    return int(db.property_int_value("rocksdb.cur-size-all-mem-tables") or 0)


def is_in_memory(db: rocksdict.Rdict) -> bool | None:
    """Return whether some pairs are only in RocksDB's memory; None if RocksDB does not say."""
    numbers = [db.property_int_value(name) for name in _IN_MEMORY]
    return None if None in numbers else any(numbers)


def described_tables(db: rocksdict.Rdict) -> list[Table] | None:
    """Return the files; None if there are none, or if RocksDB's list is not understood."""
    return listed_tables(db.property_value(_TABLES) or "")


FLUSH_DIRECTORY = "flush"
"""Directory of a checkpoint that is made only for its side effect: RocksDB flushes its memory to files first."""
FLUSH_DIRECTORIES = (FLUSH_DIRECTORY, f"{FLUSH_DIRECTORY}.tmp")
"""Directories that are left if a process dies in a flush. RocksDB writes a checkpoint to the second one first."""
FLUSHED_FILES = 8
"""If this many files wait for compaction, a scan does not flush: RocksDB would stall until there are fewer."""
FLUSH_PAIRS, FLUSH_PART = 500_000, 0.5
"""A scan of at least this many pairs, and of at least this share of all pairs, makes RocksDB flush its memory first.
The additional file may cost a later compaction about as much as the scan itself.
"""


class FileScans:
    """Scans of the database in the directory ``path`` that are read from its files. Many threads may open scans."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._flushing = threading.Lock()

    def open(
        self,
        database: Any,
        families: Sequence[rocksdict.Rdict],
        family: rocksdict.Rdict,
        start: bytes | None,
        end: bytes | None,
        on_failure: OnFailure,
    ) -> TableScan | None:
        """Return a scan of many pairs of a column family that are all in files; None if RocksDB should scan them.

        A scan of very many pairs, and of most of those that exist, makes RocksDB flush its memory to files first.
        ``families`` are all column families of the database. ``on_failure`` makes the errors of the scan.
        """
        if len(start or b"") > KEY_GROUP_BYTES or len(end or b"") > KEY_GROUP_BYTES:
            return None
        is_unwritten = is_in_memory(family)
        if is_unwritten is None:
            return None
        keys = estimated_keys(family)
        if keys < (FLUSH_PAIRS if is_unwritten else FEW_PAIRS) or (tables := described_tables(family)) is None:
            return None
        part = part_of(tables, start, end)
        if keys * part < FEW_PAIRS:
            return None
        if is_unwritten:
            is_worth_it = keys * part >= FLUSH_PAIRS and part >= FLUSH_PART
            is_crowded = sum(table.level == 0 for table in tables) >= FLUSHED_FILES
            if not is_worth_it or is_crowded or not self._flushed(database, families, family):
                return None
        return open_scan(self._path, partial(described_tables, family), start, end, on_failure)

    def _flushed(self, database: Any, families: Sequence[rocksdict.Rdict], family: rocksdict.Rdict) -> bool:
        """Flush RocksDB's memory to files, all column families at once; return whether it succeeded.

        RocksDB's own flush covers one column family: after a crash, the version would not match the pairs. If the disk
        is nearly full, nothing is tried: RocksDB accepts no more writes after a flush that fails.
        """
        directory = self._path / FLUSH_DIRECTORY
        with self._flushing:  # scans may be opened side by side
            if is_in_memory(family) is False:
                return True
            if shutil.disk_usage(self._path).free < 2 * sum(map(write_buffer_bytes, families)):
                return False
            shutil.rmtree(directory, ignore_errors=True)
            try:
                rocksdict.Checkpoint(database).create_checkpoint(str(directory))
            except Exception:  # rocksdict raises plain Exception
                # The pairs in memory can still be read. A damaged database reports the damage at its next write.
                log.warning("RocksDB scans %s itself: its files could not be written", self._path, exc_info=True)
                return False
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            return is_in_memory(family) is False


# The options of a RocksDB database, the memory that all databases of a process share, and the memory of each database.


ARENA_BYTES = 4 << 10
"""The block of the write buffers that a column family takes with its first write, and again whenever the block is full.

RocksDB's default is 1 MiB. All column families of all partitions of a process share the write buffers, and a write
flushes to files while they are full. So with 1 MiB a host of a hundred partitions wrote files in every batch.
"""
DATABASE_BYTES = 128 << 10
FAMILY_BYTES = 72 << 10
"""The memory of an open database, and of each of its column families, including the project's own (``META_FAMILY``).

RocksDB has no figure for it. It was measured as the growth of a process's resident memory from 150 to 450 open
databases, without write buffers and block cache. It is 268 KiB with 2 column families, 397 with 4, and 622 with 7, the
project's own among them (RocksDB of rocksdict 0.3, x86-64, glibc).
"""

_shared_lock = threading.Lock()
_shared: dict[HostMemory, SharedMemory] = {}


@dataclass(frozen=True)
class SharedMemory:
    """The block cache and the write buffers."""

    blocks: rocksdict.Cache
    buffers: rocksdict.WriteBufferManager


def shared_memory(conf: StateStoreConf) -> SharedMemory:
    """Return the block cache and write buffers that stores of the process with equal limits share."""
    memory = host_memory(conf)
    with _shared_lock:
        if memory not in _shared:
            # RocksDB's other cache has up to 64 shards, and no shard holds a block larger than itself. The shards of a
            # cache of 64 MiB are smaller than the filter of a large file: every key then read the filter from disk, in
            # 70 µs.
            blocks = rocksdict.Cache.new_hyper_clock_cache(conf.block_cache_bytes, 0)
            buffers = rocksdict.WriteBufferManager(conf.write_buffer_bytes, False)
            memory.measure(BLOCK_CACHE, blocks.get_usage)
            memory.measure(WRITE_BUFFERS, buffers.get_usage)
            _shared[memory] = SharedMemory(blocks, buffers)
        return _shared[memory]


MAX_MEMTABLES = 64
"""RocksDB stops writes at so many memtables of a column family. ``LocalRocksDB`` waits long before that."""


def database_options(conf: StateStoreConf) -> rocksdict.Options:
    """Return the options of a database and of each column family in it."""
    shared = shared_memory(conf)
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_atomic_flush(True)
    # RocksDB would start 15 threads for each column family that it opens, whether it has one file or hundreds.
    options.set_max_file_opening_threads(1)
    options.set_write_buffer_manager(shared.buffers)
    options.set_write_buffer_size(conf.rocksdb_memtable_bytes)
    options.set_max_write_buffer_number(MAX_MEMTABLES)
    options.set_arena_block_size(ARENA_BYTES)
    options.set_keep_log_file_num(1)
    options.set_compression_type(getattr(rocksdict.DBCompressionType, conf.rocksdb_compression)())
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(shared.blocks)
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    if conf.rocksdb_bloom_filter_bits:
        table.set_bloom_filter(conf.rocksdb_bloom_filter_bits, False)
    options.set_block_based_table_factory(table)
    return options


def own_bytes(num_families: int) -> int:
    """Return the approximate memory of an open database, without write buffers and caches."""
    return DATABASE_BYTES + num_families * FAMILY_BYTES


# RocksDB's write batches of changes.


WRITE_ROWS = 1 << 10
"""Pairs of one write batch. No other thread can run while RocksDB writes a batch, about a microsecond per pair."""


def write_batches(changes: Changes, handles: Mapping[str, object]) -> list[rocksdict.WriteBatch]:
    """Return write batches of all changes, at least one batch. ``handles`` are those of the column families."""
    batches: list[rocksdict.WriteBatch] = []
    for name, pairs in changes.families.items():
        for at in range(0, len(pairs), WRITE_ROWS):
            batch = rocksdict.WriteBatch(raw_mode=True)
            _fill(batch, pairs.slice(at, WRITE_ROWS), handles[name])
            batches.append(batch)
    return batches or [rocksdict.WriteBatch(raw_mode=True)]


def _fill(batch: rocksdict.WriteBatch, pairs: SortedPairs, handle: object) -> None:
    keys, values = to_bytes_list(pairs.keys), to_bytes_list(pairs.values)
    if pairs.values.null_count:
        for key, value in zip(keys, values, strict=True):
            if value is None:
                batch.delete(key, handle)
            else:
                batch.put(key, value, handle)
    else:
        deque(map(batch.put, keys, values, repeat(handle)), maxlen=0)  # consumes ``map``, faster than a ``for`` loop


ROCKSDB_SCAN_ROWS = 1 << 14
_SCAN_STEP = 1 << 9  # so few that a processor's cache holds their Python objects
_PAIR = pa.struct([("key", pa.binary()), ("value", pa.binary())])


class PairScan(Iterator[pa.RecordBatch]):
    """Sorted pairs of one column family, as they were when the scan began, whatever is written since.

    A subclass reads them from ``_source``, an iterator or a cursor of RocksDB, which is None once the scan is closed.
    """

    def __init__(self, source: Any, failure: OnFailure) -> None:
        self._source = source
        self._failure = failure
        self._reading = threading.Lock()

    def __next__(self) -> pa.RecordBatch:
        with self._reading:  # another thread may close the store
            if self._source is None:
                raise StoreClosedError("The store was closed while it was scanned.")
            parts: list[pa.StructArray] = []
            while len(parts) * _SCAN_STEP < ROCKSDB_SCAN_ROWS:
                rows = self._rows()
                if rows:
                    parts.append(pa.array(rows, _PAIR))
                if len(rows) < _SCAN_STEP:
                    break
            if not parts:
                raise StopIteration
            keys, values = (pa.concat_arrays([part.field(i) for part in parts]) for i in (0, 1))
            return pa.RecordBatch.from_arrays([keys, values], schema=PAIRS_SCHEMA)

    def _rows(self) -> list[tuple[bytes, bytes]]:
        """Return the next pairs, ``_SCAN_STEP`` unless there are fewer left."""
        raise NotImplementedError

    def _check_end(self, cursor: Any) -> None:
        """Raise if a cursor is at a damaged block, where rocksdict says that nothing comes after it."""
        try:
            cursor.status()
        except Exception as error:  # rocksdict raises plain Exception
            raise self._failure("read", error) from error

    def close(self) -> None:
        """Release RocksDB's iterator or cursor: RocksDB cannot close while one lives."""
        with self._reading:
            self._source = None


class RocksDBScan(PairScan):
    """The pairs from ``start`` (included) to ``end`` (not included)."""

    def __init__(self, db: rocksdict.Rdict, start: bytes | None, end: bytes | None, failure: OnFailure) -> None:
        # rocksdict's iterators point into their options for the upper bound, but do not keep them alive.
        self._options = rocksdict.ReadOptions()
        if end is not None:
            self._options.set_iterate_upper_bound(end)
        if start is None and end is None:
            self._options.fill_cache(False)  # keep frequently read blocks in the cache
        super().__init__(db.items(from_key=start, read_opt=self._options), failure)
        self._db = db
        self._last = start

    def _rows(self) -> list[tuple[bytes, bytes]]:
        rows = list(islice(self._source, _SCAN_STEP))
        if rows:
            self._last = rows[-1][0]
        if len(rows) < _SCAN_STEP:
            # The iterator has no status. So a cursor goes to the place where it has ended.
            cursor = self._db.iter(self._options)
            if self._last is None:
                cursor.seek_to_first()
            else:
                cursor.seek(self._last)
                if cursor.valid():
                    cursor.next()
            self._check_end(cursor)
        return rows

    def close(self) -> None:
        super().close()
        self._db = None


class RocksDBRangesScan(PairScan):
    """The pairs of ascending ranges that do not overlap.

    One cursor goes through all of them. From a key after a range it goes to the first range that ends after the key,
    so that ranges without pairs cost nothing each.
    """

    def __init__(self, db: rocksdict.Rdict, ranges: Sequence[KeyRange], failure: OnFailure) -> None:
        self._ranges = ranges
        # Only the last range can be without an end.
        self._ends = [end for _, end in ranges if end is not None]
        self._options = rocksdict.ReadOptions()
        if len(self._ends) == len(ranges):
            self._options.set_iterate_upper_bound(self._ends[-1])
        super().__init__(db.iter(self._options), failure)
        self._at = 0
        """The range that is read next."""
        self._is_inside = False
        """Whether the cursor needs no seek: it is at the first unread key from the start of that range on."""

    def _rows(self) -> list[tuple[bytes, bytes]]:
        cursor, rows = self._source, list[tuple[bytes, bytes]]()
        while self._at < len(self._ranges):
            start, end = self._ranges[self._at]
            if not self._is_inside:
                cursor.seek(start)
                self._is_inside = True
            key = b""
            while cursor.valid():
                key = cursor.key()
                if end is not None and key >= end:
                    break
                rows.append((key, cursor.value()))
                cursor.next()
                if len(rows) == _SCAN_STEP:
                    return rows
            else:  # the cursor is behind all pairs, or at a damaged block
                self._check_end(cursor)
                self._at = len(self._ranges)
                break
            self._at = bisect_right(self._ends, key)
            self._is_inside = self._at < len(self._ranges) and key >= self._ranges[self._at][0]
        return rows


# Sorted pairs as files of RocksDB, which a database ingests unchanged.
#
# A key costs about half of what it costs through a write buffer, which is flushed later.


FILE_BYTES = 64 << 20
"""Target size of a file, in bytes of keys and values: a compaction, or a later snapshot, rewrites whole files."""
FILE_STEP_ROWS = 1 << 10
"""At most this many pairs are Python objects at a time."""


def write_sorted_files(
    parts: Iterable[tuple[str, SortedPairs]], directory: Path, options: rocksdict.Options
) -> list[tuple[str, Path]]:
    """Write the pairs of column families to files in ``directory``; return the files, each with its family.

    The keys of a file ascend. A part that does not follow the last part of its family begins a new file. Families
    without pairs have no file.
    """
    files: list[tuple[str, Path]] = []
    open_files: dict[str, _SortedFile] = {}
    for family, pairs in parts:
        if not len(pairs):
            continue
        file = open_files.get(family)
        if file is None or not file.takes(pairs):
            if file is not None:
                file.finish()
            path = directory / f"{len(files)}.sst"
            files.append((family, path))
            file = open_files[family] = _SortedFile(path, options)
        file.add(pairs)
    for file in open_files.values():
        file.finish()
    return files


class _SortedFile:
    def __init__(self, path: Path, options: rocksdict.Options) -> None:
        self._writer = rocksdict.SstFileWriter(options=options)
        self._writer.open(str(path))
        self._bytes = 0
        self._last = b""

    def takes(self, pairs: SortedPairs) -> bool:
        """Return whether the file has room, and the pairs sort after its last key."""
        return self._bytes < FILE_BYTES and self._last < pairs.keys[0].as_py()

    def add(self, pairs: SortedPairs) -> None:
        writer = self._writer
        for at in range(0, len(pairs), FILE_STEP_ROWS):
            step = pairs.slice(at, FILE_STEP_ROWS)
            for key, value in zip(to_bytes_list(step.keys), to_bytes_list(step.values), strict=True):
                writer[key] = value
        self._bytes += pairs.nbytes
        self._last = pairs.keys[-1].as_py()

    def finish(self) -> None:
        self._writer.finish()
