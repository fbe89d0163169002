"""Connections of a client to ``KvStateServer``s, by TCP or TLS, kept and shared between threads.

A connection has one request under way at a time. Every failure closes the connection, so that no answer is ever taken
for the answer to another request.
"""

from __future__ import annotations

import contextlib
import math
import os
import ssl
import time
from collections import deque
from collections.abc import Iterator
from time import time_ns
from typing import Any

from spark_bridge.exceptions import ConnectionClosedError, HostUnavailableError, QueryableStateError, rebuilt_error
from spark_bridge.queryable.client_connection import (
    SMALL_BODY,
    ClientConnection,
    ClosedByPeerError,
    ConnectionPool,
    FrameBody,
)
from spark_bridge.queryable.protocol import Failure, Reply, Request, RowsReply

# One request and its answer, of one frame or of several.
#
# All requests only read. So a request on a connection that the server has closed is sent again on a new one.


class KvExchange(Iterator[tuple[Reply, memoryview]]):
    """A request under way. ``finish`` reads an answer of one frame; iteration reads the frames of a scan to its end.

    The first frame must come before ``deadline``, a time of ``time.monotonic``. Each further one may take
    ``frame_seconds``; with None, all must come before ``deadline``. A new connection is opened within
    ``connect_seconds``, or before ``deadline``. With an ``idle`` connection none is ever opened. A caller that stops
    early must ``close`` or ``abandon`` the exchange. Raises the host's own error. For one thread.
    """

    __slots__ = (
        *("_connect_seconds", "_connection", "_connections", "_deadline", "_failure", "_frame_seconds", "_frames"),
        *("_is_over", "_is_reused", "_is_whole", "_request"),
    )

    def __init__(
        self,
        connections: KvConnections,
        address: str,
        request: tuple[Request, FrameBody],
        deadline: float,
        frame_seconds: float | None = None,
        connect_seconds: float = math.inf,
        idle: ClientConnection | None = None,
    ) -> None:
        self._connections = connections
        self._request = request
        self._deadline: float | None = deadline
        self._frame_seconds = frame_seconds
        self._connect_seconds = connect_seconds
        self._frames: deque[tuple[Reply, memoryview]] = deque()
        self._failure: Exception | None = None
        self._is_whole = False
        self._is_over = False
        if idle is None:
            self._connection, self._is_reused = connections.acquire(address, self._connect_by(deadline))
        else:
            self._connection, self._is_reused = idle, False
        try:
            self._connection.send(*request, deadline)
        except ClosedByPeerError as error:
            self._send_again(error, deadline)
        except BaseException:
            self.close()
            raise

    def _connect_by(self, deadline: float) -> float:
        return min(deadline, time.monotonic() + self._connect_seconds)

    def _send_again(self, error: ClosedByPeerError, deadline: float) -> None:
        """Send the request on a new connection, unless this connection was new."""
        if not self._is_reused:
            self.close()
            raise error
        self._is_reused = False
        try:
            self._connection = self._connections.replace(self._connection, self._connect_by(deadline))
        except BaseException:
            self._is_over = True
            raise
        try:
            self._connection.send(*self._request, deadline)
        except BaseException:
            self.close()
            raise

    def finish(self) -> tuple[Reply, memoryview]:
        reply, body = self._next_frame()
        self._release()
        if type(reply) is Failure:
            raise rebuilt_error(reply.error, reply.message)
        return reply, body

    def __next__(self) -> tuple[Reply, memoryview]:
        if self._is_over:
            raise StopIteration
        reply, body = self._next_frame()
        if type(reply) is not RowsReply:
            self._release()
            if isinstance(reply, Failure):
                raise rebuilt_error(reply.error, reply.message)
        return reply, body

    def has_answer(self) -> bool:
        """Return whether the whole answer, or a failure, has come. Takes what has come, and does not wait.

        May connect and send the request again if the host has closed the connection.
        """
        while not self._is_whole:
            try:
                try:
                    frame = self._connection.receive_available()
                except ClosedByPeerError as error:
                    assert self._deadline is not None
                    self._send_again(error, self._deadline)
                    continue
            except BaseException as error:
                self.close()
                self._is_whole = True
                if not isinstance(error, Exception):
                    raise
                self._failure = error
            else:
                if frame is None:
                    return False
                self._is_reused = False
                self._frames.append(frame)
                self._is_whole = type(frame[0]) is not RowsReply
        return True

    def _next_frame(self) -> tuple[Reply, memoryview]:
        frame = self._frames.popleft() if self._frames else self._awaited_frame()
        lag_ms = getattr(frame[0], "lag_ms", None)
        if lag_ms is not None:
            self._connections.lag_ms = lag_ms
            self._connections.version = frame[0].version  # type: ignore[union-attr]
        return frame

    def _awaited_frame(self) -> tuple[Reply, memoryview]:
        deadline = self._deadline
        if deadline is None:
            deadline = time.monotonic() + (self._frame_seconds or 0.0)
        try:
            if self._failure is not None:
                raise self._failure
            try:
                frame = self._connection.receive(deadline)
            except ClosedByPeerError as error:
                self._send_again(error, deadline)
                frame = self._connection.receive(deadline)
        except BaseException as error:
            self.close()
            if isinstance(error, HostUnavailableError):
                self._connections.unreachable = self.address
            raise
        self._is_reused = False
        if self._frame_seconds is not None:
            self._deadline = None  # the next frame has its own
        return frame

    def _release(self) -> None:
        """Give the connection back, after the last frame has been read."""
        if self._connection.has_more():
            self.close()
            raise ConnectionClosedError(f"{self.address} sent more than was asked for.")
        self._is_over = True
        self._connections.release(self._connection)

    def close(self) -> None:
        """Close the connection unless the answer has been read to its end; the host notices that and stops."""
        if not self._is_over:
            self._is_over = True
            self._connections.discard(self._connection)

    def cut(self) -> None:
        """End the answer while another thread reads it, which then gets an error and closes the exchange."""
        self._is_reused = False  # the request is not sent again
        if not self._is_over:
            self._connection.cut()

    def abandon(self) -> None:
        """Give up the answer. The connection is used again once the answer has come, unless that takes too long."""
        if not self._is_over:
            self._is_reused = False  # the request is not sent again
            self._connections.keep_abandoned(self)

    def drain(self) -> bool:
        """Drop the frames of an abandoned answer that have arrived. Return whether the exchange is over."""
        is_whole = self.has_answer()
        self._frames.clear()
        if is_whole and not self._is_over:
            with contextlib.suppress(ConnectionClosedError):  # the host sent too much: the connection is closed
                self._release()
        if not is_whole and self._deadline is not None and time.monotonic() > self._deadline:
            self.close()
        return self._is_over

    @property
    def address(self) -> str:
        return self._connection.address

    def has_buffered(self) -> bool:
        """Return whether a part of the next frame is in this process already, where ``poll`` does not see it."""
        return self._connection.has_buffered()

    def fileno(self) -> int:
        return self._connection.fileno()


