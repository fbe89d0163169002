"""The completed versions of each run, as the coordinator has told this host: before any partition applies them.

The partitions of a host apply a version one after the other, and a partition with a commit under way later still. The
versions noted here let readers read all partitions at one version meanwhile: each from its base and accepted changes,
or from the older versions that it keeps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator_actor.messages import Completed

KEPT_VERSIONS = 4
"""The heads of at most this many versions of a run are known: as many versions as partitions may have in memory."""
KEPT_RUNS = 1000
"""Versions of at most this many runs are known."""
Heads = Mapping[str, Mapping[int, str]]
"""By operator and partition, the path of the changelog that made a version."""


@dataclass(frozen=True)
class CompletedVersion:
    """A completed version of a run, with those heads of this host's partitions that the host was told.

    Never changes.
    """

    version: int
    heads: Heads = field(default_factory=dict)

    def head(self, operator: str, partition: int) -> str | None:
        """Return the changelog that made the version of a partition; None if it is not known, and for version 0."""
        of_operator = self.heads.get(operator)
        return None if of_operator is None else of_operator.get(partition)


class CompletedVersions:
    """The completed versions of all runs that this host knows of.

    Thread-safe. ``_changed`` guards the table; ``newest`` and ``at`` read it without a lock, so an entry is replaced by
    one assignment and never taken out and put back.
    """

    def __init__(self) -> None:
        self._runs: dict[str, tuple[CompletedVersion, ...]] = {}
        self._changed = threading.Condition()

    def newest(self, run_id: str) -> CompletedVersion | None:
        """Return the last completed version of a run that this host knows of; None if it knows none."""
        held = self._runs.get(run_id)
        return None if held is None else held[-1]

    def at(self, run_id: str, version: int) -> CompletedVersion | None:
        """Return one of the last ``KEPT_VERSIONS`` versions of a run; None if ``version`` is none of them."""
        return next((c for c in self._runs.get(run_id, ()) if c.version == version), None)

    def note(self, completed: Completed) -> CompletedVersion:
        """Take in what the coordinator has said, which may be old or known; return the newest version of the run."""
        with self._changed:
            held = {c.version: c for c in self._runs.get(completed.run_id, ())}
            known = held.get(completed.version)
            heads: dict[str, Mapping[int, str]] = {} if known is None else dict(known.heads)
            for operator, of_operator in completed.heads.items():
                heads[operator] = {**heads.get(operator, {}), **of_operator}
            if known is None or heads != known.heads:
                held[completed.version] = CompletedVersion(completed.version, heads)
            kept = tuple(held[v] for v in sorted(held)[-KEPT_VERSIONS:])
            self._runs[completed.run_id] = kept
            while len(self._runs) > KEPT_RUNS:
                del self._runs[next(iter(self._runs))]
            self._changed.notify_all()
            return kept[-1]

    def runs(self) -> list[str]:
        """Return the ids of the runs of which a version is known."""
        with self._changed:
            return list(self._runs)

    def forget(self, run_id: str) -> None:
        """Forget a run that is over, and wake the threads that wait for a version of it."""
        with self._changed:
            self._runs.pop(run_id, None)
            self._changed.notify_all()

    def wait(self, run_id: str, version: int, seconds: float) -> CompletedVersion | None:
        """Wait until the newest version of a run is ``version`` or later, and return it.

        After ``seconds``, or when the run is forgotten, return the newest version that is known, None if there is none.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            was_known = run_id in self._runs
            while True:
                newest = self.newest(run_id)
                left = deadline - time.monotonic()
                is_there = newest is not None and newest.version >= version
                if is_there or left <= 0 or (was_known and newest is None):
                    return newest
                was_known = newest is not None
                self._changed.wait(left)
