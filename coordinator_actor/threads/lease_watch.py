"""The loop that ends leases: it looks at them once a second for as long as the coordinator lives.

Nothing else ends the lease of a host or driver that is lost. So each part of a look runs whatever the others fail at.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from backends.background_loop import BackgroundLoop

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
    nobody has needed the coordinator for its idle timeout. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        coordinator: Watched,
        publish: Callable[[int, int], None],
        end: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._publish = publish
        self._end = end
        self._clock = clock
        self._looked_at = clock()

    def loop(self) -> BackgroundLoop:
        """Return the loop that looks, which is still to be started. It has no backoff: leases must end in time."""
        return BackgroundLoop(
            self.look,
            LEASE_WATCH_SECONDS,
            name="statestore-leases",
            what="look at the leases: lost hosts and drivers are not given up, or figures are not published",
            remedy="Look at the coordinator's log ('statestore logs').",
            most_seconds=LEASE_WATCH_SECONDS,
        )

    def look(self) -> None:
        """Look at the leases once. Raises the first error, after all parts of the look have run."""
        late = self._clock() - self._looked_at - LEASE_WATCH_SECONDS
        failures = []
        expire = partial(self._coordinator.expire, late if late > LEASE_WATCH_SECONDS else 0.0)
        for part in (expire, self._publish_counts, self._end_if_idle):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        self._looked_at = self._clock()
        if failures:
            raise failures[0]

    def _publish_counts(self) -> None:
        self._publish(*self._coordinator.counts())

    def _end_if_idle(self) -> None:
        if self._coordinator.is_idle():
            log.info("Nobody has needed this coordinator for a while; it ends")
            self._end()
