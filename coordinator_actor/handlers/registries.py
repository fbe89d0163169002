"""Tables that all handlers share: the hosts, runs and instances that a coordinator knows, and their lock."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from backends.background_loop import FailingLoop
from backends.conf import StateStoreProviderId
from backends.host_memory import BoundedDict
from coordinator_actor import exceptions
from coordinator_actor.checkpoints.pending_checkpoint import TaskKey
from coordinator_actor.messages import HandOver, HostInfo, QueryRegistration
from coordinator_actor.run.query_state import QueryState
from coordinator_actor.savepoints.savepoint_coordinator import RunSavepoints

# Spark's active state store instances: which executor has which provider loaded.


log = logging.getLogger(__name__)

Executor = tuple[str, str]
"""(host, executor id)"""


class InstanceRegistry:
    """The providers that each executor has loaded, and the messages about them (Spark: ``StateStoreCoordinator``).

    The debug messages are Spark's. Instances are kept by run, because the instances of a run are removed together and
    other runs may have many. ``lock`` guards everything here; see ``Registries``.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._runs: dict[str, dict[StateStoreProviderId, Executor]] = {}
        self._executors: dict[Executor, Executor] = {}

    def report_active_instance(
        self,
        provider_id: StateStoreProviderId,
        host: str,
        executor_id: str,
        other_provider_ids: Sequence[StateStoreProviderId] = (),
    ) -> list[StateStoreProviderId]:
        # As in Spark, an instance that no executor has reported stays: a restarted coordinator knows none at first.
        with self._lock:
            # One tuple per executor, not one per instance.
            executor = self._executors.setdefault((host, executor_id), (host, executor_id))
            self._runs.setdefault(provider_id.query_run_id, {})[provider_id] = executor
            log.debug("Reported state store %s is active at %s", provider_id, executor_id)
            return [o for o in other_provider_ids if self._executor_of(o) not in (None, executor)]

    def verify_if_instance_active(self, provider_id: StateStoreProviderId, executor_id: str) -> bool:
        with self._lock:
            executor = self._executor_of(provider_id)
        is_active = executor is not None and executor[1] == executor_id
        log.debug("Verified that state store %s is active: %s", provider_id, is_active)
        return is_active

    def get_location(self, provider_id: StateStoreProviderId) -> str | None:
        return self.get_locations((provider_id,))[0]

    def get_locations(self, provider_ids: Sequence[StateStoreProviderId]) -> list[str | None]:
        with self._lock:
            executors = [self._executor_of(provider_id) for provider_id in provider_ids]
        locations = [None if executor is None else f"executor_{executor[0]}_{executor[1]}" for executor in executors]
        if log.isEnabledFor(logging.DEBUG):
            for provider_id, location in zip(provider_ids, locations, strict=True):
                log.debug("Got location of the state store %s: %s", provider_id, location)
        return locations

    def deactivate(self, run_id: str) -> None:
        with self._lock:
            instances = self._runs.pop(run_id, {})
            if not self._runs:
                self._executors.clear()
        if log.isEnabledFor(logging.DEBUG):
            ids = ", ".join(map(str, instances))
            log.debug("Deactivating instances related to checkpoint location %s: %s", run_id, ids)

    def describe_instances(self) -> list[dict[str, str]]:
        """Return all active instances, for people."""
        with self._lock:
            runs = [(p, h, e) for run in self._runs.values() for p, (h, e) in run.items()]
        return [{"id": str(p), "host": h, "executor_id": e} for p, h, e in runs]

    def _executor_of(self, provider_id: StateStoreProviderId) -> Executor | None:
        run = self._runs.get(provider_id.query_run_id)
        return None if run is None else run.get(provider_id)


# The runs that a coordinator knows: registered, over, and ended ones, with their savepoints.


REMEMBERED_ENTRIES = 1000
LONGEST_FAILURE = 600
LEASE_OVER = "its driver sent no more heartbeats"
STOPPED = "its query ended"


