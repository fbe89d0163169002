"""RocksDB, and an engine in memory whose content outlives its process, as RocksDB's does; all above is real.

Written as a provider, so that hosts find it by its import path: two of them, which share nothing but this code.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from rocksdict import AccessType

from backends.conf import DEFAULT_FAMILY, StateStoreConf
from backends.encoding.keys import KeyRange
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.engine import writing_to
from backends.engines.rocksdb import LocalRocksDB
from backends.exceptions import LocalStateDamagedError, StoreClosedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from backends.providers.standalone_provider import LocalStateStoreProvider
from tests.simulation import scheduler as scheduling
from tests.simulation.scheduler import Process, Violation
from tests.simulation.sometimes import sometimes
from tests.simulation.storage import Faults

faults = Faults()
"""The faults of the current run."""
_kept: dict[str, tuple[LocalState, dict[bytes, bytes]]] = {}
"""By the marker in the engine's directory, because a directory may be moved."""
PARTS = 2


_databases: list[LocalRocksDB] = []


def forget_all() -> None:
    """A run is over."""
    _kept.clear()
    for database in _databases:
        database.close()
    _databases.clear()


def process_died(process: Process) -> None:
    """Close the databases that a process had open: their locks go with it."""
    for database in process.memory.pop(LocalRocksDB, ()):
        database.close()
        _databases.remove(database)


def _find_disk_full(path: Path) -> None:
    """Raise, now and then, what an engine raises on a full disk."""
    s = scheduling.active
    if faults.disk_full and s.random.random() < faults.disk_full:
        s.log("the disk of", path, "is full")
        sometimes("an engine finds its disk full")
        raise OSError(errno.ENOSPC, "No space left on device: simulated")


class SimulatedEngine:
    """See ``backends.engines.engine.StateEngine``. One column family."""

    def __init__(self, path: Path, conf: StateStoreConf) -> None:
        self._path = path
        self._is_open = True
        self._marker = path / "MARKER"
        if not self._marker.exists():
            path.mkdir(parents=True, exist_ok=True)
            self._marker.write_text(str(len(_kept)))
            _kept[str(len(_kept))] = (LocalState(), {})
        self._name = self._marker.read_text()
        self.state, self._pairs = _kept[self._name]

    @property
    def column_families(self) -> frozenset[str]:
        """One."""
        return frozenset((DEFAULT_FAMILY,))

    def get_many(self, keys: pa.BinaryArray, column_family: str, *, keep: bool = True) -> pa.BinaryArray:
        """Values, null where there is none."""
        self._check_open()
        return pa.array([self._pairs.get(k) for k in keys.to_pylist()], pa.binary())

    def get_one(self, key: bytes, column_family: str) -> bytes | None:
        """A value."""
        self._check_open()
        return self._pairs.get(key)

    def scan(self, start: bytes | None, end: bytes | None, column_family: str) -> Iterator[pa.RecordBatch]:
        """One batch of the pairs in a range, if there are some."""
        self._check_open()
        found = sorted(k for k in self._pairs if (start is None or k >= start) and (end is None or k < end))
        if not found:
            return iter(())
        values = [self._pairs[k] for k in found]
        schema = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
        return iter(
            [pa.RecordBatch.from_arrays([pa.array(found, pa.binary()), pa.array(values, pa.binary())], schema=schema)]
        )

    def prepare(self, changes: Changes) -> Callable[[LocalState], None]:
        """Get changes ready."""
        pairs = [
            (k, v)
            for held in changes.families.values()
            for k, v in zip(held.keys.to_pylist(), held.values.to_pylist(), strict=True)
        ]
        return lambda state: self._apply(pairs, state)

    def _apply(self, changes: list[tuple[bytes, bytes | None]], state: LocalState) -> None:
        s = scheduling.active
        if s.random.random() < 0.2:
            s.sleep(s.random.random() * 0.005)
        self._check_open()
        with writing_to(self._path):
            _find_disk_full(self._path)
        pairs = dict(self._pairs)
        for key, value in changes:
            if value is None:
                pairs.pop(key, None)
            else:
                pairs[key] = value
        if state.num_keys not in (None, len(pairs)):
            raise Violation(f"{self._path} has {len(pairs)} keys at {state}.")
        self._keep(state, pairs)

    def _keep(self, state: LocalState, pairs: dict[bytes, bytes]) -> None:
        self.state, self._pairs = _kept[self._name] = (state, pairs)

    def load_sorted(self, parts: Iterable[tuple[str, SortedPairs]], unfinished: LocalState) -> None:
        """Take pairs, part by part: the process may be killed in between."""
        for family, pairs in parts:
            self.prepare(Changes({family: pairs}))(unfinished)
        self._keep(unfinished, self._pairs)

    def scan_ranges(self, ranges: Sequence[KeyRange], column_family: str) -> Iterator[pa.RecordBatch]:
        """One batch of each range."""
        return chain.from_iterable([self.scan(start, end, column_family) for start, end in ranges])

    def capture(self, directory: Path) -> Callable[[], None]:
        """The pairs in two files, so that a later snapshot may share one of them."""
        self._check_open()
        state, pairs = self.state, self._pairs

        def write() -> None:
            with writing_to(directory):
                _find_disk_full(directory)
            for part in range(PARTS):
                held = [(k, v) for k, v in sorted(pairs.items()) if k[-1] % PARTS == part]
                (directory / f"{part}.sst").write_bytes(msgspec.msgpack.encode(held))
            (directory / "state.json").write_bytes(msgspec.json.encode(state))

        return write

    def restore(self, directory: Path) -> None:
        """Read what ``capture`` wrote."""
        self._check_open()
        pairs: dict[bytes, bytes] = {}
        for part in range(PARTS):
            pairs.update(
                msgspec.msgpack.decode((directory / f"{part}.sst").read_bytes(), type=list[tuple[bytes, bytes]])
            )
        self._keep(msgspec.json.decode((directory / "state.json").read_bytes(), type=LocalState), pairs)

    def num_keys(self) -> int:
        """Exact."""
        return len(self._pairs)

    def memory_bytes(self) -> int:
        """Return a constant: no test reads it."""
        return 0

    def num_files(self) -> int:
        """One."""
        return 1

    def clear(self) -> None:
        """Start over."""
        self._keep(LocalState(), {})

    def close(self) -> None:
        """Let go."""
        self._is_open = False

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreClosedError("The state is closed: open it again.")


