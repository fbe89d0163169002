"""Batching of concurrent lookups on an event loop: while one batch is out, further lookups gather for the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spark_bridge.exceptions import QueryableStateError, QueryTimeoutError
from spark_bridge.queryable.client.client import QueryableStateClient

KEYS_PER_BATCH = 1000
BATCH_PATIENCE_SECONDS = 0.02
"""A batch that takes longer than this is not waited for by the next one; it may be one host that is slow, or away."""
BATCHES_AT_ONCE = 8
GRACE_SECONDS = 0.05
"""A caller is told so much after its timeout, without the others of its batch, so that the batch can first say what
failed last.
"""
MUCH_LATER_SECONDS = 1.0
LookupGroup = tuple[str, str | None, str | None, str]
"""Operator, query, state and isolation: lookups that have these in common go in one batch."""
PendingLookup = tuple[Any, asyncio.Future[Any], float]
"""A key, the future of its answer, and the end of its timeout, a time of the loop."""


class LookupBatcher:
    """The lookups of one group that wait, and those that are under way. All but ``_look_up`` runs on the event loop.

    While a batch is under way further lookups gather, and go together when the batch is back. So batches are as large
    as the load makes them, and a single lookup does not wait. A batch is repeated until the longest timeout in it;
    lookups with shorter timeouts end earlier. ``idle`` is called when no lookup is left.
    """

    def __init__(
        self,
        client: QueryableStateClient,
        pool: ThreadPoolExecutor,
        group: LookupGroup,
        idle: Callable[[LookupBatcher], None],
    ) -> None:
        self._client = client
        self._pool = pool
        self.group = group
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._waiting: list[PendingLookup] = []
        self._under_way = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key: Any, timeout: float | None) -> asyncio.Future[Any]:
        """Return the future of a key's answer. ``timeout`` None means the client's."""
        future = self._loop.create_future()
        until = self._loop.time() + (self._client.timeout if timeout is None else timeout)
        self._waiting.append((key, future, until))
        if timeout is not None:
            self._end_at(key, future, until)
        if not self._under_way:
            # Lookups that are started in this round of the loop go together.
            self._under_way = 1
            self._loop.call_soon(self._send)
        elif self._timer is None:
            self._timer = self._loop.call_later(BATCH_PATIENCE_SECONDS, self._send_more)
        return future

    def _end_at(self, key: Any, future: asyncio.Future[Any], until: float) -> None:
        """Let this lookup wait no longer than ``until``, whatever the others of its batch do."""

        def end() -> None:
            if not future.done():
                of = f"get({self.group[0]!r}, {key!r})"
                future.set_exception(QueryTimeoutError(f"{of} was not answered within its timeout."))

        timer = self._loop.call_at(until + GRACE_SECONDS, end)
        future.add_done_callback(lambda _: timer.cancel())

    def _send_more(self) -> None:
        """Send a further batch, because the batch before takes long."""
        self._timer = None
        if self._waiting and self._under_way < BATCHES_AT_ONCE:
            self._under_way += 1
            self._send()
        if self._waiting:
            self._timer = self._loop.call_later(BATCH_PATIENCE_SECONDS, self._send_more)

    def _send(self) -> None:
        # Without lookups that no caller waits for any more.
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

    def _look_up(self, batch: list[PendingLookup], until: float) -> None:
        operator, query, state, isolation = self.group
        try:
            keys = [key for key, _, _ in batch]
            timeout = max(0.0, until - self._loop.time())
            answers = self._client.get_each(operator, keys, query, state, isolation=isolation, timeout=timeout)
        except Exception as error:  # noqa: BLE001 - the callers are told
            answers = [error] * len(batch)
        with contextlib.suppress(RuntimeError):  # the loop was closed, and no caller waits any more
            self._loop.call_soon_threadsafe(self._answer, batch, answers)

    def _answer(self, batch: list[PendingLookup], answers: list[Any]) -> None:
        for (_, future, _), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        # After the callers that have just been answered: their next lookups go with the next batch.
        self._loop.call_soon(self._next)
