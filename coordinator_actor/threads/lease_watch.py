"""The thread that ends leases: it looks at them once a second for as long as the coordinator lives.

Nothing else ends the lease of a host or driver that is lost. So an error in one look is logged, and the next look comes
all the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

log = logging.getLogger(__name__)

LEASE_WATCH_SECONDS = 1.0
"""The seconds between two looks at the leases. A look that comes later by as much shows that the process stood
still.
"""


class Watched(Protocol):
    """Something with leases that end: a ``Coordinator``."""

    def expire(self, stood_still: float = 0.0) -> None:
        """End the leases that are over; they have not run for ``stood_still`` seconds."""

    def counts(self) -> tuple[int, int]:
        """Return how many hosts live and how many queries are registered."""

    def is_idle(self) -> bool:
        """Return whether nobody needs the coordinator any more."""


class LeaseWatch:
    """Looks at the leases of a coordinator. The work of a look grows with its hosts and runs, not with partitions.

    ``publish(hosts, queries)`` takes the numbers of live hosts and registered queries, ``end()`` ends the process when
    nobody has needed the coordinator for its idle timeout. ``clock`` is monotonic; both it and ``sleep`` are in
    seconds.
    """

    def __init__(
        self,
        coordinator: Watched,
        publish: Callable[[int, int], None],
        end: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._coordinator = coordinator
        self._publish = publish
        self._end = end
        self._clock = clock
        self._sleep = sleep

    def run(self) -> None:
        """Look at the leases for ever."""
        while True:
            slept = self._clock()
            self._sleep(LEASE_WATCH_SECONDS)
            late = self._clock() - slept - LEASE_WATCH_SECONDS
            # Each by itself: what one of them fails at does not concern the others.
            expire = partial(self._coordinator.expire, late if late > LEASE_WATCH_SECONDS else 0.0)
            _logged("Leases could not be looked at", expire)
            _logged("The numbers of hosts and queries were not published", self._publish_counts)
            _logged("Whether anybody needs this coordinator could not be found out", self._end_if_idle)

    def _publish_counts(self) -> None:
        self._publish(*self._coordinator.counts())

    def _end_if_idle(self) -> None:
        if self._coordinator.is_idle():
            log.info("Nobody has needed this coordinator for a while; it ends")
            self._end()


def _logged(what_failed: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # the thread must go on
        log.exception("%s", what_failed)
