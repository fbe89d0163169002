"""Admission control: the limits of a server, how requests wait for their turn, and statistics of the answers."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.exceptions import TooManyRequestsError
from spark_bridge.queryable.protocol import MAX_HEADER_BYTES

# ``RequestLimits``: the bounds of a ``KvStateServer``, so that a greedy client cannot stop a stream.
#
# After Envoy's overload settings and Redis' ``maxclients``, ``timeout`` and query-buffer limits: everything that a
# client can make grow has a bound.


MAX_FRAME_BYTES = (1 << 32) - 1
"""The lengths in a frame are uint32."""


@dataclass(frozen=True)
class RequestLimits:
    """The limits of one server. Raises ``InvalidStateStoreArgument`` for a limit so low that no request could be
    answered.

    - ``max_request_bytes``: header and body of one request.
    - ``max_keys``: keys of one request.
    - ``scan_seconds``: the time that a scan, or another answer of many batches, may take, with the client's reading.
    - ``max_requests``: lookups that are processed at once; separately as many that are forwarded to other hosts.
    - ``max_scans``: scans, counts and change feeds that are open at once; separately as many that are forwarded, and as
      many lookups of either kind that load an old version or answer with many rows.
    - ``max_connections``: connections at once of clients with a valid token.
    - ``idle_seconds``: a connection that asks for nothing for this long is closed.
    - ``max_buffered_bytes``: the bytes of all large requests that are arriving and all large answers that are leaving.
    - ``transfer_seconds``: the most seconds for a request to arrive once it has begun, and for a client to take an
      answer of one frame.
    - ``wait_seconds``: the time that a request waits for admission before it fails with ``TooManyRequestsError``.
    """

    max_request_bytes: int = 64 << 20
    max_keys: int = 1_000_000
    scan_seconds: float = 600.0
    max_requests: int = 64
    max_scans: int = 8
    max_connections: int = 512
    idle_seconds: float = 900.0
    max_buffered_bytes: int = 1024 << 20
    transfer_seconds: float = 60.0
    wait_seconds: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_int = field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if is_int else (int, float)):
                raise InvalidStateStoreArgument(
                    f"RequestLimits.{field.name} must be {'an int' if is_int else 'a number of seconds'}, not "
                    f"{value!r}."
                )
            if not 0 < value < math.inf:
                raise InvalidStateStoreArgument(
                    f"RequestLimits.{field.name} must be positive and finite, not {value!r}."
                )
        if not 4096 <= self.max_request_bytes <= MAX_FRAME_BYTES:
            raise InvalidStateStoreArgument(
                f"RequestLimits.max_request_bytes must be from 4096 to {MAX_FRAME_BYTES} (a frame states its length "
                f"in 32 bits), not {self.max_request_bytes}."
            )
        if not self.max_request_bytes + MAX_HEADER_BYTES <= self.max_buffered_bytes:
            raise InvalidStateStoreArgument(
                f"RequestLimits.max_buffered_bytes ({self.max_buffered_bytes}) must have room for one request of "
                f"max_request_bytes ({self.max_request_bytes}) and {MAX_HEADER_BYTES} more."
            )


MAX_QUEUE = 4096
COORDINATOR_REQUESTS = 4
"""At most this many requests to the coordinator at once, which must have time for commits."""
COMPUTE_PATIENCE_SECONDS = 0.05


class AdmissionLimiter:
    """Admits an ``amount`` of something at once.

    Further requests wait in order (``threading.Semaphore`` lets newcomers overtake). ``what`` names it in errors. The
    lock guards the free amount and the queue.
    """

    def __init__(self, amount: int, what: str) -> None:
        self.amount = amount
        self._free = amount
        self._what = what
        self._lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()

    def acquire(self, wait_seconds: float, amount: int = 1) -> None:
        """Take ``amount``. Raises ``TooManyRequestsError`` if it is not free after ``wait_seconds``."""
        with self._lock:
            if not self._waiting and self._free >= amount:
                self._free -= amount
                return
            if amount > self.amount or len(self._waiting) >= MAX_QUEUE:
                raise self._refusal(wait_seconds=0.0, amount=amount)
            waiter = _Waiter(amount, threading.Event())
            self._waiting.append(waiter)
        if waiter.admitted.wait(wait_seconds):
            return
        with self._lock:
            if waiter.admitted.is_set():
                return  # admitted just now
            self._waiting.remove(waiter)
            self._admit()  # the next waiter may need less
        raise self._refusal(wait_seconds, amount)

    def release(self, amount: int = 1) -> None:
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
            f"{wait_seconds:g} s; try again later, or ask other hosts."
        )


class _Waiter(NamedTuple):
    amount: int
    admitted: threading.Event


class ComputeSlot:
    """Lets threads compute one at a time: a ``with`` waits until the slot is free.

    Every call of numpy and Arrow releases the interpreter's lock and wants it back at once. With eight such threads,
    half of all time is spent handing the lock over. The slot is not a limit: a thread that has waited ``patience``
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

    Forwarded requests have separate limiters: otherwise two hosts that forward to each other would wait for each other.
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


