"""Handles the messages of hosts about themselves: registration, heartbeats, runs, end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec import structs

from backends.background_loop import FailingLoop
from backends.exceptions import StorageError
from backends.formats.manifest import PartitionEntry
from coordinator_actor.access_tokens import AccessTokens
from coordinator_actor.checkpoints.pending_checkpoint import TaskKey
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.exceptions import CoordinatorError, QueryBusyError, ReplacedHostError
from coordinator_actor.handlers.locations import assign_owners, copied_to, gives, needed_by, warm_up
from coordinator_actor.handlers.queries import Queries
from coordinator_actor.handlers.registries import Handler, HostLease, Registries
from coordinator_actor.messages import (
    Completed,
    HandOver,
    HostInfo,
    HostOrders,
    HostReport,
    QueryRegistration,
    SavepointOrder,
)
from coordinator_actor.run.query_state import QueryState
from coordinator_actor.threads import Apart

log = logging.getLogger(__name__)

TAKE_UP_SECONDS = 1.0
"""How long the answer to a registration waits until the host's report is processed."""


class Hosts(Handler):
    """Registers hosts, renews their leases, and answers each heartbeat with orders for the host.

    A host is lost after ``conf.host_timeout`` without a heartbeat. It relies on its lease for ``conf.lease_seconds``,
    because a host on a silent machine is lost sooner (``Suspicions``).

    ``apart`` does work that may wait for the storage of a query. ``dead_nodes`` gives the ids of the nodes that the
    cluster has declared dead, without waiting: a process that still runs there is ignored.
    """

    def __init__(
        self,
        registries: Registries,
        queries: Queries,
        tokens: AccessTokens,
        conf: CoordinatorConf,
        apart: Apart,
        dead_nodes: Callable[[], Collection[str]],
    ) -> None:
        super().__init__(registries)
        self._apart = apart
        self._dead_nodes = dead_nodes
        self._queries = queries
        self._tokens = tokens
        self._conf = conf

    def register_host(self, info: HostInfo, report: HostReport) -> None:
        with self._registries.lock:
            if self._registries.has_ended(info.session_id):
                return
            if info.node_id in self._dead_nodes():
                raise ReplacedHostError(
                    f"Node {info.node_id} of host {info.host_id} (incarnation {info.incarnation}, at {info.address}) "
                    "was declared dead by the cluster: the host must end itself."
                )
            self._registries.hosts.register(info, self._registries.clock(), report.held)
            self._registries.needed()
        log.info("Registered host %s at %s", info.host_id, info.address)
        self._process(info, report)

    def report_runs(self, host_id: str, incarnation: str, report: HostReport) -> None:
        self._process(self._require_host(host_id, incarnation), report)

    def _process(self, info: HostInfo, report: HostReport) -> None:
        """Process what a host reports of each run, in threads separate from those of the run's messages."""
        begun = []
        # Known runs first: they need no storage.
        for registration in sorted(report.registrations, key=lambda r: r.run_id not in self._runs.by_id):
            if not self._runs.is_over(registration.run_id):
                begun += self._begin_to_take_up(registration, report, info)
        # If a report cannot be processed, only that query is affected: the host is still known.
        deadline = time.monotonic() + TAKE_UP_SECONDS
        for future in begun:
            with suppress(TimeoutError, FutureTimeoutError):  # it is processed when the storage recovers
                future.exception(timeout=max(0.0, deadline - time.monotonic()))

    def _begin_to_take_up(
        self, registration: QueryRegistration, report: HostReport, info: HostInfo
    ) -> list[Future[Any]]:
        """Begin to process the report of a host about a run.

        Return a list with the future, empty if the queue of waiting reports is full.
        """
        run_id = registration.run_id
        self._note_report(info, run_id, is_running=True)
        self._runs.expect(run_id)
        try:
            future = self._apart(f"the reports of run {run_id}", partial(self._take_up, registration, report, info))
        except BaseException as error:
            self._runs.expect_no_more(run_id)
            self._note_report(info, run_id)
            if not isinstance(error, QueryBusyError):
                raise
            log.warning("Host %s must report run %s again: %s", info.host_id, run_id, error)
            return []
        return [future]

    def _take_up(self, registration: QueryRegistration, report: HostReport, info: HostInfo) -> None:
        run_id, is_processed = registration.run_id, False
        try:
            if not self._runs.is_over(run_id):  # else it was stopped while its report waited
                self._register_again(registration)
            run = self._runs.find(run_id)
            if run is not None and run.lifetime.stopped_at is None:
                with run.lock:
                    _take_report(run, report, self._registries.clock())
            is_processed = run is not None or self._runs.is_over(run_id)
        except BaseException:
            log.warning("Host %s must report run %s again", info.host_id, run_id, exc_info=True)
            raise
        finally:
            self._note_report(info, run_id, is_processed=is_processed)
            self._runs.expect_no_more(run_id)

    def _note_report(
        self, info: HostInfo, run_id: str, *, is_processed: bool = False, is_running: bool = False
    ) -> None:
        with self._registries.lock:
            self._registries.hosts.note_report(info, run_id, is_processed=is_processed, is_running=is_running)

    def _register_again(self, registration: QueryRegistration) -> None:
        """Register a run that a host holds, and that this coordinator, after a restart, may not know."""
        try:
            register = self._queries.serve_ended if registration.ended else self._queries.register_query
            refusal = register(registration).refusal
        except (StorageError, CoordinatorError):
            # The host reports again: the run is not known then.
            log.warning("Run %s was reported, but cannot be registered now", registration.run_id, exc_info=True)
            return
        if refusal is not None:
            self._runs.remember_over(registration.run_id, refusal)

    def heartbeat_host(
        self, host_id: str, incarnation: str, held: Mapping[str, int] | None = None, hand_over: HandOver | None = None
    ) -> HostOrders:
        held = held or {}
        now = self._registries.clock()
        with self._registries.lock:
            lease = self._registries.hosts.renew(host_id, incarnation, now)
            if lease is None:
                return HostOrders(False, revoked_tokens=self._tokens.revoked(), lease_seconds=self._conf.lease_seconds)
            self._registries.needed()
            reported = (lease.hand_over if hand_over is None else hand_over).giving
            if hand_over is not None and hand_over.number > lease.hand_over.number:
                lease.hand_over = structs.replace(hand_over, giving=())
            runs = {run_id: run for run_id in held if (run := self._runs.find(run_id)) is not None}
            over = {r for r in held if (runs[r].lifetime.ended if r in runs else self._runs.is_over(r))}
            lease.reports = {r: is_running for r, is_running in lease.reports.items() if is_running or r in held}
            unknown = {r for r in held if r not in over and (r not in runs or r in lease.reports)}
            unknown_runs = {run_id: not lease.reports.get(run_id, False) for run_id in unknown}
            of_session = self._runs.of_session(lease.info.session_id)
        for run in of_session:
            exchanged = lease.hand_over.exchanged.get(run.run_id, "")
            if run.run_id not in held or exchanged == run.last_exchange:
                run.machine.rewriting.note_clean(host_id)
        current = [run for run in of_session if run.lifetime.is_current and run.assignment.is_made]
        # Before the completed versions: a run leaves this list with the version that is announced below.
        giving = {run.run_id: run.versions.completed for run in current if self._gives(run, lease, hand_over)}
        completed: list[Completed] = []
        for run_id, run in runs.items():
            announced = None if run_id in over else run.announcement_to(host_id)
            # The partitions that the host has given away have moved, or stay: it continues from this version as usual.
            is_over = run_id in reported and run_id not in giving and run in current
            if announced is not None and (
                held[run_id] < announced.version
                or is_over
                or run.machine.rewriting.is_to_be_told(now)
                # A host that was away for longer may have copies of files from before the last exchange.
                or run.last_exchange not in ("", lease.hand_over.exchanged.get(run_id, ""))
            ):
                completed.append(announced)
        # Including runs that the host holds nothing of yet: it may own partitions that no task has opened.
        savepoints = tuple(order for run in of_session for order in self._savepoint_orders(run, host_id))
        pending = {r.run_id: s.pending() for r in of_session if (s := self._runs.savepoints_of(r.run_id)) is not None}
        return HostOrders(
            known=True,
            unknown_runs=unknown_runs,
            completed=tuple(completed),
            unload_runs=tuple(run_id for run_id in held if run_id in over),
            savepoints=savepoints,
            pending={run_id: ids for run_id, ids in pending.items() if ids},
            revoked_tokens=self._tokens.revoked(),
            lease_seconds=self._conf.lease_seconds,
            warm_up=tuple(order for run in current if (order := warm_up(run, host_id, lease.hand_over)) is not None),
            giving=giving,
            ended_runs=tuple(
                run_id for run_id, run in runs.items() if run.lifetime.stopped_at is not None and run.lifetime.is_served
            ),
            lags={run.run_id: lag for run in of_session if (lag := run.lag(now))},
            standbys={run.run_id: dict(copies) for run in current if (copies := copied_to(run, host_id))},
        )

    def _gives(self, run: QueryState, lease: HostLease, hand_over: HandOver | None) -> bool:
        """Return whether a host gives partitions of a run away, and record whether they may move.

        They may if the host has said that it looks at Spark's log, and the answer that is being made says that it must.
        After any other answer it looks no longer, and has to say so again for the next move.
        """
        with run.assignment.lock:  # no partition moves between the answer and its record
            is_giving = gives(run, lease.info.host_id)
            with self._registries.lock:
                known = lease.hand_over
                if is_giving and (hand_over is None or hand_over.number != known.number):
                    return True  # the heartbeat was overtaken
                others = tuple(run_id for run_id in known.giving if run_id != run.run_id)
                looks = hand_over is not None and run.run_id in hand_over.giving
                own = (run.run_id,) if is_giving and looks else ()
                lease.hand_over = structs.replace(known, giving=(*others, *own))
        return is_giving

    def _savepoint_orders(self, run: QueryState, host_id: str) -> list[SavepointOrder]:
        savepoints = self._runs.savepoints_of(run.run_id)
        if savepoints is None or not run.lifetime.is_current or not savepoints.pending():
            return []
        with run.lock_if_free() as is_free:  # else the next heartbeat repeats the orders
            return list(savepoints.orders_for(host_id, assign_owners(self._registries, run))) if is_free else []

    def unregister_session(self, session_id: str) -> bool:
        return self._registries.end_session(session_id)

    def place_session(self, session_id: str, problems: Sequence[str], leaving: Sequence[str] = ()) -> tuple[str, ...]:
        with self._registries.lock:
            if self._registries.has_ended(session_id):
                return ()
            self._registries.placement_problems[session_id] = tuple(problems)
            self._registries.hosts.leave(session_id, leaving)
            runs = [run for run in self._runs.of_session(session_id) if run.lifetime.is_current]
            lost = {host_id for host_id in leaving if host_id not in self._registries.hosts.leases}
            stays = set(self._registries.hosts.staying(session_id))
        needed = {host_id for run in runs for host_id in needed_by(run)}
        is_known = not any(run.assignment.awaits_reports for run in runs) or not self._registries.expects_reports()
        return tuple(h for h in leaving if h in lost or (is_known and h not in needed and h not in stays))

    def report_failing_loops(self, session_id: str, process: str, failing: Sequence[FailingLoop]) -> None:
        with self._registries.lock:
            if failing and not self._registries.has_ended(session_id):
                self._registries.failing[session_id] = process, self._registries.clock(), tuple(failing)
            else:
                self._registries.failing.pop(session_id, None)

    def verify_instances(
        self, host_id: str, incarnation: str, run_ids: Sequence[str]
    ) -> dict[str, dict[str, list[int]]]:
        with self._registries.lock:
            self._registries.hosts.require(host_id, incarnation)
            runs = [run for run_id in run_ids if (run := self._runs.find(run_id)) is not None]
        owned: dict[str, dict[str, list[int]]] = {}
        for run in runs:
            assignment = run.assignment.current
            if assignment is None or assignment.is_partial:
                continue
            owned[run.run_id] = {name: [] for name in run.versions.layouts}
            for operator, partition in assignment.of_host.get(host_id, ()):
                owned[run.run_id][operator].append(partition)
        return owned

    def expire(self, now: float) -> None:
        """Drop the hosts without a heartbeat for the host timeout before ``now``, and those on dead nodes."""
        dead = self._dead_nodes()
        with self._registries.lock:
            self._registries.hosts.expire(now - self._conf.host_timeout, now, dead)


def _take_report(run: QueryState, report: HostReport, now: float) -> None:
    """Record the batches that a host has opened and acknowledged, after a restart of the coordinator."""
    run.machine.note_opened(report.opened.get(run.run_id, -1))
    acknowledged: dict[int, dict[TaskKey, PartitionEntry]] = {}
    for message in report.pending:
        task = (message.operator, message.partition)
        if message.run_id != run.run_id or message.version <= run.versions.completed:
            continue
        run.assignment.report(task, message.host_id, overrides=True)
        if message.version not in acknowledged:
            acknowledged[message.version] = run.machine.acknowledged(message.version)
        entry = PartitionEntry(message.attempt, message.file)
        is_news = task not in acknowledged[message.version] or run.machine.is_newer(task, message.stage)
        # A known acknowledgement may still lack the stage of its task.
        is_same = acknowledged[message.version].get(task) == entry
        if (is_news or is_same) and message.base == run.versions.head(message.version - 1, *task):
            run.acknowledge([message])
            if is_news:
                run.history.acknowledged(message.version, [message], now)
