"""``CheckpointClient``: the query client on a checkpoint in storage, without a cluster, Ray or Spark."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from backends.exceptions import VersionNotFoundError
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.messages import OperatorLocation
from coordinator_actor.reading.stored_versions import find_state
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from coordinator_actor.savepoints.savepoint_format import METADATA_FILE
from spark_bridge.exceptions import RequestError, StateVersionError
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.discovery import KnownOperator
from spark_bridge.queryable.client.watch import LAST_COLUMNS, StateChange
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.protocol import ChangesRequest
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.state_data.stored_reads import ADDRESS, StoredReads

log = logging.getLogger(__name__)

WATCH_POLL_SECONDS = 1.0
"""How often a watch looks for the next version."""
CHECKPOINT_READ_SECONDS = 24 * 3600.0
"""Storage answers when it answers; the reads of a checkpoint wait for nothing else."""


class CheckpointClient(QueryableStateClient):
    """Reads the state of one query from its checkpoint, by the methods of ``QueryableStateClient``.

        client = CheckpointClient.open("s3://bucket/ck")
        client.get("user_totals", 42)
        client.sql("select user, spent from user_totals order by spent desc limit 10").df()

    Keys, versions, errors and results are those of the query client. The query may run at the same time, and is not
    disturbed; changes that Spark has not committed yet are not visible. A lookup loads the key's partition, a scan all
    partitions, one after the other.
    """

    def __init__(self, reads: StoredReads) -> None:
        connections = KvConnections("", timeout=CHECKPOINT_READ_SECONDS)
        super().__init__(
            _InStorage(reads), connections, StateRouter(connections, local=(ADDRESS, reads)), CHECKPOINT_READ_SECONDS
        )
        self.reads = reads

    @classmethod
    def open(
        cls,
        checkpoint_location: str,
        state_location: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        *,
        damaged: Callable[[str], None] = log.warning,
        open_storage: OpenStorage = CheckpointStorage.open,
    ) -> CheckpointClient:
        """Open the checkpoint of a query.

        ``state_location`` is the value of ``spark.statestore.location`` when the query ran, if it was set. If a
        manifest is damaged, the versions that it does not concern can still be read, and ``damaged`` receives the
        damage. Raises ``MissingFileError`` if the checkpoint has no state, ``DamagedFileError``.
        """
        place = find_state(checkpoint_location, state_location, storage_options, open_storage=open_storage)
        return cls(StoredReads(place, damaged=damaged, open_storage=open_storage))

    def operators(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return the operators of the last completed version."""
        return self.reads.operators()

    def describe(self, operator: str, query: str | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the description of one operator, which no host holds."""
        self.reads.locate(operator, query)
        (description,) = self.reads.describe(operator, query)["operators"]
        return {**description, "hosts": []}

    def watch(  # type: ignore[override]
        self,
        operator: str,
        keys: Any = None,
        *,
        state: str | None = None,
        query: str | None = None,
        from_version: int | None = None,
        timeout: float | None = None,
    ) -> StoredWatch:
        """Return the changes of each completed version, as storage shows them; see ``StoredWatch``."""
        return StoredWatch(self.reads, operator, keys, state, query, from_version)


class _InStorage:
    """The ``Discovery`` of a client that asks no host."""

    def __init__(self, reads: StoredReads) -> None:
        self._reads = reads

    def locate(self, operator: str, query: str | None, deadline: float) -> OperatorLocation:
        return self._reads.locate(operator, query)

    def proxy(self) -> str:
        raise RequestError("This client reads a checkpoint; it has no hosts to ask.")

    def failed(self) -> None:
        """Do nothing: a checkpoint has no other host."""


class StoredWatch:
    """The changes of an operator's state, version by version, like ``StateWatch``; it looks every second.

    Iterate over it; it ends with ``close`` only, as storage does not show whether the query still runs. A watch of some
    keys reads the changelogs of each version, and loads a partition only if one of its keys has changed.
    """

    def __init__(
        self,
        reads: StoredReads,
        operator: str,
        keys: Any,
        state: str | None,
        query: str | None,
        from_version: int | None,
    ) -> None:
        self._reads = reads
        self._state = state
        self._known = KnownOperator.of(reads.locate(operator, query), 0.0, None)
        view = self._known.view(state)
        codec = view.without_window
        self._keys = None if keys is None else codec.encode(codec.columns(keys)).unique()
        newest = self._known.location.completed_version
        if from_version is not None:
            try:
                reads.versions().resolve(from_version)
            except VersionNotFoundError as error:
                raise StateVersionError(
                    f"from_version={from_version} of operator {operator!r} cannot be watched from. {error}"
                ) from error
        self.position = newest if from_version is None else from_version
        self._closed = threading.Event()

    def close(self) -> None:
        """End the watch; a waiting thread ends at once."""
        self._closed.set()

    def __enter__(self) -> StoredWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[StateChange]:
        while not self._closed.is_set():
            try:
                newest = self._reads.versions().resolve(None)
            except VersionNotFoundError as error:
                raise StateVersionError(str(error)) from error
            yield from self.up_to(newest)
            self._closed.wait(WATCH_POLL_SECONDS)

    def up_to(self, version: int) -> Iterator[StateChange]:
        """Yield the changes that are after ``position``, up to a completed version."""
        while self.position < version and not self._closed.is_set():
            yield from self._of_version(self.position + 1)
            self.position += 1

    def _of_version(self, version: int) -> Iterator[StateChange]:
        location = self._known.location
        request = ChangesRequest(location.run_id, location.operator.name, version - 1, version, self._state)
        for batch in self._reads.changes(request, self._keys).batches:
            wanted = list(range(batch.num_columns - LAST_COLUMNS))
            yield StateChange(version, batch.select(wanted))


# The query client on a path in storage, which is a checkpoint or a savepoint.


@contextmanager
def client_of_path(
    location: str,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    *,
    progress: Callable[[str], None] = lambda step: None,
    damaged: Callable[[str], None] = log.warning,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> Iterator[CheckpointClient]:
    """Yield a client that reads the checkpoint or savepoint at ``location``.

    A savepoint is first restored to a temporary directory, with messages to ``progress``, and has one version: that of
    the savepoint. ``damaged`` is that of ``CheckpointClient.open``. Raises what ``open`` and
    ``restore_into_checkpoint`` raise.
    """
    options = dict(storage_options or {})
    if not open_storage(location, options).exists(METADATA_FILE):
        yield CheckpointClient.open(location, state_location, options, damaged=damaged, open_storage=open_storage)
        return
    progress(f"{location} is a savepoint; it is restored to a temporary directory to be read.")
    with TemporaryDirectory(prefix="statestore-savepoint-") as scratch:
        checkpoint = str(Path(scratch) / "checkpoint")
        restore_into_checkpoint(location, checkpoint, storage_options=options, open_storage=open_storage)
        yield CheckpointClient.open(checkpoint, None, options, open_storage=open_storage)
