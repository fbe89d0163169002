"""Keeping the host known to the coordinator, which forgets all hosts when it restarts."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from backends import spans
from coordinator_actor import exceptions, messages
from coordinator_actor.coordinator_port import CoordinatorPort
from spark_bridge.host.partition_cache import PartitionCache
from spark_bridge.transport.protocol import TaskIdentity

# The completed versions of each run that the coordinator has announced, before any partition applies them.
#
# The partitions of a host apply a version one after the other, and a partition with a commit in progress later still.
# With the versions recorded here, readers can read all partitions at one version before then: each from its base and
# accepted changes, or from the older versions that it keeps.


KEPT_VERSIONS = 4
"""The heads of at most this many versions of a run are known: as many versions as partitions may have in memory."""
KEPT_RUNS = 1000
"""Versions of at most this many runs are known."""
Heads = Mapping[str, Mapping[int, str]]
"""By operator and partition, the path of the changelog that made a version."""


@dataclass(frozen=True)
class CompletedVersion:
    """A completed version of a run, with the heads of this host's partitions that the coordinator has sent.

    Immutable. ``created_ms`` is when it was prepared, in ms since 1970; 0 if that is not known, and of version 0.
    """

    version: int
    heads: Heads = field(default_factory=dict)
    created_ms: int = 0

    def head(self, operator: str, partition: int) -> str | None:
        """Return the changelog that made the version of a partition; None if it is not known, and for version 0."""
        of_operator = self.heads.get(operator)
        return None if of_operator is None else of_operator.get(partition)


class CompletedVersions:
    """The completed versions of all runs that this host knows of.

    Thread-safe. ``_changed`` guards the table; ``newest`` and ``at`` read it without a lock, so an entry is replaced by
    one assignment and never taken out and put back.
    """

    def __init__(self) -> None:
        self._runs: dict[str, tuple[CompletedVersion, ...]] = {}
        self._changed = threading.Condition()

    def newest(self, run_id: str) -> CompletedVersion | None:
        """Return the last completed version of a run that this host knows of; None if it knows none."""
        versions = self._runs.get(run_id)
        return None if versions is None else versions[-1]

    def has(self, run_id: str, version: int) -> bool:
        """Return whether this host knows that a version of a run is completed."""
        newest = self.newest(run_id)
        return newest is not None and newest.version >= version

    def at(self, run_id: str, version: int) -> CompletedVersion | None:
        """Return one of the last ``KEPT_VERSIONS`` versions of a run; None if ``version`` is none of them."""
        return next((c for c in self._runs.get(run_id, ()) if c.version == version), None)

    def note(self, completed: messages.Completed) -> CompletedVersion:
        """Record a version from the coordinator, which may be old or known; return the newest version of the run."""
        with self._changed:
            versions = {c.version: c for c in self._runs.get(completed.run_id, ())}
            same = versions.get(completed.version)
            heads: dict[str, Mapping[int, str]] = {} if same is None else dict(same.heads)
            for operator, of_operator in completed.heads.items():
                heads[operator] = {**heads.get(operator, {}), **of_operator}
            created_ms = completed.created_ms or (0 if same is None else same.created_ms)
            if same is None or (heads, created_ms) != (same.heads, same.created_ms):
                versions[completed.version] = CompletedVersion(completed.version, heads, created_ms)
            kept = tuple(versions[v] for v in sorted(versions)[-KEPT_VERSIONS:])
            self._runs[completed.run_id] = kept
            while len(self._runs) > KEPT_RUNS:
                del self._runs[next(iter(self._runs))]
            self._changed.notify_all()
            return kept[-1]

    def runs(self) -> list[str]:
        with self._changed:
            return list(self._runs)

    def forget(self, run_id: str) -> None:
        """Forget a run that is over, and wake the threads that wait for a version of it."""
        with self._changed:
            self._runs.pop(run_id, None)
            self._changed.notify_all()

    def wait(self, run_id: str, version: int, seconds: float) -> CompletedVersion | None:
        """Wait until the newest version of a run is ``version`` or later, and return it.

        After ``seconds``, or when the run is forgotten, return the newest version that is known, None if there is none.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            was_known = run_id in self._runs
            while True:
                newest = self.newest(run_id)
                left = deadline - time.monotonic()
                if self.has(run_id, version) or left <= 0 or (was_known and newest is None):
                    return newest
                was_known = newest is not None
                self._changed.wait(left)


