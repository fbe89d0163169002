"""Asks coordinator and hosts of a Ray cluster for the overview. The process has joined the cluster."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.overview.from_cluster import KnownCheckpoints, overview_of_cluster
from spark_bridge.overview.model import Overview

HOST_NAME_PREFIX = "StateStoreHost-"
"""``start_host`` names an actor so, and its host ``host-`` with the same session and number."""
RAY_ANSWER_SECONDS = 10.0
MOST_SILENT = 50
"""Ray is asked about at most this many hosts that do not answer."""


def cluster_overview(
    namespace: str = NAMESPACE,
    coordinator_name: str = COORDINATOR_NAME,
    timeout: float = RAY_ANSWER_SECONDS,
    known: KnownCheckpoints | None = None,
) -> Overview:
    """Describe the queries and hosts of a namespace. Hosts that do not answer in ``timeout`` seconds are marked so.

    Whoever looks again gives ``known`` to each look, so that only what has changed is sent and made.

    Without a coordinator the overview is empty. Raises ``EnvironmentProblemError`` if the coordinator does not answer.
    """
    deadline = time.monotonic() + timeout
    names = {
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == namespace
    }
    if coordinator_name not in names:
        return overview_of_cluster(None, (), now_ms=_now())
    actor = ray.get_actor(coordinator_name, namespace=namespace)
    asked = actor.describe.remote()
    of_hosts: dict[str, Any] = {}
    for name in sorted(name for name in names if name.startswith(HOST_NAME_PREFIX)):
        with suppress(ValueError):  # it has ended meanwhile
            of_hosts[name] = ray.get_actor(name, namespace=namespace).describe_in_columns.remote()
    coordinator = _answers([asked], deadline).get(asked)
    if coordinator is None:
        raise EnvironmentProblemError(
            f"The coordinator {coordinator_name!r} (namespace {namespace!r}) did not answer within {timeout:.0f} s; it "
            "may be restarting, so try again."
        )
    # Asked for before hosts are waited for: one that hangs takes all the time there is.
    known = known or KnownCheckpoints()
    runs = [q["run_id"] for q in coordinator["queries"]]
    of_runs = {run_id: actor.checkpoint_stats.remote(run_id, known.mark(run_id)) for run_id in runs}
    told = _answers([*of_runs.values(), *of_hosts.values()], deadline)
    silent = [name for name, answer in of_hosts.items() if answer not in told]
    return overview_of_cluster(
        coordinator,
        [told[answer] for answer in of_hosts.values() if answer in told],
        {run_id: told[answer] for run_id, answer in of_runs.items() if answer in told},
        silent=[_actor(name, namespace) for name in silent[:MOST_SILENT]],
        known=known,
        now_ms=_now(),
    )


def _actor(name: str, namespace: str) -> dict[str, Any]:
    """Return Ray's record of a host that has not answered."""
    known: dict[str, Any] = {"host_id": f"host-{name.removeprefix(HOST_NAME_PREFIX)}"}
    with suppress(ValueError, KeyError):  # it has ended meanwhile
        found = ray._private.state.actors(ray.get_actor(name, namespace=namespace)._actor_id.hex())
        address = found["Address"]
        known |= {"state": found["State"], "pid": found["Pid"], "restarts": int(found["NumRestarts"])}
        known |= {"node_ip": address["IPAddress"], "node_id": address["NodeID"]}
    return known


def _answers(asked: list[Any], deadline: float) -> dict[Any, Any]:
    """Return the answers that come in time, without those of actors that have died and runs that have ended."""
    ready, _ = (
        ray.wait(asked, num_returns=len(asked), timeout=max(0.0, deadline - time.monotonic())) if asked else ([], [])
    )
    found = {}
    for answer in ready:
        try:
            found[answer] = ray.get(answer)
        except RayError:
            continue
    return found


def _now() -> int:
    return int(time.time() * 1000)
