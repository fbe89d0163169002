"""Renews a driver's leases: of its running queries, by heartbeats, and of ended queries that can still be read.

A query that has ended, say by ``availableNow``, gets most of its lookups after its end. So the driver keeps renewing
the lease of the query's last run, and hosts keep answering from the last completed version.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from backends.background_loop import BackgroundLoop
from backends.storage.failures import for_people
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.handlers.registries import LONGEST_FAILURE
from coordinator_actor.messages import InputPace, QueryRegistration
from spark_bridge.session.settings import Shutdown

# The heartbeats of a driver: one thread renews the leases of all its runs, and each run has a thread for slow calls.
#
# A heartbeat about a run completes the version that Spark has committed, if it has not been reported yet, and so may
# wait for the storage of that query. It must delay neither the leases nor the heartbeats of other runs.


DRIVER_HEARTBEAT_SECONDS = 1.0
HEARTBEAT_REMEDY = "See whether the coordinator runs and can be reached from this process ('statestore status')."


class DriverHeartbeats:
    """Keeps the runs of one driver known to the coordinator. Thread-safe: ``_lock`` guards the table of runs.

    ``leases`` and ``coordinator`` are ways to the same coordinator; one call of ``leases`` must end well within the
    lease of a driver. ``stopping`` has the ids of the runs that stop with a savepoint. ``interval`` is in seconds.
    There is one message per interval for all runs, and one for each.
    """

    def __init__(
        self,
        leases: CoordinatorPort,
        coordinator: CoordinatorPort,
        stopping: Container[str],
        shutdown: Shutdown,
        interval: float = DRIVER_HEARTBEAT_SECONDS,
    ) -> None:
        self._leases = leases
        self._coordinator = coordinator
        self._stopping_runs = stopping
        self._shutdown = shutdown
        self._interval = interval
        self._lock = threading.Lock()
        self._beats: dict[str, BackgroundLoop] = {}
        self._renewing = BackgroundLoop(
            self._renew,
            interval,
            name="statestore-driver",
            what="renew the leases of the driver's runs: the coordinator gives them up after driver_timeout",
            remedy=HEARTBEAT_REMEDY,
            most_seconds=2 * interval,
            is_ending=lambda: shutdown.is_ending,
        ).start()

    def add(
        self,
        registration: QueryRegistration,
        is_at_work: Callable[[], bool],
        pace: Callable[[], InputPace | None] = lambda: None,
    ) -> None:
        """Begin with a run that is registered. ``is_at_work()``: Spark has rows for a batch, not yet committed.

        ``pace()`` returns the pace of its input in the last batch.
        """
        run_id = registration.run_id
        beat = BackgroundLoop(
            lambda: self._beat(registration, is_at_work, pace),
            self._interval,
            name=f"statestore-driver-{run_id[:8]}",
            what=f"send the heartbeat of query {registration.name or registration.query_id}: a version that Spark has "
            "committed without a message stays unknown",
            remedy=HEARTBEAT_REMEDY,
            most_seconds=2 * self._interval,
            is_ending=lambda: self._shutdown.is_ending,
        )
        with self._lock:
            if self._renewing.is_closed or run_id in self._beats:
                return
            self._beats[run_id] = beat
        beat.start()

    def remove(self, run_id: str) -> None:
        """End with a run that is over."""
        with self._lock:
            beat = self._beats.pop(run_id, None)
        if beat is not None:
            beat.close()

    def close(self) -> None:
        """End with all runs. A message that is under way may still be sent to its end."""
        # Also closed first: ``add`` begins with no further run.
        self._renewing.close(timeout=5)
        with self._lock:
            runs = list(self._beats)
        for run_id in runs:
            self.remove(run_id)

    def _renew(self) -> None:
        with self._lock:
            runs = list(self._beats)
        if runs:
            self._leases.renew_leases(runs)

    def _beat(
        self, registration: QueryRegistration, is_at_work: Callable[[], bool], pace: Callable[[], InputPace | None]
    ) -> None:
        run_id = registration.run_id
        is_stopping = run_id in self._stopping_runs
        is_known = self._coordinator.driver_heartbeat(
            run_id, is_stopping=is_stopping, is_at_work=is_at_work(), pace=pace()
        )
        if not is_known:
            self._coordinator.register_query(registration)


log = logging.getLogger(__name__)

MAX_ENDED = 100
"""The newest ended queries of a session stay readable, at most this many."""


_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b: .+")


def failure_text(exception: str | None) -> str:
    """Return the readable part of the error with which Spark reports the end of a query; "" for none.

    Spark's message has Java's errors around Python's, and all stacks: the innermost Python error counts.
    """
    lines = [line.strip() for line in (exception or "").splitlines() if line.strip()]
    told = [line for line in lines if _ERROR.match(line) and not line.startswith("org.apache")]
    return for_people(told[-1] if told else lines[0] if lines else "", LONGEST_FAILURE)


@dataclass(eq=False)
class _Ended:
    registration: QueryRegistration
    failure: str
    until: float
    """A time of the clock; infinity for as long as the session lives."""
    is_told: bool = False
    """Whether the coordinator has taken the end of the run."""
    telling: threading.Thread | None = None
    """The thread that tells the coordinator of the end."""


class EndedQueries:
    """Keeps ended queries known to the coordinator. Thread-safe: ``_lock`` guards the table, by state location.

    ``leases`` and ``coordinator`` are ways to the same coordinator, as in ``DriverHeartbeats``. ``keep_serving`` is in
    seconds: None for as long as the session lives, 0 to stop at once. There is one message per interval for all
    queries.
    """

    def __init__(
        self,
        leases: CoordinatorPort,
        coordinator: CoordinatorPort,
        keep_serving: float | None,
        shutdown: Shutdown,
        *,
        interval: float = DRIVER_HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        max_ended: int = MAX_ENDED,
    ) -> None:
        self._leases = leases
        self._coordinator = coordinator
        self._keep_serving = keep_serving
        self._shutdown = shutdown
        self._clock = clock
        self._max_ended = max_ended
        self._lock = threading.Lock()
        self._ended: dict[str, _Ended] = {}
        # The pause between two tries stays as short as the leases need.
        self._loop = BackgroundLoop(
            self.renew,
            interval,
            name="statestore-ended",
            what="renew the leases of ended queries: hosts stop answering from them when their leases are over",
            remedy=HEARTBEAT_REMEDY,
            most_seconds=2 * interval,
            is_ending=lambda: shutdown.is_ending,
        )
        self._is_begun = False

    def ended(self, registration: QueryRegistration, failure: str = "") -> None:
        """Report that a run has ended, with its error, if any.

        Raises the errors of the coordinator; then the next ``renew`` reports the end again, if the query is to be
        served.
        """
        if self._keep_serving == 0:
            self._coordinator.deactivate_instances(registration.run_id)
            return
        until = float("inf") if self._keep_serving is None else self._clock() + self._keep_serving
        ended = _Ended(registration, failure, until)
        with self._lock:
            self._ended[registration.state_location] = ended
            if not self._is_begun and not self._loop.is_closed:
                self._is_begun = True
                self._loop.start()
        self._tell(ended)

    def started(self, registration: QueryRegistration) -> None:
        """Record that a query runs again: its new run has replaced the earlier one."""
        with self._lock:
            self._ended.pop(registration.state_location, None)

    def close(self) -> None:
        """Renew no more leases; the session's end ends the runs."""
        self._loop.close(timeout=5)

    def renew(self) -> None:
        """Renew the leases, end the runs whose time is over, and report the runs to a restarted coordinator.

        Raises the errors of the coordinator; the next call does the rest.
        """
        with self._lock:
            now = self._clock()
            # The longest ended ones come first.
            too_many = list(self._ended)[: max(0, len(self._ended) - self._max_ended)]
            over = [key for key, e in self._ended.items() if e.until <= now or key in too_many]
            gone = [self._ended[key] for key in over]
            serving = {e.registration.run_id: e for key, e in self._ended.items() if key not in over}
        unknown = set(self._leases.renew_leases(list(serving))) if serving else set()
        for ended in gone:
            try:
                self._leases.deactivate_instances(ended.registration.run_id)
            except Exception:  # noqa: BLE001 - the other runs must not suffer; it is tried again
                self._not_reported(ended)
            else:
                self._drop(ended)
        for run_id, ended in serving.items():
            if ended.is_told and run_id not in unknown:
                continue
            # Apart: the coordinator reads the storage of that query, which may hang.
            if ended.telling is None or not ended.telling.is_alive():
                name = f"statestore-ended-{run_id[:8]}"
                ended.telling = threading.Thread(target=self._tell_again, args=(ended,), name=name, daemon=True)
                ended.telling.start()

    def _tell_again(self, ended: _Ended) -> None:
        try:
            self._tell(ended)
        except Exception:  # noqa: BLE001 - the next renewal of the leases tells it again
            self._not_reported(ended)

    def _not_reported(self, ended: _Ended) -> None:
        run_id = ended.registration.run_id
        level = logging.INFO if self._loop.is_closed else self._shutdown.log_level
        log.log(level, "The end of run %s was not reported", run_id, exc_info=True)

    def _tell(self, ended: _Ended) -> None:
        registration = ended.registration
        refusal = self._coordinator.serve_ended(registration, ended.failure).refusal
        ended.is_told = True
        if refusal is not None:
            log.info("Run %s is not read on: %s", registration.run_id, refusal)
            self._drop(ended)

    def _drop(self, ended: _Ended) -> None:
        with self._lock:
            if self._ended.get(ended.registration.state_location) is ended:
                del self._ended[ended.registration.state_location]
