"""The route of SQL: one statement at a time of a caller, streamed, limited, and ended when the caller leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import pyarrow as pa
from fastapi import Request

from deploy.state_http.bodies import (
    ARROW,
    CSV,
    JSON,
    LINES,
    PIECE_ROWS,
    ArrowBody,
    Body,
    CsvBody,
    DocumentBody,
    LinesBody,
)
from deploy.state_http.bounded_reads import BoundedReads
from deploy.state_http.limits import HttpLimits
from deploy.state_http.models import SqlRequest
from spark_bridge.exceptions import QueryTimeoutError, RequestError, RequestLimitError
from spark_bridge.queryable.client.event_loop.async_client import AsyncQueryableStateClient
from spark_bridge.queryable.sql.duckdb_connections import SqlLimits

T = TypeVar("T")

BODIES: dict[str, Callable[[pa.Schema, Mapping[str, int]], Body]] = {
    JSON: DocumentBody,
    LINES: lambda schema, versions: LinesBody(),
    CSV: lambda schema, versions: CsvBody(schema),
    ARROW: lambda schema, versions: ArrowBody(schema),
}
"""The formats of answers, by media type."""
_ANY = {"": JSON, "*/*": JSON, "application/*": JSON, "text/*": CSV}


def accepted(accept: str) -> str:
    """Return the first media type of an ``Accept`` header that there is. Raises ``RequestError`` if there is none."""
    for part in accept.split(","):
        name = part.partition(";")[0].strip().lower()
        found = name if name in BODIES else _ANY.get(name)
        if found is not None:
            return found
    raise RequestError(f"Accept: {accept!r} names no format of an answer; there are {', '.join(BODIES)}.")


class Statements:
    """The statements of one replica."""

    def __init__(self, client: Callable[[], Awaitable[AsyncQueryableStateClient]], limits: HttpLimits) -> None:
        self._client = client
        self._limits = limits
        self._running = BoundedReads("statements", limits.max_sql)
        self._of_one = SqlLimits(limits.sql_memory_bytes, limits.sql_threads, limits.sql_temp_bytes).share_of(
            limits.max_sql
        )

    def begun(self, request: SqlRequest, accept: str) -> tuple[str, AsyncGenerator[Any, None]]:
        """Return the media type, and a generator of the versions read (by query id) and then of the body's pieces.

        A caller that stops early must close the generator. Raises ``RequestError``, ``RequestLimitError``.
        """
        most = self._limits.max_sql_rows
        if request.limit is not None and request.limit > most:
            raise RequestLimitError(f"limit={request.limit} is more than the {most} rows that a statement may give.")
        media_type = accepted(accept)
        return media_type, self._pieces(request, media_type)

    async def _pieces(self, request: SqlRequest, media_type: str) -> AsyncGenerator[Any, None]:
        deadline = time.monotonic() + self._limits.sql_seconds
        async with self._running.slot():
            client = await self._client()
            rows = client.sql_rows(
                request.sql,
                query_params=request.params,
                version=request.version,
                timeout=self._limits.timeout,
                limits=self._of_one,
                in_own_process=True,
            )
            try:
                await self._within(rows, deadline)
                batches = rows.__aiter__()
                # The versions of all tables are known once rows are there, or the end of them.
                first = await self._within(_next(batches), deadline)
                body = BODIES[media_type](rows.schema, rows.versions)
                yield rows.versions
                try:
                    async for piece in self._written(first, batches, request.limit, body, deadline):
                        yield piece
                except Exception as error:
                    # The status has been sent. So the connection is cut; JSON says why before.
                    yield body.problem(error)
                    raise
                yield body.end()
            finally:
                await self._running.close(rows)

    async def _written(
        self,
        first: pa.RecordBatch | None,
        batches: AsyncIterator[pa.RecordBatch],
        limit: int | None,
        body: Body,
        deadline: float,
    ) -> AsyncIterator[bytes]:
        given, most, batch = 0, self._limits.max_sql_rows, first
        while batch is not None:
            if limit is not None:
                batch = batch.slice(0, limit - given)
            for at in range(0, batch.num_rows, PIECE_ROWS):
                part = batch.slice(at, PIECE_ROWS)
                given += part.num_rows
                if given > most:
                    raise RequestLimitError(
                        f"There are more than the {most} rows that a statement may give; ask for fewer, or say limit."
                    )
                yield await asyncio.to_thread(body.rows, part)
            if given == limit:
                return
            batch = await self._within(_next(batches), deadline)

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


async def _next(batches: AsyncIterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    """Return the next batch; None after the last one."""
    return await anext(batches, None)


async def while_there(request: Request, what: Awaitable[T]) -> T | None:
    """Wait for something as long as the caller of a request is there; None if the caller has left.

    Starlette looks for callers that leave only once an answer has begun, which may take long.
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
