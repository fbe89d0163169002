"""The cost of the two providers compared with raw rocksdict, and its growth with the state.

    python benchmarks/store.py                                 all but the long sections; some minutes
    python benchmarks/store.py --only get put --size 100000    some sections, a smaller state
    python benchmarks/store.py --only commit reload --large    with states of ten million keys

- get, put, scan: a million sorted 8-byte keys with 24-byte values, both providers against rocksdict by itself. Target:
  60 % of its rate or more. "Arrow" takes and gives Arrow arrays, as a store does; "lists" has its Python ``bytes``
  ready before the clock starts, and leaves those it gets as they are.
- commit: 10,000 changed keys on states of several sizes. Target: flat.
- reload: a store loaded from its snapshot into an empty directory, against a plain copy of the files and opening them.
- memory: a child process loads a million keys into RocksDB. Target: the caches, the write buffers and 100 MB.

Contestants take turns in every round, each round beginning with another one, so that a slow moment of the machine hits
all of them. Before they are timed, their results are compared. Ratios are those of medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from backends import FileStateStoreProvider, RocksDBStateStoreProvider, StateStoreConf, StateStoreId
from backends.engines.rocksdb import LocalRocksDB
from backends.providers.standalone_provider import LocalStateStoreProvider

PROVIDERS = {"rocksdb provider": RocksDBStateStoreProvider, "file provider": FileStateStoreProvider}
SCAN_ROWS = 1 << 14
CHANGED_KEYS = 10_000
MIB = 1 << 20
TARGET = 60
console = Console(width=max(Console().width, 140))

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

Times = dict[str, list[float]]


def take_turns(contestants: dict[str, Callable[[], float]], rounds: int) -> Times:
    """Return the seconds that each contestant took, in every round."""
    times: Times = {name: [] for name in contestants}
    names = list(contestants)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            gc.collect()
            times[name].append(contestants[name]())
    return times


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes; freeing its result is not counted."""
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    del result
    return seconds


def compare(title: str, size: int, times: Times) -> None:
    """Print the rates, and those of the providers in percent of each raw one."""
    table = Table(title=title, title_justify="left")
    table.add_column("contestant")
    raw = [name for name in times if name.startswith("raw")]
    for heading in ("min ms", "median ms", "M keys/s", *(f"% of {name}" for name in raw)):
        table.add_column(heading, justify="right")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        percents = [] if name in raw else [100 * statistics.median(times[other]) / median for other in raw]
        cells = [f"{p:.0f}" if p >= TARGET else f"[bold red]{p:.0f} !" for p in percents]
        table.add_row(name, f"{min(seconds) * 1e3:.0f}", f"{median * 1e3:.0f}", f"{size / median / 1e6:.2f}", *cells)
    console.print(table)


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


def open_provider(
    name: str, directory: Path, conf: StateStoreConf | None = None, *, local: str = "local"
) -> LocalStateStoreProvider:
    """Return a provider with its checkpoint location and its local files below ``directory``."""
    kind = PROVIDERS[name]
    return kind(StateStoreId(str(directory / "checkpoint"), "bench", 0), conf, local_dir=directory / local)