log = logging.getLogger(__name__)

T = TypeVar("T")

REGISTER_SECONDS = 1.0
"""The host registers again for readers, of any number, at most once in this many seconds."""
_UNKNOWN = (exceptions.UnknownRunError, exceptions.UnknownHostError, exceptions.StaleOwnerError)


class _Report(NamedTuple):
    """A report to the coordinator: its number, and its time by the host's clock."""

    number: int
    at: float


@dataclass(eq=False, repr=False)
class HostRegistration:
    """Registers the host at the coordinator, and again whenever the coordinator does not know the host.

    Reports a run again that the coordinator does not know. Between two reports of a run, the coordinator may have given
    the host's partitions of that run to others; a registration reports all runs.

    Thread-safe. ``_lock`` guards the numbers and times of the reports, and when the host has registered for a reader
    last, by ``clock``, in monotonic seconds. ``_reported`` has the last report of each run since the last registration.
    ``replaced`` says why this incarnation of the host must end itself, or is None.
    """

    info: messages.HostInfo
    coordinator: CoordinatorPort
    _cache: PartitionCache
    _completed: CompletedVersions
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.replaced: str | None = None
        self._lock = threading.Lock()
        self._registered_for_reader = -math.inf
        self._registered = _Report(0, -math.inf)
        self._reported: dict[str, _Report] = {}
        self._lease_seconds = messages.HostOrders(known=True).lease_seconds
        self._leased_until = -math.inf
        self.is_informed = False
        """Whether a heartbeat was answered since the host has registered: it then knows the completed versions."""
        self._registering: threading.Thread | None = None

    def register(self) -> None:
        """Make this host known to the coordinator, reporting all that the host holds.

        Raises ``ReplacedHostError`` if another incarnation has taken the place of this one.
        """
        with self._reporting(None):
            self.is_informed = False
            sent = self._clock()
            try:
                with spans.alone("host.register", restart=self.info.restart):
                    self.coordinator.register_host(self.info, self._cache.report())
            except exceptions.ReplacedHostError as error:
                self.replaced = str(error)
                raise
            self._leased_until = sent + self._lease_seconds

    def _report_runs(self, run_ids: Collection[str]) -> None:
        with self._reporting(run_ids), spans.alone("host.report_runs", runs=len(run_ids)):
            report = self._cache.report(run_ids)
            self.coordinator.report_runs(self.info.host_id, self.info.incarnation, report)

    @contextmanager
    def _reporting(self, run_ids: Collection[str] | None) -> Iterator[None]:
        """Number the report within the block, of these runs or of all if None. Its time becomes that of its end."""
        with self._lock:
            number = 1 + max((self._registered.number, *(report.number for report in self._reported.values())))
            report = _Report(number, self._clock())
            if run_ids is None:
                self._registered, self._reported = report, {}
            else:
                held = {run_id: last for run_id, last in self._reported.items() if run_id in self._cache.registrations}
                self._reported = {**held, **dict.fromkeys(run_ids, report)}
        try:
            yield
        finally:
            with self._lock:
                ended = _Report(number, self._clock())
                if self._registered.number == number:
                    self._registered = ended
                self._reported = {r: ended if last.number == number else last for r, last in self._reported.items()}

    def number_of(self, run_id: str) -> int:
        """Return the number of the last report of a run; a later report has a higher one, and 1 is the host's first."""
        with self._lock:
            return self._last_report(run_id).number

    def _last_report(self, run_id: str) -> _Report:
        return self._reported.get(run_id, self._registered)

    def renew(self, hand_over: messages.HandOver) -> messages.HostOrders:
        """Send a heartbeat with the host's partitions, and return the answer. The lease counts from the sending."""
        sent = self._clock()
        versions = self._versions()
        orders = self.coordinator.heartbeat_host(self.info.host_id, self.info.incarnation, versions, hand_over)
        self._lease_seconds = orders.lease_seconds
        self._leased_until = sent + orders.lease_seconds if orders.known else -math.inf
        return orders

    def _versions(self) -> dict[str, int]:
        """Return by run id the lowest version that this host is at."""
        versions = self._cache.versions()
        for run_id, version in versions.items():
            # A partition is loaded at a version that the coordinator has named; the others must learn of it too.
            noted = self._completed.newest(run_id)
            versions[run_id] = version if noted is None else min(version, noted.version)
        return versions

    @property
    def is_leased(self) -> bool:
        """Return whether the lease of this host runs: else another host may own its partitions, and complete versions.

        The lease ends here no later than at the coordinator, which counts from the arrival of the heartbeat.
        """
        return self._clock() < self._leased_until

    def is_surely_known_since(self, run_id: str, moment: float) -> bool:
        """Return whether the coordinator has known this host, and its part of a run, from ``moment`` until now.

        If so, the host has all partitions that it was granted since then for a running batch. False if that is
        uncertain.
        """
        with self._lock:
            at = self._last_report(run_id).at
        return at < moment and self.is_leased

    def report_apart(self, orders: messages.HostOrders) -> None:
        """Register, or report the runs that the coordinator does not know. Do so in a thread, and wait 1 s for it.

        One query's storage may hang while the coordinator restores it, and the lease must be renewed during that time.
        """
        if self._registering is None or not self._registering.is_alive():
            self._registering = threading.Thread(
                target=self._report_again, args=(orders,), name="statestore-register", daemon=True
            )
            self._registering.start()
        self._registering.join(timeout=1.0)

    def _report_again(self, orders: messages.HostOrders) -> None:
        try:
            if orders.known:
                self._report_runs({run_id for run_id, is_asked in orders.unknown_runs.items() if is_asked})
            else:
                self.register()
        except Exception:  # the next heartbeat tries again
            log.warning("Host %s could not be registered", self.info.host_id, exc_info=True)

    def call(self, run_id: str, call: Callable[[], T], *, for_reader: bool = False) -> T:
        """Call the coordinator about a run; if it does not know this host or the run, report that, and call again.

        For a reader, report only a run that this host holds, and at most once in ``REGISTER_SECONDS``: a coordinator
        that has just started may not know an owner yet, however often the run is reported. Raises the coordinator's
        error then, so that the reader retries.
        """
        try:
            return call()
        except _UNKNOWN as error:
            if for_reader and (run_id not in self._cache.registrations or not self._is_register_due()):
                raise
            self._report_unknown(run_id, error)
        return call()

    def _report_unknown(self, run_id: str, error: exceptions.CoordinatorError) -> None:
        """Report what the coordinator does not know, by its error: the run, or this host."""
        if isinstance(error, exceptions.UnknownRunError):
            with suppress(exceptions.UnknownHostError):
                self._report_runs({run_id})
                return
        self.register()

    def _is_register_due(self) -> bool:
        with self._lock:
            now = self._clock()
            if now - self._registered_for_reader < REGISTER_SECONDS:
                return False
            self._registered_for_reader = now
            return True

    def owns(self, owner: messages.HostInfo) -> bool:
        """Return whether ``owner`` is this very incarnation of this host."""
        return (owner.host_id, owner.incarnation) == (self.info.host_id, self.info.incarnation)


