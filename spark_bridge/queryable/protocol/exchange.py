"""One request over a pooled connection, and its answer: of one frame, or a stream of frames.

All requests only read. So a request that meets a connection which the server has closed meanwhile is sent again on a
new one.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator

from spark_bridge.exceptions import ConnectionClosedError
from spark_bridge.queryable.protocol.client_connection import ClosedByPeerError, FrameBody
from spark_bridge.queryable.protocol.connection_pool import ConnectionPool
from spark_bridge.queryable.protocol.messages import Failure, Reply, Request, RowsReply
from spark_bridge.transport.error_codec import rebuilt_error


class KvExchange:
    """A request that has been sent; its answer is still to be read or ``abandon``ed. For one thread."""

    __slots__ = ("_connection", "_deadline", "_is_over", "_may_replace", "_pool", "_request", "address")

    def __init__(self, address: str, pool: ConnectionPool, header: Request, body: FrameBody, deadline: float) -> None:
        self.address = address
        self._pool = pool
        self._request = (header, body)
        self._deadline = deadline
        self._is_over = False
        self._connection, self._may_replace = pool.take(deadline)
        try:
            self._connection.send(header, body, deadline)
        except ClosedByPeerError as error:
            self._replace(error, deadline)
        except BaseException:
            self.abandon()
            raise

    def _replace(self, error: ClosedByPeerError, deadline: float) -> None:
        """Send the request again on a new connection, unless this connection was new."""
        if not self._may_replace:
            self.abandon()
            raise error
        self._may_replace = False
        try:
            self._connection = self._pool.replace(self._connection, deadline)
        except BaseException:
            self._is_over = True
            raise
        try:
            self._connection.send(*self._request, deadline)
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> tuple[Reply, memoryview]:
        """Wait for the answer, which is one frame. Raises the host's own error."""
        reply, body = self.next_frame(self._deadline)
        self.release()
        if type(reply) is Failure:
            raise rebuilt_error(reply.error, reply.message)
        return reply, body

    def next_frame(self, deadline: float) -> tuple[Reply, memoryview]:
        """Wait for the next frame, of any kind. After the last frame the caller must ``release``."""
        try:
            try:
                reply = self._connection.receive(deadline)
            except ClosedByPeerError as error:
                self._replace(error, deadline)
                reply = self._connection.receive(deadline)
        except BaseException:
            self.abandon()
            raise
        self._may_replace = False
        lag_ms = getattr(reply[0], "lag_ms", None)
        if lag_ms is not None:
            self._pool.lag_ms, self._pool.answered_at = lag_ms, time.monotonic()
        return reply

    def release(self) -> None:
        """Give the connection back, after the last frame has been read."""
        if self._is_over:
            return
        if self._connection.has_more():
            self.abandon()
            raise ConnectionClosedError(f"{self.address} sent more than was asked for.")
        self._is_over = True
        self._pool.give_back(self._connection)

    def abandon(self) -> None:
        """Close the connection, because frames are, or may be, still to come. No effect after the exchange is over."""
        if not self._is_over:
            self._is_over = True
            self._pool.discard(self._connection)

    def has_buffered(self) -> bool:
        """Return whether a part of the next frame is in this process already, where ``poll`` does not see it."""
        return self._connection.has_buffered()

    def fileno(self) -> int:
        """Return the socket's file descriptor, for ``poll``."""
        return self._connection.fileno()


class KvStream(Iterator[tuple[Reply, memoryview]]):
    """The frames that answer a scan, up to ``End``, which is the last one.

    Each frame may take ``timeout`` seconds to come. A caller that stops early must ``close`` the stream. Raises the
    host's own error.
    """

    def __init__(self, exchange: KvExchange, deadline: float, timeout: float) -> None:
        self._exchange = exchange
        self._deadline: float | None = deadline
        self._timeout = timeout
        self._is_over = False

    def __next__(self) -> tuple[Reply, memoryview]:
        if self._is_over:
            raise StopIteration
        deadline = time.monotonic() + self._timeout if self._deadline is None else self._deadline
        self._deadline = None
        try:
            reply, body = self._exchange.next_frame(deadline)
        except BaseException:
            self._is_over = True
            raise
        if type(reply) is not RowsReply:
            self._is_over = True
            self._exchange.release()
            if isinstance(reply, Failure):
                raise rebuilt_error(reply.error, reply.message)
        return reply, body

    @property
    def address(self) -> str:
        """The address of the host that answers."""
        return self._exchange.address

    def is_ready(self, wait: float = 0.0) -> bool:
        """Return whether a part of the next frame is here, after ``wait`` seconds at most."""
        return self._exchange.has_buffered() or bool(select.select([self], [], [], wait)[0])

    def has_buffered(self) -> bool:
        """Return whether a part of the next frame is in this process already, where ``poll`` does not see it."""
        return self._exchange.has_buffered()

    def fileno(self) -> int:
        """Return the socket's file descriptor, for ``poll``."""
        return self._exchange.fileno()

    def close(self) -> None:
        """Close the connection; the host notices that and stops."""
        self._is_over = True
        self._exchange.abandon()
