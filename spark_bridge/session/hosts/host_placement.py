"""The hosts of one session: started where its executors run, ended where none do any more, replaced with their nodes.

A thread looks every ``PLACEMENT_LOOK_SECONDS`` at Spark's executors, at Ray's nodes and at the hosts. Ray says
whether a host lives: Ray starts a process that has died again on the same node; with its node a host is gone for good.
A host that is to go hands its partitions over first, and is ended when the coordinator says that the host owns nothing
any more.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from backends.background_loop import BackgroundLoop
from spark_bridge.host_actor.actor import host_id_of, start_host
from spark_bridge.host_actor.session_options import SessionOptions
from spark_bridge.session.hosts.placement import place_hosts
from spark_bridge.session.shutdown import Shutdown

log = logging.getLogger(__name__)

PLACEMENT_LOOK_SECONDS = 2.0
"""Seconds between two looks. A look is one message to Ray for each host and one for all nodes."""
START_AGAIN_SECONDS = 10.0
"""A node on which a host could not be made gets another one after this many seconds."""
SURPLUS_SECONDS = 30.0
"""A host more than its node should have ends after this many seconds: an executor that is lost mostly comes back."""
START_SECONDS = 120.0
"""A session begins when its hosts answer, or fails after this many seconds."""
STOP_SECONDS = 20.0
"""Hosts that are to end must stop within this many seconds; they are killed then."""
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
    """Starts the hosts of a session and keeps them where they are to stand.

    One thread at a time looks, and holds ``_looking``. ``executors`` gives the cores of the executors by IP address,
    ``drained`` the ids of the nodes that are to go. ``report`` is told at every look what is not as it should be and
    which hosts are to go, and answers with those that may end. ``hosts`` is replaced as a whole, for other threads to
    read. Numbers of hosts never come again, those of ports do: host i answers queries at ``query_port + i`` for the
    lowest i that no other host has.
    """

    def __init__(
        self,
        options: SessionOptions,
        token: str,
        executors: Callable[[], Mapping[str, int]],
        drained: Callable[[], Collection[str]],
        report: Callable[[Sequence[str], Sequence[str]], Collection[str]],
        shutdown: Shutdown,
    ) -> None:
        self.hosts: tuple[StandingHost, ...] = ()
        self._options = options
        self._token = token
        self._num_hosts = options.num_hosts
        self.publish: Callable[[Sequence[str]], None] = lambda addresses: None
        """Tells running queries where to ask for owners, whenever that has changed."""
        self._published: list[str] = []
        self._executors = executors
        self._drained = drained
        self._report = report
        self._shutdown = shutdown
        self._surplus_since: dict[str, float] = {}
        self._looking = threading.Lock()
        self._ending: list[threading.Thread] = []
        self._started = 0
        self._not_before: dict[str, float] = {}
        self._problems: tuple[str, ...] = ()
        self._loop = BackgroundLoop(
            self.look,
            PLACEMENT_LOOK_SECONDS,
            name="statestore-placement",
            what="look after the hosts: those that are lost with their machine are not replaced",
            remedy="See whether Ray ('ray status') and the coordinator answer, and look at the log of the driver.",
            is_ending=lambda: shutdown.is_ending,
        )

    def begin(self) -> None:
        """Start the hosts, wait until they answer, and look after them from now on.

        Raises ``ray.exceptions.RayError`` if a host cannot be started.
        """
        self.look()
        ray.get([host.ready for host in self.hosts], timeout=START_SECONDS)
        self._loop.start()

    def close(self) -> None:
        """End all hosts, and look after them no more."""
        self._loop.close(timeout=None)
        for ending in self._ending:
            ending.join()
        if not self._shutdown.is_over:
            end_hosts(self.hosts)
        self.hosts = ()

    def scale(self, num_hosts: int | None) -> None:
        """Have ``num_hosts`` hosts from now on, None for one per executor core. They come and go one by one."""
        with self._looking:
            self._num_hosts = num_hosts
            self._surplus_since = dict.fromkeys((host.host_id for host in self.hosts), -math.inf)
        self.look()

    def look(self) -> None:
        """Let go of hosts that are gone for good, start those that are missing, and end those that may end."""
        if self._shutdown.is_over:
            return
        with self._looking:
            nodes = {str(n["NodeID"]): str(n["NodeManagerAddress"]) for n in ray.nodes() if n["Alive"]}
            self._let_go(nodes)
            going = {*self._drained(), *ray._private.state.state.get_draining_nodes()}
            usable = {node_id: ip for node_id, ip in nodes.items() if node_id not in going}
            executors = self._executors()
            standing = Counter(host.node_id for host in self.hosts if host.node_id in usable)
            problems: list[str] = []
            wanted: Mapping[str, int] = standing
            if executors or not self.hosts:  # without executors nothing says where the hosts should be
                placement = place_hosts(
                    executors, usable, self._num_hosts, standing, {nodes[n] for n in going if n in nodes}
                )
                wanted = placement.hosts
                problems += placement.problems
                self._start(wanted, standing)
                problems += self._misplaced(executors, nodes)
            leaving = self._leaving(wanted, usable)
            self._publish(leaving)
            self._end(leaving, problems)

    def _publish(self, leaving: Collection[str]) -> None:
        """Let tasks of later batches ask hosts that stay. Those that are to go are told to only then."""
        staying = [host for host in self.hosts if host.host_id not in leaving]
        there, _ = ray.wait([h.ready for h in staying], num_returns=len(staying), timeout=0) if staying else ([], [])
        addresses = []
        for answer in there:
            with suppress(RayError):  # it is gone, which the next look finds
                addresses.append(str(ray.get(answer)))
        if addresses and addresses != self._published:
            self.publish(addresses)
            self._published = addresses

    def _leaving(self, wanted: Mapping[str, int], usable: Mapping[str, str]) -> list[str]:
        """Return the hosts that are to go: all on nodes that are, and on the others what was too many for long."""
        now = time.monotonic()
        leaving, surplus = [], []
        left = dict(wanted)
        for host in self.hosts:  # the oldest stay
            if host.node_id not in usable:
                leaving.append(host.host_id)
            elif left.get(host.node_id, 0) > 0:
                left[host.node_id] -= 1
            else:
                surplus.append(host.host_id)
        self._surplus_since = {host_id: self._surplus_since.get(host_id, now) for host_id in surplus}
        return leaving + [h for h, since in self._surplus_since.items() if now - since >= SURPLUS_SECONDS]

    def _end(self, leaving: Sequence[str], problems: Sequence[str]) -> None:
        """Say what is wrong and who is to go, and end those that own nothing any more."""
        if tuple(problems) != self._problems:
            for problem in problems:
                log.warning("%s", problem)
            self._problems = tuple(problems)
        released = set(self._report(problems, leaving)) & set(leaving)
        ended = [host for host in self.hosts if host.host_id in released]
        self.hosts = tuple(host for host in self.hosts if host not in ended)
        self._ending = [thread for thread in self._ending if thread.is_alive()]
        if ended:
            log.info("Hosts %s have handed over what they had, and end", ", ".join(sorted(released)))
            thread = threading.Thread(target=end_hosts, args=(ended,), name="statestore-host-end", daemon=True)
            self._ending.append(thread)
            thread.start()

    def _let_go(self, nodes: Mapping[str, str]) -> None:
        gone = [host for host in self.hosts if host.node_id not in nodes or is_dead(host.actor)]
        for host in gone:
            if host.node_id in nodes:
                self._not_before[host.node_id] = time.monotonic() + START_AGAIN_SECONDS
            level = self._shutdown.log_level
            log.log(level, "Host %s is gone for good with node %s", host.host_id, host.node_id)
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


def end_hosts(hosts: Sequence[StandingHost]) -> None:
    """Let hosts unload what they hold and end; kill those that do not within ``STOP_SECONDS``."""
    try:
        stopping = [host.actor.stop.remote() for host in hosts]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=STOP_SECONDS)
    finally:  # whatever Ray says to that, no host may stay
        for host in hosts:
            ray.kill(host.actor, no_restart=True)


def is_dead(actor: Any) -> bool:
    """Return whether Ray has given an actor up: it could not be made, or its node is gone."""
    try:
        return bool(ray._private.state.actors(actor._actor_id.hex()).get("State") == DEAD)
    except RayError:
        return False  # Ray does not say now
