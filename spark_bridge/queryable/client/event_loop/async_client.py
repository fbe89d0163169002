"""``AsyncQueryableStateClient``: the client for programs on an event loop; concurrent lookups go out in batches."""

from __future__ import annotations

import asyncio
import inspect
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.event_loop.async_results import AsyncStateScan, AsyncStateWatch
from spark_bridge.queryable.client.event_loop.async_sql import AsyncSqlRows
from spark_bridge.queryable.client.event_loop.lookup_batching import LookupBatcher, LookupGroup
from spark_bridge.transport.tls import TlsConf

if TYPE_CHECKING:
    from spark_bridge.queryable.sql.duckdb_connections import SqlLimits

P = ParamSpec("P")
T = TypeVar("T")

CLIENT_THREADS = 16


def _takes(
    call: Callable[Concatenate[QueryableStateClient, P], object],
) -> Callable[[Callable[..., T]], Callable[Concatenate[AsyncQueryableStateClient, P], T]]:
    """Give a method the arguments of a method of the other client, for type checkers, completion and ``help``.

    The arguments are declared there alone.
    """

    def given(method: Callable[..., T]) -> Callable[Concatenate[AsyncQueryableStateClient, P], T]:
        returned = inspect.signature(method).return_annotation
        method.__signature__ = inspect.signature(call).replace(return_annotation=returned)  # type: ignore[attr-defined]
        return method

    return given


class AsyncQueryableStateClient:
    """``QueryableStateClient`` with coroutines: the same verbs, arguments, answers and errors.

    Only ``sql`` differs: it returns a table, and has no ``connection=``.

        async with await AsyncQueryableStateClient.connect() as client:
            user = await client.get("user_totals", 42)
            users = await asyncio.gather(*(client.get("user_totals", k) for k in keys))   # asked for together
            async for batch in client.scan("user_totals"):
                ...
            async for change in client.watch("user_totals"):
                ...

    Lookups by ``get`` that are under way at the same time are gathered into batches, if they have operator, query,
    state and isolation in common: while one batch is out, further lookups gather for the next. Cancelling one lookup
    leaves the others as they are. For one event loop at a time; long calls run in threads of the client's own.
    """

    @property
    def lag_seconds(self) -> float:
        """See ``QueryableStateClient.lag_seconds``."""
        return self._client.lag_seconds

    def __init__(self, client: QueryableStateClient) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(CLIENT_THREADS, thread_name_prefix="statestore-client")
        self._lookups: dict[LookupGroup, LookupBatcher] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    async def connect(
        cls,
        namespace: str = NAMESPACE,
        coordinator_name: str = COORDINATOR_NAME,
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
        group = (operator, query, state, isolation)
        lookups = self._lookups.get(group)
        if lookups is None or asyncio.get_running_loop() is not self._loop:
            lookups = self._new_lookups(group)
        return await lookups.add(key, timeout)

    def _new_lookups(self, group: LookupGroup) -> LookupBatcher:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._lookups, self._loop = {}, loop
        return self._lookups.setdefault(group, LookupBatcher(self._client, self._pool, group, self._idle))

    def _idle(self, lookups: LookupBatcher) -> None:
        if self._lookups.get(lookups.group) is lookups:
            del self._lookups[lookups.group]

    @_takes(QueryableStateClient.get_many)
    async def get_many(self, *args: Any, **given: Any) -> Any:
        """See ``QueryableStateClient.get_many``."""
        return await self._run(self._client.get_many, *args, **given)

    @_takes(QueryableStateClient.scan)
    def scan(self, *args: Any, **given: Any) -> AsyncStateScan:
        """See ``QueryableStateClient.scan``. An awaited scan has begun, and has a schema and a version."""
        return AsyncStateScan(partial(self._client.scan, *args, **given))

    @_takes(QueryableStateClient.key_rows)
    def key_rows(self, *args: Any, **given: Any) -> AsyncStateScan:
        """See ``QueryableStateClient.key_rows``, and ``scan``."""
        return AsyncStateScan(partial(self._client.key_rows, *args, **given))

    @_takes(QueryableStateClient.count)
    async def count(self, *args: Any, **given: Any) -> int:
        """See ``QueryableStateClient.count``."""
        return await self._run(self._client.count, *args, **given)

    @_takes(QueryableStateClient.watch)
    def watch(self, *args: Any, **given: Any) -> AsyncStateWatch:
        """See ``QueryableStateClient.watch``. Returns an asynchronous iterator of ``StateChange``s."""
        return AsyncStateWatch(self._client.watch(*args, **given))

    @_takes(QueryableStateClient.operators)
    async def operators(self, *args: Any, **given: Any) -> list[dict[str, Any]]:
        """See ``QueryableStateClient.operators``."""
        return await self._run(self._client.operators, *args, **given)

    @_takes(QueryableStateClient.describe)
    async def describe(self, *args: Any, **given: Any) -> dict[str, Any]:
        """See ``QueryableStateClient.describe``."""
        return await self._run(self._client.describe, *args, **given)

    async def sql(
        self,
        query: str,
        *,
        query_params: Any = None,
        version: int | None = None,
        timeout: float | None = None,
        limits: SqlLimits | None = None,
    ) -> pa.Table:
        """Return the rows of ``QueryableStateClient.sql`` as an Arrow table."""
        given = {"query_params": query_params, "version": version, "timeout": timeout, "limits": limits}
        return await self._run(lambda: self._client.sql(query, **given).arrow())

    def sql_rows(
        self,
        query: str,
        *,
        query_params: Any = None,
        version: int | None = None,
        timeout: float | None = None,
        limits: SqlLimits | None = None,
        in_own_process: bool = False,
    ) -> AsyncSqlRows:
        """Return the rows of ``QueryableStateClient.sql`` as they come. An awaited statement has begun.

        ``in_own_process`` runs the statement in a child process whose memory the operating system limits, so that
        statements of other people cannot take the memory of this process. Their parameters are JSON values.
        """
        given = {"query_params": query_params, "version": version, "timeout": timeout, "limits": limits}
        if not in_own_process:
            return AsyncSqlRows(lambda: self._client.sql(query, **given))
        from spark_bridge.queryable.sql.statement_process import ProcessStatement

        return AsyncSqlRows(lambda: ProcessStatement(self._client, query, **given))

    async def _run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(call, *args, **kwargs))

    async def close(self) -> None:
        """Close all connections; calls under way fail."""
        self._client.close()
        self._pool.shutdown(wait=False)

    async def __aenter__(self) -> AsyncQueryableStateClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