@dataclass(frozen=True)
class OverRun:
    """A run that is over, for clients that still ask for its state, and for people.

    ``at`` is in seconds since 1970: when it ended, or when its driver sent the last heartbeat. ``was_running``: its
    query had not ended, as far as its driver has reported.
    """

    registration: QueryRegistration
    at: float
    why: str
    was_running: bool = False

    def has(self, operator: str, query: str | None) -> bool:
        """Return whether the run had that operator, and that name, query id, run id or state location."""
        of = self.registration
        return (query is None or of.is_named(query)) and any(o.name == operator for o in of.operators)


class RunRegistry:
    """The runs that a coordinator knows.

    ``by_id`` has the registered runs. A run is *over* if it is to be unloaded: permanently, or (``LEASE_OVER``) until
    its driver registers it again. The last ``REMEMBERED_ENTRIES`` such runs are remembered, and as many savepoint
    requests of ended runs. ``lock`` guards everything here; see ``Registries``.
    """

    def __init__(self, lock: threading.RLock, instances: InstanceRegistry, clock: Callable[[], float]) -> None:
        self._lock = lock
        self._instances = instances
        self._clock = clock
        self.by_id: dict[str, QueryState] = {}
        self._expected: Counter[str] = Counter()
        """Run id to the number of hosts' reports about the run that are being processed."""
        self._changed = threading.Condition(lock)
        self._savepoints: dict[str, RunSavepoints] = {}
        self._over: BoundedDict[str, str] = BoundedDict(REMEMBERED_ENTRIES)
        self._ended: BoundedDict[str, OverRun] = BoundedDict(REMEMBERED_ENTRIES)
        self._ended_savepoints: BoundedDict[str, Future[str]] = BoundedDict(REMEMBERED_ENTRIES)
        self._failures: BoundedDict[str, str] = BoundedDict(REMEMBERED_ENTRIES)

    # -- finding -------------------------------------------------------------------------------

    def get(self, run_id: str) -> QueryState:
        """Return a registered run. Raises ``RetiredRunError`` if it is permanently over, else ``UnknownRunError``."""
        with self._lock:
            run = self.by_id.get(run_id)
            if run is None and self.is_over_for_good(run_id):
                raise exceptions.RetiredRunError(f"Run {run_id} is over ({self._over[run_id]}); start the query again.")
        if run is None:
            raise exceptions.UnknownRunError(
                f"Run {run_id} is not registered with this coordinator; it must be registered again."
            )
        return run

    def awaited(self, run_id: str) -> QueryState:
        """Return a registered run, as ``get`` does. If a host has reported the run, wait until storage is read for it.

        Not for messages that must not wait for storage.
        """
        with self._changed:
            self._changed.wait_for(lambda: run_id in self.by_id or run_id not in self._expected)
        return self.get(run_id)

    def expect(self, run_id: str) -> None:
        """Record that the report of a host about a run is being processed."""
        with self._lock:
            self._expected[run_id] += 1

    def expect_no_more(self, run_id: str) -> None:
        """Record that the report of a host about a run was processed, or failed."""
        with self._changed:
            self._expected[run_id] -= 1
            if not self._expected[run_id]:
                del self._expected[run_id]
            self._changed.notify_all()

    def find(self, run_id: str) -> QueryState | None:
        with self._lock:
            return self.by_id.get(run_id)

    def current(self) -> list[QueryState]:
        """Return the registered runs whose queries run."""
        with self._lock:
            return [run for run in self.by_id.values() if run.lifetime.is_current]

    def served(self) -> list[QueryState]:
        """Return the registered runs that hosts answer from: those whose queries run, and of ended ones the last.

        If a query runs again, its earlier runs are replaced.
        """
        with self._lock:
            return [run for run in self.by_id.values() if run.lifetime.is_served]

    def of_session(self, session_id: str) -> list[QueryState]:
        with self._lock:
            return [run for run in self.by_id.values() if run.registration.session_id == session_id]

    def running(self, query: str, *, or_ended: bool = False) -> QueryState:
        """Return the running query of that name, query id or run id.

        ``or_ended``: if none runs, the ended one that is still read.

        Raises ``UnknownQueryError`` if there is none, or more than one.
        """
        running = self.current()
        named = [run for run in running if run.registration.is_named(query)]
        if or_ended and not named:
            named = [run for run in self.served() if run.registration.is_named(query)]
        if len(named) != 1:
            exist = ", ".join(run.registration.title for run in running) or "none"
            how_many = "Several running queries are" if named else "No running query with state is"
            raise exceptions.UnknownQueryError(
                f"{how_many} named {query!r}; running: {exist}. Give the query id or the run id."
            )
        return named[0]

    # -- runs that are over --------------------------------------------------------------------

    def is_over(self, run_id: str) -> bool:
        """Return whether the run is over, permanently or until its driver registers it again."""
        with self._lock:
            return run_id in self._over

    def is_over_for_good(self, run_id: str) -> bool:
        with self._lock:
            return self._over.get(run_id, LEASE_OVER) != LEASE_OVER

    def remember_over(self, run_id: str, why: str) -> None:
        with self._lock:
            self._over[run_id] = why

    def ended(self) -> list[OverRun]:
        with self._lock:
            return list(self._ended.values())

    def lost(self) -> list[OverRun]:
        """Return the runs whose drivers were lost while their queries ran, and that were not started again since."""
        with self._lock:
            registered = {run.registration.state_location for run in self.by_id.values()}
            last_runs = {e.registration.state_location: e for e in self._ended.values()}  # of a location, the last one
        return [e for at, e in last_runs.items() if e.why == LEASE_OVER and e.was_running and at not in registered]

    def at_location(self, state_location: str) -> list[QueryState]:
        """Return the registered runs whose state is at ``state_location``."""
        with self._lock:
            return [run for run in self.by_id.values() if run.registration.state_location == state_location]

    # -- changing ------------------------------------------------------------------------------

    def register_run(self, run: QueryState, savepoints: RunSavepoints, *, was_over: bool) -> None:
        """Register a run that has claimed its state. Runs on the same state are replaced, and end.

        ``was_over``: the run was permanently over when its registration began. Raises ``RetiredRunError`` if the run
        was stopped since: a host had reported it, and its storage was slower than its driver.
        """
        run_id = run.run_id
        with self._lock:
            if not was_over and self.is_over_for_good(run_id):
                raise exceptions.RetiredRunError(
                    f"Run {run_id} is over ({self._over[run_id]}); it ended while it was registered."
                )
            replaced = self._replace(run)
            self._savepoints[run_id] = savepoints
            self._over.pop(run_id, None)
            self._ended.pop(run_id, None)
        self._end_replaced(replaced, run_id)

    def remove(self, run_id: str) -> None:
        with self._lock:
            self.by_id.pop(run_id, None)

    def forget(self, run: QueryState, why: str) -> None:
        """Forget a registered run until its driver registers it again. Not to be called under the lock."""
        self.remove(run.run_id)
        self.end(run, why)
        self.remember_over(run.run_id, LEASE_OVER)

    def register_ended_run(self, run: QueryState) -> None:
        """Register the last run on a state, whose query has ended, so that it can be read.

        Earlier ones are replaced, and end.

        Raises ``RetiredRunError`` if a query has begun to run there since.
        """
        with self._lock:
            others = self.at_location(run.registration.state_location)
            running = next((other for other in others if other.lifetime.is_current), None)
            if running is not None:
                raise exceptions.RetiredRunError(f"Run {run.run_id} has been replaced by run {running.run_id}.")
            replaced = self._replace(run)
        self._end_replaced(replaced, run.run_id)

    def _replace(self, run: QueryState) -> list[QueryState]:
        """Register a run in place of those on its state, and return them. The lock is held."""
        replaced = self.at_location(run.registration.state_location)
        for other in replaced:
            other.lifetime.retired_by = run.run_id
            if other.lifetime.stopped_at is not None:  # its driver has already reported its end
                del self.by_id[other.run_id]
                self._over[other.run_id] = f"replaced by {run.run_id}"
        self.by_id[run.run_id] = run
        self._changed.notify_all()
        return replaced

    def _end_replaced(self, replaced: list[QueryState], run_id: str) -> None:
        for other in replaced:
            self.end(other, f"run {run_id} has replaced it")

    def stop(self, run: QueryState) -> None:
        """Record that the query of a run has ended: nothing is active or pending; its last version stays readable."""
        with self._lock:
            run.stop(self._clock())
        self._end_work(run, STOPPED)

    def end(self, run: QueryState, why: str) -> None:
        """End a run: nothing of it is active or pending any more, and it can no longer be read."""
        was_running = run.lifetime.is_current
        run.lifetime.ended = True
        with self._lock:
            at = run.lifetime.driver_seen if why == LEASE_OVER else self._clock()
            self._ended[run.run_id] = OverRun(run.registration, at, why, was_running)
        self._end_work(run, why)

    def note_failure(self, run_id: str, failure: str) -> None:
        """Record the error that ended the query of a run; "" if it has ended without one."""
        with self._lock:
            if failure:
                self._failures[run_id] = failure[:LONGEST_FAILURE]

    def failure(self, run_id: str) -> str:
        """Return the error that ended the query of a run, or ""."""
        with self._lock:
            return self._failures.get(run_id, "")

    def _end_work(self, run: QueryState, why: str) -> None:
        self._instances.deactivate(run.run_id)
        run.machine.checkpoints.cancel_all("the query has ended")
        with self._lock:
            savepoints = self._savepoints.pop(run.run_id, None)
            if savepoints is not None:
                # A savepoint that is being written may still be finished.
                for request_id, request in savepoints.requests.items():
                    self._ended_savepoints[request_id] = request
        if savepoints is not None:
            savepoints.shutdown(why)

    # -- savepoints ----------------------------------------------------------------------------

    def savepoints_of(self, run_id: str) -> RunSavepoints | None:
        """Return the savepoints of a run; None if the run is over or unknown."""
        with self._lock:
            return self._savepoints.get(run_id)

    def savepoint_request(self, request_id: str) -> Future[str] | None:
        with self._lock:
            requests = [savepoints.requests for savepoints in self._savepoints.values()]
            return next((r[request_id] for r in (*requests, self._ended_savepoints) if request_id in r), None)


