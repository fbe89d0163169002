"""Sends all requests to storage.

Each attempt is counted and timed, and waits for its turn. It is retried where that may help, hedged with
a second request if it is late (``failures.py``), and sent with new credentials if the old ones have expired.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TypeVar

from obstore.exceptions import BaseError

from backends import spans
from backends.exceptions import InvalidStateStoreArgument, StorageError
from backends.host_memory import BoundedDict, BucketCounts, HistogramBuckets
from backends.load_watch import LoadWatch
from backends.storage.failures import Hedges, TroubleTracker, first_line, is_expired, is_throttling, is_transient

# Counts of a process's requests to checkpoint storage, by kind and by location, and their bytes.


KINDS = {"write": "put", "read": "get", "look up": "head", "list": "list", "delete": "delete"}
"""The kind of request by the verb that ``CheckpointStorage`` uses in its errors."""
SENT, RECEIVED = "sent_bytes", "received_bytes"
"""Bytes of files that were sent to storage, and received from it."""
COUNTED_LOCATIONS = 10_000
DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histogram buckets of request durations, in seconds."""


class RequestCounts:
    """Requests since the process began, including every retry. Many threads may share one.

    The parts of a large file count each, and so do the pages of a listing; parts that obstore retries do not.
    ``trouble`` knows those that fail and those that get no answer.
    """

    def __init__(self) -> None:
        self.trouble = TroubleTracker()
        self._counts = Counter(dict.fromkeys(KINDS.values(), 0))
        self._failures = Counter(dict.fromkeys(KINDS.values(), 0))
        self._durations = {kind: BucketCounts(DURATIONS) for kind in KINDS.values()}
        self._at: BoundedDict[str, Counter[str]] = BoundedDict(COUNTED_LOCATIONS)
        self._lock = threading.Lock()

    def note(self, verb: str, location: str = "", times: int = 1) -> None:
        with self._lock:
            self._counts[KINDS[verb]] += times
            self._at.setdefault(location, Counter())[KINDS[verb]] += times

    def moved(self, location: str, *, sent: int = 0, received: int = 0) -> None:
        """Count the bytes of files that were sent to a location, or received from it."""
        with self._lock:
            counts = self._at.setdefault(location, Counter())
            counts[SENT] += sent
            counts[RECEIVED] += received

    def took(self, verb: str, seconds: float, failed: bool) -> None:
        """Record how long a counted request took, and whether storage answered with an error."""
        with self._lock:
            self._durations[KINDS[verb]].count_value(seconds)
            self._failures[KINDS[verb]] += failed

    def failures(self) -> dict[str, int]:
        """Return how many requests storage answered with an error, or not at all, by kind."""
        with self._lock:
            return dict(self._failures)

    def durations(self) -> dict[str, HistogramBuckets]:
        """Return how long requests took, by kind."""
        with self._lock:
            return {kind: counts.read() for kind, counts in self._durations.items()}

    def read(self) -> dict[str, int]:
        """Return the counts by kind: put, get, head, list, delete."""
        with self._lock:
            return dict(self._counts)

    def at(self, location: str) -> dict[str, int]:
        """Return the requests to a location by kind, and its bytes; empty for an unused location."""
        with self._lock:
            return {name: n for name, n in self._at.get(location, {}).items() if n}


