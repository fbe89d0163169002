"""What an earlier tree stored can still be read, changes and all, and restored, without Ray and Spark."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle

from coordinator_actor.reading.stored_versions import find_state
from spark_bridge import describe_savepoint, restore_savepoint, state_metadata_table, state_table
from spark_bridge.cli.main import app
from spark_bridge.state_data.state_sources import state_source
from tests.command_line import CliRunner
from tests.effort import effort, only_thorough
from tests.spark_bridge.state_data.format_fixtures import BACKENDS, FORMAT_1, Stored
from tests.spark_bridge.state_data.format_program import (
    STORED_BATCHES,
    VARIABLES,
    Model,
    changes,
    columns_of,
    in_order,
    named_variables,
    read,
    read_tables,
    rows_of,
)

BOTH = pytest.mark.parametrize("backend", BACKENDS)

PARTITIONS = {"firsts": 2, "reminders": 2, "sessions": 1, "totals": 2, "visits": 1, "windows": 1}


@BOTH
def test_model_matches_the_recorded_state(backend: str) -> None:
    """Otherwise the program, its input, or the model has changed, and the other tests rely on them."""
    expected = Stored(backend).expected()
    assert expected["version"] == STORED_BATCHES == len(expected["processing_times_ms"])
    assert Model.after(expected["processing_times_ms"]).state() == expected["state"]


@BOTH
def test_the_state_is_what_it_was(backend: str) -> None:
    tables = read_tables(Stored(backend).checkpoint)
    assert {name: rows_of(table) for name, table in tables.items()} == Stored(backend).state()
    assert {name: columns_of(table) for name, table in tables.items()} == Stored(backend).expected()["columns"]


@pytest.mark.parametrize("backend", [only_thorough("rocksdb"), "file"])
def test_the_state_is_what_it_was_at_earlier_versions(backend: str) -> None:
    """Some versions of the backend that loads fast; of the other one that of a snapshot and a changelog."""
    times = Stored(backend).expected()["processing_times_ms"]
    for version in effort([3], range(1, STORED_BATCHES)) if backend == "file" else [3]:
        assert read(Stored(backend).checkpoint, version) == Model.after(times[:version]).state(), version


def test_readers_can_be_pickled_to_spark_workers() -> None:
    """Nothing of a process goes along: no locks, no connections."""
    source = state_source(find_state(str(Stored("file").checkpoint), None, {}), "totals", None, None)
    sent = cloudpickle.loads(cloudpickle.dumps(source))
    there, here = (
        [row for p in s.reading.pieces for b in s.batches(p) for row in b.to_pylist()] for s in (sent, source)
    )
    assert there == here and len(here) > 5


@BOTH
@pytest.mark.parametrize("operator", ["totals", "windows", "sessions"])
def test_stored_aggregate_state_has_its_earlier_columns(backend: str, operator: str) -> None:
    table = state_table(Stored(backend).checkpoint, operator, state_columns=True)
    assert columns_of(table) == Stored(backend).expected()["kept_columns"][operator]


USUAL = ("totals", "visits.pages")
"""For RocksDB, one aggregate and one variable are enough: files of both backends are read in the same way."""
NOTED = [
    (only_thorough if backend == "rocksdb" and name not in USUAL else pytest.param)(backend, name)
    for backend in BACKENDS
    for name in named_variables()
]


@pytest.mark.parametrize(("backend", "name"), NOTED)
def test_changes_match_the_recorded_ones_and_lead_to_the_state(backend: str, name: str) -> None:
    found = changes(Stored(backend).checkpoint, name)
    assert Counter(f"{kind} at {version}" for version, kind, *_ in found) == Stored(backend).expected()["changes"][name]
    rows: Counter[str] = Counter()
    for _, kind, key, before, after in sorted(found, key=lambda change: change[0]):
        if kind != "insert":
            rows[row_of(key, before)] -= 1
        if kind != "delete":
            rows[row_of(key, after)] += 1
    assert min(rows.values()) >= 0
    assert in_order([json.loads(row) for row in rows.elements()]) == Stored(backend).state()[name]


def row_of(key: list[Any], value: dict[str, Any] | None) -> str:
    """A row of state as text."""
    return json.dumps([*key, *(value or {}).values()])


@BOTH
def test_the_metadata_name_all_variables_and_versions(backend: str) -> None:
    found = state_metadata_table(Stored(backend).checkpoint).to_pylist()
    there = {(row["operatorName"], row["stateVarName"]) for row in found}
    assert there == {(o, v or "default") for o, names in VARIABLES.items() for v in names}
    assert {row["operatorName"]: row["numPartitions"] for row in found} == PARTITIONS
    assert {(row["provider"], row["maxVersion"], row["numKeyGroups"]) for row in found} == {
        (backend, STORED_BATCHES, 1024)
    }


@BOTH
def test_the_savepoint_describes_itself(backend: str) -> None:
    info = describe_savepoint(Stored(backend).savepoint)
    assert info.damage is None and info.metadata is not None
    about = info.metadata
    assert (about.version, about.batch_id, about.key_groups, about.format_version) == (5, 4, 1024, 1)
    assert {o.name: o.num_partitions for o in about.operators} == PARTITIONS
    assert {o.backend for o in about.operators} == {backend}
    rows = {f"{o.name}.{v.name}": v.rows for o in about.operators for v in o.variables}
    state = Stored(backend).state()
    assert (rows["totals.default"], rows["visits.last"]) == (len(state["totals"]), len(state["visits.last"]))
    assert rows["firsts.default"] == rows["firsts.default.-expiry"] == len(state["firsts"])
    timers = state["reminders.timers"]
    assert rows["reminders.timers.-expiry"] == len(timers)
    assert rows["reminders.timers.-keys"] == len({k for k, _ in timers})
    for variable in (v for o in about.operators for v in o.variables):
        for file in variable.files:
            assert pq.read_metadata(FORMAT_1 / backend / "savepoint" / file.path).num_rows == file.rows


@pytest.mark.parametrize("backend", ["rocksdb", only_thorough("file")])
def test_the_savepoint_can_be_restored(backend: str, tmp_path: Path) -> None:
    """Restore to the backend that loads fast; ``test_format_1`` runs queries on both."""
    checkpoint = str(tmp_path / "checkpoint")
    restore_savepoint(Stored(backend).savepoint, checkpoint, backend="file")
    assert read(checkpoint) == Stored(backend).state()
    assert set(state_metadata_table(checkpoint)["provider"].to_pylist()) == {"file"}


@BOTH
def test_the_command_line_checks_the_files_of_a_savepoint(backend: str, tmp_path: Path) -> None:
    savepoint = Path(shutil.copytree(Stored(backend).savepoint, tmp_path / "savepoint"))
    describe = ["savepoint", "describe", str(savepoint)]
    assert CliRunner().invoke(app, [*describe, "--check-files"]).exit_code == 0
    damaged = next(savepoint.glob("operators/totals/**/*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert CliRunner().invoke(app, describe).exit_code == 0  # describes without reading the files
    checked = CliRunner().invoke(app, [*describe, "--check-files"])
    assert checked.exit_code != 0
    assert damaged.name in checked.output
