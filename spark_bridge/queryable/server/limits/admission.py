"""Admission control: how many requests a server works on at once, and how the other requests wait for their turn."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from spark_bridge.exceptions import TooManyRequestsError
from spark_bridge.queryable.server.limits.request_limits import RequestLimits

MAX_QUEUE = 4096
COORDINATOR_REQUESTS = 4
"""Requests about operators and hosts that are answered at once: the coordinator answers them, and has commits to take.
"""
COMPUTE_PATIENCE_SECONDS = 0.05


class AdmissionLimiter:
    """Admits an ``amount`` of something at once.

    The others wait in order (``threading.Semaphore`` lets newcomers overtake). ``what`` names it in errors. The lock
    guards the free amount and the queue.
    """

    def __init__(self, amount: int, what: str) -> None:
        self.amount = amount
        self._free = amount
        self._what = what
        self._lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()

    def acquire(self, wait_seconds: float, amount: int = 1) -> None:
        """Take ``amount``, after ``wait_seconds`` at most.

        Raises ``TooManyRequestsError`` if so much is not free by then.
        """
        with self._lock:
            if not self._waiting and self._free >= amount:
                self._free -= amount
                return
            if amount > self.amount or len(self._waiting) >= MAX_QUEUE:
                raise self._refusal(wait_seconds=0.0, amount=amount)
            waiter = _Waiter(amount)
            self._waiting.append(waiter)
        if waiter.admitted.wait(wait_seconds):
            return
        with self._lock:
            if waiter.admitted.is_set():
                return  # admitted in this very moment
            self._waiting.remove(waiter)
            self._admit()  # the next waiter may want less
        raise self._refusal(wait_seconds, amount)

    def release(self, amount: int = 1) -> None:
        """Give ``amount`` back."""
        with self._lock:
            self._free += amount
            if self._waiting:
                self._admit()

    @contextmanager
    def admitted(self, wait_seconds: float) -> Iterator[None]:
        """Take one for a ``with``. Raises ``TooManyRequestsError``."""
        self.acquire(wait_seconds)
        try:
            yield
        finally:
            self.release()

    @property
    def taken(self) -> int:
        """The amount that is taken now."""
        return self.amount - self._free

    def _admit(self) -> None:
        while self._waiting and self._free >= self._waiting[0].amount:
            waiter = self._waiting.popleft()
            self._free -= waiter.amount
            waiter.admitted.set()

    def _refusal(self, wait_seconds: float, amount: int) -> TooManyRequestsError:
        wanted = f"{amount:,} more" if amount > 1 else "one more"
        return TooManyRequestsError(
            f"This host has room for {self.amount:,} {self._what} at once and found none for {wanted} within "
            f"{wait_seconds:g} s; "
            "try again later, or ask other hosts."
        )


class _Waiter:
    __slots__ = ("admitted", "amount")

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self.admitted = threading.Event()


class ComputeSlot:
    """Lets threads compute one at a time: a ``with`` waits until the slot is free.

    Every call of numpy and Arrow releases the interpreter's lock and wants it back at once. With eight threads that do
    so, half of all time is spent handing the lock over. The slot is no limit: a thread that has waited ``patience``
    seconds takes the slot from its holder. The holder may be waiting for something else, and so delays only one other
    thread.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._released = threading.Condition()
        self._holder: object | None = None
        self._of_thread = threading.local()

    def __enter__(self) -> None:
        with self._released:
            self._released.wait_for(lambda: self._holder is None, self._patience)
            self._holder = self._of_thread.token = object()

    def __exit__(self, *_: object) -> None:
        with self._released:
            if self._holder is self._of_thread.token:
                self._holder = None
                self._released.notify()


class AdmissionControl:
    """The limiters of one server, by kind of request.

    Forwarded requests have limiters of their own: two hosts that forward to each other would wait for each other
    otherwise.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self.lookups = AdmissionLimiter(limits.max_requests, "lookups")
        self.forwarded_lookups = AdmissionLimiter(limits.max_requests, "lookups for other hosts")
        # Lookups that have to load an old version, or have many rows, move here: the other lookups must not wait for
        # them.
        self.slow = AdmissionLimiter(limits.max_scans, "long lookups")
        self.forwarded_slow = AdmissionLimiter(limits.max_scans, "long lookups for other hosts")
        # These may wait for the coordinator, and lookups must not wait for them.
        self.locates = AdmissionLimiter(COORDINATOR_REQUESTS, "questions about locations")
        self.descriptions = AdmissionLimiter(COORDINATOR_REQUESTS, "questions about operators and hosts")
        self.forwarded_descriptions = AdmissionLimiter(COORDINATOR_REQUESTS, "questions to other hosts")
        self.scans = AdmissionLimiter(limits.max_scans, "scans")
        self.forwarded_scans = AdmissionLimiter(limits.max_scans, "scans for other hosts")
        self.buffered_bytes = AdmissionLimiter(limits.max_buffered_bytes, "bytes of large requests and answers")
        self.connections = AdmissionLimiter(limits.max_connections, "connections")
        self.compute_slot = ComputeSlot(COMPUTE_PATIENCE_SECONDS)


def seconds_left(deadline: float) -> float:
    """Return the seconds until a deadline, a time of ``time.monotonic``; not below 0."""
    return max(0.0, deadline - time.monotonic())