# A histogram of latencies, for percentiles in little memory.


SUB_BUCKETS = 8
"""Buckets per power of two. A percentile is the middle of its bucket, so it is wrong by 1/16 (6 %) at most."""
OCTAVES = 26
"""Powers of two, from 1 us to 67 s (2^26 us). Faster and slower requests count as the first or last."""
QUANTILES = (0.5, 0.9, 0.99)
_frexp = math.frexp


class LatencyHistogram:
    """Counts by powers of two in linear steps, as HdrHistogram (Gil Tene), in 1.6 KB; not for several threads."""

    __slots__ = ("counts", "total")

    def __init__(self, counts: array[int] | None = None, total: int = 0) -> None:
        self.counts = array("Q", bytes(8 * SUB_BUCKETS * OCTAVES)) if counts is None else counts
        self.total = total

    def add(self, seconds: float) -> None:
        self.counts[bucket_of(seconds)] += 1
        self.total += 1

    def since(self, earlier: LatencyHistogram) -> LatencyHistogram:
        counts = array("Q", [a - b for a, b in zip(self.counts, earlier.counts, strict=True)])
        return LatencyHistogram(counts, self.total - earlier.total)

    def copy(self) -> LatencyHistogram:
        return LatencyHistogram(self.counts[:], self.total)

    def counts_up_to(self, bounds: Sequence[float]) -> list[int]:
        """Return how many latencies were at most each bound, in ascending seconds, and then how many there are.

        A bucket counts for the first bound that its middle does not exceed.
        """
        counts = [0] * (len(bounds) + 1)
        for bucket, count in enumerate(self.counts):
            if count:
                counts[bisect_left(bounds, middle_of(bucket))] += count
        return list(accumulate(counts))

    def quantiles(self) -> list[float]:
        """Return the seconds that the shares ``QUANTILES`` of requests did not exceed; 0.0 without requests."""
        if not self.total:
            return [0.0] * len(QUANTILES)
        seen = list(accumulate(self.counts))
        return [middle_of(bisect_left(seen, share * self.total)) for share in QUANTILES]


def bucket_of(seconds: float) -> int:
    """Return the bucket of a latency in seconds."""
    mantissa, exponent = _frexp(seconds * 1e6)
    if exponent < 1:
        return 0
    if exponent > OCTAVES:
        return SUB_BUCKETS * OCTAVES - 1
    return (exponent - 1) * SUB_BUCKETS + int((mantissa - 0.5) * (2 * SUB_BUCKETS))


def middle_of(bucket: int) -> float:
    """Return the middle of a bucket, in seconds."""
    octave, step = divmod(bucket, SUB_BUCKETS)
    return float(1 << octave) * (1 + (step + 0.5) / SUB_BUCKETS) * 1e-6


