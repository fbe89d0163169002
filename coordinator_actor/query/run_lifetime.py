"""The lifetime of one registered run: running, ended and read on, replaced by a newer run, or over."""

from __future__ import annotations

import zlib

from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.messages import QueryRegistration

RECORDS_EVERY = 60
"""Old claims and savepoint records are looked for in one maintenance of this many."""


def _share_of(run_id: str) -> float:
    """Return a share from 0 to 1, by which runs that begin together are maintained one after the other."""
    return zlib.crc32(run_id.encode()) / (1 << 32)


class RunLifetime:
    """The lifetime of a run. Needs no lock: each value is replaced as a whole. Moments are of the coordinator's clock.

    ``driver_seen`` is when the driver was heard of last. ``stopped_at`` is when the query ended: from then on the run
    changes nothing, and hosts go on answering from its last version, until the run is over (``ended``). ``retired_by``
    is the newer run that has replaced this one. ``maintained`` is when garbage was removed last; at first a time before
    the run began, which differs from run to run.
    """

    def __init__(self, registration: QueryRegistration, now: float) -> None:
        self._registration = registration
        self.driver_seen = now
        self.maintained = now - _share_of(registration.run_id) * registration.maintenance_interval
        self.ended = False
        self.stopped_at: float | None = None
        self.retired_by: str | None = None
        self._maintenances = 0

    def seen(self, now: float) -> None:
        """Take note of a sign of life of the driver."""
        self.driver_seen = now

    def prolong(self, seconds: float, now: float) -> None:
        """Let the lease of the driver run ``seconds`` longer."""
        self.driver_seen = min(now, self.driver_seen + seconds)

    def maintained_at(self, now: float) -> None:
        """Take note that garbage is being removed."""
        self.maintained = now
        self._maintenances += 1

    @property
    def records_are_due(self) -> bool:
        """Return whether this maintenance looks for records that nobody needs any more: the first one, and few more."""
        return self._maintenances % RECORDS_EVERY == 1

    def retire(self, run_id: str) -> None:
        """Take note that a newer run replaces this one."""
        self.retired_by = run_id

    def end(self) -> None:
        """Take note that the run is over: it may change nothing any more, and nobody reads it."""
        self.ended = True

    @property
    def is_served(self) -> bool:
        """Return whether hosts answer from the run: it is neither over nor replaced."""
        return not self.ended and self.retired_by is None

    @property
    def is_current(self) -> bool:
        """Return whether the query runs: it has not ended, and the run is neither over nor replaced."""
        return self.is_served and self.stopped_at is None

    def require_served(self) -> None:
        """Raise ``RetiredRunError`` if the run is over or replaced."""
        if not self.is_served:
            self.require_current()

    def require_current(self) -> None:
        """Raise ``RetiredRunError`` if the query has ended, or the run is over or replaced."""
        run = self._registration
        if self.retired_by is not None:
            raise RetiredRunError(
                f"Run {run.run_id} of query {run.query_id} has been replaced by run {self.retired_by} on the same "
                f"checkpoint ({run.checkpoint_location}); only the newer one may go on."
            )
        if self.ended or self.stopped_at is not None:
            raise RetiredRunError(f"Run {run.run_id} is over; start the query again.")
