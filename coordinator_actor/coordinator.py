"""The coordinator without Ray: it passes each message to its handler, and checks leases, slow batches and garbage.

It combines Spark's ``StateStoreCoordinator`` (instances), Flink's checkpoint coordinator (acknowledgements of all tasks
make a completed checkpoint) and Flink's ``KvStateLocationOracle``. The clock and the storage are injected.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from backends import spans
from backends.background_loop import BackgroundLoop
from backends.exceptions import StorageError
from backends.storage.checkpoint_storage import OpenStorage
from coordinator_actor.access_tokens import AccessTokens, MemoryTokenStore
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.coordinator_port import GROUPS, MESSAGES, CoordinatorPort, Group, query_of, with_string_ids
from coordinator_actor.exceptions import CoordinatorError
from coordinator_actor.handlers.batches import Batches
from coordinator_actor.handlers.hosts import Hosts
from coordinator_actor.handlers.locations import FeatureViews, Figures, Locations, plan_moves
from coordinator_actor.handlers.queries import Queries
from coordinator_actor.handlers.registries import Loss, Registries
from coordinator_actor.handlers.rewritings import Rewritings, Savepoints
from coordinator_actor.handlers.suspicions import Probe, Suspicions
from coordinator_actor.run.query_state import QueryState
from coordinator_actor.run.retention import loaded_bytes, remove_garbage, tidy_records
from coordinator_actor.savepoints.savepoint_coordinator import InBackground, RunSavepoints
from coordinator_actor.threads import Apart, in_place

log = logging.getLogger(__name__)

REGISTRATION_THREADS = 32
"""A registration waits for a second if the storage of a query hangs."""


class Coordinator(CoordinatorPort):
    """The coordinator of one namespace. Safe to use from many threads.

    Three kinds of locks guard its state: the lock of each run (see ``QueryState``), which may be held during requests
    to storage, the lock of its assignment (see ``RunAssignment``) and the lock of the registries (see ``Registries``),
    which is always held briefly. The concurrency group of a message (see ``coordinator_port.py``) determines whether it
    may take the first one.

    ``clock`` gives seconds since 1970 and never goes back. ``in_background`` runs work that must not delay a message.
    ``apart`` runs work that may wait for the storage of one query. ``tokens`` are the read-only tokens of query
    clients. ``dead_nodes`` gives the ids of the nodes that the cluster has declared dead, without waiting. ``probe``
    connects to suspected hosts; by default leases and dead nodes alone decide which hosts are lost.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        open_storage: OpenStorage,
        conf: CoordinatorConf | None = None,
        in_background: InBackground | None = None,
        tokens: AccessTokens | None = None,
        apart: Apart = in_place,
        dead_nodes: Callable[[], Collection[str]] = tuple,
        probe: Probe | None = None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.tokens = tokens or AccessTokens(secrets.token_hex(32), MemoryTokenStore(), clock)
        self._clock = clock
        self._conf = conf or CoordinatorConf()
        self.registries = Registries(clock, self._conf.report_timeout)
        self._queries = Queries(self.id, self.registries, self._conf, open_storage, in_background or _in_thread)
        self._apart = apart
        self._registrations = ThreadPoolExecutor(REGISTRATION_THREADS, thread_name_prefix="statestore-registrations")
        self._beginning = threading.Lock()
        self._under_way: set[tuple[str, str]] = set()
        self._hosts = Hosts(self.registries, self._queries, self.tokens, self._conf, apart, dead_nodes)
        self._suspicions = Suspicions(self.registries, self._conf.silent_timeout, probe)
        locations = Locations(self.registries)
        handlers = (
            self._hosts,
            self._suspicions,
            self._queries,
            Batches(self.registries),
            Savepoints(self.registries),
            Rewritings(self.registries),
            locations,
            FeatureViews(self.registries, locations),
            self.registries.instances,
            Figures(self.id, self.registries),
            self.tokens,
        )
        answers = [(m, getattr(handler, m)) for handler in handlers for m in MESSAGES if hasattr(handler, m)]
        answered = sorted(m for m, _ in answers)
        if answered != sorted(MESSAGES):
            raise TypeError(
                f"Each message needs one handler: {sorted(MESSAGES)} are declared, {answered} are answered."
            )
        self._answers = dict(answers)

    def submit(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Begin to answer a message in the threads of its group.

        Return its future, which is done if the message waits for nothing. Raises ``QueryBusyError`` if too many
        messages about the same query wait, ``KeyError`` for an unknown message.
        """
        # As a child of the span of Ray's own tracing, if that is on.
        answer = spans.carried(partial(self.call, method, *args, **kwargs))
        group = GROUPS[method]
        if group is Group.QUERIES:
            return self._apart(query_of(method, args, kwargs), answer)
        if group is Group.REGISTRATIONS:
            return self._registrations.submit(answer)
        return in_place(method, answer)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Pass a message to its handler and return the answer.

        An id may be a ``uuid.UUID``. Raises ``InvalidRequestError`` for an id that is neither that nor a string.
        """
        by_place, by_name = with_string_ids(method, args, kwargs)
        return self._answers[method](*by_place, **by_name)

    def expire(self, stood_still: float = 0.0) -> None:
        """Drop hosts and runs with expired leases, plan moves, warn of slow batches, fail overdue savepoints.

        Leases do not run while the coordinator itself was suspended, for ``stood_still`` seconds since the last call:
        heartbeats of that time may be waiting for an answer, or their senders may have been suspended as well.
        """
        # All leases are compared with one reading of the clock: a process that is suspended after that reading loses no
        # host.
        now = self._clock()
        with self.registries.lock:
            self.registries.prolong(stood_still, now)
            self._hosts.expire(now)
            self._suspicions.suspect_late_hosts(now)
            overdue = self._queries.overdue(now)
        self._queries.forget(overdue)
        for run in self.registries.runs.current():
            plan_moves(self.registries, run)
            self._look_at(run)

    def _look_at(self, run: QueryState) -> None:
        """Warn of slow work of a run and fail its overdue savepoints, unless another thread works on the run.

        It does not wait for storage, because the thread that ends leases calls it.
        """
        with run.lock_if_free() as is_free:
            if not is_free:
                return
            savepoints = self.registries.runs.savepoints_of(run.run_id)
            if savepoints is not None:
                savepoints.settle_in_memory()
                if savepoints.holds_in_vain:
                    self._begin_once("letting go", run, partial(_settle, run, savepoints))
            now = self._clock()
            lagging = run.snapshot_lag.warning(run.versions.completed, now)
            for warning in (run.slow_warning(now, self._conf.slow_checkpoint), lagging):
                if warning is not None:
                    log.warning("%s", warning)

    def _begin_once(self, what: str, run: QueryState, work: Callable[[], None]) -> None:
        """Begin work on a run that may wait for storage, unless the same work is already under way."""
        key = (what, run.run_id)
        with self._beginning:
            if key in self._under_way:
                return
            self._under_way.add(key)

        def do() -> None:
            try:
                work()
            finally:
                self._under_way.discard(key)

        try:
            future = self._apart(f"the {what} of run {run.run_id}", do)
        except BaseException:
            self._under_way.discard(key)
            raise
        future.add_done_callback(partial(_log_failure, f"The {what} of run {run.run_id} failed"))

    def counts(self) -> tuple[int, int]:
        """Return how many hosts are alive and how many queries run."""
        with self.registries.lock:
            return len(self.registries.hosts.leases), len(self.registries.runs.current())

    def lost_hosts(self) -> dict[str, int]:
        """Return how many hosts were lost, by the reason: the names of ``Loss`` in lower case."""
        with self.registries.lock:
            return {why.name.lower(): self.registries.hosts.losses[why] for why in Loss}

    def running(self) -> list[QueryState]:
        """Return the runs of queries that are neither over nor replaced."""
        return self.registries.runs.current()

    def is_idle(self) -> bool:
        """Return whether no host or driver has needed this coordinator for the idle timeout."""
        registries = self.registries
        with registries.lock:
            return not registries.hosts.leases and self._clock() - registries.last_needed > self._conf.idle_timeout

    def maintain(self) -> None:
        """Remove files that runs no longer keep, for the runs whose maintenance interval is over.

        Each run is handled separately: removing files may take long, and the storage of one may hang. Not to be called
        by several threads at once.
        """
        now = self._clock()
        for run in self.registries.runs.current():
            if now - run.lifetime.maintained >= run.registration.maintenance_interval:
                run.lifetime.maintained_at(now)
                self._begin_once("maintenance", run, partial(_maintain, run, now))
            if run.history.is_due(now):
                self._begin_once("history", run, partial(run.history.write, now))


def _log_failure(what: str, future: Future[Any]) -> None:
    error = future.exception()
    if error is not None:
        log.error("%s; it is tried again", what, exc_info=error)


def _settle(run: QueryState, savepoints: RunSavepoints) -> None:
    with run.lock:
        savepoints.settle()


def _maintain(run: QueryState, now: float) -> None:
    with spans.alone("coordinator.maintenance", run_id=run.run_id):
        try:
            removed = remove_garbage(run, now)
            tidy_records(run)
            measure = loaded_bytes(run)
            if measure is not None:
                run.history.measured(*measure)
            run.history.tidy_up()
        except (StorageError, CoordinatorError):
            log.warning("Files of run %s that are no longer kept were not removed", run.run_id, exc_info=True)
            return
        if removed:
            oldest = run.versions.oldest
            log.info("Deleted files older than %d for run %s: %d files", oldest, run.run_id, len(removed))


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="statestore-savepoint", daemon=True).start()


