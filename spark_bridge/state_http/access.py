"""The check before every route: a valid token, a body of limited size, and a limited number of requests at once."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from coordinator_actor.access_tokens import Scope
from spark_bridge import exceptions
from spark_bridge.queryable.client.async_results import AsyncSqlRows, AsyncStateScan
from spark_bridge.queryable.client.json_values import json_bytes
from spark_bridge.queryable.server.tokens import MAX_TOKEN, TokenVerifier

# The limits of the HTTP application: how much a request may ask for, and how many requests run at once.


class HttpLimits(BaseModel):
    """Limits of one replica.

    A request beyond a limit is answered 413 (too large), 429 (too many), 408 (body too slow) or 504 (answer takes too
    long).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_bytes: Annotated[int, Field(gt=0, description="Largest body of a request.")] = 8 << 20
    body_seconds: Annotated[float, Field(gt=0, description="Time limit for the arrival of a request's body.")] = 30.0
    max_keys: Annotated[int, Field(gt=0, description="Most keys of one lookup.")] = 100_000
    max_lookup_bytes: Annotated[int, Field(gt=0, description="Largest answer of one lookup, as Arrow has it.")] = (
        64 << 20
    )
    max_rows: Annotated[int, Field(gt=0, description="Most rows of one scan.")] = 10_000_000
    scan_seconds: Annotated[float, Field(gt=0, description="Longest time that a scan takes.")] = 300.0
    timeout: Annotated[
        float, Field(gt=0, description="How long an answer is waited for while hosts move or restart, in seconds.")
    ] = 10.0
    max_requests: Annotated[int, Field(gt=0, description="Requests at once, scans included.")] = 100
    max_scans: Annotated[int, Field(gt=0, description="Scans at once.")] = 4
    max_sql_rows: Annotated[int, Field(gt=0, description="Most rows of one SQL statement.")] = 1_000_000
    sql_seconds: Annotated[float, Field(gt=0, description="Longest time that a SQL statement takes.")] = 60.0
    max_sql: Annotated[int, Field(gt=0, description="SQL statements at once.")] = 2
    sql_memory_bytes: Annotated[
        int, Field(ge=64 << 20, description="Memory of all SQL statements together; each may use its share of max_sql.")
    ] = 1 << 30
    sql_threads: Annotated[int, Field(gt=0, description="Threads of one SQL statement.")] = 2
    sql_temp_bytes: Annotated[
        int, Field(ge=0, description="Temporary files of all SQL statements together, on the replica's disk.")
    ] = 0
    max_watches: Annotated[
        int, Field(gt=0, description="Watches at once; each counts as a request as long as it is open.")
    ] = 32
    heartbeat_seconds: Annotated[
        float, Field(gt=0, description="After this many seconds without a change a watch sends a heartbeat.")
    ] = 5.0


# Errors as ``application/problem+json`` (RFC 9457).


log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_SECONDS = 1
STATUS: list[tuple[type[exceptions.SparkBridgeError], int]] = [
    (exceptions.UnknownOperatorError, 404),
    (exceptions.UnknownKvStateIdError, 404),
    (exceptions.QueryEndedError, 409),
    (exceptions.StateVersionError, 409),
    (exceptions.StateTimeError, 409),
    (exceptions.StaleFeatureError, 409),
    (exceptions.UnknownKeyOrNamespaceError, 400),
    (exceptions.RequestLimitError, 413),
    (exceptions.RequestError, 400),
    (exceptions.OutOfScopeError, 403),
    (exceptions.TooManyRequestsError, 429),
    (exceptions.QueryTimeoutError, 504),
    # The hosts refused the application's own token: the caller cannot change that.
    (exceptions.AccessDeniedError, 503),
    (exceptions.HostUnavailableError, 503),
    (exceptions.ConnectionClosedError, 503),
    (exceptions.UnknownLocationError, 503),
    # A package that a route needs is not installed.
    (exceptions.EnvironmentProblemError, 501),
]
"""By error class, the HTTP status; the first class that fits decides."""
INTERNAL = "The application failed; its log says why."


class MissingKeyError(exceptions.QueryableStateError):
    """The state has nothing for a key: 404 over HTTP."""


def problem(status: int, detail: str, error: str | None = None, **more: Any) -> dict[str, Any]:
    """Return the body of an error. ``error`` is the Python client's error class: programs tell errors apart by it."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return body | ({} if error is None else {"error": error}) | more


def problem_of(error: Exception) -> dict[str, Any]:
    """Return the body for an error of the client; an unexpected error is not described in the body, but in the log."""
    if isinstance(error, MissingKeyError):
        return problem(404, str(error), "MissingKey")
    for kind, status in STATUS:
        if isinstance(error, kind):
            return problem(status, str(error), type(error).__name__)
    log.error("A request failed", exc_info=error)
    return problem(500, INTERNAL)


def response(body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Return an HTTP response with the body of an error."""
    retry = {"Retry-After": str(RETRY_AFTER_SECONDS)} if body["status"] in (429, 503) else {}
    return Response(json_bytes(body), body["status"], {**retry, **(headers or {})}, MEDIA_TYPE)


def add_handlers(app: FastAPI) -> None:
    """Make the application answer every error as ``application/problem+json``."""

    async def of_client(_: Request, error: Exception) -> Response:
        return response(problem_of(error))

    async def of_request(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        wrong = [{"where": ".".join(map(str, e["loc"])), "what": str(e["msg"])} for e in error.errors()]
        detail = "; ".join(f"{w['where']}: {w['what']}" for w in wrong)
        return response(problem(400, detail, "RequestError", errors=wrong))

    async def of_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return response(problem(error.status_code, str(error.detail)), error.headers)

    app.add_exception_handler(exceptions.SparkBridgeError, of_client)
    app.add_exception_handler(RequestValidationError, of_request)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, of_client)


