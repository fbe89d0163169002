"""How fast keys and values are encoded, and what the RocksDB store costs over raw rocksdict.

    make bench            or: python benchmarks/encoding_and_store.py --keys 100000 --rounds 7

Store and raw rocksdict do the same work in the same run, one after the other in every round, so that a slow
moment of the machine hits both; medians are printed, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rocksdict import Options, Rdict, WriteBatch

from backends.changelog import ChangelogMeta, Changes
from backends.conf import StateStoreConf
from backends.key_groups import key_groups
from backends.keys import decode_keys, encode_keys
from backends.partition_state import PartitionState
from backends.storage import CheckpointStorage
from backends.values import decode_values, encode_values

KEY_GROUPS = 1024


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def make_keys(count: int, rng: np.random.Generator) -> dict[str, pa.RecordBatch]:
    """Key columns of several kinds, distinct keys each."""
    numbers = rng.permutation(count * 10)[:count]
    return {
        "int64": pa.record_batch({"user": pa.array(numbers, pa.int64())}),
        "string": pa.record_batch({"user": pa.array([f"user-{n:08d}" for n in numbers])}),
        "string + int32": pa.record_batch(
            {
                "site": pa.array([f"site-{n % 97}" for n in numbers]),
                "user": pa.array(numbers.astype(np.int32), pa.int32()),
            }
        ),
    }


def make_values(count: int, rng: np.random.Generator) -> dict[str, pa.RecordBatch]:
    """Value rows as aggregates keep them."""
    counts = pa.array(rng.integers(0, 1000, count), pa.int64())
    sums = pa.array(rng.normal(size=count), pa.float64())
    moments = pa.array(rng.integers(0, 2**50, count), pa.timestamp("us", tz="UTC"))
    return {
        "long, double, timestamp": pa.record_batch({"n": counts, "spent": sums, "last": moments}),
        "long, string": pa.record_batch({"n": counts, "page": pa.array([f"/page/{n % 5003}" for n in range(count)])}),
    }


def measure_encoding(count: int, rounds: int, rng: np.random.Generator) -> Table:
    """Rows per second of encoding and decoding, medians."""
    table = Table(title=f"Encoding, {count:,} rows at once (million rows/s)", title_justify="left")
    for heading in ("columns", "key group", "encode", "decode"):
        table.add_column(heading, justify="left" if heading == "columns" else "right")

    def speed(work: Callable[[], object]) -> str:
        return f"{count / statistics.median(timed(work) for _ in range(rounds)) / 1e6:.2f}"

    for name, batch in make_keys(count, rng).items():
        groups = key_groups(batch, KEY_GROUPS)
        encoded = encode_keys(batch, groups)
        table.add_row(
            f"key: {name}",
            speed(lambda batch=batch: key_groups(batch, KEY_GROUPS)),
            speed(lambda batch=batch, groups=groups: encode_keys(batch, groups)),
            speed(lambda batch=batch, encoded=encoded: decode_keys(encoded, batch.schema)),
        )
    for name, batch in make_values(count, rng).items():
        encoded = encode_values(batch)
        table.add_row(
            f"value: {name}",
            "",
            speed(lambda batch=batch: encode_values(batch)),
            speed(lambda batch=batch, encoded=encoded: decode_values(encoded, batch.schema)),
        )
    return table


class StoreSide:
    """A PartitionState as a host drives it: bulk read, stage (durable changelog), accept, complete."""

    def __init__(self, directory: Path) -> None:
        self._storage = CheckpointStorage.open(str(directory / "checkpoint"))
        location = "operators/bench/1/0/default"
        self._state = PartitionState(directory / "local", self._storage, location, StateStoreConf())
        self._state.load([])

    def get(self, keys: pa.Array) -> None:
        """Read all keys at the completed version."""
        self._state.get_many(keys, self._state.version)

    def stage(self, keys: pa.Array, values: pa.Array) -> None:
        """Make the changes durable."""
        version = self._state.version + 1
        meta = ChangelogMeta(
            query_run_id="bench",
            operator="bench",
            partition=0,
            num_partitions=1,
            version=version,
            attempt="0",
            base=self._state.head,
        )
        self._file = self._state.stage(meta, Changes.of(keys, values))
        self._state.accept(version, "0")

    def complete(self) -> None:
        """Apply the changes to RocksDB."""
        self._state.complete(self._state.version + 1, self._file.path)

    def close(self) -> None:
        """Close RocksDB."""
        self._state.close()


class RawSide:
    """rocksdict by itself: the same keys and values as lists of bytes, without changelog and versions."""

    def __init__(self, directory: Path) -> None:
        self._db = Rdict(str(directory / "raw"), Options(raw_mode=True))

    def get(self, keys: list[bytes]) -> None:
        """Bulk get."""
        self._db.get(keys)

    def put(self, keys: list[bytes], values: list[bytes]) -> None:
        """One write batch."""
        batch = WriteBatch(raw_mode=True)
        for key, value in zip(keys, values, strict=True):
            batch.put(key, value)
        self._db.write(batch)

    def close(self) -> None:
        """Close RocksDB."""
        self._db.close()


def measure_store(count: int, rounds: int, rng: np.random.Generator) -> Table:
    """Store against raw rocksdict, alternating; sorted keys on both sides."""
    batch = make_keys(count, rng)["int64"]
    keys = encode_keys(batch, key_groups(batch, KEY_GROUPS))
    keys = keys.take(pa.compute.sort_indices(keys))
    raw_keys = keys.to_pylist()
    times: dict[str, list[float]] = {name: [] for name in ("get", "stage", "complete", "raw get", "raw put")}
    with tempfile.TemporaryDirectory(prefix="statestore-bench-") as temporary:
        store, raw = StoreSide(Path(temporary)), RawSide(Path(temporary))
        try:
            for _ in range(rounds + 1):
                values = encode_values(make_values(count, rng)["long, double, timestamp"])
                raw_values = values.to_pylist()
                times["get"].append(timed(lambda: store.get(keys)))
                times["raw get"].append(timed(lambda: raw.get(raw_keys)))
                times["stage"].append(timed(lambda: store.stage(keys, values)))  # noqa: B023 - called at once
                times["complete"].append(timed(store.complete))
                times["raw put"].append(timed(lambda: raw.put(raw_keys, raw_values)))  # noqa: B023
        finally:
            store.close()
            raw.close()
    # the first round reads an empty store
    median = {name: statistics.median(values[1:]) for name, values in times.items()}
    table = Table(title=f"Store, {count:,} keys per batch, median of {rounds}", title_justify="left")
    for heading in ("step", "store ms", "raw rocksdict ms", "ratio"):
        table.add_column(heading, justify="left" if heading == "step" else "right")

    def add(step: str, ours: float, theirs: float | None) -> None:
        table.add_row(
            step,
            f"{ours * 1e3:.1f}",
            "" if theirs is None else f"{theirs * 1e3:.1f}",
            "" if theirs is None else f"{ours / theirs:.2f}",
        )

    add("bulk get", median["get"], median["raw get"])
    add("stage: changelog written and synced", median["stage"], None)
    add("complete: applied to RocksDB", median["complete"], median["raw put"])
    add("stage + complete", median["stage"] + median["complete"], median["raw put"])
    total = median["get"] + median["stage"] + median["complete"]
    add("get + stage + complete", total, median["raw get"] + median["raw put"])
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=100_000, help="keys per batch (default 100000)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default 7)")
    options = parser.parse_args()
    rng = np.random.default_rng(20130101)
    console = Console()
    console.print(measure_encoding(options.keys, options.rounds, rng))
    console.print(measure_store(options.keys, options.rounds, rng))


if __name__ == "__main__":
    main()
