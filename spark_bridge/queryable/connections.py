"""Connections of a client to ``KvStateServer``s, by TCP or TLS, kept and shared between threads.

A connection has one request under way at a time. Every failure closes the connection, so that no answer is ever taken
for the answer to another request.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import time_ns
from typing import Any, NoReturn, TypeAlias

import msgspec
import pyarrow as pa

from spark_bridge.exceptions import ConnectionClosedError, HostUnavailableError, QueryableStateError, rebuilt_error
from spark_bridge.queryable.protocol import (
    FRAME_PREFIX,
    MAX_HEADER_BYTES,
    PROTOCOL,
    Failure,
    Hello,
    Reply,
    Request,
    RowsReply,
    Welcome,
    decode_reply,
    frame,
)
from spark_bridge.transport.tls import refusal

FrameBody: TypeAlias = bytes | bytearray | memoryview | pa.Buffer
REPLY_BUFFER_BYTES = 64 << 10
SMALL_BODY = 16 << 10
"""A request of at most this size is sent by one system call, so that it takes few packets."""
MAX_REPLY_BYTES = 1 << 31
ALIGNMENT = 64
MAX_ABANDONED = 16
"""At most this many connections wait for an answer that no caller wants any more, to be used again after it."""
CONNECT_SECONDS = 1.5
"""A dead node never answers. The limit leaves time for the kernel to send the first packet twice, 1 s apart."""
_OPTIONS = {
    "TCP_NODELAY": 1,
    # With these a client notices within 4 s that a node has vanished. By then the coordinator gives its partitions to
    # other hosts. A suspended process is not noticed, because its kernel answers.
    "TCP_KEEPIDLE": 2,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 2,
    "TCP_USER_TIMEOUT": 4_000,
}

_SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
"""The errors of a connection whose machine does not answer."""


class ClosedByPeerError(ConnectionClosedError):
    """The host closed the connection before it answered: it was idle for long, or the host was restarted."""


@dataclass
class _PartOfFrame:
    """A frame that has come in part: the memory of its header and body, and how much of it is full."""

    content: memoryview
    header_length: int
    num_received: int


def clock_offset_us(host_us: int, began_us: int, ended_us: int) -> int:
    """Return how far a host's clock is ahead, in microseconds, by one round trip.

    The host read ``host_us`` between ``began_us`` and ``ended_us`` of this process. That leaves a range as long as the
    round trip, and the offset is the one nearest to 0: a slow round trip makes no difference between equal clocks.
    """
    return min(max(0, host_us - ended_us), host_us - began_us)


class ClientConnection:
    """One connection, for one thread at a time.

    Every method raises ``ConnectionClosedError`` or ``HostUnavailableError`` when it fails; the connection is then
    closed. A ``deadline`` is a time of ``time.monotonic``.
    """

    __slots__ = (
        *("_armed", "_buffer", "_end", "_rest", "_sock", "_start", "_view"),
        *("address", "clock_offset_us", "pool", "used_at", "welcome"),
    )
    pool: _Pool

    def __init__(self, address: str, token: str, tls: ssl.SSLContext | None, deadline: float) -> None:
        self.address = address
        self.used_at = 0.0
        self._buffer = bytearray(REPLY_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._rest: _PartOfFrame | None = None
        self._armed = 0.0
        self._sock = _connected(address, tls, deadline)
        try:
            began = time_ns()
            self.send(Hello(PROTOCOL, token), b"", deadline)
            reply, _ = self.receive(deadline)
            ended = time_ns()
        except ClosedByPeerError as error:
            # In TLS 1.3 a host refuses a client's certificate only after the handshake.
            refused = refusal(address, error.__context__) if isinstance(error.__context__, ssl.SSLError) else None
            raise refused or HostUnavailableError(f"{address} closed the connection at once: {error}") from None
        if isinstance(reply, Failure):
            self.close()
            raise rebuilt_error(reply.error, reply.message)
        if not isinstance(reply, Welcome):
            self._fail(ConnectionClosedError(f"{address} answered the first frame by a {type(reply).__name__}."))
        self.welcome: Welcome = reply
        self.clock_offset_us = clock_offset_us(reply.now_us, began // 1000, ended // 1000) if reply.now_us else 0

    def send(self, header: Request, body: FrameBody, deadline: float) -> None:
        self._arm(deadline)
        head, content = frame(header, body)
        try:
            if len(content) <= SMALL_BODY:
                self._sock.sendall(head + content if content else head)
            else:
                self._sock.sendall(head)
                self._sock.sendall(content)
        except TimeoutError as error:
            if error.errno in _SILENT:  # the kernel's, not that of ``_arm``
                self._broken(error, begun=False)
            self._fail(HostUnavailableError(f"{self.address} did not take a request of {len(content)} bytes in time."))
        except OSError as error:
            self._broken(error, begun=False)

    def receive(self, deadline: float) -> tuple[Reply, memoryview]:
        """Wait for the next frame, and return its header and body. The caller owns the memory of the body."""
        if self._end == self._start or not self._armed:
            self._arm(deadline)
        received = self._receive(deadline)
        assert received is not None
        return received

    def receive_available(self) -> tuple[Reply, memoryview] | None:
        """Return the next frame if all of it has arrived. Otherwise keep its first part, and return None at once."""
        self._sock.settimeout(0.0)
        self._armed = 0.0
        return self._receive(None)

    def _receive(self, deadline: float | None) -> tuple[Reply, memoryview] | None:
        if self._rest is not None:
            return self._receive_rest(deadline)
        buffered = self._end - self._start
        if not buffered:
            self._start = self._end = 0
        while buffered < FRAME_PREFIX.size:
            if self._start:
                self._view[:buffered] = self._view[self._start : self._end]
                self._start, self._end = 0, buffered
            got = self._receive_into(self._view[buffered:] if buffered else self._buffer, deadline, begun=buffered > 0)
            if not got:
                return None
            buffered += got
            self._end += got
        length, header_length = FRAME_PREFIX.unpack_from(self._buffer, self._start)
        if header_length > length or header_length > MAX_HEADER_BYTES or length > MAX_REPLY_BYTES:
            self._fail(
                ConnectionClosedError(
                    f"{self.address} sent a frame of {length} bytes with a header of {header_length}: is it a query "
                    "address?"
                )
            )
        total = FRAME_PREFIX.size + length
        begin = self._start + FRAME_PREFIX.size
        if total <= buffered:
            content = begin + header_length
            header = bytes(self._view[begin:content])
            body = memoryview(bytes(self._view[content : self._start + total]))
            self._start += total
            return self._decoded(header, body)
        # The body begins where memory is aligned for Arrow.
        padding = -header_length % ALIGNMENT
        content_view = memoryview(pa.allocate_buffer(padding + length)).cast("B")[padding:]
        num_received = self._end - begin
        content_view[:num_received] = self._view[begin : self._end]
        self._start = self._end = 0
        self._rest = _PartOfFrame(content_view, header_length, num_received)
        return self._receive_rest(deadline)

    def _receive_rest(self, deadline: float | None) -> tuple[Reply, memoryview] | None:
        """Receive the rest of a frame that is larger than the buffer's content."""
        rest = self._rest
        assert rest is not None
        while rest.num_received < len(rest.content):
            got = self._receive_into(rest.content[rest.num_received :], deadline, begun=True)
            if not got:
                return None
            rest.num_received += got
        self._rest = None
        return self._decoded(bytes(rest.content[: rest.header_length]), rest.content[rest.header_length :])

    def _decoded(self, header: bytes, body: memoryview) -> tuple[Reply, memoryview]:
        try:
            return decode_reply(header), body
        except msgspec.MsgspecError as error:
            self._fail(ConnectionClosedError(f"{self.address} sent a header that makes no sense: {error}"))

    def _receive_into(self, into: bytearray | memoryview, deadline: float | None, *, begun: bool) -> int:
        """Receive some bytes, and return how many. Without a deadline 0 means that none have come."""
        while True:
            try:
                got = self._sock.recv_into(into)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                if deadline is None:
                    return 0
                self._broken(error, begun=begun)
            except TimeoutError as error:
                if error.errno in _SILENT:  # the kernel's, not that of ``_arm``
                    self._broken(error, begun=begun)
                if deadline is not None and time.monotonic() < deadline:
                    self._arm(deadline)
                    continue
                self._fail(HostUnavailableError(f"{self.address} did not answer in time."))
            except OSError as error:
                self._broken(error, begun=begun)
            if not got:
                kind = ConnectionClosedError if begun else ClosedByPeerError
                self._fail(
                    kind(f"{self.address} closed the connection{' in the middle of an answer' if begun else ''}.")
                )
            return got

    def _arm(self, deadline: float) -> None:
        """Set the socket's timeout to about the time until ``deadline``.

        Setting it is a system call. So a timeout that ends a little before the deadline is left as it is: a wait that
        ends too early is repeated.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            self._fail(HostUnavailableError(f"The timeout ended before {self.address} could be asked."))
        if not self._armed <= left <= 2 * self._armed:
            self._armed = 0.9 * left
            self._sock.settimeout(self._armed)

    def has_buffered(self) -> bool:
        """Return whether bytes of the next frame are in this process already, where ``poll`` does not see them."""
        if self._end > self._start:
            return True
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def has_more(self) -> bool:
        """Return whether the host has sent bytes after the last answer, which makes the connection unusable."""
        return self._end > self._start or self._rest is not None

    def fileno(self) -> int:
        """Return the socket's file descriptor, for ``poll``."""
        return self._sock.fileno()

    def _broken(self, error: OSError, *, begun: bool) -> NoReturn:
        if error.errno in _SILENT:  # not ``ClosedByPeerError``, which would send the request to this host again
            self._fail(HostUnavailableError(f"The machine of {self.address} does not answer any more: {error}"))
        refused = refusal(self.address, error) if isinstance(error, ssl.SSLError) else None
        kind = ConnectionClosedError if begun else ClosedByPeerError
        self._fail(refused or kind(f"{self.address} closed the connection: {error}"))

    def _fail(self, error: Exception) -> NoReturn:
        self.close()
        raise error

    def cut(self) -> None:
        """End the connection while another thread uses it, which then fails at once and closes it."""
        with contextlib.suppress(OSError):  # it was closed
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # TLS would take its state from the other thread

    def close(self) -> None:
        """Close the connection, also while it is in use. Closing it twice does no harm."""
        self._sock.close()


LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
NOT_LOOPBACK = (
    "Hosts listen at the addresses of their machines in the network: `statestore hosts`, in the cluster, lists these "
    "query addresses."
)


def _connected(address: str, tls: ssl.SSLContext | None, deadline: float) -> socket.socket:
    ip, _, port = address.rpartition(":")
    left = deadline - time.monotonic()
    if left <= 0:
        raise HostUnavailableError(f"The timeout ended before a connection to {address} was opened.")
    if not ip or not port.isdigit():
        raise QueryableStateError(f"{address!r} is not an address of the form ip:port.")
    ip = ip.strip("[]")
    try:
        sock = socket.create_connection((ip, int(port)), timeout=min(left, CONNECT_SECONDS))
    except ConnectionRefusedError as error:
        hint = f" {NOT_LOOPBACK}" if ip in LOOPBACK else ""
        raise HostUnavailableError(f"{address} does not answer: nothing listens there.{hint}") from error
    except OSError as error:
        raise HostUnavailableError(f"{address} does not answer: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _OPTIONS.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return sock if tls is None else tls.wrap_socket(sock, server_hostname=ip)
    except OSError as error:
        sock.close()
        refused = refusal(address, error) if isinstance(error, ssl.SSLError) else None
        raise refused or HostUnavailableError(f"{address} closed the connection: {error}") from error


# One request and its answer, of one frame or of several.
#
# All requests only read. So a request on a connection that the server has closed is sent again on a new one.


class KvExchange(Iterator[tuple[Reply, memoryview]]):
    """A request under way. ``finish`` reads an answer of one frame; iteration reads the frames of a scan to its end.

    The first frame must come before ``deadline``, a time of ``time.monotonic``. Each further one may take
    ``frame_seconds``; with None, all must come before ``deadline``. A new connection is opened within
    ``connect_seconds``, or before ``deadline``. A caller that stops early must ``close`` or ``abandon`` the exchange.
    Raises the host's own error. For one thread.
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
        self._connection, self._is_reused = connections.acquire(address, self._connect_by(deadline))
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
        """Wait for the answer, which is one frame."""
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
        """The address of the host that answers."""
        return self._connection.address

    def has_buffered(self) -> bool:
        """Return whether a part of the next frame is in this process already, where ``poll`` does not see it."""
        return self._connection.has_buffered()

    def fileno(self) -> int:
        """Return the socket's file descriptor, for ``poll``."""
        return self._connection.fileno()


MAX_CONNECTIONS = 64
"""Connections to one address at the same time; a thread that needs one more waits for it."""
MAX_IDLE_SECONDS = 300.0
"""A connection that was not used for this many seconds is closed. Hosts close idle connections too, later."""


class _Pool:
    """The connections to one address: a deque of idle ones, which needs no lock, and the number of open ones.

    ``free`` guards ``num_open`` and ``num_waiting``, and wakes waiting threads.
    """

    __slots__ = ("free", "idle", "is_closed", "num_open", "num_waiting")

    def __init__(self) -> None:
        self.idle: deque[ClientConnection] = deque()
        self.free = threading.Condition()
        self.num_open = 0
        self.num_waiting = 0
        self.is_closed = False

    def pop_idle(self) -> ClientConnection | None:
        """Return the connection used last, so that surplus connections become old and are closed."""
        try:
            return self.idle.pop()
        except IndexError:
            return None

    def forget_one(self) -> None:
        """Subtract one from the number of open connections."""
        with self.free:
            self.num_open -= 1
            self.free.notify()

    def close(self) -> None:
        """Close the idle connections. A connection in use is closed when it is released."""
        with self.free:
            self.is_closed = True
            self.free.notify_all()
        while (connection := self.pop_idle()) is not None:
            connection.close()


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
        self._pools: dict[str, _Pool] = {}
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

    def request(
        self, address: str, header: Request, body: FrameBody = b"", deadline: float | None = None
    ) -> tuple[Reply, memoryview]:
        """Send a request, and wait for its answer of one frame."""
        return self.begin(address, header, body, deadline).finish()

    def stream(self, address: str, header: Request, body: FrameBody = b"", deadline: float | None = None) -> KvExchange:
        """Send a scan, whose frames are read by iteration.

        ``deadline`` is for the first frame; each further frame may take ``timeout`` seconds.
        """
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

    def _pool(self, address: str) -> _Pool:
        if self._pid != os.getpid():
            # This process was forked. The sockets belong to the parent, and a thread of the parent may hold a lock.
            self._pools, self._abandoned, self._pid = {}, deque(), os.getpid()
        pool = self._pools.get(address)
        if pool is None:
            if self._is_closed:
                raise QueryableStateError("The connections have been closed; connect again.")
            pool = self._pools.setdefault(address, _Pool())
        return pool

    def _opened(self, pool: _Pool, address: str, deadline: float) -> ClientConnection:
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
        """Return a new connection in place of one that the host has closed.

        Close the idle ones too: the host has closed them as well.
        """
        stale.close()
        while (connection := stale.pool.pop_idle()) is not None:
            connection.close()
            stale.pool.forget_one()
        return self._opened(stale.pool, stale.address, deadline)

    def release(self, connection: ClientConnection) -> None:
        """Make a connection free for other threads."""
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

    def _close_oldest(self, pool: _Pool, now: float) -> bool:
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
        """Close a connection that cannot be used again."""
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
