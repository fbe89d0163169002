"""The FastAPI application: routes, their description, and the page below ``/ui``."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from fastapi.security import HTTPBasic, HTTPBearer

from spark_bridge.overview.model import Overview, overview_within, to_plain
from spark_bridge.queryable.client import json_values
from spark_bridge.queryable.client.async_client import AsyncQueryableStateClient
from spark_bridge.queryable.client.json_values import json_bytes
from spark_bridge.queryable.server.tokens import TokenVerifier
from spark_bridge.state_http import access, models
from spark_bridge.state_http.access import Gate, HttpLimits
from spark_bridge.state_http.models import ARROW, CSV, JSON, LINES, arrow_stream
from spark_bridge.state_http.service import EVENT_STREAM, HttpWatches, Statements, StateService, while_there

VERSION_HEADER = "X-Statestore-Version"
VERSIONS_HEADER = "X-Statestore-Versions"
TIME_HEADER = "X-Statestore-Time"
TIMES_HEADER = "X-Statestore-Times"
PAGE = "/ui"
"""The path of the page. It checks tokens by itself, which browsers send in a cookie."""
DESCRIPTION = """
The state of running streams, read only. Every answer is of one version of all partitions: the last completed
checkpoint, unless `isolation` or `version` say otherwise. Where hosts of `serve_state(follow=True)` are late, answers
have the header `X-Statestore-Lag-Seconds`: the seconds since the query's storage was last looked at with success.

**Access.** Every request needs a token, as `Authorization: Bearer <token>` or as the password of HTTP Basic with any
user name; `statestore token issue` makes one.

**Values.** Integers beyond ±(2^53 - 1) and decimals are strings, timestamps and dates ISO 8601 strings, binary is
base64, NaN and infinities are the strings "NaN", "Infinity", "-Infinity". Maps whose keys are not strings are arrays of
`{"key": ..., "value": ...}`.

