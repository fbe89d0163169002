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
from typing import TYPE_CHECKING, Any

from backends.background_loop import failing_loops
from spark_bridge.exceptions import TooManyRequestsError
from spark_bridge.queryable.protocol.messages import DescribeRequest
from spark_bridge.queryable.protocol.state_reads import StateReads
from spark_bridge.queryable.server.answering.request_handler import ServerContext
from spark_bridge.queryable.server.connection.tls_refusal import refuse_handshake
from spark_bridge.queryable.server.limits.admission import AdmissionControl, seconds_left
from spark_bridge.queryable.server.limits.request_limits import RequestLimits
from spark_bridge.queryable.server.limits.request_statistics import RequestStatistics
from spark_bridge.queryable.server.server_connection import HELLO_SECONDS, ServerConnection

if TYPE_CHECKING:
    from spark_bridge.queryable.server.tokens.token_verifier import TokenVerifier

log = logging.getLogger(__name__)

BACKLOG = 128
MAX_UNAUTHENTICATED = 64
"""Connections whose clients have not shown a valid token yet; they count apart from ``max_connections``."""
REFUSED_AT_ONCE = 16
"""Clients beyond ``MAX_UNAUTHENTICATED`` that are told why they are refused; further ones only find the connection
closed.
"""
SHUTDOWN_SECONDS = 10.0
ACCEPT_SECONDS = 1.0
ACCEPT_AGAIN_SECONDS = 0.1
LIMITS_REMEDY = "Look at the limits of that process (ulimit -a) and at its log."
"""The accepting thread waits this many seconds at a time: so it sees the end also where closing the listener does not
wake it.
"""


class KvStateServer:
    """Answers queries at ``server_address`` from ``reads``.

    ``port`` 0 takes a free port, which the server keeps when started again. ``tokens`` decides which clients may ask.
    Clients are told ``host_id`` in the ``Welcome``. With ``tls``, only encrypted connections are answered. Raises
    ``OSError`` if the address cannot be bound. ``_lock`` guards the connections and what runs now.
    """

    def __init__(
        self,
        reads: StateReads,
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
        self._connections: dict[threading.Thread, ServerConnection | socket.socket] = {}
        self._acceptor: threading.Thread | None = None
        self._running: ServerContext | None = None
        self._listener: socket.socket | None = self._bind(port)
        self._port = int(self._listener.getsockname()[1])

    @property
    def server_address(self) -> str:
        """The address where clients connect, "ip:port". Known before ``start``."""
        return f"[{self._ip}]:{self._port}" if ":" in self._ip else f"{self._ip}:{self._port}"

    def start(self) -> None:
        """Begin to answer; nothing happens if the server runs.

        After ``shutdown`` it listens at the same address again, or raises ``OSError``.
        """
        with self._lock:
            if self._acceptor is not None:
                return
            listener = self._listener or self._bind(self._port)
            listener.listen(BACKLOG)
            listener.settimeout(ACCEPT_SECONDS)
            self._listener = listener
            running = ServerContext(
                self._reads,
                self._tokens,
                self._limits,
                self.statistics,
                self._host_id,
                self.describe,
                AdmissionControl(self._limits),
            )
            self._running = running
            self._acceptor = threading.Thread(
                target=self._accept, args=(listener, running), name=f"statestore-queries-{self._port}", daemon=True
            )
            self._acceptor.start()

    def shutdown(self) -> None:
        """Close the port and all connections, and end all threads: within 10 s, unless the store itself hangs.

        May be repeated.
        """
        with self._lock:
            listener, acceptor, running = self._listener, self._acceptor, self._running
            self._listener = self._acceptor = self._running = None
        if running is not None:
            running.stopping.set()
        if listener is not None:
            with contextlib.suppress(
                OSError
            ):  # some systems say "not connected"; the accepting thread sees the end by itself
                listener.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        if acceptor is not None:
            acceptor.join(seconds_left(deadline))
        if listener is not None:
            listener.close()
        with self._lock:
            threads = list(self._connections)
            for connection in self._connections.values():
                if isinstance(connection, ServerConnection):
                    connection.wake()
                else:
                    with contextlib.suppress(OSError):
                        socket.socket.shutdown(connection, socket.SHUT_RDWR)
        for thread in threads:
            thread.join(seconds_left(deadline))
        left = [t.name for t in threads if t.is_alive()]
        if left:
            log.warning(
                "%d connections still answer a request %.0f s after the shutdown of %s: %s",
                len(left),
                SHUTDOWN_SECONDS,
                self.server_address,
                ", ".join(left[:5]),
            )

    def describe(self, request: DescribeRequest) -> dict[str, Any]:
        """Return the description of ``reads``, and as ``requests`` the counts of this server's answers.

        A proxy overrides it for ``forward``.
        """
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
            except Exception as error:  # noqa: BLE001 - it mostly passes, such as too many open files or threads
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
        thread = threading.Thread(
            target=self._serve,
            args=(connected, running, unauthenticated < MAX_UNAUTHENTICATED),
            name="statestore-query",
            daemon=True,
        )
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
            with self._lock:
                self._connections[this] = connection
            if running.stopping.is_set():
                return
            if is_welcome:
                connection.serve()
            else:
                connection.refuse(
                    TooManyRequestsError(
                        f"{MAX_UNAUTHENTICATED} clients of this host have yet to say who they are, as many as may; "
                        "try again, or "
                        "ask other hosts."
                    )
                )
        except OSError as error:  # in the handshake: the client speaks no TLS, or another version, or is gone
            log.debug("A connection was not made: %s", error)
            if isinstance(error, ssl.SSLError) and connection is None:
                refuse_handshake(connected, error)
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
