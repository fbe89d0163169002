"""A host remembers a bounded number of runs, however many runs it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator_actor.messages import Completed
from spark_bridge.host import prepared_versions, registration
from spark_bridge.host.partition_cache import PartitionCache
from spark_bridge.host.prepared_versions import PreparedVersions
from spark_bridge.host.registration import KEPT_VERSIONS, CompletedVersions
from tests.coordinator_actor.coordinator_world import World


def test_versions_of_the_most_recent_runs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "KEPT_RUNS", 3)
    noted = CompletedVersions()
    for i in range(5):
        for version in range(1, 10):
            noted.note(Completed(f"run{i}", version, {}))
    assert noted.runs() == ["run2", "run3", "run4"]
    assert [v for v in range(12) if noted.at("run4", v) is not None] == list(range(10 - KEPT_VERSIONS, 10))


def test_the_last_runs_with_a_prepared_version_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prepared_versions, "MAX_RUNS", 3)
    completed = CompletedVersions()
    nobody: Any = None
    prepared = PreparedVersions(nobody, PartitionCache(nobody), completed, nobody)
    for i in range(5):
        for version in (2, 1):
            prepared.accepted(World(tmp_path).registration(f"run{i}"), version)
    assert {run: of.version for run, of in prepared._prepared.items()} == {"run2": 2, "run3": 2, "run4": 2}
