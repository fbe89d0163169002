"""Savepoints: list and describe them, and have one made."""

from __future__ import annotations

import uuid

from starlette.responses import RedirectResponse, Response

from backends.exceptions import StateStoreError
from coordinator_actor.exceptions import CoordinatorError
from coordinator_actor.savepoints.savepoint_format import SavepointInfo
from spark_bridge.exceptions import RequestError, SparkBridgeError
from spark_bridge.overview.model import Query
from spark_bridge.ui.live import default_directory
from spark_bridge.ui.requests import PageCall
from spark_bridge.ui.system import reference

MOST_SAVEPOINTS = 100


def savepoints_page(call: PageCall) -> Response:
    """List the savepoints of a query, the newest first, and say how far one is that was asked for."""
    queries = call.overview.queries
    named = call.given("query")
    query = call.named_query() if named or len(queries) == 1 else None
    found: list[SavepointInfo] = []
    problem, status = "", 200
    if query is not None:
        try:
            found = call.system.savepoints(query, _directory(call))[::-1]
        except (CoordinatorError, SparkBridgeError, StateStoreError) as error:
            problem, status = str(error), 400
    request = call.given("request")
    return call.render(
        "savepoints.html",
        status,
        query=query,
        queries=[(reference(q, queries), q) for q in queries],
        directory=None if query is None else (_directory(call) or default_directory(query)),
        savepoints=found[:MOST_SAVEPOINTS],
        left_out=max(0, len(found) - MOST_SAVEPOINTS),
        problem=problem,
        request=request,
        progress=call.system.savepoint_status(request) if request else None,
    )


def savepoint_page(call: PageCall) -> Response:
    """Describe a savepoint."""
    query = call.named_query()
    info = _described(call, query, check_files=False)
    return call.render("savepoint.html", query=query, info=info, is_checked=False, directory=_directory(call))


def check(call: PageCall) -> Response:
    """Read every file of a savepoint, and compare it with what was written."""
    query = call.named_query()
    info = _described(call, query, check_files=True)
    return call.render("savepoint.html", query=query, info=info, is_checked=True, directory=_directory(call))


def trigger(call: PageCall) -> Response:
    """Begin a savepoint, and show how far it is."""
    query = call.named_query()
    request = uuid.uuid4().hex
    path = call.given("path") or None
    if path is not None and not path.startswith("/") and "://" not in path:
        raise RequestError(f"{path[:200]!r} is no absolute path or URL; hosts have working directories of their own.")
    call.system.trigger_savepoint(request, query.run_id, path)
    ref = reference(query, call.overview.queries)
    return RedirectResponse(call.url("savepoints", query=ref, request=request, directory=path), 303)


def _directory(call: PageCall) -> str | None:
    """Return the directory that is asked for. Only an administrator may look into any."""
    given = call.given("directory")
    if given and not call.grant.admin:
        raise RequestError("Another directory than the query's own is shown to an administrator only.")
    return given or None


def _described(call: PageCall, query: Query, *, check_files: bool) -> SavepointInfo:
    """Describe the savepoint of that name in the directory that is listed. Raises ``RequestError``."""
    name = call.given("name")
    if not name or "/" in name or name in (".", ".."):
        raise RequestError(f"{name[:200]!r} is no name of a savepoint.")
    base = _directory(call) or default_directory(query)
    return call.system.describe_savepoint(f"{base.rstrip('/')}/{name}", check_files=check_files)
