"""A session that fails to start leaves no actor behind, and its own error reaches the user."""

from __future__ import annotations

import operator
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from coordinator_actor.coordinator_conf import CoordinatorConf
from spark_bridge import init_spark
from spark_bridge.exceptions import EnvironmentProblemError, HostUnavailableError
from spark_bridge.host_actor import SessionOptions
from spark_bridge.session import lifecycle, state_cluster
from spark_bridge.session.current import current_spark
from spark_bridge.session.settings import Shutdown
from spark_bridge.session.state_cluster import StateCluster
from tests.scratch import SCRATCH
from tests.spark_bridge.conftest import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def one_node() -> Iterator[str]:
    """A Ray cluster of one node; the address of the node."""
    ray_dir = tempfile.mkdtemp(prefix="rs-", dir=SCRATCH)
    try:
        ray.init(
            address="local",
            num_cpus=2,
            resources={"place": 1},
            namespace="statestore",
            log_to_driver=False,
            logging_level="ERROR",
            include_dashboard=False,
            object_store_memory=80 << 20,
            _temp_dir=ray_dir,
        )
        yield str(ray.util.get_node_ip_address())
    finally:
        ray.shutdown()
        shutil.rmtree(ray_dir, ignore_errors=True)


def living() -> list[str]:
    """The classes of the actors that live or are being started, as Ray reports them."""
    return sorted(a["ActorClassName"] for a in ray._private.state.actors().values() if a["State"] != "DEAD")


def host_files() -> list[Path]:
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    return list(session.glob("statestore/*/*/hosts/*.json"))


def test_actors_start_while_spark_does_and_end_if_spark_fails(one_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        wait_until(lambda: len(host_files()) == 2)  # they answer while Spark has not started
        seen.append(living())
        raise RuntimeError("Spark's JVM has no memory")

    monkeypatch.setattr("raydp.init_spark", fail)
    monkeypatch.setattr(lifecycle.ray_cluster, "ensure_java", lambda: None)
    with pytest.raises(RuntimeError, match="Spark's JVM has no memory"):
        init_spark("fails", 2)
    assert seen == [["StateStoreCoordinator", "StateStoreHost", "StateStoreHost"]]
    wait_until(lambda: living() == [] and host_files() == [])
    assert current_spark() is None


def test_no_actor_stays_if_a_host_cannot_start(one_node: str) -> None:
    with socket.create_server((one_node, 0)) as taken:
        options = SessionOptions(num_hosts=2, query_port=taken.getsockname()[1] - 1)  # the second host's
        cluster = StateCluster(options, lambda: {one_node: 2}, Shutdown())
        wait_until(lambda: living().count("StateStoreHost") == 1)  # the other one has failed before Spark was there
        with pytest.raises(RayError, match="Address already in use"):
            cluster.begin()
    wait_until(lambda: living() == [] and host_files() == [])


class Unreadable(CoordinatorConf):
    """Arrives nowhere: the coordinator's process cannot read it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.truediv, (1, 0)


def test_no_actor_stays_if_the_coordinator_cannot_start(one_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cluster, "STOP_SECONDS", 1.0)
    options = SessionOptions(num_hosts=1, coordinator_conf=Unreadable(), recovery_timeout=2.0)
    monkeypatch.setattr(SessionOptions, "__reduce__", lambda self: (SessionOptions, (1,)), raising=False)
    cluster = StateCluster(options, lambda: {one_node: 1}, Shutdown())
    with pytest.raises(HostUnavailableError, match="StateStoreCoordinator"):
        cluster.begin()
    wait_until(lambda: living() == [])


def test_no_actor_stays_if_the_coordinator_finds_no_place(one_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Holder:
        def hold(self) -> None:
            """Do nothing."""

    monkeypatch.setattr(state_cluster, "STOP_SECONDS", 1.0)
    holder = ray.remote(num_cpus=0, resources={"place": 1})(Holder).remote()
    ray.get(holder.hold.remote())
    conf = CoordinatorConf(resources={"place": 1})
    try:
        cluster = StateCluster(
            SessionOptions(num_hosts=1, coordinator_conf=conf, recovery_timeout=2.0), lambda: {}, Shutdown()
        )
        assert "StateStoreCoordinator" in living()
        with pytest.raises(HostUnavailableError, match="StateStoreCoordinator"):
            cluster.begin()
        wait_until(lambda: "StateStoreCoordinator" not in living())
    finally:
        ray.kill(holder)
    wait_until(lambda: living() == [])


def test_no_host_starts_beside_a_coordinator_of_another_release(one_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = StateCluster(SessionOptions(num_hosts=1), lambda: {one_node: 1}, Shutdown())
    first.begin()
    try:
        monkeypatch.setattr(state_cluster, "other_version", lambda *args: "two releases")
        with pytest.raises(EnvironmentProblemError, match="two releases"):
            StateCluster(SessionOptions(num_hosts=1), lambda: {one_node: 1}, Shutdown())
        assert living() == ["StateStoreCoordinator", "StateStoreHost"], "those of the first session"
        assert first.coordinator.wire_version()
    finally:
        first.stop()
    wait_until(lambda: living() == [])


def test_begin_starts_the_coordinator_again_if_it_has_ended(one_node: str) -> None:
    """Another session that ends may end it, while this session's Spark is starting and no host is there."""
    executors: dict[str, int] = {}
    cluster = StateCluster(SessionOptions(num_hosts=1), lambda: executors, Shutdown())
    assert cluster.hosts == [], "it is not known yet where executors will run"
    ray.kill(ray.get_actor("StateStoreCoordinator", namespace="statestore"), no_restart=True)
    wait_until(lambda: living() == [])
    executors[one_node] = 1
    try:
        cluster.begin()
        assert len(cluster.addresses()) == 1 and living() == ["StateStoreCoordinator", "StateStoreHost"]
    finally:
        cluster.stop()
    wait_until(lambda: living() == [])
