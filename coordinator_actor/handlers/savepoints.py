"""The messages about savepoints: users ask for them, hosts report what they have exported."""

from __future__ import annotations

from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.handlers.completion import catch_up
from coordinator_actor.handlers.registries.registries import Registries
from coordinator_actor.messages import SavepointExported, SavepointStatus
from coordinator_actor.savepoints.run_savepoints import status_of


class Savepoints:
    """Begins savepoints of running queries, and passes on what hosts export for them."""

    def __init__(self, registries: Registries) -> None:
        self._registries = registries
        self._runs = registries.runs

    def trigger_savepoint(
        self, request_id: str, query: str, path: str | None = None, *, stop: bool = False
    ) -> SavepointStatus:
        """See ``CoordinatorPort``."""
        known = self.savepoint_status(request_id)
        if known.known:
            return known
        run = self._runs.running(query)
        with run.lock:
            run.lifetime.require_current()
            catch_up(self._runs, run)
            base = path if path is not None else f"{run.registration.state_location}/savepoints"
            savepoints = self._runs.savepoints_of(run.run_id)
            if savepoints is None:
                raise RetiredRunError(f"Run {run.run_id} is over; start the query again.")
            savepoints.trigger(request_id, base, stop=stop)
        return self.savepoint_status(request_id)

    def savepoint_status(self, request_id: str) -> SavepointStatus:
        """See ``CoordinatorPort``."""
        request = self._runs.savepoint_request(request_id)
        return SavepointStatus(known=False) if request is None else status_of(request)

    def savepoint_exported(self, message: SavepointExported) -> None:
        """See ``CoordinatorPort``."""
        with self._registries.lock:
            self._registries.hosts.require(message.host_id, message.incarnation)
        savepoints = self._runs.savepoints_of(message.run_id)
        if savepoints is not None:
            savepoints.exported(message)
