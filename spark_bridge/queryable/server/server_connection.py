"""One connection of a ``KvStateServer``: the handshake with its token, then one request after the other."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

from spark_bridge.exceptions import AccessDeniedError, RequestError, RequestLimitError, TooManyRequestsError
from spark_bridge.queryable.protocol.messages import (
    MAX_HEADER_BYTES,
    PROTOCOL,
    AwaitRequest,
    ChangesRequest,
    CountRequest,
    DescribeRequest,
    Hello,
    KeyRowsRequest,
    LocateOperatorRequest,
    LookupRequest,
    OperatorsRequest,
    Request,
    ScanRequest,
    Welcome,
    decode_request,
)
from spark_bridge.queryable.server.answering.request_handler import RequestHandler, ServerContext
from spark_bridge.queryable.server.connection.client_session import ClientSession
from spark_bridge.queryable.server.connection.failures import failure_of
from spark_bridge.queryable.server.connection.framed_socket import ClientGoneError, FramedSocket, IdleClientError

log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
"""A client must have sent its ``Hello`` within this many seconds."""
MAX_HELLO_BYTES = 4096
UNREADABLE = "unreadable"

VERBS: dict[type[Any], str] = {
    LocateOperatorRequest: "locate",
    LookupRequest: "lookup",
    KeyRowsRequest: "rows",
    ScanRequest: "scan",
    CountRequest: "count",
    ChangesRequest: "changes",
    AwaitRequest: "await",
    OperatorsRequest: "operators",
    DescribeRequest: "describe",
}


class ServerConnection:
    """Answers one client, in one thread, until the client leaves, sends bytes without meaning, or the server stops."""

    def __init__(self, server: ServerContext, connected: socket.socket) -> None:
        self._server = server
        self._limits = server.limits
        self._frames = FramedSocket(connected, server.admission.buffered_bytes, server.limits.wait_seconds)
        self._session = ClientSession(self._frames, server.tokens)
        self._handler = RequestHandler(server, self._frames, self._session)
        self._is_welcome = False

    def serve(self) -> None:
        """Answer requests until the connection is over. Raises nothing that a client can cause."""
        try:
            if self._greet():
                while self._serve_one() and not self._server.stopping.is_set():
                    pass
        except ClientGoneError as error:
            log.debug("A connection ended: %s", error)

    def refuse(self, error: Exception) -> None:
        """Tell a client why it is not served."""
        try:
            self._fail(error)
            self._frames.linger(MAX_HELLO_BYTES)
        except ClientGoneError:
            log.debug("A client that was refused left first")

    def wake(self) -> None:
        """End every wait of the connection; from any thread."""
        self._frames.wake()

    def close(self) -> None:
        """Close the socket, and release what the connection holds."""
        self._frames.close()
        if self._is_welcome:
            self._is_welcome = False
            self._server.admission.connections.release()

    def _greet(self) -> bool:
        """Check the token in the first frame, before anything else of the client is read.

        Return whether it is valid.
        """
        started = time.monotonic()
        try:
            try:
                received = self._frames.receive(MAX_HELLO_BYTES, HELLO_SECONDS, HELLO_SECONDS)
                if received is None:
                    return False
                hello = decoded_request(received[0])
            except (RequestError, RequestLimitError, TooManyRequestsError, IdleClientError) as error:
                raise AccessDeniedError(
                    f"A connection begins with a Hello and a token, within {HELLO_SECONDS:g} s: {error}"
                ) from error
            if not isinstance(hello, Hello):
                raise AccessDeniedError("A connection begins with a Hello and a token.")
            self._session.authenticate(hello.token, started)
            if hello.protocol != PROTOCOL:
                raise RequestError(
                    f"The client speaks protocol {hello.protocol}, this host {PROTOCOL}: use the same ray-statestore "
                    "for both."
                )
            # Only now, so that clients without a token take no place of those with one.
            self._server.admission.connections.acquire(0.0)
            self._is_welcome = True
        except ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - the client is told, and the log
            self._observe("", "hello", started, failed=True)
            self._fail(error)
            self._frames.linger(MAX_HELLO_BYTES)
            return False
        limits = self._limits
        self._handler.send(Welcome(PROTOCOL, self._server.host_id, limits.max_request_bytes, limits.max_keys))
        self._observe("", "hello", started)
        return True

    def _serve_one(self) -> bool:
        """Answer the next request; return whether another one may follow."""
        limits = self._limits
        try:
            received = self._frames.receive(
                limits.max_request_bytes + MAX_HEADER_BYTES, limits.idle_seconds, limits.transfer_seconds
            )
        except IdleClientError:
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
            of_operator = request.scan if type(request) is CountRequest else request
            operator = getattr(of_operator, "operator", None) or ""
            self._session.check_token(started)
            self._handler.handle(request, body)
            failed = False
        except ClientGoneError:
            failed = False  # a client that has seen enough of a scan leaves, too
            raise
        except Exception as error:  # noqa: BLE001 - the client is told, and the log
            self._fail(error)
            if isinstance(error, AccessDeniedError):
                self._frames.linger()
                return False
        finally:
            self._observe(operator, verb, started, failed)
        return True

    def _fail(self, error: Exception) -> None:
        self._handler.send(failure_of(error))

    def _observe(self, operator: str, verb: str, started: float, failed: bool = False) -> None:
        self._server.statistics.observe(operator, verb, time.monotonic() - started, failed)


def decoded_request(header: memoryview) -> Request:
    """Return the request of a header. Raises ``RequestError`` for other bytes."""
    try:
        request: Request = decode_request(header)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, and so are those of UTF-8
        raise RequestError(f"The request is malformed: {error}") from error
    return request
