"""The state side of one driver session: the coordinator it uses and the hosts it has started."""

from __future__ import annotations

import heapq
import logging
import math
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from backends.background_loop import BackgroundLoop, failing_loops
from coordinator_actor.actor import ClusterStore, get_or_create_coordinator
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.exceptions import HostUnavailableError
from coordinator_actor.messages import other_version
from coordinator_actor.reference import RayCoordinatorPort
from spark_bridge.exceptions import STATESTORE_ERRORS, EnvironmentProblemError
from spark_bridge.host_actor import SessionOptions, host_files_dir, host_id_of, start_host
from spark_bridge.session.settings import Shutdown

# Computes the places of a session's hosts: on all machines that have executors.
#
# Plain functions over names and numbers; ``HostPlacement`` asks Spark and Ray, and starts the hosts.


@dataclass(frozen=True)
class Placement:
    """The number of hosts for each node, by node id, and warnings for people."""

    hosts: Mapping[str, int]
    problems: tuple[str, ...] = ()


def place_hosts(
    executors: Mapping[str, int],
    nodes: Mapping[str, str],
    num_hosts: int | None,
    standing: Mapping[str, int],
    going: Collection[str] = (),
) -> Placement:
    """Return the placement of a session's hosts.

    ``executors`` has the cores of the executors on each machine, by IP address; ``nodes`` the IP address of each node
    of Ray that can take hosts; ``standing`` how many hosts each node has now. Without ``num_hosts`` there is one
    host per core. Nodes at one address share its cores. If no node has an executor, all nodes have the same weight.
    ``going`` are the addresses of machines that are being drained. They take no hosts, and no other machine gets hosts
    for their cores.
    """
    sharing = Counter(nodes.values())
    cores = {node: executors[ip] / sharing[ip] for node, ip in nodes.items() if executors.get(ip)}
    problems = []
    without_node = sorted(ip for ip in executors if ip not in sharing)
    if drained := [ip for ip in without_node if ip in going]:
        problems.append(
            f"Executors run on {', '.join(drained)}, which are being drained: their hosts are elsewhere, and tasks "
            "there reach state over the network until the executors end."
        )
    if missing := [ip for ip in without_node if ip not in going]:
        problems.append(
            f"No node of Ray that can take hosts is at {', '.join(missing)}, where executors run: their tasks reach "
            "state over the network. Start Ray there."
        )
    total = max(1, num_hosts or sum(n for ip, n in executors.items() if ip in sharing or ip not in going))
    hosts = spread(total, cores or dict.fromkeys(nodes, 1.0), standing)
    if not executors:
        problems.append("There are no executors, so the hosts run on any nodes.")
    if without := sorted({nodes[node] for node in cores if not hosts.get(node)}):
        problems.append(
            f"The executors at {', '.join(without)} have no local host: num_hosts={num_hosts} is fewer than the "
            f"{len(cores)} machines with executors."
        )
    return Placement(hosts, tuple(problems))


def spread(total: int, weights: Mapping[str, float], standing: Mapping[str, int]) -> dict[str, int]:
    """Divide ``total`` hosts among nodes: one for each first, then in proportion to the weights (D'Hondt's method).

    Ties go to the node with more hosts now. If there are as many hosts as the weights add up to, they follow
    the weights exactly.
    """
    hosts: dict[str, int] = {}
    # The first host of each node has priority. After that, a node's priority falls with its number of hosts.
    queue = [(0.0, -weight, -standing.get(node, 0), node) for node, weight in weights.items()]
    heapq.heapify(queue)
    for _ in range(total if queue else 0):
        _, weight, stands, node = queue[0]
        hosts[node] = hosts.get(node, 0) + 1
        heapq.heapreplace(queue, ((hosts[node] + 1) / -weight, weight, stands, node))
    return hosts


# The hosts of one session: started on its executors' machines, ended on machines without executors, replaced if their
# node is lost.
#
# A thread looks every ``PLACEMENT_LOOK_SECONDS`` at Spark's executors, at Ray's nodes and at the hosts. Ray reports
# whether a host lives: Ray restarts a dead process on the same node, but a host whose node is lost does not return. A
# leaving host hands its partitions over first, and is ended when the coordinator reports that the host owns
# nothing any more.


log = logging.getLogger(__name__)

PLACEMENT_LOOK_SECONDS = 2.0
"""Seconds between two looks. A look is one message to Ray for each host and one for all nodes."""
START_AGAIN_SECONDS = 10.0
"""A node on which a host failed to start gets another one after this many seconds."""
SURPLUS_SECONDS = 30.0
"""A surplus host of a node ends after this many seconds, because a lost executor usually returns."""
START_SECONDS = 120.0
"""A session begins when its hosts answer, or fails after this many seconds."""
NOTICE_SECONDS = 10.0
"""After this many seconds a session that waits for its hosts or its coordinator logs a line."""
STOP_SECONDS = 20.0
"""Ending hosts must stop within this many seconds; after that they are killed."""
DEAD = "DEAD"


