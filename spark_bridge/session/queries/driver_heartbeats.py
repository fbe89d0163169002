"""The heartbeats of a driver: one thread renews the leases of all its runs, and each run has one for what may wait.

A heartbeat about a run completes the version that Spark has committed, if nobody has said so yet, and so may wait for
the storage of that query. It must delay neither the leases nor the heartbeats of other runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container

from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.messages import QueryRegistration
from spark_bridge.session.shutdown import Shutdown

log = logging.getLogger(__name__)

DRIVER_HEARTBEAT_SECONDS = 1.0


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
        self._ended: dict[str, threading.Event] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="statestore-driver", daemon=True)
        self._thread.start()

    def add(self, registration: QueryRegistration, is_at_work: Callable[[], bool]) -> None:
        """Begin with a run that is registered. ``is_at_work()``: Spark has rows for a batch, not yet committed."""
        ended = threading.Event()
        with self._lock:
            if self._closed.is_set() or registration.run_id in self._ended:
                return
            self._ended[registration.run_id] = ended
        name = f"statestore-driver-{registration.run_id[:8]}"
        threading.Thread(target=self._beat, args=(registration, is_at_work, ended), name=name, daemon=True).start()

    def remove(self, run_id: str) -> None:
        """End with a run that is over."""
        with self._lock:
            ended = self._ended.pop(run_id, None)
        if ended is not None:
            ended.set()

    def close(self) -> None:
        """End with all runs. A message that is under way may still be sent to its end."""
        self._closed.set()
        with self._lock:
            runs = list(self._ended)
        for run_id in runs:
            self.remove(run_id)
        self._thread.join(timeout=5)

    def _renew(self) -> None:
        while not self._closed.wait(self._interval):
            with self._lock:
                runs = list(self._ended)
            if not runs:
                continue
            try:
                self._leases.renew_leases(runs)
            except Exception:  # the thread must go on
                log.log(self._shutdown.log_level, "The leases of %d runs were not renewed", len(runs), exc_info=True)

    def _beat(self, registration: QueryRegistration, is_at_work: Callable[[], bool], ended: threading.Event) -> None:
        run_id = registration.run_id
        while not ended.wait(self._interval):
            try:
                is_stopping = run_id in self._stopping_runs
                if not self._coordinator.driver_heartbeat(run_id, is_stopping=is_stopping, is_at_work=is_at_work()):
                    self._coordinator.register_query(registration)
            except Exception:  # the thread must go on
                log.log(self._shutdown.log_level, "The heartbeat of run %s was not taken", run_id, exc_info=True)
