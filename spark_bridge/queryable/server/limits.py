"""What a ``KvStateServer`` allows, so that a greedy client cannot stop a stream, and how requests wait for their turn.

After Envoy's overload settings and Redis' ``maxclients``, ``timeout`` and query-buffer limits: everything that a client can make grow has a bound.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.exceptions import TooManyRequestsError
from spark_bridge.queryable.protocol.messages import MAX_HEADER_BYTES

MIB = 1 << 20
MAX_FRAME_BYTES = (1 << 32) - 1
"""The lengths in a frame are uint32."""


@dataclass(frozen=True)
class RequestLimits:
    """What one server allows. Raises ``InvalidStateStoreArgument`` for a limit under which nothing could be answered.

    - ``max_request_bytes``: header and body of one request.
    - ``max_keys``: keys of one request.
    - ``scan_seconds``: how long a scan, or another answer of many batches, may take, the client's reading included.
    - ``max_requests``: lookups that are worked on at once; separately as many that are forwarded to other hosts.
    - ``max_scans``: scans, counts and change feeds that are open at once; separately as many that are forwarded, and as many lookups of
      either kind that load an old version or answer with many rows.
    - ``max_connections``: connections at once of clients that have said who they are.
    - ``idle_seconds``: a connection that asks for nothing for so long is closed.
    - ``max_buffered_bytes``: what large requests that are arriving and large answers that are leaving take together.
    - ``transfer_seconds``: within which a request must have arrived, once it has begun, and an answer of one frame been taken.
    - ``wait_seconds``: how long a request waits for its turn before it fails with ``TooManyRequestsError``.
    """

    max_request_bytes: int = 64 * MIB
    max_keys: int = 1_000_000
    scan_seconds: float = 600.0
    max_requests: int = 64
    max_scans: int = 8
    max_connections: int = 512
    idle_seconds: float = 900.0
    max_buffered_bytes: int = 1024 * MIB
    transfer_seconds: float = 60.0
    wait_seconds: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_int = field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if is_int else (int, float)):
                raise InvalidStateStoreArgument(
                    f"RequestLimits.{field.name} must be {'an int' if is_int else 'a number of seconds'}, not {value!r}."
                )
            if not 0 < value < math.inf:
                raise InvalidStateStoreArgument(
                    f"RequestLimits.{field.name} must be positive and finite, not {value!r}."
                )
        if not 4096 <= self.max_request_bytes <= MAX_FRAME_BYTES:
            raise InvalidStateStoreArgument(
                f"RequestLimits.max_request_bytes must be from 4096 to {MAX_FRAME_BYTES} (a frame states its length in 32 bits), "
                f"not {self.max_request_bytes}."
            )
        if not self.max_request_bytes + MAX_HEADER_BYTES <= self.max_buffered_bytes:
            raise InvalidStateStoreArgument(
                f"RequestLimits.max_buffered_bytes ({self.max_buffered_bytes}) must have room for one request of max_request_bytes "
                f"({self.max_request_bytes}) and {MAX_HEADER_BYTES} more."
            )


class Turns:
    """So many of something at once; the others wait in the order in which they came (``threading.Semaphore`` lets newcomers overtake).

    ``what`` names it in errors.
    """

    def __init__(self, amount: int, what: str) -> None:
        self.amount = amount
        self._free = amount
        self._what = what
        self._lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()

    def acquire(self, wait_seconds: float, amount: int = 1) -> None:
        """Take ``amount``, at the latest after ``wait_seconds``. Raises ``TooManyRequestsError`` if there is not so much by then."""
        with self._lock:
            if not self._waiting and self._free >= amount:
                self._free -= amount
                return
            if amount > self.amount or len(self._waiting) >= 4096:
                raise self._refusal(wait_seconds=0.0, amount=amount)
            waiter = _Waiter(amount)
            self._waiting.append(waiter)
        if waiter.served.wait(wait_seconds):
            return
        with self._lock:
            if waiter.served.is_set():
                return  # in this very moment
            self._waiting.remove(waiter)
            self._serve()  # whoever waits behind may want less
        raise self._refusal(wait_seconds, amount)

    def release(self, amount: int = 1) -> None:
        """Give it back."""
        with self._lock:
            self._free += amount
            if self._waiting:
                self._serve()

    @contextmanager
    def turn(self, wait_seconds: float) -> Iterator[None]:
        """Take one for a ``with``. Raises ``TooManyRequestsError``."""
        self.acquire(wait_seconds)
        try:
            yield
        finally:
            self.release()

    @property
    def taken(self) -> int:
        """How much is taken now."""
        return self.amount - self._free

    def _serve(self) -> None:
        while self._waiting and self._free >= self._waiting[0].amount:
            waiter = self._waiting.popleft()
            self._free -= waiter.amount
            waiter.served.set()

    def _refusal(self, wait_seconds: float, amount: int) -> TooManyRequestsError:
        wanted = f"{amount:,} more" if amount > 1 else "one more"
        return TooManyRequestsError(
            f"This host has room for {self.amount:,} {self._what} at once and found none for {wanted} within {wait_seconds:g} s; "
            "try again later, or ask other hosts."
        )


class Crowd:
    """Keeps threads that compute out of each other's way: for a ``with``, one at a time.

    Every call of numpy and Arrow gives the interpreter's lock away and wants it back at once. With eight threads doing so, half of all
    time goes into handing it over. It is no limit: whoever has waited ``patience`` seconds takes the place of the one inside, who may be
    waiting for something else, and so keeps only one other waiting.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._left = threading.Condition()
        self._inside: object | None = None
        self._this = threading.local()

    def __enter__(self) -> None:
        with self._left:
            self._left.wait_for(lambda: self._inside is None, self._patience)
            self._inside = self._this.place = object()

    def __exit__(self, *_: object) -> None:
        with self._left:
            if self._inside is self._this.place:
                self._inside = None
                self._left.notify()


class _Waiter:
    """Somebody in the queue."""

    __slots__ = ("amount", "served")

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self.served = threading.Event()


def seconds_left(deadline: float) -> float:
    """Until a ``time.monotonic()`` deadline; not below 0."""
    return max(0.0, deadline - time.monotonic())
