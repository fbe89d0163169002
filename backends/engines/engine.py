"""The seam to a backend: what holds the pairs of one partition at one version.

Everything else (changelogs, manifests, pending changes, older versions, snapshots in the storage,
maintenance) is shared. A new backend is an engine and a provider class that names it; see
``rocksdb.py`` and ``file.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from backends.conf import StateStoreConf
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState


class StateEngine(Protocol):
    """One version of the pairs. Reads may run in many threads; writes come one at a time, and with no read beside them.

    Scans are the exception: a scan shows the pairs as they were at its call, whatever is written
    while it is consumed.
    """

    def __init__(self, path: Path, conf: StateStoreConf) -> None:
        """Open it. Its local files, if it has any, are in the directory ``path``, which is its own."""

    @property
    def state(self) -> LocalState:
        """What is held. An engine over a local directory may find a version there that an earlier process left."""

    @property
    def column_families(self) -> frozenset[str]:
        """The names of the column families, "default" among them."""

    def get_many(self, keys: pa.BinaryArray, column_family: str, *, keep: bool = True) -> pa.BinaryArray:
        """Values in the order of ``keys``, which need not be sorted; null where there is none, or no such family.

        ``keep`` False: they will hardly be read again, so a cache need not make room for them.
        """

    def get_one(self, key: bytes, column_family: str) -> bytes | None:
        """The value of one key; None if there is none, or no such family."""

    def scan(self, start: bytes | None, end: bytes | None, column_family: str) -> Iterator[pa.RecordBatch]:
        """Batches of ``key`` and ``value`` from ``start`` (included) to ``end`` (not included), in key order."""

    def prepare(self, changes: Changes) -> Callable[[LocalState], None]:
        """Get changes ready, in any thread and beside reads and writes; the function that is returned writes them all.

        It is given what they lead to, may be called much later or never. After a crash all of it is there, or nothing, or a ``state`` of no
        version, from which nobody goes on. While it writes, keys that do not change may be read.
        """

    def capture(self, directory: Path) -> Callable[[], None]:
        """Begin a snapshot of what is held. The call is quick; the function it returns may take its time,
        while writes go on, and leaves the snapshot's files in ``directory``, which exists."""

    def restore(self, directory: Path) -> None:
        """Replace everything by the files that ``capture`` made, which may be moved away from ``directory``.

        Raises ``DamagedFileError`` or ``LocalStateDamagedError`` if they are not usable; the engine is empty then.
        """

    def num_keys(self) -> int:
        """The number of keys of all families; an estimate if they are not counted."""

    def memory_bytes(self) -> int:
        """Memory held by this engine alone."""

    def num_files(self) -> int:
        """Local files that hold the pairs."""

    def clear(self) -> None:
        """Start over with the empty version 0."""

    def close(self) -> None:
        """Let go of everything; scans under way end with ``StoreClosedError``. What is on disk stays."""
