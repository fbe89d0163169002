"""HTTP for the page: headers that keep browsers in check, and forms of limited size."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_FORM_BYTES = 64 << 10
FORM_SECONDS = 10.0
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    # With "no-referrer" a browser would send forms with "Origin: null".
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class SafeHeaders:
    """ASGI middleware that gives every answer the headers that keep browsers in check."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection; see ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.lower().encode(), value.encode()) for name, value in PAGE_HEADERS.items()]
                named = {name for name, _ in message.get("headers", ())}
                caching = b"no-cache" if "/static/" in scope["path"] else b"no-store"
                more = [] if b"cache-control" in named else [(b"cache-control", caching)]
                message["headers"] = [*message.get("headers", ()), *headers, *more]
            await send(message)

        await self._app(scope, receive, sent)


async def form_of(request: Request) -> Mapping[str, str] | Response:
    """Return the fields of a form, or the refusal of one that is too large, too slow, or no form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        return PlainTextResponse("Forms are sent as application/x-www-form-urlencoded.", 415)
    try:
        body = await asyncio.wait_for(_body(request), FORM_SECONDS)
    except asyncio.TimeoutError:
        return PlainTextResponse("The form did not come in time.", 408, {"Connection": "close"})
    if body is None:
        return PlainTextResponse(f"The form is larger than {MOST_FORM_BYTES} bytes.", 413, {"Connection": "close"})
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=200, errors="replace"))
    except (UnicodeDecodeError, ValueError):
        return PlainTextResponse("This is no form.", 400)


async def _body(request: Request) -> bytes | None:
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > MOST_FORM_BYTES:
            return None
    return bytes(parts)
