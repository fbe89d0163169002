"""Which versions of each run are completed, as a host has been told: before anything of them is applied.

The partitions of a host apply a version one after the other, and one with a commit under way later still. What is noted here
lets all of them be read at one version meanwhile: each from its base and accepted changes, or from what it keeps of the past.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator_actor.messages import Completed

KEPT_VERSIONS = 4
"""Of so many versions of a run the heads are known: of those that partitions may have in memory."""
KEPT_RUNS = 1000
Heads = Mapping[str, Mapping[int, str]]
"""By operator and partition, the changelog that made a version."""


@dataclass(frozen=True)
class CompletedVersion:
    """A completed version of a run, with the heads of this host's partitions as far as it was told them. Never changes."""

    version: int
    heads: Heads = field(default_factory=dict)

    def head(self, operator: str, partition: int) -> str | None:
        """What made the version of a partition; None if that is not known, or it is the empty version 0."""
        of_operator = self.heads.get(operator)
        return None if of_operator is None else of_operator.get(partition)


class CompletedVersions:
    """Thread-safe; ``newest`` takes no lock."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[CompletedVersion, ...]] = {}
        self._changed = threading.Condition()

    def newest(self, run_id: str) -> CompletedVersion | None:
        """The last completed version of a run that this host knows of."""
        held = self._runs.get(run_id)
        return None if held is None else held[-1]

    def at(self, run_id: str, version: int) -> CompletedVersion | None:
        """One of the last versions; None if it is none of them."""
        return next((c for c in self._runs.get(run_id, ()) if c.version == version), None)

    def note(self, completed: Completed) -> CompletedVersion:
        """Take in what was said, which may be old or known; returns the newest version."""
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
        """The ids of the runs of which anything is known."""
        with self._changed:
            return list(self._runs)

    def forget(self, run_id: str) -> None:
        """The run is over. Whoever waits for it looks again."""
        with self._changed:
            self._runs.pop(run_id, None)
            self._changed.notify_all()

    def wait(self, run_id: str, version: int, seconds: float) -> CompletedVersion | None:
        """The newest version once it is ``version`` or later, else what there is when the time is over or the run forgotten."""
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
