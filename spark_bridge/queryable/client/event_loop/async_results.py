"""Scans and watches for ``async for``: their blocking calls run in threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import pyarrow as pa

from spark_bridge.queryable.client.answers.results import formed
from spark_bridge.queryable.client.calls.state_scan import StateScan
from spark_bridge.queryable.client.calls.watch import StateChange, StateWatch


class BlockingCalls:
    """Runs blocking calls one after the other, each in a daemon thread, which does not delay the end of the program."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending: asyncio.Future[Any] | None = None

    async def call(self, what: Callable[[], Any]) -> Any:
        """Wait for a call, and return what it returns.

        If the caller is cancelled, the next caller gets the result: nothing is lost.
        """
        if self._pending is None:
            self._pending = self._begun(what)
        pending = self._pending
        try:
            return await asyncio.shield(pending)
        finally:
            if pending.done():
                self._pending = None

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
            except BaseException as error:  # noqa: BLE001 - the caller is told
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop was closed, and no caller waits any more
                loop.call_soon_threadsafe(answer, result, failure)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return future

    async def settled(self, timeout: float | None = None) -> bool:
        """Wait for the call that a cancelled caller has left; return False if it is not done after ``timeout``."""
        if self._pending is not None:
            done, _ = await asyncio.wait([self._pending], timeout=timeout)
            if not done:
                return False
            if not self._pending.cancelled():
                self._pending.exception()  # nobody else asks for it any more
            self._pending = None
        return True


class AsyncStateScan(AsyncIterator[pa.RecordBatch]):
    """A ``StateScan`` for ``async for``. The scan begins with the first batch, or when it is awaited."""

    def __init__(self, begin: Callable[[], StateScan]) -> None:
        self._begin = begin
        self._scan: StateScan | None = None
        self._calls = BlockingCalls("statestore-scan")

    def __await__(self) -> Generator[Any, None, AsyncStateScan]:
        return self._begun().__await__()

    async def _begun(self) -> AsyncStateScan:
        if self._scan is None:
            self._scan = await self._calls.call(self._begin)
        return self

    @property
    def version(self) -> int:
        """The version of all rows, once the scan has begun."""
        return self._required().version

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch, once the scan has begun."""
        return self._required().schema

    def _required(self) -> StateScan:
        if self._scan is None:
            raise RuntimeError("The scan has not begun; await it, or take its first batch.")
        return self._scan

    async def __anext__(self) -> pa.RecordBatch:
        await self._begun()
        scan = self._required()
        batch = await self._calls.call(lambda: next(scan, None))
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def to_arrow(self) -> pa.Table:
        """Return all rows that are left."""
        await self._begun()
        return await self._calls.call(self._required().to_arrow)

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
        await self._calls.settled()
        if self._scan is not None:
            await asyncio.to_thread(self._scan.close)

    async def __aenter__(self) -> AsyncStateScan:
        return await self._begun()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncStateWatch(AsyncIterator[StateChange]):
    """A ``StateWatch`` for ``async for``."""

    def __init__(self, watch: StateWatch) -> None:
        self._watch = watch
        self._calls = BlockingCalls("statestore-watch")

    @property
    def position(self) -> int | None:
        """See ``StateWatch.position``."""
        return self._watch.position

    async def __anext__(self) -> StateChange:
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
