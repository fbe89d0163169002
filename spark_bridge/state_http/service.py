"""The work of the routes, on an asynchronous query client."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from fastapi import Request

from backends.host_memory import BoundedDict
from coordinator_actor.access_tokens import Scope
from spark_bridge.exceptions import (
    AccessDeniedError,
    QueryTimeoutError,
    RequestError,
    RequestLimitError,
    StateVersionError,
    TooManyRequestsError,
    UnknownKvStateIdError,
    UnknownOperatorError,
)
from spark_bridge.queryable.client import json_values
from spark_bridge.queryable.client.async_client import AsyncQueryableStateClient, scoped_async_client
from spark_bridge.queryable.client.async_results import AsyncStateScan, AsyncStateWatch
from spark_bridge.queryable.client.features import FeatureRows
from spark_bridge.queryable.client.watch import StateChange
from spark_bridge.queryable.protocol import WATERMARK
from spark_bridge.queryable.server.tokens import TokenVerifier
from spark_bridge.queryable.sql.sql import SqlLimits
from spark_bridge.state_format.layouts import ROLLING
from spark_bridge.state_http import access, models

MAX_SCOPES = 100
"""Clients that are kept for tokens with scopes."""
MAX_SHAPES = 1000
"""Key columns that are kept, by caller, operator, query and state: each new run of a query has a name more."""
SHAPE_SECONDS = 30.0
"""The key columns of an operator are not asked for again within this many seconds."""


class VersionAndTime(NamedTuple):
    """The version of an answer, and the time that its rolling aggregates are of; None for other operators."""

    version: int
    at: dt.datetime | None


@dataclass(frozen=True)
class KeyShape:
    """An operator's key columns in their order, the window among them, and whether values are rolling aggregates."""

    schema: pa.Schema
    window: str | None
    is_rolling: bool = False

    @cached_property
    def plain(self) -> pa.Schema:
        """Return the columns without the window; the window alone if the key has no other column."""
        names = [n for n in self.schema.names if n != self.window]
        return pa.schema([self.schema.field(n) for n in names or self.schema.names])

    def of_text(self, text: str) -> Any:
        """Return the key of a path. Raises ``UnknownKeyOrNamespaceError``."""
        if self.schema.names == [self.window]:
            return json_values.window_of_text(text)
        return json_values.key_of_text(text, self.plain)

    def of_json(self, keys: Sequence[Any]) -> list[Any]:
        """Return the keys of a lookup: all with the window, or all without. Raises ``UnknownKeyOrNamespaceError``."""
        first = keys[0] if keys else None
        size = len(first) if isinstance(first, list | dict) else 1
        schema = self.schema if size == len(self.schema) else self.plain
        return [json_values.key_of_json(key, schema) for key in keys]


