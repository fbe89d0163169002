"""The provider over sorted maps in memory, with files in the checkpoint location."""

from __future__ import annotations

from backends.engines.sorted_map_engine import SortedMapEngine
from backends.providers.standalone_provider import LocalStateStoreProvider


class FileStateStoreProvider(LocalStateStoreProvider):
    """Keeps a store in memory: the fastest reads and writes, for state that fits."""

    backend = "file"
    engine = SortedMapEngine