**Errors** are `application/problem+json`; `error` names the kind as the Python client does.
"""
_DOCUMENTED = {
    400: "A key, window, column or body that cannot be.",
    401: "No token, or one that is wrong, expired or revoked.",
    403: "The token is not for that operator or feature view.",
    404: "No such operator, feature view or state variable, or nothing there for the key.",
    409: "The query has ended, or the version cannot be read, or is older than the feature view allows.",
    413: "More than the limits allow.",
    429: "As many requests as are possible are being answered; see Retry-After.",
    503: "The hosts cannot be reached.",
    504: "No answer in time.",
}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {access.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    for status, text in _DOCUMENTED.items()
}
_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The rows, one JSON object in each line, or an Arrow IPC stream, as `Accept` says. If an error "
        'comes later, the last line is `{"problem": ...}` and the connection is cut before the body\'s end.',
        "content": {LINES: {"schema": {"type": "string"}}, ARROW: {"schema": {"type": "string", "format": "binary"}}},
        "headers": {
            VERSION_HEADER: {"description": "The version that all rows are of.", "schema": {"type": "integer"}},
            TIME_HEADER: {"description": "The time that rolling aggregates are of.", "schema": {"type": "string"}},
        },
    }
}
_TABLES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The rows, in the format that `Accept` asks for: one JSON document, JSON lines, CSV, or an "
        "Arrow IPC stream. If an error comes later, JSON has it as `problem`, and the connection is cut before the "
        "body's end.",
        "content": {
            JSON: {"schema": {"$ref": "#/components/schemas/SqlAnswer"}},
            LINES: {"schema": {"type": "string"}},
            CSV: {"schema": {"type": "string"}},
            ARROW: {"schema": {"type": "string", "format": "binary"}},
        },
        "headers": {
            VERSIONS_HEADER: {
                "description": "The versions read, as `query id=version`, with commas between.",
                "schema": {"type": "string"},
            },
            TIMES_HEADER: {
                "description": "The times of the rolling aggregates that were read, as `query id=time`, with commas "
                "between.",
                "schema": {"type": "string"},
            },
        },
    }
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events. `change` has the changed rows of a version, `end` reports that the query "
        "has ended, `problem` has an error. The `id` of an event names the last version that was sent completely, "
        "and the run of the query that made it: `Last-Event-ID` takes it as it is.",
        "content": {EVENT_STREAM: {"schema": {"type": "string"}}},
    }
}


def create_app(
    connect: Callable[[], Awaitable[AsyncQueryableStateClient]],
    verifier: TokenVerifier,
    limits: HttpLimits | None = None,
    lifespan: Callable[[], Any] | None = None,
    page: Callable[..., Any] | None = None,
) -> FastAPI:
    """Return the application.

    ``connect`` makes the query client, when a request needs it first; ``verifier`` checks the tokens of requests;
    ``lifespan`` makes an asynchronous context manager that is open as long as the application runs. ``page`` is the
    application of the page (``spark_bridge.ui.app``).
    """
    limits = limits or HttpLimits()
    service = StateService(connect, limits)
    statements = Statements(service.client, limits)
    watches = HttpWatches(service, verifier, limits)

    app = FastAPI(
        title="ray-statestore",
        summary="The state of running streams.",
        description=DESCRIPTION,
        version="1",
        docs_url=None,
        redoc_url=None,
        lifespan=None if lifespan is None else lambda _: lifespan(),
        responses=PROBLEMS,
        dependencies=[Depends(HTTPBearer(auto_error=False)), Depends(HTTPBasic(auto_error=False))],
    )
    access.add_handlers(app)

    if page is not None:
        app.mount(PAGE, page)
        app.add_route("/", _index, include_in_schema=False)

    @app.get("/v1/operators", response_model=models.OperatorList, summary="The operators of all running queries")
    async def operators() -> Response:
        return _json(await service.operators())

    @app.get(
        "/v1/operators/{operator}",
        response_model=models.OperatorDescription,
        summary="One operator: its columns, its hosts, its versions, and how requests went",
    )
    async def describe(operator: str, query: Annotated[str | None, Query(description=_QUERY)] = None) -> Response:
        return _json(await service.describe(operator, query))

    @app.get(
        "/v1/operators/{operator}/keys/{key:path}",
        response_model=models.KeyAnswer,
        summary="Get the state of one key",
        description="A key of one column is all of the path after `keys/`, percent-encoded. A key of several columns "
        "is their values in order with commas between; a value with a comma or double quote is enclosed in double "
        "quotes, as in CSV. Values are written as in JSON, without quotes; for values that do not fit into a path "
        "(null, empty path segments, structs) there is `lookup`.",
    )
    async def get(
        operator: str,
        key: str,
        query: Annotated[str | None, Query(description=_QUERY)] = None,
        state: Annotated[str | None, Query(description="The state variable, if the operator has several.")] = None,
        window: Annotated[str | None, Query(description="The window's start, or start/end, in ISO 8601.")] = None,
        isolation: models.Isolation = models.Isolation.completed,
        version: Annotated[int | None, Query(ge=0, description="A version that is still retained.")] = None,
        at: Annotated[str | None, Query(description=models.AT_TEXT)] = None,
    ) -> Response:
        named = {"query": query, "state": state, "isolation": isolation.value, "version": version}
        return _json(await service.get(operator, key, window, at, named))

    @app.post(
        "/v1/operators/{operator}/lookup",
        response_model=models.LookupAnswer,
        summary="Get the state of many keys",
        responses={200: {"content": {ARROW: {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def lookup(operator: str, body: models.LookupRequest, request: Request) -> Response:
        table, at = await service.lookup(operator, body)
        if _wants_arrow(request):
            return Response(await asyncio.to_thread(arrow_stream, table), media_type=ARROW, headers=_time_header(at))
        rows = await asyncio.to_thread(json_values.rows_to_json, table)
        answer = {"operator": operator, "rows": rows, **({} if at is None else {"at": json_values.to_json(at)})}
        return await asyncio.to_thread(_json, answer)

    @app.get(
        "/v1/features",
        response_model=models.FeatureViewList,
        summary="The feature views: owner, description, features, bound, and the age of their queries",
    )
    async def feature_views() -> Response:
        return _json(await service.feature_views())

    @app.post(
        "/v1/features/{view}",
        response_model=models.FeaturesAnswer,
        summary="Get the features of many entities, all of one version of each query",
        description="As an Arrow IPC stream, the answer has the versions and the time in headers, and no ages.",
        responses={200: {"content": {ARROW: {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def features(view: str, body: models.FeaturesRequest, request: Request) -> Response:
        rows = await service.features(view, body)
        if _wants_arrow(request):
            headers = {VERSIONS_HEADER: _named(rows.versions), **_time_header(rows.at)}
            return Response(await asyncio.to_thread(arrow_stream, rows.to_arrow()), media_type=ARROW, headers=headers)
        plain = await asyncio.to_thread(json_values.rows_to_json, rows.to_arrow())
        at = {} if rows.at is None else {"at": json_values.to_json(rows.at)}
        return _json({"view": view, "versions": rows.versions, **at, "ages": rows.ages, "rows": plain})

    @app.post(
        "/v1/operators/{operator}/scan",
        summary="All rows, or those of some keys, as a stream",
        response_class=Response,
        responses=_STREAMS,
    )
    async def scan(operator: str, body: models.ScanRequest, request: Request) -> Response:
        as_arrow = _wants_arrow(request)
        (version, at), pieces = await service.scan(operator, body, as_arrow=as_arrow)
        headers = {VERSION_HEADER: str(version), **_time_header(at)}
        return StreamingResponse(pieces, media_type=ARROW if as_arrow else LINES, headers=headers)

    @app.post(
        "/v1/sql",
        summary="The rows of one SQL statement that reads",
        description="Operators are tables: `operator`, `operator.state`, `query.operator`. All rows of a query are of "
        "one version. The statement ends when the caller leaves.",
        response_class=Response,
        responses=_TABLES,
    )
    async def sql(body: models.SqlRequest, request: Request) -> Response:
        media_type, pieces = statements.begun(body, request.headers.get("accept", ""))
        # Up to the first rows, so that an error still decides the status; a caller who leaves during this ends it.
        piece = await while_there(request, pieces.__anext__())
        if piece is None:
            await pieces.aclose()
            return Response(status_code=499)
        versions, times = piece
        named = {
            VERSIONS_HEADER: _named(versions),
            TIMES_HEADER: _named({query: json_values.to_json(at) for query, at in times.items()}),
        }
        headers = {header: text for header, text in named.items() if text}
        return StreamingResponse(pieces, media_type=media_type, headers=headers)

    @app.get(
        "/v1/operators/{operator}/watch",
        summary="Watch the changes of each version as it completes, as server-sent events",
        description="The watch begins after `from_version`, by default after the version that is completed now. "
        "A browser's EventSource resumes by itself after a broken connection, by the header `Last-Event-ID`.",
        response_class=Response,
        responses=_EVENTS,
    )
    async def watch(
        operator: str,
        request: Request,
        key: Annotated[list[str] | None, Query(description="Only these keys, each as in the path of `keys/`.")] = None,
        query: Annotated[str | None, Query(description=_QUERY)] = None,
        state: Annotated[str | None, Query(description="The state variable, if the operator has several.")] = None,
        from_version: Annotated[int | None, Query(ge=0, description="The last version that is known already.")] = None,
    ) -> Response:
        wanted = models.WatchRequest(operator, tuple(key or ()), query, state, from_version)
        headers = request.headers
        events = await watches.begun(wanted, headers.get("last-event-id", ""), headers.get("authorization", ""))
        return StreamingResponse(events, media_type=EVENT_STREAM, headers={"X-Accel-Buffering": "no"})

    _describe_problems(app)
    app.add_middleware(Gate, verifier=verifier, limits=limits, page=None if page is None else PAGE, lag=service.lag)
    return app


_QUERY = "Name, query id or run id: which query, if several have an operator of that name."


async def _index(request: Request) -> Response:
    return RedirectResponse(request.scope.get("root_path", "").rstrip("/") + f"{PAGE}/", 303)


def _named(versions: Mapping[str, int]) -> str:
    return ",".join(f"{query}={version}" for query, version in sorted(versions.items()))


def _json(content: Any) -> Response:
    return Response(json_values.json_bytes(content), media_type="application/json")


def _time_header(at: dt.datetime | None) -> dict[str, str]:
    return {} if at is None else {TIME_HEADER: json_values.to_json(at)}


def _wants_arrow(request: Request) -> bool:
    return any(part.partition(";")[0].strip().lower() == ARROW for part in request.headers.get("accept", "").split(","))


def _describe_problems(app: FastAPI) -> None:
    """Add to OpenAPI the models that no route declares; leave out FastAPI's own error, which no route returns."""

    def describe(description: dict[str, Any], schemas: dict[str, Any]) -> None:
        for model in (models.Problem, models.SqlColumn, models.SqlAnswer):
            schemas[model.__name__] = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas[model.__name__].pop("$defs", None)  # they are schemas of the description themselves
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for path in description["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)

    _extend_openapi(app, describe)


def _extend_openapi(app: FastAPI, extend: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the description of an application, and its schemas, when it is made."""
    make_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = make_openapi()
            extend(description, description.setdefault("components", {}).setdefault("schemas", {}))
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


# The route ``GET /v1/overview``: the description of the whole system that the command line and the page read.


ANSWER_REUSE_SECONDS = 1.0
"""TTL of a cached answer in seconds: coordinator and hosts are asked once a second, for any number of callers."""


def add_overview(app: FastAPI, ask: Callable[[], Overview], clock: Callable[[], float] = time.monotonic) -> None:
    """Add the route to the application. ``ask`` asks coordinator and hosts, and blocks until they answer."""
    (schema,), components = msgspec.json.schema_components([Overview], ref_template="#/components/schemas/{name}")
    asking = asyncio.Lock()
    cached: tuple[float, Overview, bytes] | None = None

    @app.get(
        "/v1/overview",
        response_model=None,  # pydantic takes no msgspec.Struct
        responses={200: {"content": {"application/json": {"schema": schema}}}},
        summary="The whole system: queries, operators, partitions, checkpoints, hosts, faults and what to do",
    )
    async def overview() -> Response:
        nonlocal cached
        async with asking:
            if cached is None or clock() - cached[0] >= ANSWER_REUSE_SECONDS:
                overview_now = await asyncio.to_thread(ask)
                cached = clock(), overview_now, await asyncio.to_thread(lambda: json_bytes(to_plain(overview_now)))
            _, whole, encoded = cached
        scope = access.CALLER_SCOPE.get()
        if not scope.is_all:
            encoded = await asyncio.to_thread(lambda: json_bytes(to_plain(overview_within(whole, scope))))
        return Response(encoded, media_type="application/json")

    _extend_openapi(app, lambda _, schemas: schemas.update(components))
