"""The work of the comparison ``provider``: both providers and raw rocksdict get, scan and put the same sorted keys.

8-byte keys have 24-byte values. "Arrow" takes and gives Arrow arrays, as a store does; "lists" has its Python ``bytes``
ready before the clock starts, and leaves those it gets as they are. Results are compared before they are timed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from backends import FileStateStoreProvider, RocksDBStateStoreProvider, StateStoreId
from backends.providers.standalone_provider import LocalStateStoreProvider

PROVIDERS = {"rocksdb provider": RocksDBStateStoreProvider, "file provider": FileStateStoreProvider}
SCAN_ROWS = 1 << 14
MIB = 1 << 20

# As in the section "Reopening RocksDB Reads DB Options Automatically" of rocksdict's README, but for the plain table
# and its prefixes, which give up scans in key order.
DOCUMENTED = {
    "set_max_background_jobs": os.cpu_count(),
    "set_write_buffer_size": 256 * MIB,
    "set_level_zero_file_num_compaction_trigger": 4,
    "set_max_bytes_for_level_base": 1024 * MIB,
    "set_target_file_size_base": 256 * MIB,
    "set_max_bytes_for_level_multiplier": 4.0,
}

PUTS = ("empty state", "over all keys", "all keys read before")


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes; freeing its result is not counted."""
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    del result
    return seconds


