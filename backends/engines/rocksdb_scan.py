"""Scans of a RocksDB column family, a batch at a time."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
from rocksdict import Options, Rdict, ReadOptions, SstFileWriter

from backends.encoding.keys import KeyRange
from backends.encoding.sorted_pairs import PAIRS_SCHEMA, SortedPairs, to_bytes_list
from backends.exceptions import StateStoreError, StoreClosedError

ROCKSDB_SCAN_ROWS = 1 << 14
_SCAN_STEP = 1 << 9  # so few that a processor's cache holds their Python objects
_PAIR = pa.struct([("key", pa.binary()), ("value", pa.binary())])

OnFailure = Callable[[str, Exception], StateStoreError]


class RocksDBScan(Iterator[pa.RecordBatch]):
    """Sorted pairs of one column family, as they were when the scan began, whatever is written since."""

    def __init__(self, db: Rdict, start: bytes | None, end: bytes | None, failure: OnFailure) -> None:
        # rocksdict's iterators point into their options for the upper bound, but do not keep them alive.
        self._options = ReadOptions()
        if end is not None:
            self._options.set_iterate_upper_bound(end)
        if start is None and end is None:
            self._options.fill_cache(False)  # blocks that are read time and again stay in the cache
        self._items: Iterator[tuple[bytes, bytes]] | None = db.items(from_key=start, read_opt=self._options)
        self._db = db
        self._last = start
        self._failure = failure
        self._reading = threading.Lock()

    def __next__(self) -> pa.RecordBatch:
        with self._reading:  # another thread may close the store
            return self._next()

    def _next(self) -> pa.RecordBatch:
        items = self._items
        if items is None:
            raise StoreClosedError("The store was closed while it was scanned.")
        parts: list[pa.StructArray] = []
        while len(parts) * _SCAN_STEP < ROCKSDB_SCAN_ROWS:
            rows = list(islice(items, _SCAN_STEP))
            if rows:
                self._last = rows[-1][0]
                parts.append(pa.array(rows, _PAIR))
            if len(rows) < _SCAN_STEP:
                self._check_end()
                break
        if not parts:
            raise StopIteration
        return _batch(parts)

    def _check_end(self) -> None:
        """Raise if the scan has ended at a damaged block.

        rocksdict ends an iteration there as if nothing came after it. So seek the last key again, and ask for the
        status.
        """
        cursor = self._db.iter(self._options)
        try:
            if self._last is None:
                cursor.seek_to_first()
            else:
                cursor.seek(self._last)
                if cursor.valid():
                    cursor.next()
            cursor.status()
        except Exception as error:  # rocksdict raises plain Exception
            raise self._failure("read", error) from error

    def close(self) -> None:
        """Release the iterator: RocksDB cannot close while one lives."""
        with self._reading:
            self._items = self._db = None


class RocksDBRangesScan(Iterator[pa.RecordBatch]):
    """Sorted pairs of ascending ranges of a column family, as they were when the scan began.

    One cursor goes through all of them. From a key after a range it goes to the first range that ends after the key,
    so that ranges without pairs cost nothing each.
    """

    def __init__(self, db: Rdict, ranges: Sequence[KeyRange], failure: OnFailure) -> None:
        self._ranges = ranges
        # Only the last range can be without an end.
        self._ends = [end for _, end in ranges if end is not None]
        self._options = ReadOptions()
        if len(self._ends) == len(ranges):
            self._options.set_iterate_upper_bound(self._ends[-1])
        self._cursor = db.iter(self._options)
        self._at = 0
        self._is_inside = False
        self._failure = failure
        self._reading = threading.Lock()

    def __next__(self) -> pa.RecordBatch:
        with self._reading:  # another thread may close the store
            if self._cursor is None:
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
            return _batch(parts)

    def _rows(self) -> list[tuple[bytes, bytes]]:
        """Return the next pairs, ``_SCAN_STEP`` unless there are fewer left."""
        cursor, rows = self._cursor, list[tuple[bytes, bytes]]()
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
            else:
                self._check_end()
                self._at = len(self._ranges)
                break
            self._at = bisect_right(self._ends, key)
            self._is_inside = self._at < len(self._ranges) and key >= self._ranges[self._at][0]
        return rows

    def _check_end(self) -> None:
        """Raise if the cursor has ended at a damaged block, where rocksdict says that nothing comes after it."""
        try:
            self._cursor.status()
        except Exception as error:  # rocksdict raises plain Exception
            raise self._failure("read", error) from error

    def close(self) -> None:
        """Release the cursor: RocksDB cannot close while one lives."""
        with self._reading:
            self._cursor = None


def _batch(parts: list[pa.StructArray]) -> pa.RecordBatch:
    keys, values = (pa.concat_arrays([part.field(i) for part in parts]) for i in (0, 1))
    return pa.RecordBatch.from_arrays([keys, values], schema=PAIRS_SCHEMA)


# Sorted pairs as files of RocksDB, which a database ingests unchanged.
#
# A key costs about half of what it costs through a write buffer, which is flushed later.


FILE_BYTES = 64 << 20
"""Target size of a file, in bytes of keys and values: a compaction, or a later snapshot, rewrites whole files."""
FILE_STEP_ROWS = 1 << 10
"""At most this many pairs are Python objects at a time."""


def write_sorted_files(
    parts: Iterable[tuple[str, SortedPairs]], directory: Path, options: Options
) -> list[tuple[str, Path]]:
    """Write the pairs of column families to files in ``directory``; return the files, each with its family.

    The keys of a file ascend. A part that does not follow the last part of its family begins a new file. Families
    without pairs have no file.
    """
    made: list[tuple[str, Path]] = []
    open_files: dict[str, _SortedFile] = {}
    for family, pairs in parts:
        if not len(pairs):
            continue
        file = open_files.get(family)
        if file is None or not file.takes(pairs):
            if file is not None:
                file.finish()
            path = directory / f"{len(made)}.sst"
            made.append((family, path))
            file = open_files[family] = _SortedFile(path, options)
        file.add(pairs)
    for file in open_files.values():
        file.finish()
    return made


class _SortedFile:
    def __init__(self, path: Path, options: Options) -> None:
        self._writer = SstFileWriter(options=options)
        self._writer.open(str(path))
        self._bytes = 0
        self._last = b""

    def takes(self, pairs: SortedPairs) -> bool:
        """Whether there is room for pairs, and they come after what is there."""
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
