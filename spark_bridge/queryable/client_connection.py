"""One connection of a client to a ``KvStateServer``, by TCP or TLS, and the pool of those to one address.

Every failure closes the connection, so that no answer is ever taken for the answer to another request.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass
from time import time_ns
from typing import NoReturn, TypeAlias

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
    pool: ConnectionPool

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


class ConnectionPool:
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
