"""Faults of storage, for people: the requests of a process that fail, and those that get no answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from backends.bounded_dict import BoundedDict
from backends.storage.sending.failures import first_line, for_people

FAILURE_SECONDS = 60.0
"""A failure is reported for this many seconds."""
WAITING_SECONDS = 5.0
"""A request that has had no answer for this many seconds is reported."""
MOST_LOCATIONS = 1_000
MOST_FAILURES = 100
LONGEST_TEXT = 300


@dataclass
class _Place:
    """One location: when its last requests failed and how, and when a request of each kind was last answered."""

    failed: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_FAILURES))
    error: str = ""
    kind: str = ""
    """Of the last request that failed. Storage may refuse writes and answer reads: a full disk, a lost permission."""
    answered: dict[str, float] = field(default_factory=dict)


class TroubleTracker:
    """Knows the last failures by location, and the requests that are under way. Many threads may share one.

    It holds one entry for each request under way, and ``MOST_FAILURES`` moments for each location that has failed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._under_way: dict[int, tuple[str, str, float]] = {}
        self._places: BoundedDict[str, _Place] = BoundedDict(MOST_LOCATIONS)

    def began(self, kind: str, location: str) -> int:
        """Take note of a request to a location. Return its number, with which ``ended`` must be called."""
        with self._lock:
            number = next(self._numbers)
            self._under_way[number] = (kind, location, self._clock())
            return number

    def ended(self, number: int, error: BaseException | None) -> None:
        """Take note that a request was answered, or failed."""
        text = "" if error is None else for_people(first_line(error), LONGEST_TEXT)
        with self._lock:
            kind, location, _ = self._under_way.pop(number)
            if error is None:
                known = self._places.get(location)
                if known is not None:
                    known.answered[kind] = self._clock()
                return
            place = self._places.setdefault(location, _Place())
            place.failed.append(self._clock())
            place.kind, place.error = kind, f"{kind}: {text}"

    def read(self) -> list[dict[str, Any]]:
        """Return the troubles by location, as JSON types; none for storage that answers.

        ``failures`` of the last minute (``MOST_FAILURES`` at most), the last with ``error``, ``failed_seconds`` ago;
        ``answered_since``: a request of its kind was answered after that failure; ``waiting`` requests have had no
        answer for ``WAITING_SECONDS``, the longest for ``waiting_seconds``.
        """
        with self._lock:
            now = self._clock()
            waiting: dict[str, list[float]] = {}
            for _, location, began in self._under_way.values():
                if now - began >= WAITING_SECONDS:
                    waiting.setdefault(location, []).append(now - began)
            failed = {at: p for at, p in self._places.items() if p.failed and now - p.failed[-1] < FAILURE_SECONDS}
            found = []
            for location in sorted({*waiting, *failed}):
                place, seconds = failed.get(location, _Place()), waiting.get(location, [])
                last = place.failed[-1] if place.failed else now
                found.append(
                    {
                        "location": location,
                        "failures": sum(now - at < FAILURE_SECONDS for at in place.failed),
                        "error": place.error,
                        "failed_seconds": round(now - last, 1),
                        "answered_since": place.answered.get(place.kind, last) > last,
                        "waiting": len(seconds),
                        "waiting_seconds": round(max(seconds, default=0.0), 1),
                    }
                )
            return found
