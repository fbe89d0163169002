"""Spark's active state store instances: which executor has which provider loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from backends.ids import StateStoreProviderId

log = logging.getLogger(__name__)

Executor = tuple[str, str]
"""(host, executor id)"""


class InstanceRegistry:
    """The providers that each executor has loaded (Spark: ``StateStoreCoordinator``). The debug messages are Spark's.

    Instances are kept by run, since the instances of a run go together and other runs may have many.
    """

    def __init__(self) -> None:
        self._runs: dict[str, dict[StateStoreProviderId, Executor]] = {}
        self._executors: dict[Executor, Executor] = {}

    def report(
        self,
        provider_id: StateStoreProviderId,
        host: str,
        executor_id: str,
        others: Iterable[StateStoreProviderId] = (),
    ) -> list[StateStoreProviderId]:
        """Make an instance active at an executor. Return those of ``others`` that are active elsewhere by now.

        As in Spark, an instance that no executor has reported stays: a restarted coordinator knows of none at first.
        """
        # One tuple per executor, not one per instance.
        executor = self._executors.setdefault((host, executor_id), (host, executor_id))
        self._runs.setdefault(provider_id.query_run_id, {})[provider_id] = executor
        log.debug("Reported state store %s is active at %s", provider_id, executor_id)
        return [o for o in others if (held := self._held(o)) is not None and held != executor]

    def verify(self, provider_id: StateStoreProviderId, executor_id: str) -> bool:
        """Return whether an executor has the active instance."""
        return self.verify_many((provider_id,), executor_id)[0]

    def verify_many(self, provider_ids: Sequence[StateStoreProviderId], executor_id: str) -> list[bool]:
        """Return for each instance whether an executor has it, in the order asked."""
        responses = [(held := self._held(p)) is not None and held[1] == executor_id for p in provider_ids]
        if log.isEnabledFor(logging.DEBUG):
            for provider_id, response in zip(provider_ids, responses, strict=True):
                log.debug("Verified that state store %s is active: %s", provider_id, response)
        return responses

    def location(self, provider_id: StateStoreProviderId) -> str | None:
        """Return ``executor_<host>_<executor id>`` of the active instance, or None."""
        return self.locations((provider_id,))[0]

    def locations(self, provider_ids: Sequence[StateStoreProviderId]) -> list[str | None]:
        """Return ``location`` of each instance, in the order asked."""
        found = [None if (held := self._held(p)) is None else f"executor_{held[0]}_{held[1]}" for p in provider_ids]
        if log.isEnabledFor(logging.DEBUG):
            for provider_id, location in zip(provider_ids, found, strict=True):
                log.debug("Got location of the state store %s: %s", provider_id, location)
        return found

    def of_run(self, run_id: str) -> list[StateStoreProviderId]:
        """Return the active instances of a run."""
        return list(self._runs.get(run_id, ()))

    def deactivate(self, run_id: str) -> None:
        """Forget the instances of a run."""
        gone = self._runs.pop(run_id, {})
        if not self._runs:
            self._executors.clear()
        if log.isEnabledFor(logging.DEBUG):
            ids = ", ".join(map(str, gone))
            log.debug("Deactivating instances related to checkpoint location %s: %s", run_id, ids)

    def describe(self) -> list[dict[str, str]]:
        """Return all active instances, for people."""
        return [{"id": str(p), "host": h, "executor_id": e} for run in self._runs.values() for p, (h, e) in run.items()]

    def _held(self, provider_id: StateStoreProviderId) -> Executor | None:
        run = self._runs.get(provider_id.query_run_id)
        return None if run is None else run.get(provider_id)
