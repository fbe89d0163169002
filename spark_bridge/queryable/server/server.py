"""``KvStateServer``: the TCP server of a host that answers queries of its state (Flink's class of that name).

Each connection has a thread. Lookups spend their time in RocksDB and Arrow, which let other threads run.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from time import time_ns
from typing import TYPE_CHECKING, Any, get_args

from backends.background_loop import failing_loops
from spark_bridge.exceptions import (
    AccessDeniedError,
    OutOfScopeError,
    RequestError,
    RequestLimitError,
    TooManyRequestsError,
)
from spark_bridge.queryable import protocol
from spark_bridge.queryable.server import framed_socket
from spark_bridge.queryable.server.limits import AdmissionControl, RequestLimits, RequestStatistics, seconds_left
from spark_bridge.queryable.server.request_handler import RequestHandler, ServerContext

if TYPE_CHECKING:
    from spark_bridge.queryable.server.tokens import TokenVerifier

# One connection of a ``KvStateServer``: the handshake with its token, then one request after the other.


log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
"""A client must have sent its ``Hello`` within this many seconds."""
MAX_HELLO_BYTES = 4096
UNREADABLE = "unreadable"

_KINDS: tuple[type[Any], ...] = get_args(protocol.Request)
VERBS: dict[type[Any], str] = {kind: str(kind.__struct_config__.tag) for kind in _KINDS if kind is not protocol.Hello}
"""The names of requests in statistics and metrics: their tags on the wire."""


class ServerConnection:
    """Answers one client, in one thread, until the client leaves, sends bytes without meaning, or the server stops."""

    def __init__(self, server: ServerContext, connected: socket.socket) -> None:
        self._server = server
        self._limits = server.limits
        buffered, wait_seconds = server.admission.buffered_bytes, server.limits.wait_seconds
        self._frames = framed_socket.FramedSocket(connected, buffered, wait_seconds)
        self._handler = RequestHandler(server, self._frames)
        self._is_welcome = False

    def serve(self) -> None:
        """Answer requests until the connection is over. Raises nothing that a client can cause."""
        try:
            if self._greet():
                while self._serve_one() and not self._server.stopping.is_set():
                    pass
        except framed_socket.ClientGoneError as error:
            log.debug("A connection ended: %s", error)

    def refuse(self, error: Exception) -> None:
        try:
            self._fail(error)
            self._frames.linger(MAX_HELLO_BYTES)
        except framed_socket.ClientGoneError:
            log.debug("A client that was refused left first")

    def close(self) -> None:
        self._frames.close()
        if self._is_welcome:
            self._is_welcome = False
            self._server.admission.connections.release()

    def _greet(self) -> bool:
        """Return whether the token in the first frame is valid, before anything else of the client is read."""
        started = time.monotonic()
        try:
            try:
                received = self._frames.receive(MAX_HELLO_BYTES, HELLO_SECONDS, HELLO_SECONDS)
                if received is None:
                    return False
                hello = decoded_request(received[0])
            except (RequestError, RequestLimitError, TooManyRequestsError, framed_socket.IdleClientError) as error:
                raise AccessDeniedError(
                    f"A connection begins with a Hello and a token, within {HELLO_SECONDS:g} s: {error}"
                ) from error
            if not isinstance(hello, protocol.Hello):
                raise AccessDeniedError("A connection begins with a Hello and a token.")
            self._handler.authenticate(hello.token, started)
            if hello.protocol != protocol.PROTOCOL:
                raise RequestError(
                    f"The client speaks protocol {hello.protocol}, this host {protocol.PROTOCOL}: use the same "
                    "ray-statestore for both."
                )
            # Only now, so that clients without a token take no place of those with one.
            self._server.admission.connections.acquire(0.0)
            self._is_welcome = True
        except framed_socket.ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - sent to the client, and logged
            self._observe("", "hello", started, failed=True)
            self._fail(error)
            self._frames.linger(MAX_HELLO_BYTES)
            return False
        host_id, limits = self._server.host_id, self._limits
        most = (limits.max_request_bytes, limits.max_keys)
        self._handler.send(protocol.Welcome(protocol.PROTOCOL, host_id, *most, time_ns() // 1000))
        self._observe("", "hello", started)
        return True

    def _serve_one(self) -> bool:
        """Answer the next request; return whether another one may follow."""
        limits = self._limits
        try:
            received = self._frames.receive(
                limits.max_request_bytes + protocol.MAX_HEADER_BYTES, limits.idle_seconds, limits.transfer_seconds
            )
        except framed_socket.IdleClientError:
            return False
        except (RequestError, RequestLimitError, TooManyRequestsError) as error:
            self._observe("", UNREADABLE, time.monotonic(), failed=True)
            self._fail(error)
            self._frames.linger()
            return False
        if received is None:
            return False
        header, body = received
        started = time.monotonic()
        operator, verb, failed = "", UNREADABLE, True
        try:
            request = decoded_request(header)
            verb = VERBS.get(type(request), verb)
            of_operator = request.scan if type(request) is protocol.CountRequest else request
            operator = getattr(of_operator, "operator", None) or getattr(of_operator, "view", None) or ""
            self._handler.check_token(started)
            self._handler.handle(request, body)
            failed = False
        except framed_socket.ClientGoneError:
            failed = False  # a client that has seen enough of a scan leaves, too
            raise
        except Exception as error:  # noqa: BLE001 - sent to the client, and logged
            self._fail(error)
            if isinstance(error, AccessDeniedError) and not isinstance(error, OutOfScopeError):
                self._frames.linger()
                return False
        finally:
            self._observe(operator, verb, started, failed)
        return True

    def _fail(self, error: Exception) -> None:
        self._handler.send(framed_socket.failure_of(error))

    def _observe(self, operator: str, verb: str, started: float, failed: bool = False) -> None:
        self._server.statistics.observe(operator, verb, time.monotonic() - started, failed)


def decoded_request(header: memoryview) -> protocol.Request:
    """Return the request of a header. Raises ``RequestError`` for other bytes."""
    try:
        request: protocol.Request = protocol.decode_request(header)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, and so are those of UTF-8
        raise RequestError(f"The request is malformed: {error}") from error
    return request


BACKLOG = 128
MAX_UNAUTHENTICATED = 64
"""Connections whose clients have not shown a valid token yet; they do not count for ``max_connections``."""
REFUSED_AT_ONCE = 16
"""So many clients beyond ``MAX_UNAUTHENTICATED`` receive the reason of the refusal; others find a closed connection."""
SHUTDOWN_SECONDS = 10.0
ACCEPT_SECONDS = 1.0
ACCEPT_AGAIN_SECONDS = 0.1
LIMITS_REMEDY = "Look at the limits of that process (ulimit -a) and at its log."
"""The accepting thread waits so long at a time: it sees the end also where closing the listener does not wake it."""


class KvStateServer:
    """Answers queries at ``server_address`` from ``reads``.

    ``port`` 0 takes a free port, which the server keeps when started again. ``tokens`` decides which clients may ask.
    The ``Welcome`` sends ``host_id`` to clients. With ``tls``, only encrypted connections are answered. Raises
    ``OSError`` if the address cannot be bound. ``_lock`` guards the connections and the running requests.
    """

    def __init__(
        self,
        reads: protocol.ServedReads,
        tokens: TokenVerifier,
        *,
        ip: str,
        port: int = 0,
        limits: RequestLimits = RequestLimits(),  # noqa: B008 - frozen
        tls: ssl.SSLContext | None = None,
        host_id: str = "",
    ) -> None:
        self.statistics = RequestStatistics()
        self._reads = reads
        self._tokens = tokens
        self._limits = limits
        self._tls = tls
        self._host_id = host_id
        self._ip = ip
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._acceptor: threading.Thread | None = None
        self._running: ServerContext | None = None
        self._listener: socket.socket | None = self._bind(port)
        self._port = int(self._listener.getsockname()[1])

    @property
    def server_address(self) -> str:
        """The address where clients connect, "ip:port". Known before ``start``."""
        return f"[{self._ip}]:{self._port}" if ":" in self._ip else f"{self._ip}:{self._port}"

    def start(self) -> None:
        """Begin to answer, unless the server runs; after ``shutdown`` at the same address, or raise ``OSError``."""
        with self._lock:
            if self._acceptor is not None:
                return
            listener = self._listener or self._bind(self._port)
            listener.listen(BACKLOG)
            listener.settimeout(ACCEPT_SECONDS)
            self._listener = listener
            limits, admission = self._limits, AdmissionControl(self._limits)
            running = ServerContext(
                self._reads, self._tokens, limits, self.statistics, self._host_id, self.describe, admission
            )
            self._running = running
            name, args = f"statestore-queries-{self._port}", (listener, running)
            self._acceptor = threading.Thread(target=self._accept, args=args, name=name, daemon=True)
            self._acceptor.start()

    def shutdown(self) -> None:
        """Close port and connections, and end all threads: within 10 s, unless the store hangs. May be repeated."""
        with self._lock:
            listener, acceptor, running = self._listener, self._acceptor, self._running
            self._listener = self._acceptor = self._running = None
        if running is not None:
            running.stopping.set()
        if listener is not None:
            # Some systems say "not connected"; the accepting thread sees the end by itself.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        if acceptor is not None:
            acceptor.join(seconds_left(deadline))
        if listener is not None:
            listener.close()
        with self._lock:
            threads = list(self._connections)
            for connected in self._connections.values():
                # This ends every wait of its thread. The method of SSLSocket would also remove the encryption, while
                # the thread uses it.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)
        for thread in threads:
            thread.join(seconds_left(deadline))
        left = [t.name for t in threads if t.is_alive()]
        if left:
            some, seconds = ", ".join(left[:5]), SHUTDOWN_SECONDS
            what = "%d connections still answer a request %.0f s after the shutdown of %s: %s"
            log.warning(what, len(left), seconds, self.server_address, some)

    def describe(self, request: protocol.DescribeRequest) -> dict[str, Any]:
        """Return what ``reads`` describe, and the counts as ``requests``. A proxy overrides it for ``forward``."""
        described = self._reads.describe(request.operator, request.query)
        return {**described, "requests": self.statistics.snapshot(request.operator)}

    @property
    def num_connections(self) -> int:
        """The number of connections now."""
        return len(self._connections)

    def _bind(self, port: int) -> socket.socket:
        listener = socket.socket(socket.AF_INET6 if ":" in self._ip else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._ip, port))
        except OSError:
            listener.close()
            raise
        return listener

    def _accept(self, listener: socket.socket, running: ServerContext) -> None:
        while not running.stopping.is_set():
            try:
                self._accept_one(listener, running)
            except TimeoutError:  # no client has connected
                failing_loops.recovered(self)
            except Exception as error:  # noqa: BLE001 - it usually passes, such as too many open files or threads
                if not running.stopping.wait(ACCEPT_AGAIN_SECONDS):
                    log.warning("A connection to %s could not be accepted: %s", self.server_address, error)
                    what = f"accept connections of query clients at {self.server_address}"
                    failing_loops.failed(self, what, LIMITS_REMEDY, error)
            else:
                failing_loops.recovered(self)
        failing_loops.recovered(self)

    def _accept_one(self, listener: socket.socket, running: ServerContext) -> None:
        connected, _ = listener.accept()
        unauthenticated = len(self._connections) - running.admission.connections.taken
        if unauthenticated >= MAX_UNAUTHENTICATED + REFUSED_AT_ONCE:
            connected.close()
            return
        args = (connected, running, unauthenticated < MAX_UNAUTHENTICATED)
        thread = threading.Thread(target=self._serve, args=args, name="statestore-query", daemon=True)
        with self._lock:
            self._connections[thread] = connected
        try:
            thread.start()
        except BaseException:  # no more threads
            with self._lock:
                del self._connections[thread]
            connected.close()
            raise

    def _serve(self, connected: socket.socket, running: ServerContext, is_welcome: bool) -> None:
        connection: ServerConnection | None = None
        this = threading.current_thread()
        try:
            if self._tls is not None:
                connected.settimeout(HELLO_SECONDS)
                connected = self._tls.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    self._connections[this] = connected
                if running.stopping.is_set():
                    return  # the shutdown has woken the plain socket, not this one
                connected.do_handshake()
            connection = ServerConnection(running, connected)
            if running.stopping.is_set():
                return
            if is_welcome:
                connection.serve()
            else:
                waiting = f"{MAX_UNAUTHENTICATED} clients of this host have yet to say who they are, as many as may"
                connection.refuse(TooManyRequestsError(f"{waiting}; try again, or ask other hosts."))
        except OSError as error:  # in the handshake: the client speaks no TLS, or another version, or is gone
            log.debug("A connection was not made: %s", error)
            if isinstance(error, ssl.SSLError) and connection is None:
                framed_socket.refuse_handshake(connected, error)
        except Exception:
            log.exception("A connection ended with an error")
        finally:
            with self._lock:
                # Under the lock: ``shutdown`` must not wake another connection with the same file descriptor.
                if connection is not None:
                    connection.close()
                else:
                    connected.close()
                del self._connections[this]
