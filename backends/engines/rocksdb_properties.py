"""What an open RocksDB says of a column family: numbers of keys and bytes, what is in memory alone, and the files."""

from __future__ import annotations

from rocksdict import Rdict

from backends.engines.table_scan import Table, listed_tables

_IN_MEMORY = ("rocksdb.num-entries-active-mem-table", "rocksdb.num-entries-imm-mem-tables")
_TABLES = "rocksdb.sstables"


def estimated_keys(db: Rdict) -> int:
    """Return RocksDB's estimate of the number of keys."""
    return int(db.property_int_value("rocksdb.estimate-num-keys") or 0)


def write_buffer_bytes(db: Rdict) -> int:
    """Return the bytes of the pairs that are not in files yet."""
    return int(db.property_int_value("rocksdb.cur-size-all-mem-tables") or 0)


def is_in_memory(db: Rdict) -> bool | None:
    """Return whether some pairs are in RocksDB's memory alone; None if RocksDB does not say."""
    numbers = [db.property_int_value(name) for name in _IN_MEMORY]
    return None if None in numbers else any(numbers)


def described_tables(db: Rdict) -> list[Table] | None:
    """Return the files; None if there are none, or if RocksDB's list is not understood."""
    return listed_tables(db.property_value(_TABLES) or "")