def random_keys(size: int, rng: np.random.Generator) -> pa.BinaryArray:
    """Return distinct 8-byte keys, sorted."""
    numbers = np.unique(rng.integers(0, 1 << 63, size + size // 100 + 10, np.int64))
    numbers = np.sort(rng.permutation(numbers)[:size])
    return _fixed(numbers.astype(">i8"), 8)


def random_values(size: int, rng: np.random.Generator) -> pa.BinaryArray:
    """Return 24-byte values such as those of aggregates: a count, a sum, a moment."""
    rows = np.empty((size, 3), "<i8")
    rows[:, 0] = rng.integers(0, 1000, size)
    rows[:, 1] = rng.normal(size=size).view(np.int64)
    rows[:, 2] = 1_700_000_000_000_000 + rng.integers(0, 1 << 44, size)
    return _fixed(rows, 24)


def _fixed(rows: np.ndarray, width: int) -> pa.BinaryArray:
    return pa.Array.from_buffers(pa.binary(width), len(rows), [None, pa.py_buffer(rows.tobytes())]).cast(pa.binary())


def open_provider(name: str, directory: Path) -> LocalStateStoreProvider:
    """Return a provider with its checkpoint location and its local files below ``directory``."""
    state = StateStoreId(str(directory / "checkpoint"), "bench", 0)
    return PROVIDERS[name](state, local_dir=directory / "local")


def fill(provider: LocalStateStoreProvider, keys: pa.BinaryArray, values: pa.BinaryArray, per_commit: int) -> None:
    """Put all pairs, in several commits that each have keys from everywhere."""
    commits = max(1, len(keys) // per_commit)
    for i in range(commits):
        rows = pa.array(np.arange(i, len(keys), commits))
        store = provider.get_store(provider.latest_version())
        store.put_many(keys.take(rows), values.take(rows))
        store.commit()


def raw_options() -> Options:
    options = Options(raw_mode=True)
    for name, value in DOCUMENTED.items():
        getattr(options, name)(value)
    return options


def raw_put(db: Rdict, keys: list[bytes], values: list[bytes], *, sync: bool) -> None:
    """One write batch; with ``sync``, its log is synced to disk."""
    batch = WriteBatch(raw_mode=True)
    put = batch.put
    for key, value in zip(keys, values, strict=True):
        put(key, value)
    options = WriteOptions()
    options.sync = sync
    db.write(batch, options)


def raw_batches(db: Rdict) -> Iterator[pa.RecordBatch]:
    """Scan all as Arrow batches of the size that stores give."""
    items = db.items()
    while rows := list(islice(items, SCAN_ROWS)):
        keys, values = [row[0] for row in rows], [row[1] for row in rows]
        yield pa.RecordBatch.from_arrays([pa.array(keys, pa.binary()), pa.array(values, pa.binary())], ["key", "value"])


# -- get, put, scan ------------------------------------------------------------------------------


class Loaded:
    """The same pairs in both providers and in rocksdict: as it is after writing, and with its memory table flushed."""

    def __init__(self, root: Path, size: int, rng: np.random.Generator) -> None:
        self.keys, self.values = random_keys(size, rng), random_values(size, rng)
        self.key_list, self.value_list = self.keys.to_pylist(), self.values.to_pylist()
        self.providers = {name: open_provider(name, root / name) for name in PROVIDERS}
        for provider in self.providers.values():
            fill(provider, self.keys, self.values, max(1, size // 10))
        self.stores = {name: p.get_store(p.latest_version()) for name, p in self.providers.items()}
        self.raw = {name: Rdict(str(root / name), raw_options()) for name in ("raw", "raw flushed")}
        for name, db in self.raw.items():
            raw_put(db, self.key_list, self.value_list, sync=False)
            if name == "raw flushed":
                db.flush()

    def close(self) -> None:
        for provider in self.providers.values():
            provider.close()
        for db in self.raw.values():
            db.close()


def getters(held: Loaded) -> dict[str, Callable[[], float]]:
    """Return functions that read all keys, by contestant. Raises unless each returns the right values."""
    contestants: dict[str, Callable[[], float]] = {}
    for name, store in held.stores.items():
        assert store.get_many(held.keys).equals(held.values), name
        contestants[name] = partial(timed, partial(store.get_many, held.keys))
    for name, db in held.raw.items():
        assert db.get(held.key_list) == held.value_list, name
        contestants[f"{name}, Arrow"] = lambda db=db: timed(
            lambda: pa.array(db.get(held.keys.to_pylist()), pa.binary())
        )
        contestants[f"{name}, lists"] = partial(timed, partial(db.get, held.key_list))
    return contestants


def scanners(held: Loaded) -> dict[str, Callable[[], float]]:
    """Return functions that read all pairs in key order, by contestant. Raises unless each returns the right pairs."""
    contestants: dict[str, Callable[[], float]] = {}
    for name, store in held.stores.items():
        _check_scan(held, store.scan())
        contestants[name] = lambda store=store: timed(lambda: sum(len(batch) for batch in store.scan()))
    for name, db in held.raw.items():
        _check_scan(held, raw_batches(db))
        contestants[f"{name}, Arrow"] = lambda db=db: timed(lambda: sum(len(batch) for batch in raw_batches(db)))
        contestants[f"{name}, lists"] = lambda db=db: timed(lambda: list(db.items()))
    return contestants


def _check_scan(held: Loaded, batches: Iterator[pa.RecordBatch]) -> None:
    table = pa.Table.from_batches(batches)
    assert table.column(0).combine_chunks().equals(held.keys)
    assert table.column(1).combine_chunks().equals(held.values)


def putters(root: Path, keys: pa.BinaryArray, sets: list[pa.BinaryArray]) -> dict[str, Callable[[], list[float]]]:
    """Return functions that put all pairs and check them, by contestant; they return the seconds of ``PUTS``."""
    key_list, value_lists = keys.to_pylist(), [values.to_pylist() for values in sets]
    directory = root / "turn"
    root.mkdir()

    def three(put: Callable[[int, bool], None]) -> list[float]:
        """Put the first values, the second ones, and the first ones once all keys have been read."""
        return [timed(lambda: put(0, False)), timed(lambda: put(1, False)), timed(lambda: put(0, True))]

    def provider_side(name: str) -> list[float]:
        provider = open_provider(name, directory)

        def put(i: int, reads: bool) -> None:
            store = provider.get_store(provider.latest_version())
            if reads:
                store.get_many(keys)
            store.put_many(keys, sets[i])
            store.commit()

        try:
            seconds = three(put)
            assert provider.get_store(provider.latest_version()).get_many(keys).equals(sets[0])
            return seconds
        finally:
            provider.close()
            shutil.rmtree(directory)

    def raw_side(sync: bool, arrow: bool) -> list[float]:
        db = Rdict(str(directory), raw_options())

        def put(i: int, reads: bool) -> None:
            if reads:
                found = db.get(keys.to_pylist() if arrow else key_list)
                if arrow:
                    pa.array(found, pa.binary())
            given = (keys.to_pylist(), sets[i].to_pylist()) if arrow else (key_list, value_lists[i])
            raw_put(db, *given, sync=sync)

        try:
            seconds = three(put)
            assert db.get(key_list) == value_lists[0]
            return seconds
        finally:
            db.close()
            shutil.rmtree(directory)

    return {
        **{name: partial(provider_side, name) for name in PROVIDERS},
        "raw synced, Arrow": partial(raw_side, sync=True, arrow=True),
        "raw synced, lists": partial(raw_side, sync=True, arrow=False),
        "raw not synced, lists": partial(raw_side, sync=False, arrow=False),
    }
