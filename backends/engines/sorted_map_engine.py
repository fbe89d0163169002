"""The backend "file" (Spark: ``HDFSBackedStateStore``): keeps the state in memory, as sorted runs.

Its only files are changelogs and snapshots in storage. A restart loads the last snapshot and the changelogs after it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.conf import DEFAULT_FAMILY, StateStoreConf
from backends.decoders import json_decoder
from backends.encoding.columns import placed, take_binary
from backends.encoding.keys import KeyRange
from backends.encoding.sorted_pairs import (
    PAIRS_SCHEMA,
    SortedPairs,
    grouped_by_bytes,
    is_strictly_sorted,
    key_order,
    merged_scan,
)
from backends.exceptions import DamagedFileError, StoreClosedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState

# An immutable sorted map of bytes to bytes that shares structure with the maps it was made from.
#
# A log-structured merge tree in memory: sorted runs in Arrow arrays, the older and larger ones below. A change adds a
# run and merges it with the runs that are not much larger, so that the cost of a change follows its size. The old map
# keeps its own list of runs and stays as it was. A run is cut into chunks of disjoint key ranges; a merge rebuilds only
# the chunks that it touches.
#
# ``docs/decisions/engines.md`` compares it with a dict with sorted keys and with ``SortedDict``.


MAP_CHUNK_ROWS = 1 << 16
MAP_CHUNK_BYTES = 16 << 20
MAP_SCAN_ROWS = 1 << 14
_GROWTH = 4


@dataclass(frozen=True)
class Run:
    """Sorted chunks, none of them empty; chunk i has the keys from ``firsts[i]`` up to ``firsts[i + 1]``."""

    chunks: tuple[SortedPairs, ...]
    firsts: tuple[bytes, ...]

    @classmethod
    def of(cls, pairs: SortedPairs) -> Run:
        """Cut pairs into chunks."""
        return cls._of_chunks(_cut(pairs))

    @classmethod
    def _of_chunks(cls, chunks: list[SortedPairs]) -> Run:
        return cls(tuple(chunks), tuple(c.keys[0].as_py() for c in chunks))

    def __len__(self) -> int:
        return sum(len(c) for c in self.chunks)

    def _spans(self, keys: pa.BinaryArray) -> Iterator[tuple[SortedPairs, int, int]]:
        """Return each chunk with the range of the sorted ``keys`` that belong to it."""
        asked = SortedPairs(keys, keys)
        starts = [0, *(asked.lower_bound(first) for first in self.firsts[1:]), len(keys)]
        yield from zip(self.chunks, starts, starts[1:], strict=False)

    def overlay(self, keys: pa.BinaryArray, below: pa.BinaryArray) -> pa.BinaryArray:
        """Return the values of sorted ``keys``: this run's over ``below``, the values in the older runs."""
        parts = [
            chunk.overlay(keys.slice(start, end - start), below.slice(start, end - start))
            for chunk, start, end in self._spans(keys)
            if end > start
        ]
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)

    def find(self, keys: pa.BinaryArray) -> tuple[npt.NDArray[np.bool_], pa.BinaryArray]:
        """Return which of the sorted ``keys`` are in this run, and the values of these (null: removed)."""
        masks, values = [], []
        for chunk, start, end in self._spans(keys):
            if end > start:
                at = chunk.find(keys.slice(start, end - start))
                masks.append(at >= 0)
                values.append(take_binary(chunk.values, at[masks[-1]]))
        if len(masks) == 1:
            return masks[0], values[0]
        return np.concatenate(masks), pa.concat_arrays(values)

    def get(self, key: bytes) -> tuple[bool, bytes | None]:
        """Return whether a key is in this run, and its value (None: removed)."""
        at = bisect_right(self.firsts, key) - 1
        return self.chunks[at].get(key) if at >= 0 else (False, None)

    def under(self, newer: Run, *, is_lowest: bool) -> Run:
        """Return both runs as one. Tombstones of removed keys are dropped if there is no run below."""
        chunks: list[SortedPairs] = []
        changes = newer.pairs()
        for chunk, start, end in self._spans(changes.keys):
            if start == end:
                chunks.append(chunk)
                continue
            merged = chunk.under(changes.slice(start, end - start))
            chunks.extend(_cut(merged.present() if is_lowest else merged))
        return Run._of_chunks(_joined(chunks))

    def pairs(self) -> SortedPairs:
        return _concatenated(self.chunks)

    def between(self, start: bytes | None, end: bytes | None) -> Iterator[SortedPairs]:
        """Return the chunks of a range."""
        first = 0 if start is None else max(0, bisect_right(self.firsts, start) - 1)
        for chunk, begins in zip(self.chunks[first:], self.firsts[first:], strict=True):
            if end is not None and begins >= end:
                return
            cut = chunk.between(start, end)
            if len(cut):
                yield cut

    def within(self, ranges: Sequence[KeyRange]) -> Iterator[SortedPairs]:
        """Return the pairs of ascending ranges that do not overlap: a chunk's pairs of all ranges at once."""
        starts = [start for start, _ in ranges]
        for chunk, begins, following in zip(self.chunks, self.firsts, [*self.firsts[1:], None], strict=True):
            first = max(0, bisect_right(starts, begins) - 1)
            last = len(ranges) if following is None else bisect_left(starts, following)
            cut = chunk.within(ranges[first:last])
            if len(cut):
                yield cut


