"""``KvConnections``: TCP or TLS connections to ``KvStateServer``s, kept and shared between threads.

A connection has one question under way at a time. Whatever goes wrong closes it, so that no answer is ever taken for that of another
question. All questions only read, so one that meets a connection which the server has closed meanwhile is asked again on a new one.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias

import msgspec
import pyarrow as pa

from spark_bridge.exceptions import ConnectionClosedError, HostUnavailableError, QueryableStateError
from spark_bridge.queryable.protocol.messages import (
    MAX_HEADER_BYTES,
    PREFIX,
    PROTOCOL,
    Batch,
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

Body: TypeAlias = bytes | bytearray | memoryview | pa.Buffer

BUFFER_BYTES = 64 << 10
SMALL_BODY = 16 << 10
"""Such a request is sent in one piece, so that it is one packet on the wire or few."""
MAX_REPLY_BYTES = 1 << 31
CONNECT_SECONDS = 5.0
"""A node that is gone does not even refuse."""
_OPTIONS = {
    "TCP_NODELAY": 1,
    # So a node that vanishes while an answer is waited for is noticed within some ten seconds.
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,
}
MAX_CONNECTIONS = 64
"""To one address at the same time; who needs one more waits for it."""
IDLE_SECONDS = 300.0
"""A connection that nobody has needed for so long is closed; hosts do so themselves later."""


class ClosedByPeerError(ConnectionClosedError):
    """The host closed the connection before it answered: it was idle for long, or the host was restarted."""


class KvConnection:
    """One connection, for one thread at a time. Raises ``ConnectionClosedError`` and ``HostUnavailableError``, and is closed then."""

    __slots__ = ("_armed", "_buffer", "_end", "_sock", "_start", "_view", "address", "used_at", "welcome")

    def __init__(self, address: str, token: str, tls: ssl.SSLContext | None, deadline: float) -> None:
        self.address = address
        self.used_at = 0.0
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._armed = 0.0
        self._sock = _connected(address, tls, deadline)
        try:
            self.send(Hello(PROTOCOL, token), b"", deadline)
            reply, _ = self.receive(deadline)
        except ClosedByPeerError as error:
            # With TLS 1.3 a host refuses a client's certificate only after the handshake.
            refused = refusal(address, error.__context__) if isinstance(error.__context__, ssl.SSLError) else None
            raise refused or HostUnavailableError(f"{address} closed the connection at once: {error}") from None
        if isinstance(reply, Failure):
            self.close()
            raise rebuilt_error(reply.error, reply.message)
        if not isinstance(reply, Welcome):
            self._fail(ConnectionClosedError(f"{address} answered the first frame by a {type(reply).__name__}."))
        self.welcome: Welcome = reply

    def send(self, header: Request, body: Body, deadline: float) -> None:
        """Send a question, whole."""
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
        """The next frame. What it returns is the caller's own."""
        buffered = self._end - self._start
        if not buffered:
            self._start = self._end = 0
            self._arm(deadline)
        while buffered < PREFIX.size:
            if self._start:
                self._view[:buffered] = self._view[self._start : self._end]
                self._start, self._end = 0, buffered
            got = self._receive_into(self._view[buffered:] if buffered else self._buffer, deadline, begun=buffered > 0)
            buffered += got
            self._end += got
        length, header_length = PREFIX.unpack_from(self._buffer, self._start)
        if header_length > length or header_length > MAX_HEADER_BYTES or length > MAX_REPLY_BYTES:
            self._fail(
                ConnectionClosedError(
                    f"{self.address} sent a frame of {length} bytes with a header of {header_length}: is it a query address?"
                )
            )
        total = PREFIX.size + length
        begin = self._start + PREFIX.size
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
        """A frame that has not come whole: header and body, the latter in memory of its own."""
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
        """Set the socket's timeout. That is a system call, so one that ends a little early is left, and waited for again."""
        left = deadline - time.monotonic()
        if left <= 0:
            self._fail(HostUnavailableError(f"There was no time left to ask {self.address}."))
        if not self._armed <= left <= 2 * self._armed:
            self._armed = 0.9 * left
            self._sock.settimeout(self._armed)

    def has_buffered(self) -> bool:
        """Whether bytes of the next frame are here already, where ``select`` does not see them."""
        if self._end > self._start:
            return True
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def has_more(self) -> bool:
        """Whether something came behind the last answer: then the connection is out of step."""
        return self._end > self._start

    def fileno(self) -> int:
        """For ``select``."""
        return self._sock.fileno()

    def _broken(self, error: OSError, *, begun: bool) -> NoReturn:
        refused = refusal(self.address, error) if isinstance(error, ssl.SSLError) else None
        kind = ConnectionClosedError if begun else ClosedByPeerError
        self._fail(refused or kind(f"{self.address} closed the connection: {error}"))

    def _fail(self, error: Exception) -> NoReturn:
        self.close()
        raise error

    def close(self) -> None:
        """Close it, whatever it is doing. Twice does no harm."""
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


