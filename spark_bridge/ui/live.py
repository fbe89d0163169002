"""A running cluster, or a checkpoint in storage, as the page shows it.

For a cluster, the process has joined Ray, and the caller defines how to ask.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from backends.encoding.user_values import python_rows
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.messages import SavepointStatus
from coordinator_actor.savepoints import savepoint_format
from coordinator_actor.savepoints.savepoint_format import SavepointInfo
from spark_bridge.exceptions import STATESTORE_ERRORS, RequestError
from spark_bridge.overview.from_storage import overview_of_checkpoint
from spark_bridge.overview.model import Overview, Query
from spark_bridge.queryable.client.async_results import BlockingCalls
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.watch import StateChange, StateWatch
from spark_bridge.state_data.checkpoint_client import CheckpointClient
from spark_bridge.ui.charts import value
from spark_bridge.ui.lookups import key_of_call, variable_schema
from spark_bridge.ui.requests import PageCall, StateTable

SAVEPOINTS = "savepoints"
CHANGES_WAIT_SECONDS = 5.0
"""How long changes of versions that are completed are waited for."""

Client = TypeVar("Client", bound=QueryableStateClient)


class SystemWithSavepoints(Generic[Client]):
    """What both systems do: make the query client once, and read savepoints from storage."""

    def __init__(
        self,
        connect: Callable[[], Client],
        storage_options: Mapping[str, str] | None,
        open_storage: OpenStorage = CheckpointStorage.open,
    ) -> None:
        self._connect = connect
        self._options = dict(storage_options or {})
        self._open = open_storage
        self._client: Client | None = None
        self._connecting = threading.Lock()

    def client(self) -> Client:
        """See ``System``. A client that cannot be made now is made by a later call."""
        with self._connecting:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def savepoints(self, query: Query, base: str | None = None) -> list[SavepointInfo]:
        base = base or default_directory(query)
        return savepoint_format.read_stored_savepoints(base, self._options, open_storage=self._open)

    def describe_savepoint(self, path: str, *, check_files: bool = False) -> SavepointInfo:
        return savepoint_format.read_stored_savepoint(
            path, self._options, is_verified=check_files, open_storage=self._open
        )


class LiveSystem(SystemWithSavepoints[QueryableStateClient]):
    """Shows the answers of coordinator and hosts (a ``System``).

    ``overview`` asks them all, ``connect`` makes a query client, ``call`` sends a message to the coordinator by its
    name. ``storage_options`` are the settings of the storage that savepoints are looked for in.
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
        super().__init__(connect, storage_options)
        self.place = f"namespace {namespace}"
        self._overview = overview
        self._call = call

    def overview(self) -> Overview:
        return self._overview()

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

    def trigger_savepoint(self, request_id: str, query: str, path: str | None) -> None:
        self._call("trigger_savepoint", request_id, query, path)

    def savepoint_status(self, request_id: str) -> SavepointStatus:
        status: SavepointStatus = self._call("savepoint_status", request_id)
        return status


def default_directory(query: Query) -> str:
    """Return where savepoints of a query go that name no directory."""
    return f"{query.state_location.rstrip('/')}/{SAVEPOINTS}"


# The live watch of a key: server-sent events, one for each version that changed it.


MAX_WATCHES = 16
BEAT_SECONDS = 5.0
"""After this many seconds without a change a line is sent, so that a browser that has left is noticed."""
MAX_WATCH_ROWS = 50
"""At most this many changed rows of one version are sent."""


class PageWatches:
    """The open watches. Each has a thread and a connection."""

    def __init__(self) -> None:
        self._open = 0

    async def stream(self, call: PageCall, last_event: str, check: Callable[[], object]) -> Response:
        """Return the changes of the key that the request names, until the browser leaves.

        ``last_event`` is the id of the last event that a reconnecting browser has seen, or "". ``check``
        raises ``AccessDeniedError`` once the token is no longer valid. Raises ``RequestError``.
        """
        if self._open >= MAX_WATCHES:
            return PlainTextResponse(f"{self._open} watches are open, which is the limit; close one.", 429)
        table = call.table()
        if table is None:
            raise RequestError("table= must name the state to watch.")
        key = key_of_call(call, table, await run_in_threadpool(variable_schema, call, table))
        client = await run_in_threadpool(call.client)
        # The id names the run too: the watch then says if the query was rolled back while the browser was away.
        version, _, run_id = last_event.partition("/")
        seen = int(version) if version.isdecimal() and len(version) < 19 else None
        from_run = None if seen is None else run_id or None
        changes = client.watch(
            table.operator, [key], state=table.state, query=table.query, from_version=seen, from_run=from_run
        )
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(changes, check), media_type="text/event-stream", headers=headers)

    async def _events(self, changes: StateWatch, check: Callable[[], object]) -> AsyncIterator[bytes]:
        self._open += 1
        calls, iterator = BlockingCalls("statestore-page-watch"), iter(changes)
        try:
            yield b": watching\n\n"
            while True:
                try:
                    change = await asyncio.wait_for(calls.call(lambda: next(iterator, None)), BEAT_SECONDS)
                except asyncio.TimeoutError:
                    check()
                    yield b": nothing new\n\n"
                    continue
                if change is None:
                    return
                check()
                yield f"id: {change.version}/{changes.run_id or ''}\n".encode() + _event("change", _told(change))
        except STATESTORE_ERRORS as error:
            yield _event("problem", {"problem": str(error)})
        finally:
            changes.close()
            self._open -= 1


def _told(change: StateChange) -> dict[str, object]:
    rows = [
        {"change": row["change_type"], "before": value(row.get("before")), "after": value(row.get("after"))}
        for row in python_rows(change.batch.slice(0, MAX_WATCH_ROWS))
    ]
    return {"version": change.version, "rows": rows, "more": max(0, change.batch.num_rows - MAX_WATCH_ROWS)}


def _event(name: str, data: object) -> bytes:
    """Return one event: JSON has no line breaks, so that the data is one line."""
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


# A checkpoint in storage as the page shows it, without any cluster. The query may run or not.


class StoredSystem(SystemWithSavepoints[CheckpointClient]):
    """Shows the content of storage (a ``System``). Nothing is written or locked."""

    is_live = False

    def __init__(
        self,
        checkpoint_location: str,
        state_location: str | None = None,
        options: Mapping[str, str] | None = None,
        *,
        open_storage: OpenStorage = CheckpointStorage.open,
    ) -> None:
        place = (checkpoint_location, state_location, options)
        super().__init__(partial(CheckpointClient.open, *place, open_storage=open_storage), options, open_storage)
        self.place = f"checkpoint {checkpoint_location}"
        self._location = checkpoint_location
        self._state_location = state_location

    def overview(self) -> Overview:
        return overview_of_checkpoint(self._location, self._state_location, self._options, open_storage=self._open)

    def recent_changes(self, table: StateTable, since: int, until: int) -> Iterator[StateChange]:
        return self.client().watch(table.operator, state=table.state, from_version=since).up_to(until)

    def trigger_savepoint(self, request_id: str, query: str, path: str | None) -> None:
        """Raise ``RequestError``: only a running query can be asked."""
        raise RequestError("A savepoint is made by a running cluster; this page looks at a checkpoint.")

    def savepoint_status(self, request_id: str) -> SavepointStatus:
        """Return that nothing is known."""
        return SavepointStatus(known=False)
