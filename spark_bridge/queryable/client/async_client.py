"""``AsyncQueryableStateClient``: the client for programs on an event loop; concurrent lookups go out in batches."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import ssl
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from coordinator_actor.access_tokens import Scope
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge.exceptions import QueryableStateError, QueryTimeoutError
from spark_bridge.queryable.client.async_results import AsyncSqlRows, AsyncStateScan, AsyncStateWatch
from spark_bridge.queryable.client.client import QueryableStateClient, scoped_client
from spark_bridge.queryable.client.features import BegunFeatures, FeatureRows, begin_each, features_each, owner_of
from spark_bridge.queryable.routing.feature_reads import FEW_KEYS
from spark_bridge.queryable.routing.router import SMALL_LOOKUP_SECONDS
from spark_bridge.transport.tls import TlsConf

if TYPE_CHECKING:
    from spark_bridge.queryable.sql.sql import SqlLimits


# Batching of concurrent lookups on an event loop: while one batch is out, further lookups gather for the next one.


KEYS_PER_BATCH = 1000
GATHERED_KEYS = FEW_KEYS
"""Requests for the features of more keys go alone, and batches of more keys in a thread."""
FEATURES_AT_ONCE = 2
"""Requests for features gather while so many are under way: a host answers for one key faster than for two."""
BATCH_PATIENCE_SECONDS = 0.02
"""A batch that takes longer than this is not waited for by the next one; it may be one host that is slow, or away."""
BATCHES_AT_ONCE = 8
GRACE_SECONDS = 0.05
"""A caller times out so long after its own timeout, alone: the batch can report its last failure in that time."""
MUCH_LATER_SECONDS = 1.0
PendingLookup = tuple[Any, asyncio.Future[Any], float]
"""A key, or the keys of a request for features, the future of the answer, and the loop's time of the timeout."""


@dataclass(frozen=True)
class LookupGroup:
    """Lookups of single keys that go in one batch: they have all this in common."""

    operator: str
    query: str | None
    state: str | None
    isolation: str
    staleness: str | int | None
    at_once = 1

    def answers(self, client: QueryableStateClient, keys: list[Any], timeout: float) -> list[Any]:
        """Return the answer of each lookup, or its error. Raises the error of all."""
        version: dict[str, Any] = {"isolation": self.isolation, "staleness": self.staleness}
        return client.get_each(self.operator, keys, self.query, self.state, **version, timeout=timeout)

    def in_words(self, key: Any) -> str:
        return f"get({self.operator!r}, {key!r})"

    def begin(self, client: QueryableStateClient, keys: list[Any], timeout: float) -> None:
        """Return None: lookups have further ways to an answer, such as copies."""


@dataclass(frozen=True)
class FeatureGroup:
    """Requests for the features of few keys that go in one batch.

    Those of one key have the same owner of it in the first operator, if owners are asked, so that fewer hosts ask
    others.
    """

    view: str
    defaults: bool
    isolation: str
    owner: str
    at_once = FEATURES_AT_ONCE

    def answers(self, client: QueryableStateClient, keys: list[Any], timeout: float) -> list[Any]:
        """Return the answer of each request, or its error. Raises the error of all."""
        return features_each(client, self.view, keys, defaults=self.defaults, isolation=self.isolation, timeout=timeout)

    def begin(self, client: QueryableStateClient, keys: list[Any], timeout: float) -> BegunFeatures | None:
        """Send the requests if that needs no wait. Raises the error of all."""
        if len(keys) > 1 and sum(map(len, keys)) > GATHERED_KEYS:
            return None
        return begin_each(client, self.view, keys, defaults=self.defaults, isolation=self.isolation, timeout=timeout)

    def in_words(self, keys: Any) -> str:
        return f"features({self.view!r}) of {len(keys)} keys"