class _Pool:
    """The connections to one address. The last one used is the next one to be used, so that the others grow old."""

    def __init__(self, address: str, token: str, tls: ssl.SSLContext | None) -> None:
        self._address = address
        self._token = token
        self._tls = tls
        self._idle: deque[KvConnection] = deque()
        self._free = threading.Condition()
        self._open = 0
        self._waiting = 0
        self._is_closed = False

    def take(self, deadline: float) -> tuple[KvConnection, bool]:
        """A connection, and whether it has been used before."""
        try:
            return self._idle.pop(), True
        except IndexError:
            pass
        with self._free:
            # Counted before the look at what is idle: who gives one back looks at the count after that.
            self._waiting += 1
            try:
                while True:
                    if self._is_closed:
                        raise QueryableStateError("The connections have been closed; connect again.")
                    if self._idle:
                        try:
                            return self._idle.pop(), True
                        except IndexError:
                            continue
                    if self._open < MAX_CONNECTIONS:
                        self._open += 1
                        break
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise HostUnavailableError(f"All {MAX_CONNECTIONS} connections to {self._address} were in use.")
                    self._free.wait(left)
            finally:
                self._waiting -= 1
        return self._new(deadline), False

    def _new(self, deadline: float) -> KvConnection:
        try:
            return KvConnection(self._address, self._token, self._tls, deadline)
        except BaseException:
            self._forget()
            raise

    def replace(self, stale: KvConnection, deadline: float) -> KvConnection:
        """A new connection instead of one that the host has closed; those that were idle beside it are no better."""
        stale.close()
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                break
            self._forget()
        return self._new(deadline)

    def give_back(self, connection: KvConnection) -> None:
        now = connection.used_at = time.monotonic()
        idle = self._idle
        idle.append(connection)
        if self._waiting:
            with self._free:
                self._free.notify()
        elif now - idle[0].used_at > IDLE_SECONDS:
            self._drop_oldest(now)
        if self._is_closed:
            self.close()

    def _drop_oldest(self, now: float) -> None:
        try:
            oldest = self._idle.popleft()
        except IndexError:
            return
        if now - oldest.used_at > IDLE_SECONDS:
            oldest.close()
            self._forget()
        else:
            self._idle.appendleft(oldest)

    def discard(self, connection: KvConnection) -> None:
        connection.close()
        self._forget()

    def _forget(self) -> None:
        with self._free:
            self._open -= 1
            self._free.notify()

    def close(self) -> None:
        with self._free:
            self._is_closed = True
            self._free.notify_all()
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return


class KvExchange:
    """A question that has been sent; its answers are still to be read, or ``abandon``ed. For one thread."""

    __slots__ = ("_ask", "_connection", "_deadline", "_is_over", "_may_replace", "_pool", "address")

    def __init__(self, address: str, pool: _Pool, header: Request, body: Body, deadline: float) -> None:
        self.address = address
        self._pool = pool
        self._ask = (header, body)
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
        """Ask again on a new connection, unless this one was new."""
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
            self._connection.send(*self._ask, deadline)
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> tuple[Reply, memoryview]:
        """The one answer. Raises the host's own error."""
        reply, body = self.next_frame(self._deadline)
        self.release()
        if type(reply) is Failure:
            raise rebuilt_error(reply.error, reply.message)
        return reply, body

    def next_frame(self, deadline: float) -> tuple[Reply, memoryview]:
        """The next frame, whatever it is; who has had the last one must ``release``."""
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
        return reply

    def release(self) -> None:
        """The last answer has been read: others may use the connection."""
        if self._is_over:
            return
        if self._connection.has_more():
            self.abandon()
            raise ConnectionClosedError(f"{self.address} sent more than was asked for.")
        self._is_over = True
        self._pool.give_back(self._connection)

    def abandon(self) -> None:
        """Close the connection, for there are, or may be, more answers to come."""
        if not self._is_over:
            self._is_over = True
            self._pool.discard(self._connection)

    def has_buffered(self) -> bool:
        """Whether a part of the next frame is here already, where ``select`` does not see it."""
        return self._connection.has_buffered()

    def fileno(self) -> int:
        """For ``select``."""
        return self._connection.fileno()


