"""``AsyncQueryableStateClient``: the client for programs on an event loop, which gathers concurrent lookups into batches."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from spark_bridge.exceptions import QueryableStateError, QueryTimeoutError
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.results import formed
from spark_bridge.queryable.client.scans import Condition, StateScan
from spark_bridge.queryable.client.watch import StateChange, StateWatch
from spark_bridge.transport.tls import TlsConf

T = TypeVar("T")

KEYS_PER_BATCH = 1000
THREADS = 16
PATIENCE_SECONDS = 0.02
"""A batch that takes longer than this is not waited for by the next one; it may be one host that is slow, or away."""
BATCHES_AT_ONCE = 8
GRACE_SECONDS = 0.05
"""So much later than its timeout a caller is told without the others, so that the batch can say before what its last failure was."""
MUCH_LATER_SECONDS = 1.0
Asked = tuple[str, str | None, str | None, str]
"""Operator, query, state and isolation: lookups that have these in common are asked for together."""
Entry = tuple[Any, asyncio.Future[Any], float]
"""A key, what it has, and until when that is waited for, a time of the loop."""


class _Lookups:
    """The lookups of one kind that are waiting, and those that are under way. All but ``_look_up`` runs on the event loop.

    While a batch is under way others gather, and go together when it is back: so batches are as large as the load
    makes them, and who is alone does not wait. A batch is asked for as long as the most patient of it waits; the others wait
    for as long as they want. ``idle`` is called when none is left.
    """

    def __init__(
        self, client: QueryableStateClient, pool: ThreadPoolExecutor, asked: Asked, idle: Callable[[_Lookups], None]
    ) -> None:
        self._client = client
        self._pool = pool
        self.asked = asked
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Entry] = []
        self._under_way = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key: Any, timeout: float | None) -> asyncio.Future[Any]:
        """What the key has, when it is known. ``timeout`` None is the client's."""
        future = self._loop.create_future()
        until = self._loop.time() + (self._client.timeout if timeout is None else timeout)
        self._waiting.append((key, future, until))
        if timeout is not None:
            self._end_at(key, future, until)
        if not self._under_way:
            # Those that are started in this round of the loop go together.
            self._under_way = 1
            self._loop.call_soon(self._send)
        elif self._timer is None:
            self._timer = self._loop.call_later(PATIENCE_SECONDS, self._send_more)
        return future

    def _end_at(self, key: Any, future: asyncio.Future[Any], until: float) -> None:
        """This one waits no longer than that, whatever the others do."""

        def end() -> None:
            if not future.done():
                of = f"get({self.asked[0]!r}, {key!r})"
                future.set_exception(QueryTimeoutError(f"{of} was not answered within its timeout."))

        timer = self._loop.call_at(until + GRACE_SECONDS, end)
        future.add_done_callback(lambda _: timer.cancel())

    def _send_more(self) -> None:
        """The batch before takes long."""
        self._timer = None
        if self._waiting and self._under_way < BATCHES_AT_ONCE:
            self._under_way += 1
            self._send()
        if self._waiting:
            self._timer = self._loop.call_later(PATIENCE_SECONDS, self._send_more)

    def _send(self) -> None:
        # Those who do not wait any more need not be asked for.
        batch = [entry for entry in self._waiting[:KEYS_PER_BATCH] if not entry[1].done()]
        del self._waiting[:KEYS_PER_BATCH]
        if not batch:
            self._next()
            return
        last = max(until for _, _, until in batch)
        for key, future, until in batch:
            if until + MUCH_LATER_SECONDS < last:
                self._end_at(key, future, until)
        try:
            self._pool.submit(self._look_up, batch, last)
        except RuntimeError:
            self._answer(batch, [QueryableStateError("The client has been closed; connect again.")] * len(batch))

    def _next(self) -> None:
        self._under_way -= 1
        if self._waiting:
            self._under_way += 1
            self._send()
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._under_way:
            self._idle(self)

    def _look_up(self, batch: list[Entry], until: float) -> None:
        operator, query, state, isolation = self.asked
        try:
            keys = [key for key, _, _ in batch]
            timeout = max(0.0, until - self._loop.time())
            answers = self._client.get_each(operator, keys, query, state, isolation=isolation, timeout=timeout)
        except Exception as error:  # noqa: BLE001 - those who wait are told
            answers = [error] * len(batch)
        with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits any more
            self._loop.call_soon_threadsafe(self._answer, batch, answers)

    def _answer(self, batch: list[Entry], answers: list[Any]) -> None:
        for (_, future, _), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        # Behind those who have just been answered: what they ask next goes with the next batch.
        self._loop.call_soon(self._next)


