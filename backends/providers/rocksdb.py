"""The provider over RocksDB."""

from __future__ import annotations

from backends.engines.rocksdb import LocalRocksDB
from backends.providers.standalone_provider import LocalStateStoreProvider


class RocksDBStateStoreProvider(LocalStateStoreProvider):
    """Keeps a store in RocksDB: state on local disk, larger than memory, with incremental snapshots."""

    backend = "rocksdb"
    engine = LocalRocksDB
    opens_slowly = True
