"""``AsyncQueryableStateClient``: the client for programs on an event loop; concurrent lookups go out in
batches.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.queryable.client.arguments.conditions import WhereCondition
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.event_loop.async_results import AsyncStateScan, AsyncStateWatch
from spark_bridge.queryable.client.event_loop.async_sql import AsyncSqlRows
from spark_bridge.queryable.client.event_loop.lookup_batching import LookupBatcher, LookupGroup
from spark_bridge.transport.tls import TlsConf

T = TypeVar("T")

CLIENT_THREADS = 16


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
        where: Sequence[WhereCondition] | None = None,
        query: str | None = None,
        isolation: str = "completed",
        version: int | None = None,
        timeout: float | None = None,
    ) -> AsyncStateScan:
        """See ``QueryableStateClient.scan``. An awaited scan has begun, and has a schema and a version."""
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
        """See ``QueryableStateClient.key_rows``, and ``scan``."""
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
        where: Sequence[WhereCondition] | None = None,
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
        """See ``QueryableStateClient.watch``. Returns an asynchronous iterator of ``StateChange``s."""
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

    async def sql(
        self, query: str, *, query_params: Any = None, version: int | None = None, timeout: float | None = None
    ) -> pa.Table:
        """Return the rows of ``QueryableStateClient.sql`` as an Arrow table."""
        given = {"query_params": query_params, "version": version, "timeout": timeout}
        return await self._run(lambda: self._client.sql(query, **given).arrow())

    def sql_rows(
        self, query: str, *, query_params: Any = None, version: int | None = None, timeout: float | None = None
    ) -> AsyncSqlRows:
        """Return the rows of ``QueryableStateClient.sql`` as they come. An awaited statement has begun."""
        given = {"query_params": query_params, "version": version, "timeout": timeout}
        return AsyncSqlRows(lambda: self._client.sql(query, **given))

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
