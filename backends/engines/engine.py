"""The interface of a backend's engine, which holds the pairs of one partition at one version.

Everything else (changelogs, manifests, pending changes, older versions, snapshots in the storage, maintenance) is
shared. A new backend is an engine and a provider class that names the engine; see ``rocksdb.py`` and ``file.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from backends.conf import StateStoreConf
from backends.encoding.keys import KeyRange
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState


class StateEngine(Protocol):
    """One version of the pairs. Reads may run in many threads; writes come one at a time, and with no read beside them.

    Scans are the exception: a scan shows the pairs as they were at its call, whatever is written while it is consumed.
    """

    def __init__(self, path: Path, conf: StateStoreConf) -> None:
        """Open the engine. Its local files, if it has any, are in the directory ``path``, which is its own."""

    @property
    def state(self) -> LocalState:
        """The state that the engine holds. In a local directory an earlier process may have left a version."""

    @property
    def column_families(self) -> frozenset[str]:
        """The names of the column families, "default" among them."""

    def get_many(self, keys: pa.BinaryArray, column_family: str, *, keep: bool = True) -> pa.BinaryArray:
        """Return the values in the order of ``keys``, which need not be sorted.

        Null where a key has none, or there is no such family. ``keep`` False: the keys will hardly be read again, so a
        cache need not make room for them.
        """

    def get_one(self, key: bytes, column_family: str) -> bytes | None:
        """Return the value of one key; None if the key has none, or there is no such family."""

    def scan(self, start: bytes | None, end: bytes | None, column_family: str) -> Iterator[pa.RecordBatch]:
        """Return batches of ``key`` and ``value`` from ``start`` (included) to ``end`` (not included), in key order."""

    def scan_ranges(self, ranges: Sequence[KeyRange], column_family: str) -> Iterator[pa.RecordBatch]:
        """Return the pairs of ascending ranges, of which no two overlap, one range after the other. See ``scan``.

        There may be thousands of ranges with few pairs each, or none: a batch has those of many of them.
        """

    def prepare(self, changes: Changes) -> Callable[[LocalState], None]:
        """Get changes ready, in any thread and beside reads and writes; return the function that writes them all.

        The function takes the state to which the changes lead. It may be called much later, or never. After a crash
        either all changes are there, or none, or a ``state`` of no version (``LocalState.unfinished``), from which no
        load goes on. While the function writes, keys that do not change may be read.
        """

    def load_sorted(self, parts: Iterable[tuple[str, SortedPairs]], unfinished: LocalState) -> None:
        """Take the pairs of column families into an empty engine, faster than by ``prepare``.

        No key comes twice, and none is removed. The engine holds ``unfinished`` then, which no load goes on from, until
        a write after this one says what it holds.
        """

    def capture(self, directory: Path) -> Callable[[], None]:
        """Begin a snapshot of what the engine holds, in ``directory``, which exists.

        The call is quick. The function that is returned may take its time, while writes go on, and leaves the
        snapshot's files in ``directory``.
        """

    def restore(self, directory: Path) -> None:
        """Replace everything by the files that ``capture`` made; they, or ``directory`` itself, may be moved away.

        Raises ``DamagedFileError`` or ``LocalStateDamagedError`` if the files are not usable; the engine is empty then.
        """

    def num_keys(self) -> int:
        """Return the number of keys of all families; an estimate if keys are not counted."""

    def memory_bytes(self) -> int:
        """Return the bytes of memory that this engine alone holds."""

    def num_files(self) -> int:
        """Return the number of local files that hold the pairs."""

    def clear(self) -> None:
        """Start over with the empty version 0."""

    def close(self) -> None:
        """Release everything; scans under way end with ``StoreClosedError``. Local files stay."""