class StateService:
    """Answers the routes of one replica."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncQueryableStateClient]], limits: access.HttpLimits) -> None:
        self.limits = limits
        self._connect = connect
        self._connecting: asyncio.Future[AsyncQueryableStateClient] | None = None
        self._shapes: BoundedDict[tuple[Scope, str, str | None, str | None], tuple[float, KeyShape]] = BoundedDict(
            MAX_SHAPES
        )
        self._scoped: BoundedDict[Scope, AsyncQueryableStateClient] = BoundedDict(MAX_SCOPES)
        self._scans = access.BoundedReads("scans", limits.max_scans)

    async def client(self) -> AsyncQueryableStateClient:
        """Return the client of the caller, which sees what the caller's token is for. Every route asks it.

        It is made when it is needed first: the application can start before any stream.
        """
        scope = access.CALLER_SCOPE.get()
        if self._connecting is None or (self._connecting.done() and self._connecting.exception() is not None):
            # All requests that arrive before it ends wait for the same attempt.
            self._connecting = asyncio.ensure_future(self._connect())
        client = await asyncio.shield(self._connecting)
        if scope.is_all:
            return client
        scoped = self._scoped.get(scope)
        if scoped is None:
            scoped = self._scoped[scope] = scoped_async_client(client, scope)
        return scoped

    def lag(self) -> float:
        """Return by how many seconds the last answer may be behind; 0.0 unless hosts follow a query and are late."""
        connecting = self._connecting
        if connecting is None or not connecting.done() or connecting.cancelled() or connecting.exception() is not None:
            return 0.0
        return connecting.result().lag_seconds

    async def operators(self) -> dict[str, Any]:
        return {"operators": await (await self.client()).operators()}

    async def describe(self, operator: str, query: str | None) -> Any:
        return await (await self.client()).describe(operator, query)

    async def get(
        self, operator: str, text: str, window: str | None, at: str | None, named: dict[str, Any]
    ) -> dict[str, Any]:
        """See the route. Raises ``MissingKeyError``."""
        client = await self.client()
        shape = await self.shape(operator, named["query"], named["state"])
        key = shape.of_text(text)
        of_window = None if window is None else json_values.window_of_text(window)
        version_and_time = await self._as_of(client, shape, operator, {**named, "at": at})
        named = {**named, **version_and_time}
        state = await client.get(operator, key, window=of_window, timeout=self.limits.timeout, **named)
        if state is None:
            in_window = "" if window is None else f" in the window {window}"
            raise access.MissingKeyError(f"The key {text} has nothing in operator {operator!r}{in_window}.")
        answer = {"operator": operator, "key": json_values.to_json(key), "value": json_values.to_json(state)}
        return answer | {name: json_values.to_json(value) for name, value in version_and_time.items() if name == "at"}

    async def _as_of(
        self, client: AsyncQueryableStateClient, shape: KeyShape, operator: str, asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the time ``at`` of an answer for the client, and with "watermark" the version of that watermark.

        Nothing for an operator without rolling aggregates, of which the client refuses an ``at`` that was given.
        Raises ``RequestError``.
        """
        at = None if asked["at"] is None else json_values.at_of_text(asked["at"])
        if not shape.is_rolling:
            return {} if at is None else {"at": at}
        if at is None:
            return {"at": client.now()}
        if at != WATERMARK:
            return {"at": at}
        # The version and the time of the watermark, so that the answer can name it.
        rows = await client.scan(operator, limit=0, timeout=self.limits.timeout, **{**asked, "at": at})
        await rows.aclose()
        return {"at": rows.at, "isolation": "completed", "version": rows.version}

    async def lookup(self, operator: str, request: models.LookupRequest) -> tuple[pa.Table, dt.datetime | None]:
        """Return the rows, and the time that rolling aggregates are of; None for others."""
        self._check_count(request.keys)
        client = await self.client()
        shape = await self.shape(operator, request.query, request.state)
        keys = await asyncio.to_thread(shape.of_json, request.keys)
        named = {"query": request.query, "state": request.state, "version": request.version}
        named["isolation"] = request.isolation.value
        version_and_time = await self._as_of(client, shape, operator, {**named, "at": request.at})
        table: pa.Table = await client.get_many(
            operator,
            keys,
            window=None if request.window is None else json_values.window_of_text(request.window),
            timeout=self.limits.timeout,
            **{**named, **version_and_time},
        )
        if table.nbytes > self.limits.max_lookup_bytes:
            raise RequestLimitError(
                f"What these {len(keys)} keys have is {table.nbytes} bytes; {self.limits.max_lookup_bytes} are the "
                "limit. Ask for fewer."
            )
        return table, version_and_time.get("at")

    async def feature_views(self) -> dict[str, Any]:
        return {"views": await (await self.client()).feature_views()}

    def _check_count(self, keys: Sequence[Any]) -> None:
        if len(keys) > self.limits.max_keys:
            raise RequestLimitError(f"{len(keys)} keys were asked for at once; {self.limits.max_keys} are the limit.")

    async def features(self, view: str, request: models.FeaturesRequest) -> FeatureRows:
        self._check_count(request.keys)
        client = await self.client()
        schema = await client.entity_schema(view, timeout=self.limits.timeout)
        keys = [json_values.key_of_json(key, schema) for key in request.keys]
        return await client.features(
            view,
            keys,
            defaults=request.defaults,
            isolation=request.isolation.value,
            versions=request.versions,
            at=None if request.at is None else json_values.at_of_text(request.at),
            timeout=self.limits.timeout,
        )

    async def scan(
        self, operator: str, request: models.ScanRequest, *, as_arrow: bool
    ) -> tuple[VersionAndTime, AsyncIterator[bytes]]:
        """Return version and time of rolling aggregates, and the pieces of the body, which a caller must close."""
        most = self.limits.max_rows
        if request.limit is not None and request.limit > most:
            raise RequestLimitError(f"limit={request.limit} is more than the {most} rows that a scan may give.")
        pieces = self._scan(operator, request, as_arrow)
        # Up to the first rows, so that an error still decides the status.
        first = await pieces.__anext__()
        assert isinstance(first, VersionAndTime)
        return first, pieces  # type: ignore[return-value]

    async def _scan(
        self, operator: str, request: models.ScanRequest, as_arrow: bool
    ) -> AsyncIterator[VersionAndTime | bytes]:
        """Yield the version and the time, and then the pieces of the body."""
        deadline = time.monotonic() + self.limits.scan_seconds
        async with self._scans.slot():
            client = await self.client()
            shape = await self.shape(operator, request.query, request.state)
            bounds: dict[str, Any] = {
                name: json_values.bound_of_json(getattr(request, name), shape.plain, name)
                for name in ("prefix", "start", "end")
            }
            rows = await client.scan(
                operator,
                request.state,
                # One row more than is allowed, to know whether there are more.
                limit=self.limits.max_rows + 1 if request.limit is None else request.limit,
                columns=request.columns,
                where=[_condition(c.column, c.comparison, c.value) for c in request.where],
                query=request.query,
                isolation=request.isolation.value,
                version=request.version,
                at=None if request.at is None else json_values.at_of_text(request.at),
                timeout=self.limits.timeout,
                **bounds,
            )
            try:
                body = models.ArrowBody(rows.schema) if as_arrow else models.LinesBody()
                yield VersionAndTime(rows.version, rows.at)
                async for piece in body_of(body, self._pieces(rows, body, deadline)):
                    yield piece
            finally:
                await self._scans.close(rows)

    async def _pieces(self, rows: AsyncStateScan, body: models.Body, deadline: float) -> AsyncIterator[bytes]:
        num_rows = 0
        batches = rows.__aiter__()
        while True:
            try:
                batch = await asyncio.wait_for(batches.__anext__(), max(0.0, deadline - time.monotonic()))
            except StopAsyncIteration:
                return
            except QueryTimeoutError:
                raise  # the client's own error is a TimeoutError, too
            except asyncio.TimeoutError as error:
                raise QueryTimeoutError(
                    f"The scan was not done after {self.limits.scan_seconds:.0f} s, which is the limit; {num_rows} "
                    "rows were sent. Ask for fewer by where, start and end."
                ) from error
            for part in rows_of_pieces(batch):
                num_rows += part.num_rows
                if num_rows > self.limits.max_rows:
                    raise RequestLimitError(
                        f"There are more than the {self.limits.max_rows} rows that a scan may give; ask for fewer by "
                        "where, start and end, or say limit."
                    )
                yield await asyncio.to_thread(body.rows, part)

    async def versions(self, operator: str, query: str | None) -> tuple[int, int, str]:
        """Return the oldest version kept, the last completed one, and the run. Raises ``UnknownOperatorError``."""
        description = _found(await (await self.client()).operators(), operator, query)
        return description["oldest_version"], description["completed_version"], description["run_id"]

    async def shape(self, operator: str, query: str | None, state: str | None) -> KeyShape:
        """Return the key columns of an operator. Raises ``UnknownOperatorError`` and ``UnknownKvStateIdError``."""
        asked = (access.CALLER_SCOPE.get(), operator, query, state)
        cached = self._shapes.get(asked)
        if cached is not None and time.monotonic() < cached[0]:
            return cached[1]
        client = await self.client()
        rows = await client.scan(operator, state, limit=0, query=query, timeout=self.limits.timeout)
        await rows.aclose()
        described = _variable(await client.operators(), operator, query, state)
        schema = pa.schema([rows.schema.field(name) for name in described["key"]])
        shape = KeyShape(schema, described.get("window"), described["kind"] == ROLLING)
        self._shapes[asked] = (time.monotonic() + SHAPE_SECONDS, shape)
        return shape


