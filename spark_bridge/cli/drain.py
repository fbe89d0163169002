"""``statestore drain``: let the hosts of a node hand over their partitions, so that the machine may go."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator_actor.coordinator_conf import COORDINATOR_NAME
from spark_bridge.cli.joined_ray import joined_ray
from spark_bridge.exceptions import EnvironmentProblemError

POLL_SECONDS = 1.0
ANSWER_SECONDS = 10.0


def drain(address: str | None, namespace: str, node: str, timeout: float, tell: Callable[[str], None]) -> bool:
    """Drain a node, and wait until no host stands there; return whether that came about within ``timeout`` seconds.

    Drivers start no host there from then on, until ``keep``. Raises ``EnvironmentProblemError`` if no Ray cluster
    answers, or ``node`` names none or several of its nodes.
    """
    from coordinator_actor.on_ray.cluster_store import ClusterStore

    deadline = time.monotonic() + timeout
    with joined_ray(address, namespace):
        node_id = _named(node)
        ClusterStore(namespace, COORDINATOR_NAME).drain(node_id)
        last = -1
        while (left := _hosts_on(namespace, node_id)) > 0:
            if left != last:
                tell(f"{left} hosts on {node} hand over what they have ...")
                last = left
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
    return True


def keep(address: str | None, namespace: str, node: str) -> None:
    """End the drain of a node: drivers may start hosts there again. Raises ``EnvironmentProblemError`` as ``drain``."""
    from coordinator_actor.on_ray.cluster_store import ClusterStore

    with joined_ray(address, namespace):
        ClusterStore(namespace, COORDINATOR_NAME).keep(_named(node))


def _named(node: str) -> str:
    import ray

    return node_named(node, ray.nodes())


def node_named(node: str, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return the id of the living node that has this id, beginning of an id, IP address or host name.

    Raises ``EnvironmentProblemError`` if none or several do.
    """
    alive = [n for n in nodes if n["Alive"]]
    found = [n for n in alive if node in (n["NodeID"], n["NodeManagerAddress"], n["NodeManagerHostname"])]
    found = found or [n for n in alive if len(node) >= 6 and n["NodeID"].startswith(node)]
    if len(found) != 1:
        there = ", ".join(f"{n['NodeManagerAddress']} ({n['NodeManagerHostname']}, {n['NodeID']})" for n in alive)
        how_many = "Several nodes are" if found else "No living node of Ray is"
        raise EnvironmentProblemError(f"{how_many} named {node!r}; give an address, a host name or an id of: {there}.")
    return str(found[0]["NodeID"])


def _hosts_on(namespace: str, node_id: str) -> int:
    """Return how many hosts the coordinator knows on a node; 0 if there is no coordinator, and so no stream."""
    import ray
    from ray.exceptions import RayError

    try:
        coordinator = ray.get_actor(COORDINATOR_NAME, namespace=namespace)
    except ValueError:
        return 0
    try:
        described = ray.get(coordinator.describe.remote(), timeout=ANSWER_SECONDS)
    except RayError as error:
        raise EnvironmentProblemError(
            f"The node is drained, but the coordinator (namespace {namespace!r}) does not say how far that is: {error}"
        ) from error
    return sum(host["node_id"] == node_id for host in described["hosts"])
