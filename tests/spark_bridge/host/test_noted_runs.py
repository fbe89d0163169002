"""A host remembers a bounded number of runs, however many runs it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator_actor.exceptions import UnknownRunError
from coordinator_actor.messages import Completed
from spark_bridge.host import prepared_versions, registration
from spark_bridge.host.partition_cache import PartitionCache
from spark_bridge.host.prepared_versions import PreparedVersions
from spark_bridge.host.registration import IDLE_GRANT_SECONDS, KEPT_VERSIONS, CompletedVersions
from tests.coordinator_actor.coordinator_world import World
from tests.spark_bridge.host.host_steps import make_host, plan_spark, reg, run_task, task


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


def test_grants_of_runs_that_a_host_owns_nothing_of_are_forgotten(tmp_path: Path) -> None:
    """Tasks ask any host for the owner. No order says that such a run is over."""
    world, seconds = World(tmp_path), [0.0]
    c = world.coordinator(0)
    hosts = [make_host(world, c, i, tmp_path, clock=lambda: seconds[0]) for i in range(2)]
    for batch in range(3):
        run = f"run{batch}"
        assert c.register_query(reg(world, run, 1)).refusal is None
        plan_spark(world, batch)
        asked = task(batch, run=run)
        for host in hosts:
            host.open(asked)
        with pytest.raises(UnknownRunError):
            hosts[1].open(task(batch, run=f"unknown{batch}"))
        run_task(hosts, batch, run=run)
        world.commit_spark(batch)
        c.batch_committed(run, batch)
        c.deactivate_instances(run)
        for host in hosts:
            host.heartbeat()
    seconds[0] += IDLE_GRANT_SECONDS
    for host in hosts:
        host.maintenance.do_maintenance()
        grants = host.grants
        assert grants._granted == grants._waiting == grants._granting == {}
