"""What an earlier tree stored can still be read, changes and all, and restored, without Ray and Spark."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from spark_bridge import describe_savepoint, restore_savepoint, state_metadata_table

from .format_fixtures import BACKENDS, FORMAT_1, Stored
from .format_program import STORED_BATCHES, VARIABLES, Model, changes, columns, in_order, named_variables, read

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

PARTITIONS = {"firsts": 2, "reminders": 2, "sessions": 1, "totals": 2, "visits": 1, "windows": 1}


def test_the_model_gives_the_state_that_was_noted_then(backend: str) -> None:
    """So nobody has changed the program, its input, or the model, by which the other tests go."""
    expected = Stored(backend).expected()
    assert expected["version"] == STORED_BATCHES == len(expected["processing_times_ms"])
    assert Model.after(expected["processing_times_ms"]).state() == expected["state"]


def test_the_state_is_what_it_was_at_every_version(backend: str) -> None:
    times = Stored(backend).expected()["processing_times_ms"]
    for version in range(1, STORED_BATCHES + 1):
        assert read(Stored(backend).checkpoint, version) == Model.after(times[:version]).state(), version
    assert read(Stored(backend).checkpoint) == Stored(backend).state()


def test_columns_have_the_names_and_types_that_they_had(backend: str) -> None:
    found = {name: columns(Stored(backend).checkpoint, name) for name in named_variables()}
    assert found == Stored(backend).expected()["columns"]


@pytest.mark.parametrize("name", named_variables())
def test_the_changes_are_those_noted_then_and_lead_to_the_state(backend: str, name: str) -> None:
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


def test_the_metadata_name_all_variables_and_versions(backend: str) -> None:
    found = state_metadata_table(Stored(backend).checkpoint).to_pylist()
    there = {(row["operatorName"], row["stateVarName"]) for row in found}
    assert there == {(o, v or "default") for o, names in VARIABLES.items() for v in names}
    assert {row["operatorName"]: row["numPartitions"] for row in found} == PARTITIONS
    assert {(row["provider"], row["maxVersion"], row["numKeyGroups"]) for row in found} == {
        (backend, STORED_BATCHES, 1024)
    }


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
    assert rows["reminders.timers.-keys"] == rows["reminders.timers.-expiry"] == len(state["reminders.timers"])
    for variable in (v for o in about.operators for v in o.variables):
        for file in variable.files:
            assert pq.read_metadata(FORMAT_1 / backend / "savepoint" / file.path).num_rows == file.rows


@pytest.mark.parametrize("target", BACKENDS)
def test_the_savepoint_can_be_restored_to_either_backend(backend: str, target: str, tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    restore_savepoint(Stored(backend).savepoint, checkpoint, backend=target)
    assert read(checkpoint) == Stored(backend).state()
    assert set(state_metadata_table(checkpoint)["provider"].to_pylist()) == {target}
    assert {n: columns(checkpoint, n) for n in named_variables()} == Stored(backend).expected()["columns"]