def _found(operators: list[dict[str, Any]], operator: str, query: str | None) -> dict[str, Any]:
    for description in operators:
        names = (None, description["query_name"], description["query_id"], description["run_id"])
        if description["operator"] == operator and query in names:
            return description
    raise UnknownOperatorError(f"No running query has an operator {operator!r} any more.")


def _variable(operators: list[dict[str, Any]], operator: str, query: str | None, state: str | None) -> dict[str, Any]:
    """Return the description of a state variable. Raises ``UnknownOperatorError`` and ``UnknownKvStateIdError``."""
    description = _found(operators, operator, query)
    for variable in description["state"]:
        if state is None or variable["name"] == state:
            return variable  # type: ignore[no-any-return]
    names = ", ".join(repr(v["name"]) for v in description["state"])
    raise UnknownKvStateIdError(f"Operator {operator!r} has no state variable {state!r}; it has {names}.")


def rows_of_pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch, as many at a time as one piece of an answer has."""
    for at in range(0, batch.num_rows, models.PIECE_ROWS):
        yield batch.slice(at, models.PIECE_ROWS)


async def body_of(body: models.Body, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces of a body, and its end."""
    try:
        async for piece in pieces:
            yield piece
    except Exception as error:
        # The status has been sent. So the body gives the reason, if it can, and then the connection is cut.
        yield body.problem(error)
        raise
    yield body.end()


