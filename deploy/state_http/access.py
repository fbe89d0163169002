"""The check before every route: a valid token, a body of limited size, and a limited number of requests at once."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from deploy.state_http import problems
from deploy.state_http.limits import HttpLimits
from spark_bridge.exceptions import AccessDeniedError, HostUnavailableError
from spark_bridge.queryable.server.tokens.token_verifier import MAX_TOKEN, TokenVerifier

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CHALLENGE = 'Basic realm="ray-statestore, the token is the password", charset="UTF-8"'
LAG_HEADER = b"x-statestore-lag-seconds"
API_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class Gate:
    """ASGI middleware that passes on requests with a valid token, of limited size, and a limited number at once.

    What is below the path ``page`` is passed on as it is, for the page has checks and limits of its own; so is the
    root, which leads there. Where ``lag()`` is not 0, answers have it as a header.
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

    def _is_of_page(self, scope: Scope) -> bool:
        if self._page is None:
            return False
        path, base = scope["path"], scope.get("root_path", "").rstrip("/")
        own = path[len(base) :] if base and path.startswith(base) else path
        return own in ("", "/", self._page) or own.startswith(f"{self._page}/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection; see ASGI."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._is_of_page(scope)):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # A WebSocket is not accepted: no route has one.
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            self._verifier.verify(token_of_header(_header(scope, b"authorization")))
        except AccessDeniedError as error:
            body = problems.problem(401, str(error), type(error).__name__)
            await _answer(body, scope, receive, send, {"WWW-Authenticate": CHALLENGE})
            return
        except HostUnavailableError as error:
            await _answer(problems.problem_of(error), scope, receive, send)
            return
        if self._requests >= self._limits.max_requests:
            detail = f"{self._requests} requests are being answered, which is the limit; try again later."
            await _answer(problems.problem(429, detail, "TooManyRequestsError"), scope, receive, send)
            return
        self._requests += 1
        try:
            await self._pass_on(scope, receive, send)
        finally:
            self._requests -= 1

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            await _answer(problems.problem(408, detail, "RequestLimitError"), scope, receive, send, close)
            return
        if body is None:
            detail = f"The body is larger than {most} bytes, the limit of a request."
            await _answer(problems.problem(413, detail, "RequestLimitError"), scope, receive, send)
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
    body: dict[str, Any], scope: Scope, receive: Receive, send: Send, headers: dict[str, str] | None = None
) -> None:
    plain = {name.decode(): value.decode() for name, value in API_HEADERS}
    await problems.response(body, {**plain, **(headers or {})})(scope, receive, send)


def _header(scope: Scope, name: bytes) -> str:
    found = [value for key, value in scope.get("headers", ()) if key.lower() == name]
    # With several headers of the name it is not clear which one counts.
    return found[0].decode("latin-1") if len(found) == 1 else ""


def token_of_header(authorization: str) -> str:
    """Return the token of an ``Authorization`` header: that of ``Bearer``, or the password of ``Basic``; else "".

    Raises ``AccessDeniedError`` for a header that is neither.
    """
    if not authorization:
        return ""
    scheme, _, given = authorization.partition(" ")
    given = given.strip()
    if len(given) <= MAX_TOKEN and scheme.lower() == "bearer":
        return given
    if len(given) <= MAX_TOKEN and scheme.lower() == "basic":
        try:
            return base64.b64decode(given, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError) as error:
            raise AccessDeniedError("The Authorization header is no HTTP Basic one: its base64 is broken.") from error
    raise AccessDeniedError(
        "The Authorization header is neither 'Bearer <token>' nor HTTP Basic with the token as the password."
    )
