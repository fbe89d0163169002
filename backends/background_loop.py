"""The background loop of every process: a thread that calls a function periodically, whatever the function raises.

A loop that fails retries with a backoff. The process remembers the failure's beginning and its last error. Hosts, the
coordinator and drivers report them to the overview.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

log = logging.getLogger(__name__)

LONGEST_BACKOFF_SECONDS = 30.0
"""A loop that fails again and again tries at least this often, unless its own interval is longer."""
LONGEST_ERROR = 500
"""Maximum length of an error in a report, in characters."""


class FailingLoop(Struct, frozen=True):
    """A loop whose work fails: ``failures`` times in a row since ``since`` (seconds since 1970), last with ``error``.

    ``what`` names the work that waits, ``remedy`` the action that people can take.
    """

    what: str
    since: float
    failures: int
    error: str
    remedy: str = ""


class FailingLoops:
    """The loops of this process that fail. Thread-safe."""

    def __init__(self) -> None:
        self._failing: dict[int, FailingLoop] = {}
        self._lock = threading.Lock()

    def failed(self, loop: object, what: str, remedy: str, error: BaseException) -> FailingLoop:
        """Record a failure of a loop, and return the loop's consecutive failures."""
        text = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
        with self._lock:
            before = self._failing.get(id(loop))
            since, times = (time.time(), 0) if before is None else (before.since, before.failures)
            noted = self._failing[id(loop)] = FailingLoop(what, since, times + 1, text, remedy)
        return noted

    def recovered(self, loop: object) -> FailingLoop | None:
        """Record that a loop has succeeded or ended. Return its earlier failures, None if it had none."""
        if id(loop) not in self._failing:
            return None
        with self._lock:
            return self._failing.pop(id(loop), None)

    def now(self) -> tuple[FailingLoop, ...]:
        """Return the loops that fail now, the one that has failed longest first."""
        with self._lock:
            return tuple(sorted(self._failing.values(), key=lambda failing: failing.since))


failing_loops = FailingLoops()
"""Those of this process."""


class BackgroundLoop:
    """Calls ``work`` in a daemon thread ``seconds`` after its last call ended, until ``close``.

    An exception of ``work`` never ends the loop. The pause doubles with each failure in a row, up to ``most_seconds``;
    loops that renew leases pass their interval. ``seconds`` may be a function that is asked before each pause.
    ``what`` completes the sentence "The loop failed to ...". ``is_ending`` returns whether what the loop works with
    shuts down. Failures are not logged then, nor after ``close``, nor while the process exits.
    """

    def __init__(
        self,
        work: Callable[[], Any],
        seconds: float | Callable[[], float],
        *,
        name: str,
        what: str,
        remedy: str = "",
        most_seconds: float = LONGEST_BACKOFF_SECONDS,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._work = work
        self._seconds = seconds
        self._what = what
        self._remedy = remedy
        self._most_seconds = most_seconds
        self._is_ending = is_ending
        self._closed = threading.Event()
        self._due = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> BackgroundLoop:
        """Begin, with a pause. Return this loop."""
        self._thread.start()
        return self

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed.is_set()

    def wake(self) -> None:
        """Call ``work`` now; if a call is running, call it again afterwards."""
        self._due.set()

    def close(self, timeout: float | None = 0.0) -> None:
        """End the loop. Wait for its thread for ``timeout`` seconds, None for as long as ``work`` takes."""
        self._closed.set()
        self._due.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        failing_loops.recovered(self)

    def run_once(self) -> None:
        """Call ``work``, and record whether it failed."""
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - the loop must survive
            if not self._ends():
                self._note(error)
        else:
            self._failures = 0
            before = failing_loops.recovered(self)
            if before is not None:
                log.info("A background loop has recovered after %d failures: %s", before.failures, self._what)

    def _note(self, error: Exception) -> None:
        noted = failing_loops.failed(self, self._what, self._remedy, error)
        self._failures = noted.failures
        # Log the first failure with its stack, and later ones ever more rarely: the overview shows the rest.
        if noted.failures == 1:
            log.warning("A background loop failed to %s; it tries again", self._what, exc_info=error)
        elif noted.failures & (noted.failures - 1) == 0:
            log.warning(
                "A background loop failed to %s: %d consecutive failures, last: %s", self._what, noted.failures, error
            )

    def _ends(self) -> bool:
        return self._closed.is_set() or _process_ends.is_set() or self._is_ending()

    def _pause(self) -> float:
        seconds = self._seconds() if callable(self._seconds) else self._seconds
        if not self._failures:
            return seconds
        # After the 10th failure in a row the pause is longer than any bound.
        return float(max(seconds, min(self._most_seconds, seconds * 2.0 ** min(self._failures, 10))))

    def _run(self) -> None:
        while not self._closed.is_set():
            self._due.wait(self._pause())
            self._due.clear()
            if self._closed.is_set():
                break
            self.run_once()
        failing_loops.recovered(self)


_process_ends = threading.Event()
atexit.register(_process_ends.set)
