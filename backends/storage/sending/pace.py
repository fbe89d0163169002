"""The rate limit of requests to one bucket: a process slows down while the service says that it gets too many.

S3 answers 503 "slow down" while a prefix gets more requests than it can take. If one thread backed off alone, the other
threads would send in its place. So all threads of a process share one backoff: no thread sends for a moment, then
requests go at half the rate at which the service refused, and the rate grows again. The idea is that of the adaptive
retry mode of Amazon's SDKs, and of TCP.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

LEAST_RATE = 20.0
"""Requests a second that go even while the service refuses all of them."""
GROWTH = 1.25
"""By so much the rate grows with each second in which the service refuses nothing."""
FREE_AT = 2.0
"""Nothing is held back any more once the rate is this many times the one at which the service refused."""
LONGEST_WAIT_SECONDS = 5.0
"""No request waits longer for its turn, however many wait."""


class AdaptiveRateLimit:
    """The pace of one bucket. Many threads may share one. Memory: a few numbers.

    ``draw`` returns random numbers from 0 to 1: hosts that were refused together must not come back together.
    """

    def __init__(
        self, bucket: str, clock: Callable[[], float] = time.monotonic, draw: Callable[[], float] = random.random
    ) -> None:
        self._bucket = bucket
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._rate: float | None = None  # requests a second from _quiet_until on; None: as they come
        self._quiet_until = 0.0
        self._refused_at = 0.0  # the rate at which the service refused
        self._turn = 0.0  # when the next request may go
        self._second = 0.0  # the begin of the second in which requests are counted
        self._in_second = self._in_last_second = 0

    @property
    def is_slowed(self) -> bool:
        """Whether requests are held back now."""
        with self._lock:
            return self._rate_at(self._clock()) is not None

    def wait_seconds(self) -> float:
        """Take a turn for one request, and return for how many seconds to wait until the turn comes; mostly 0."""
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
        """Take note that the service has refused a request: nobody sends for ``seconds``, then fewer than before.

        Requests that were under way together and are refused together lower the rate once.
        """
        with self._lock:
            now = self._clock()
            rate = self._rate_at(now)
            if rate is None:
                self._refused_at = rate = max(LEAST_RATE, self._in_second, self._in_last_second)
                log.warning("%s asks for fewer requests: they are held back for some seconds", self._bucket)
                self._rate = max(LEAST_RATE, rate / 2)
            elif now >= self._quiet_until:
                self._rate = max(LEAST_RATE, rate / 2)
            self._quiet_until = max(self._quiet_until, now + seconds)
            self._turn = max(self._turn, self._quiet_until)

    def _rate_at(self, now: float) -> float | None:
        if self._rate is None:
            return None
        # Who has waited for minutes may go: the exponent is bounded only so that the power is a number.
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
