"""The overview that requests share: made at most once a second, however many people look."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from backends.exceptions import StateStoreError
from coordinator_actor.exceptions import CoordinatorError
from spark_bridge.exceptions import SparkBridgeError
from spark_bridge.overview.model import CLUSTER, Overview

log = logging.getLogger(__name__)

PAGE_FRESH_SECONDS = 1.0
RECENT_SECONDS = 10.0
RECENT_WAIT_SECONDS = 0.05
"""A request waits at most this many seconds for a newer overview if the last one is younger than ``RECENT_SECONDS``:
pages stay quick where thousands of partitions take longer to be described, and where hosts do not answer.
"""
OVERVIEW_WAIT_SECONDS = 1.0
"""The same if the last overview is older than ``RECENT_SECONDS``, as for the first who looks again."""
OLD_SECONDS = 30.0
"""An older overview is shown with a note of its age."""


@dataclass(frozen=True)
class LastOverview:
    """An overview, and why there is no newer one, if somebody has tried to get one and failed."""

    overview: Overview
    problem: str | None = None


class SharedOverview:
    """Asks for the overview, in one thread for all requests that come meanwhile.

    An overview that cannot be had leaves the last one, with the reason: then a page still says what was known.
    """

    def __init__(self, ask: Callable[[], Overview], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: LastOverview | None = None
        self._seen_at = 0.0
        self._asking: threading.Event | None = None

    def get(self) -> LastOverview:
        """Return the overview, not older than ``PAGE_FRESH_SECONDS`` where it can be had in time.

        That is within ``RECENT_WAIT_SECONDS`` if the last one is younger than ``RECENT_SECONDS``, within
        ``OVERVIEW_WAIT_SECONDS`` if it is older, and whenever it comes if there is none.
        """
        with self._lock:
            seen = self._seen
            if seen is not None and self._clock() - self._seen_at < PAGE_FRESH_SECONDS:
                return seen
            if self._asking is None:
                self._asking = threading.Event()
                threading.Thread(
                    target=self._refresh, args=(self._asking,), name="statestore-page", daemon=True
                ).start()
            asking, age = self._asking, self._clock() - self._seen_at
        asking.wait(None if seen is None else RECENT_WAIT_SECONDS if age < RECENT_SECONDS else OVERVIEW_WAIT_SECONDS)
        with self._lock:
            assert self._seen is not None, "it is set before the event"
            age = self._clock() - self._seen_at
            if age > OLD_SECONDS and self._seen.problem is None:
                return replace(self._seen, problem=f"What is shown is {age:.0f} s old: coordinator and hosts are slow.")
            return self._seen

    def _refresh(self, done: threading.Event) -> None:
        made = self._next()
        with self._lock:
            self._seen, self._seen_at, self._asking = made, self._clock(), None
        done.set()

    def _next(self) -> LastOverview:
        try:
            return LastOverview(self._ask())
        except (CoordinatorError, LookupError, SparkBridgeError, StateStoreError) as error:
            problem = str(error)
        except Exception as error:
            log.exception("The overview could not be made")
            problem = f"The overview could not be made ({type(error).__name__}); the log of this process says why."
        last = self._seen or LastOverview(Overview(CLUSTER, int(time.time() * 1000)))
        return replace(last, problem=problem)