# The live hosts and their leases.


class Loss(Enum):
    """Why the lease of a host has ended; the value says so to people.

    The coordinator's metric ``statestore_lost_hosts_total`` has the names in lower case.
    """

    REFUSED = "its machine answers, and its process does not listen any more"
    SILENT = "its machine does not answer, and its heartbeats have stopped"
    NODE_DEAD = "the cluster has declared its node dead"
    NO_HEARTBEAT = "its heartbeats have stopped"


REMEMBERED_HOSTS = 10_000
"""The newest incarnation is remembered for at most this many hosts, even after their leases are over."""


@dataclass
class HostLease:
    """One host, and the time of its last heartbeat, in seconds by the coordinator's clock.

    ``reports`` has the runs whose report by the host is not processed yet, and whether it is being processed.
    ``partitions`` are those that it held when it registered, by run and operator. ``hand_over`` is the report of its
    last heartbeat about moves; it names as ``giving`` only the runs that the answer has named as well.

    ``is_reachable``: this incarnation has taken a connection from the coordinator. ``probed_at`` is the time of the
    last attempt.
    """

    info: HostInfo
    seen: float
    reports: dict[str, bool] = field(default_factory=dict)
    partitions: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    hand_over: HandOver = field(default_factory=HandOver)
    is_reachable: bool = False
    probed_at: float = -math.inf


