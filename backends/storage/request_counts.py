"""How many requests a process has made to the storage of checkpoints, by kind and by location."""

from __future__ import annotations

import threading
from collections import Counter

from backends.bounded_dict import BoundedDict
from backends.buckets import BucketCounts, Buckets

KINDS = {"write": "put", "read": "get", "look up": "head", "list": "list", "delete": "delete"}
"""The kind of request by what ``CheckpointStorage`` calls it in its errors."""
REMEMBERED_LOCATIONS = 10_000
DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets in which durations of requests are counted, in seconds."""


class RequestCounts:
    """Requests since the process began, each attempt that was repeated as well. Many threads may share one.

    A large file that goes up in parts, or comes down in pieces, counts as one; so does a listing of many pages.
    """

    def __init__(self) -> None:
        self._counts = Counter(dict.fromkeys(KINDS.values(), 0))
        self._failures = Counter(dict.fromkeys(KINDS.values(), 0))
        self._durations = {kind: BucketCounts(DURATIONS) for kind in KINDS.values()}
        self._at: BoundedDict[str, int] = BoundedDict(REMEMBERED_LOCATIONS)
        self._lock = threading.Lock()

    def note(self, verb: str, location: str = "") -> None:
        """Count a request to a location."""
        with self._lock:
            self._counts[KINDS[verb]] += 1
            self._at[location] = self._at.get(location, 0) + 1

    def took(self, verb: str, seconds: float, failed: bool) -> None:
        """Take note of how long a counted request took, and whether storage answered with an error."""
        with self._lock:
            self._durations[KINDS[verb]].add(seconds)
            self._failures[KINDS[verb]] += failed

    def failures(self) -> dict[str, int]:
        """Return how many requests storage answered with an error, or not at all, by kind."""
        with self._lock:
            return dict(self._failures)

    def durations(self) -> dict[str, Buckets]:
        """Return how long requests took, by kind."""
        with self._lock:
            return {kind: counts.read() for kind, counts in self._durations.items()}

    def read(self) -> dict[str, int]:
        """Return the counts by kind: put, get, head, list, delete."""
        with self._lock:
            return dict(self._counts)

    def at(self, location: str) -> int:
        """Return how many requests of any kind were made to a location."""
        with self._lock:
            return self._at.get(location, 0)
