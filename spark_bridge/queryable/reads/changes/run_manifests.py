"""The manifests of the runs whose changes are read: which run has made which version, and from which files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from backends.exceptions import MissingFileError
from coordinator_actor.durable.manifests import ManifestLog
from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.reading.stored_versions import LOOKS, StateVersions
from spark_bridge.exceptions import StateVersionError
from spark_bridge.host.host import Host
from spark_bridge.queryable.reads.operators.operator_plan import OperatorPlan

MANIFESTS_IDLE_SECONDS = 60.0


@dataclass(eq=False)
class _Manifests:
    """The manifests of one run's state, as they were read last; ``lock`` guards the log."""

    log: ManifestLog
    used_at: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class RunManifests:
    """Manifests by run. Thread-safe; the lock guards which runs are known."""

    def __init__(self, host: Host, clock: Callable[[], float]) -> None:
        self._host = host
        self._clock = clock
        self._lock = threading.RLock()
        self._runs: dict[str, _Manifests] = {}

    def is_known(self, run_id: str) -> bool:
        """Return whether manifests of a run have been read, and the run is not known to be over."""
        return run_id in self._runs

    def runs(self) -> list[str]:
        """Return the ids of the runs whose manifests are kept."""
        return list(self._runs)

    def versions(self, plan: OperatorPlan, completed: int) -> StateVersions:
        """Read the manifests that are new, and return the versions up to ``completed``, all of which have manifests.

        Raises ``RetiredRunError`` if a newer run has begun.
        """
        place = plan.place
        with self._lock:
            held = self._runs.get(plan.run_id)
            if held is None:
                log = ManifestLog(self._host.files.open_storage(place.state_location, place.options), "reader")
                held = self._runs[plan.run_id] = _Manifests(log, self._clock())
            held.used_at = self._clock()
        with held.lock:
            for look in range(LOOKS):
                held.log.refresh()
                try:
                    chain = held.log.chain()
                    break
                except MissingFileError:
                    # Removed since the manifests were listed; the newer manifest that made it superfluous is there by
                    # now.
                    if look + 1 == LOOKS:
                        raise
            held.log.forget({m.id for m in chain.values()})
            newest = held.log.epochs.newest()
        # A run claims its epoch before it writes manifests: without a later claim, no manifest is another run's.
        if newest is not None and newest.run_id != plan.run_id:
            self.drop(plan.run_id)
            raise RetiredRunError(
                f"Run {plan.run_id} of operator {plan.operator!r} has been replaced by run {newest.run_id}: locate "
                "it again."
            )
        return StateVersions(place, held.log, chain, completed, plan.registration.key_groups)

    def release_idle(self) -> None:
        """Forget runs that were not read for a while and are not registered here.

        Nobody would tell this host of their end.
        """
        until = self._clock() - MANIFESTS_IDLE_SECONDS
        with self._lock:
            for run in [r for r, m in self._runs.items() if m.used_at <= until]:
                if self._host.held.registration(run) is None:
                    del self._runs[run]

    def drop(self, run_id: str | None) -> None:
        """Forget a run (None: all runs)."""
        with self._lock:
            for run in [r for r in self._runs if run_id in (None, r)]:
                del self._runs[run]


def require_same_history(plan: OperatorPlan, versions: StateVersions, after: int, previous_run: str) -> None:
    """Raise ``StateVersionError`` if a run after ``previous_run`` has made the version ``after``, or may have."""
    made = versions.chain.get(after)
    if made is None or made.run_id == previous_run:
        return  # the empty version is every run's, and a version that is not kept is refused anyway
    runs = list(versions.log.epochs.runs())  # the newest run first
    if previous_run in runs and made.run_id in runs and runs.index(made.run_id) > runs.index(previous_run):
        return
    raise StateVersionError(
        f"The query was rolled back: version {after} of operator {plan.operator!r} was made anew by run "
        f"{made.run_id}, but what "
        f"run {previous_run} has given of it already no longer holds. Read the state anew, and watch it from there."
    )
