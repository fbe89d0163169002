"""Options of the state store. Every option here does something; unknown values are refused at once."""

from __future__ import annotations

from dataclasses import dataclass

from backends.exceptions import InvalidStateStoreArgument

PROVIDERS = ("rocksdb",)
COMPRESSIONS = ("none", "lz4", "zstd")
_MIB = 1 << 20


@dataclass(frozen=True)
class StateStoreConf:
    """Options, validated.

    - ``provider``: which backend keeps the state ("rocksdb").
    - ``fsync``: on local disk, sync each file and its directories before a commit is acknowledged.
      False trades the last commits at a power cut for speed; a killed process loses nothing either way.
    - ``compression``: of changelog files: "none", "lz4" or "zstd".
    - ``track_total_number_of_rows``: count keys exactly, at the price of looking up each written
      key once (Spark has the same option); False shows RocksDB's estimate.
    - ``load_threads``: changelogs fetched at once when a partition is loaded.
    - ``rocksdb_block_cache_bytes``: one cache for blocks read, shared by all stores of the process.
    - ``rocksdb_write_buffer_bytes``: memory for recent writes, shared by all stores of the process.
    - ``rocksdb_memtable_bytes``: recent writes that one column family collects before it writes a file.
    - ``rocksdb_bloom_filter_bits``: bits per key that spare reads of absent keys; 0 for none.
    - ``rocksdb_compression``: of RocksDB's local files: "none", "lz4" or "zstd".
    """

    provider: str = "rocksdb"
    fsync: bool = True
    compression: str = "zstd"
    track_total_number_of_rows: bool = True
    load_threads: int = 4
    rocksdb_block_cache_bytes: int = 64 * _MIB
    rocksdb_write_buffer_bytes: int = 128 * _MIB
    rocksdb_memtable_bytes: int = 32 * _MIB
    rocksdb_bloom_filter_bits: int = 10
    rocksdb_compression: str = "lz4"

    def __post_init__(self) -> None:
        self._check_choice("provider", self.provider, PROVIDERS)
        self._check_choice("compression", self.compression, COMPRESSIONS)
        self._check_choice("rocksdb_compression", self.rocksdb_compression, COMPRESSIONS)
        for name in ("fsync", "track_total_number_of_rows"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidStateStoreArgument(f"{name} must be True or False, not {getattr(self, name)!r}.")
        self._check_range("load_threads", 1, 256)
        self._check_range("rocksdb_block_cache_bytes", _MIB, None)
        self._check_range("rocksdb_write_buffer_bytes", _MIB, None)
        self._check_range("rocksdb_memtable_bytes", 64 << 10, None)
        self._check_range("rocksdb_bloom_filter_bits", 0, 64)

    @staticmethod
    def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
        if value not in choices:
            raise InvalidStateStoreArgument(f"{name}={value!r} is unknown: choose one of {', '.join(choices)}.")

    def _check_range(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            limits = f"an int of {low} or more" if high is None else f"an int from {low} to {high}"
            raise InvalidStateStoreArgument(f"{name}={value!r} must be {limits}.")
