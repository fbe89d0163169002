"""``statestore drain``: let the hosts of a node hand over their partitions, so that the machine may go."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.cli.joined_ray import joined_ray
from spark_bridge.cli.output import FOUND, AsJson, errors_explained, json_line, printer
from spark_bridge.cli.sources import Address, CoordinatorName, Namespace
from spark_bridge.exceptions import EnvironmentProblemError

DRAIN_POLL_SECONDS = 1.0
DRAIN_ANSWER_SECONDS = 10.0


def drain(
    node: Annotated[str, typer.Argument(help="IP address, host name or id of a node of Ray.")],
    undo: Annotated[bool, typer.Option("--undo", help="The node stays after all.")] = False,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait until no host stands there.")] = 600.0,
    address: Address = None,
    namespace: Namespace = NAMESPACE,
    coordinator: CoordinatorName = COORDINATOR_NAME,
    as_json: AsJson = False,
) -> None:
    """Let the hosts of a node hand over their partitions while the streams run, and wait for that.

    No host is started there from then on, until --undo. The exit code is 1 if hosts are still there after --timeout.

    Examples: statestore drain 10.0.0.7; statestore drain 10.0.0.7 --undo
    """
    from coordinator_actor.on_ray.cluster_store import ClusterStore

    with errors_explained(), joined_ray(address, namespace):
        store, node_id = ClusterStore(namespace, coordinator), _named(node)
        if undo:
            store.keep(node_id)
            _say({"node_id": node_id, "drained": False}, f"{node} takes hosts again.", as_json)
            return
        store.drain(node_id)
        left = _await_none(namespace, coordinator, node_id, timeout)
    plain = {"node_id": node_id, "drained": not left, "hosts_left": left}
    if left:
        _say(plain, f"{left} hosts still stand on {node}; see statestore status.", as_json)
        raise typer.Exit(FOUND)
    _say(plain, f"No host stands on {node} any more; the machine may go.", as_json)


def _say(plain: dict[str, object], text: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json_line(plain))
    else:
        printer().print(text, markup=False)


def _await_none(namespace: str, coordinator: str, node_id: str, timeout: float) -> int:
    """Wait until no host stands on a node, or ``timeout`` seconds; return how many do."""
    deadline = time.monotonic() + timeout
    while (left := _hosts_on(namespace, coordinator, node_id)) and time.monotonic() < deadline:
        time.sleep(DRAIN_POLL_SECONDS)
    return left


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


def _hosts_on(namespace: str, name: str, node_id: str) -> int:
    """Return how many hosts the coordinator knows on a node; 0 if there is no coordinator, and so no stream."""
    import ray
    from ray.exceptions import RayError

    try:
        coordinator = ray.get_actor(name, namespace=namespace)
    except ValueError:
        return 0
    try:
        described = ray.get(coordinator.describe.remote(), timeout=DRAIN_ANSWER_SECONDS)
    except RayError as error:
        raise EnvironmentProblemError(
            f"The node is drained, but the coordinator (namespace {namespace!r}) does not say how far that is: {error}"
        ) from error
    return sum(host["node_id"] == node_id for host in described["hosts"])
