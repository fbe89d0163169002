"""The overview that requests share: asked for at most once a second, however many look."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from backends.exceptions import StateStoreError
from coordinator_actor.exceptions import CoordinatorError
from spark_bridge.exceptions import SparkBridgeError
from spark_bridge.overview.model import CLUSTER, Overview

FRESH_SECONDS = 1.0


@dataclass(frozen=True)
class Seen:
    """An overview, and why there is no newer one, if somebody has tried to get one and failed."""

    overview: Overview
    problem: str | None = None


class SharedOverview:
    """Asks for the overview, for all requests that come meanwhile together.

    An overview that cannot be had leaves the last one, with the reason: then a page still says what was known.
    """

    def __init__(self, ask: Callable[[], Overview], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._asking = threading.Lock()
        self._seen: Seen | None = None
        self._asked_at = 0.0

    def get(self) -> Seen:
        """Return the overview, not older than ``FRESH_SECONDS`` where it can be had."""
        with self._asking:
            if self._seen is None or self._clock() - self._asked_at >= FRESH_SECONDS:
                self._seen = self._next(self._seen)
                self._asked_at = self._clock()
            return self._seen

    def _next(self, before: Seen | None) -> Seen:
        try:
            return Seen(self._ask())
        except (CoordinatorError, LookupError, SparkBridgeError, StateStoreError) as error:
            if before is None:
                return Seen(Overview(CLUSTER, int(time.time() * 1000)), str(error))
            return replace(before, problem=str(error))