class HostRegistry:
    """The live hosts. A host that registers with a new incarnation replaces the old incarnation.

    The last message does not decide which incarnation is newer: a machine that was cut off may return with an
    incarnation that Ray has since replaced (fencing, by the number of the actor's restart).

    ``leases`` are by host id. ``generation`` counts the changes of the set of hosts, of a host's own data, and of the
    leaving hosts: a result of one generation holds until the next one.
    """

    def __init__(self) -> None:
        self.leases: dict[str, HostLease] = {}
        self.generation = 0
        self.losses: Counter[Loss] = Counter()
        """How many leases have ended, by the reason."""
        self._newest: BoundedDict[str, tuple[int, str]] = BoundedDict(REMEMBERED_HOSTS)
        self._leaving: dict[str, frozenset[str]] = {}
        self._nodes: dict[str, Mapping[str, str]] = {}
        self._nodes_generation = 0

    def register(
        self, info: HostInfo, now: float, partitions: Mapping[str, Mapping[str, Sequence[int]]] = MappingProxyType({})
    ) -> None:
        """Add a host that holds these partitions, or replace its incarnation.

        Raises ``ReplacedHostError`` for an incarnation that is older than one that was here.
        """
        restart, incarnation = self._newest.get(info.host_id, (info.restart, info.incarnation))
        if info.restart < restart:
            raise exceptions.ReplacedHostError(
                f"Incarnation {info.incarnation} of host {info.host_id} (restart {info.restart}, at {info.address}) "
                f"was replaced by incarnation {incarnation} (restart {restart}): it must end itself."
            )
        self._newest[info.host_id] = (info.restart, info.incarnation)
        earlier, lease = self.leases.get(info.host_id), HostLease(info, now, partitions=partitions)
        if earlier is not None and earlier.info == info:
            lease.is_reachable, lease.probed_at = earlier.is_reachable, earlier.probed_at
        else:
            self.generation += 1
        self.leases[info.host_id] = lease

    def reported(self, run_id: str) -> list[tuple[TaskKey, str]]:
        """Return the partitions of a run that live hosts held when they registered, each with its host."""
        return [
            ((operator, partition), host_id)
            for host_id, lease in self.leases.items()
            for operator, partitions in lease.partitions.get(run_id, {}).items()
            for partition in partitions
        ]

    def find(self, host_id: str, incarnation: str) -> HostLease | None:
        """Return the lease of exactly this incarnation; None if it is not registered."""
        lease = self.leases.get(host_id)
        return None if lease is None or lease.info.incarnation != incarnation else lease

    def renew(self, host_id: str, incarnation: str, now: float) -> HostLease | None:
        """Renew and return a lease; None if this incarnation is not registered."""
        lease = self.find(host_id, incarnation)
        if lease is not None:
            lease.seen = now
        return lease

    def note_report(self, info: HostInfo, run_id: str, *, is_processed: bool = False, is_running: bool = False) -> None:
        """Record how far the report of a host about a run is. Heartbeats ask for the report until it is processed."""
        lease = self.find(info.host_id, info.incarnation)
        if lease is not None and is_processed:
            lease.reports.pop(run_id, None)
        elif lease is not None:
            lease.reports[run_id] = is_running

    def require(self, host_id: str, incarnation: str) -> HostLease:
        """Return the lease of exactly this incarnation. Raises ``UnknownHostError`` if it is not registered."""
        lease = self.find(host_id, incarnation)
        if lease is None:
            raise exceptions.UnknownHostError(
                f"Host {host_id} (incarnation {incarnation}) is not registered; register it again."
            )
        return lease

    def nodes_of_session(self, session_id: str) -> Mapping[str, str]:
        """Return the node of each live host of a session, in the order of host ids. The result must not be changed."""
        if self._nodes_generation != self.generation:
            self._nodes, self._nodes_generation = {}, self.generation
        nodes = self._nodes.get(session_id)
        if nodes is None:
            infos = [lease.info for lease in self.leases.values() if lease.info.session_id == session_id]
            infos.sort(key=lambda info: info.host_id)
            nodes = self._nodes[session_id] = MappingProxyType({info.host_id: info.node_id for info in infos})
        return nodes

    def leave(self, session_id: str, host_ids: Collection[str]) -> None:
        """Mark these hosts of a session, and no others, as leaving: they hand over their partitions and end."""
        leaving = frozenset(host_ids)
        if self._leaving.get(session_id, frozenset()) != leaving:
            self._leaving[session_id] = leaving
            self.generation += 1
        if not leaving:
            self._leaving.pop(session_id, None)

    def staying(self, session_id: str) -> Mapping[str, str]:
        """Return the node of each live host of a session that is not leaving; of all of them if all are leaving."""
        nodes, leaving = self.nodes_of_session(session_id), self._leaving.get(session_id, frozenset())
        return {host_id: node for host_id, node in nodes.items() if host_id not in leaving} or nodes

    def of_session(self, session_id: str) -> list[str]:
        """Return the live hosts of a session, in a fixed order."""
        return list(self.nodes_of_session(session_id))

    def prolong(self, seconds: float, now: float) -> None:
        """Let all leases run ``seconds`` longer."""
        for lease in self.leases.values():
            lease.seen = min(now, lease.seen + seconds)

    def lose(self, lease: HostLease, why: Loss, age: float) -> None:
        """End a lease, ``age`` seconds after the last heartbeat."""
        info = lease.info
        log.warning(
            "Host %s is lost: %s (%s). Incarnation %s (restart %d) at %s on node %s, last heartbeat %.1f s ago. Its "
            "partitions move",
            *(info.host_id, why.value, why.name, info.incarnation, info.restart, info.address, info.node_id, age),
        )
        self.losses[why] += 1
        self.remove(info.host_id)

    def remove(self, host_id: str) -> None:
        del self.leases[host_id]
        self.generation += 1

    def expire(self, before: float, now: float, dead_nodes: Collection[str] = ()) -> None:
        """End the leases of the hosts on these nodes, and of those whose last heartbeat was before that time."""
        for lease in list(self.leases.values()):
            if lease.info.node_id in dead_nodes:
                self.lose(lease, Loss.NODE_DEAD, now - lease.seen)
            elif lease.seen < before:
                self.lose(lease, Loss.NO_HEARTBEAT, now - lease.seen)


