"""The heartbeats of a driver: one thread renews the leases of all its runs, and each run has one for what may wait.

A heartbeat about a run completes the version that Spark has committed, if nobody has said so yet, and so may wait for
the storage of that query. It must delay neither the leases nor the heartbeats of other runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container

from backends.background_loop import BackgroundLoop
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.messages import InputPace, QueryRegistration
from spark_bridge.session.shutdown import Shutdown

DRIVER_HEARTBEAT_SECONDS = 1.0
HEARTBEAT_REMEDY = "See whether the coordinator runs and can be reached from the driver ('statestore status')."


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
        is_stopping = registration.run_id in self._stopping_runs
        if not self._coordinator.driver_heartbeat(
            registration.run_id, is_stopping=is_stopping, is_at_work=is_at_work(), pace=pace()
        ):
            self._coordinator.register_query(registration)
