"""What a savepoint and a change of the partition count cost a running query.

    python benchmarks/savepoint.py                     10 million keys; some minutes
    python benchmarks/savepoint.py --keys 1000000

A query of so many keys is filled, and then runs one batch after another of ``--rows`` rows. Batches that run beside a
savepoint are compared with those right before and right after it, savepoint by savepoint, as a machine is not always
equally fast. Then the query is restarted with other partition counts and with the other backend, and the first batch is
timed, which loads all state anew.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from spark_bridge import aggregate, describe_savepoint, init_spark, stop_spark, trigger_savepoint
from spark_bridge import functions as S

FILL_ROWS = 500_000


class Feed:
    """Parquet files, one per batch. Keys are spread, values small."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = 0
        directory.mkdir()

    def add(self, keys: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Write one batch of these keys."""
        table = pa.table({"k": keys, "v": keys % 100})
        draft = self.directory / ".draft"
        pq.write_table(table, draft)
        draft.rename(self.directory / f"{self._files:06d}.parquet")
        self._files += 1


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of a batch")
    parser.add_argument("--savepoints", type=int, default=3)
    options = parser.parse_args()
    console = Console(width=110)
    rng = np.random.default_rng(1)
    table = Table(
        "what", "measured", title=f"{options.keys:,} keys, batches of {options.rows:,} rows", title_justify="left"
    )
    with tempfile.TemporaryDirectory(prefix="statestore-savepoint-") as name:
        root = Path(name)
        feed = Feed(root / "in")
        spark = init_spark("savepoint", num_executors=2, executor_cores=1, executor_memory="1g")
        try:

            def start(partitions: int) -> Any:
                rows = (
                    spark.readStream.schema("k long, v long")
                    .option("maxFilesPerTrigger", 1)
                    .parquet(str(feed.directory))
                )
                totals = aggregate(
                    rows, by="k", operator="totals", num_partitions=partitions, n=S.count(), total=S.sum("v")
                )
                writer = totals.writeStream.option("checkpointLocation", str(root / "ck")).format("noop")
                return writer.start()

            def batch(query: Any) -> float:
                feed.add(rng.integers(0, options.keys, options.rows))
                started = time.perf_counter()
                query.processAllAvailable()
                return time.perf_counter() - started

            query = start(4)
            for first in range(0, options.keys, FILL_ROWS):
                console.print(f"filling: {first:,} of {options.keys:,} keys", end="\r")
                feed.add(np.arange(first, min(first + FILL_ROWS, options.keys)))
                query.processAllAvailable()
            for _ in range(3):
                batch(query)
            ratios, lasted = [], []
            for i in range(options.savepoints):
                console.print(f"savepoint {i + 1} of {options.savepoints}" + " " * 30)
                around = [batch(query) for _ in range(6)]
                begun = time.perf_counter()
                future = trigger_savepoint(query, str(root / "savepoints"))
                beside = []
                while not future.done():
                    beside.append(batch(query))
                lasted.append(time.perf_counter() - begun)
                around += [batch(query) for _ in range(6)]
                ratios.append(statistics.median(beside) / statistics.median(around))
            size = describe_savepoint(future.result()).size
            table.add_row(
                "a batch beside a savepoint, to one without", ", ".join(f"{r:.2f}" for r in ratios) + " times"
            )
            table.add_row("a savepoint takes", ", ".join(f"{s:.0f} s" for s in lasted) + f", {size / 1e6:.0f} MB")
            usual = statistics.median(batch(query) for _ in range(5))
            table.add_row("a batch", f"{usual:.2f} s")
            query.stop()
            for partitions in (4, 3, 16):
                console.print(f"restarting with {partitions} partitions")
                query = start(partitions)
                first_batch = batch(query)
                table.add_row(f"first batch after a restart with {partitions} partitions", f"{first_batch:.1f} s")
                batch(query)
                query.stop()
        finally:
            stop_spark()
    console.print(table)


if __name__ == "__main__":
    main()
