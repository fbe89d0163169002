"""The threads that answer messages. A query whose storage hangs does not delay messages about other queries.

Messages about leases and locations wait for no storage and for no lock that is held over storage: they are answered at
once, by the thread that takes the messages of their group. Registrations have separate threads. All others are answered
in the threads of their query (``QueryThreads``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from backends.background_loop import BackgroundLoop
from coordinator_actor.exceptions import QueryBusyError

# Threads for work that may wait for the storage of a query: each query has a few, and no more (bulkheads).
#
# So storage that hangs for one query does not block the work of another. Work waits in a queue of its query until one
# of these threads is free. The queue is bounded as well.


THREADS_PER_QUERY = 4
"""Most work on a query is serialised anyway, under the lock of its run."""
MAX_WAITING_MESSAGES = 1000
"""The capacity of a query's queue: five messages of each of 200 hosts."""
MAX_THREADS = 4096
"""Threads of all queries together; they are made when needed, and are kept."""

Work = Callable[[], Any]
Apart = Callable[[str, Work], "Future[Any]"]
"""Does work that may wait for the storage of a query, given by its name, independently of the caller.

``QueryThreads.submit`` and ``in_place`` are such functions.
"""


@dataclass
class _Lane:
    """The work of one query: the number of its busy threads, and the waiting work, the oldest first."""

    running: int = 0
    waiting: deque[tuple[Future[Any], Work]] = field(default_factory=deque)


class QueryThreads:
    """Runs the work of each query in separate threads. Thread-safe: ``_lock`` guards the lanes.

    A lane exists while it has work. A query occupies at most ``threads`` threads and ``most_waiting`` pieces of work.
    """

    def __init__(self, threads: int = THREADS_PER_QUERY, most_waiting: int = MAX_WAITING_MESSAGES) -> None:
        self._threads = threads
        self._most_waiting = most_waiting
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="statestore-query-work")

    def submit(self, query: str, work: Work) -> Future[Any]:
        """Begin some work of a query, or queue it. Return its future at once.

        Raises ``QueryBusyError`` if the queue is full.
        """
        future: Future[Any] = Future()
        with self._lock:
            lane = self._lanes.setdefault(query, _Lane())
            if lane.running == self._threads:
                if len(lane.waiting) >= self._most_waiting:
                    raise QueryBusyError(
                        f"{len(lane.waiting)} messages about {query} wait already, and {lane.running} are being "
                        "answered: most likely the storage of that query does not answer. Check it, and retry."
                    )
                lane.waiting.append((future, work))
                return future
            lane.running += 1
        try:
            self._pool.submit(self._run, query, lane, future, work)
        except BaseException:
            with self._lock:
                self._end(query, lane)
            raise
        return future

    def occupied(self) -> dict[str, tuple[int, int]]:
        """Return how many threads are at work for each query, and how much work waits."""
        with self._lock:
            return {query: (lane.running, len(lane.waiting)) for query, lane in self._lanes.items()}

    def _run(self, query: str, lane: _Lane, future: Future[Any], work: Work) -> None:
        while True:
            _settle(future, work)
            with self._lock:
                if not lane.waiting:
                    # In one step: work that comes from now on gets a thread.
                    self._end(query, lane)
                    return
                future, work = lane.waiting.popleft()

    def _end(self, query: str, lane: _Lane) -> None:
        lane.running -= 1
        if lane.running == 0:
            self._lanes.pop(query, None)


def in_place(query: str, work: Work) -> Future[Any]:
    """Do the work before returning: a ``QueryThreads.submit`` for callers that need no other answer in parallel."""
    future: Future[Any] = Future()
    _settle(future, work)
    return future


def _settle(future: Future[Any], work: Work) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
        future.set_exception(error)
    else:
        future.set_result(result)


# The loop that ends leases: it checks them once a second for as long as the coordinator lives.
#
# Nothing else ends the lease of a host or driver that is lost. So each part of a look runs even if the others fail.


log = logging.getLogger(__name__)

LEASE_WATCH_SECONDS = 1.0
"""The seconds between two looks at the leases. A delay of a look shows how long the process was suspended."""


class Watched(Protocol):
    """Something with leases that end: a ``Coordinator``."""

    def expire(self, stood_still: float = 0.0) -> None:
        """End the leases that are over; they have not run for ``stood_still`` seconds."""

    def counts(self) -> tuple[int, int]:
        """Return how many hosts are alive and how many queries are registered."""

    def is_idle(self) -> bool:
        """Return whether no host or driver needs the coordinator any more."""


class LeaseWatch:
    """Checks the leases of a coordinator. The work of a look grows with its hosts and runs, not with partitions.

    ``publish(hosts, queries)`` takes the numbers of live hosts and registered queries, ``end()`` ends the process when
    no message has come for the coordinator's idle timeout. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        coordinator: Watched,
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
