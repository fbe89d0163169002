"""One connection of a client to a ``KvStateServer``, by TCP or TLS.

A connection has one request under way at a time. Every failure closes the connection, so that no answer is ever taken
for the answer to another request.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import NoReturn, TypeAlias

import msgspec
import pyarrow as pa

from spark_bridge.exceptions import ConnectionClosedError, HostUnavailableError, QueryableStateError
from spark_bridge.queryable.protocol.messages import (
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
from spark_bridge.transport.error_codec import rebuilt_error
from spark_bridge.transport.tls import refusal

FrameBody: TypeAlias = bytes | bytearray | memoryview | pa.Buffer
REPLY_BUFFER_BYTES = 64 << 10
SMALL_BODY = 16 << 10
"""A smaller request is sent in one piece, so that it takes one packet on the wire or few."""
MAX_REPLY_BYTES = 1 << 31
CONNECT_SECONDS = 5.0
"""A node that is gone does not even refuse a connection."""
_OPTIONS = {
    "TCP_NODELAY": 1,
    # With these a client notices within some ten seconds that a node has vanished.
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,
}


class ClosedByPeerError(ConnectionClosedError):
    """The host closed the connection before it answered: it was idle for long, or the host was restarted."""


class ClientConnection:
    """One connection, for one thread at a time.

    Every method raises ``ConnectionClosedError`` or ``HostUnavailableError`` when it fails; the connection is closed
    then. A ``deadline`` is a time of ``time.monotonic``.
    """

    __slots__ = ("_armed", "_buffer", "_end", "_sock", "_start", "_view", "address", "used_at", "welcome")

    def __init__(self, address: str, token: str, tls: ssl.SSLContext | None, deadline: float) -> None:
        self.address = address
        self.used_at = 0.0
        self._buffer = bytearray(REPLY_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._armed = 0.0
        self._sock = _connected(address, tls, deadline)
        try:
            self.send(Hello(PROTOCOL, token), b"", deadline)
            reply, _ = self.receive(deadline)
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

    def send(self, header: Request, body: FrameBody, deadline: float) -> None:
        """Send a request, header and body."""
        self._arm(deadline)
        head, content = frame(header, body)
        try:
            if len(content) <= SMALL_BODY:
                self._sock.sendall(head + content if content else head)
            else:
                self._sock.sendall(head)
                self._sock.sendall(content)
        except TimeoutError:
            self._fail(HostUnavailableError(f"{self.address} did not take a request of {len(content)} bytes in time."))
        except OSError as error:
            self._broken(error, begun=False)

    def receive(self, deadline: float) -> tuple[Reply, memoryview]:
        """Wait for the next frame, and return its header and body. The body is memory of the caller's own."""
        buffered = self._end - self._start
        if not buffered:
            self._start = self._end = 0
            self._arm(deadline)
        while buffered < FRAME_PREFIX.size:
            if self._start:
                self._view[:buffered] = self._view[self._start : self._end]
                self._start, self._end = 0, buffered
            got = self._receive_into(self._view[buffered:] if buffered else self._buffer, deadline, begun=buffered > 0)
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
        else:
            header, body = self._receive_rest(begin, header_length, length, deadline)
        try:
            return decode_reply(header), body
        except msgspec.MsgspecError as error:
            self._fail(ConnectionClosedError(f"{self.address} sent a header that makes no sense: {error}"))

    def _receive_rest(self, begin: int, header_length: int, length: int, deadline: float) -> tuple[bytes, memoryview]:
        """Receive the rest of a frame; return its header, and its body in memory of its own."""
        content = begin + header_length
        if self._end >= content:
            header = bytes(self._view[begin:content])
        else:
            early = bytearray(header_length)
            early[: self._end - begin] = self._view[begin : self._end]
            self._receive_all(memoryview(early)[self._end - begin :], deadline)
            header, content = bytes(early), self._end
        body = memoryview(pa.allocate_buffer(length - header_length)).cast("B")
        there = self._end - content
        body[:there] = self._view[content : self._end]
        self._start = self._end = 0
        self._receive_all(body[there:], deadline)
        return header, body

    def _receive_all(self, into: memoryview, deadline: float) -> None:
        while len(into):
            into = into[self._receive_into(into, deadline, begun=True) :]

    def _receive_into(self, into: bytearray | memoryview, deadline: float, *, begun: bool) -> int:
        while True:
            try:
                got = self._sock.recv_into(into)
            except TimeoutError:
                if time.monotonic() < deadline:
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

        Setting it is a system call. So a timeout that ends a little before the deadline is left as it is; the wait is
        repeated then.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            self._fail(HostUnavailableError(f"There was no time left to ask {self.address}."))
        if not self._armed <= left <= 2 * self._armed:
            self._armed = 0.9 * left
            self._sock.settimeout(self._armed)

    def has_buffered(self) -> bool:
        """Return whether bytes of the next frame are in this process already, where ``poll`` does not see them."""
        if self._end > self._start:
            return True
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def has_more(self) -> bool:
        """Return whether bytes came after the last answer: then the connection is out of step."""
        return self._end > self._start

    def fileno(self) -> int:
        """Return the socket's file descriptor, for ``poll``."""
        return self._sock.fileno()

    def _broken(self, error: OSError, *, begun: bool) -> NoReturn:
        refused = refusal(self.address, error) if isinstance(error, ssl.SSLError) else None
        kind = ConnectionClosedError if begun else ClosedByPeerError
        self._fail(refused or kind(f"{self.address} closed the connection: {error}"))

    def _fail(self, error: Exception) -> NoReturn:
        self.close()
        raise error

    def close(self) -> None:
        """Close the connection, also while it is in use. Closing it twice does no harm."""
        self._sock.close()


def _connected(address: str, tls: ssl.SSLContext | None, deadline: float) -> socket.socket:
    ip, _, port = address.rpartition(":")
    left = deadline - time.monotonic()
    if left <= 0:
        raise HostUnavailableError(f"There was no time left to connect to {address}.")
    if not ip or not port.isdigit():
        raise QueryableStateError(f"{address!r} is no address of the form ip:port.")
    ip = ip.strip("[]")
    try:
        sock = socket.create_connection((ip, int(port)), timeout=min(left, CONNECT_SECONDS))
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
