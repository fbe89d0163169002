"""The threads that answer messages. A query whose storage hangs does not delay messages about other queries.

Messages about leases and locations wait for no storage and for no lock that is held over storage: they are answered at
once, by the thread that takes the messages of their group. Registrations have separate threads. All others are answered
in the threads of their query (``QueryThreads``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

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
