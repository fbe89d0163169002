"""The route of watches: the changes of each version, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from deploy.state_http.access import token_of_header
from deploy.state_http.bodies import PIECE_ROWS
from deploy.state_http.limits import HttpLimits
from deploy.state_http.models import WatchRequest
from deploy.state_http.problems import problem_of
from deploy.state_http.service import StateService
from spark_bridge.exceptions import AccessDeniedError, RequestError, StateVersionError, TooManyRequestsError
from spark_bridge.queryable.client.answers import json_values as values
from spark_bridge.queryable.client.calls.watch import StateChange
from spark_bridge.queryable.client.event_loop.async_results import AsyncStateWatch
from spark_bridge.queryable.server.tokens.token_verifier import TokenVerifier

EVENT_STREAM = "text/event-stream"


class HttpWatches:
    """The watches of one replica. Each has a thread and a connection."""

    def __init__(self, service: StateService, verifier: TokenVerifier, limits: HttpLimits) -> None:
        self._service = service
        self._verifier = verifier
        self._limits = limits
        self._open = 0

    async def begun(self, request: WatchRequest, last_event_id: str, authorization: str) -> AsyncIterator[bytes]:
        """Return the events, without end as long as the query runs and the caller stays.

        ``last_event_id`` is the last version that a caller has, who comes again; it goes before ``from_version``. The
        token of ``authorization`` is checked with each event. Raises ``RequestError``, ``TooManyRequestsError``,
        ``StateVersionError`` for a version from which no watch can begin, and the errors of the client.
        """
        if self._open >= self._limits.max_watches:
            raise TooManyRequestsError(f"{self._open} watches are open, which is the limit; try again later.")
        shape = await self._service.shape(request.operator, request.query, request.state)
        keys = [shape.of_text(text) for text in request.keys] or None
        client = await self._service.client()
        oldest, completed = await self._service.versions(request.operator, request.query)
        begin = _version(last_event_id) if last_event_id else request.from_version
        begin = completed if begin is None else begin
        if begin < oldest:
            raise StateVersionError(
                f"Operator {request.operator!r} cannot be watched from version {begin}: the versions {oldest} to "
                f"{completed} are kept. Read its state anew and watch from there."
            )
        changes = client.watch(request.operator, keys, state=request.state, query=request.query, from_version=begin)
        return self._events(changes, begin, authorization)

    async def _events(self, changes: AsyncStateWatch, begin: int, authorization: str) -> AsyncIterator[bytes]:
        if self._open >= self._limits.max_watches:
            raise TooManyRequestsError(f"{self._open} watches are open, which is the limit; try again later.")
        self._open += 1
        known = begin
        waited: asyncio.Future[StateChange] | None = None
        try:
            yield _position(known, "watching")
            while True:
                if waited is None:
                    waited = asyncio.ensure_future(changes.__anext__())
                done, _ = await asyncio.wait([waited], timeout=self._limits.heartbeat_seconds)
                self._verifier.verify(token_of_header(authorization))
                if not done:
                    # The change of the version at the position itself may be on its way here.
                    known = max(known, (changes.position or 0) - 1)
                    yield _position(known, "nothing new")
                    continue
                try:
                    change = waited.result()
                except StopAsyncIteration:
                    yield _event("end", {"version": changes.position})
                    return
                finally:
                    waited = None
                for piece in _pieces(change):
                    yield piece
                known = change.version
        except AccessDeniedError as error:
            yield _event("problem", {**problem_of(error), "status": 401, "title": "Unauthorized"})
        except Exception as error:  # noqa: BLE001 - the status has been sent, so the caller is told by an event
            yield _event("problem", problem_of(error))
        finally:
            self._open -= 1
            if waited is not None:
                waited.cancel()
            await asyncio.shield(asyncio.ensure_future(changes.aclose()))


def _version(last_event_id: str) -> int:
    if not (last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) < 19):
        raise RequestError(f"Last-Event-ID: {last_event_id!r} must be the id of an event, which is a version.")
    return int(last_event_id)


def _pieces(change: StateChange) -> list[bytes]:
    """Return the events of a version.

    The last one has the version as its id, so that no caller goes on from the middle of a version.
    """
    batch, version = change.batch, change.version
    pieces = []
    for at in range(0, batch.num_rows, PIECE_ROWS):
        rows = values.rows_to_json(batch.slice(at, PIECE_ROWS).drop_columns(["version"]))
        is_last = at + PIECE_ROWS >= batch.num_rows
        before = f"id: {version}\n".encode() if is_last else b""
        pieces.append(before + _event("change", {"version": version, "rows": rows, "is_last": is_last}))
    return pieces


def _position(version: int, comment: str) -> bytes:
    """Return a sign of life, which is no event, but sets the version from which a browser goes on."""
    return f"id: {version}\n: {comment}\n\n".encode()


def _event(name: str, data: object) -> bytes:
    """Return one event: JSON has no line breaks, so that the data is one line."""
    return f"event: {name}\ndata: ".encode() + values.json_bytes(data) + b"\n\n"
