"""The live watch of a key: server-sent events, one for each version that changed it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from backends.encoding.given_values import python_rows
from backends.exceptions import StateStoreError
from coordinator_actor.exceptions import CoordinatorError
from spark_bridge.exceptions import AccessDeniedError, RequestError, SparkBridgeError
from spark_bridge.queryable.client.calls.watch import StateChange, StateWatch
from spark_bridge.queryable.client.event_loop.async_results import BlockingCalls
from spark_bridge.ui.formats import value
from spark_bridge.ui.lookups import key_of_call, variable_schema
from spark_bridge.ui.requests import PageCall

MOST_WATCHES = 16
BEAT_SECONDS = 5.0
"""After this many seconds without a change a line is sent, so that a browser that has left is noticed."""
MOST_WATCH_ROWS = 50
"""At most this many changed rows of one version are sent."""


class PageWatches:
    """The watches under way. Each has a thread and a connection."""

    def __init__(self) -> None:
        self._open = 0

    async def stream(self, call: PageCall, last_event: str, check: Callable[[], object]) -> Response:
        """Return the changes of the key that the request names, until the browser leaves.

        ``last_event`` is the version that a browser has seen that comes again after a lost connection, or "". ``check``
        raises ``AccessDeniedError`` once the token is no longer valid. Raises ``RequestError``.
        """
        if self._open >= MOST_WATCHES:
            return PlainTextResponse(f"{self._open} watches are open, which is the limit; close one.", 429)
        table = call.table()
        if table is None:
            raise RequestError("table= must name the state to watch.")
        key = key_of_call(call, table, await run_in_threadpool(variable_schema, call, table))
        client = await run_in_threadpool(call.system.client)
        seen = int(last_event) if last_event.isdecimal() and len(last_event) < 19 else None
        changes = client.watch(table.operator, [key], state=table.state, query=table.query, from_version=seen)
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
                yield f"id: {change.version}\n".encode() + _event("change", _told(change))
        except AccessDeniedError as error:
            yield _event("problem", {"problem": str(error)})
        except (CoordinatorError, SparkBridgeError, StateStoreError) as error:
            yield _event("problem", {"problem": str(error)})
        finally:
            changes.close()
            self._open -= 1


def _told(change: StateChange) -> dict[str, object]:
    rows = python_rows(change.batch.slice(0, MOST_WATCH_ROWS))
    return {
        "version": change.version,
        "rows": [
            {
                "change": row["change_type"],
                "before": value(row.get("before")),
                "after": value(row.get("after")),
            }
            for row in rows
        ],
        "more": max(0, change.batch.num_rows - MOST_WATCH_ROWS),
    }


def _event(name: str, data: object) -> bytes:
    """Return one event: JSON has no line breaks, so that the data is one line."""
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"
