"""Scans of many pairs of a RocksDB column family, read from the files of the database.

RocksDB's iterator hands its pairs to Python one by one. From the files they come by columns, in half the time. Where
some pairs are in RocksDB's memory alone, the scan is RocksDB's, or RocksDB writes them to files first (``file_scans``).
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from backends.encoding.keys import KEY_GROUP_BYTES
from backends.encoding.sorted_pairs import PAIRS_SCHEMA, SortedPairs
from backends.engines.rocksdb_scan import OnFailure
from backends.engines.table_file import TableFile, UnknownTableError
from backends.exceptions import StoreClosedError

log = logging.getLogger(__name__)

FEW_PAIRS = 100_000
"""Fewer pairs are scanned about as fast by RocksDB."""
_LISTINGS = 5
"""So often the files are listed again because RocksDB has removed one of them meanwhile."""
_LEVEL = re.compile(r"--- level (\d+) --- version# \d+ ---")
_TABLE = re.compile(
    r" (\d+):(\d+)\[(\d+) \.\. (\d+)\]\['([0-9A-F]*)' seq:\d+, type:\d+ \.\. '([0-9A-F]*)' seq:\d+, type:\d+\]\(\d+\)"
)


class Table(NamedTuple):
    """A file of a column family as RocksDB describes it. ``newest`` is its highest sequence number."""

    level: int
    number: int
    size: int
    newest: int
    smallest: bytes
    largest: bytes

    def is_in(self, start: bytes | None, end: bytes | None) -> bool:
        """Whether the file may have keys of a range."""
        return (start is None or self.largest >= start) and (end is None or self.smallest < end)


def listed_tables(described: str) -> list[Table] | None:
    """Return the files that RocksDB's "rocksdb.sstables" describes; None if it is not understood, or has none."""
    tables: list[Table] = []
    level = -1
    for line in described.splitlines():
        if not line:
            continue
        if found := _LEVEL.fullmatch(line):
            level = int(found[1])
        elif level >= 0 and (found := _TABLE.fullmatch(line)):
            number, size, newest = int(found[1]), int(found[2]), int(found[4])
            tables.append(Table(level, number, size, newest, bytes.fromhex(found[5]), bytes.fromhex(found[6])))
        else:
            return None
    return tables if tables and _is_ordered(tables) else None


def _is_ordered(tables: Sequence[Table]) -> bool:
    """Whether the files of level 0 come newest first, and those of each other level ascend, none with another's key."""
    return all(
        one.newest > other.newest if one.level == 0 else one.largest < other.smallest
        for one, other in pairwise(tables)
        if one.level == other.level
    )


def part_of(tables: Sequence[Table], start: bytes | None, end: bytes | None) -> float:
    """Return about which part of the keys of files is in a range, by their key groups; 0 for bounds within a group."""
    if not tables or len(start or b"") > KEY_GROUP_BYTES or len(end or b"") > KEY_GROUP_BYTES:
        return 0.0
    first, last = (_group(min(t.smallest for t in tables)), _group(max(t.largest for t in tables)))
    begin = first if start is None else max(first, _group(start))
    stop = last + 1 if end is None else min(last + 1, _group(end))
    return max(0, stop - begin) / (last + 1 - first)


def _group(key: bytes) -> int:
    return int.from_bytes(key[:KEY_GROUP_BYTES].ljust(KEY_GROUP_BYTES, b"\0"), "big")


def open_scan(
    directory: Path,
    list_tables: Callable[[], list[Table] | None],
    start: bytes | None,
    end: bytes | None,
    failure: OnFailure,
) -> TableScan | None:
    """Open the files that have keys of a range; None if RocksDB must read them.

    All pairs of the scan must be in files; pairs that are written meanwhile may show or not. RocksDB may replace files
    by others meanwhile.
    """
    for _ in range(_LISTINGS):
        tables = list_tables()
        if tables is None:
            return None
        opened: list[list[TableFile]] = []
        try:
            # Of level 0 each file may have every key, and they come newest first. Those of another level ascend.
            before: Table | None = None
            for table in tables:
                if not table.is_in(start, end):
                    continue
                if before is None or table.level == 0 or table.level != before.level:
                    opened.append([])
                opened[-1].append(TableFile(directory / f"{table.number:06}.sst", table.size))
                before = table
            return TableScan(opened, start, end, failure)
        except BaseException as error:
            for file in (file for run in opened for file in run):
                file.close()
            if isinstance(error, FileNotFoundError):
                continue
            if isinstance(error, UnknownTableError | OSError):
                log.debug("RocksDB scans %s: %s", directory, error)  # too many files are open, say: it has them open
                return None
            if isinstance(error, Exception):
                raise failure("read", error) from error
            raise
    return None


class TableScan(Iterator[pa.RecordBatch]):
    """Sorted pairs of a range, as they were when the files were opened. ``runs`` come newest first."""

    def __init__(
        self, runs: Sequence[Sequence[TableFile]], start: bytes | None, end: bytes | None, failure: OnFailure
    ) -> None:
        self._runs = runs
        self._batches = _merged([_pairs(run, start, end) for run in runs])
        self._is_closed = False
        self._error: BaseException | None = None
        self._failure = failure
        self._reading = threading.Lock()

    def __next__(self) -> pa.RecordBatch:
        with self._reading:  # another thread may close the store
            if self._is_closed:
                raise StoreClosedError("The store was closed while it was scanned.")
            if self._error is not None:
                raise self._error  # a generator that has failed says ever after that it is at its end
            try:
                pairs = next(self._batches, None)
                if pairs is not None:
                    return pa.RecordBatch.from_arrays([pairs.keys, pairs.values], schema=PAIRS_SCHEMA)
            except Exception as error:
                self._let_go()
                self._error = self._failure("read", error)
                raise self._error from error
            except BaseException as error:
                self._let_go()
                self._error = error
                raise
            self._let_go()
            raise StopIteration

    def close(self) -> None:
        """Let go of the files."""
        with self._reading:
            self._is_closed = True
            self._let_go()

    def _let_go(self) -> None:
        for file in (file for run in self._runs for file in run):
            file.close()


def _pairs(run: Sequence[TableFile], start: bytes | None, end: bytes | None) -> Iterator[SortedPairs]:
    for file in run:
        yield from file.pairs(start, end)


def _merged(runs: list[Iterator[SortedPairs]]) -> Iterator[SortedPairs]:
    """Return the pairs of runs, each ascending, as one. Of equal keys that of the first run counts."""
    held = [SortedPairs.empty()] * len(runs)
    while True:
        for i in range(len(runs) - 1, -1, -1):
            if not len(held[i]):
                following = next(runs[i], None)
                if following is None:
                    del runs[i], held[i]
                else:
                    held[i] = following
        if not runs:
            return
        # Up to here every run has shown all its keys.
        through = min(pairs.keys[-1].as_py() for pairs in held)
        due = SortedPairs.empty()
        for i in range(len(runs) - 1, -1, -1):
            number = held[i].lower_bound(through + b"\x00")
            due = due.under(held[i].slice(0, number))
            held[i] = held[i].slice(number)
        present = due.present()
        if len(present):
            yield present
