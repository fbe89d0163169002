"""Hedged requests: a request that takes far longer than usual is sent a second time, and the first answer wins.

Now and then a request takes ten times as long as others, for it has met a slow server, and the same request made again
takes the usual time. The idea is that of "The Tail at Scale" (Dean and Barroso, 2013). Only small requests that may be
carried out twice have a second one: a large request takes long for its size, and would only take longer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
DoneOf: TypeAlias = Callable[[Collection[Future[Any]], float | None], Collection[Future[Any]]]

HEDGED_BYTES = 1 << 20
"""Requests of more bytes are made once."""
REMEMBERED = 128
"""The usual duration is computed from this many durations of each kind."""
FEWEST = 32
"""Nothing is usual before this many requests."""
USUAL_SHARE, TIMES_USUAL = 0.95, 1.5
"""A request is late that takes this many times as long as this share of its kind."""
LEAST_SECONDS = 0.05
"""No request is late before."""
SHARE, MOST_AT_ONCE = 0.05, 8.0
"""At most this share of all requests is made twice, and at most this many in a row: all are late if storage hangs."""
HEDGE_THREADS = 32
"""At most this many requests are made by threads that may be left behind with the one that is late; others are made
once.
"""


class Hedges:
    """The second requests of a process to one bucket. Many threads may share one.

    Memory: ``REMEMBERED`` numbers a kind, and at most ``HEDGE_THREADS`` threads. ``done_of(requests, seconds)`` waits
    until a request is done, and returns the requests that are done. It waits ``seconds`` at most; None: without limit.
    """

    def __init__(self, done_of: DoneOf | None = None) -> None:
        self._done_of = _done_of if done_of is None else done_of
        self._lock = threading.Lock()
        self._durations: dict[str, deque[float]] = {}
        self._credit = MOST_AT_ONCE
        self._under_way = 0
        self._pool: ThreadPoolExecutor | None = None

    def took(self, kind: str, seconds: float) -> None:
        """Take note of how long a small request took that was carried out."""
        with self._lock:
            self._durations.setdefault(kind, deque(maxlen=REMEMBERED)).append(seconds)

    def late_after(self, kind: str) -> float | None:
        """Return after how many seconds a request of a kind is late; None while that is not known."""
        with self._lock:
            known = sorted(self._durations.get(kind, ()))
        if len(known) < FEWEST:
            return None
        return max(LEAST_SECONDS, TIMES_USUAL * known[int(USUAL_SHARE * len(known))])

    def first_answer(self, kind: str, attempt: Callable[[], T], on_second: Callable[[], None]) -> T:
        """Return the result of ``attempt``, which is called once more, by another thread, if the first call is late.

        ``on_second`` is called before the second call. The first call that returns wins; the other one goes on in its
        thread until it ends. Raises what the first call has raised if neither returns.
        """
        late = self.late_after(kind)
        first = None if late is None else self._started(attempt)
        if first is None:
            return attempt()
        calls = [first]
        if not self._done_of(calls, late) and self._may_have_second():
            on_second()
            second = self._started(attempt)
            if second is not None:
                calls.append(second)
        while calls:
            done = self._done_of(calls, None)
            answered = [call for call in calls if call in done and call.exception() is None]
            if answered:
                return answered[0].result()
            calls = [call for call in calls if call not in done]
        return first.result()

    def _may_have_second(self) -> bool:
        with self._lock:
            if self._credit < 1:
                return False
            self._credit -= 1
            return True

    def _started(self, attempt: Callable[[], T]) -> Future[T] | None:
        """Call by another thread; None if all are at work."""
        with self._lock:
            if self._under_way >= HEDGE_THREADS:
                return None
            self._under_way += 1
            self._credit = min(MOST_AT_ONCE, self._credit + SHARE)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(HEDGE_THREADS, thread_name_prefix="statestore-storage")
        call = self._pool.submit(attempt)
        call.add_done_callback(self._ended)
        return call

    def _ended(self, _: Future[Any]) -> None:
        with self._lock:
            self._under_way -= 1


def _done_of(calls: Collection[Future[Any]], seconds: float | None) -> Collection[Future[Any]]:
    return wait(calls, seconds, return_when=FIRST_COMPLETED).done
