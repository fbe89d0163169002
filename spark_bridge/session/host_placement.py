"""The hosts of one session: started where its executors run, and started anew where their nodes have died.

A thread looks every ``LOOK_SECONDS`` at Spark's executors, at Ray's nodes and at the hosts. Whether a host lives, Ray
says: a process that dies is started again by Ray on the same node; with its node a host is gone for good.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from spark_bridge.host_actor.actor import host_id_of, start_host
from spark_bridge.host_actor.session_options import SessionOptions
from spark_bridge.session.placement import place_hosts

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Seconds between two looks. A look is one message to Ray for each host and one for all nodes."""
START_AGAIN_SECONDS = 10.0
"""A node on which a host could not be made gets another one after so long."""
START_SECONDS = 120.0
"""A session begins when its hosts answer, or fails after so long."""
STOP_SECONDS = 20.0
"""Hosts that are to end must stop within so long; they are killed then."""
DEAD = "DEAD"


@dataclass(frozen=True)
class StandingHost:
    """One host actor: its number in the session, the node on which it stands, and at what number its port is counted.

    ``ready`` is the answer to the first question.
    """

    host_id: str
    node_id: str
    port_number: int
    actor: Any
    ready: Any


class HostPlacement:
    """Starts the hosts of a session and keeps them where they are to stand. ``look`` is for one thread at a time.

    ``executors`` gives the cores of the executors by IP address. ``report`` is told what is not as it should be, at
    every look. ``hosts`` is replaced as a whole, for other threads to read. Numbers of hosts never come again, those of
    ports do: host i answers queries at ``query_port + i`` for the lowest i that no other host has.
    """

    def __init__(
        self,
        options: SessionOptions,
        token: str,
        executors: Callable[[], Mapping[str, int]],
        report: Callable[[Sequence[str]], None],
    ) -> None:
        self.hosts: tuple[StandingHost, ...] = ()
        self._options = options
        self._token = token
        self._executors = executors
        self._report = report
        self._started = 0
        self._not_before: dict[str, float] = {}
        self._problems: tuple[str, ...] = ()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="statestore-placement", daemon=True)

    def begin(self) -> None:
        """Start the hosts, wait until they answer, and look after them from now on.

        Raises ``ray.exceptions.RayError`` if a host cannot be started.
        """
        self.look()
        ray.get([host.ready for host in self.hosts], timeout=START_SECONDS)
        self._thread.start()

    def close(self) -> None:
        """End all hosts, and look after them no more."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        end_hosts(self.hosts)
        self.hosts = ()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception:  # the thread must go on
                log.warning("The hosts could not be looked after", exc_info=True)

    def look(self) -> None:
        """Let go of hosts that are gone for good, and start those that are missing."""
        nodes = {str(n["NodeID"]): str(n["NodeManagerAddress"]) for n in ray.nodes() if n["Alive"]}
        self._let_go(nodes)
        executors = self._executors()
        standing = Counter(host.node_id for host in self.hosts)
        if executors or not self.hosts:  # without executors nothing says where the hosts should be
            placement = place_hosts(executors, nodes, self._options.num_hosts, standing)
            self._start(placement.hosts, standing)
            self._tell((*placement.problems, *self._misplaced(executors, nodes)))

    def _let_go(self, nodes: Mapping[str, str]) -> None:
        gone = [host for host in self.hosts if host.node_id not in nodes or _is_dead(host.actor)]
        for host in gone:
            if host.node_id in nodes:
                self._not_before[host.node_id] = time.monotonic() + START_AGAIN_SECONDS
            log.warning("Host %s is gone for good with node %s", host.host_id, host.node_id)
            # Should Ray still wait for its node: nobody must start it any more.
            ray.kill(host.actor, no_restart=True)
        self.hosts = tuple(host for host in self.hosts if host not in gone)

    def _start(self, wanted: Mapping[str, int], standing: Mapping[str, int]) -> None:
        now = time.monotonic()
        self._not_before = {node: at for node, at in self._not_before.items() if at > now}
        missing = {node: count - standing.get(node, 0) for node, count in wanted.items()}
        # One on each node, then the second ones: numbers go round the nodes.
        for nth in range(max(missing.values(), default=0)):
            for node_id in sorted(missing):
                if nth < missing[node_id] and node_id not in self._not_before:
                    self._start_one(node_id)

    def _start_one(self, node_id: str) -> None:
        taken = {host.port_number for host in self.hosts}
        port_number = next(i for i in range(len(taken) + 1) if i not in taken)
        query_port = self._options.query_port and self._options.query_port + port_number
        number, self._started = self._started, self._started + 1
        actor = start_host(self._options, self._token, number, query_port, node_id)
        host_id = host_id_of(self._options, number)
        self.hosts = (*self.hosts, StandingHost(host_id, node_id, port_number, actor, actor.address.remote()))
        log.info("Started host %s on node %s", host_id, node_id)

    def _misplaced(self, executors: Mapping[str, int], nodes: Mapping[str, str]) -> list[str]:
        """Say which machines have hosts and no executors, though others have executors."""
        machines = sorted({ip for host in self.hosts if (ip := nodes.get(host.node_id)) and ip not in executors})
        if not machines or not set(nodes.values()) & executors.keys():
            return []
        return [f"Hosts stand on {', '.join(machines)}, where no executor runs (any more)."]

    def _tell(self, problems: tuple[str, ...]) -> None:
        if problems != self._problems:
            for problem in problems:
                log.warning("%s", problem)
            self._problems = problems
        self._report(problems)


def end_hosts(hosts: Sequence[StandingHost]) -> None:
    """Let hosts unload what they hold and end; kill those that do not within ``STOP_SECONDS``."""
    stopping = [host.actor.stop.remote() for host in hosts]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=STOP_SECONDS)
    for host in hosts:
        ray.kill(host.actor, no_restart=True)


def _is_dead(actor: Any) -> bool:
    """Return whether Ray has given an actor up: it could not be made, or its node is gone."""
    try:
        return bool(ray._private.state.actors(actor._actor_id.hex()).get("State") == DEAD)
    except RayError:
        return False  # Ray does not say now
