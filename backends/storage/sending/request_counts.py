"""Counts of a process's requests to checkpoint storage, by kind and by location, and their bytes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from backends.bounded_dict import BoundedDict
from backends.buckets import BucketCounts, HistogramBuckets
from backends.storage.sending.trouble import TroubleTracker

KINDS = {"write": "put", "read": "get", "look up": "head", "list": "list", "delete": "delete"}
"""The kind of request by what ``CheckpointStorage`` calls it in its errors."""
SENT, RECEIVED = "sent_bytes", "received_bytes"
"""Bytes of files that went to storage, and that came from there."""
COUNTED_LOCATIONS = 10_000
DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets in which durations of requests are counted, in seconds."""


class RequestCounts:
    """Requests since the process began, each attempt that was repeated as well. Many threads may share one.

    The parts of a large file count each, and so do the pages of a listing; parts that obstore repeats do not.
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
        """Count requests to a location."""
        with self._lock:
            self._counts[KINDS[verb]] += times
            self._at.setdefault(location, Counter())[KINDS[verb]] += times

    def moved(self, location: str, *, sent: int = 0, received: int = 0) -> None:
        """Count the bytes of files that went to a location, or came from there."""
        with self._lock:
            counts = self._at.setdefault(location, Counter())
            counts[SENT] += sent
            counts[RECEIVED] += received

    def took(self, verb: str, seconds: float, failed: bool) -> None:
        """Take note of how long a counted request took, and whether storage answered with an error."""
        with self._lock:
            self._durations[KINDS[verb]].add(seconds)
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
        """Return the requests to a location by kind, and its bytes: nothing for what was never asked of it."""
        with self._lock:
            return {name: n for name, n in self._at.get(location, {}).items() if n}


def used_since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Return the requests to a location between two answers of ``RequestCounts.at``.

    What is lower than before was forgotten in between, and has begun anew at 0.
    """
    more = {name: n - before.get(name, 0) if n >= before.get(name, 0) else n for name, n in now.items()}
    return {name: n for name, n in more.items() if n}


def used_together(*used: Mapping[str, int]) -> dict[str, int]:
    """Return the sum of what was asked of several locations, or by several processes."""
    return dict(sum((Counter(each) for each in used), Counter()))


def num_requests(used: Mapping[str, int]) -> int:
    """Return how many requests of any kind there were."""
    return sum(used.get(kind, 0) for kind in KINDS.values())