class KvStream(Iterator[tuple[Reply, memoryview]]):
    """The frames that answer a scan, up to ``End``, which is the last one. Each may take ``timeout`` seconds to come.

    Whoever stops early must ``close`` it. Raises the host's own error.
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
        if type(reply) is not Batch:
            self._is_over = True
            self._exchange.release()
            if isinstance(reply, Failure):
                raise rebuilt_error(reply.error, reply.message)
        return reply, body

    @property
    def address(self) -> str:
        """Who answers."""
        return self._exchange.address

    def is_ready(self, wait: float = 0.0) -> bool:
        """Whether (a part of) the next frame is here."""
        return self._exchange.has_buffered() or bool(select.select([self], [], [], wait)[0])

    def has_buffered(self) -> bool:
        """Whether a part of the next frame is here already, where ``select`` does not see it."""
        return self._exchange.has_buffered()

    def fileno(self) -> int:
        """For ``select``."""
        return self._exchange.fileno()

    def close(self) -> None:
        """End it: the host notices that the connection is closed."""
        self._is_over = True
        self._exchange.abandon()


class KvConnections:
    """Connections by address (``ip:port``), made when needed, for any number of threads, and processes that fork.

    ``timeout`` in seconds is how long an answer may take where no deadline is given; deadlines are times of ``time.monotonic``.
    Every method raises the host's own error, ``HostUnavailableError`` if nobody answers in time, ``ConnectionClosedError`` if the
    connection breaks, and ``AccessDeniedError``.
    """

    def __init__(self, token: str, tls: ssl.SSLContext | None = None, timeout: float = 30.0) -> None:
        self.timeout = timeout
        self._token = token
        self._tls = tls
        self._pools: dict[str, _Pool] = {}
        self._pid = os.getpid()
        self._is_closed = False

    def _pool(self, address: str) -> _Pool:
        if self._pid != os.getpid():
            # Forked: the sockets belong to the parent, and its locks may be held by threads that are not here.
            self._pools, self._pid = {}, os.getpid()
        pool = self._pools.get(address)
        if pool is None:
            if self._is_closed:
                raise QueryableStateError("The connections have been closed; connect again.")
            pool = self._pools.setdefault(address, _Pool(address, self._token, self._tls))
        return pool

    def begin(self, address: str, header: Request, body: Body = b"", deadline: float | None = None) -> KvExchange:
        """Send a question without waiting for the answer, to ask several hosts at once."""
        if deadline is None:
            deadline = time.monotonic() + self.timeout
        return KvExchange(address, self._pool(address), header, body, deadline)

    def request(
        self, address: str, header: Request, body: Body = b"", deadline: float | None = None
    ) -> tuple[Reply, memoryview]:
        """One question, one answer."""
        return self.begin(address, header, body, deadline).finish()

    def stream(self, address: str, header: Request, body: Body = b"", deadline: float | None = None) -> KvStream:
        """The frames that answer a scan; ``deadline`` is for the first of them, each further one may take ``timeout``."""
        if deadline is None:
            deadline = time.monotonic() + self.timeout
        return KvStream(self.begin(address, header, body, deadline), deadline, self.timeout)

    def welcome(self, address: str, deadline: float | None = None) -> Welcome:
        """What a host says of itself: who it is, and what a request may have."""
        pool = self._pool(address)
        connection, _ = pool.take(time.monotonic() + self.timeout if deadline is None else deadline)
        welcome = connection.welcome
        pool.give_back(connection)
        return welcome

    def close(self) -> None:
        """Close all connections, for good. What is under way in other threads may end."""
        self._is_closed = True
        self.drop()

    def drop(self) -> None:
        """Close all connections; who asks again gets new ones."""
        pools, self._pools = self._pools, {}
        for pool in list(pools.values()):
            pool.close()

    def __enter__(self) -> KvConnections:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
