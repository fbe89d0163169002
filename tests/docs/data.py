"""Input for the code of the pages, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.patience import PATIENCE

USERS, ROWS_PER_USER = 1_000, 20


def write_clicks(directory: str, name: str = "clicks") -> None:
    """Write a parquet file with ``ROWS_PER_USER`` clicks of each of ``USERS`` users: user, amount, ts."""
    rows = USERS * ROWS_PER_USER
    ts = pd.Timestamp("2026-01-01", tz="UTC") + pd.to_timedelta(np.arange(rows) * 0.1, unit="s")
    clicks = pd.DataFrame({"user": np.arange(rows) % USERS, "amount": np.arange(rows) % 7 + 0.5, "ts": ts})
    clicks["ts"] = clicks["ts"].astype("datetime64[us, UTC]")
    write_rows(clicks, directory, name)


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