def _condition(column: str, comparison: str, value: Any) -> tuple[Any, ...]:
    if comparison in ("is null", "is not null"):
        if value is not None:
            raise RequestError(f"where: {column!r} {comparison!r} takes no value.")
        return (column, comparison)
    of = value if comparison == "in" and isinstance(value, list) else [value]
    if (comparison == "in") != isinstance(value, list) or any(type(v) not in (str, int, float, bool) for v in of):
        wanted = "an array of numbers, strings or booleans" if comparison == "in" else "a number, a string or a boolean"
        raise RequestError(f"where: {column!r} {comparison!r} takes {wanted}, not {value!r}.")
    return (column, comparison, value)


# The route of SQL: one statement at a time of a caller, streamed, limited, and ended when the caller leaves.


T = TypeVar("T")

BODIES: dict[str, Callable[[pa.Schema, Mapping[str, int], Mapping[str, dt.datetime]], models.Body]] = {
    models.JSON: models.DocumentBody,
    models.LINES: lambda schema, versions, times: models.LinesBody(),
    models.CSV: lambda schema, versions, times: models.CsvBody(schema),
    models.ARROW: lambda schema, versions, times: models.ArrowBody(schema),
}
"""The formats of answers, by media type."""
_ANY = {"": models.JSON, "*/*": models.JSON, "application/*": models.JSON, "text/*": models.CSV}


def accepted(accept: str) -> str:
    """Return the first media type of an ``Accept`` header that there is. Raises ``RequestError`` if there is none."""
    for part in accept.split(","):
        name = part.partition(";")[0].strip().lower()
        media_type = name if name in BODIES else _ANY.get(name)
        if media_type is not None:
            return media_type
    raise RequestError(f"Accept: {accept!r} names no format of an answer; there are {', '.join(BODIES)}.")


