"""The Ray cluster of the demo: one of its own on this machine, or one that runs on several machines."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from coordinator_actor.coordinator_conf import NAMESPACE
from spark_bridge.demo.events import DemoError
from spark_bridge.session.cluster.ray_cluster import system_config
from spark_bridge.session.current import current_cluster

MIB = 1 << 20
EXECUTOR_MEMORY = 1 << 30
ROOM_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RayForDemo:
    """A Ray cluster that is joined: its address, and what ``init_spark`` is told about executors."""

    address: str
    executors: dict[str, Any] = field(default_factory=lambda: {"num_executors": 2})


@contextmanager
def own_cluster(directory: Path) -> Iterator[RayForDemo]:
    """Start a cluster for this demo alone, with its files below ``directory``; end the cluster after the demo."""
    directory.mkdir(parents=True)
    context = ray.init(
        address="local",
        num_cpus=max(2, os.cpu_count() or 1),
        object_store_memory=256 * MIB,
        include_dashboard=False,
        log_to_driver=False,
        namespace=NAMESPACE,
        _temp_dir=str(directory),
        _system_config=system_config(),
    )
    try:
        yield RayForDemo(str(context.address_info["gcs_address"]))
    finally:
        ray.shutdown()


@contextmanager
def machines_of_cluster(count: int) -> Iterator[RayForDemo]:
    """Join the cluster at ``RAY_ADDRESS``, or that of this machine, and take a slot on each of ``count`` machines.

    Raises ``DemoError`` if there is no cluster, or not enough machines have room for an executor within a minute.
    """
    try:
        ray.init(address="auto", log_to_driver=False, namespace=NAMESPACE)
    except ConnectionError as error:
        raise DemoError(
            f"--machines needs a Ray cluster that runs, and none was found: {error} Start Ray on the machines (`ray "
            "start`), and run the demo on one of them, or with RAY_ADDRESS=<head>:6379"
        ) from error
    try:
        group = _room_on_machines(count)
        try:
            configs = {"spark.statestore.sharedFileSystem": "true"}
            executors = {"num_executors": count, "placement_group": group, "configs": configs}
            yield RayForDemo(ray.get_runtime_context().gcs_address, executors)
        finally:
            ray.util.remove_placement_group(group)
    finally:
        ray.shutdown()


def _room_on_machines(count: int) -> PlacementGroup:
    """Return a group with room for an executor on each of ``count`` machines."""
    there = {n["NodeManagerAddress"]: n["Resources"].get("CPU", 0) for n in ray.nodes() if n["Alive"]}
    if sum(cpus >= 1 for cpus in there.values()) >= count:
        bundles: list[dict[str, float]] = [{"CPU": 1, "memory": EXECUTOR_MEMORY}] * count
        group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        if group.wait(ROOM_TIMEOUT_S):
            return group
        ray.util.remove_placement_group(group)
    slots = ", ".join(f"{address} ({cpus:g})" for address, cpus in sorted(there.items()))
    raise DemoError(
        f"--machines {count} needs {count} machines with a free CPU slot and 1 GiB of Ray's memory each; these are in "
        f"the cluster, with their slots, taken ones too: {slots}. Name fewer machines, add some, or end what uses them"
    )


def hosts_by_machine() -> dict[str, int]:
    """Return how many state hosts of this session stand on each machine, by its address."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return dict(sorted(Counter(addresses[host.node_id] for host in current_cluster().placement.hosts).items()))
