"""Totals per user, kept in the state store and queried while the stream runs.

    python examples/clicks.py [directory]

Run it twice with the same directory: the second run goes on from the first one's totals.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from ray_statestore import QueryableStateClient, aggregate, init_spark, stop_spark
from ray_statestore import functions as S

USERS, ROWS_PER_FILE, FILES = 1_000, 20_000, 5


def write_clicks(directory: Path) -> None:
    """Add some parquet files of random clicks."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng()
    start = pd.Timestamp.now("UTC").floor("s")
    for _ in range(FILES):
        clicks = pd.DataFrame(
            {
                "user": rng.integers(0, USERS, ROWS_PER_FILE),
                "amount": rng.exponential(10.0, ROWS_PER_FILE).round(2),
                "ts": start + pd.to_timedelta(np.sort(rng.uniform(0, 3600, ROWS_PER_FILE)), unit="s"),
            }
        )
        clicks["ts"] = clicks["ts"].astype("datetime64[us, UTC]")
        clicks.to_parquet(directory / f"clicks-{time.time_ns()}.parquet", index=False)


def main(directory: Path) -> None:
    """Stream the clicks into totals per user, and look at some of them."""
    write_clicks(directory / "clicks")
    spark = init_spark("clicks", num_executors=2, executor_cores=1, executor_memory="1g")
    try:
        clicks = (
            spark.readStream.schema("user long, amount double, ts timestamp")
            .option("maxFilesPerTrigger", 1)
            .parquet(str(directory / "clicks"))
        )
        totals = aggregate(
            clicks,
            by="user",
            operator="user_totals",
            n=S.count(),
            spent=S.sum("amount"),
            last=S.max("ts"),
        )
        query = (
            totals.writeStream.outputMode("append")
            .option("checkpointLocation", str(directory / "checkpoint"))
            .format("parquet")
            .option("path", str(directory / "totals"))
            .start()
        )
        query.processAllAvailable()

        # Any other process on the cluster could do the same at any time.
        with QueryableStateClient.connect() as client:
            print("user 42:", client.get("user_totals", 42))
            print(client.get_many("user_totals", [1, 2, 3, 99_999]).to_pandas().to_string())
        query.stop()
    finally:
        stop_spark()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).absolute())
    else:
        with tempfile.TemporaryDirectory(prefix="clicks-") as temporary:
            main(Path(temporary))
