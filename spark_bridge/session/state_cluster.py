"""The state side of one driver session: the coordinator it uses and the hosts it has started."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from coordinator_actor.on_ray.actor import get_or_create_coordinator
from coordinator_actor.on_ray.ray_port import RayCoordinatorPort
from spark_bridge.host_actor.actor import host_files_dir, start_hosts
from spark_bridge.host_actor.session_options import SessionOptions

log = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""How long a message that renews leases waits for its answer, in seconds: the next one may get through."""
STOP_TIMEOUT = 20
"""Seconds within which hosts must stop; they are killed then."""


class StateCluster:
    """Starts the hosts of one session in a Ray cluster, and the coordinator if no other session has started it.

    ``executor_ips`` are the machines on which the hosts are placed in turn.
    """

    def __init__(self, options: SessionOptions, executor_ips: list[str]) -> None:
        self.options = options
        self.session_id = options.session_id
        self.conf = options.conf
        self.stopping: set[str] = set()
        """The ids of runs that stop when the savepoint that is being made of them is done."""
        get_or_create_coordinator(options.namespace, options.coordinator_name, options.coordinator_conf)
        self.coordinator = RayCoordinatorPort(options.namespace, options.coordinator_name, options.recovery_timeout)
        self.leases = RayCoordinatorPort(
            options.namespace, options.coordinator_name, min(LEASE_SECONDS, options.recovery_timeout)
        )
        """The way of the messages that renew leases: none of them takes a lease's time."""
        self.token = self.coordinator.token()
        session_dir = Path(ray._private.worker._global_node.get_session_dir_path())
        self.host_files = str(host_files_dir(session_dir, options))
        nodes = nodes_of(executor_ips)
        self.hosts = start_hosts(options, self.token, lambda i: nodes[i % len(nodes)] if nodes else None)

    def addresses(self) -> list[str]:
        """Return the Flight addresses of the hosts that answer now; a host that is being restarted is left out."""
        return self._answers("address")

    def query_addresses(self) -> list[str]:
        """Return where these hosts answer query clients, ``ip:port``: for ``address=`` of ``QueryableStateClient``."""
        return [address for address in self._answers("query_address") if address]

    def _answers(self, method: str) -> list[str]:
        answers = [getattr(host, method).remote() for host in self.hosts]
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=5)
        said = []
        for answer in ready:
            try:
                said.append(ray.get(answer))
            except RayError as error:
                log.warning("State store host %d does not answer now: %s", answers.index(answer), error)
        return said

    @staticmethod
    def machines() -> list[str]:
        """Return the IP addresses of the machines that are in the Ray cluster now."""
        return sorted({str(n["NodeManagerAddress"]) for n in ray.nodes() if n["Alive"]})

    def batch_committed(self, run_id: str, batch_id: int) -> None:
        """Report that Spark has committed a batch: its version is completed, and the hosts may apply it."""
        if self.coordinator.batch_committed(run_id, batch_id):
            for host in self.hosts:
                host.on_progress.remote()

    def describe_hosts(self) -> list[dict[str, Any]]:
        """Return what each host holds."""
        described: list[dict[str, Any]] = ray.get([h.describe.remote() for h in self.hosts], timeout=30)
        return described

    def stop(self) -> None:
        """Stop this session's hosts, and the coordinator if no other session uses it."""
        others = self.coordinator.unregister_session(self.session_id)
        self.coordinator.close()
        self.leases.close()
        stopping = [host.stop.remote() for host in self.hosts]
        ray.wait(stopping, num_returns=len(stopping), timeout=STOP_TIMEOUT)
        for host in self.hosts:
            ray.kill(host, no_restart=True)
        self.hosts = []
        if not others:
            ray.kill(ray.get_actor(self.options.coordinator_name, namespace=self.options.namespace), no_restart=True)


def nodes_of(ips: list[str]) -> list[str]:
    """Return the Ray node ids of machines whose nodes are alive, in the order of ``ips``."""
    alive = {n["NodeManagerAddress"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}
    return [alive[ip] for ip in dict.fromkeys(ips) if ip in alive]
