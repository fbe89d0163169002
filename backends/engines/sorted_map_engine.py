"""The backend "file": despite its name the state is in memory, as sorted runs; the files are its changelogs and
snapshots in the storage (Spark: ``HDFSBackedStateStore``).

Nothing is kept on local disk: a restart loads the last snapshot and the changelogs after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from backends.conf import StateStoreConf
from backends.decoders import json_decoder
from backends.encoding.keys import KeyRange
from backends.encoding.sorted_pairs import PAIRS_SCHEMA, SortedPairs
from backends.engines.sorted_map import SortedMap
from backends.exceptions import DamagedFileError, StoreClosedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from backends.ids import DEFAULT_FAMILY

_FEW_ROWS = 64
"""At most this many keys are got faster one by one."""
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
    """The batches of a map, which never changes. Raises ``StoreClosedError`` once the store is closed."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches: Iterator[pa.RecordBatch] | None = batches

    def __next__(self) -> pa.RecordBatch:
        batches = self._batches  # another thread may close the store
        if batches is None:
            raise StoreClosedError("The store was closed while it was scanned.")
        return next(batches)

    def close(self) -> None:
        """Release the map."""
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
        """The names of the column families."""
        return frozenset(self._maps)

    def get_many(
        self, keys: pa.BinaryArray, column_family: str = DEFAULT_FAMILY, *, keep: bool = True
    ) -> pa.BinaryArray:
        """Return the values in the order of ``keys``; null where a key has none."""
        self._check_open()
        held = self._maps.get(column_family)
        if held is None:
            return pa.nulls(len(keys), pa.binary())
        if len(keys) <= _FEW_ROWS:
            return pa.array([held.get(key) for key in keys.to_pylist()], pa.binary())
        return held.get_many(keys)

    def get_one(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> bytes | None:
        """Return the value of one key; None if the key has none."""
        self._check_open()
        held = self._maps.get(column_family)
        return None if held is None else held.get(key)

    def scan(
        self, start: bytes | None, end: bytes | None, column_family: str = DEFAULT_FAMILY
    ) -> Iterator[pa.RecordBatch]:
        """Return the pairs of a range in key order, as they are now."""
        self._check_open()
        scan = SortedMapScan(self._maps.get(column_family, SortedMap()).scan(start, end))
        self._scans.add(scan)
        return scan

    def scan_ranges(self, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY) -> Iterator[pa.RecordBatch]:
        """Return the pairs of ascending ranges, one after the other, as they are now."""
        self._check_open()
        held = self._maps.get(column_family, SortedMap())
        scan = SortedMapScan(batch for start, end in ranges for batch in held.scan(start, end))
        self._scans.add(scan)
        return scan

    def prepare(self, changes: Changes) -> Callable[[LocalState], None]:
        """Return a function that makes new maps, which share with the old ones what has not changed."""
        return lambda state: self._apply(changes, state)

    def _apply(self, changes: Changes, state: LocalState) -> None:
        self._check_open()
        changed = {n: self._maps.get(n, SortedMap()).with_changes(pairs) for n, pairs in changes.families.items()}
        self._maps = {**self._maps, **changed}
        self.state = state

    def load_sorted(self, parts: Iterable[tuple[str, SortedPairs]], unfinished: LocalState) -> None:
        """Make maps of pairs; those that come in key order are in no need of a merge."""
        self._check_open()
        ascending: dict[str, list[SortedPairs]] = {}
        self.state = unfinished
        for family, pairs in parts:
            held = ascending.setdefault(family, [])
            if held and len(pairs) and not held[-1].keys[-1].as_py() < pairs.keys[0].as_py():
                self._add(family, held)
                held = ascending[family] = []
            if len(pairs):
                held.append(pairs)
        for family, held in ascending.items():
            self._add(family, held)

    def _add(self, family: str, parts: list[SortedPairs]) -> None:
        of_parts = SortedMap.of_sorted(parts)
        held = self._maps.get(family, SortedMap())
        merged = held.with_changes(of_parts.between(None, None)) if held.runs else of_parts
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
        for family, held in maps.items():
            for chunks in _grouped(held.flat(), self._conf.file_snapshot_part_bytes):
                name = f"{len(parts):06d}.pairs"
                with pa.ipc.new_file(str(directory / name), PAIRS_SCHEMA, options=options) as writer:
                    for pairs in chunks:
                        writer.write_batch(pa.RecordBatch.from_arrays([pairs.keys, pairs.values], schema=PAIRS_SCHEMA))
                parts.append(_Part(family, name))
        index = _Index(state, tuple(maps), tuple(parts))
        (directory / _INDEX).write_bytes(msgspec.json.encode(index))

    def restore(self, directory: Path) -> None:
        """Read what ``capture`` wrote."""
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
        self._maps = {family: SortedMap.of_sorted(held) for family, held in parts.items()}
        self.state = index.state

    def num_keys(self) -> int:
        """Return the number of keys; if keys are not counted, removed ones that are still held count as well."""
        if self.state.num_keys is not None:
            return self.state.num_keys
        return sum(len(run) for held in self._maps.values() for run in held.runs)

    def memory_bytes(self) -> int:
        """Return the bytes of memory of the maps."""
        return sum(held.nbytes for held in self._maps.values())

    def num_files(self) -> int:
        """Return 0: everything is in memory."""
        return 0

    def clear(self) -> None:
        """Start over, empty."""
        self._maps = {DEFAULT_FAMILY: SortedMap()}
        self.state = LocalState()

    def close(self) -> None:
        """Release the memory; scans under way end with an error."""
        self._closed = True
        for scan in list(self._scans):
            scan.close()
        self._maps = {}

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("The state is closed: open it again.")


def _grouped(chunks: Iterator[SortedPairs], part_bytes: int) -> Iterator[list[SortedPairs]]:
    group: list[SortedPairs] = []
    nbytes = 0
    for chunk in chunks:
        group.append(chunk)
        nbytes += chunk.nbytes
        if nbytes >= part_bytes:
            yield group
            group, nbytes = [], 0
    if group:
        yield group
