"""Lets a run's batches wait while files of its versions are written anew, as when keys are forgotten."""

from __future__ import annotations

import math
from dataclasses import dataclass

TOLD_SECONDS = 60.0
"""For this many seconds hosts are told again of the version whose files were exchanged: an answer to a heartbeat may be
lost.
"""


@dataclass(frozen=True)
class Hold:
    """A hold: its owner, its end in seconds by the coordinator's clock, and ``batch_id``, the first batch that waits.

    ``batch_id`` None: no batch waits yet. No snapshot is uploaded, and no file removed: who writes files anew for kept
    versions has files there of old versions that no manifest names yet.
    """

    holder: str
    batch_id: int | None
    until: float

    def holds(self, batch_id: int) -> bool:
        """Return whether a batch waits."""
        return self.batch_id is not None and batch_id >= self.batch_id


class RewritingHold:
    """The hold of one run. The lock of the run guards writes; it is in memory alone, for nothing depends on it.

    A holder that dies lets the run go on when its time is over. Files are exchanged only under a hold that has lasted
    since before they were read, by a coordinator of the same epoch.
    """

    def __init__(self) -> None:
        self._hold: Hold | None = None
        self._told_until = -math.inf
        self._clean: frozenset[str] = frozenset()

    def at(self, now: float) -> Hold | None:
        """Return the hold; None if there is none, or its time is over."""
        hold = self._hold
        return hold if hold is not None and now < hold.until else None

    def begin(self, holder: str, batch_id: int | None, now: float, seconds: float) -> Hold:
        """Hold the batches from ``batch_id`` on, or go on doing so from the batch with which this holder began."""
        known = self.at(now)
        is_same = known is not None and known.holder == holder and known.batch_id is not None
        self._hold = Hold(holder, known.batch_id if known is not None and is_same else batch_id, now + seconds)
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
