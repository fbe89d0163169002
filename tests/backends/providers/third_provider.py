"""A third backend in one file: a dict. It passes ``test_provider_*.py``; it has no other merit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa

from backends.conf import StateStoreConf
from backends.encoding.keys import KeyRange
from backends.encoding.sorted_pairs import PAIRS_SCHEMA, SortedPairs
from backends.exceptions import DamagedFileError, StoreClosedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from backends.providers.standalone_provider import LocalStateStoreProvider


class DictEngine:
    """All pairs of all column families in dicts."""

    def __init__(self, path: Path, conf: StateStoreConf) -> None:
        self.clear()
        self._closed = False

    @property
    def column_families(self) -> frozenset[str]:
        return frozenset(self._families)

    def get_many(self, keys: pa.BinaryArray, column_family: str, *, keep: bool = True) -> pa.BinaryArray:
        self._check_open()
        family = self._families.get(column_family, {})
        return pa.array([family.get(key) for key in keys.to_pylist()], pa.binary())

    def get_one(self, key: bytes, column_family: str) -> bytes | None:
        self._check_open()
        return self._families.get(column_family, {}).get(key)

    def scan(self, start: bytes | None, end: bytes | None, column_family: str) -> Iterator[pa.RecordBatch]:
        self._check_open()
        family = self._families.get(column_family, {})
        pairs = [
            (k, v) for k, v in sorted(family.items()) if (start is None or k >= start) and (end is None or k < end)
        ]
        return self._batches(pairs)

    def _batches(self, pairs: list[tuple[bytes, bytes]]) -> Iterator[pa.RecordBatch]:
        for at in range(0, len(pairs), 100):
            self._check_open()
            keys, values = zip(*pairs[at : at + 100], strict=True)
            yield pa.RecordBatch.from_arrays(
                [pa.array(keys, pa.binary()), pa.array(values, pa.binary())], schema=PAIRS_SCHEMA
            )

    def prepare(self, changes: Changes) -> Callable[[LocalState], None]:
        def apply(state: LocalState) -> None:
            for name, pairs in changes.families.items():
                family = self._families.setdefault(name, {})
                for key, value in zip(pairs.keys.to_pylist(), pairs.values.to_pylist(), strict=True):
                    if value is None:
                        family.pop(key, None)
                    else:
                        family[key] = value
            self.state = state

        return apply

    def load_sorted(self, parts: Iterable[tuple[str, SortedPairs]], unfinished: LocalState) -> None:
        for name, pairs in parts:
            self.prepare(Changes({name: pairs}))(unfinished)
        self.state = unfinished

    def scan_ranges(self, ranges: Sequence[KeyRange], column_family: str) -> Iterator[pa.RecordBatch]:
        return chain.from_iterable([self.scan(start, end, column_family) for start, end in ranges])

    def capture(self, directory: Path) -> Callable[[], None]:
        families = {n: [(k.hex(), v.hex()) for k, v in f.items()] for n, f in self._families.items()}
        state = (self.state.version, self.state.head, self.state.num_keys)
        return lambda: (directory / "dict.json").write_text(json.dumps([state, families])) and None

    def restore(self, directory: Path) -> None:
        try:
            state, families = json.loads((directory / "dict.json").read_text())
        except (OSError, ValueError) as error:
            raise DamagedFileError(f"{directory} holds no dict: {error}") from error
        self.state = LocalState(*state)
        self._families = {n: {bytes.fromhex(k): bytes.fromhex(v) for k, v in f} for n, f in families.items()}

    def num_keys(self) -> int:
        return sum(map(len, self._families.values()))

    def memory_bytes(self) -> int:
        return sum(len(k) + len(v) for f in self._families.values() for k, v in f.items())

    def num_files(self) -> int:
        return 0

    def clear(self) -> None:
        self.state = LocalState()
        self._families: dict[str, dict[bytes, bytes]] = {"default": {}}

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("The dict is closed.")


class ThirdStateStoreProvider(LocalStateStoreProvider):
    """Versions of one store, in dicts."""

    backend = "third"
    engine = DictEngine
