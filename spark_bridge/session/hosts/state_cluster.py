"""The state side of one driver session: the coordinator it uses and the hosts it has started."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from backends.background_loop import BackgroundLoop, failing_loops
from backends.exceptions import StateStoreError
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.exceptions import CoordinatorError, HostUnavailableError
from coordinator_actor.on_ray.actor import get_or_create_coordinator
from coordinator_actor.on_ray.cluster_store import ClusterStore
from coordinator_actor.on_ray.ray_port import RayCoordinatorPort
from coordinator_actor.wire_version import other_version
from spark_bridge.exceptions import EnvironmentProblemError, SparkBridgeError
from spark_bridge.host_actor.actor import host_files_dir
from spark_bridge.host_actor.session_options import SessionOptions
from spark_bridge.session.hosts.host_placement import HostPlacement
from spark_bridge.session.shutdown import Shutdown

log = logging.getLogger(__name__)

REPORT_SECONDS = 2.0
LEASE_SECONDS = 10.0
"""How long a message that renews leases waits for its answer, in seconds: the next one may get through."""


class StateCluster:
    """Starts the hosts of one session in a Ray cluster, and the coordinator if no other session has started it.

    ``executors`` gives the cores of the executors on each machine now, by IP address: the hosts stand there. Raises
    ``InvalidRequestError`` if no node can take the coordinator, ``EnvironmentProblemError`` if the coordinator that is
    there is of a release that speaks other messages.
    """

    def __init__(self, options: SessionOptions, executors: Callable[[], Mapping[str, int]], shutdown: Shutdown) -> None:
        self.options = options
        self.shutdown = shutdown
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
        require_same_messages(self.coordinator)
        self.token = self.coordinator.token()
        session_dir = Path(ray._private.worker._global_node.get_session_dir_path())
        self.host_files = str(host_files_dir(session_dir, options))
        drained = ClusterStore(options.namespace, options.coordinator_name).drained
        self._was_failing = False
        self._reporting = BackgroundLoop(
            self._report_failing_loops,
            REPORT_SECONDS,
            name="statestore-report",
            what="tell the coordinator which background loops of the driver fail",
            remedy="See whether the coordinator runs and can be reached from the driver ('statestore status').",
            most_seconds=REPORT_SECONDS,
            is_ending=lambda: shutdown.is_ending,
        )
        self.placement = HostPlacement(options, self.token, executors, drained, self._report_placement, shutdown)
        try:
            self.placement.begin()
            self._reporting.start()
        except BaseException:
            self.stop()
            raise

    @property
    def hosts(self) -> list[Any]:
        """Return the actors of the session's hosts."""
        return [host.actor for host in self.placement.hosts]

    def _report_placement(self, problems: Sequence[str], leaving: Sequence[str]) -> tuple[str, ...]:
        try:
            return self.leases.place_session(self.session_id, tuple(problems), tuple(leaving)).released
        except (CoordinatorError, StateStoreError, SparkBridgeError) as error:
            log.log(self.shutdown.log_level, "The coordinator was not told where the hosts stand: %s", error)
            return ()

    def _report_failing_loops(self) -> None:
        failing = failing_loops.now()
        if failing or self._was_failing:
            process = f"process {os.getpid()} on {ray.util.get_node_ip_address()} (session {self.session_id})"
            self.leases.report_failing_loops(self.session_id, process, failing)
            self._was_failing = bool(failing)

    def addresses(self) -> list[str]:
        """Return the Flight addresses of the hosts that answer now; a host that is being restarted is left out."""
        return self._answers("address")

    def query_addresses(self) -> list[str]:
        """Return where these hosts answer query clients, ``ip:port``: for ``address=`` of ``QueryableStateClient``."""
        return [address for address in self._answers("query_address") if address]

    def _answers(self, method: str) -> list[str]:
        answers = [getattr(host, method).remote() for host in self.hosts]
        if not answers:
            return []
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=5)
        said = []
        for answer in ready:
            try:
                said.append(ray.get(answer))
            except RayError as error:
                host = answers.index(answer)
                log.log(self.shutdown.log_level, "State store host %d does not answer now: %s", host, error)
        return said

    @staticmethod
    def machines() -> list[str]:
        """Return the IP addresses of the machines that are in the Ray cluster now."""
        return sorted({str(n["NodeManagerAddress"]) for n in ray.nodes() if n["Alive"]})

    def batch_committed(self, run_id: str, batch_id: int) -> None:
        """Report that Spark has committed a batch: its version is completed, and the hosts may apply it."""
        if self.coordinator.batch_committed(run_id, batch_id, by_driver=True):
            try:
                for host in self.hosts:
                    host.on_progress.remote()
            except (RayError, AttributeError) as error:
                if not self.shutdown.is_over:  # Ray raises either once the program has called ray.shutdown()
                    raise
                raise HostUnavailableError(
                    f"The hosts did not get batch {batch_id}: Ray has been shut down."
                ) from error

    def describe_hosts(self) -> list[dict[str, Any]]:
        """Return the description of each host."""
        described: list[dict[str, Any]] = ray.get([h.describe.remote() for h in self.hosts], timeout=30)
        return described

    def stop(self) -> None:
        """Stop this session's hosts, and the coordinator if no other session uses it.

        A program that has called ``ray.shutdown()`` reaches neither: Ray has ended the hosts, and the coordinator
        forgets the session once its lease is over.
        """
        self._reporting.close()
        is_alone = not self.shutdown.is_over and not self.coordinator.unregister_session(self.session_id)
        self.coordinator.close()
        self.leases.close()
        self.placement.close()
        if is_alone:
            ray.kill(ray.get_actor(self.options.coordinator_name, namespace=self.options.namespace), no_restart=True)


def require_same_messages(coordinator: CoordinatorPort) -> None:
    """Raise ``EnvironmentProblemError`` unless the coordinator speaks this release's messages."""
    try:
        theirs: int | None = coordinator.wire_version()
    except AttributeError:  # the actor is of a release without that message
        theirs = None
    if (problem := other_version("The coordinator that runs in this namespace", theirs, "this session")) is not None:
        raise EnvironmentProblemError(problem)