class AsyncQueryableStateClient:
    """``QueryableStateClient`` with coroutines: the same verbs, arguments, answers and errors; but ``sql`` returns a table, and has no
    ``connection=``.

        async with await AsyncQueryableStateClient.connect() as client:
            user = await client.get("user_totals", 42)
            users = await asyncio.gather(*(client.get("user_totals", k) for k in keys))   # asked for together
            async for batch in client.scan("user_totals"):
                ...
            async for change in client.watch("user_totals"):
                ...

    Lookups by ``get`` that are under way at the same time are gathered into batches (those of one operator, query, state and isolation): while
    one batch is out, others gather for the next. Cancelling one of them leaves the others as they are. For one event loop
    at a time; what takes long runs in threads of its own.
    """

    def __init__(self, client: QueryableStateClient) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="statestore-client")
        self._lookups: dict[Asked, _Lookups] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    async def connect(
        cls,
        namespace: str = "statestore",
        coordinator_name: str = "StateStoreCoordinator",
        address: str | Sequence[str] | None = None,
        token: str | None = None,
        tls: TlsConf | ssl.SSLContext | None = None,
        timeout: float = 30.0,
        direct: bool | None = None,
    ) -> AsyncQueryableStateClient:
        """See ``QueryableStateClient.connect``."""
        connected = await asyncio.to_thread(
            QueryableStateClient.connect, namespace, coordinator_name, address, token, tls, timeout, direct
        )
        return cls(connected)

    async def get(
        self,
        operator: str,
        key: Any,
        query: str | None = None,
        state: str | None = None,
        *,
        window: Any = None,
        isolation: str = "completed",
        version: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """See ``QueryableStateClient.get``."""
        if window is not None or version is not None:
            return await self._run(
                self._client.get,
                operator,
                key,
                query,
                state,
                window=window,
                isolation=isolation,
                version=version,
                timeout=timeout,
            )
        asked = (operator, query, state, isolation)
        lookups = self._lookups.get(asked)
        if lookups is None or asyncio.get_running_loop() is not self._loop:
            lookups = self._new_lookups(asked)
        return await lookups.add(key, timeout)

    def _new_lookups(self, asked: Asked) -> _Lookups:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._lookups, self._loop = {}, loop
        return self._lookups.setdefault(asked, _Lookups(self._client, self._pool, asked, self._idle))

    def _idle(self, lookups: _Lookups) -> None:
        if self._lookups.get(lookups.asked) is lookups:
            del self._lookups[lookups.asked]

    async def get_many(
        self,
        operator: str,
        keys: Any,
        query: str | None = None,
        state: str | None = None,
        *,
        window: Any = None,
        isolation: str = "completed",
        version: int | None = None,
        timeout: float | None = None,
        as_: str = "arrow",
    ) -> Any:
        """See ``QueryableStateClient.get_many``."""
        return await self._run(
            self._client.get_many,
            operator,
            keys,
            query,
            state,
            window=window,
            isolation=isolation,
            version=version,
            timeout=timeout,
            as_=as_,
        )

    def scan(
        self,
        operator: str,
        state: str | None = None,
        prefix: Any = None,
        start: Any = None,
        end: Any = None,
        limit: int | None = None,
        columns: Sequence[str] | None = None,
        *,
        where: Sequence[Condition] | None = None,
        query: str | None = None,
        isolation: str = "completed",
        version: int | None = None,
        timeout: float | None = None,
    ) -> AsyncStateScan:
        """See ``QueryableStateClient.scan``. What it returns can be awaited too: then it has begun, and has a schema and a version."""
        begin = partial(
            self._client.scan,
            operator,
            state,
            prefix,
            start,
            end,
            limit,
            columns,
            where=where,
            query=query,
            isolation=isolation,
            version=version,
            timeout=timeout,
        )
        return AsyncStateScan(begin)

    def key_rows(
        self,
        operator: str,
        keys: Any,
        state: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        query: str | None = None,
        isolation: str = "completed",
        version: int | None = None,
        timeout: float | None = None,
    ) -> AsyncStateScan:
        """See ``QueryableStateClient.key_rows``; as ``scan``."""
        begin = partial(
            self._client.key_rows,
            operator,
            keys,
            state,
            columns,
            query=query,
            isolation=isolation,
            version=version,
            timeout=timeout,
        )
        return AsyncStateScan(begin)

    async def count(
        self,
        operator: str,
        state: str | None = None,
        *,
        prefix: Any = None,
        start: Any = None,
        end: Any = None,
        where: Sequence[Condition] | None = None,
        query: str | None = None,
        isolation: str = "completed",
        version: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """See ``QueryableStateClient.count``."""
        return await self._run(
            self._client.count,
            operator,
            state,
            prefix=prefix,
            start=start,
            end=end,
            where=where,
            query=query,
            isolation=isolation,
            version=version,
            timeout=timeout,
        )

    def watch(
        self,
        operator: str,
        keys: Any = None,
        *,
        state: str | None = None,
        query: str | None = None,
        from_version: int | None = None,
        timeout: float | None = None,
    ) -> AsyncStateWatch:
        """See ``QueryableStateClient.watch``; an asynchronous iterator of ``StateChange``s."""
        return AsyncStateWatch(
            self._client.watch(operator, keys, state=state, query=query, from_version=from_version, timeout=timeout)
        )

    async def operators(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """See ``QueryableStateClient.operators``."""
        return await self._run(self._client.operators, timeout=timeout)

    async def describe(
        self, operator: str, query: str | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """See ``QueryableStateClient.describe``."""
        return await self._run(self._client.describe, operator, query, timeout=timeout)

    async def sql(self, query: str, *, query_params: Any = None, timeout: float | None = None) -> pa.Table:
        """The rows of ``QueryableStateClient.sql`` as an Arrow table."""
        return await self._run(lambda: self._client.sql(query, query_params=query_params, timeout=timeout).arrow())

    async def _run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(call, *args, **kwargs))

    async def close(self) -> None:
        """Close all connections; what is under way fails."""
        self._client.close()
        self._pool.shutdown(wait=False)

    async def __aenter__(self) -> AsyncQueryableStateClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Taker:
    """Calls what blocks, one call after the other, each in a thread that does not hold up the end of the program."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending: asyncio.Future[Any] | None = None

    async def call(self, what: Callable[[], Any]) -> Any:
        """What it returns. If the caller is cancelled, the next one is given it: nothing is lost."""
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
            except BaseException as error:  # noqa: BLE001 - who waits is told
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits any more
                loop.call_soon_threadsafe(answer, result, failure)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return future

    async def settled(self) -> None:
        """Wait for what a caller who was cancelled has left."""
        if self._pending is not None:
            await asyncio.wait([self._pending])
            self._pending = None


class AsyncStateScan(AsyncIterator[pa.RecordBatch]):
    """A ``StateScan`` for ``async for``; it begins with the first batch, or when it is awaited."""

    def __init__(self, begin: Callable[[], StateScan]) -> None:
        self._begin = begin
        self._scan: StateScan | None = None
        self._taker = _Taker("statestore-scan")

    def __await__(self) -> Generator[Any, None, AsyncStateScan]:
        return self._begun().__await__()

    async def _begun(self) -> AsyncStateScan:
        if self._scan is None:
            self._scan = await self._taker.call(self._begin)
        return self

    @property
    def version(self) -> int:
        """The version that all rows are of, once it has begun."""
        return self._required().version

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch, once it has begun."""
        return self._required().schema

    def _required(self) -> StateScan:
        if self._scan is None:
            raise RuntimeError("The scan has not begun; await it, or take its first batch.")
        return self._scan

    async def __anext__(self) -> pa.RecordBatch:
        await self._begun()
        scan = self._required()
        batch = await self._taker.call(lambda: next(scan, None))
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def to_arrow(self) -> pa.Table:
        """All rows that are left."""
        await self._begun()
        return await self._taker.call(self._required().to_arrow)

    async def to_pandas(self) -> Any:
        """All rows that are left as a pandas frame."""
        return formed(await self.to_arrow(), "pandas")

    async def to_polars(self) -> Any:
        """All rows that are left as a Polars frame. Raises ``RequestError`` if Polars is not installed."""
        return formed(await self.to_arrow(), "polars")

    async def to_pylist(self) -> list[dict[str, Any]]:
        """All rows that are left as dicts."""
        rows: list[dict[str, Any]] = formed(await self.to_arrow(), "pylist")
        return rows

    async def aclose(self) -> None:
        """End it; the hosts stop."""
        await self._taker.settled()
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
        self._taker = _Taker("statestore-watch")

    @property
    def position(self) -> int | None:
        """See ``StateWatch.position``."""
        return self._watch.position

    async def __anext__(self) -> StateChange:
        change: StateChange | None = await self._taker.call(lambda: next(self._watch, None))
        if change is None:
            raise StopAsyncIteration
        return change

    async def aclose(self) -> None:
        """End it."""
        self._watch.close()

    async def __aenter__(self) -> AsyncStateWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
