"""The work of the routes, on an asynchronous query client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from deploy.state_http.bodies import PIECE_ROWS, ArrowBody, Body, LinesBody
from deploy.state_http.bounded_reads import BoundedReads
from deploy.state_http.limits import HttpLimits
from deploy.state_http.models import LookupRequest, ScanRequest
from deploy.state_http.problems import MissingKeyError
from spark_bridge.exceptions import (
    QueryTimeoutError,
    RequestError,
    RequestLimitError,
    UnknownKvStateIdError,
    UnknownOperatorError,
)
from spark_bridge.queryable.client.answers import json_values as values
from spark_bridge.queryable.client.event_loop.async_client import AsyncQueryableStateClient
from spark_bridge.queryable.client.event_loop.async_results import AsyncStateScan

SHAPE_SECONDS = 30.0
"""The key columns of an operator are not asked for again within this many seconds."""


@dataclass(frozen=True)
class KeyShape:
    """The columns of an operator's keys in their order, and which of them is the window."""

    schema: pa.Schema
    window: str | None

    @cached_property
    def plain(self) -> pa.Schema:
        """Return the columns without the window; the window alone if the key has no other column."""
        names = [n for n in self.schema.names if n != self.window]
        return pa.schema([self.schema.field(n) for n in names or self.schema.names])

    def of_text(self, text: str) -> Any:
        """Return the key of a path. Raises ``UnknownKeyOrNamespaceError``."""
        if self.schema.names == [self.window]:
            return values.window_of_text(text)
        return values.key_of_text(text, self.plain)

    def of_json(self, keys: Sequence[Any]) -> list[Any]:
        """Return the keys of a lookup: all with the window, or all without. Raises ``UnknownKeyOrNamespaceError``."""
        first = keys[0] if keys else None
        size = len(first) if isinstance(first, list | dict) else 1
        schema = self.schema if size == len(self.schema) else self.plain
        return [values.key_of_json(key, schema) for key in keys]