def used_since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Return the requests to a location between two answers of ``RequestCounts.at``.

    A count that is lower than before was evicted in between, and restarted at 0.
    """
    more = {name: n - before.get(name, 0) if n >= before.get(name, 0) else n for name, n in now.items()}
    return {name: n for name, n in more.items() if n}


def used_together(*used: Mapping[str, int]) -> dict[str, int]:
    """Return the sum of the requests to several locations, or by several processes."""
    return dict(sum((Counter(each) for each in used), Counter()))


def num_requests(used: Mapping[str, int]) -> int:
    """Return how many requests of any kind there were."""
    return sum(used.get(kind, 0) for kind in KINDS.values())


# The rate limit of requests to one bucket: a process slows down while the service throttles it.
#
# S3 answers 503 "slow down" while a prefix gets more requests than it can serve. If one thread backed off alone, the
# other threads would send in its place. So all threads of a process share one backoff: no thread sends for a moment,
# then the rate restarts at half of the throttled rate, and grows again. The idea is that of the adaptive retry mode of
# Amazon's SDKs, and of TCP.


log = logging.getLogger(__name__)

MIN_RATE = 20.0
"""Minimum rate, in requests a second, even while the service rejects all of them."""
GROWTH = 1.25
"""Growth factor of the rate per second without throttling."""
FREE_AT = 2.0
"""The rate limit ends once the rate is this many times the throttled rate."""
LONGEST_WAIT_SECONDS = 5.0
"""Maximum wait of a request for its turn, however many wait."""


class AdaptiveRateLimit:
    """The rate limit of one bucket. Many threads may share one. Memory: a few numbers.

    ``draw`` returns random numbers from 0 to 1: hosts that were throttled together must not retry together.
    """

    def __init__(
        self, bucket: str, clock: Callable[[], float] = time.monotonic, draw: Callable[[], float] = random.random
    ) -> None:
        self._bucket = bucket
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._rate: float | None = None  # requests a second from _quiet_until on; None: unlimited
        self._quiet_until = 0.0
        self._refused_at = 0.0  # the rate when the service last throttled
        self._turn = 0.0  # when the next request may go
        self._second = 0.0  # the start of the second that counts requests
        self._in_second = self._in_last_second = 0

    @property
    def is_slowed(self) -> bool:
        """Whether requests are throttled now."""
        with self._lock:
            return self._rate_at(self._clock()) is not None

    def wait_seconds(self) -> float:
        """Take a turn for one request, and return the seconds to wait until the turn comes; mostly 0."""
        with self._lock:
            now = self._clock()
            self._count(now)
            rate = self._rate_at(now)
            if rate is None:
                return 0.0
            turn = max(now, self._turn)
            self._turn = min(turn + (0.5 + self._draw()) / rate, now + LONGEST_WAIT_SECONDS)
            return turn - now

    def refused(self, seconds: float) -> None:
        """Record throttling by the service: no thread sends for ``seconds``, and the rate is lower afterwards.

        Requests that were in flight together and are rejected together lower the rate once.
        """
        with self._lock:
            now = self._clock()
            rate = self._rate_at(now)
            if rate is None:
                self._refused_at = rate = max(MIN_RATE, self._in_second, self._in_last_second)
                log.warning("%s throttles requests: they are delayed for some seconds", self._bucket)
                self._rate = max(MIN_RATE, rate / 2)
            elif now >= self._quiet_until:
                self._rate = max(MIN_RATE, rate / 2)
            self._quiet_until = max(self._quiet_until, now + seconds)
            self._turn = max(self._turn, self._quiet_until)

    def _rate_at(self, now: float) -> float | None:
        if self._rate is None:
            return None
        # A request that has waited for minutes may go: the exponent is bounded only so that the power is finite.
        rate: float = self._rate * GROWTH ** min(1000.0, max(0.0, now - self._quiet_until))
        if rate >= FREE_AT * self._refused_at:
            self._rate = None
            return None
        return rate

    def _count(self, now: float) -> None:
        if now - self._second >= 1.0:
            self._in_last_second = self._in_second if now - self._second < 2.0 else 0
            self._in_second, self._second = 0, now
        self._in_second += 1


# The order in which the loads of a process fetch large files of one bucket.
#
# If all partitions share the bandwidth equally, all of them are complete at the same moment, and only then does the
# work begin that needs a processor: opening databases, changelogs, reads, commits. In turn, the first partitions do
# that work while the others fetch.


FETCHES_AT_ONCE = max(8, 4 * len(os.sched_getaffinity(0)))
"""Files of one bucket that the loads of a process fetch at once. A connection to S3 has 50 to 100 MB/s, and one core
handles about 400 MB/s.
"""
FETCH_TURN_SECONDS = 1.0
"""A load that waits for its turn reports progress, and can be ended, once in this many seconds."""


class FetchTurns:
    """Lets ``at_once`` files be fetched at once. Many threads may share one; ``_changed`` guards everything.

    Loads get their turns in the order of their numbers; loads ahead of any request (``is_ahead``) come last.
    Memory: one entry for each thread that waits. A load whose files wait makes progress as long as others do.
    """

    def __init__(self, at_once: int = FETCHES_AT_ONCE) -> None:
        self._free = at_once
        self._changed = threading.Condition()
        self._waiting: dict[object, LoadWatch] = {}
        self._ended = 0

    @contextmanager
    def turn(self, load: LoadWatch) -> Iterator[None]:
        """Wait for the turn of a file of a load, and hold it within the block. Raises what ``load.step`` raises."""
        self._wait(load)
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._ended += 1
                self._changed.notify_all()

    def _wait(self, load: LoadWatch) -> None:
        token = object()
        with self._changed:
            self._waiting[token] = load
        try:
            ended = self._ended
            while not self._taken(token):
                if self._ended != ended:
                    ended = self._ended
                    load.step()
        finally:
            with self._changed:
                self._waiting.pop(token, None)
                self._changed.notify_all()

    def _taken(self, token: object) -> bool:
        """Wait for at most ``FETCH_TURN_SECONDS``; return whether the turn has come, and take it then."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free and self._first() is token, FETCH_TURN_SECONDS):
                return False
            self._free -= 1
            del self._waiting[token]
            return True

    def _first(self) -> object:
        return min(self._waiting, key=lambda token: (self._waiting[token].is_ahead, self._waiting[token].number))


