"""The actors of a session on a Ray cluster of several nodes: where they stand, and what follows when nodes go."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from coordinator_actor.actor import ClusterStore, get_or_create_coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.exceptions import InvalidRequestError
from spark_bridge.host_actor import SessionOptions
from spark_bridge.session import state_cluster
from spark_bridge.session.settings import Shutdown
from spark_bridge.session.state_cluster import StateCluster
from tests.scratch import SCRATCH
from tests.spark_bridge.conftest import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STORE = 80 << 20
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 2,
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Callable[[str], Any]]:
    """A head at the address of this machine, and what adds a node at another address, unless there is one."""
    ray_dir = tempfile.mkdtemp(prefix="rs-", dir=SCRATCH)
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_TMPDIR", ray_dir)  # a Cluster leaves its address there for drivers that join without one
    head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, namespace="statestore", log_to_driver=False, logging_level="ERROR")

        running: dict[str, Any] = {}

        def add(ip: str) -> Any:
            if ip not in running:
                node = running[ip] = cluster.add_node(num_cpus=1, node_ip_address=ip, object_store_memory=STORE)
                node.end = lambda: cluster.remove_node(running.pop(ip), allow_graceful=False)
            return running[ip]

        yield add
    finally:
        ray.shutdown()
        cluster.shutdown()
        patch.undo()
        shutil.rmtree(ray_dir, ignore_errors=True)


def node_of(actor: Any) -> str:
    """Return the node of an actor, as Ray reports it."""
    return str(ray._private.state.actors(actor._actor_id.hex())["Address"]["NodeID"])


def drain_by_ray(node_id: str) -> None:
    """Let Ray drain a node, as its autoscaler and notices of preemption do: it ends when nothing runs there."""
    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason, in_an_hour = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, int((time.time() + 3600) * 1000)
    accepted, why = gcs.drain_node(node_id, reason, "the machine is wanted elsewhere", in_an_hour)
    assert accepted, why


def come_to_stand(cluster: StateCluster, wanted: dict[str, int]) -> None:
    """Wait until so many hosts answer on each node, and no others are there; Ray says where they are."""

    def is_so() -> bool:
        hosts = cluster.placement.hosts
        is_there = Counter(host.node_id for host in hosts) == wanted and len(cluster.addresses()) == len(hosts)
        return is_there and hosts == cluster.placement.hosts

    wait_until(is_so)
    assert Counter(node_of(host) for host in cluster.hosts) == wanted


@pytest.mark.thorough  # otherwise: the next test
def test_hosts_run_next_to_executors_and_the_coordinator_on_the_head(nodes: Callable[[str], Any]) -> None:
    two, three = nodes("127.0.0.2"), nodes("127.0.0.3")
    executors = {"127.0.0.2": 2, "127.0.0.3": 1}
    cluster = StateCluster(SessionOptions(num_hosts=None), lambda: executors, Shutdown())
    cluster.begin()
    try:
        come_to_stand(cluster, {two.node_id: 2, three.node_id: 1})
        assert node_of(get_or_create_coordinator()) == ray.get_runtime_context().get_node_id(), "the head's"
        assert cluster.coordinator.describe()["problems"] == []

        four = nodes("127.0.0.4")  # a machine joins, and one is lost: its executors run elsewhere from now on
        executors = {"127.0.0.2": 2, "127.0.0.4": 1}
        lost = {host.host_id for host in cluster.placement.hosts if host.node_id == three.node_id}
        wait_until(lambda: {h.node_id for h in cluster.placement.hosts} >= {four.node_id})
        three.end()
        wait_until(lambda: not lost & {host.host_id for host in cluster.placement.hosts})
        come_to_stand(cluster, {two.node_id: 2, four.node_id: 1})
        known = wait_until(
            lambda: len(hosts := cluster.coordinator.describe()["hosts"]) == 3 and {h["node_id"] for h in hosts}
        )
        assert known == {two.node_id, four.node_id}

        executors = {"127.0.0.2": 2, "127.0.0.9": 1}
        said = wait_until(lambda: cluster.coordinator.describe()["problems"])
        assert (
            "127.0.0.9, where executors run" in said[0] and "Hosts run on 127.0.0.4, which have no executors" in said[1]
        )
    finally:
        cluster.stop()


@pytest.mark.thorough  # otherwise: streams/test_elasticity.py
def test_hosts_follow_executors_that_go_drained_nodes_and_scaling(
    nodes: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_cluster, "SURPLUS_SECONDS", 0.0)
    two, four = nodes("127.0.0.2"), nodes("127.0.0.4")
    executors = {"127.0.0.2": 2, "127.0.0.4": 1}
    cluster = StateCluster(SessionOptions(num_hosts=None), lambda: executors, Shutdown())
    cluster.begin()
    try:
        come_to_stand(cluster, {two.node_id: 2, four.node_id: 1})
        cluster.placement.scale(4)
        come_to_stand(cluster, {two.node_id: 3, four.node_id: 1})
        cluster.placement.scale(None)
        come_to_stand(cluster, {two.node_id: 2, four.node_id: 1})
        store = ClusterStore("statestore", "StateStoreCoordinator")
        store.drain(four.node_id)
        come_to_stand(cluster, {two.node_id: 2})
        (said,) = wait_until(lambda: cluster.coordinator.describe()["problems"])
        assert said.startswith("Executors run on 127.0.0.4, which are being drained")
        store.keep(four.node_id)
        come_to_stand(cluster, {two.node_id: 2, four.node_id: 1})
        drain_by_ray(four.node_id)
        come_to_stand(cluster, {two.node_id: 2})
        executors = {"127.0.0.2": 3}
        come_to_stand(cluster, {two.node_id: 3})
        ports = [host.port_number for host in cluster.placement.hosts]
        assert len(set(ports)) == 3 and max(ports) < 4, "ports are reused, so a range of them is enough"
    finally:
        cluster.stop()


def test_unavailable_coordinator_placement_is_rejected(nodes: Callable[[str], Any]) -> None:
    conf = CoordinatorConf(resources={"nowhere": 0.001})
    with pytest.raises(InvalidRequestError, match=r"\{'nowhere': 0.001\}"):
        get_or_create_coordinator(name="Displaced", conf=conf)
    with pytest.raises(ValueError, match="Displaced"):
        ray.get_actor("Displaced", namespace="statestore")
