"""Ended queries of one session that can still be read: renews the leases of their last runs, and ends these runs in
time.

A query that has ended, say by ``availableNow``, gets most of its lookups after its end. So the driver goes on renewing
the lease of the query's last run, and hosts go on answering from the last completed version.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from backends.background_loop import BackgroundLoop
from backends.storage.sending.failures import for_people
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.handlers.registries.run_registry import LONGEST_FAILURE
from coordinator_actor.messages import QueryRegistration
from spark_bridge.session.queries.driver_heartbeats import DRIVER_HEARTBEAT_SECONDS
from spark_bridge.session.shutdown import Shutdown

log = logging.getLogger(__name__)

MAX_ENDED = 100
"""The newest ended queries of a session stay readable, at most this many."""


_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b: .+")


def failure_text(exception: str | None) -> str:
    """Return the part for people of the error with which Spark says that a query has ended; "" for none.

    Spark's text has the errors of Java around that of Python, and all stacks: the innermost error of Python counts.
    """
    return for_people(_innermost(exception), LONGEST_FAILURE)


def _innermost(exception: str | None) -> str:
    lines = (exception or "").splitlines()
    told = [line.strip() for line in lines if _ERROR.match(line.strip()) and not line.lstrip().startswith("org.apache")]
    return told[-1] if told else next((line.strip() for line in lines if line.strip()), "")


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
    seconds: None for as long as the session lives, 0 for not at all. There is one message per interval for all queries.
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
            remedy="See whether the coordinator runs and can be reached from this process ('statestore status').",
            most_seconds=2 * interval,
            is_ending=lambda: shutdown.is_ending,
        )
        self._is_begun = False

    def ended(self, registration: QueryRegistration, failure: str = "") -> None:
        """Report that a run has ended, with which error, if with one.

        Raises what the coordinator raises; then the next ``renew`` reports the end again, if the query is to be served.
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
        """Take note that a query runs again: its new run has replaced the earlier one."""
        with self._lock:
            self._ended.pop(registration.state_location, None)

    def close(self) -> None:
        """Renew no more leases; the session's end ends the runs."""
        self._loop.close(timeout=5)

    def renew(self) -> None:
        """Renew the leases, end the runs whose time is over, and tell a coordinator that was started anew of the runs.

        Raises what the coordinator raises; whatever was not done is done by the next call.
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
