"""Lets a run's batches wait while files of its versions are written anew, as when keys are forgotten."""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, replace

TOLD_SECONDS = 60.0
"""For this many seconds hosts are told again of the version whose files were exchanged: an answer to a heartbeat may be
lost.
"""


@dataclass(frozen=True)
class Hold:
    """A hold: its identity, its owner, its end in seconds by the coordinator's clock, and the first batch that waits.

    ``batch_id`` None: no batch waits yet. No snapshot is uploaded, and no file removed: a program that rewrites files
    of kept versions has files of these versions there that no manifest names yet.
    """

    id: str
    holder: str
    batch_id: int | None
    until: float

    def holds(self, batch_id: int) -> bool:
        """Return whether a batch waits."""
        return self.batch_id is not None and batch_id >= self.batch_id


class RewritingHold:
    """The hold of one run, in memory alone. The lock of the run guards it.

    If the holder dies, its hold lapses and the run continues. A lapsed hold never comes back, because retention may
    have removed the files that were written under it. So the coordinator exchanges files only under a hold that has
    lasted since before the first of them was written.
    """

    def __init__(self) -> None:
        self._hold: Hold | None = None
        self._told_until = -math.inf
        self._clean: frozenset[str] = frozenset()

    def at(self, now: float) -> Hold | None:
        """Return the hold; None if there is none. A hold whose time is over ends here, even if the clock goes back."""
        if self._hold is not None and now >= self._hold.until:
            self._hold = None
        return self._hold

    def begin(self, holder: str, now: float, seconds: float) -> Hold:
        """Begin a hold. The same holder gets the hold that it has: its message may have come twice."""
        known = self.at(now)
        is_known = known is not None and known.holder == holder
        self._hold = Hold(known.id if known and is_known else uuid.uuid4().hex, holder, None, now + seconds)
        return self._hold

    def renew(self, hold: Hold, now: float, seconds: float, batch_id: int | None) -> Hold:
        """Prolong the hold that ``at`` has returned; the batches from ``batch_id`` on wait."""
        self._hold = replace(hold, batch_id=batch_id, until=now + seconds)
        return self._hold

    def end(self, holder: str) -> None:
        """Let the batches go on, if this holder has held them."""
        if self._hold is not None and self._hold.holder == holder:
            self._hold = None

    def exchanged(self, now: float) -> None:
        """Take note that files were exchanged: hosts must hear that the same version has other heads."""
        self._clean = frozenset()
        self._told_until = now + TOLD_SECONDS

    def is_to_be_told(self, now: float) -> bool:
        """Return whether hosts are told of the completed version though they have it."""
        return now < self._told_until

    def note_clean(self, host_id: str) -> None:
        """Take note that a host has nothing of the files before the exchange any more. Needs no lock."""
        if host_id not in self._clean:
            self._clean |= {host_id}

    def is_clean(self, host_id: str) -> bool:
        """Return whether a host has said so since the exchange. Needs no lock."""
        return host_id in self._clean