class SimulatedRocksDB(LocalRocksDB):
    """RocksDB in a simulated process: it is closed when the process ends."""

    def __init__(self, path: Path, conf: StateStoreConf) -> None:
        scheduling.active.current.process.memory.setdefault(LocalRocksDB, []).append(self)
        _databases.append(self)
        super().__init__(path, conf)

    def _open(self, access: AccessType | None = None, *, expected: LocalState | None = None) -> None:
        try:
            super()._open(access, expected=expected)
        except LocalStateDamagedError:
            if expected is not None:
                sometimes("a database that was only read finds its files gone")
            raise

    def _write(self, batches: list[Any], state: LocalState) -> None:
        _find_disk_full(self._path)
        super()._write(batches, state)

    def capture(self, directory: Path) -> Callable[[], None]:
        """Find the disk full, now and then."""
        with writing_to(directory):
            _find_disk_full(directory)
        return super().capture(directory)


class RocksDBProvider(LocalStateStoreProvider):
    """RocksDB as a backend of the simulation."""

    backend = "tests.simulation.engine.RocksDBProvider"
    engine = SimulatedRocksDB
    opens_slowly = True


class FirstProvider(LocalStateStoreProvider):
    """A backend of the simulation."""

    backend = "tests.simulation.engine.FirstProvider"
    engine = SimulatedEngine


class SecondProvider(LocalStateStoreProvider):
    """Another backend, for restarts with another one."""

    backend = "tests.simulation.engine.SecondProvider"
    engine = SimulatedEngine


def backends(*, is_rocksdb: bool) -> tuple[str, str]:
    """The two backends of a world."""
    return (RocksDBProvider if is_rocksdb else FirstProvider).backend, SecondProvider.backend