def fill(provider: LocalStateStoreProvider, keys: pa.BinaryArray, values: pa.BinaryArray, per_commit: int) -> None:
    """Put all pairs, in several commits that each have keys from everywhere."""
    commits = max(1, len(keys) // per_commit)
    for i in range(commits):
        rows = pa.array(np.arange(i, len(keys), commits))
        store = provider.get_store(provider.latest_version())
        store.put_many(keys.take(rows), values.take(rows))
        store.commit()


def raw_options(*, documented: bool) -> Options:
    """Return the options of rocksdict alone."""
    options = Options(raw_mode=True)
    for name, value in DOCUMENTED.items() if documented else ():
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
        self.raw = {
            "raw": Rdict(str(root / "raw"), raw_options(documented=True)),
            "raw flushed": Rdict(str(root / "raw flushed"), raw_options(documented=True)),
        }
        for name, db in self.raw.items():
            raw_put(db, self.key_list, self.value_list, sync=False)
            if name == "raw flushed":
                db.flush()

    def close(self) -> None:
        """Close all of them."""
        for provider in self.providers.values():
            provider.close()
        for db in self.raw.values():
            db.close()


def measure_get(root: Path, size: int, rounds: int, rng: np.random.Generator) -> None:
    """Measure one bulk get of all keys."""
    held = Loaded(root, size, rng)
    try:
        compare(f"Bulk get of {size:,} sorted keys", size, take_turns(getters(held), rounds))
    finally:
        held.close()


def getters(held: Loaded) -> dict[str, Callable[[], float]]:
    """Return functions that read all keys, by contestant. Raises unless each returns the right values."""
    contestants: dict[str, Callable[[], float]] = {}
    for name, store in held.stores.items():
        assert store.get_many(held.keys).equals(held.values), name
        contestants[name] = lambda store=store: timed(lambda: store.get_many(held.keys))
    for name, db in held.raw.items():
        assert db.get(held.key_list) == held.value_list, name
        contestants[f"{name}, Arrow"] = lambda db=db: timed(
            lambda: pa.array(db.get(held.keys.to_pylist()), pa.binary())
        )
        contestants[f"{name}, lists"] = lambda db=db: timed(lambda: db.get(held.key_list))
    return contestants


def measure_scan(root: Path, size: int, rounds: int, rng: np.random.Generator) -> None:
    """Measure scans of all pairs in key order."""
    held = Loaded(root, size, rng)
    try:
        compare(f"Full scan of {size:,} keys", size, take_turns(scanners(held), rounds))
    finally:
        held.close()


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


def measure_put(root: Path, size: int, rounds: int, rng: np.random.Generator) -> None:
    """Measure one bulk put of all pairs with a durable commit: into an empty state, then with other values."""
    keys = random_keys(size, rng)
    times, contestants = putters(root, keys, [random_values(size, rng) for _ in range(2)])
    take_turns(contestants, rounds)
    for case, of_case in times.items():
        # In the order of the first round.
        compare(f"Bulk put of {size:,} sorted pairs and commit, {case}", size, of_case)


def putters(
    root: Path, keys: pa.BinaryArray, sets: list[pa.BinaryArray]
) -> tuple[dict[str, Times], dict[str, Callable[[], float]]]:
    """Return functions that put all pairs and check them, and lists for their seconds, by case and contestant."""
    key_list, value_lists = keys.to_pylist(), [values.to_pylist() for values in sets]
    cases = ("empty state", "over all keys", "all keys read before")
    times: dict[str, Times] = {case: {} for case in cases}

    def run(name: str, writes: list[Callable[[], object]], check: Callable[[], None]) -> float:
        for case, write in zip(cases, writes, strict=False):
            times[case].setdefault(name, []).append(timed(write))
        check()
        return 0.0

    def provider_side(name: str) -> float:
        directory = root / "turn"
        provider = open_provider(name, directory)

        def write(values: pa.BinaryArray, *, read: bool = False) -> None:
            store = provider.get_store(provider.latest_version())
            if read:
                store.get_many(keys)
            store.put_many(keys, values)
            store.commit()

        def check() -> None:
            assert provider.get_store(provider.latest_version()).get_many(keys).equals(sets[0])

        try:
            turns = [lambda: write(sets[0]), lambda: write(sets[1]), lambda: write(sets[0], read=True)]
            return run(name, turns, check)
        finally:
            provider.close()
            shutil.rmtree(directory)

    def raw_side(name: str, *, sync: bool, arrow: bool) -> float:
        directory = root / "turn"
        db = Rdict(str(directory), raw_options(documented=True))

        def write(i: int, *, read: bool = False) -> None:
            if read:
                found = db.get(keys.to_pylist() if arrow else key_list)
                if arrow:
                    pa.array(found, pa.binary())
            given = (keys.to_pylist(), sets[i].to_pylist()) if arrow else (key_list, value_lists[i])
            raw_put(db, *given, sync=sync)

        def check() -> None:
            assert db.get(key_list) == value_lists[0]

        try:
            return run(name, [lambda: write(0), lambda: write(1), lambda: write(0, read=True)], check)
        finally:
            db.close()
            shutil.rmtree(directory)

    contestants: dict[str, Callable[[], float]] = {name: lambda name=name: provider_side(name) for name in PROVIDERS}
    for name, sync, arrow in (
        ("raw synced, Arrow", True, True),
        ("raw synced, lists", True, False),
        ("raw not synced, lists", False, False),
    ):
        contestants[name] = lambda name=name, sync=sync, arrow=arrow: raw_side(name, sync=sync, arrow=arrow)
    return times, contestants


# -- how costs grow ------------------------------------------------------------------------------


def measure_commit(root: Path, rounds: int, rng: np.random.Generator, *, large: bool) -> None:
    """Measure reading and changing 10,000 keys from all over the state."""
    for name in PROVIDERS:
        largest = 7 if large and name == "rocksdb provider" else 6
        states: dict[int, tuple[LocalStateStoreProvider, pa.BinaryArray]] = {}
        for size in (10**i for i in range(4, largest + 1)):
            keys = random_keys(size, rng)
            provider = open_provider(name, root / f"{name} {size}")
            fill(provider, keys, random_values(size, rng), max(size // 10, 10_000))
            states[size] = provider, keys
        reads: dict[int, list[float]] = {size: [] for size in states}
        commits: dict[str, dict[int, list[float]]] = {
            kind: {size: [] for size in states} for kind in ("blind", "after the read")
        }
        for kind, by_size in commits.items():
            for _ in range(2 * rounds + 1):
                for size, (provider, keys) in states.items():
                    rows = np.sort(rng.permutation(size)[:CHANGED_KEYS])
                    changed, values = keys.take(pa.array(rows)), random_values(CHANGED_KEYS, rng)
                    store = provider.get_store(provider.latest_version())
                    if kind == "after the read":
                        reads[size].append(timed(lambda: store.get_many(changed)))  # noqa: B023 - called at once
                    started = time.perf_counter()
                    store.put_many(changed, values)
                    store.commit()
                    by_size[size].append(time.perf_counter() - started)
        table = Table(title=f"{name}: {CHANGED_KEYS:,} keys of a state, ms (median, min)", title_justify="left")
        for heading in ("keys in the state", "read", "put and commit, blind", "put and commit after the read"):
            table.add_column(heading, justify="right")
        for size, (provider, _) in states.items():
            # The first round is not counted.
            cells = [by_size[size][1:] for by_size in (reads, commits["blind"], commits["after the read"])]
            table.add_row(f"{size:,}", *(f"{statistics.median(c) * 1e3:.1f}, {min(c) * 1e3:.1f}" for c in cells))
            provider.close()
        console.print(table)


def measure_reload(root: Path, size: int, rounds: int, rng: np.random.Generator) -> None:
    """Measure loading a RocksDB state from its snapshot, and copying the database's files and opening it."""
    conf = StateStoreConf(deltas_per_snapshot=1)
    keys, values = random_keys(size, rng), random_values(size, rng)
    name = "rocksdb provider"
    with open_provider(name, root, conf, local="first") as provider:
        fill(provider, keys, values, max(1, size // 10))
        provider.do_maintenance()
        version = provider.latest_version()
    some = pa.array(np.sort(rng.permutation(size)[:1000]))
    files = root / "first" / "current" / "engine"
    nbytes = sum(path.stat().st_size for path in files.iterdir())

    def reload() -> float:
        def load() -> LocalStateStoreProvider:
            provider = open_provider(name, root, conf, local="again")
            provider.get_store(version)
            return provider

        started = time.perf_counter()
        provider = load()
        seconds = time.perf_counter() - started
        assert provider.get_store(version).get_many(keys.take(some)).equals(values.take(some))
        provider.close()
        shutil.rmtree(root / "again")
        return seconds

    def copy() -> float:
        started = time.perf_counter()
        shutil.copytree(files, root / "copy")
        db = LocalRocksDB(root / "copy", conf)
        seconds = time.perf_counter() - started
        assert db.get_many(keys.take(some)).equals(values.take(some))
        db.close()
        shutil.rmtree(root / "copy")
        return seconds

    times = take_turns({"rocksdb provider": reload, "raw copy and open": copy}, rounds)
    compare(f"Reload of {size:,} keys, {nbytes / 1e6:.0f} MB of files", size, times)


# -- memory --------------------------------------------------------------------------------------


def measure_memory(size: int, rounds: int) -> None:
    """Measure peak and final memory of a process that loads a state, above its memory after the imports."""
    conf = StateStoreConf()
    configured = (conf.row_cache_bytes + conf.block_cache_bytes + conf.write_buffer_bytes) / 1e6
    table = Table(
        title=f"Memory of loading {size:,} keys into RocksDB, MB; target {configured:.0f} configured + 100",
        title_justify="left",
    )
    for heading in ("commits of", "peak (max)", "at the end (max)", "of these, the pairs given", "peak in target"):
        table.add_column(heading, justify="right")
    for per_commit in (50_000, size):
        found = []
        for _ in range(rounds):
            command = [sys.executable, __file__, "--memory-child", str(per_commit), "--size", str(size)]
            found.append(json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout))
        peak, final, given = (max(f[k] for f in found) / 1e6 for k in ("peak", "final", "given"))
        table.add_row(
            f"{per_commit:,}",
            f"{peak:.0f}",
            f"{final:.0f}",
            f"{given:.0f}",
            "yes" if peak <= configured + 100 else "[bold red]no",
        )
    console.print(table)


def _memory_child(size: int, per_commit: int) -> None:
    rng = np.random.default_rng(20130101)
    gc.collect()
    baseline = psutil.Process().memory_info().rss
    given = 0
    with tempfile.TemporaryDirectory(prefix="statestore-bench-") as root:
        provider = open_provider("rocksdb provider", Path(root))
        for _ in range(max(1, size // per_commit)):
            keys, values = random_keys(per_commit, rng), random_values(per_commit, rng)
            given = max(given, keys.nbytes + values.nbytes)
            store = provider.get_store(provider.latest_version())
            store.put_many(keys, values)
            del keys, values
            store.commit()
        del store
        gc.collect()
        final = psutil.Process().memory_info().rss
        provider.close()
    # Unlike ru_maxrss, this is the peak of this program alone, not of the program that started it.
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"peak": peak - baseline, "final": final - baseline, "given": given}))


def main() -> None:
    """Measure and print."""
    sections = ("get", "put", "scan", "commit", "reload", "memory")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sections, default=sections, metavar="SECTION", help="some of them")
    parser.add_argument("--size", type=int, default=1_000_000, help="keys (default 1000000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, 5 or more to be of use (default 5)")
    parser.add_argument("--large", action="store_true", help="also 10,000,000 keys in commit and reload; takes long")
    parser.add_argument("--memory-child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size, rounds = options.size, options.rounds
    if options.memory_child:
        _memory_child(size, options.memory_child)
        return
    rng = np.random.default_rng(20130101)
    if {"get", "put", "scan"} & set(options.only):
        console.print("raw: rocksdict with raw_mode,", ", ".join(f"{k}({v})" for k, v in DOCUMENTED.items()))
    for section in options.only:
        with tempfile.TemporaryDirectory(prefix="statestore-bench-") as temporary:
            root = Path(temporary)
            if section == "get":
                measure_get(root, size, rounds, rng)
            elif section == "put":
                measure_put(root, size, rounds, rng)
            elif section == "scan":
                measure_scan(root, size, rounds, rng)
            elif section == "commit":
                measure_commit(root, rounds, rng, large=options.large)
            elif section == "reload":
                for keys in (size, 10_000_000) if options.large else (size,):
                    measure_reload(root / str(keys), keys, rounds, rng)
            else:
                measure_memory(size, rounds)


if __name__ == "__main__":
    main()
