"""The state that all requests of a process to one bucket share: their pace, and the usual durations."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from backends.bounded_dict import BoundedDict
from backends.storage.sending.hedges import Hedges
from backends.storage.sending.pace import AdaptiveRateLimit

REMEMBERED_BUCKETS = 1000


@dataclass(frozen=True)
class Traffic:
    """The pace of a bucket, and the second requests for late ones; None where no request has one."""

    pace: AdaptiveRateLimit
    hedges: Hedges | None


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
        """Return the rate limit and the hedges that the requests to a bucket share; ``bucket`` is its name with the
        service that has it.
        """
        with self._lock:
            pace = AdaptiveRateLimit(bucket, self._clock, self._draw)
            return self._known.setdefault(bucket, Traffic(pace, Hedges() if with_hedges else None))


_OF_PROCESS = BucketTraffic()


def buckets_of_process() -> BucketTraffic:
    """Return those that all storages of this process share.

    A function, so that a task of Spark, which is pickled with what opens its storage, takes no lock along.
    """
    return _OF_PROCESS
