"""Lookups of one query in the state of another: the version that a batch reads, and where it is."""

from __future__ import annotations

from backends.exceptions import VersionNotFoundError
from coordinator_actor.handlers.locations import Locations
from coordinator_actor.handlers.registries.registries import Registries
from coordinator_actor.messages import LookedUp


class Lookups:
    """Answers the tasks of queries that look up."""

    def __init__(self, registries: Registries, locations: Locations) -> None:
        self._registries = registries
        self._locations = locations

    def look_up(self, operator: str, query: str, by: str, batch_id: int) -> LookedUp:
        """See ``CoordinatorPort``."""
        location = self._locations.locate(operator, query)
        run = self._registries.runs.get(location.run_id)
        run.lifetime.require_served()
        try:
            record = run.looked_up.resolve(by, batch_id, self._registries.clock(), run.lock)
        except VersionNotFoundError:
            run.manifests.epochs.check()  # one that has been replaced does not know the versions of its successor
            raise
        return LookedUp(location, record.version, record.at_ms)