CALLER_SCOPE: ContextVar[Scope] = ContextVar("statestore_caller")
"""The scope of the token of the request under way. Without one, as outside of ``Gate``, nothing is answered."""
Connection = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Connection, Receive, Send], Awaitable[None]]

CHALLENGE = 'Basic realm="ray-statestore, the token is the password", charset="UTF-8"'
LAG_HEADER = b"x-statestore-lag-seconds"
API_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class Gate:
    """ASGI middleware that passes on requests with a valid token, of limited size, and a limited number at once.

    Requests below the path ``page`` are passed on unchanged, because the page has its own checks and limits; so is the
    root, which leads there. If ``lag()`` is not 0, answers have it as a header.
    """

    def __init__(
        self,
        app: App,
        verifier: TokenVerifier,
        limits: HttpLimits,
        page: str | None = None,
        lag: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._app = app
        self._verifier = verifier
        self._limits = limits
        self._page = page
        self._lag = lag
        self._requests = 0

    def _is_of_page(self, scope: Connection) -> bool:
        if self._page is None:
            return False
        path, base = scope["path"], scope.get("root_path", "").rstrip("/")
        own = path[len(base) :] if base and path.startswith(base) else path
        return own in ("", "/", self._page) or own.startswith(f"{self._page}/")

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Answer one connection; see ASGI."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._is_of_page(scope)):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # A WebSocket is not accepted: no route has one.
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            grant = self._verifier.verify(token_of_header(_header(scope, b"authorization")))
        except exceptions.AccessDeniedError as error:
            body = problem(401, str(error), type(error).__name__)
            await _answer(body, scope, receive, send, {"WWW-Authenticate": CHALLENGE})
            return
        except exceptions.HostUnavailableError as error:
            await _answer(problem_of(error), scope, receive, send)
            return
        if self._requests >= self._limits.max_requests:
            detail = f"{self._requests} requests are being answered, which is the limit; try again later."
            await _answer(problem(429, detail, "TooManyRequestsError"), scope, receive, send)
            return
        self._requests += 1
        caller = CALLER_SCOPE.set(grant.scope)
        try:
            await self._pass_on(scope, receive, send)
        finally:
            CALLER_SCOPE.reset(caller)
            self._requests -= 1

    async def _pass_on(self, scope: Connection, receive: Receive, send: Send) -> None:
        most = self._limits.max_body_bytes
        stated = _header(scope, b"content-length")
        seconds = self._limits.body_seconds
        try:
            is_large = stated.isdigit() and int(stated) > most
            body = None if is_large else await asyncio.wait_for(_body(receive, most), seconds)
        except asyncio.TimeoutError:
            detail = f"The body did not come within {seconds:g} s, the limit of a request."
            # The rest of the body, if it comes later, must not be read as another request.
            close = {"Connection": "close"}
            await _answer(problem(408, detail, "RequestLimitError"), scope, receive, send, close)
            return
        if body is None:
            detail = f"The body is larger than {most} bytes, the limit of a request."
            await _answer(problem(413, detail, "RequestLimitError"), scope, receive, send)
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            # After the body only one more message comes: that the caller has left.
            return next(messages, None) or await receive()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                lag = self._lag()
                late = [(LAG_HEADER, f"{lag:.1f}".encode())] if lag else []
                message["headers"] = [*message.get("headers", ()), *API_HEADERS, *late]
            await send(message)

        await self._app(scope, replay, send_with_headers)


async def _body(receive: Receive, most: int) -> bytes | None:
    """Return the body of a request; None if it has more than ``most`` bytes."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


async def _answer(
    body: dict[str, Any], scope: Connection, receive: Receive, send: Send, headers: dict[str, str] | None = None
) -> None:
    plain = {name.decode(): value.decode() for name, value in API_HEADERS}
    await response(body, {**plain, **(headers or {})})(scope, receive, send)


def _header(scope: Connection, name: bytes) -> str:
    values = [value for key, value in scope.get("headers", ()) if key.lower() == name]
    # With several headers of the name it is not clear which one counts.
    return values[0].decode("latin-1") if len(values) == 1 else ""


def token_of_header(authorization: str) -> str:
    """Return the token of an ``Authorization`` header: that of ``Bearer``, or the password of ``Basic``; else "".

    Raises ``AccessDeniedError`` for a header that is neither.
    """
    if not authorization:
        return ""
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    if len(token) <= MAX_TOKEN and scheme.lower() == "bearer":
        return token
    if len(token) <= MAX_TOKEN and scheme.lower() == "basic":
        try:
            return base64.b64decode(token, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError) as error:
            raise exceptions.AccessDeniedError(
                "The Authorization header is not a HTTP Basic one: its base64 is broken."
            ) from error
    raise exceptions.AccessDeniedError(
        "The Authorization header is neither 'Bearer <token>' nor HTTP Basic with the token as the password."
    )


# A bounded number of reads at once; each ends even if its caller has left.


class BoundedReads:
    """The scans or the statements (``what``) of one replica; at most ``most`` run at once."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._under_way = 0
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Count a running read. Raises ``TooManyRequestsError``."""
        if self._under_way >= self._most:
            raise exceptions.TooManyRequestsError(
                f"{self._under_way} {self._what} are under way, which is the limit; try again later."
            )
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def close(self, rows: AsyncStateScan | AsyncSqlRows) -> None:
        """End a read, even for a caller that has left: that caller's task is cancelled and cannot wait for the end."""
        closing = asyncio.ensure_future(rows.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)
