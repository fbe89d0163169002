"""The engine of a copy that is made to be read once: changes stay in memory, and are merged by one sort.

A database that replays changelogs sorts each changelog by itself, for one read a moment later. Here the first read
sorts all changelogs together. The pairs of a snapshot stay in the backend's own engine, below the changes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa

from backends.conf import StateStoreConf
from backends.encoding.keys import KeyRange
from backends.encoding.merged_scan import merged_scan
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.backend import backend_of
from backends.engines.engine import StateEngine
from backends.engines.sorted_map import SortedMap
from backends.engines.sorted_map_engine import SortedMapScan
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from backends.host_memory import Claim, host_memory
from backends.ids import DEFAULT_FAMILY

BUFFERED_CHANGES_BYTES = 128 << 20
"""More changes than that go into the engine below."""


class BufferedEngine:
    """The engine of the backend that ``conf`` names, with changes over it; see ``StateEngine``.

    Of changes, only those of keys from ``start`` (included) to ``end`` (not included) are held: others are not read.
    Where ``host_memory`` has no room for more changes of copies, they go into the engine below.
    """

    def __init__(self, path: Path, conf: StateStoreConf, start: bytes | None = None, end: bytes | None = None) -> None:
        self._below: StateEngine = backend_of(conf).engine(path, conf)
        self._memory = host_memory(conf)
        self._range = (start, end)
        self._merging = threading.Lock()
        self._scans: weakref.WeakSet[SortedMapScan] = weakref.WeakSet()
        self._unmerged: list[Changes] = []
        self._maps: Mapping[str, SortedMap] = {}
        self._begin_with(self._below.state)

    def _begin_with(self, state: LocalState) -> None:
        self.state = state
        self._unmerged, self._maps, self._claims, self._nbytes = [], {}, list[Claim](), 0
        self._is_over_pairs = state != LocalState()
        """Whether the engine below may have pairs. If not, keys that are removed need not be remembered."""

    @property
    def column_families(self) -> frozenset[str]:
        """The names of the column families."""
        return self._below.column_families | self._maps.keys() | {f for c in self._unmerged for f in c.families}

    def get_many(
        self, keys: pa.BinaryArray, column_family: str = DEFAULT_FAMILY, *, keep: bool = True
    ) -> pa.BinaryArray:
        """Return the values in the order of ``keys``; null where a key has none."""
        return self._changes(column_family).get_many(keys, self._below.get_many(keys, column_family, keep=keep))

    def get_one(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> bytes | None:
        """Return the value of one key; None if the key has none."""
        for run in reversed(self._changes(column_family).runs):
            is_there, value = run.get(key)
            if is_there:
                return value
        return self._below.get_one(key, column_family)

    def scan(
        self, start: bytes | None, end: bytes | None, column_family: str = DEFAULT_FAMILY
    ) -> Iterator[pa.RecordBatch]:
        """Return the pairs of a range in key order, as they are now."""
        changes = self._changes(column_family)
        below = self._below.scan(start, end, column_family)
        is_over = self._is_over_pairs
        scan = SortedMapScan(merged_scan(below, changes.between(start, end)) if is_over else changes.scan(start, end))
        self._scans.add(scan)
        return scan

    def scan_ranges(self, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY) -> Iterator[pa.RecordBatch]:
        """Return the pairs of ascending ranges, one after the other, as they are now."""
        scans = [self.scan(start, end, column_family) for start, end in ranges]
        return chain.from_iterable(scans)

    def _changes(self, column_family: str) -> SortedMap:
        """Return the changes of a family, merged."""
        with self._merging:
            if self._unmerged:
                families = {f for changes in self._unmerged for f in changes.families}
                self._maps = {**self._maps, **{f: self._merged(f) for f in families}}
                self._unmerged = []
            return self._maps.get(column_family, SortedMap(keeps_removed=self._is_over_pairs))

    def _merged(self, family: str) -> SortedMap:
        parts = [changes.families[family] for changes in self._unmerged if family in changes.families]
        together = SortedPairs.last_wins(
            pa.concat_arrays([part.keys for part in parts]), pa.concat_arrays([part.values for part in parts])
        )
        held = self._maps.get(family, SortedMap(keeps_removed=self._is_over_pairs))
        return held.with_changes(together)

    def prepare(self, changes: Changes) -> Callable[[LocalState], None]:
        """Return a function that holds the changes."""
        return lambda state: self._hold(changes, state)

    def _hold(self, changes: Changes, state: LocalState) -> None:
        held = Changes({family: self._of_range(pairs) for family, pairs in changes.families.items()})
        if self._nbytes + held.nbytes > BUFFERED_CHANGES_BYTES:
            self._write_below()
        claim = self._memory.claim_copy(held.nbytes)
        if claim is None:
            self._write_below()
            self._below.prepare(held)(state)
            self._begin_with(state)
            return
        self._claims.append(claim)
        self._nbytes += held.nbytes
        self._unmerged.append(held)
        self.state = state

    def _of_range(self, pairs: SortedPairs) -> SortedPairs:
        if self._range == (None, None):
            return pairs
        cut = pairs.between(*self._range)
        return cut if len(cut) == len(pairs) else cut.compact()  # a slice would hold the whole changelog

    def _write_below(self) -> None:
        """Have the engine below hold all."""
        if not (self._unmerged or self._maps):
            return
        self._changes(DEFAULT_FAMILY)
        self._below.prepare(Changes({f: held.between(None, None) for f, held in self._maps.items()}))(self.state)
        self._begin_with(self.state)

    def load_sorted(self, parts: Iterable[tuple[str, SortedPairs]], unfinished: LocalState) -> None:
        """Take pairs into the engine below."""
        self._below.load_sorted(parts, unfinished)
        self._begin_with(unfinished)

    def capture(self, directory: Path) -> Callable[[], None]:
        """Begin a snapshot by the engine below."""
        self._write_below()
        return self._below.capture(directory)

    def restore(self, directory: Path) -> None:
        """Replace everything by the files of a snapshot."""
        try:
            self._below.restore(directory)
        finally:
            self._begin_with(self._below.state)

    def num_keys(self) -> int:
        """Return the number of keys; an estimate if keys are not counted."""
        if self.state.num_keys is not None:
            return self.state.num_keys
        unmerged = sum(len(pairs) for changes in self._unmerged for pairs in changes.families.values())
        return self._below.num_keys() + unmerged + sum(len(run) for held in self._maps.values() for run in held.runs)

    def memory_bytes(self) -> int:
        """Return the bytes of memory of the engine below and of the changes."""
        return self._below.memory_bytes() + self._nbytes

    def num_files(self) -> int:
        """Return the number of local files of the engine below."""
        return self._below.num_files()

    def clear(self) -> None:
        """Start over, empty."""
        self._below.clear()
        self._begin_with(LocalState())

    def close(self) -> None:
        """Release everything; scans under way end with an error."""
        self._below.close()
        for scan in list(self._scans):
            scan.close()
        self._begin_with(LocalState())