def _concatenated(chunks: Sequence[SortedPairs]) -> SortedPairs:
    if len(chunks) == 1:
        return chunks[0]
    return SortedPairs(pa.concat_arrays([c.keys for c in chunks]), pa.concat_arrays([c.values for c in chunks]))


def _cut(pairs: SortedPairs) -> list[SortedPairs]:
    if not len(pairs):
        return []
    per_chunk = max(1, min(MAP_CHUNK_ROWS, MAP_CHUNK_BYTES * len(pairs) // max(1, pairs.nbytes)))
    if len(pairs) <= 2 * per_chunk:
        return [pairs]
    bounds = np.linspace(0, len(pairs), len(pairs) // per_chunk + 1).astype(int).tolist()
    # Copied, so that a chunk does not keep its whole source in memory.
    return [pairs.slice(a, b - a).compact() for a, b in pairwise(bounds)]


def _joined(chunks: list[SortedPairs]) -> list[SortedPairs]:
    """Join neighbouring chunks that are small because keys were removed."""
    joined: list[SortedPairs] = []
    for chunk in chunks:
        last = joined[-1] if joined else None
        if (
            last is not None
            and len(last) + len(chunk) <= MAP_CHUNK_ROWS // 4
            and last.nbytes + chunk.nbytes <= MAP_CHUNK_BYTES // 4
        ):
            joined[-1] = _concatenated((last, chunk))
        else:
            joined.append(chunk)
    return joined


@dataclass(frozen=True)
class SortedMap:
    """The map; ``runs`` from the oldest to the newest. A null value in a newer run means a removed key.

    With ``keeps_removed`` the oldest run has removed keys as well: the map holds changes over pairs stored elsewhere.
    """

    runs: tuple[Run, ...] = ()
    keeps_removed: bool = False

    @classmethod
    def of_sorted(cls, parts: list[SortedPairs]) -> SortedMap:
        """Make a map of parts that ascend, and have no null values."""
        run = Run._of_chunks([chunk for part in parts for chunk in _cut(part)])
        return cls((run,) if run.chunks else ())

    def with_changes(self, changes: SortedPairs) -> SortedMap:
        """Return a new map; null values remove keys."""
        runs = list(self.runs)
        if not runs and not self.keeps_removed:
            changes = changes.present()
        run = Run.of(changes)
        if not run.chunks:
            return self
        while runs and len(runs[-1]) < _GROWTH * len(run):
            below = runs.pop()
            run = below.under(run, is_lowest=not runs and not self.keeps_removed)
            if not run.chunks:
                return replace(self, runs=tuple(runs))
        return replace(self, runs=(*runs, run))

    def get_many(self, keys: pa.BinaryArray, below: pa.BinaryArray | None = None) -> pa.BinaryArray:
        """Return the values in the order of ``keys``; sorted keys are faster.

        A key that no run has gets its value of ``below``, null by default.
        """
        values = pa.nulls(len(keys), pa.binary()) if below is None else below
        if not self.runs or not len(keys):
            return values
        order = None if is_strictly_sorted(keys) else np.asarray(key_order(keys))
        if order is not None:
            keys, values = keys.take(pa.array(order)), values.take(pa.array(order))
        for run in self.runs:
            values = run.overlay(keys, values)
        if order is None:
            return values
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return values.take(pa.array(back))

    def get_or_read(self, keys: pa.BinaryArray, read: Callable[[pa.BinaryArray], pa.BinaryArray]) -> pa.BinaryArray:
        """Return the values in the order of ``keys``. ``read`` returns those of the keys that no run has."""
        if not self.runs or not len(keys):
            return read(keys)
        order = None if is_strictly_sorted(keys) else np.asarray(key_order(keys))
        missing = keys if order is None else keys.take(pa.array(order))
        rows = np.arange(len(keys)) if order is None else order
        parts: list[pa.BinaryArray] = []
        rows_of_parts = []
        for run in reversed(self.runs):
            is_here, values = run.find(missing)
            if len(values):
                parts.append(values)
                rows_of_parts.append(rows[is_here])
                left = np.flatnonzero(~is_here)
                rows, missing = rows[left], take_binary(missing, left)
            if not len(missing):
                break
        else:
            parts.append(read(missing))
            rows_of_parts.append(rows)
        return parts[0] if order is None and len(parts) == 1 else placed(parts, rows_of_parts)

    def find(self, key: bytes) -> tuple[bool, bytes | None]:
        """Return whether a run has a key, and its value (None: removed)."""
        for run in reversed(self.runs):
            is_there, value = run.get(key)
            if is_there:
                return True, value
        return False, None

    def scan(self, start: bytes | None, end: bytes | None) -> Iterator[pa.RecordBatch]:
        return self._merged(lambda run: run.between(start, end))

    def scan_ranges(self, ranges: Sequence[KeyRange]) -> Iterator[pa.RecordBatch]:
        """Return the pairs of ascending ranges that do not overlap, in key order."""
        return self._merged(lambda run: run.within(ranges))

    def _merged(self, cut: Callable[[Run], Iterator[SortedPairs]]) -> Iterator[pa.RecordBatch]:
        """Return the present pairs of some ranges; ``cut`` returns those that a run has."""
        if not self.runs:
            return iter(())
        batches: Iterator[pa.RecordBatch] = (
            chunk.slice(at, MAP_SCAN_ROWS).batch()
            for chunk in cut(self.runs[0])
            for at in range(0, len(chunk), MAP_SCAN_ROWS)
        )
        return merged_scan(batches, _changes(self.runs[1:], cut))

    def between(self, start: bytes | None, end: bytes | None) -> SortedPairs:
        """Return the pairs of a range, with a null value for each removed key that a run still has."""
        return _changes(self.runs, lambda run: run.between(start, end))

    def within(self, ranges: Sequence[KeyRange]) -> SortedPairs:
        """Return the pairs of ascending ranges that do not overlap, as ``between`` does."""
        return _changes(self.runs, lambda run: run.within(ranges))

    def flat(self) -> Iterator[SortedPairs]:
        """Return all pairs, a part at a time."""
        for batch in self.scan(None, None):
            yield SortedPairs(batch.column(0), batch.column(1))

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for run in self.runs for chunk in run.chunks)


def _changes(runs: Sequence[Run], cut: Callable[[Run], Iterator[SortedPairs]]) -> SortedPairs:
    pairs = SortedPairs.empty()
    for run in reversed(runs):
        chunks = tuple(cut(run))
        if chunks:
            pairs = _concatenated(chunks).under(pairs)
    return pairs


_FEW_ROWS = 64
"""Up to this many keys, one look-up per key is faster."""
_INDEX = "index.json"


class _Part(msgspec.Struct, frozen=True):
    """One file of a snapshot: pairs of a column family. The parts of a family ascend."""

    column_family: str
    name: str


class _Index(msgspec.Struct, frozen=True):
    state: LocalState
    column_families: tuple[str, ...]
    parts: tuple[_Part, ...]


class SortedMapScan(Iterator[pa.RecordBatch]):
    """The batches of an immutable map. Raises ``StoreClosedError`` once the store is closed."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches: Iterator[pa.RecordBatch] | None = batches

    def __next__(self) -> pa.RecordBatch:
        batches = self._batches  # another thread may close the store
        if batches is None:
            raise StoreClosedError("The store was closed while it was scanned.")
        return next(batches)

    def close(self) -> None:
        self._batches = None


class SortedMapEngine:
    """Sorted maps in memory, one per column family. ``path`` is not used."""

    def __init__(self, path: Path, conf: StateStoreConf) -> None:
        self._conf = conf
        self._scans: weakref.WeakSet[SortedMapScan] = weakref.WeakSet()
        self._closed = False
        self.state = LocalState()
        self._maps: Mapping[str, SortedMap] = {DEFAULT_FAMILY: SortedMap()}

    @property
    def column_families(self) -> frozenset[str]:
        return frozenset(self._maps)

    def get_many(
        self, keys: pa.BinaryArray, column_family: str = DEFAULT_FAMILY, *, keep: bool = True
    ) -> pa.BinaryArray:
        self._check_open()
        family_map = self._maps.get(column_family)
        if family_map is None:
            return pa.nulls(len(keys), pa.binary())
        if len(keys) <= _FEW_ROWS:
            return pa.array([family_map.find(key)[1] for key in keys.to_pylist()], pa.binary())
        return family_map.get_many(keys)

    def get_one(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> bytes | None:
        self._check_open()
        family_map = self._maps.get(column_family)
        return None if family_map is None else family_map.find(key)[1]

    def scan(
        self, start: bytes | None, end: bytes | None, column_family: str = DEFAULT_FAMILY
    ) -> Iterator[pa.RecordBatch]:
        self._check_open()
        scan = SortedMapScan(self._maps.get(column_family, SortedMap()).scan(start, end))
        self._scans.add(scan)
        return scan

    def scan_ranges(self, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY) -> Iterator[pa.RecordBatch]:
        self._check_open()
        family_map = self._maps.get(column_family, SortedMap())
        scan = SortedMapScan(family_map.scan_ranges(ranges))
        self._scans.add(scan)
        return scan

    def prepare(self, changes: Changes) -> Callable[[LocalState], None]:
        """Return a function that makes new maps, which share the unchanged parts with the old ones."""
        return lambda state: self._apply(changes, state)

    def _apply(self, changes: Changes, state: LocalState) -> None:
        self._check_open()
        changed = {n: self._maps.get(n, SortedMap()).with_changes(pairs) for n, pairs in changes.families.items()}
        self._maps = {**self._maps, **changed}
        self.state = state

    def load_sorted(self, parts: Iterable[tuple[str, SortedPairs]], unfinished: LocalState) -> None:
        """Make maps of pairs; pairs that come in key order need no merge."""
        self._check_open()
        ascending: dict[str, list[SortedPairs]] = {}
        self.state = unfinished
        for family, pairs in parts:
            runs = ascending.setdefault(family, [])
            if runs and len(pairs) and not runs[-1].keys[-1].as_py() < pairs.keys[0].as_py():
                self._add(family, runs)
                runs = ascending[family] = []
            if len(pairs):
                runs.append(pairs)
        for family, runs in ascending.items():
            self._add(family, runs)

    def _add(self, family: str, parts: list[SortedPairs]) -> None:
        of_parts = SortedMap.of_sorted(parts)
        family_map = self._maps.get(family, SortedMap())
        merged = family_map.with_changes(of_parts.between(None, None)) if family_map.runs else of_parts
        self._maps = {**self._maps, family: merged}

    def capture(self, directory: Path) -> Callable[[], None]:
        """Remember the maps; they are written to ``directory`` when the returned function is called."""
        self._check_open()
        maps, state = self._maps, self.state
        return lambda: self._write(directory, maps, state)

    def _write(self, directory: Path, maps: Mapping[str, SortedMap], state: LocalState) -> None:
        options = pa.ipc.IpcWriteOptions(
            compression=None if self._conf.compression == "none" else self._conf.compression
        )
        parts: list[_Part] = []
        for family, family_map in maps.items():
            for chunks in grouped_by_bytes(family_map.flat(), self._conf.file_snapshot_part_bytes):
                name = f"{len(parts):06d}.pairs"
                with pa.ipc.new_file(str(directory / name), PAIRS_SCHEMA, options=options) as writer:
                    for pairs in chunks:
                        writer.write_batch(pairs.batch())
                parts.append(_Part(family, name))
        index = _Index(state, tuple(maps), tuple(parts))
        (directory / _INDEX).write_bytes(msgspec.json.encode(index))

    def restore(self, directory: Path) -> None:
        self.clear()
        try:
            index = json_decoder(_Index).decode((directory / _INDEX).read_bytes())
            parts: dict[str, list[SortedPairs]] = {family: [] for family in index.column_families}
            for part in index.parts:
                with pa.ipc.open_file(pa.py_buffer((directory / part.name).read_bytes())) as reader:
                    batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
                for batch in batches:
                    batch.validate(full=True)
                parts[part.column_family].extend(SortedPairs(b.column(0), b.column(1)) for b in batches)
        except (OSError, msgspec.MsgspecError, pa.ArrowException, KeyError) as error:
            raise DamagedFileError(f"{directory} holds no snapshot of the file provider: {error!r}") from error
        self._maps = {family: SortedMap.of_sorted(pairs) for family, pairs in parts.items()}
        self.state = index.state

    def num_keys(self) -> int:
        """Return the number of keys. If keys are not counted, the result includes removed keys that a run still has."""
        if self.state.num_keys is not None:
            return self.state.num_keys
        return sum(len(run) for family_map in self._maps.values() for run in family_map.runs)

    def memory_bytes(self) -> int:
        return sum(family_map.nbytes for family_map in self._maps.values())

    def num_files(self) -> int:
        """Return 0: everything is in memory."""
        return 0

    def clear(self) -> None:
        self._maps = {DEFAULT_FAMILY: SortedMap()}
        self.state = LocalState()

    def close(self) -> None:
        self._closed = True
        for scan in list(self._scans):
            scan.close()
        self._maps = {}

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("The state is closed: open it again.")
