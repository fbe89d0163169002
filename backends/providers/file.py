"""The provider over sorted maps in memory, with files in the checkpoint location."""

from __future__ import annotations

from backends.engines.file import SortedMapEngine
from backends.providers.local_provider import LocalStateStoreProvider


class FileStateStoreProvider(LocalStateStoreProvider):
    """Versions of one store in memory: the fastest reads and writes, for state that fits."""

    backend = "file"
    engine = SortedMapEngine
