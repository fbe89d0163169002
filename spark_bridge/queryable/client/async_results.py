"""Scans, watches and rows of SQL for ``async for``: their blocking calls run in threads."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.client.results import formed
from spark_bridge.queryable.client.scans import StateScan
from spark_bridge.queryable.client.watch import StateChange, StateWatch

if TYPE_CHECKING:
    from spark_bridge.queryable.sql.sql import StateRelation
    from spark_bridge.queryable.sql.statement_process import ProcessStatement


class BlockingCalls:
    """Runs blocking calls one after the other, each in a daemon thread, which does not delay the end of the program.

    If there may be several callers at once, each calls while it holds ``turn``. ``drop`` gets a result that no caller
    takes.
    """

    def __init__(self, name: str, drop: Callable[[Any], None] = lambda result: None) -> None:
        self.turn = asyncio.Lock()
        self._name = name
        self._drop = drop
        self._pending: asyncio.Future[Any] | None = None

    async def call(self, what: Callable[[], Any]) -> Any:
        """Wait for a call, and return its result. If the caller is cancelled, the next call returns that instead."""
        if self._pending is None:
            self._pending = self._begun(what)
        # Another event loop would never get the result: ``ensure_future`` raises ``ValueError`` there.
        pending = asyncio.ensure_future(self._pending, loop=asyncio.get_running_loop())
        await asyncio.wait([pending])
        # A caller that is cancelled as the result comes does not get here, and leaves the result to the next one.
        if self._pending is pending:
            self._pending = None
        return pending.result()

    def _begun(self, what: Callable[[], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def answer(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run() -> None:
            result, failure = None, None
            try:
                result = what()
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                failure = error
            try:
                loop.call_soon_threadsafe(answer, result, failure)
            except RuntimeError:  # the loop was closed, and no caller waits any more
                if failure is None:
                    self._drop(result)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return future

    def leave(self) -> None:
        """Drop the result of the call that a cancelled caller has left, unless a caller waits when it comes."""

        def drop(done: asyncio.Future[Any]) -> None:
            if self._pending is done and not self.turn.locked():
                self._pending = None
                self._drop_result(done)

        if self._pending is not None:
            self._pending.add_done_callback(drop)

    def _drop_result(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._drop(done.result())

    async def settled(self, timeout: float | None = None) -> bool:
        """Wait for the call that a cancelled caller has left; return False if it is not done after ``timeout``."""
        pending = self._pending
        if pending is not None:
            done, _ = await asyncio.wait([pending], timeout=timeout)
            if not done:
                return False
            # Another caller may have taken the result while this one waited, and begun the next call.
            if self._pending is pending:
                self._pending = None
                self._drop_result(pending)
        return True


class AsyncStateScan(AsyncIterator[pa.RecordBatch]):
    """A ``StateScan`` for ``async for``. The scan begins with the first batch, or when it is awaited."""

    def __init__(self, begin: Callable[[], StateScan]) -> None:
        self._begin = begin
        self._scan: StateScan | None = None
        self._left: deque[pa.RecordBatch] = deque()  # a cancelled caller has read more than the next one takes
        self._calls = BlockingCalls("statestore-scan", _end_scan)

    def __await__(self) -> Generator[Any, None, AsyncStateScan]:
        return self._begun().__await__()

    async def _begun(self) -> AsyncStateScan:
        async with self._calls.turn:
            await self._started()
        return self

    async def _started(self) -> StateScan:
        if self._scan is None:
            try:
                self._scan = await self._calls.call(self._begin)
            except asyncio.CancelledError:
                # The caller may never return, and a scan without a reader keeps its place at the host.
                self._calls.leave()
                raise
        return self._scan

    async def _read(self, scan: StateScan, num_batches: int | None) -> bool:
        """Read some batches, or all; return whether there were any.

        They are those of the call before if its caller was cancelled. So every call of a begun scan gives batches.
        """
        batches: list[pa.RecordBatch] = await self._calls.call(lambda: list(islice(scan, num_batches)))
        self._left.extend(batches)
        return bool(batches)

    @property
    def version(self) -> int:
        """The version of all rows, once the scan has begun."""
        return self._required().version

    @property
    def at(self) -> dt.datetime | None:
        """See ``StateScan.at``, once the scan has begun."""
        return self._required().at

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch, once the scan has begun."""
        return self._required().schema

    def _required(self) -> StateScan:
        if self._scan is None:
            raise RuntimeError("The scan has not begun; await it, or take its first batch.")
        return self._scan

    async def __anext__(self) -> pa.RecordBatch:
        async with self._calls.turn:
            scan = await self._started()
            if not self._left and not await self._read(scan, 1):
                raise StopAsyncIteration
            return self._left.popleft()

    async def to_arrow(self) -> pa.Table:
        """Return all rows that are left."""
        async with self._calls.turn:
            scan = await self._started()
            while await self._read(scan, None):
                pass
            rows = pa.Table.from_batches(self._left, scan.schema)
            self._left.clear()
            return rows

    async def to_pandas(self) -> Any:
        """Return all rows that are left as a pandas frame."""
        return formed(await self.to_arrow(), "pandas")

    async def to_polars(self) -> Any:
        """Return all rows that are left as a Polars frame. Raises ``RequestError`` if Polars is not installed."""
        return formed(await self.to_arrow(), "polars")

    async def to_pylist(self) -> list[dict[str, Any]]:
        """Return all rows that are left as dicts."""
        rows: list[dict[str, Any]] = formed(await self.to_arrow(), "pylist")
        return rows

    async def aclose(self) -> None:
        """End the scan, so that the hosts stop."""
        async with self._calls.turn:
            await self._calls.settled()
            self._left.clear()
            if self._scan is not None:
                await asyncio.to_thread(self._scan.close)

    async def __aenter__(self) -> AsyncStateScan:
        return await self._begun()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _end_scan(result: Any) -> None:
    if isinstance(result, StateScan):
        result.close()


