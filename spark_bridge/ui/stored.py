"""A checkpoint in storage as the page shows it, with no cluster at all. The query may run or not."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.messages import SavepointStatus
from coordinator_actor.savepoints import savepoint_catalog
from coordinator_actor.savepoints.savepoint_format import SavepointInfo
from spark_bridge.exceptions import RequestError
from spark_bridge.overview.from_storage import overview_of_checkpoint
from spark_bridge.overview.model import Overview, Query
from spark_bridge.queryable.client.calls.watch import StateChange
from spark_bridge.state_data.checkpoint_client import CheckpointClient
from spark_bridge.ui.live import default_directory
from spark_bridge.ui.system import StateTable


class StoredSystem:
    """Shows what storage says (a ``System``). Nothing is written or locked."""

    is_live = False

    def __init__(
        self,
        checkpoint_location: str,
        state_location: str | None = None,
        options: Mapping[str, str] | None = None,
        *,
        open_storage: OpenStorage = CheckpointStorage.open,
    ) -> None:
        self.place = f"checkpoint {checkpoint_location}"
        self._location = checkpoint_location
        self._state_location = state_location
        self._options = dict(options or {})
        self._open = open_storage
        self._client: CheckpointClient | None = None
        self._opening = threading.Lock()

    def overview(self) -> Overview:
        """See ``System``."""
        return overview_of_checkpoint(self._location, self._state_location, self._options, open_storage=self._open)

    def client(self) -> CheckpointClient:
        """See ``System``. A checkpoint that cannot be opened now is opened by a later call."""
        with self._opening:
            if self._client is None:
                self._client = CheckpointClient.open(
                    self._location, self._state_location, self._options, open_storage=self._open
                )
            return self._client

    def recent_changes(self, table: StateTable, since: int, until: int) -> Iterator[StateChange]:
        """See ``System``."""
        return self.client().watch(table.operator, state=table.state, from_version=since).up_to(until)

    def savepoints(self, query: Query, base: str | None = None) -> list[SavepointInfo]:
        """See ``System``."""
        base = base or default_directory(query)
        return savepoint_catalog.read_stored_savepoints(base, self._options, open_storage=self._open)

    def describe_savepoint(self, path: str, *, check_files: bool = False) -> SavepointInfo:
        """See ``System``."""
        describe = savepoint_catalog.verify_stored_savepoint if check_files else savepoint_catalog.read_stored_savepoint
        return describe(path, self._options, open_storage=self._open)

    def trigger_savepoint(self, request_id: str, query: str, path: str | None) -> None:
        """Raise ``RequestError``: only a running query can be asked."""
        raise RequestError("A savepoint is made by a running cluster; this page looks at a checkpoint.")

    def savepoint_status(self, request_id: str) -> SavepointStatus:
        """Return that nothing is known."""
        return SavepointStatus(known=False)
