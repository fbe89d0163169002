"""How often a host registers again, when the coordinator was restarted and does not know something.

A host remembers a bounded number of runs, however many runs it sees.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.exceptions import HostUnavailableError, UnknownRunError
from coordinator_actor.handlers.registries import Loss
from coordinator_actor.messages import Completed
from spark_bridge.host import prepared_versions, registration
from spark_bridge.host.partition_cache import PartitionCache
from spark_bridge.host.prepared_versions import PreparedVersions
from spark_bridge.host.registration import (
    IDLE_GRANT_SECONDS,
    KEPT_VERSIONS,
    REGISTER_SECONDS,
    SUSPECT_SECONDS,
    CompletedVersions,
)
from tests.coordinator_actor.coordinator_world import World
from tests.spark_bridge.host.host_steps import make_host, plan_spark, reg, run_task, task


def test_readers_report_a_run_once_a_second_however_many_ask(tmp_path: Path) -> None:
    """The owner of a partition has not reported yet, so the location of the partition is unknown."""
    world = World(tmp_path)
    now = 0.0
    c = world.coordinator(0)
    hosts = [make_host(world, c, i, tmp_path, clock=lambda: now) for i in (0, 1)]
    assert c.register_query(reg(world)).refusal is None
    plan_spark(world, 0)
    owners = [run_task(hosts, 0, p)[0] for p in (0, 1)]
    assert owners[0] is not owners[1]
    world.commit_spark(0)
    c.batch_committed("run1", 0)
    host = owners[0]
    sent: Counter[str] = Counter()
    for message in ("register_host", "report_runs", "open_for_read"):
        host.port.before[message] = lambda *_, message=message: sent.update([message])
    host.port.c = Coordinator(lambda: world.now, world.storage, CoordinatorConf(report_timeout=5.0))
    for seconds in (0.0, 0.5, 1.0, 1.5, 2.0):
        now = seconds * REGISTER_SECONDS
        for _ in range(20):
            with pytest.raises(UnknownRunError, match="is not known yet"):
                host.grants.for_read("run1", "op", 1)
    assert sent["open_for_read"] >= 100 and (sent["report_runs"], sent["register_host"]) == (3, 1)
    assert host.grants.for_read("run1", "op", 0).owner == host.info, "it has reported what it holds itself"
    owners[1].port.c = host.port.c
    owners[1].heartbeat()
    found: Any = host.grants.for_read("run1", "op", 1)
    assert found.owner == owners[1].info


def test_tasks_report_the_owner_that_they_cannot_reach(tmp_path: Path) -> None:
    """The next owner is found although the answer of the coordinator about the batch would be used for a second."""
    world = World(tmp_path)
    now = 0.0
    c = world.coordinator(0)
    hosts = [make_host(world, c, i, tmp_path, clock=lambda: now) for i in (0, 1)]
    assert c.register_query(reg(world)).refusal is None
    plan_spark(world, 0)
    host, dead = hosts
    p = next(p for p in (0, 1) if host.open(task(0, p)).redirect is not None)
    sent: Counter[str] = Counter()
    for message in ("suspect_host", "open_batch"):
        host.port.before[message] = lambda *_, message=message: sent.update([message])
    for _ in range(20):
        assert host.open(replace(task(0, p), unreachable=dead.info.address)).redirect == dead.info.address
    assert sent == {"suspect_host": 1}
    c.registries.hosts.lose(c.registries.hosts.leases["h1"], Loss.REFUSED, 0.0)
    now += SUSPECT_SECONDS
    assert host.open(task(0, p)).redirect == dead.info.address, "a task that has not tried goes by the last answer"
    assert host.open(replace(task(0, p), unreachable=dead.info.address)).redirect is None
    assert sent == {"suspect_host": 2, "open_batch": 1}


def test_a_coordinator_that_does_not_answer_a_report_fails_no_task(tmp_path: Path) -> None:
    world = World(tmp_path)
    host = make_host(world, c := world.coordinator(0), 0, tmp_path)
    assert c.register_query(reg(world)).refusal is None
    plan_spark(world, 0)

    def away(address: str) -> None:
        raise HostUnavailableError("the coordinator is away")

    host.port.before["suspect_host"] = away
    assert host.open(replace(task(0), unreachable="grpc://10.0.0.9:1")).redirect is None


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
    prepared = PreparedVersions(nobody, PartitionCache(nobody), completed, nobody, lambda run_id: False)
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
        assert grants._runs == {}
