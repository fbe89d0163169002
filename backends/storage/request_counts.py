"""How many requests a process has made to the storage of checkpoints, by kind and by location."""

from __future__ import annotations

import threading
from collections import Counter

from backends.bounded_dict import BoundedDict

KINDS = {"write": "put", "read": "get", "look up": "head", "list": "list", "delete": "delete"}
"""The kind of request by what ``CheckpointStorage`` calls it in its errors."""
REMEMBERED_LOCATIONS = 10_000


class RequestCounts:
    """Requests since the process began, each attempt that was repeated as well. Many threads may share one.

    A large file that goes up in parts, or comes down in pieces, counts as one; so does a listing of many pages.
    """

    def __init__(self) -> None:
        self._counts = Counter(dict.fromkeys(KINDS.values(), 0))
        self._at: BoundedDict[str, int] = BoundedDict(REMEMBERED_LOCATIONS)
        self._lock = threading.Lock()

    def note(self, verb: str, location: str = "") -> None:
        """Count a request to a location."""
        with self._lock:
            self._counts[KINDS[verb]] += 1
            self._at[location] = self._at.get(location, 0) + 1

    def read(self) -> dict[str, int]:
        """Return the counts by kind: put, get, head, list, delete."""
        with self._lock:
            return dict(self._counts)

    def at(self, location: str) -> int:
        """Return how many requests of any kind were made to a location."""
        with self._lock:
            return self._at.get(location, 0)
