"""Loads that requests wait for briefly: a load goes on without its requests, for later ones.

A request takes room of the host's admission limiters as long as it is worked on. If all room were taken by requests
that wait for one partition, no request would be answered from the partitions that are loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from spark_bridge.exceptions import HostUnavailableError

T = TypeVar("T")

LOADS_AT_ONCE = 8
"""Loads that go on together; further loads wait for them."""
MAX_WAITING_REQUESTS = 16
"""Requests that wait at once, less than the limiters admit; further requests are refused at once, and are to be
repeated.
"""


class BackgroundLoads:
    """Runs loads in threads of its own.

    Thread-safe; the lock guards the loads that go on. No request waits longer than ``wait_seconds``.
    """

    def __init__(
        self, wait_seconds: float, *, at_once: int = LOADS_AT_ONCE, max_waiting: int = MAX_WAITING_REQUESTS
    ) -> None:
        self.wait_seconds = wait_seconds
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="statestore-read-load")
        self._waiting = threading.Semaphore(max_waiting)
        self._lock = threading.Lock()
        self._running: dict[Hashable, Future[Any]] = {}

    def result(self, key: Hashable, load: Callable[[], T], what: str) -> T:
        """Return the result of ``load``, or raise its error.

        ``load`` runs once, in another thread, for all requests for ``key``. Raises ``HostUnavailableError``, with
        ``what`` in its message, if the load takes longer; the load goes on then.
        """
        with self.waiting(what):
            with self._lock:
                running: Future[T] | None = self._running.get(key)
                if running is None:
                    running = self._running[key] = self._pool.submit(self._run, key, load)
            if not wait([running], self.wait_seconds).done:
                raise self.unavailable(what)
            return running.result()

    def _run(self, key: Hashable, load: Callable[[], T]) -> T:
        try:
            return load()
        finally:
            with self._lock:
                del self._running[key]

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count as a waiting request within a ``with``. Raises ``HostUnavailableError`` if too many requests wait."""
        if not self._waiting.acquire(blocking=False):
            raise self.unavailable(what)
        try:
            yield
        finally:
            self._waiting.release()

    def unavailable(self, what: str) -> HostUnavailableError:
        """Return the error for a request that has waited, or may not wait."""
        return HostUnavailableError(f"{what} is being loaded, which takes longer; ask again in a moment.")
