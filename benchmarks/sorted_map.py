"""Why the file provider keeps its state in sorted Arrow runs: a comparison with the alternatives.

    python benchmarks/sorted_map.py                    a million keys, 100,000 of them read or changed
    python benchmarks/sorted_map.py --size 100000 --touched 10000 --rounds 9

- ``SortedMap``: sorted Arrow runs (``backends.engines.sorted_map_engine``). The old version is shared, not copied.
- dict and sorted keys: a ``dict``, and a list of its keys that is sorted when a scan needs it. An undo log of replaced
  values keeps the old version readable, so that reading the old version is two look-ups.
- ``SortedDict`` of sortedcontainers, if it can be imported; the old version in the same way.

All take Arrow arrays and give Arrow arrays, as a store must. Keys have 8 bytes, values 24. Contestants take turns in
every round, on the same data, and their results are compared before they are timed. Memory is what a child process has
grown by, per key, after building the map; the Python objects of a dict's keys and values are part of that.

Minima of ``SortedMap`` are far below its medians, and both are real: changes that are small against the run below are
only laid over it, and a map that is a single run is scanned without copying anything. The medians are of maps with a
run of changes on top, as they mostly are.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np
import psutil
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from backends.encoding.sorted_pairs import SortedPairs, to_bytes_list
from backends.engines.sorted_map_engine import SortedMap

try:
    from sortedcontainers import SortedDict
except ImportError:
    SortedDict = None

SCAN_ROWS = 1 << 14
_ABSENT = object()


class Contestant(Protocol):
    """A sorted map that keeps one older version readable."""

    def __init__(self, pairs: SortedPairs) -> None: ...

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Return the values at the newest version."""

    def get_old(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Return the values at the version before the last changes."""

    def apply(self, changes: SortedPairs) -> None:
        """Advance to the next version; null values remove keys."""

    def scan(self) -> Iterator[pa.RecordBatch]:
        """Yield all pairs of the newest version, in key order."""


class Runs:
    """The file provider's map."""

    def __init__(self, pairs: SortedPairs) -> None:
        self._map = self._old = SortedMap.of_sorted([pairs])

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        return self._map.get_many(keys)

    def get_old(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        return self._old.get_many(keys)

    def apply(self, changes: SortedPairs) -> None:
        self._old, self._map = self._map, self._map.with_changes(changes)

    def scan(self) -> Iterator[pa.RecordBatch]:
        return self._map.scan(None, None)


class _Pairs:
    """Pairs as Python objects, and the values that the last changes replaced."""

    _pairs: Any

    def __init__(self, pairs: SortedPairs) -> None:
        self._undo: dict[bytes, object] = {}

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        get = self._pairs.get
        return pa.array([get(key) for key in to_bytes_list(keys)], pa.binary())

    def get_old(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        get, undo = self._pairs.get, self._undo
        found = [undo[key] if key in undo else get(key) for key in to_bytes_list(keys)]
        return pa.array([None if value is _ABSENT else value for value in found], pa.binary())

    def apply(self, changes: SortedPairs) -> None:
        pairs, keys = self._pairs, to_bytes_list(changes.keys)
        self._undo = {key: pairs.get(key, _ABSENT) for key in keys if key is not None}
        for key, value in zip(keys, to_bytes_list(changes.values), strict=True):
            if value is None:
                pairs.pop(key, None)
            else:
                pairs[key] = value

    def _in_order(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self._pairs.items())

    def scan(self) -> Iterator[pa.RecordBatch]:
        items = self._in_order()
        while rows := list(islice(items, SCAN_ROWS)):
            keys, values = [row[0] for row in rows], [row[1] for row in rows]
            yield pa.RecordBatch.from_arrays(
                [pa.array(keys, pa.binary()), pa.array(values, pa.binary())], ["key", "value"]
            )


class DictAndKeys(_Pairs):
    """A dict, and its keys in order once a scan has asked for them."""

    def __init__(self, pairs: SortedPairs) -> None:
        super().__init__(pairs)
        self._pairs = dict(zip(to_bytes_list(pairs.keys), to_bytes_list(pairs.values), strict=True))
        self._keys: list[bytes] | None = None

    def apply(self, changes: SortedPairs) -> None:
        before = len(self._pairs)
        super().apply(changes)
        if changes.values.null_count or len(self._pairs) != before:
            self._keys = None

    def _in_order(self) -> Iterator[tuple[bytes, bytes]]:
        if self._keys is None:
            self._keys = sorted(self._pairs)
        return ((key, self._pairs[key]) for key in self._keys)


class SortedContainers(_Pairs):
    """``SortedDict``."""

    def __init__(self, pairs: SortedPairs) -> None:
        super().__init__(pairs)
        self._pairs = SortedDict(zip(to_bytes_list(pairs.keys), to_bytes_list(pairs.values), strict=True))


CONTESTANTS: dict[str, type[Contestant]] = {"SortedMap": Runs, "dict and sorted keys": DictAndKeys}
if SortedDict is not None:
    CONTESTANTS["SortedDict"] = SortedContainers


def make_pairs(numbers: np.ndarray, rng: np.random.Generator) -> SortedPairs:
    """Return sorted 8-byte keys with random 24-byte values."""
    keys = pa.Array.from_buffers(pa.binary(8), len(numbers), [None, pa.py_buffer(numbers.astype(">i8").tobytes())])
    values = pa.Array.from_buffers(pa.binary(24), len(numbers), [None, pa.py_buffer(rng.bytes(24 * len(numbers)))])
    return SortedPairs(keys.cast(pa.binary()), values.cast(pa.binary()))


def make_state(size: int, rng: np.random.Generator) -> tuple[np.ndarray, SortedPairs]:
    """Return the state that all begin with; its keys are even numbers, so that odd ones are new keys."""
    numbers = 2 * np.unique(rng.integers(0, 1 << 61, size + size // 100 + 10, np.int64))
    numbers = np.sort(rng.permutation(numbers)[:size])
    return numbers, make_pairs(numbers, rng)


def make_changes(numbers: np.ndarray, count: int, rng: np.random.Generator) -> SortedPairs:
    """Return changes: mostly new values; a tenth are new keys, a twentieth are removals."""
    chosen = rng.permutation(numbers)[:count].copy()
    chosen[: count // 10] += 1
    chosen.sort()
    pairs = make_pairs(chosen, rng)
    is_removed = rng.random(count) < 0.05
    return SortedPairs(pairs.keys, pa.compute.if_else(pa.array(is_removed), None, pairs.values))


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def drain(batches: Iterator[pa.RecordBatch]) -> int:
    """Read all pairs."""
    return sum(len(batch) for batch in batches)


def check(held: dict[str, Contestant], keys: pa.BinaryArray) -> None:
    """Raise unless all contestants hold the same pairs, in the newest version and in the old one."""
    scans = {name: pa.Table.from_batches(c.scan()).combine_chunks() for name, c in held.items()}
    first = next(iter(held))
    for name, contestant in held.items():
        assert contestant.get_many(keys).equals(held[first].get_many(keys)), name
        assert contestant.get_old(keys).equals(held[first].get_old(keys)), name
        for i in range(2):
            assert scans[name].column(i).equals(scans[first].column(i)), name


def measure(size: int, touched: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds by step and contestant."""
    rng = np.random.default_rng(20130101)
    numbers, state = make_state(size, rng)
    held = {name: kind(state) for name, kind in CONTESTANTS.items()}
    steps = ("bulk get", "apply changes", "bulk get of the old version", "first scan after", "scan again")
    times: dict[str, dict[str, list[float]]] = {step: {name: [] for name in held} for step in steps}
    names = list(held)
    for i in range(rounds + 1):
        changes = make_changes(numbers, touched, rng)
        keys = make_pairs(np.sort(rng.permutation(numbers)[:touched]), rng).keys
        for name in names[i % len(names) :] + names[: i % len(names)]:
            contestant = held[name]
            gc.collect()
            works: tuple[Callable[[], object], ...] = (
                lambda c=contestant, k=keys: c.get_many(k),
                lambda c=contestant, p=changes: c.apply(p),
                lambda c=contestant, k=keys: c.get_old(k),
                lambda c=contestant: drain(c.scan()),
                lambda c=contestant: drain(c.scan()),
            )
            for step, work in zip(steps, works, strict=True):
                times[step][name].append(timed(work))
        if i == 0:
            check(held, keys)
            for by_name in times.values():  # the first round is only compared
                for seconds in by_name.values():
                    seconds.clear()
    check(held, keys)
    return times


def memory_per_key(name: str, size: int) -> float:
    """Return how many bytes a child process grows, per key."""
    command = [sys.executable, __file__, "--memory-child", name, "--size", str(size)]
    return float(json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)) / size


def _memory_child(name: str, size: int) -> None:
    rng = np.random.default_rng(20130101)
    pool = pa.default_memory_pool()

    def resident() -> int:
        pool.release_unused()
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    CONTESTANTS[name](make_state(1000, rng)[1])
    before = resident()
    # The arrays that the map was made of are freed, except for those that the map keeps.
    held = CONTESTANTS[name](make_state(size, rng)[1])
    print(json.dumps(resident() - before))
    del held


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1_000_000, help="keys of the state (default 1000000)")
    parser.add_argument("--touched", type=int, default=100_000, help="keys read and changed (default 100000)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, 5 or more to be of use (default 7)")
    parser.add_argument("--memory-child", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_child:
        _memory_child(options.memory_child, options.size)
        return
    console = Console(width=max(Console().width, 140))
    if SortedDict is None:
        console.print("sortedcontainers cannot be imported: without SortedDict.")
    times = measure(options.size, options.touched, options.rounds)
    table = Table(
        title=f"{options.touched:,} of {options.size:,} keys; ms: median (min), and times as long as SortedMap",
        title_justify="left",
    )
    table.add_column("step")
    for name in CONTESTANTS:
        table.add_column(name, justify="right")
    for step, by_name in times.items():
        ours = statistics.median(by_name["SortedMap"])
        cells = [(statistics.median(seconds), min(seconds)) for seconds in by_name.values()]
        table.add_row(step, *(f"{m * 1e3:.1f} ({low * 1e3:.1f})  x{m / ours:.1f}" for m, low in cells))
    sizes = [memory_per_key(name, options.size) for name in CONTESTANTS]
    table.add_row("memory per key, bytes", *(f"{each:.0f}  x{each / sizes[0]:.1f}" for each in sizes))
    console.print(table)


if __name__ == "__main__":
    main()
