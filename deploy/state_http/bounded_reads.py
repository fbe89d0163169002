"""A bounded number of reads at once, each of which ends even if its caller has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from spark_bridge.exceptions import TooManyRequestsError
from spark_bridge.queryable.client.event_loop.async_results import AsyncStateScan
from spark_bridge.queryable.client.event_loop.async_sql import AsyncSqlRows


class BoundedReads:
    """The scans or the statements (``what``) of one replica; at most ``most`` are under way at once."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._under_way = 0
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Count a read while it is under way. Raises ``TooManyRequestsError``."""
        if self._under_way >= self._most:
            raise TooManyRequestsError(
                f"{self._under_way} {self._what} are under way, which is the limit; try again later."
            )
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def close(self, rows: AsyncStateScan | AsyncSqlRows) -> None:
        """End a read, even for a caller that has left: that caller's task is cancelled and cannot wait for the end."""
        closing = asyncio.ensure_future(rows.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)