class Registries:
    """The hosts, runs and instances of one coordinator.

    ``lock`` guards all of them, ``started`` and ``last_needed`` included. A caller that also needs the lock of a run
    takes the lock of the run first. Nothing waits for storage while it holds ``lock``.

    ``clock`` gives seconds since 1970 and never goes back. ``last_needed`` is the time of the last message from a host
    or driver. For ``report_timeout`` seconds from the start on, hosts and drivers of an earlier coordinator may still
    report.
    """

    def __init__(self, clock: Callable[[], float], report_timeout: float) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.hosts = HostRegistry()
        self.instances = InstanceRegistry(self.lock)
        self.runs = RunRegistry(self.lock, self.instances, clock)
        self.started = self.last_needed = clock()
        self._reports_until = self.started + report_timeout
        self.placement_problems: BoundedDict[str, tuple[str, ...]] = BoundedDict(REMEMBERED_ENTRIES)
        """By session, the hosts that are not placed as they should be."""
        self.failing: BoundedDict[str, tuple[str, float, tuple[FailingLoop, ...]]] = BoundedDict(REMEMBERED_ENTRIES)
        """By session, the name of the driver's process, the time of its last report, and its failing loops."""
        self._ended_sessions: BoundedDict[str, None] = BoundedDict(REMEMBERED_ENTRIES)

    def expects_reports(self) -> bool:
        """Return whether hosts and drivers of an earlier coordinator may still report for the first time."""
        with self.lock:
            return self.clock() < self._reports_until

    def needed(self) -> None:
        """Record a message from a host or a driver."""
        with self.lock:
            self.last_needed = self.clock()

    def prolong(self, seconds: float, now: float) -> None:
        """Let all leases run ``seconds`` longer: those of hosts, of drivers, and of the coordinator itself."""
        with self.lock:
            self.hosts.prolong(seconds, now)
            for run in self.runs.by_id.values():
                run.lifetime.driver_seen = min(now, run.lifetime.driver_seen + seconds)
            self.last_needed = min(now, self.last_needed + seconds)
            self._reports_until += seconds

    def end_session(self, session_id: str) -> bool:
        """End a driver's session with its hosts and runs. Return whether other hosts are left."""
        with self.lock:
            # The hosts are ordered to stop only afterwards, and must not bring the session back before.
            self._ended_sessions[session_id] = None
            self.placement_problems.pop(session_id, None)
            self.failing.pop(session_id, None)
            self.hosts.leave(session_id, ())
            for host_id in self.hosts.of_session(session_id):
                self.hosts.remove(host_id)
            runs = self.runs.of_session(session_id)
            for run in runs:
                self.runs.remove(run.run_id)
            others = bool(self.hosts.leases)
        for run in runs:
            self.runs.end(run, "its session has ended")
        return others

    def has_ended(self, session_id: str) -> bool:
        with self.lock:
            return session_id in self._ended_sessions


class Handler:
    """Answers messages by the tables that all handlers share."""

    def __init__(self, registries: Registries) -> None:
        self._registries = registries
        self._runs = registries.runs

    def _require_host(self, host_id: str, incarnation: str) -> HostInfo:
        """Return a host. Raises ``UnknownHostError`` unless exactly this incarnation is registered."""
        with self._registries.lock:
            return self._registries.hosts.require(host_id, incarnation).info
