"""Which scans of a RocksDB database are read from its files, and when RocksDB writes its files for one first."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rocksdict import Checkpoint, Rdict

from backends.encoding.keys import KEY_GROUP_BYTES
from backends.engines.rocksdb_properties import described_tables, estimated_keys, is_in_memory, write_buffer_bytes
from backends.engines.rocksdb_scan import OnFailure
from backends.engines.table_scan import FEW_PAIRS, TableScan, open_scan, part_of

log = logging.getLogger(__name__)

FLUSH_DIRECTORY = "flush"
"""Where a checkpoint is made only for what RocksDB does first: it writes to files what is in memory."""
FLUSH_DIRECTORIES = (FLUSH_DIRECTORY, f"{FLUSH_DIRECTORY}.tmp")
"""What a process that dies in a flush may leave: RocksDB begins a checkpoint in the last one."""
FLUSHED_FILES = 8
"""Where so many files wait to be merged, none is added for a scan: RocksDB would wait until they are fewer."""
FLUSH_PAIRS, FLUSH_PART = 500_000, 0.5
"""A scan of so many pairs, and of such a part of all, is worth it that RocksDB writes its files: as many pairs are read
for it as may have to be merged later for the file that is more.
"""


class FileScans:
    """Scans of the database in the directory ``path`` that are read from its files. Many threads may open scans."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._flushing = threading.Lock()

    def open(
        self,
        database: Any,
        families: Sequence[Rdict],
        family: Rdict,
        start: bytes | None,
        end: bytes | None,
        on_failure: OnFailure,
    ) -> TableScan | None:
        """Return a scan of many pairs of a column family that are all in files; None if RocksDB is to scan them.

        A scan of very many pairs, and of most of those that are there, has RocksDB write to files first what is in
        memory alone. ``families`` are all column families of the database. ``on_failure`` makes the errors of the scan.
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

    def _flushed(self, database: Any, families: Sequence[Rdict], family: Rdict) -> bool:
        """Have RocksDB write what is in memory to files, all column families at once; return whether it has.

        Its own flush is of one column family: after a crash, the version would not be that of the pairs. Where the disk
        has hardly room, nothing is tried: RocksDB takes no more writes after a flush that fails.
        """
        directory = self._path / FLUSH_DIRECTORY
        with self._flushing:  # scans may be opened side by side
            if is_in_memory(family) is False:
                return True
            if shutil.disk_usage(self._path).free < 2 * sum(map(write_buffer_bytes, families)):
                return False
            shutil.rmtree(directory, ignore_errors=True)
            try:
                Checkpoint(database).create_checkpoint(str(directory))
            except Exception:  # rocksdict raises plain Exception
                # What is in memory can be read all the same. A database that is damaged says so at its next write.
                log.warning("RocksDB scans %s itself: its files could not be written", self._path, exc_info=True)
                return False
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            return is_in_memory(family) is False
