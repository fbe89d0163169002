"""Errors as ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from spark_bridge.exceptions import (
    AccessDeniedError,
    ConnectionClosedError,
    EnvironmentProblemError,
    HostUnavailableError,
    QueryableStateError,
    QueryEndedError,
    QueryTimeoutError,
    RequestError,
    RequestLimitError,
    SparkBridgeError,
    StateVersionError,
    TooManyRequestsError,
    UnknownKeyOrNamespaceError,
    UnknownKvStateIdError,
    UnknownLocationError,
    UnknownOperatorError,
)
from spark_bridge.queryable.client.answers.json_values import json_bytes

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_SECONDS = 1
STATUS: list[tuple[type[SparkBridgeError], int]] = [
    (UnknownOperatorError, 404),
    (UnknownKvStateIdError, 404),
    (QueryEndedError, 409),
    (StateVersionError, 409),
    (UnknownKeyOrNamespaceError, 400),
    (RequestLimitError, 413),
    (RequestError, 400),
    (TooManyRequestsError, 429),
    (QueryTimeoutError, 504),
    # The hosts refused the application's own token: the caller cannot change that.
    (AccessDeniedError, 503),
    (HostUnavailableError, 503),
    (ConnectionClosedError, 503),
    (UnknownLocationError, 503),
    # A package that a route needs is not installed where the application runs.
    (EnvironmentProblemError, 501),
]
"""By error class, the HTTP status; the first class that fits decides."""
INTERNAL = "The application failed; its log says why."


class MissingKeyError(QueryableStateError):
    """The state has nothing for a key: 404 over HTTP."""


def problem(status: int, detail: str, error: str | None = None, **more: Any) -> dict[str, Any]:
    """Return the body of an error.

    ``error`` names the Python client's error class, so that programs can tell errors apart.
    """
    named = {} if error is None else {"error": error}
    return {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        **named,
        **more,
    }


def problem_of(error: Exception) -> dict[str, Any]:
    """Return the body for an error of the client; of an unexpected error the body tells nothing, and the log has it."""
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
    """Have the application answer every error as ``application/problem+json``."""

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

    app.add_exception_handler(SparkBridgeError, of_client)
    app.add_exception_handler(RequestValidationError, of_request)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, of_client)