# Grants: who owns a partition in a batch, and which version and head its state must have.
#
# The coordinator decides who owns what. A host asks it once for all tasks of a batch that arrive at about the same
# time.


SUSPECT_SECONDS = 0.05
"""The least seconds between two reports of a host that tasks cannot reach, and between two requests for its successor.
"""
GRANT_SECONDS = 1.0
"""Tasks of a batch use the coordinator's answer to the first of them for this many seconds: owners may have moved
since.
"""
IDLE_GRANT_SECONDS = 60.0
"""The answer about a run is kept for this many seconds after its last task: a host that owns nothing of the run gets no
message when it is over.
"""


@dataclass(frozen=True)
class _Granted:
    """An answer of the coordinator about a run, and its time by the host's clock."""

    grant: messages.BatchGrant
    at: float
    hosts: tuple[messages.HostInfo, ...]
    owners: Mapping[str, list[int]]

    def lacks(self, operator: str, partition: int) -> bool:
        places = self.owners.get(operator, [])
        return 0 <= partition < len(places) and places[partition] == messages.NOBODY

    def names(self, operator: str, partition: int, address: str) -> bool:
        """Return whether the owner of a partition has that address."""
        places = self.owners.get(operator, [])
        is_owned = 0 <= partition < len(places) and places[partition] != messages.NOBODY
        return is_owned and self.hosts[places[partition]].address == address


