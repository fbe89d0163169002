"""The leases of a driver's runs are renewed, whatever the storage of one of them does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError

from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.messages import HostReport, QueryRegistration
from spark_bridge.session.ended_queries import DriverHeartbeats
from spark_bridge.session.listener import is_at_work
from spark_bridge.session.settings import Shutdown
from tests.coordinator_actor.coordinator_world import HangingStorage, World, acknowledge
from tests.patience import PATIENCE


class Port(CoordinatorPort):
    """A port to a coordinator that lets a test wait for the replies to a message."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._answered: dict[tuple[str, str], threading.Semaphore] = {}

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        answer = self.coordinator.call(method, *args, **kwargs)
        self.answered(method, str(args[0])).release()
        return answer

    def answered(self, method: str, of: str) -> threading.Semaphore:
        return self._answered.setdefault((method, of), threading.Semaphore(0))

    def wait_for(self, method: str, of: str) -> None:
        """Wait for an answer to a message that is sent from now on."""
        answered = self.answered(method, of)
        while answered.acquire(blocking=False):
            pass
        for _ in range(2):  # the first one may have been sent before
            assert answered.acquire(timeout=PATIENCE), f"{method}({of}) was not answered"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def storage(world: World) -> HangingStorage:
    return HangingStorage(world.storage)


@pytest.fixture
def port(world: World, storage: HangingStorage) -> Port:
    c = Coordinator(lambda: world.now, storage.open, CoordinatorConf(report_timeout=0.0, driver_timeout=60.0))
    c.register_host(world.host(0), HostReport())
    return Port(c)


@pytest.fixture
def heartbeats(port: Port) -> Iterator[DriverHeartbeats]:
    made = DriverHeartbeats(port, port, set(), Shutdown(), interval=0.005)
    yield made
    made.close()


def registered(
    world: World, port: Port, heartbeats: DriverHeartbeats, number: int, is_at_work: bool = True
) -> QueryRegistration:
    root = world.root / f"ck{number}"
    registration = world.registration(
        f"run{number}", query_id=f"q{number}", checkpoint_location=str(root), state_location=f"{root}/statestore"
    )
    assert port.coordinator.register_query(registration).refusal is None
    heartbeats.add(registration, lambda: is_at_work)
    return registration


def runs(port: Port) -> list[str]:
    return sorted(q["run_id"] for q in port.coordinator.describe()["queries"])


def test_query_with_hanging_storage_does_not_cost_other_leases(
    world: World, storage: HangingStorage, port: Port, heartbeats: DriverHeartbeats
) -> None:
    hanging = registered(world, port, heartbeats, 1)
    registered(world, port, heartbeats, 2)
    for p in range(2):
        acknowledge(port.coordinator, world.stage(world.open(port.coordinator, 0, p), p, 0, "t"))
    with storage.hangs(hanging.checkpoint_location):
        storage.wait_for_call()  # the heartbeat of run1 asks whether Spark has committed batch 0
        for _ in range(3):
            world.now += 50
            port.wait_for("renew_leases", "['run1', 'run2']")
            port.wait_for("driver_heartbeat", "run2")
            port.coordinator.expire()
        assert runs(port) == ["run1", "run2"]
    port.wait_for("driver_heartbeat", "run1")


def test_a_run_that_the_coordinator_has_lost_is_registered_again_and_one_that_has_ended_is_not(
    world: World, storage: HangingStorage, port: Port, heartbeats: DriverHeartbeats
) -> None:
    for number in (1, 2):
        registered(world, port, heartbeats, number)
    heartbeats.remove("run2")
    port.coordinator = Coordinator(lambda: world.now, storage.open)
    assert port.coordinator.renew_leases(["run1", "run2"]) == ["run1", "run2"]
    port.wait_for("driver_heartbeat", "run1")
    assert runs(port) == ["run1"]

    port.coordinator.deactivate_instances("run1")
    assert port.coordinator.renew_leases(["run1"]) == []


@pytest.mark.parametrize("is_at_work", [True, False])
def test_heartbeat_tells_whether_spark_runs_a_batch(
    world: World, port: Port, heartbeats: DriverHeartbeats, is_at_work: bool
) -> None:
    registered(world, port, heartbeats, 1, is_at_work)
    port.wait_for("driver_heartbeat", "run1")
    (query,) = port.coordinator.describe()["queries"]
    assert (query["batch_begun_ms"] is not None) == is_at_work


def test_unresponsive_spark_counts_as_running_no_batch() -> None:
    class Gone:
        def status(self) -> object:
            raise Py4JNetworkError("the gateway is closed")

    assert is_at_work(Gone()) is False
