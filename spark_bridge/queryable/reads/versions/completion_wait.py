"""Waiting for the completion of a version, also in a host that nobody tells of the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from backends.bounded_dict import BoundedDict
from coordinator_actor.exceptions import CoordinatorError, QueryEndedError
from spark_bridge.host.coordination.completed_versions import CompletedVersion
from spark_bridge.host.host import Host

ASK_COORDINATOR_SECONDS = 1.0
"""While somebody waits for a version of a run, the coordinator is asked so often."""
_BRIEFLY_SECONDS = 0.001
MAX_ASKED_RUNS = 1000


class CompletionWait:
    """Waits for completed versions. Thread-safe; the lock guards the times when the coordinator was asked.

    ``wait_seconds``: how long the coordinator may take for its first answer about a run. ``on_ended`` is called with a
    run that proves to be over.
    """

    def __init__(self, host: Host, wait_seconds: float, on_ended: Callable[[str], None]) -> None:
        self._host = host
        self._wait_seconds = wait_seconds
        self._on_ended = on_ended
        self._asked_at: BoundedDict[str, float] = BoundedDict(MAX_ASKED_RUNS)
        self._lock = threading.Lock()

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        """See ``StateReads``. Raises ``RetiredRunError`` if the run is over meanwhile."""
        deadline = time.monotonic() + seconds
        self._host.prepared.settle(run_id, self._wait_seconds)
        newest = self._host.completed.newest(run_id)
        if newest is None:
            newest = self._host.version_requests.completed_version(run_id, 0, self._wait_seconds)
        while newest is None or newest.version <= after:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            newest = self._host.completed.wait(run_id, after + 1, min(left, ASK_COORDINATOR_SECONDS))
            if newest is None or newest.version <= after:
                newest = self._ask_coordinator(run_id, after)
                if newest is not None and newest.version <= after and self._host.version_requests.has_ended(run_id):
                    raise QueryEndedError(f"The query of run {run_id} has ended at version {newest.version}.")
        return -1 if newest is None else newest.version

    def _ask_coordinator(self, run_id: str, after: int) -> CompletedVersion | None:
        """Return the newest version that the coordinator knows; one waiting thread asks for all of them.

        Nobody tells this host of versions if it has nothing of the run, nor that the run is over.
        """
        newest, now = self._host.completed.newest(run_id), time.monotonic()
        with self._lock:
            if newest is not None and now - self._asked_at.get(run_id, 0.0) < ASK_COORDINATOR_SECONDS / 2:
                return newest
            self._asked_at[run_id] = now
        try:
            return self._host.version_requests.completed_version(run_id, after + 1, _BRIEFLY_SECONDS)
        except CoordinatorError:
            self._host.completed.forget(run_id)  # so that the other waiting threads find out, too
            self._on_ended(run_id)
            raise