class Statements:
    """The statements of one replica."""

    def __init__(self, client: Callable[[], Awaitable[AsyncQueryableStateClient]], limits: access.HttpLimits) -> None:
        self._client = client
        self._limits = limits
        self._running = access.BoundedReads("statements", limits.max_sql)
        of_all = SqlLimits(limits.sql_memory_bytes, limits.sql_threads, limits.sql_temp_bytes)
        self._of_one = of_all.share_of(limits.max_sql)

    def begun(self, request: models.SqlRequest, accept: str) -> tuple[str, AsyncGenerator[Any, None]]:
        """Return the media type, and a generator: a pair of the versions and of the times of rolling aggregates, by
        query id, and then the body's pieces.

        A caller that stops early must close the generator. Raises ``RequestError``, ``RequestLimitError``.
        """
        most = self._limits.max_sql_rows
        if request.limit is not None and request.limit > most:
            raise RequestLimitError(f"limit={request.limit} is more than the {most} rows that a statement may give.")
        media_type = accepted(accept)
        at = None if request.at is None else json_values.at_of_text(request.at)
        return media_type, self._pieces(request, at, media_type)

    async def _pieces(
        self, request: models.SqlRequest, at: dt.datetime | str | None, media_type: str
    ) -> AsyncGenerator[Any, None]:
        deadline = time.monotonic() + self._limits.sql_seconds
        async with self._running.slot():
            client = await self._client()
            options: dict[str, Any] = {"version": request.version, "at": at, "timeout": self._limits.timeout}
            rows = client.sql_rows(
                request.sql, query_params=request.params, limits=self._of_one, in_own_process=True, **options
            )
            try:
                await self._within(rows, deadline)
                batches = rows.__aiter__()
                # The versions of all tables are known once the first rows have arrived, or their end.
                first = await self._within(anext(batches, None), deadline)
                body = BODIES[media_type](rows.schema, rows.versions, rows.times)
                yield rows.versions, rows.times
                async for piece in body_of(body, self._written(first, batches, request.limit, body, deadline)):
                    yield piece
            finally:
                await self._running.close(rows)

    async def _written(
        self,
        first: pa.RecordBatch | None,
        batches: AsyncIterator[pa.RecordBatch],
        limit: int | None,
        body: models.Body,
        deadline: float,
    ) -> AsyncIterator[bytes]:
        num_rows, most, batch = 0, self._limits.max_sql_rows, first
        while batch is not None:
            if limit is not None:
                batch = batch.slice(0, limit - num_rows)
            for part in rows_of_pieces(batch):
                num_rows += part.num_rows
                if num_rows > most:
                    raise RequestLimitError(
                        f"There are more than the {most} rows that a statement may give; ask for fewer, or say limit."
                    )
                yield await asyncio.to_thread(body.rows, part)
            if num_rows == limit:
                return
            batch = await self._within(anext(batches, None), deadline)

    async def _within(self, what: Awaitable[T], deadline: float) -> T:
        """Wait for something until the deadline. Raises ``QueryTimeoutError``."""
        waited = asyncio.ensure_future(what)
        done, _ = await asyncio.wait([waited], timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            waited.cancel()
            raise QueryTimeoutError(
                f"The statement was not done after {self._limits.sql_seconds:g} s, which is the limit: ask for less, "
                "by conditions on the key columns for example."
            )
        return waited.result()


async def while_there(request: Request, what: Awaitable[T]) -> T | None:
    """Wait for something until the caller of a request leaves; None if the caller has left.

    Starlette notices callers that leave only once an answer has begun, which may take long.
    """
    waited = asyncio.ensure_future(what)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait([waited, leaving], return_when=asyncio.FIRST_COMPLETED)
        if waited.done():
            return waited.result()
        waited.cancel()
        await asyncio.wait([waited])
        return None
    finally:
        leaving.cancel()
        if not waited.done():
            waited.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# The route of watches: the changes of each version, as server-sent events.


EVENT_STREAM = "text/event-stream"


class HttpWatches:
    """The watches of one replica. Each has a thread and a connection."""

    def __init__(self, service: StateService, verifier: TokenVerifier, limits: access.HttpLimits) -> None:
        self._service = service
        self._verifier = verifier
        self._limits = limits
        self._open = 0

    async def begun(self, request: models.WatchRequest, last_event_id: str, authorization: str) -> AsyncIterator[bytes]:
        """Return the events, without end as long as the query runs and the caller stays.

        ``last_event_id`` is that of the last event that a returning caller has; it takes precedence over
        ``from_version``.
        The token of ``authorization`` is checked with each event. Raises ``RequestError``, ``TooManyRequestsError``,
        ``StateVersionError`` for a version that no watch can begin from, and the errors of the client.
        """
        if self._open >= self._limits.max_watches:
            raise TooManyRequestsError(f"{self._open} watches are open, which is the limit; try again later.")
        shape = await self._service.shape(request.operator, request.query, request.state)
        keys = [shape.of_text(text) for text in request.keys] or None
        client = await self._service.client()
        oldest, completed, run_id = await self._service.versions(request.operator, request.query)
        begin, from_run = _position_of(last_event_id) if last_event_id else (request.from_version, None)
        if begin is None:
            begin, from_run = completed, run_id
        if begin < oldest:
            raise StateVersionError(
                f"Operator {request.operator!r} cannot be watched from version {begin}: the versions {oldest} to "
                f"{completed} are kept. Read its state again and watch from there."
            )
        changes = client.watch(
            request.operator, keys, state=request.state, query=request.query, from_version=begin, from_run=from_run
        )
        return self._events(changes, begin, authorization)

    async def _events(self, changes: AsyncStateWatch, begin: int, authorization: str) -> AsyncIterator[bytes]:
        if self._open >= self._limits.max_watches:
            raise TooManyRequestsError(f"{self._open} watches are open, which is the limit; try again later.")
        self._open += 1
        newest = begin
        waited: asyncio.Future[StateChange] | None = None
        try:
            yield _position(newest, changes.run_id, "watching")
            while True:
                if waited is None:
                    waited = asyncio.ensure_future(changes.__anext__())
                done, _ = await asyncio.wait([waited], timeout=self._limits.heartbeat_seconds)
                self._verifier.verify(access.token_of_header(authorization))
                if not done:
                    # The change of the version at the position itself may still be arriving.
                    newest = max(newest, (changes.position or 0) - 1)
                    yield _position(newest, changes.run_id, "nothing new")
                    continue
                try:
                    change = waited.result()
                except StopAsyncIteration:
                    yield _event("end", {"version": changes.position})
                    return
                finally:
                    waited = None
                for piece in _pieces(change, changes.run_id):
                    yield piece
                newest = change.version
        except AccessDeniedError as error:
            yield _event("problem", {**access.problem_of(error), "status": 401, "title": "Unauthorized"})
        except Exception as error:  # noqa: BLE001 - the status has been sent, so an event reports the error
            yield _event("problem", access.problem_of(error))
        finally:
            self._open -= 1
            if waited is not None:
                waited.cancel()
            await asyncio.shield(asyncio.ensure_future(changes.aclose()))


def _event_id(version: int, run_id: str | None) -> str:
    """Return the id of the event that ends a version: the version, and the run of the query that gave it, if known.

    With the run, a caller that resumes gets an error if the query was rolled back in between. With the version alone,
    it would get the versions of the new history after those of the old one.
    """
    return str(version) if run_id is None else f"{version}/{run_id}"


def _position_of(last_event_id: str) -> tuple[int, str | None]:
    """Return the version of an event's id, and its run; None for an id without a run. Raises ``RequestError``."""
    version, _, run_id = last_event_id.partition("/")
    if not (version.isascii() and version.isdecimal() and len(version) < 19):
        raise RequestError(
            f"Last-Event-ID: {last_event_id!r} must be the id of an event: a version, or version/run id."
        )
    return int(version), run_id or None


def _pieces(change: StateChange, run_id: str | None) -> list[bytes]:
    """Return the events of a run's version. Only the last has an id: no caller resumes within a version."""
    batch, version = change.batch, change.version
    pieces = []
    for at in range(0, batch.num_rows, models.PIECE_ROWS):
        rows = json_values.rows_to_json(batch.slice(at, models.PIECE_ROWS).drop_columns(["version"]))
        is_last = at + models.PIECE_ROWS >= batch.num_rows
        before = f"id: {_event_id(version, run_id)}\n".encode() if is_last else b""
        pieces.append(before + _event("change", {"version": version, "rows": rows, "is_last": is_last}))
    return pieces


def _position(version: int, run_id: str | None, comment: str) -> bytes:
    """Return a heartbeat: a comment, not an event, that sets the version from which a browser resumes."""
    return f"id: {_event_id(version, run_id)}\n: {comment}\n\n".encode()


def _event(name: str, data: object) -> bytes:
    """Return one event: JSON has no line breaks, so that the data is one line."""
    return f"event: {name}\ndata: ".encode() + json_values.json_bytes(data) + b"\n\n"