@dataclass(frozen=True)
class StandingHost:
    """One host actor: its number in the session, its node, and the number that counts for its port.

    ``ready`` is the answer to the first message.
    """

    host_id: str
    node_id: str
    port_number: int
    actor: Any
    ready: Any


class HostPlacement:
    """Starts the hosts of a session and keeps them in their places.

    One thread at a time looks, and holds ``_looking``. ``executors`` returns the cores of the executors by IP address,
    ``drained`` the ids of the drained nodes. ``report`` receives at every look the problems and the leaving hosts,
    and answers with those that may end. ``hosts`` is replaced as a whole, for other threads to read. Numbers
    of hosts are not reused. Port numbers are: a new host answers queries at ``query_port + i``, with the lowest i that
    no other host has.
    """

    def __init__(
        self,
        options: SessionOptions,
        token: str,
        executors: Callable[[], Mapping[str, int]],
        drained: Callable[[], Collection[str]],
        shutdown: Shutdown,
    ) -> None:
        self.hosts: tuple[StandingHost, ...] = ()
        self._options = options
        self._token = token
        self._num_hosts = options.num_hosts
        self.publish: Callable[[Sequence[str]], None] = lambda addresses: None
        """Publishes the hosts' addresses to running queries, whenever they have changed."""
        self._published: list[str] = []
        self._executors = executors
        self._drained = drained
        self.report: Callable[[Sequence[str], Sequence[str]], Collection[str]] = lambda problems, leaving: ()
        """Reports problems and leaving hosts to the coordinator, which may be starting before ``begin``."""
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
        """Start the hosts that are missing, wait until all answer, and supervise them from then on.

        Raises ``ray.exceptions.RayError`` if a host cannot be started.
        """
        self._await_hosts()  # those that were started while Spark was: a look would replace a failed one
        self.look()
        self._await_hosts()
        self._loop.start()

    def _await_hosts(self) -> None:
        starting = [host.ready for host in self.hosts]
        ready, left = ray.wait(starting, num_returns=len(starting), timeout=NOTICE_SECONDS) if starting else ([], [])
        if left:
            notice = (
                "Of %d hosts, %d answer; waiting at most %.0f s for the others. 'statestore logs' shows what they do"
            )
            log.warning(notice, len(starting), len(ready), START_SECONDS)
        ray.get(starting, timeout=START_SECONDS)

    def close(self) -> None:
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
        """Remove hosts that are lost with their nodes, start missing ones, and end those that may end."""
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
            if executors or not self.hosts:  # without executors the hosts have no right place
                drained = {nodes[node_id] for node_id in going if node_id in nodes}
                placement = place_hosts(executors, usable, self._num_hosts, standing, drained)
                wanted = placement.hosts
                problems += placement.problems
                self._start(wanted, standing)
                without = sorted({ip for h in self.hosts if (ip := nodes.get(h.node_id)) and ip not in executors})
                if without and set(nodes.values()) & executors.keys():
                    problems.append(f"Hosts run on {', '.join(without)}, which have no executors (any more).")
            leaving = self._leaving(wanted, usable)
            self._publish(leaving)
            self._end(leaving, problems)

    def _publish(self, leaving: Collection[str]) -> None:
        """Publish the hosts that stay to tasks of later batches. Only then do the others leave."""
        staying = [host for host in self.hosts if host.host_id not in leaving]
        ready, _ = ray.wait([h.ready for h in staying], num_returns=len(staying), timeout=0) if staying else ([], [])
        addresses = []
        for answer in ready:
            with suppress(RayError):  # it has died, which the next look finds
                addresses.append(str(ray.get(answer)))
        if addresses and addresses != self._published:
            self.publish(addresses)
            self._published = addresses

    def _leaving(self, wanted: Mapping[str, int], usable: Mapping[str, str]) -> list[str]:
        """Return the leaving hosts: all on drained nodes, and on other nodes those that have been surplus for long."""
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
        """Log the problems, report them and the leaving hosts, and end the hosts that own nothing any more."""
        if tuple(problems) != self._problems:
            for problem in problems:
                log.warning("%s", problem)
            self._problems = tuple(problems)
        released = set(self.report(problems, leaving)) & set(leaving)
        ended = [host for host in self.hosts if host.host_id in released]
        self.hosts = tuple(host for host in self.hosts if host not in ended)
        self._ending = [thread for thread in self._ending if thread.is_alive()]
        if ended:
            log.info("Hosts %s have handed over their partitions, and end", ", ".join(sorted(released)))
            thread = threading.Thread(target=end_hosts, args=(ended,), name="statestore-host-end", daemon=True)
            self._ending.append(thread)
            thread.start()

    def _let_go(self, nodes: Mapping[str, str]) -> None:
        gone = [host for host in self.hosts if host.node_id not in nodes or is_dead(host.actor)]
        for host in gone:
            if host.node_id in nodes:
                self._not_before[host.node_id] = time.monotonic() + START_AGAIN_SECONDS
            log.log(self._shutdown.log_level, "Host %s is lost with node %s", host.host_id, host.node_id)
            # Ray may still wait for the node; prevent it from starting the host again.
            ray.kill(host.actor, no_restart=True)
        self.hosts = tuple(host for host in self.hosts if host not in gone)

    def _start(self, wanted: Mapping[str, int], standing: Mapping[str, int]) -> None:
        now = time.monotonic()
        self._not_before = {node: at for node, at in self._not_before.items() if at > now}
        missing = {node: count - standing.get(node, 0) for node, count in wanted.items()}
        # Start one host on each node, then a second one on each, and so on.
        for nth in range(max(missing.values(), default=0)):
            for node_id in sorted(missing):
                if nth < missing[node_id] and node_id not in self._not_before:
                    self._start_one(node_id)

    def _start_one(self, node_id: str) -> None:
        numbers = {host.port_number for host in self.hosts}
        port_number = next(i for i in range(len(numbers) + 1) if i not in numbers)
        query_port = self._options.query_port and self._options.query_port + port_number
        number, self._started = self._started, self._started + 1
        actor = start_host(self._options, self._token, number, query_port, node_id)
        host_id = host_id_of(self._options, number)
        self.hosts = (*self.hosts, StandingHost(host_id, node_id, port_number, actor, actor.address.remote()))
        log.info("Started host %s on node %s", host_id, node_id)


