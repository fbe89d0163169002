"""Loads that requests wait for a moment only: they go on without them, and who asks again finds what has been loaded.

A request has one of the host's turns as long as it is worked on. If all of them were spent waiting for one partition, nobody would be answered
from the partitions that are there.
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
"""So many go on together; others wait for them."""
MOST_WAITING = 16
"""So many requests wait at once, a part of the turns there are; others are told at once to ask again."""


class BackgroundLoads:
    """Thread-safe. Nobody waits longer than ``wait_seconds``."""

    def __init__(self, wait_seconds: float, *, at_once: int = LOADS_AT_ONCE, most_waiting: int = MOST_WAITING) -> None:
        self.wait_seconds = wait_seconds
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="statestore-read-load")
        self._waiting = threading.Semaphore(most_waiting)
        self._lock = threading.Lock()
        self._running: dict[Hashable, Future[Any]] = {}

    def result(self, key: Hashable, load: Callable[[], T], what: str) -> T:
        """What ``load`` returns or raises, in another thread: once for all that ask for ``key`` meanwhile.

        Raises ``HostUnavailableError``, with ``what`` in its message, if that takes too long; it goes on then.
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
        """Be one of those who wait. Raises ``HostUnavailableError`` if there are as many as may be."""
        if not self._waiting.acquire(blocking=False):
            raise self.unavailable(what)
        try:
            yield
        finally:
            self._waiting.release()

    def unavailable(self, what: str) -> HostUnavailableError:
        """The error for who has waited, or cannot."""
        return HostUnavailableError(f"{what} is being loaded, which takes longer; ask again in a moment.")