class AsyncStateWatch(AsyncIterator[StateChange]):
    """A ``StateWatch`` for ``async for``."""

    def __init__(self, watch: StateWatch) -> None:
        self._watch = watch
        self._calls = BlockingCalls("statestore-watch")

    @property
    def position(self) -> int | None:
        """See ``StateWatch.position``."""
        return self._watch.position

    @property
    def run_id(self) -> str | None:
        """See ``StateWatch.run_id``."""
        return self._watch.run_id

    async def __anext__(self) -> StateChange:
        async with self._calls.turn:
            change: StateChange | None = await self._calls.call(lambda: next(self._watch, None))
        if change is None:
            raise StopAsyncIteration
        return change

    async def aclose(self) -> None:
        """End the watch."""
        self._watch.close()

    async def __aenter__(self) -> AsyncStateWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


# The rows of a SQL statement for ``async for``, which a caller may end at any time.


SQL_BATCH_ROWS = 8_192
INTERRUPT_SECONDS = 0.1
"""Seconds between two interruptions of a statement that must end: DuckDB forgets one that comes before its work."""


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
        async with self._calls.turn:
            await self._started()
        return self

    async def _started(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        if self._opened is None:
            if self._is_closed:
                raise RequestError("The statement has been ended.")
            self._opened = await self._calls.call(self._open)
        return self._opened

    def _open(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Bind and start the statement, in a thread. Raises ``RequestError`` for wrong SQL."""
        from spark_bridge.queryable.sql.sql import import_duckdb

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

    @property
    def times(self) -> dict[str, dt.datetime]:
        """The time of the rolling aggregates that were read, by query id, once the statement has begun."""
        self._required()
        assert self._relation is not None
        return self._relation.times

    async def __anext__(self) -> pa.RecordBatch:
        async with self._calls.turn:
            _, batches = await self._started()
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
        opened, self._opened = self._opened, None
        relation, self._relation = self._relation, None
        if opened is not None:
            close = getattr(opened[1], "close", lambda: None)
            with contextlib.suppress(RequestError):  # the statement ends, whatever its end is
                await asyncio.to_thread(close)
        elif relation is not None:
            # The caller left while the statement started. Its process would never be used again, and never end.
            from spark_bridge.queryable.sql.statement_process import ProcessStatement

            if isinstance(relation, ProcessStatement):
                await asyncio.to_thread(relation.close)