def end_hosts(hosts: Sequence[StandingHost]) -> None:
    """Tell hosts to unload their partitions and end; kill those that do not within ``STOP_SECONDS``."""
    try:
        if stopping := [host.actor.stop.remote() for host in hosts]:
            ray.wait(stopping, num_returns=len(stopping), timeout=STOP_SECONDS)
    finally:  # no host may stay, even if Ray fails
        for host in hosts:
            ray.kill(host.actor, no_restart=True)


def is_dead(actor: Any) -> bool:
    """Return whether Ray has given an actor up: it could not be created, or its node is lost."""
    try:
        return bool(ray._private.state.actors(actor._actor_id.hex()).get("State") == DEAD)
    except RayError:
        return False  # Ray does not say now


REPORT_SECONDS = 2.0
LEASE_SECONDS = 10.0
"""Timeout of a message that renews leases, in seconds: short, so that the next one can be sent in time."""


class StateCluster:
    """Starts the hosts of one session in a Ray cluster, and the coordinator if no other session has started it.

    ``executors`` returns the cores of the executors on each machine now, by IP address: hosts run on these machines.
    Nothing waits here: the actors start side by side, the hosts as soon as ``executors`` has machines. ``begin`` waits.
    Raises ``InvalidRequestError`` if no node can take the coordinator.
    """

    def __init__(self, options: SessionOptions, executors: Callable[[], Mapping[str, int]], shutdown: Shutdown) -> None:
        self.options = options
        self.shutdown = shutdown
        self.session_id = options.session_id
        self.conf = options.conf
        self.stopping: list[str] = []
        """The ids of runs that stop when the savepoint that is being made of them is done, one for each request.

        A second request is refused, and must not end the first one.
        """
        self._has_answered = False
        self._is_stopped = False
        self._is_first = not _has_coordinator(options)
        self._get_coordinator()
        self.coordinator = RayCoordinatorPort(options.namespace, options.coordinator_name, options.recovery_timeout)
        self.leases = RayCoordinatorPort(
            options.namespace, options.coordinator_name, min(LEASE_SECONDS, options.recovery_timeout)
        )
        """Sends the messages that renew leases, with a timeout far below a lease."""
        if not self._is_first:  # another session's: no host may start if it is of another release
            self._require_coordinator()
        store = ClusterStore(options.namespace, options.coordinator_name)
        # The coordinator takes it from the same store, so the hosts need not wait for the coordinator.
        self.token = store.secret(secrets.token_hex(32))
        session_dir = Path(ray._private.worker._global_node.get_session_dir_path())
        self.host_files = str(host_files_dir(session_dir, options))
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
        self.placement = HostPlacement(options, self.token, executors, store.drained, shutdown)
        try:
            if executors():
                self.placement.look()
        except BaseException:
            self.give_up()
            raise

    def begin(self) -> None:
        """Wait until the coordinator and the hosts answer, and supervise the hosts from then on.

        Ends all that was started if that fails. Raises ``EnvironmentProblemError`` if the existing coordinator is of a
        release with other messages, ``HostUnavailableError`` if it does not answer, and ``ray.exceptions.RayError`` if
        a host cannot be started.
        """
        try:
            # Since the start, the coordinator may have ended: with another session, or because nothing needed it.
            self._get_coordinator()
            self._require_coordinator()
            self.placement.report = self._report_placement
            self.placement.begin()
            self._reporting.start()
        except BaseException:
            self.give_up()
            raise

    def _get_coordinator(self) -> None:
        options = self.options
        get_or_create_coordinator(options.namespace, options.coordinator_name, options.coordinator_conf)

    def _require_coordinator(self) -> None:
        """Wait for the coordinator's answer. Raises ``EnvironmentProblemError`` if it is of another release."""
        require_same_messages(self.coordinator)
        self._has_answered = True

    @property
    def hosts(self) -> list[Any]:
        return [host.actor for host in self.placement.hosts]

    def _report_placement(self, problems: Sequence[str], leaving: Sequence[str]) -> tuple[str, ...]:
        try:
            return self.leases.place_session(self.session_id, tuple(problems), tuple(leaving))
        except STATESTORE_ERRORS as error:
            log.log(self.shutdown.log_level, "Could not report the placement of hosts to the coordinator: %s", error)
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
        if not (answers := [getattr(host, method).remote() for host in self.hosts]):
            return []
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=5)
        replies = []
        for answer in ready:
            try:
                replies.append(ray.get(answer))
            except RayError as error:
                host = answers.index(answer)
                log.log(self.shutdown.log_level, "State store host %d does not answer now: %s", host, error)
        return replies

    @staticmethod
    def machines() -> list[str]:
        """Return the IP addresses of the machines that are in the Ray cluster now."""
        return sorted({str(n["NodeManagerAddress"]) for n in ray.nodes() if n["Alive"]})

    def batch_committed(self, run_id: str, batch_id: int) -> None:
        if self.coordinator.batch_committed(run_id, batch_id, by_driver=True):
            try:
                for host in self.hosts:
                    host.on_progress.remote()
            except (RayError, AttributeError) as error:
                if not self.shutdown.is_over:  # Ray raises either once the program has called ray.shutdown()
                    raise
                raise HostUnavailableError(f"The hosts did not get batch {batch_id}: Ray was shut down.") from error

    def describe_hosts(self) -> list[dict[str, Any]]:
        """Return what each host says of itself. Raises ``HostUnavailableError`` if one does not answer now."""
        try:
            described: list[dict[str, Any]] = ray.get([h.describe.remote() for h in self.hosts], timeout=30)
        except RayTaskError:
            raise  # an error in the host's code
        except RayError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise HostUnavailableError(
                f"A host did not answer: {reason}. Ray starts hosts that have ended again ('statestore hosts')."
            ) from error
        return described

    def give_up(self) -> None:
        """End what was started, after an error at the start, which must reach the user: a further one is logged."""
        try:
            self.stop()
        except (*STATESTORE_ERRORS, RayError, AttributeError, ValueError) as error:
            # AttributeError: it is of another release; ValueError: it has just ended.
            log.warning("The coordinator was not told that this session has failed to start: %s", error)
            if self._is_first and not self._has_answered and _has_coordinator(self.options):
                self._kill_coordinator()  # it cannot start, and Ray would try for ever

    def stop(self) -> None:
        """Stop this session's hosts, and the coordinator if no other session uses it.

        A program that has called ``ray.shutdown()`` reaches neither: Ray has ended the hosts, and the coordinator
        forgets the session once its lease is over. A second call does nothing.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        self._reporting.close()
        # A coordinator that has never answered is not waited for as long as one that is being restarted.
        coordinator = self.coordinator if self._has_answered else self.leases
        try:
            is_alone = not self.shutdown.is_over and not coordinator.unregister_session(self.session_id)
        finally:  # no host may stay, even if the coordinator does not answer
            self.coordinator.close()
            self.leases.close()
            self.placement.close()
        if is_alone:
            self._kill_coordinator()

    def _kill_coordinator(self) -> None:
        ray.kill(ray.get_actor(self.options.coordinator_name, namespace=self.options.namespace), no_restart=True)


def _has_coordinator(options: SessionOptions) -> bool:
    try:
        ray.get_actor(options.coordinator_name, namespace=options.namespace)
    except ValueError:
        return False
    return True


def require_same_messages(coordinator: CoordinatorPort) -> None:
    """Raise ``EnvironmentProblemError`` unless the coordinator speaks this release's messages."""
    try:
        theirs: int | None = coordinator.wire_version()
    except AttributeError:  # the actor is of a release without that message
        theirs = None
    if (problem := other_version("The coordinator that runs in this namespace", theirs, "this session")) is not None:
        raise EnvironmentProblemError(problem)
