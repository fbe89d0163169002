"""A processor in columns: it is called once per partition and micro-batch, with all rows, keys and prior state.

    python examples/spending.py [directory]

For each purchase: how far is it from what this user usually spends? The state is a running mean and deviation per user.
No Python code runs per row or per user.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from ray_statestore import (
    ArrowBatch,
    ArrowResult,
    ArrowStatefulProcessor,
    init_spark,
    stop_spark,
    transform_with_state_in_arrow,
)

USERS, ROWS_PER_FILE, FILES = 2_000, 50_000, 4
SUSPICIOUS = 6.0


class Unusual(ArrowStatefulProcessor):
    """Emits the purchases that are many standard deviations above what the user has spent before."""

    def init(self, handle: Any) -> None:
        handle.declare_state("n long, mean double, squares double")  # squares of the distances from the mean

    def process(self, batch: ArrowBatch) -> ArrowResult:
        n, mean, squares = (floats(batch.state.column(name)) for name in ("n", "mean", "squares"))
        user = batch.key_index.to_numpy()
        amount = floats(batch.rows.column("amount"))

        with np.errstate(divide="ignore", invalid="ignore"):
            score = (amount - mean[user]) / np.sqrt(squares / (n - 1))[user]
        found = batch.rows.append_column("score", pa.array(score)).filter(pa.array(score > SUSPICIOUS))

        # The mean and squares of these rows, joined with those of all earlier rows (Chan et al.).
        rows = np.bincount(user, minlength=batch.num_keys)
        rows_mean = np.bincount(user, amount, batch.num_keys) / np.maximum(rows, 1)
        rows_squares = np.bincount(user, (amount - rows_mean[user]) ** 2, batch.num_keys)
        both, distance = n + rows, rows_mean - mean
        state = pa.table(
            {
                "n": pa.array(both, pa.int64(), safe=False),
                "mean": mean + distance * rows / both,
                "squares": squares + rows_squares + distance**2 * n * rows / both,
            }
        )
        return ArrowResult(output=found.select(["user", "amount", "score"]), state=state)


def floats(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """Return a column as numbers, with 0 for a null, which stands for a user without state."""
    return np.nan_to_num(column.to_numpy().astype(np.float64))


def write_purchases(directory: Path) -> None:
    """Add some parquet files of random purchases, few of them far from the usual."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng()
    for _ in range(FILES):
        user = rng.integers(0, USERS, ROWS_PER_FILE)
        amount = 20 + user % 50 + rng.normal(0, 3, ROWS_PER_FILE)
        amount[rng.integers(0, ROWS_PER_FILE, 5)] *= 4
        purchases = pd.DataFrame({"user": user, "amount": amount.round(2)})
        purchases.to_parquet(directory / f"purchases-{time.time_ns()}.parquet", index=False)


def main(directory: Path) -> None:
    """Stream the purchases, and print those that stand out."""
    write_purchases(directory / "purchases")
    spark = init_spark("spending", num_executors=2, executor_cores=1, executor_memory="1g")
    try:
        purchases = (
            spark.readStream.schema("user long, amount double")
            .option("maxFilesPerTrigger", 1)
            .parquet(str(directory / "purchases"))
        )
        unusual = transform_with_state_in_arrow(
            purchases,
            "user",
            Unusual(),
            "user long, amount double, score double",
            operator="spending",
            num_partitions=2,
        )
        query = (
            unusual.writeStream.outputMode("append")
            .option("checkpointLocation", str(directory / "checkpoint"))
            .format("parquet")
            .option("path", str(directory / "unusual"))
            .start()
        )
        query.processAllAvailable()
        query.stop()
        spark.read.parquet(str(directory / "unusual")).orderBy("score", ascending=False).show()
    finally:
        stop_spark()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).absolute())
    else:
        with tempfile.TemporaryDirectory(prefix="spending-") as temporary:
            main(Path(temporary))
