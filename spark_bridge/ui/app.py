"""The page as an ASGI application: access, limits, and addresses."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backends.storage.requests import STANDARD, Prices
from spark_bridge.exceptions import STATESTORE_ERRORS, AccessDeniedError, HostUnavailableError, OutOfScopeError
from spark_bridge.overview.model import overview_within
from spark_bridge.queryable.server.tokens import Grant, TokenVerifier
from spark_bridge.queryable.sql.sql import SqlLimits
from spark_bridge.ui import cluster_pages, requests, state_pages
from spark_bridge.ui.live import PageWatches

# HTTP for the page: headers that keep browsers in check, and forms of limited size.


MAX_FORM_BYTES = 64 << 10
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
    """ASGI middleware that adds security headers to every answer."""

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


async def own_form(request: Request, secret: str) -> Mapping[str, str] | Response:
    """Return the fields of a form that a page of ours has sent; else the refusal. ``secret`` is that of the page."""
    form = await form_of(request)
    if isinstance(form, Response):
        return form
    refusal = requests.refusal_of_form(request.headers, secret, form.get("form_token", ""))
    return form if refusal is None else PlainTextResponse(refusal, 403)


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
        return PlainTextResponse(f"The form is larger than {MAX_FORM_BYTES} bytes.", 413, {"Connection": "close"})
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=200, errors="replace"))
    except (UnicodeDecodeError, ValueError):
        return PlainTextResponse("The request is not a form.", 400)


async def _body(request: Request) -> bytes | None:
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > MAX_FORM_BYTES:
            return None
    return bytes(parts)


STATIC = Path(__file__).with_name("static")
SEEN = {
    "/": cluster_pages.overview,
    "/query": cluster_pages.query,
    "/operator": cluster_pages.operator,
    "/operator/hottest": state_pages.hottest,
    "/hosts": cluster_pages.hosts,
    "/features": cluster_pages.feature_views,
    "/keys": state_pages.keys,
    "/scan": state_pages.scan,
    "/scan.csv": state_pages.scan_csv,
    "/sql": state_pages.sql,
    "/savepoints": cluster_pages.savepoints_page,
    "/savepoint": cluster_pages.savepoint_page,
}
"""Pages to show, by address."""
POSTED = {
    "/sql": state_pages.sql,
    "/sql.csv": state_pages.sql_csv,
    "/savepoints": cluster_pages.trigger,
    "/savepoint": cluster_pages.check,
}
"""Forms that are sent, by address."""
ACTING = (cluster_pages.trigger, cluster_pages.check)
"""Forms that only administrators may send."""
OF_QUERIES = (cluster_pages.savepoints_page, cluster_pages.savepoint_page, *ACTING)
"""Pages and forms about all operators of a query; a token for some operators or views does not open them."""
OF_CLUSTER = (cluster_pages.hosts,)
"""Pages about all queries, which only tokens without a scope open."""
MAX_PAGE_REQUESTS = 32
"""The most requests that are answered at once, without watches; each may have a thread."""
SESSION_SECONDS = 12 * 3600
_NEXT = re.compile(r"/(?![/\\])[\x21-\x7e]*")

PageView = Callable[[requests.PageCall], Response]


def create_ui(
    system: requests.System,
    verifier: TokenVerifier,
    own: requests.OwnToken | None = None,
    lifespan: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    prices: Prices = STANDARD,
    sql_limits: SqlLimits | None = None,
) -> ASGIApp:
    """Return the page of a system.

    ``verifier`` checks the tokens of people who sign in; ``own`` is the token of the process itself, if its address
    may sign a person in. ``lifespan`` makes a context manager that is open as long as the application runs by itself.
    ``prices`` convert requests to storage to dollars. ``sql_limits`` are those of all SQL
    statements that run at once, together (default: ``PAGE_SQL``).
    """

    page = _Page(system, verifier, own, prices, sql_limits)
    routes = [
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/signin", page.sign_in, methods=["GET", "POST"]),
        Route("/signout", page.sign_out, methods=["POST"]),
        Route("/watch", page.watch),
        *(Route(path, page.endpoint_of(view)) for path, view in SEEN.items()),
        *(Route(path, page.endpoint_of(view, is_form=True), methods=["POST"]) for path, view in POSTED.items()),
    ]
    return SafeHeaders(
        Starlette(routes=routes, exception_handlers={404: _not_found}, lifespan=lifespan and (lambda _: lifespan()))
    )


@dataclass(eq=False, repr=False)
class _Page:
    _system: requests.System
    _verifier: TokenVerifier
    _own: requests.OwnToken | None
    _prices: Prices
    _sql_limits: SqlLimits | None
    _requests: int = 0

    def __post_init__(self) -> None:
        self._overviews = requests.SharedOverview(self._system.overview)
        self._watches = PageWatches()

    # -- pages ---------------------------------------------------------------------------------

    def endpoint_of(self, view: PageView, *, is_form: bool = False) -> Callable[[Request], Any]:
        """Return the endpoint of a view that only reads, or of a form."""

        async def endpoint(request: Request) -> Response:
            try:
                grant = self._granted(request)
            except AccessDeniedError as error:
                return self._refused(request, error)
            form = await own_form(request, _token(request)) if is_form else {}
            if isinstance(form, Response):
                return form
            if view in ACTING and not grant.admin:
                return PlainTextResponse("This needs the token of an administrator; yours may only look.", 403)
            return await self._answer(request, grant, view, form)

        return endpoint

    async def _answer(self, request: Request, grant: Grant, view: PageView, form: Mapping[str, str]) -> Response:
        scope = grant.scope
        if (view in OF_CLUSTER and not scope.is_all) or (view in OF_QUERIES and not scope.has_whole_queries):
            return PlainTextResponse(
                f"Your token shows a part of the cluster ({scope.in_words()}), not this page.", 403
            )
        if self._requests >= MAX_PAGE_REQUESTS:
            return PlainTextResponse(f"{MAX_PAGE_REQUESTS} requests are being answered, the limit; try again.", 429)
        self._requests += 1
        try:
            return await run_in_threadpool(self._viewed, request, grant, view, form)
        finally:
            self._requests -= 1

    def _viewed(self, request: Request, grant: Grant, view: PageView, form: Mapping[str, str]) -> Response:
        call = self._call(request, grant, form)
        try:
            return view(call)
        except LookupError as error:
            return call.render("problem.html", 404, problem=str(error.args[0]) if error.args else "There is nothing.")
        except STATESTORE_ERRORS as error:
            return call.render("problem.html", 403 if isinstance(error, OutOfScopeError) else 400, problem=str(error))

    def _call(self, request: Request, grant: Grant, form: Mapping[str, str]) -> requests.PageCall:
        seen = self._overviews.get()
        return requests.PageCall(
            self._system,
            replace(seen, overview=overview_within(seen.overview, grant.scope)),
            grant,
            _base(request),
            _path(request),
            _token(request),
            dict(request.query_params),
            form,
            self._prices,
            self._sql_limits,
        )

    async def watch(self, request: Request) -> Response:
        """Answer with the changes of a key as they come (server-sent events)."""
        try:
            grant = self._granted(request)
        except AccessDeniedError as error:
            return PlainTextResponse(str(error), 401)
        try:
            call = await run_in_threadpool(self._call, request, grant, {})
            last = request.headers.get("last-event-id", "")
            return await self._watches.stream(call, last, lambda: self._granted(request))
        except LookupError as error:
            return PlainTextResponse(str(error), 404)
        except STATESTORE_ERRORS as error:
            return PlainTextResponse(str(error), 400)

    def _granted(self, request: Request) -> Grant:
        """Return the rights of the request. Raises ``AccessDeniedError``."""
        try:
            return self._verifier.verify(_token(request))
        except HostUnavailableError as error:
            raise AccessDeniedError(str(error)) from error

    def _refused(self, request: Request, error: AccessDeniedError) -> Response:
        is_form = "text/html" in request.headers.get("accept", "") and "authorization" not in request.headers
        if not is_form:
            return PlainTextResponse(str(error), 401, {"WWW-Authenticate": "Bearer"})
        asked = _path(request) + (f"?{request.url.query}" if request.url.query else "")
        following = asked if request.method == "GET" and asked != "/" else ""
        return self._sign_in_page(request, "" if not _token(request) else str(error), following, 401)

    # -- signing in and out --------------------------------------------------------------------

    async def sign_in(self, request: Request) -> Response:
        """Show the form to sign in, take it, or take the code of the address."""
        if request.method == "GET":
            code = request.query_params.get("code", "")
            token = self._own.exchanged(code) if code and self._own is not None else None
            if token is not None:
                return self._signed_in(request, token, "/")
            problem = "The code of this address was used already, or is of an earlier start." if code else ""
            return self._sign_in_page(request, problem, "", 401 if code else 200)
        form = await own_form(request, request.cookies.get(requests.VISIT_COOKIE, ""))
        if isinstance(form, Response):
            return form
        token = form.get("token", "").strip()
        following = form.get("next", "")
        try:
            grant = self._verifier.verify(token)
        except (AccessDeniedError, HostUnavailableError) as error:
            return self._sign_in_page(request, str(error), following, 401)
        if not grant.read_only:
            problem = "This is the token of the cluster's processes. For people: statestore token issue --admin."
            return self._sign_in_page(request, problem, following, 401)
        return self._signed_in(request, token, following)

    def _signed_in(self, request: Request, token: str, following: str) -> Response:
        path = following if _NEXT.fullmatch(following) else "/"
        answer = RedirectResponse(_base(request) + path, 303)
        self._set_cookie(request, answer, requests.SESSION_COOKIE, token)
        return answer

    def _sign_in_page(self, request: Request, problem: str, following: str, status: int) -> Response:
        visit = request.cookies.get(requests.VISIT_COOKIE) or secrets.token_urlsafe(18)
        answer = requests.plain_page(
            "signin.html",
            status,
            base=_base(request),
            problem=problem,
            following=following,
            place=self._system.place,
            is_live=self._system.is_live,
            form_token=requests.form_token(visit),
        )
        self._set_cookie(request, answer, requests.VISIT_COOKIE, visit)
        return answer

    async def sign_out(self, request: Request) -> Response:
        form = await own_form(request, _token(request))
        if isinstance(form, Response):
            return form
        answer = RedirectResponse(_base(request) + "/signin", 303)
        answer.delete_cookie(requests.SESSION_COOKIE, path=_base(request) or "/")
        return answer

    @staticmethod
    def _set_cookie(request: Request, answer: Response, name: str, value: str) -> None:
        answer.set_cookie(
            name,
            value,
            max_age=SESSION_SECONDS,
            path=_base(request) or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )


async def _not_found(request: Request, _: Exception) -> Response:
    return PlainTextResponse("This page does not exist.", 404)


def _token(request: Request) -> str:
    return requests.token_of_request(request.headers, request.cookies)


def _base(request: Request) -> str:
    return str(request.scope.get("root_path", "")).rstrip("/")


def _path(request: Request) -> str:
    path, base = str(request.scope["path"]), _base(request)
    return path[len(base) :] if base and path.startswith(base) else path
