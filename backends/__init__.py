"""State stores: versioned maps of bytes, durable in a checkpoint location. Knows neither Ray nor Spark."""

from backends.conf import StateStoreConf
from backends.file import FileStateStoreProvider
from backends.ids import StateStoreId, StateStoreProviderId
from backends.metrics import StateStoreMetrics
from backends.rocksdb import RocksDBStateStoreProvider
from backends.store import StateStore, StateStoreProvider

__all__ = [
    "FileStateStoreProvider",
    "RocksDBStateStoreProvider",
    "StateStore",
    "StateStoreConf",
    "StateStoreId",
    "StateStoreMetrics",
    "StateStoreProvider",
    "StateStoreProviderId",
]
