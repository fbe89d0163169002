"""A running cluster as the page shows it. This process has joined the Ray cluster, and the caller says how to ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coordinator_actor.messages import SavepointStatus
from coordinator_actor.savepoints import savepoint_catalog
from coordinator_actor.savepoints.savepoint_format import SavepointInfo
from spark_bridge.overview.model import Overview, Query
from spark_bridge.queryable.client.calls.watch import StateChange
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.ui.system import StateTable

SAVEPOINTS = "savepoints"
CHANGES_WAIT_SECONDS = 5.0
"""How long changes of versions that are completed are waited for."""


class LiveSystem:
    """Shows what coordinator and hosts say (a ``System``).

    ``overview`` asks them all, ``connect`` makes a query client, ``call`` sends a message to the coordinator by its
    name. ``storage_options`` are the settings of the storage in which savepoints are looked for.
    """

    is_live = True

    def __init__(
        self,
        namespace: str,
        overview: Callable[[], Overview],
        connect: Callable[[], QueryableStateClient],
        call: Callable[..., Any],
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self.place = f"namespace {namespace}"
        self._overview = overview
        self._connect = connect
        self._call = call
        self._options = dict(storage_options or {})
        self._client: QueryableStateClient | None = None
        self._connecting = threading.Lock()

    def overview(self) -> Overview:
        """See ``System``."""
        return self._overview()

    def client(self) -> QueryableStateClient:
        """See ``System``. A client that cannot be made now is made by a later call."""
        with self._connecting:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def recent_changes(self, table: StateTable, since: int, until: int) -> Iterator[StateChange]:
        """See ``System``. Versions that changed nothing are left out, so that a wait for the last one has an end."""
        changes = self.client().watch(
            table.operator, state=table.state, query=table.query, from_version=since, timeout=CHANGES_WAIT_SECONDS
        )
        waking = threading.Timer(CHANGES_WAIT_SECONDS, changes.close)
        waking.start()
        try:
            for change in changes:
                if change.version <= until:
                    yield change
                if change.version >= until:
                    return
        finally:
            waking.cancel()
            changes.close()

    def savepoints(self, query: Query, base: str | None = None) -> list[SavepointInfo]:
        """See ``System``."""
        return savepoint_catalog.read_stored_savepoints(base or default_directory(query), self._options)

    def describe_savepoint(self, path: str, *, check_files: bool = False) -> SavepointInfo:
        """See ``System``."""
        describe = savepoint_catalog.verify_stored_savepoint if check_files else savepoint_catalog.read_stored_savepoint
        return describe(path, self._options)

    def trigger_savepoint(self, request_id: str, query: str, path: str | None) -> None:
        """See ``System``."""
        self._call("trigger_savepoint", request_id, query, path)

    def savepoint_status(self, request_id: str) -> SavepointStatus:
        """See ``System``."""
        status: SavepointStatus = self._call("savepoint_status", request_id)
        return status


def default_directory(query: Query) -> str:
    """Return where savepoints of a query go that name no directory."""
    return f"{query.state_location.rstrip('/')}/{SAVEPOINTS}"