MAX_CONNECTIONS = 64
"""Connections to one address at the same time; a thread that needs one more waits for it."""
MAX_ABANDONED = 16
"""At most this many connections wait for an answer that no caller wants any more, to be used again after it."""
MAX_IDLE_SECONDS = 300.0
"""A connection that was not used for this many seconds is closed. Hosts close idle connections too, later."""


class KvConnections:
    """Connections by address (``ip:port``), made when needed, for any number of threads, and for processes that fork.

    ``timeout`` is the seconds that an answer may take without a deadline. A ``deadline`` is a time of
    ``time.monotonic``. ``lag_ms`` is the lag in the last answer, 0 for none, and ``version`` its version.
    ``clock_offset_us`` is how far the clock of the host that was connected last is ahead of this process.
    ``unreachable`` is the last address that took no connection, until ``take_unreachable`` forgets it. Every method
    raises the host's own error, ``HostUnavailableError`` if no host answers in time, ``ConnectionClosedError`` if the
    connection breaks, and ``AccessDeniedError``.
    """

    def __init__(self, token: str, tls: ssl.SSLContext | None = None, timeout: float = 30.0) -> None:
        self.timeout = timeout
        self.lag_ms = 0
        self.version = 0
        self.clock_offset_us = 0
        self.unreachable = ""
        self._token = token
        self._tls = tls
        self._pools: dict[str, ConnectionPool] = {}
        self._abandoned: deque[KvExchange] = deque()
        self._pid = os.getpid()
        self._is_closed = False

    def now_us(self) -> int:
        """Return the clock of the host that was connected last, in microseconds since 1970."""
        return time_ns() // 1000 + self.clock_offset_us

    def take_unreachable(self) -> str:
        """Return the address that took no connection last, and forget it; empty if there is none."""
        address, self.unreachable = self.unreachable, ""
        return address

    # -- requests ------------------------------------------------------------------------------

    def begin(
        self,
        address: str,
        header: Request,
        body: FrameBody = b"",
        deadline: float | None = None,
        connect_seconds: float = math.inf,
    ) -> KvExchange:
        """Send a request without waiting for the answer, so that several hosts can be asked at once.

        Connecting takes at most ``connect_seconds``, and ends before ``deadline``.
        """
        if deadline is None:
            deadline = time.monotonic() + self.timeout
        return KvExchange(self, address, (header, body), deadline, connect_seconds=connect_seconds)

    def begin_if_idle(self, address: str, header: Request, body: FrameBody, deadline: float) -> KvExchange | None:
        """Send a request on a connection that is free now; return None if none is, or the request is not small.

        For event loops: this never connects or waits, also if the host has closed the connection.
        """
        connection = self._pool(address).pop_idle() if len(body) <= SMALL_BODY else None
        return None if connection is None else KvExchange(self, address, (header, body), deadline, idle=connection)

    def request(
        self, address: str, header: Request, body: FrameBody = b"", deadline: float | None = None
    ) -> tuple[Reply, memoryview]:
        return self.begin(address, header, body, deadline).finish()

    def stream(self, address: str, header: Request, body: FrameBody = b"", deadline: float | None = None) -> KvExchange:
        """Send a scan. Its first frame comes before ``deadline``; each further frame may take ``timeout`` seconds."""
        if deadline is None:
            deadline = time.monotonic() + self.timeout
        return KvExchange(self, address, (header, body), deadline, self.timeout)

    # -- connections ---------------------------------------------------------------------------

    def acquire(self, address: str, deadline: float) -> tuple[ClientConnection, bool]:
        """Return a connection, and whether it has been used before. Wait for a free one until ``deadline``."""
        pool = self._pool(address)
        connection = pool.pop_idle()
        if connection is None and self._abandoned:
            self._drain_abandoned()
            connection = pool.pop_idle()
        if connection is not None:
            return connection, True
        with pool.free:
            # This comes before the look at ``idle``. ``release`` first appends to ``idle``, and then reads the number.
            pool.num_waiting += 1
            try:
                while True:
                    if pool.is_closed:
                        raise QueryableStateError("The connections have been closed; connect again.")
                    connection = pool.pop_idle()
                    if connection is not None:
                        return connection, True
                    if pool.num_open < MAX_CONNECTIONS:
                        pool.num_open += 1
                        break
                    seconds = deadline - time.monotonic()
                    if seconds <= 0:
                        raise HostUnavailableError(f"All {MAX_CONNECTIONS} connections to {address} were in use.")
                    pool.free.wait(seconds)
            finally:
                pool.num_waiting -= 1
        return self._opened(pool, address, deadline), False

    def _pool(self, address: str) -> ConnectionPool:
        if self._pid != os.getpid():
            # This process was forked. The sockets belong to the parent, and a thread of the parent may hold a lock.
            self._pools, self._abandoned, self._pid = {}, deque(), os.getpid()
        pool = self._pools.get(address)
        if pool is None:
            if self._is_closed:
                raise QueryableStateError("The connections have been closed; connect again.")
            pool = self._pools.setdefault(address, ConnectionPool())
        return pool

    def _opened(self, pool: ConnectionPool, address: str, deadline: float) -> ClientConnection:
        try:
            connection = ClientConnection(address, self._token, self._tls, deadline)
            self.clock_offset_us = connection.clock_offset_us
        except BaseException as error:
            pool.forget_one()
            if isinstance(error, HostUnavailableError):
                self.unreachable = address
            raise
        connection.pool = pool
        self._close_unused()
        return connection

    def _close_unused(self) -> None:
        """Close the connections of all addresses that have been idle for too long.

        ``release`` closes those of the address that it is called for. A host whose partitions have moved gets no more
        requests, and so no more releases. Another host then needs a new connection, so this is called when one opens.
        """
        now = time.monotonic()
        for pool in list(self._pools.values()):
            while self._close_oldest(pool, now):
                pass

    def replace(self, stale: ClientConnection, deadline: float) -> ClientConnection:
        """Return a new connection for one that the host has closed; close the idle ones, as the host has."""
        stale.close()
        while (connection := stale.pool.pop_idle()) is not None:
            connection.close()
            stale.pool.forget_one()
        return self._opened(stale.pool, stale.address, deadline)

    def release(self, connection: ClientConnection) -> None:
        pool = connection.pool
        now = connection.used_at = time.monotonic()
        pool.idle.append(connection)
        if pool.num_waiting:
            with pool.free:
                pool.free.notify()
        elif now - pool.idle[0].used_at > MAX_IDLE_SECONDS:
            self._close_oldest(pool, now)
        if pool.is_closed:
            pool.close()

    def keep_abandoned(self, exchange: KvExchange) -> None:
        """Keep an exchange that its caller has given up, until its answer has come and the connection is free again."""
        self._abandoned.append(exchange)
        self._drain_abandoned()
        while len(self._abandoned) > MAX_ABANDONED or self._is_closed:
            try:
                self._abandoned.popleft().close()
            except IndexError:
                break

    def _drain_abandoned(self) -> None:
        for _ in range(len(self._abandoned)):
            try:
                exchange = self._abandoned.popleft()  # so that no other thread has it
            except IndexError:
                break
            if not exchange.drain():
                self._abandoned.append(exchange)

    def _close_oldest(self, pool: ConnectionPool, now: float) -> bool:
        """Close the connection that has been idle for longest if that is too long; return whether it was."""
        try:
            oldest = pool.idle.popleft()
        except IndexError:
            return False
        if now - oldest.used_at <= MAX_IDLE_SECONDS:
            pool.idle.appendleft(oldest)
            return False
        oldest.close()
        pool.forget_one()
        return True

    def discard(self, connection: ClientConnection) -> None:
        connection.close()
        connection.pool.forget_one()

    def close(self) -> None:
        """Close all connections; this is final. Requests of other threads may fail."""
        self._is_closed = True
        self.drop()

    def drop(self) -> None:
        """Close all connections; later requests open new ones."""
        pools, self._pools = self._pools, {}
        abandoned, self._abandoned = self._abandoned, deque()
        for pool in list(pools.values()):
            pool.close()
        for exchange in list(abandoned):
            exchange.close()

    def __enter__(self) -> KvConnections:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