@dataclass(eq=False, repr=False)
class LookupBatcher:
    """The lookups of one group that wait, and those that are under way. All but ``_look_up`` runs on the event loop.

    Small requests for features are sent and read on the loop itself: a thread would take longer than the request. All
    others, and those that fail or need a new connection, run in a thread, which repeats them where that may help.

    While ``at_once`` batches of the group are under way further lookups gather, and go together when one is back. So
    batches are as large as the load makes them, and a single lookup does not wait. A batch is repeated until the
    longest timeout in it; lookups with shorter timeouts end earlier. ``idle`` is called when no lookup is left.
    """

    _client: QueryableStateClient
    _pool: ThreadPoolExecutor
    group: LookupGroup | FeatureGroup
    _idle: Callable[[LookupBatcher], None]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[PendingLookup] = []
        self._under_way = 0
        self._timer: asyncio.TimerHandle | None = None
        self._pid = os.getpid()
        self._is_ended = False
        self._begun: dict[int, tuple[BegunFeatures, list[PendingLookup], float, asyncio.TimerHandle]] = {}
        """The batches that this loop has sent, by the descriptors of their connections."""

    def add(self, key: Any, timeout: float | None) -> asyncio.Future[Any]:
        """Return the future of a key's answer. ``timeout`` None means the client's."""
        future = self._loop.create_future()
        until = self._loop.time() + (self._client.timeout if timeout is None else timeout)
        self._waiting.append((key, future, until))
        if timeout is not None:
            self._end_at(key, future, until)
        if self._under_way < self.group.at_once and len(self._waiting) == 1:
            # Lookups that are started in this round of the loop go together.
            self._under_way += 1
            self._loop.call_soon(self._send)
        elif self._timer is None:
            self._timer = self._loop.call_later(BATCH_PATIENCE_SECONDS, self._send_more)
        return future

    def _end_at(self, key: Any, future: asyncio.Future[Any], until: float) -> None:
        """Let this lookup wait no longer than ``until``, whatever the others of its batch do."""

        def end() -> None:
            if not future.done():
                what = self.group.in_words(key)
                future.set_exception(QueryTimeoutError(f"{what} was not answered within its timeout."))

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
        if self._is_ended:
            self._answer_ended(batch)
        elif not self._begin(batch, last):
            self._submit(batch, last)

    def _begin(self, batch: list[PendingLookup], until: float) -> bool:
        """Send a batch from the event loop if that needs no wait, and answer it when the host's bytes have come."""
        keys, timeout = [key for key, _, _ in batch], max(0.0, until - self._loop.time())
        begun = None
        try:
            begun = self.group.begin(self._client, keys, timeout)
            if begun is None:
                return False
            descriptor = begun.exchange.fileno()
            # Methods, not closures: a reference cycle in each request would keep Python's garbage collector busy.
            self._loop.add_reader(descriptor, self._read, descriptor)
        except Exception:  # noqa: BLE001 - the thread's attempt raises it, or helps: some loops have no readers
            if begun is not None:
                begun.exchange.abandon()
            return False
        timer = self._loop.call_later(min(timeout, SMALL_LOOKUP_SECONDS), self._give_up, descriptor)
        self._begun[descriptor] = begun, batch, until, timer
        return True

    def _read(self, descriptor: int) -> None:
        # A connection that fails is closed at once, and its descriptor may then belong to another one.
        self._loop.remove_reader(descriptor)
        begun, batch, until, timer = self._begun[descriptor]
        if not begun.exchange.has_answer():
            self._loop.add_reader(descriptor, self._read, descriptor)
            return
        timer.cancel()
        del self._begun[descriptor]
        try:
            answers = begun.answers()
        except Exception:  # noqa: BLE001 - the thread's attempt raises it, or helps
            self._submit(batch, until)
        else:
            self._answer(batch, answers)

    def _give_up(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        begun, batch, until, _ = self._begun.pop(descriptor)
        begun.exchange.close()
        self._submit(batch, until)

    def end(self) -> None:
        """End all lookups of this loop, because the client is closed, or is used on another loop now."""
        under_way, self._begun = self._begun, {}
        if self._pid != os.getpid():
            return  # the sockets and the loop belong to the process that has forked this one
        self._is_ended = True
        for descriptor, (begun, batch, _, timer) in under_way.items():
            if not self._loop.is_closed():
                self._loop.remove_reader(descriptor)
                timer.cancel()
                self._answer_ended(batch)
            begun.exchange.close()
        if not self._loop.is_closed():
            waiting, self._waiting = self._waiting, []
            self._answer_ended(waiting)

    def _submit(self, batch: list[PendingLookup], until: float) -> None:
        if all(future.done() for _, future, _ in batch):
            self._next()  # no caller waits any more
            return
        try:
            self._pool.submit(self._look_up, batch, until)
        except RuntimeError:
            self._answer_ended(batch)

    def _answer_ended(self, batch: list[PendingLookup]) -> None:
        error = "The client has been closed, or is used on another event loop: connect again."
        self._answer(batch, [QueryableStateError(error)] * len(batch))

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
        try:
            timeout = max(0.0, until - self._loop.time())
            answers = self.group.answers(self._client, [key for key, _, _ in batch], timeout)
        except Exception as error:  # noqa: BLE001 - the callers raise it
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


P = ParamSpec("P")
T = TypeVar("T")

CLIENT_THREADS = 16


def _coroutine_of(
    call: Callable[Concatenate[QueryableStateClient, P], T],
) -> Callable[Concatenate[AsyncQueryableStateClient, P], Coroutine[Any, Any, T]]:
    """Return the coroutine that runs a method of the other client, which declares the arguments, in a thread."""

    @wraps(call)
    async def method(self: AsyncQueryableStateClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(getattr(self._client, call.__name__), *args, **kwargs)

    method.__qualname__ = f"AsyncQueryableStateClient.{call.__name__}"  # in warnings about a forgotten await
    return method


def _wrapped(
    call: Callable[Concatenate[QueryableStateClient, P], object],
    wrap: Callable[[Callable[[], Any]], T],
    result: type[T],
) -> Callable[Concatenate[AsyncQueryableStateClient, P], T]:
    """Return the method that wraps the call of a method of the other client into a ``result``."""

    @wraps(call)
    def method(self: AsyncQueryableStateClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return wrap(partial(getattr(self._client, call.__name__), *args, **kwargs))

    method.__qualname__ = f"AsyncQueryableStateClient.{call.__name__}"
    method.__annotations__ = {**call.__annotations__, "return": result.__name__}
    method.__signature__ = signature(call).replace(return_annotation=result)  # type: ignore[attr-defined]
    return method


class AsyncQueryableStateClient:
    """``QueryableStateClient`` with coroutines: the same verbs, arguments, answers and errors.

    ``get_many``, ``features_of_views``, ``entity_schema``, ``feature_views``, ``count``, ``operators`` and ``describe``
    are coroutines of those methods. ``scan``, ``find`` and ``key_rows`` return an ``AsyncStateScan`` at once; an
    awaited one has begun, and has a schema and a version. ``watch`` returns an ``AsyncStateWatch``. Only ``sql``
    differs: it returns a table, and has no ``connection=``.

        async with await AsyncQueryableStateClient.connect() as client:
            user = await client.get("user_totals", 42)
            users = await asyncio.gather(*(client.get("user_totals", k) for k in keys))   # asked for together
            async for batch in client.scan("user_totals"):
                ...
            async for change in client.watch("user_totals"):
                ...

    Lookups by ``get`` that are under way at the same time are gathered into batches, if they have operator, query,
    state and isolation in common: while one batch is out, further lookups gather for the next. So are requests for the
    features of at most ``GATHERED_KEYS`` keys of one view. Cancelling one lookup leaves the others as they are. For one
    event loop at a time; long calls run in threads of the client's own.
    """

    @property
    def lag_seconds(self) -> float:
        """See ``QueryableStateClient.lag_seconds``."""
        return self._client.lag_seconds

    def now(self) -> dt.datetime:
        """See ``QueryableStateClient.now``."""
        return self._client.now()

    @property
    def answered_at(self) -> dt.datetime | None:
        """See ``QueryableStateClient.answered_at``."""
        return self._client.answered_at

    @property
    def answered_version(self) -> int:
        """See ``QueryableStateClient.answered_version``."""
        return self._client.answered_version

    def __init__(self, client: QueryableStateClient) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(CLIENT_THREADS, thread_name_prefix="statestore-client")
        self._lookups: dict[LookupGroup | FeatureGroup, LookupBatcher] = {}
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
        at: Any = None,
        staleness: str | int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """See ``QueryableStateClient.get``."""
        if window is not None or version is not None or at is not None:
            options = {"isolation": isolation, "version": version, "at": at, "staleness": staleness, "timeout": timeout}
            return await self._run(self._client.get, operator, key, query, state, window=window, **options)
        return await self._batched(LookupGroup(operator, query, state, isolation, staleness), key, timeout)

    def _batched(self, group: LookupGroup | FeatureGroup, key: Any, timeout: float | None) -> asyncio.Future[Any]:
        """Return the future of an answer that comes with those of its group."""
        lookups = self._lookups.get(group)
        if lookups is None or asyncio.get_running_loop() is not self._loop:
            lookups = self._new_lookups(group)
        return lookups.add(key, timeout)

    def _new_lookups(self, group: LookupGroup | FeatureGroup) -> LookupBatcher:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._end_lookups()
            self._loop = loop
        return self._lookups.setdefault(group, LookupBatcher(self._client, self._pool, group, self._idle))

    def _end_lookups(self) -> None:
        lookups, self._lookups = self._lookups, {}
        for of_group in lookups.values():
            of_group.end()

    def _idle(self, lookups: LookupBatcher) -> None:
        if self._lookups.get(lookups.group) is lookups:
            del self._lookups[lookups.group]

    async def features(
        self,
        view: str,
        keys: Any,
        *,
        defaults: bool = True,
        isolation: str = "completed",
        versions: Mapping[str, int] | None = None,
        at: Any = None,
        timeout: float | None = None,
    ) -> FeatureRows:
        """See ``QueryableStateClient.features``."""
        if versions is None and at is None and isinstance(keys, list) and 0 < len(keys) <= GATHERED_KEYS:
            # A copy: the caller may change its list while the request waits.
            group = FeatureGroup(view, defaults, isolation, owner_of(self._client, view, keys))
            rows: FeatureRows = await self._batched(group, keys[:], timeout)
            return rows
        options = {"defaults": defaults, "isolation": isolation, "versions": versions, "at": at, "timeout": timeout}
        return await self._run(self._client.features, view, keys, **options)

    get_many = _coroutine_of(QueryableStateClient.get_many)
    features_of_views = _coroutine_of(QueryableStateClient.features_of_views)
    entity_schema = _coroutine_of(QueryableStateClient.entity_schema)
    feature_views = _coroutine_of(QueryableStateClient.feature_views)
    count = _coroutine_of(QueryableStateClient.count)
    operators = _coroutine_of(QueryableStateClient.operators)
    describe = _coroutine_of(QueryableStateClient.describe)
    scan = _wrapped(QueryableStateClient.scan, AsyncStateScan, AsyncStateScan)
    find = _wrapped(QueryableStateClient.find, AsyncStateScan, AsyncStateScan)
    key_rows = _wrapped(QueryableStateClient.key_rows, AsyncStateScan, AsyncStateScan)
    watch = _wrapped(QueryableStateClient.watch, lambda watch: AsyncStateWatch(watch()), AsyncStateWatch)

    async def sql(
        self,
        query: str,
        *,
        query_params: Any = None,
        version: int | None = None,
        at: Any = None,
        timeout: float | None = None,
        limits: SqlLimits | None = None,
    ) -> pa.Table:
        """Return the rows of ``QueryableStateClient.sql`` as an Arrow table."""
        options = {"query_params": query_params, "version": version, "at": at, "timeout": timeout, "limits": limits}
        return await self._run(lambda: self._client.sql(query, **options).arrow())

    def sql_rows(
        self,
        query: str,
        *,
        query_params: Any = None,
        version: int | None = None,
        at: Any = None,
        timeout: float | None = None,
        limits: SqlLimits | None = None,
        in_own_process: bool = False,
    ) -> AsyncSqlRows:
        """Return the rows of ``QueryableStateClient.sql`` as they come. An awaited statement has begun.

        ``in_own_process`` runs the statement in a child process whose memory the operating system limits, so that
        statements of other people cannot take the memory of this process. Their parameters are JSON values.
        """
        options = {"query_params": query_params, "version": version, "at": at, "timeout": timeout, "limits": limits}
        if not in_own_process:
            return AsyncSqlRows(lambda: self._client.sql(query, **options))
        from spark_bridge.queryable.sql.statement_process import ProcessStatement

        return AsyncSqlRows(lambda: ProcessStatement(self._client, query, **options))

    async def _run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(call, *args, **kwargs))

    async def close(self) -> None:
        """Close all connections; calls under way fail."""
        self._end_lookups()
        self._client.close()
        self._pool.shutdown(wait=False)

    async def __aenter__(self) -> AsyncQueryableStateClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def scoped_async_client(client: AsyncQueryableStateClient, scope: Scope) -> AsyncQueryableStateClient:
    """Return the asynchronous counterpart of ``scoped_client``; both clients run their calls in the same threads."""
    scoped = AsyncQueryableStateClient(scoped_client(client._client, scope))
    scoped._pool = client._pool
    return scoped