# The state that all requests of a process to one bucket share: their pace, and the usual durations.


REMEMBERED_BUCKETS = 1000


@dataclass(frozen=True)
class Traffic:
    """The rate limit, the hedges and the order of large reads of a bucket; ``hedges`` None: no request is hedged."""

    pace: AdaptiveRateLimit
    hedges: Hedges | None
    turns: FetchTurns = field(default_factory=FetchTurns)


class BucketTraffic:
    """The traffic of each bucket. Many threads may share one; so do all storages of a process.

    See ``buckets_of_process``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, draw: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._known: BoundedDict[str, Traffic] = BoundedDict(REMEMBERED_BUCKETS)

    def of(self, bucket: str, *, with_hedges: bool) -> Traffic:
        """Return the shared rate limit and hedges of a bucket; ``bucket`` is its name with its service."""
        with self._lock:
            pace = AdaptiveRateLimit(bucket, self._clock, self._draw)
            return self._known.setdefault(bucket, Traffic(pace, Hedges() if with_hedges else None))


_OF_PROCESS = BucketTraffic()


def buckets_of_process() -> BucketTraffic:
    """Return the traffic that all storages of this process share.

    It is a function, so that a Spark task, which is pickled with the opener of its storage, does not pickle a lock.
    """
    return _OF_PROCESS


T = TypeVar("T")

_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 5.0
_EXPIRED_REMEDY = (
    "The credentials have expired and could not be renewed. Keys with a session token in the options or in the "
    "environment expire with that token: restart the query with new ones. Only credentials that the process fetches "
    "are renewed: those of an instance profile, a container's endpoint or a web identity."
)


class RequestSender:
    """Sends the requests to one location. Many threads may share one.

    ``traffic`` is the shared state of the bucket's requests, None for a local disk. ``renew`` makes the following calls
    use new credentials, if there are any.
    """

    def __init__(
        self,
        location: str,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        retry_seconds: float,
        counts: RequestCounts,
        traffic: Traffic | None,
        renew: Callable[[], None],
    ) -> None:
        self._location = location
        self._clock = clock
        self._sleep = sleep
        self._retry_seconds = retry_seconds
        self._counts = counts
        self._traffic = traffic
        self._renew = renew

    def send(
        self,
        verb: str,
        path: str,
        call: Callable[[], T],
        *,
        on_second: Callable[[], None] | None = None,
        progress: Callable[[], int] = lambda: 0,
    ) -> T:
        """Return the result of ``call``, which makes a request. Retry it on transient errors.

        Raises ``StorageError`` after ``retry_seconds`` of retries without a change of ``progress``, and at once for a
        permanent error. ``FileExistsError`` passes through. With ``on_second`` the request may be made twice at the
        same time: see ``Hedges.first_answer``.
        """
        with spans.step(f"storage.{KINDS[verb]}", file=path) as span:
            started, wait = self._clock(), _FIRST_WAIT_SECONDS
            before, is_renewed = progress(), False
            self._wait(0.0)
            while True:
                try:
                    return self._attempt(verb, call, on_second)
                except FileExistsError:
                    raise
                except (BaseError, OSError) as error:
                    span.event("failed", error=spans.error_name(error))
                    has_expired = self._traffic is not None and is_expired(error, has_body=verb != "look up")
                    if has_expired and not is_renewed:
                        is_renewed = True
                        self._renew()
                        continue
                    if progress() != before:
                        started, wait, before = self._clock(), _FIRST_WAIT_SECONDS, progress()
                    elapsed = self._clock() - started
                    failed = f"Could not {verb} {self._location}/{path}"
                    if not is_transient(error, is_local=self._traffic is None):
                        remedy = f". {_EXPIRED_REMEDY}" if has_expired else ""
                        raise StorageError(f"{failed}: {first_line(error)}{remedy}") from error
                    if elapsed + wait > self._retry_seconds:
                        raise StorageError(f"{failed}, tried for {elapsed:.1f} s: {first_line(error)}") from error
                    # Jitter keeps many hosts that failed together from retrying together.
                    pause = wait * random.uniform(0.5, 1.0)
                    if self._traffic is not None and is_throttling(error):
                        self._traffic.pace.refused(pause)
                self._wait(pause)
                wait = min(wait * 2, _LONGEST_WAIT_SECONDS)

    def _wait(self, seconds: float) -> None:
        """Wait for ``seconds``, and until it is the turn of a request of this bucket."""
        turn = 0.0 if self._traffic is None else self._traffic.pace.wait_seconds()
        if max(seconds, turn) > 0:
            self._sleep(max(seconds, turn))

    def _attempt(self, verb: str, call: Callable[[], T], on_second: Callable[[], None] | None) -> T:
        traffic = self._traffic
        hedges = None if traffic is None or on_second is None or traffic.pace.is_slowed else traffic.hedges

        def attempt() -> T:
            self._counts.note(verb, self._location)
            asked = self._clock()
            failure: Exception | None = None
            number = self._counts.trouble.began(KINDS[verb], self._location)
            try:
                answer = call()
            except FileExistsError:
                raise
            except (BaseError, OSError) as error:
                failure = error
                raise
            finally:
                self._counts.took(verb, self._clock() - asked, failure is not None)
                self._counts.trouble.ended(number, failure)
            if hedges is not None:
                hedges.took(verb, self._clock() - asked)
            return answer

        if hedges is None or on_second is None:
            return attempt()
        return hedges.first_answer(verb, attempt, on_second)


# Costs of requests to object storage, by a list of prices.


MONTH_SECONDS = 730 * 3600.0


@dataclass(frozen=True)
class Prices:
    """Prices in dollars: of 1,000 requests by kind, and of a GiB sent to storage or received from it.

    The defaults are those of S3 standard in us-east-1, read by machines of the same region: transfer costs nothing
    there. The cost of stored bytes is not included.
    """

    put: float = 0.005
    get: float = 0.0004
    head: float = 0.0004
    list: float = 0.005
    delete: float = 0.0
    sent_gib: float = 0.0
    received_gib: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Prices:
        """Return the prices in a string such as ``put=0.0054,received_gib=0.09``; others are the defaults.

        Raises ``InvalidStateStoreArgument``.
        """
        names = [f.name for f in fields(cls)]
        prices: dict[str, float] = {}
        for entry in filter(None, (e.strip() for e in text.split(","))):
            name, _, value = (part.strip() for part in entry.partition("="))
            try:
                dollars = float(value)
            except ValueError:
                dollars = math.nan
            if name not in names or not 0 <= dollars < math.inf:
                raise InvalidStateStoreArgument(
                    f"{entry!r} is not a price: give {', '.join(f'{n}=' for n in names)} each with dollars of 0 or "
                    "more (for 1,000 requests, or for a GiB), separated by commas."
                )
            prices[name] = dollars
        return cls(**prices)

    def dollars(self, used: Mapping[str, int]) -> float:
        """Return the cost of requests by kind and of their bytes: see ``RequestCounts.at``."""
        requests: float = sum(used.get(kind, 0) * getattr(self, kind) for kind in KINDS.values())
        moved = used.get(SENT, 0) * self.sent_gib + used.get(RECEIVED, 0) * self.received_gib
        return requests / 1000 + moved / (1 << 30)

    def __str__(self) -> str:
        """Return the prices as ``parse`` reads them."""
        return ",".join(f"{f.name}={getattr(self, f.name):g}" for f in fields(self))


STANDARD = Prices()
