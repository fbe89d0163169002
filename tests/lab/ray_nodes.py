"""Ray on the machines of a lab, started as ``deploy/README.md`` says; machine 0 is the head."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spark_bridge.session.ray_cluster import ensure_java
from tests.lab.lab import Lab

PORT = 6379
JOBS_PORT = 8265
START_SECONDS = 300.0
START_ATTEMPTS = 3
RAY = str(Path(sys.executable).with_name("ray"))
OBJECT_STORE = 80 << 20
NO_DASHBOARD = ("--include-dashboard=false",)
WITH_JOBS = ("--include-dashboard=true", "--dashboard-host=0.0.0.0", f"--dashboard-port={JOBS_PORT}")
"""Options of the head: whether it takes jobs."""


def ray_address(lab: Lab) -> str:
    """Return the address of the cluster, for ``init_spark(ray_address=...)`` and ``RAY_ADDRESS``."""
    return f"{lab.addresses[0]}:{PORT}"


def ray_environment() -> dict[str, str]:
    """Return the environment of ``ray start``: Java first on the PATH, and no niceness for Ray's workers."""
    home = ensure_java()
    return {
        "JAVA_HOME": str(home),
        "PATH": os.pathsep.join([str(home / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def start_ray(
    lab: Lab,
    cpus: Sequence[int],
    environment: Mapping[str, str] | None = None,
    head: Sequence[str] = NO_DASHBOARD,
) -> None:
    """Start Ray on all machines, machine k with ``cpus[k]`` slots: first the head, then the others side by side."""
    start_ray_on(lab, 0, cpus[0], environment, head)
    with ThreadPoolExecutor(max(1, len(cpus) - 1)) as threads:
        for started in [threads.submit(start_ray_on, lab, k, cpus[k], environment) for k in range(1, len(cpus))]:
            started.result()


def start_ray_on(
    lab: Lab, k: int, cpus: int, environment: Mapping[str, str] | None = None, head: Sequence[str] = NO_DASHBOARD
) -> None:
    """Start Ray on one machine: the head on machine 0, on others a node that joins it.

    On a busy computer Ray may give its own start up; a unit of systemd tries again, and so does this.
    """
    role = ["--head", f"--port={PORT}", *head] if k == 0 else [f"--address={ray_address(lab)}"]
    node = [f"--node-ip-address={lab.addresses[k]}", f"--num-cpus={cpus}", f"--object-store-memory={OBJECT_STORE}"]
    argv = [RAY, "start", *role, *node]
    for attempt in range(START_ATTEMPTS):
        is_last = attempt == START_ATTEMPTS - 1
        started = lab.run(k, argv, {**ray_environment(), **(environment or {})}, timeout=START_SECONDS, check=is_last)
        if not started.returncode:
            return
        lab.run(k, [RAY, "stop", "--force"], ray_environment(), timeout=START_SECONDS, check=False)
