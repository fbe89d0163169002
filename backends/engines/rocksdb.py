"""The RocksDB backend: bulk gets, scans and atomic write batches of Arrow columns, on local disk.

The database can be rebuilt from changelogs at any time, so the write-ahead log is off. Flushes are atomic over column
families, and every batch carries its version: so a killed process leaves exactly one version behind, which says its
number.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from rocksdict import AccessType, Checkpoint, IngestExternalFileOptions, Rdict, WriteBatch, WriteOptions

from backends import fault_points
from backends.conf import DEFAULT_FAMILY, StateStoreConf
from backends.decoders import json_decoder
from backends.encoding.keys import KeyRange
from backends.encoding.sorted_pairs import SortedPairs, is_strictly_sorted, key_order, to_bytes_list
from backends.engines import rocksdb_files
from backends.engines.engine import disk_full, is_full_disk
from backends.engines.row_cache import RowCache
from backends.engines.row_cache_table import KeyHashes, hash_keys
from backends.engines.sst_reader import TableScan
from backends.exceptions import ConcurrentCommitError, LocalStateDamagedError, StateStoreError, StoreClosedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from backends.host_memory import DATABASES, Claim, host_memory

log = logging.getLogger(__name__)

BULK_ROWS = 1 << 16
"""Keys of one bulk get."""
KEYS_ONE_BY_ONE = 12
"""Up to this many keys, single gets are faster than a bulk get."""
UNSORTED_KEYS = 64
"""So few keys are read in any order: finding out whether they are sorted takes longer than the order saves."""
MAX_FULL_MEMTABLES = 2
"""A write waits while a column family has this many full memtables that are not written yet."""
STALL_SECONDS = 0.001
"""The seconds between two looks whether such a wait is over."""
BULK_DIRECTORY = "bulk"
"""Directory of files that the database takes over once they are written. RocksDB ignores names that it does not know.
"""
IDENTITY = "IDENTITY"
"""The name of the file with a database's id."""
META_FAMILY = "__statestore__"
_META_KEY = b"state"


@dataclass
class _Family:
    db: Rdict
    handle: object
    cache: RowCache | None


