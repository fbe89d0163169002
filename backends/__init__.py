"""State stores: versioned maps of bytes, durable in a checkpoint location. Imports neither Ray nor PySpark.

Names are loaded when first used: query clients import this package and need neither RocksDB nor object stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.lazy_names import lazy_names

if TYPE_CHECKING:
    from backends.conf import StateStoreConf, StateStoreId, StateStoreProviderId
    from backends.providers.rocksdb import RocksDBStateStoreProvider
    from backends.providers.standalone_provider import FileStateStoreProvider
    from backends.store import StateStore, StateStoreMetrics, StateStoreProvider

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

_HOMES = {
    "FileStateStoreProvider": "backends.providers.standalone_provider",
    "RocksDBStateStoreProvider": "backends.providers.rocksdb",
    "StateStore": "backends.store",
    "StateStoreConf": "backends.conf",
    "StateStoreId": "backends.conf",
    "StateStoreMetrics": "backends.store",
    "StateStoreProvider": "backends.store",
    "StateStoreProviderId": "backends.conf",
}

__getattr__ = lazy_names("backends", _HOMES)
