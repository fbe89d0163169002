"""Checks of a Ray cluster: whether it can be joined, its token mode, its nodes' versions and clocks, and its ports."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spark_bridge.cli.doctor.checks import OK, SKIPPED, Check
from spark_bridge.cli.joined_ray import joined_ray
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.overview.model import ERROR, WARNING, Overview

CLUSTER_AREA = "cluster"
PORT_CHECK_SECONDS = 3.0
NODE_SECONDS = 30.0
"""A node may have to start a process before it answers."""
MOST_SKEW_SECONDS = 1.0
"""Clocks that differ by more make TTLs, processing time and the times of checkpoints differ by as much."""
PACKAGES = ("ray-statestore", "ray", "pyspark", "raydp", "pyarrow", "msgspec", "rocksdict")


def token_mode_check(environment: Mapping[str, str] = os.environ, home: Path | None = None) -> Iterator[Check]:
    """Say whether Ray's tokens are on, and whether this machine has one."""
    mode = environment.get("RAY_AUTH_MODE", "")
    token_path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or (home or Path.home()) / ".ray" / "auth_token")
    has_token = bool(environment.get("RAY_AUTH_TOKEN")) or token_path.exists()
    if mode.lower() == "token" and not has_token:
        yield Check(
            CLUSTER_AREA,
            "ray-token",
            ERROR,
            f"RAY_AUTH_MODE is token, and there is neither RAY_AUTH_TOKEN nor {token_path}.",
            "Copy the token of the cluster's head node to that file, or put it into RAY_AUTH_TOKEN; 'ray "
            "get-auth-token --generate' makes one for a new cluster.",
        )
    elif mode.lower() == "token" or (not mode and has_token):
        yield Check(CLUSTER_AREA, "ray-token", OK, "Ray's token mode is on, and a token is there.")
    elif mode.lower() == "disabled":
        remedy = "Whoever reaches Ray's ports can run code and get the store's token: use RAY_AUTH_MODE=token."
        yield Check(CLUSTER_AREA, "ray-token", WARNING, "RAY_AUTH_MODE is disabled.", remedy)
    else:
        found = "RAY_AUTH_MODE is not set and there is no token: a cluster that is started here makes one."
        yield Check(CLUSTER_AREA, "ray-token", OK, found)


def cluster_checks(address: str | None, namespace: str, coordinator: str) -> Iterator[Check]:
    """Join the cluster, look at its nodes and hosts, and leave. No cluster is no error unless ``address`` names one."""
    yield from token_mode_check()
    try:
        with joined_ray(address, namespace):
            yield from node_checks(_asked_nodes())
            yield from overview_checks(_overview(namespace, coordinator))
    except EnvironmentProblemError as error:
        text, _, remedy = str(error).partition(";")
        if address is None:
            yield Check(CLUSTER_AREA, "ray", SKIPPED, f"{text}: nothing of a cluster was checked.")
        else:
            yield Check(
                CLUSTER_AREA, "ray", ERROR, text, remedy.strip().capitalize() or "Look at the cluster's head node."
            )


def _overview(namespace: str, coordinator: str) -> Overview:
    from spark_bridge.overview.on_ray import cluster_overview

    return cluster_overview(namespace, coordinator)