# The loop that ends leases: it checks them once a second for as long as the coordinator lives.
#
# Nothing else ends the lease of a host or driver that is lost. So each part of a look runs even if the others fail.


LEASE_WATCH_SECONDS = 1.0
"""The seconds between two looks at the leases. A delay of a look shows how long the process was suspended."""


class LeaseWatch:
    """Checks the leases of a coordinator. The work of a look grows with its hosts and runs, not with partitions.

    ``publish(hosts, queries)`` takes the numbers of live hosts and registered queries, ``end()`` ends the process when
    no message has come for the coordinator's idle timeout. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        publish: Callable[[int, int], None],
        end: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._publish = publish
        self._end = end
        self._clock = clock
        self._looked_at = clock()

    def loop(self) -> BackgroundLoop:
        """Return the loop that checks, which the caller must start. It has no backoff: leases must end in time."""
        return BackgroundLoop(
            self.look,
            LEASE_WATCH_SECONDS,
            name="statestore-leases",
            what="check the leases: lost hosts and drivers are not given up, or figures are not published",
            remedy="Look at the coordinator's log ('statestore logs').",
            most_seconds=LEASE_WATCH_SECONDS,
        )

    def look(self) -> None:
        """Check the leases once. Raises the first error, after all parts of the look have run."""
        late = self._clock() - self._looked_at - LEASE_WATCH_SECONDS
        failures = []
        expire = partial(self._coordinator.expire, late if late > LEASE_WATCH_SECONDS else 0.0)
        for part in (expire, self._publish_counts, self._end_if_idle):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        self._looked_at = self._clock()
        if failures:
            raise failures[0]

    def _publish_counts(self) -> None:
        self._publish(*self._coordinator.counts())

    def _end_if_idle(self) -> None:
        if self._coordinator.is_idle():
            log.info("No host or driver has needed this coordinator for a while; it ends")
            self._end()
