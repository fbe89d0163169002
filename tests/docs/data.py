"""Input for the code of the pages, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tests.patience import PATIENCE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

USERS, ROWS_PER_USER = 1_000, 20


def write_clicks(directory: str, name: str = "clicks") -> None:
    """Write a parquet file with ``ROWS_PER_USER`` clicks of each of ``USERS`` users: user, amount, ts."""
    rows = USERS * ROWS_PER_USER
    ts = pd.Timestamp("2026-01-01", tz="UTC") + pd.to_timedelta(np.arange(rows) * 0.1, unit="s")
    clicks = pd.DataFrame({"user": np.arange(rows) % USERS, "amount": np.arange(rows) % 7 + 0.5, "ts": ts})
    clicks["ts"] = clicks["ts"].astype("datetime64[us, UTC]")
    write_rows(clicks, directory, name)


def write_payments() -> None:
    """Write a parquet file with a payment of each of 1,000 cards at 50 merchants: card, merchant, amount, ts."""
    payments = pd.DataFrame([{"card": i, "merchant": f"m{i % 50}", "amount": 2.5} for i in range(1_000)])
    write_rows(payments.assign(ts=minutes_of_2026([0] * 1_000)), "payments", "1")


def minutes_of_2026(minutes: Sequence[int]) -> pd.Series:
    """Return the times so many minutes after the begin of 2026, in UTC."""
    times = [pd.Timestamp("2026-01-01", tz="UTC") + pd.Timedelta(minutes=m) for m in minutes]
    return pd.Series(times).astype("datetime64[us, UTC]")


def start_user_totals(spark: SparkSession, checkpoint: str = "ck/") -> StreamingQuery:
    """Write clicks, and start the query of each user's totals; return it when clients see its first batch."""
    from ray_statestore import QueryableStateClient, aggregate
    from ray_statestore import functions as S

    write_clicks("clicks")
    clicks = spark.readStream.schema("user long, amount double, ts timestamp").parquet("clicks/")
    totals = aggregate(clicks, by="user", operator="user_totals", n=S.count(), spent=S.sum("amount"), last=S.max("ts"))
    query = totals.writeStream.outputMode("append").option("checkpointLocation", checkpoint).format("noop").start()
    query.processAllAvailable()
    with QueryableStateClient.connect() as client:
        eventually(lambda: client.get("user_totals", 42, query=str(query.id)) is not None)
    return query


def write_rows(rows: pd.DataFrame, directory: str, name: str) -> None:
    """Write a parquet file that appears whole: a stream that runs reads a file that is being written as an empty
    one.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    draft = Path(directory).with_name(f".{Path(directory).name}-{name}.parquet")
    rows.to_parquet(draft, index=False)
    draft.rename(Path(directory) / f"{name}.parquet")


def eventually(what: Callable[[], Any]) -> None:
    """Wait until ``what()`` is true: queries see a batch a moment behind its end, when Spark has told its listeners."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "not true in time"
        time.sleep(0.05)