def _asked_nodes() -> list[dict[str, Any]]:
    """Return the description of each living node: its versions, and how far its clock is from this one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {}
    probe = ray.remote(num_cpus=0, max_retries=0)(said_of_node)
    for node in ray.nodes():
        if node["Alive"]:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[probe.options(scheduling_strategy=strategy).remote(PACKAGES)] = node["NodeManagerAddress"]
    # A first answer may wait for a process; the clock is asked for when that is there.
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=NODE_SECONDS)
    found: list[dict[str, Any]] = []
    for answer, ip in asked.items():
        if answer not in ready:
            found.append({"ip": ip, "failure": f"no answer within {NODE_SECONDS:.0f} s"})
            continue
        try:
            said = ray.get(answer)
        except ray.exceptions.RayError as error:
            found.append({"ip": ip, "failure": str(error).splitlines()[0]})
            continue
        strategy = NodeAffinitySchedulingStrategy(said["node_id"], soft=False)
        found.append({"ip": ip, **said, "skew": _skew(probe, strategy)})
    return found


def said_of_node(packages: Sequence[str]) -> dict[str, Any]:
    """Return the versions, the clock and the id of the node that this runs on."""
    import ray

    from spark_bridge.cli.doctor.machine import installed

    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "packages": {name: installed(name) for name in packages},
        "time": time.time(),
        "node_id": ray.get_runtime_context().get_node_id(),
    }


def _skew(probe: Any, strategy: Any) -> float:
    """Return how far a node's clock is ahead of this one, in seconds, at least: what the way takes is not counted."""
    import ray

    begun = time.time()
    there: float = ray.get(probe.options(scheduling_strategy=strategy).remote(()), timeout=NODE_SECONDS)["time"]
    ended = time.time()
    return there - ended if there > ended else min(0.0, there - begun)


def node_checks(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Say which nodes do not answer, have other versions than this machine, or another time."""
    from spark_bridge.cli.doctor.machine import installed

    here = {name: installed(name) for name in PACKAGES}
    python = ".".join(map(str, sys.version_info[:2]))
    count = len(nodes)
    wrong = 0
    for node in nodes:
        name = f"node {node['ip']}"
        if "failure" in node:
            wrong += 1
            remedy = "Look at this machine and its raylet; if code cannot be imported there, install the packages."
            yield Check(CLUSTER_AREA, name, ERROR, str(node["failure"]), remedy)
            continue
        other = [f"{p} {v or 'is missing'}, here {here[p]}" for p, v in node["packages"].items() if v != here[p]]
        if node["python"] != python:
            other.append(f"Python {node['python']}, here {python}")
        if other:
            wrong += 1
            yield Check(CLUSTER_AREA, name, ERROR, "; ".join(other), "Install the same versions on all machines.")
        if abs(node["skew"]) > MOST_SKEW_SECONDS:
            wrong += 1
            found = f"Its clock is {node['skew']:+.1f} s from this machine's."
            yield Check(CLUSTER_AREA, f"clock of {node['ip']}", WARNING, found, "Let all machines follow NTP (chrony).")
    if not wrong:
        yield Check(CLUSTER_AREA, "nodes", OK, f"{count} nodes answer, with the versions and the time of this machine.")


def overview_checks(overview: Overview) -> Iterator[Check]:
    """Say whether the hosts' ports can be reached from here, and which faults the overview has."""
    if overview.coordinator is None:
        yield Check(CLUSTER_AREA, "coordinator", SKIPPED, "No stream with state has run in this namespace.")
        return
    where = f"in namespace {overview.coordinator.namespace}, on {overview.coordinator.node_ip}"
    yield Check(CLUSTER_AREA, "coordinator", OK, f"It answers {where}.")
    closed = []
    ports = 0
    for host in overview.hosts:
        for what, address in (("queries", host.query_address), ("tasks", host.address.rpartition("//")[2])):
            if address:
                ports += 1
                failure = unreachable(address)
                if failure is not None:
                    closed.append(f"{address} of {host.host_id} (for {what}): {failure}")
    if closed:
        remedy = "Open these ports in firewalls and network policies; query_port= fixes the port for queries."
        yield Check(CLUSTER_AREA, "ports", ERROR, "; ".join(closed), remedy)
    elif ports:
        yield Check(
            CLUSTER_AREA, "ports", OK, f"{ports} ports of {len(overview.hosts)} hosts can be reached from here."
        )
    for fault in overview.faults:
        status = fault.severity
        yield Check(CLUSTER_AREA, fault.kind, status, f"{fault.subject}: {fault.what}", fault.remedy)


def unreachable(address: str) -> str | None:
    """Return why nobody can be connected to at ``ip:port``, or None."""
    ip, _, port = address.rpartition(":")
    try:
        socket.create_connection((ip.strip("[]"), int(port)), PORT_CHECK_SECONDS).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None