@dataclass(eq=False)
class _OfRun:
    """The last answer about a run.

    ``asking`` is held while the coordinator is asked, so that the other tasks wait for that answer. ``waiting`` are the
    partitions that they wait for: the next question names them all.
    """

    granted: _Granted | None = None
    asking: threading.Lock = field(default_factory=threading.Lock)
    waiting: set[tuple[str, int]] = field(default_factory=set)


class Grants:
    """Asks for grants and remembers the last one of each run. Thread-safe.

    ``_suspected`` has the address of the last host that tasks could not reach, and the time of the report, by
    ``clock``. ``_lock`` guards the tables alone; no other lock is taken while it is held.
    """

    def __init__(
        self, registration: HostRegistration, completed: CompletedVersions, clock: Callable[[], float]
    ) -> None:
        self._registration = registration
        self._completed = completed
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[str, _OfRun] = {}
        self._suspected = "", -math.inf

    def for_task(self, task: TaskIdentity) -> messages.OpenGrant:
        """Return the owner of the task's partition, and its state, for the task's batch.

        A host that the task could not reach is reported to the coordinator. Raises ``InvalidRequestError`` if the run
        does not have the partition, and the errors of the coordinator.
        """
        wanted = (task.operator, task.partition)
        if task.unreachable:
            self._suspect(task.unreachable)
        with self._lock:
            of_run = self._runs.setdefault(task.run_id, _OfRun())
            of_run.waiting.add(wanted)
        try:
            with of_run.asking:
                granted = of_run.granted
                now = self._clock()
                is_dead = granted is not None and granted.names(*wanted, task.unreachable)
                if (
                    granted is None
                    or granted.grant.version != task.batch_id
                    or not 0 <= now - granted.at < (SUSPECT_SECONDS if is_dead else GRANT_SECONDS)
                    or granted.lacks(*wanted)
                ):
                    granted = self._ask(task, of_run, now)
        finally:
            with self._lock:
                of_run.waiting.discard(wanted)
        grant = granted.grant
        owners = granted.owners.get(task.operator, [])
        if not 0 <= task.partition < len(owners):
            raise exceptions.InvalidRequestError(
                f"Run {task.run_id} has no partition {task.partition} of an operator {task.operator!r}; it has "
                f"{ {name: len(places) for name, places in granted.owners.items()} }."
            )
        if granted.lacks(*wanted):
            raise exceptions.UnknownRunError(
                f"The coordinator was asked for the owner of {task.operator}/{task.partition} of run {task.run_id} "
                "and named none; ask again."
            )
        head = grant.heads.get(task.operator, {}).get(task.partition)
        owner = granted.hosts[owners[task.partition]]
        return messages.OpenGrant(owner, grant.version, head, grant.registration, grant.epoch, grant.times)

    def _suspect(self, address: str) -> None:
        """Report a host that tasks cannot reach. The tasks repeat it, so that a report which is lost does no harm."""
        with self._lock:
            last, at = self._suspected
            now = self._clock()
            if address == last and 0 <= now - at < SUSPECT_SECONDS:
                return
            self._suspected = address, now
        try:
            self._registration.coordinator.suspect_host(address)
        except (exceptions.CoordinatorError, exceptions.HostUnavailableError) as error:
            log.warning("The coordinator does not know that tasks cannot reach %s: %s", address, error)

    def _ask(self, task: TaskIdentity, of_run: _OfRun, now: float) -> _Granted:
        info, granted = self._registration.info, of_run.granted
        assignment = 0 if granted is None else granted.grant.assignment
        with self._lock:
            # This one too: another attempt of the same task may have taken it out.
            waiting = tuple(sorted({*of_run.waiting, (task.operator, task.partition)}))
        request = messages.OpenBatch(task.run_id, task.batch_id, info.host_id, info.incarnation, assignment, waiting)
        grant = self._registration.call(task.run_id, lambda: self._registration.coordinator.open_batch(request))
        # The coordinator does not repeat an assignment that is known.
        assigned = grant if grant.hosts or granted is None else granted
        of_run.granted = granted = _Granted(grant, now, assigned.hosts, assigned.owners)
        completed = messages.Completed(task.run_id, grant.version, grant.heads, created_ms=grant.created_ms)
        self._completed.note(completed)
        return granted

    def for_read(self, run_id: str, operator: str, partition: int) -> messages.OpenGrant:
        """Ask the coordinator for the owner of a partition, and for its last completed version."""
        coordinator = self._registration.coordinator
        ask = partial(coordinator.open_for_read, run_id, operator, partition)
        return self._registration.call(run_id, ask, for_reader=True)

    def forget(self, run_id: str) -> None:
        with self._lock:
            self._runs.pop(run_id, None)

    def forget_idle_runs(self) -> None:
        """Forget the runs that no task has asked about for ``IDLE_GRANT_SECONDS``, and those without an answer."""
        until = self._clock() - IDLE_GRANT_SECONDS
        with self._lock:
            for run_id, of_run in list(self._runs.items()):
                if not of_run.waiting and (of_run.granted is None or of_run.granted.at <= until):
                    del self._runs[run_id]