class LocalRocksDB:
    """RocksDB in the directory ``path``.

    What is in the directory, or is restored, is opened for reading until something is written, and an empty database is
    made only then. To open one for writing syncs five files and more, under Python's lock, so that no other thread can
    run for 20 ms on an ordinary disk. To open one for reading takes half a millisecond. A directory that cannot be
    opened is emptied: it is only a copy. Writes raise ``ConcurrentCommitError`` if another provider has the directory
    open for writing.
    """

    def __init__(self, path: Path, conf: StateStoreConf) -> None:
        self._path = path
        self._conf = conf
        self._scans: weakref.WeakSet[rocksdb_files.PairScan | TableScan] = weakref.WeakSet()
        self._families: dict[str, _Family] = {}
        self._closed = False
        self._damage: StateStoreError | None = None
        self._opened = object()
        self._db: Any = None
        self._is_for_reading = False
        self._own: Claim | None = None
        """Counts the memory that the open database uses."""
        self.state = LocalState()
        self._file_scans = rocksdb_files.FileScans(path)
        self._write_options = WriteOptions()
        self._write_options.disable_wal = True
        if not (path / "CURRENT").exists():
            return
        try:
            self._open(AccessType.read_only())
        except LocalStateDamagedError:
            shutil.rmtree(path)

    def _open(self, access: AccessType | None = None, *, expected: LocalState | None = None) -> None:
        """Open the database for writing, or with ``access``, in place of the open one.

        If that fails, or the database does not have the state ``expected``, the old one stays open.

        A reader continues with the database that was open, whose files RocksDB still has open, and with its cache: rows
        that such a reader caches are from before the next write.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        for name in (BULK_DIRECTORY, *rocksdb_files.FLUSH_DIRECTORIES):
            shutil.rmtree(self._path / name, ignore_errors=True)  # of a process that died
        families: dict[str, _Family] = {}
        db: Any = None
        try:
            stored_families = Rdict.list_cf(str(self._path)) if (self._path / "CURRENT").exists() else []
            names = {DEFAULT_FAMILY, META_FAMILY, *stored_families}
            options = rocksdb_files.database_options(self._conf)
            others = {n: options for n in names if n != DEFAULT_FAMILY}
            db = Rdict(str(self._path), options, others, access or AccessType.read_write())
            for name in names:
                family = db if name == DEFAULT_FAMILY else db.get_column_family(name)
                families[name] = self._family(name, family, db.get_column_family_handle(name))
            stored = families[META_FAMILY].db.get(_META_KEY)
            state = LocalState() if stored is None else json_decoder(LocalState).decode(stored)
            if expected is not None and state != expected:  # RocksDB creates an empty database where files are missing
                raise LocalStateDamagedError(
                    f"it had version {expected.version} before and has version {state.version} now, so its files "
                    "were removed or replaced. If a job cleans temporary files, exclude this directory from it"
                )
        except Exception as error:  # rocksdict raises plain Exception
            opened = _opened(db, families)
            db = None
            families.clear()  # a handle keeps the database open, and the frames of an error live as long as it
            self._close(opened)
            if "lock hold" in str(error) or "While lock file" in str(error):
                raise ConcurrentCommitError(
                    f"{self._path} is open in another provider, in this process or another: one writer at a time. "
                    "Close it, or give each provider its own local_dir."
                ) from error
            if is_full_disk(error):
                raise disk_full(self._path, error) from error
            raise LocalStateDamagedError(f"{self._path} cannot be opened: {error}") from error
        self._own = host_memory(self._conf).note(DATABASES, rocksdb_files.own_bytes(len(names)))
        self._db, self._families, self._is_for_reading = db, families, access is not None
        self._opened, self._damage, self.state = object(), None, state

    def _open_for_writing(self) -> None:
        """Open a database for writing; create an empty one if there is none."""
        if self._db is not None and not self._is_for_reading:
            return
        try:
            self._open(expected=self.state)
        except LocalStateDamagedError as error:
            # The open database can be read, but nothing can be added to it: a load must begin elsewhere.
            self.state, self._damage = LocalState.unfinished(self.state.head), type(error)(str(error))
            raise

    def _create(self, name: str) -> None:
        db = self._db.create_column_family(name, rocksdb_files.database_options(self._conf))
        self._families = {**self._families, name: self._family(name, db, self._db.get_column_family_handle(name))}
        if self._own is not None:
            host_memory(self._conf).resize(self._own, rocksdb_files.own_bytes(len(self._families)))

    def _family(self, name: str, db: Rdict, handle: object) -> _Family:
        has_cache = self._conf.row_cache_bytes and name != META_FAMILY
        return _Family(db, handle, RowCache(host_memory(self._conf)) if has_cache else None)

    @property
    def column_families(self) -> frozenset[str]:
        """The names of the users' column families."""
        return frozenset((DEFAULT_FAMILY, *self._families)) - {META_FAMILY}

    def get_many(
        self, keys: pa.BinaryArray, column_family: str = DEFAULT_FAMILY, *, keep: bool = True
    ) -> pa.BinaryArray:
        self._check_open()
        family = self._families.get(column_family)
        if family is None or not len(keys):
            return pa.nulls(len(keys), pa.binary())
        if len(keys) <= KEYS_ONE_BY_ONE:
            return pa.array([self._get_one(family, key) for key in to_bytes_list(keys)], pa.binary())
        if family.cache is None:
            return self._read(family, keys)
        return family.cache.get_many(keys, lambda missing: self._read(family, missing), keep=keep)

    def get_one(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> bytes | None:
        self._check_open()
        family = self._families.get(column_family)
        return None if family is None else self._get_one(family, key)

    def _get_one(self, family: _Family, key: bytes | None) -> bytes | None:
        # Without the row cache, which costs ten times as much for one key.
        try:
            return family.db.get(key)  # type: ignore[no-any-return]
        except Exception as error:  # rocksdict raises plain Exception
            raise self._failure("read", error) from error

    def _read(self, family: _Family, keys: pa.BinaryArray) -> pa.BinaryArray:
        if len(keys) <= UNSORTED_KEYS or is_strictly_sorted(keys):
            return self._get_bulk(family, keys)
        order = np.asarray(key_order(keys))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return self._get_bulk(family, keys.take(pa.array(order))).take(pa.array(back))

    def _get_bulk(self, family: _Family, keys: pa.BinaryArray) -> pa.BinaryArray:
        # A slice at a time: Python objects take several times the memory of the bytes.
        slices = (keys.slice(at, BULK_ROWS) for at in range(0, len(keys), BULK_ROWS))
        values = [pa.array(self._get(family, to_bytes_list(part)), pa.binary()) for part in slices]
        return values[0] if len(values) == 1 else pa.concat_arrays(values)

    def _get(self, family: _Family, keys: Sequence[bytes | None]) -> list[bytes | None]:
        self._check_open()
        try:
            return family.db[keys]  # type: ignore[no-any-return]
        except Exception as error:  # rocksdict raises plain Exception
            raise self._failure("read", error) from error

    def prepare(self, changes: Changes) -> Callable[[LocalState], None]:
        """Collect all changes in write batches.

        Return the function that writes them, and the state with the last batch.

        Between batches, the database is marked as unfinished, which is not a version. A crash between two batches
        leaves that mark.
        """
        self._check_open()
        opened, families = self._opened, self._families
        is_known = not self._is_for_reading and families.keys() >= changes.families.keys()
        batches = rocksdb_files.write_batches(changes, _handles(families)) if is_known else None
        hashes: dict[str, KeyHashes] = {}
        if self._conf.row_cache_bytes:
            hashes = {name: hash_keys(pairs.keys) for name, pairs in changes.families.items()}

        def apply(state: LocalState) -> None:
            # The batches refer to handles of one opening of the database.
            self._apply(changes, hashes, state, batches if opened is self._opened else None)

        return apply

    def _apply(
        self, changes: Changes, hashes: Mapping[str, KeyHashes], state: LocalState, batches: list[WriteBatch] | None
    ) -> None:
        self._check_open()
        self._open_for_writing()
        try:
            if batches is None:
                for name in changes.families:
                    if name not in self._families:
                        self._create(name)
                batches = rocksdb_files.write_batches(changes, _handles(self._families))
            self._write(batches, state)
        except Exception as error:  # rocksdict raises plain Exception
            self._forget_rows()
            raise self._failure("write", error) from error
        self.state = state
        for name, family_hashes in hashes.items():
            cache = self._families[name].cache
            if cache is None:
                continue
            try:
                cache.update(changes.families[name].keys, family_hashes, changes.families[name].values)
            except Exception:  # the pairs are written: an error now would leave the engine ahead of its partition
                log.exception("The cached rows of family %r of %s were dropped.", name, self._path)
                cache.clear()

    def _write(self, batches: list[WriteBatch], state: LocalState) -> None:
        """Write all batches, and ``state`` with the last one.

        If a write fails midway, or because the disk is full, the database can no longer be read.
        """
        unfinished = LocalState.unfinished(state.head)
        # No variable for the handle: a handle keeps the database open, and the frames of an error live as long as it.
        if len(batches) > 1:
            batches[0].put(_META_KEY, msgspec.json.encode(unfinished), self._families[META_FAMILY].handle)
        batches[-1].put(_META_KEY, msgspec.json.encode(state), self._families[META_FAMILY].handle)
        for i, batch in enumerate(batches):
            try:
                if i:
                    fault_points.reached("apply:batch")
                self._wait_for_flushes()
                self._db.write(batch, self._write_options)
            except BaseException as error:
                # An interrupt may come after the first batch was written. A database that has found the disk full
                # accepts no more writes until it is reopened, even if there is room.
                if i or not isinstance(error, Exception) or is_full_disk(error):
                    self.state, self._damage = unfinished, self._failure("write", error)
                    self._forget_rows()
                raise

    def _wait_for_flushes(self) -> None:
        """Wait until RocksDB has written full memtables.

        RocksDB would wait inside the write. If a flush then finds the disk full, the recovery waits for that writer,
        and the writer for the recovery. So ``database_options`` allows more memtables than this engine fills.
        """
        while True:
            is_stopped = self._db.property_int_value("rocksdb.is-write-stopped")
            counts = (f.db.property_int_value("rocksdb.num-immutable-mem-table") for f in self._families.values())
            if not is_stopped and max(counts) < MAX_FULL_MEMTABLES:
                return
            if self._db.property_int_value("rocksdb.background-errors"):
                if is_stopped:
                    raise OSError(errno.ENOSPC, "No space left on device: RocksDB has stopped writes")
                return  # the write raises the error, or finds that RocksDB has recovered
            time.sleep(STALL_SECONDS)

    def load_sorted(self, parts: Iterable[tuple[str, SortedPairs]], unfinished: LocalState) -> None:
        """Write files, and have the empty database ingest them."""
        self._check_open()
        self._open_for_writing()
        directory = self._path / BULK_DIRECTORY
        directory.mkdir()
        callers_error: Exception | None = None  # must not be reported as RocksDB's

        def callers_pairs() -> Generator[tuple[str, SortedPairs], None, None]:
            nonlocal callers_error
            try:
                yield from parts
            except Exception as error:
                callers_error = error
                raise

        try:
            options = rocksdb_files.database_options(self._conf)
            # An error must not keep the caller's source open: its files take the room that a retry needs.
            with closing(callers_pairs()) as pairs:
                files = rocksdb_files.write_sorted_files(pairs, directory, options)
            for name in {name for name, _ in files} - self._families.keys():
                self._create(name)
            # Write this to the disk before the files: without the log, a crash would leave pairs in a database of
            # version 0.
            self.prepare(Changes({}))(unfinished)
            self._families[META_FAMILY].db.flush()
            ingest = IngestExternalFileOptions()
            ingest.set_move_files(True)
            for name, file in files:
                fault_points.reached("load:ingest")
                self._families[name].db.ingest_external_file([str(file)], ingest)
        except StateStoreError:
            raise
        except Exception as error:  # rocksdict raises plain Exception
            if error is callers_error:
                raise
            raise self._failure("load", error) from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _forget_rows(self) -> None:
        for family in self._families.values():
            if family.cache is not None:
                family.cache.clear()

    def capture(self, directory: Path) -> Callable[[], None]:
        """Hard-link the files of a RocksDB checkpoint into ``directory``."""
        self._check_open()
        self._open_for_writing()
        checkpoint = directory / "checkpoint"
        try:
            Checkpoint(self._db).create_checkpoint(str(checkpoint))
        except Exception as error:  # rocksdict raises plain Exception
            raise self._failure("take a checkpoint", error) from error
        for file in checkpoint.iterdir():
            # The write-ahead log is off, and options are given when the database is opened.
            if file.suffix != ".log" and not file.name.startswith("OPTIONS"):
                file.rename(directory / file.name)
        shutil.rmtree(checkpoint)
        # Without the file, RocksDB writes and syncs one with the id of the manifest when a copy is opened.
        os.link(self._path / IDENTITY, directory / IDENTITY)
        return lambda: None

    def restore(self, directory: Path) -> None:
        """Replace the database with a checkpoint's files."""
        self.close()
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        directory.rename(self._path)
        self._closed, self._damage = False, None
        try:
            self._open(AccessType.read_only())
        except LocalStateDamagedError:
            shutil.rmtree(self._path)
            self.state = LocalState()
            raise

    def scan(
        self, start: bytes | None, end: bytes | None, column_family: str = DEFAULT_FAMILY
    ) -> Iterator[pa.RecordBatch]:
        self._check_open()
        family = self._families.get(column_family)
        if family is None:
            return iter(())
        families = [each.db for each in self._families.values()]
        of_files = self._file_scans.open(self._db, families, family.db, start, end, self._failure)
        scan = of_files or rocksdb_files.RocksDBScan(family.db, start, end, self._failure)
        self._scans.add(scan)
        return scan

    def scan_ranges(self, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY) -> Iterator[pa.RecordBatch]:
        self._check_open()
        family = self._families.get(column_family)
        if family is None or not ranges:
            return iter(())
        scan = rocksdb_files.RocksDBRangesScan(family.db, ranges, self._failure)
        self._scans.add(scan)
        return scan

    def num_keys(self) -> int:
        """Return the number of keys; RocksDB's estimate if keys are not counted."""
        if self.state.num_keys is not None:
            return self.state.num_keys
        return sum(rocksdb_files.estimated_keys(f.db) for n, f in self._families.items() if n != META_FAMILY)

    def memory_bytes(self) -> int:
        """Return the bytes of this database's write buffers and fixed costs, without the shared block cache."""
        buffers = sum(rocksdb_files.write_buffer_bytes(f.db) for f in self._families.values())
        return buffers + (0 if self._own is None else self._own.nbytes)

    def num_files(self) -> int:
        """Return the number of SST files."""
        db = self._db
        return 0 if db is None else len(db.live_files())

    def clear(self) -> None:
        if not self._closed and self.state == LocalState() and self.column_families == {DEFAULT_FAMILY}:
            return  # every write brings its state: nothing was written yet
        self.close()
        shutil.rmtree(self._path, ignore_errors=True)
        self._closed, self._damage = False, None
        self.state = LocalState()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for scan in list(self._scans):
            scan.close()
        self._let_go()

    def _let_go(self) -> None:
        self._forget_rows()
        opened = _opened(self._db, self._families)
        self._families, self._db, self._own = {}, None, None
        self._close(opened)

    def _close(self, opened: Sequence[Rdict]) -> None:
        for db in opened:
            try:
                db.close()
            except Exception:  # rocksdict raises plain Exception
                # For example, a compaction has met a damaged file. The files are a copy: the next open detects the
                # damage.
                log.warning("RocksDB in %s was closed with an error", self._path, exc_info=True)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self._path} is closed: open it again.")
        if self._damage is not None:
            raise type(self._damage)(str(self._damage))  # a new error, without the frames of others

    def _failure(self, verb: str, error: BaseException) -> StateStoreError:
        if self._closed:
            return StoreClosedError(f"{self._path} was closed while it was used.")
        if is_full_disk(error):
            return disk_full(self._path, error)
        return LocalStateDamagedError(
            f"RocksDB could not {verb} in {self._path}: {error}. If its disk is healthy and has room, "
            "remove the directory: the state is then loaded again from the checkpoint location."
        )


def _opened(db: Rdict | None, families: Mapping[str, _Family]) -> list[Rdict]:
    """Return the objects to be closed, the database itself last."""
    others = [family.db for name, family in families.items() if name != DEFAULT_FAMILY]
    return others if db is None else [*others, db]


def _handles(families: Mapping[str, _Family]) -> dict[str, object]:
    return {name: family.handle for name, family in families.items()}
