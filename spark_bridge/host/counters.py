"""The counters of a host, for its description."""

from __future__ import annotations

import threading


class Counters:
    """Counts since the host started.

    Thread-safe: the lock is held for one addition and nothing else is locked meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"opens": 0, "commits": 0, "keys_written": 0, "keys_read": 0, "loads": 0, "snapshots": 0}

    def add(self, name: str, number: int = 1) -> None:
        """Add to one count."""
        with self._lock:
            self._counts[name] += number

    def read(self) -> dict[str, int]:
        """Return all counts by name."""
        with self._lock:
            return dict(self._counts)