# The coordinator's orders about runs, carried out separately from the heartbeat that brings them.
#
# Unloading a partition waits for its running commit or load, and so perhaps for the storage of
# that query. The heartbeat must not wait: the host would be given up, with the partitions of all other queries.


CARRY_OUT_SECONDS = 1.0
"""How long a heartbeat waits for all orders of its answer."""

Order = Callable[[], None]


class RunOrders:
    """Carries out orders. Orders of one run are carried out in sequence, in one thread.

    Thread-safe: ``_lock`` guards the table. While the orders of a run are being carried out, further orders of that run
    are dropped: the coordinator repeats them with each heartbeat until they are done. A thread is started only if there
    are orders.
    """

    def __init__(self, wait_seconds: float = CARRY_OUT_SECONDS) -> None:
        self._wait_seconds = wait_seconds
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}

    def carry_out(self, orders: Mapping[str, Sequence[Order]]) -> None:
        """Carry out orders, by run id, or by parts of one. Return when all are done, or after ``wait_seconds``."""
        begun = []
        with self._lock:
            self._threads = {r: t for r, t in self._threads.items() if t.is_alive()}
            for run_id, of_run in orders.items():
                if run_id not in self._threads:
                    thread = threading.Thread(
                        target=_carry_out, args=(run_id, of_run), name=f"statestore-orders-{run_id[:8]}", daemon=True
                    )
                    self._threads[run_id] = thread
                    thread.start()
                    begun.append(thread)
        deadline = time.monotonic() + self._wait_seconds
        for thread in begun if self._wait_seconds else ():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


def _carry_out(run_id: str, orders: Sequence[Order]) -> None:
    for order in orders:
        try:
            order()
        except Exception:  # the next heartbeat repeats the order; carry out the others
            log.warning("An order about run %s could not be carried out", run_id, exc_info=True)
