"""The cost of reading one partition: bulk reads of random keys with and without the row cache, single reads, scans.

    python benchmarks/reads.py                       a million keys; two minutes
    python benchmarks/reads.py --only get one        some sections

- get: requests of several sizes for random keys. "no cache" is ``rocksdb_row_cache_bytes=0``; "first time" has the
  cache, but other keys in each request, so that it pays for keeping them and has nothing of it; "dict" is what the
  cache might have been: all pairs in a Python dict, between Arrow arrays; "raw" is rocksdict by itself with lists of
  sorted ``bytes``.
- one: single keys, one after the other, by one thread and by eight, of the completed version.
- scan: the whole partition, and the progress of a second thread that only counts during the scan: the rest of the time
  the scan holds the interpreter.
- write: commits of 50,000 random keys that were read before, with and without the cache.

Keys are 11 bytes (key group, a marker, a long), values 30, as an aggregate has them. Contestants take turns in every
round. Target: well below a microsecond per key in requests of 1,000, below 20 for a single one, below 0.5 for a row of
a scan.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rocksdict import Options, Rdict, WriteBatch

from backends import FileStateStoreProvider, RocksDBStateStoreProvider, StateStoreConf
from backends.encoding.sorted_pairs import to_bytes_list
from backends.formats.changelog import ChangelogMeta, Changes
from backends.partition.partition_state import PartitionState
from backends.providers.standalone_provider import LocalStateStoreProvider
from backends.storage.checkpoint_storage import CheckpointStorage

KEY_BYTES, VALUE_BYTES = 11, 30
REQUESTS = (50_000, 1_000, 125, 16, 8)
console = Console(width=max(Console().width, 120))

Rows = npt.NDArray[np.uint8]
Times = dict[str, list[float]]


def key_rows(size: int) -> Rows:
    """Return stored keys: a group that follows from the number, a marker, the number."""
    rows = np.ones((size, KEY_BYTES), np.uint8)
    numbers = np.arange(size, dtype=np.uint64)
    groups = ((numbers * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(54)).astype(">u2")
    rows[:, :2] = groups.view(np.uint8).reshape(-1, 2)
    rows[:, 3:] = numbers.astype(">u8").view(np.uint8).reshape(-1, 8)
    return rows


def binary(rows: Rows) -> pa.BinaryArray:
    """Return rows of bytes as an Arrow array."""
    n, width = rows.shape
    return pa.Array.from_buffers(pa.binary(width), n, [None, pa.py_buffer(rows.tobytes())]).cast(pa.binary())


def commit(state: PartitionState, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
    """All steps of one version."""
    version = state.version + 1
    meta = ChangelogMeta("bench", "bench", 0, 1, version, "1", state.head)
    ref = state.attempts.store_alone(meta, Changes.of(keys, values))
    state.attempts.accept(version, "1")
    state.complete(version, ref.path)


class Loaded:
    """The same pairs in partitions of several kinds, written in ten versions of keys from everywhere."""

    def __init__(self, root: Path, size: int, rng: np.random.Generator) -> None:
        self.rng = rng
        self.rows = key_rows(size)
        values = rng.integers(0, 256, (size, VALUE_BYTES), np.uint8)
        values[:, : VALUE_BYTES // 2] = 0
        self.states = {
            "rocksdb": _state(root / "cached", RocksDBStateStoreProvider, StateStoreConf(fsync=False)),
            "rocksdb, no cache": _state(
                root / "plain", RocksDBStateStoreProvider, StateStoreConf(fsync=False, rocksdb_row_cache_bytes=0)
            ),
            "file": _state(root / "file", FileStateStoreProvider, StateStoreConf(fsync=False)),
        }
        self.raw = Rdict(str(root / "raw"), Options(raw_mode=True))
        self.dict: dict[bytes | None, bytes | None] = {}
        for part in np.array_split(rng.permutation(size), 10):
            keys, some = binary(self.rows[part]), binary(values[part])
            for state in self.states.values():
                commit(state, keys, some)
            batch = WriteBatch(raw_mode=True)
            for key, value in zip(to_bytes_list(keys), to_bytes_list(some), strict=True):
                batch.put(key, value)
                self.dict[key] = value
            self.raw.write(batch)

    def random_keys(self, number: int) -> pa.BinaryArray:
        """Return keys that are in the state, in random order."""
        return binary(self.rows[self.rng.integers(0, len(self.rows), number)])

    def forget(self) -> None:
        """Empty the row cache."""
        self.states["rocksdb"]._engine._forget_rows()  # type: ignore[attr-defined]

    def warm(self) -> None:
        """Read every key once."""
        for at in range(0, len(self.rows), 50_000):
            for state in self.states.values():
                state.reads.get_many(binary(self.rows[at : at + 50_000]), remember=False)

    def close(self) -> None:
        """Close all of them."""
        for state in self.states.values():
            state.close()
        self.raw.close()


def _state(directory: Path, kind: type[LocalStateStoreProvider], conf: StateStoreConf) -> PartitionState:
    storage = CheckpointStorage.open(str(directory / "checkpoint"), fsync=False)
    return PartitionState(directory / "local", storage, "operators/bench/1/0/default", conf, kind.backend, kind.engine)


def take_turns(contestants: dict[str, Callable[[], float]], rounds: int) -> Times:
    """Return the figures of each contestant in every round."""
    times: Times = {name: [] for name in contestants}
    names = list(contestants)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(contestants[name]())
    return times


def table_of(title: str, first: str, columns: dict[str, Times]) -> None:
    """Print medians, in microseconds, a column per case."""
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for heading in columns:
        table.add_column(heading, justify="right")
    names = list(dict.fromkeys(name for times in columns.values() for name in times))
    for name in names:
        table.add_row(name, *(f"{statistics.median(t[name]) * 1e6:.2f}" if name in t else "" for t in columns.values()))
    console.print(table)


def measure_get(held: Loaded, rounds: int) -> None:
    """Measure requests for random keys: CPU seconds of the calling thread, per key."""
    columns: dict[str, Times] = {}
    for size in REQUESTS:
        per_turn = max(1, 16_000 // size)

        def turn(read: Callable[[pa.BinaryArray], object], size: int = size, per_turn: int = per_turn) -> float:
            first, *requests = [held.random_keys(size) for _ in range(per_turn + 1)]
            read(first)  # the contestant before has left nothing of use in the processor's caches
            started = time.thread_time()
            for keys in requests:
                read(keys)
            return (time.thread_time() - started) / per_turn / size

        def first_time(size: int = size, per_turn: int = per_turn) -> float:
            held.forget()
            order = held.rng.permutation(len(held.rows))[: size * (per_turn + 1)]
            requests = iter([binary(held.rows[part]) for part in np.array_split(order, per_turn + 1)])
            state = held.states["rocksdb"]
            return turn(lambda _: state.reads.get_many(next(requests), remember=False))

        def in_dict(keys: pa.BinaryArray) -> pa.BinaryArray:
            return pa.array(list(map(held.dict.get, to_bytes_list(keys))), pa.binary())

        held.warm()
        expected = in_dict(keys := held.random_keys(size))
        contestants: dict[str, Callable[[], float]] = {}
        for name, state in held.states.items():
            assert state.reads.get_many(keys, remember=False).equals(expected), name
            contestants[name] = lambda state=state: turn(lambda keys: state.reads.get_many(keys, remember=False))  # type: ignore[misc]
        contestants["dict"] = lambda: turn(in_dict)
        contestants["raw"] = lambda: turn(lambda keys: held.raw.get(sorted(keys.to_pylist())))
        columns[f"{size:,} keys"] = {
            **take_turns(contestants, rounds),
            "rocksdb, first time": [first_time() for _ in range(rounds)],
        }
    table_of("Bulk reads of random keys: µs of processor time per key", "contestant", columns)
    cache = held.states["rocksdb"]._engine._families["default"].cache  # type: ignore[attr-defined]
    held.warm()
    console.print(f"The row cache has {cache.nbytes / 1e6:.0f} MB for {len(held.rows):,} pairs.\n")


def measure_one(held: Loaded, rounds: int) -> None:
    """Measure reads of single keys."""
    number = 4_000

    def turn(read: Callable[[bytes], object], threads: int) -> float:
        requests = [to_bytes_list(held.random_keys(number)) for _ in range(threads)]

        def all_of(keys: list[bytes]) -> None:
            for key in keys:
                read(key)

        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            list(pool.map(all_of, requests))
            return (time.perf_counter() - started) / number / threads

    columns: dict[str, Times] = {}
    for threads in (1, 8):
        contestants: dict[str, Callable[[], float]] = {}
        for name, state in held.states.items():
            if name != "rocksdb, no cache":
                contestants[name] = lambda state=state, threads=threads: turn(state.reads.get_one, threads)  # type: ignore[misc]
        state = held.states["rocksdb"]
        contestants["rocksdb, get_many of one"] = lambda state=state, threads=threads: turn(  # type: ignore[misc]
            lambda key: state.reads.get_many(pa.array([key], pa.binary()), remember=False), threads
        )
        contestants["raw"] = lambda threads=threads: turn(held.raw.get, threads)  # type: ignore[misc]
        columns[f"{threads} threads"] = take_turns(contestants, rounds)
    table_of("Single reads: µs of wall time per key, all threads together", "contestant", columns)


def measure_scan(held: Loaded, rounds: int) -> None:
    """Measure scans of all pairs, alone and together with a thread that counts."""

    def batches(name: str) -> Iterator[pa.RecordBatch]:
        return held.states[name].scan()

    def counting(done: list[bool], count: list[int]) -> None:
        while not done:
            count[0] += 1

    def rate_alone() -> float:
        done: list[bool] = []
        count = [0]
        thread = threading.Thread(target=counting, args=(done, count))
        thread.start()
        time.sleep(0.5)
        done.append(True)
        thread.join()
        return count[0] / 0.5

    def alone(name: str) -> float:
        started = time.thread_time()
        rows = sum(len(batch) for batch in batches(name))
        return (time.thread_time() - started) / rows

    names = ("rocksdb", "file")
    times = take_turns({name: lambda name=name: alone(name) for name in names}, rounds)  # type: ignore[misc]
    table_of("Full scan: µs of processor time per row", "contestant", {"µs": times})
    full = rate_alone()
    done: list[bool] = []
    count = [0]
    thread = threading.Thread(target=counting, args=(done, count))
    thread.start()
    started = time.perf_counter()
    rows = sum(len(batch) for batch in batches("rocksdb"))
    seconds = time.perf_counter() - started
    done.append(True)
    thread.join()
    console.print(
        f"With a thread that counts, rocksdb scanned {rows / seconds / 1e6:.2f} M rows/s, and the thread had "
        f"{100 * count[0] / seconds / full:.0f} % of its own rate.\n"
    )


def measure_write(held: Loaded, rounds: int) -> None:
    """Measure reading and then committing 50,000 keys."""
    steps: dict[str, Times] = {"read": {}, "commit": {}}
    for i in range(2 * rounds):
        order = np.sort(held.rng.permutation(len(held.rows))[:50_000])
        keys = binary(held.rows[order])
        changes = Changes.of(keys, binary(held.rng.integers(0, 256, (len(order), VALUE_BYTES), np.uint8)))
        pairs = changes.families["default"]
        names = list(held.states)
        for name in names[i % 3 :] + names[: i % 3]:
            state = held.states[name]
            started = time.process_time()
            state.reads.get_many(pairs.keys)
            read = time.process_time()
            commit(state, pairs.keys, pairs.values)
            steps["read"].setdefault(name, []).append((read - started) / len(order))
            steps["commit"].setdefault(name, []).append((time.process_time() - read) / len(order))
    table_of("A batch of 50,000 random keys: µs of processor time per key, all threads", "contestant", steps)


def main() -> None:
    """Measure and print."""
    sections: dict[str, Callable[[Loaded, int], None]] = {
        "get": measure_get,
        "one": measure_one,
        "scan": measure_scan,
        "write": measure_write,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections), metavar="SECTION", help="some")
    parser.add_argument("--size", type=int, default=1_000_000, help="keys (default 1000000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="statestore-bench-") as temporary:
        held = Loaded(Path(temporary), options.size, np.random.default_rng(20130101))
        try:
            for section in options.only:
                sections[section](held, options.rounds)
        finally:
            held.close()


if __name__ == "__main__":
    main()
