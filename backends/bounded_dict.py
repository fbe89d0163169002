"""A dict that remembers a bounded number of entries."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """Keep ``limit`` entries, and forget the oldest ones.

    Setting a key again keeps its place, so that readers without a lock never miss it. Has no lock of its own.
    Only ``d[key] = value`` and ``setdefault`` are bounded. Raises ``ValueError`` for a limit below 1.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        if limit < 1:
            raise ValueError(f"limit={limit} must be at least 1.")
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            del self[next(iter(self))]

    def setdefault(self, key: K, default: V) -> V:
        """Return the entry of ``key``; set ``default`` first where there is none."""
        if key not in self:
            self[key] = default
        return self[key]