# Statistics of a host's answers: requests, failures and latency percentiles by operator and verb.
#
# ``describe()`` has them since the start, Ray's metrics since they were last taken.


MAX_SERIES = 512
"""The most pairs of operator and verb with separate counts. Names come from clients, and must not make memory grow."""
OTHER = "(other)"
"""The operator under which requests for unknown operators are counted, and those beyond ``MAX_SERIES``."""


class _Series:
    """One operator and verb; the lock guards all figures."""

    __slots__ = ("failures", "histogram", "lock", "slowest")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.histogram = LatencyHistogram()
        self.failures = 0
        self.slowest = 0.0

    def observe(self, seconds: float, failed: bool) -> None:
        with self.lock:
            self.histogram.add(seconds)
            self.failures += failed
            self.slowest = max(self.slowest, seconds)


@dataclass(frozen=True)
class RequestDelta:
    """The figures and latencies of one operator and verb since the deltas were last taken."""

    operator: str
    verb: str
    requests: int
    failures: int
    latencies: LatencyHistogram


class RequestStatistics:
    """Counts requests; safe from many threads.

    An operator gets its own figures once a request for it has been answered. Until then, and beyond ``MAX_SERIES``,
    it counts as ``OTHER``. Requests that name no operator have the operator "". One lock guards the set of series,
    another the taken deltas.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], _Series] = {}
        self._operators: set[str] = {"", OTHER}
        self._lock = threading.Lock()
        self._taking = threading.Lock()
        self._taken: dict[tuple[str, str], tuple[LatencyHistogram, int]] = {}

    def observe(self, operator: str, verb: str, seconds: float, failed: bool = False) -> None:
        """Count one request, which took ``seconds``. ``verb`` is one of ``VERBS``, never a client's word."""
        series = self._series.get((operator, verb))
        if series is None:
            series = self._new_series(operator, verb, failed)
        series.observe(seconds, failed)

    def _new_series(self, operator: str, verb: str, failed: bool) -> _Series:
        with self._lock:
            is_full = len(self._series) >= MAX_SERIES
            if operator not in self._operators:
                if failed or is_full:
                    operator = OTHER
                else:
                    self._operators.add(operator)
            elif is_full and operator:
                operator = OTHER
            return self._series.setdefault((operator, verb), _Series())

    def snapshot(self, operator: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the figures since the start, by operator and verb.

        They are ``requests``, ``failures``, ``p50_ms``, ``p90_ms``, ``p99_ms``, ``max_ms``. With ``operator`` only
        those of one operator.
        """
        answer: dict[str, dict[str, dict[str, Any]]] = {}
        for (name, verb), series in self._all():
            if operator is not None and name != operator:
                continue
            with series.lock:
                histogram, failures, slowest = series.histogram.copy(), series.failures, series.slowest
            latencies = zip(QUANTILES, histogram.quantiles(), strict=True)
            answer.setdefault(name, {})[verb] = {
                "requests": histogram.total,
                "failures": failures,
                **{f"p{q * 100:g}_ms": round(min(s, slowest) * 1e3, 3) for q, s in latencies},
                "max_ms": round(slowest * 1e3, 3),
            }
        return answer

    def deltas(self) -> list[RequestDelta]:
        """Return the figures since the last call, of operators and verbs with requests."""
        changes = []
        with self._taking:
            for key, series in self._all():
                with series.lock:
                    histogram, failures = series.histogram.copy(), series.failures
                before, failures_before = self._taken.get(key) or (LatencyHistogram(), 0)
                since = histogram.since(before)
                if not since.total:
                    continue
                self._taken[key] = histogram, failures
                changes.append(RequestDelta(*key, since.total, failures - failures_before, since))
        return changes

    def _all(self) -> list[tuple[tuple[str, str], _Series]]:
        with self._lock:
            return sorted(self._series.items())
