"""The rows of a SQL statement for ``async for``, which a caller may end at any time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.client.event_loop.async_results import BlockingCalls

if TYPE_CHECKING:
    from spark_bridge.queryable.sql.relation import StateRelation
    from spark_bridge.queryable.sql.statement_process import ProcessStatement

SQL_BATCH_ROWS = 8_192
INTERRUPT_SECONDS = 0.1
"""A statement that is to end is interrupted so often: DuckDB forgets an interruption that comes before its work."""


class AsyncSqlRows(AsyncIterator[pa.RecordBatch]):
    """The rows of a statement. It begins when it is awaited, or with the first batch; ``aclose`` interrupts it."""

    def __init__(self, begin: Callable[[], StateRelation | ProcessStatement]) -> None:
        self._begin = begin
        self._relation: StateRelation | ProcessStatement | None = None
        self._opened: tuple[pa.Schema, Iterator[pa.RecordBatch]] | None = None
        self._is_closed = False
        self._calls = BlockingCalls("statestore-sql")

    def __await__(self) -> Generator[Any, None, AsyncSqlRows]:
        return self._begun().__await__()

    async def _begun(self) -> AsyncSqlRows:
        if self._opened is None:
            self._opened = await self._calls.call(self._open)
        return self

    def _open(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Bind and start the statement, in a thread. Raises ``RequestError`` for wrong SQL."""
        from spark_bridge.queryable.sql.duckdb_connections import import_duckdb

        duckdb = import_duckdb()
        try:
            relation = self._begin()
        except duckdb.Error as error:
            raise RequestError(str(error)) from error
        self._relation = relation
        if self._is_closed:
            raise RequestError("The statement was ended before it began.")
        return relation.record_batches(SQL_BATCH_ROWS)

    def _required(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        if self._opened is None:
            raise RuntimeError("The statement has not begun; await it, or take its first batch.")
        return self._opened

    @property
    def schema(self) -> pa.Schema:
        """The columns, once the statement has begun."""
        return self._required()[0]

    @property
    def versions(self) -> dict[str, int]:
        """The version read, by query id, once the statement has begun."""
        self._required()
        assert self._relation is not None
        return self._relation.versions

    async def __anext__(self) -> pa.RecordBatch:
        await self._begun()
        batches = self._required()[1]
        batch: pa.RecordBatch | None = await self._calls.call(lambda: next(batches, None))
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def aclose(self) -> None:
        """End the statement, so that DuckDB and the hosts stop."""
        self._is_closed = True
        while not await self._calls.settled(INTERRUPT_SECONDS):
            if self._relation is not None:
                self._relation.interrupt()
        opened, self._opened, self._relation = self._opened, None, None
        if opened is not None:
            with contextlib.suppress(RequestError):  # the statement ends, whatever its end is
                await asyncio.to_thread(_closed, opened[1])


def _closed(batches: Iterator[pa.RecordBatch]) -> None:
    close = getattr(batches, "close", None)
    if close is not None:
        close()
