"""The route ``GET /v1/overview``: the description of the whole system that the command line and the page read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Depends, FastAPI
from fastapi.responses import Response
from fastapi.security import HTTPBasic, HTTPBearer

from spark_bridge.overview.model import Overview, to_plain
from spark_bridge.queryable.client.answers.json_values import json_bytes

ANSWER_REUSE_SECONDS = 1.0
"""An answer of coordinator and hosts is given again for this many seconds: however many ask, these are asked once a
second.
"""


def add_overview(app: FastAPI, ask: Callable[[], Overview], clock: Callable[[], float] = time.monotonic) -> None:
    """Add the route to the application. ``ask`` asks coordinator and hosts, and blocks meanwhile."""
    (schema,), components = msgspec.json.schema_components([Overview], ref_template="#/components/schemas/{name}")
    asking = asyncio.Lock()
    known: tuple[float, bytes] | None = None

    @app.get(
        "/v1/overview",
        response_model=None,  # pydantic takes no msgspec.Struct
        responses={200: {"content": {"application/json": {"schema": schema}}}},
        summary="The whole system: queries, operators, partitions, checkpoints, hosts, faults and what to do",
        dependencies=[Depends(HTTPBearer(auto_error=False)), Depends(HTTPBasic(auto_error=False))],
    )
    async def overview() -> Response:
        nonlocal known
        async with asking:
            if known is None or clock() - known[0] >= ANSWER_REUSE_SECONDS:
                found = await asyncio.to_thread(ask)
                known = clock(), await asyncio.to_thread(lambda: json_bytes(to_plain(found)))
            return Response(known[1], media_type="application/json")

    made = app.openapi

    def openapi() -> dict[str, Any]:
        description = made()
        description.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return description

    app.openapi = openapi  # type: ignore[method-assign]
