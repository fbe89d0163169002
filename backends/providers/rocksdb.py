"""The provider over RocksDB."""

from __future__ import annotations

from backends.engines.rocksdb import LocalRocksDB
from backends.providers.local_provider import LocalStateStoreProvider


class RocksDBStateStoreProvider(LocalStateStoreProvider):
    """Versions of one store in RocksDB: state on local disk, larger than memory, with incremental snapshots."""

    backend = "rocksdb"
    engine = LocalRocksDB