class StateService:
    """Answers the routes of one replica."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncQueryableStateClient]], limits: HttpLimits) -> None:
        self.limits = limits
        self._connect = connect
        self._connecting: asyncio.Future[AsyncQueryableStateClient] | None = None
        self._shapes: dict[tuple[str, str | None, str | None], tuple[float, KeyShape]] = {}
        self._scans = BoundedReads("scans", limits.max_scans)

    async def client(self) -> AsyncQueryableStateClient:
        """Return the client, made when it is needed first: the application can start before any stream."""
        if self._connecting is None or (self._connecting.done() and self._connecting.exception() is not None):
            # All requests that come meanwhile wait for the same attempt.
            self._connecting = asyncio.ensure_future(self._connect())
        return await asyncio.shield(self._connecting)

    def lag(self) -> float:
        """Return by how many seconds the last answer may be behind; 0.0 unless hosts follow a query and are late."""
        connecting = self._connecting
        is_there = connecting is not None and connecting.done() and not connecting.cancelled()
        if connecting is None or not is_there or connecting.exception() is not None:
            return 0.0
        return connecting.result().lag_seconds

    async def operators(self) -> dict[str, Any]:
        """See the route."""
        return {"operators": await (await self.client()).operators()}

    async def describe(self, operator: str, query: str | None) -> Any:
        """See the route."""
        return await (await self.client()).describe(operator, query)

    async def get(self, operator: str, text: str, window: str | None, named: dict[str, Any]) -> dict[str, Any]:
        """See the route. Raises ``MissingKeyError``."""
        client = await self.client()
        shape = await self.shape(operator, named["query"], named["state"])
        key = shape.of_text(text)
        of_window = None if window is None else values.window_of_text(window)
        found = await client.get(operator, key, window=of_window, timeout=self.limits.timeout, **named)
        if found is None:
            there = "" if window is None else f" in the window {window}"
            raise MissingKeyError(f"The key {text} has nothing in operator {operator!r}{there}.")
        return {"operator": operator, "key": values.to_json(key), "value": values.to_json(found)}

    async def lookup(self, operator: str, request: LookupRequest) -> pa.Table:
        """See the route."""
        if len(request.keys) > self.limits.max_keys:
            raise RequestLimitError(
                f"{len(request.keys)} keys were asked for at once; {self.limits.max_keys} are the limit."
            )
        client = await self.client()
        shape = await self.shape(operator, request.query, request.state)
        keys = await asyncio.to_thread(shape.of_json, request.keys)
        found: pa.Table = await client.get_many(
            operator,
            keys,
            request.query,
            request.state,
            window=None if request.window is None else values.window_of_text(request.window),
            isolation=request.isolation.value,
            version=request.version,
            timeout=self.limits.timeout,
        )
        if found.nbytes > self.limits.max_lookup_bytes:
            raise RequestLimitError(
                f"What these {len(keys)} keys have is {found.nbytes} bytes; {self.limits.max_lookup_bytes} are the "
                "limit. Ask for fewer."
            )
        return found

    async def scan(self, operator: str, request: ScanRequest, *, as_arrow: bool) -> tuple[int, AsyncIterator[bytes]]:
        """Return the version, and the body in pieces; see the route.

        A caller that stops early must close the iterator.
        """
        most = self.limits.max_rows
        if request.limit is not None and request.limit > most:
            raise RequestLimitError(f"limit={request.limit} is more than the {most} rows that a scan may give.")
        pieces = self._scan(operator, request, as_arrow)
        # Up to the first rows, so that an error still decides the status.
        version = await pieces.__anext__()
        assert isinstance(version, int)
        return version, pieces  # type: ignore[return-value]

    async def _scan(self, operator: str, request: ScanRequest, as_arrow: bool) -> AsyncIterator[int | bytes]:
        """Give the version, and then the pieces of the body."""
        deadline = time.monotonic() + self.limits.scan_seconds
        async with self._scans.slot():
            client = await self.client()
            shape = await self.shape(operator, request.query, request.state)
            bounds = [
                values.bound_of_json(given, shape.plain, name)
                for name, given in (("prefix", request.prefix), ("start", request.start), ("end", request.end))
            ]
            rows = await client.scan(
                operator,
                request.state,
                prefix=bounds[0],
                start=bounds[1],
                end=bounds[2],
                # One row more than is allowed, to know whether there are more.
                limit=self.limits.max_rows + 1 if request.limit is None else request.limit,
                columns=request.columns,
                where=[_condition(c.column, c.comparison, c.value) for c in request.where],
                query=request.query,
                isolation=request.isolation.value,
                version=request.version,
                timeout=self.limits.timeout,
            )
            try:
                body = ArrowBody(rows.schema) if as_arrow else LinesBody()
                yield rows.version
                try:
                    async for piece in self._pieces(rows, body, deadline):
                        yield piece
                except Exception as error:
                    # The status has been sent. So the connection is cut, and before that the last line says why.
                    yield body.problem(error)
                    raise
                yield body.end()
            finally:
                await self._scans.close(rows)

    async def _pieces(self, rows: AsyncStateScan, body: Body, deadline: float) -> AsyncIterator[bytes]:
        given = 0
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
                    f"The scan was not done after {self.limits.scan_seconds:.0f} s, which is the limit; {given} rows "
                    "were sent. Ask for fewer by where, start and end."
                ) from error
            for at in range(0, batch.num_rows, PIECE_ROWS):
                part = batch.slice(at, PIECE_ROWS)
                given += part.num_rows
                if given > self.limits.max_rows:
                    raise RequestLimitError(
                        f"There are more than the {self.limits.max_rows} rows that a scan may give; ask for fewer by "
                        "where, start and end, or say limit."
                    )
                yield await asyncio.to_thread(body.rows, part)

    async def versions(self, operator: str, query: str | None) -> tuple[int, int]:
        """Return the oldest version that is kept and the last completed one. Raises ``UnknownOperatorError``."""
        found = _found(await (await self.client()).operators(), operator, query)
        return found["oldest_version"], found["completed_version"]

    async def shape(self, operator: str, query: str | None, state: str | None) -> KeyShape:
        """Return the key columns of an operator. Raises ``UnknownOperatorError`` and ``UnknownKvStateIdError``."""
        asked = (operator, query, state)
        known = self._shapes.get(asked)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        client = await self.client()
        rows = await client.scan(operator, state, limit=0, query=query, timeout=self.limits.timeout)
        await rows.aclose()
        described = _variable(await client.operators(), operator, query, state)
        schema = pa.schema([rows.schema.field(name) for name in described["key"]])
        shape = KeyShape(schema, described.get("window"))
        self._shapes[asked] = (time.monotonic() + SHAPE_SECONDS, shape)
        return shape


def _found(operators: list[dict[str, Any]], operator: str, query: str | None) -> dict[str, Any]:
    """Return the description of an operator. Raises ``UnknownOperatorError``."""
    for found in operators:
        if found["operator"] == operator and query in (None, found["query_name"], found["query_id"], found["run_id"]):
            return found
    raise UnknownOperatorError(f"No running query has an operator {operator!r} any more.")


def _variable(operators: list[dict[str, Any]], operator: str, query: str | None, state: str | None) -> dict[str, Any]:
    """Return the description of a state variable. Raises ``UnknownOperatorError`` and ``UnknownKvStateIdError``."""
    found = _found(operators, operator, query)
    for variable in found["state"]:
        if state is None or variable["name"] == state:
            return variable  # type: ignore[no-any-return]
    names = ", ".join(repr(v["name"]) for v in found["state"])
    raise UnknownKvStateIdError(f"Operator {operator!r} has no state variable {state!r}; it has {names}.")


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
