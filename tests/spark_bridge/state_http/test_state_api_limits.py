"""Limits of the HTTP service: sizes, rows, times, concurrent requests, and callers that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import httpx
from fastapi.testclient import TestClient

from coordinator_actor.access_tokens import Scope
from spark_bridge.state_http.access import CALLER_SCOPE, HttpLimits
from spark_bridge.state_http.app import create_app
from spark_bridge.state_http.service import StateService
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.state_http.http_state import BEARER, PROBLEM, HeldClient, Together, connected, raw
from tests.spark_bridge.state_http.memory_client import MemoryClient, Tokens


def test_limits(http: TestClient, memory: MemoryClient) -> None:
    def status(path: str, **kwargs: Any) -> tuple[int, str]:
        answer = http.post(f"/v1/operators/users/{path}", **kwargs)
        return answer.status_code, answer.json()["error"]

    assert status("lookup", json={"keys": list(range(101))}) == (413, "RequestLimitError")
    assert status("lookup", content=b" " * 100_001) == (413, "RequestLimitError")
    assert status("lookup", content=(b" " * 10_000 for _ in range(11))) == (413, "RequestLimitError")
    assert status("scan", json={"limit": 20_001}) == (413, "RequestLimitError")
    assert http.post("/v1/operators/users/scan", json={"limit": 20_000}).status_code == 200
    assert memory.open_scans == 0


def test_a_large_answer_of_a_lookup_is_refused(memory: MemoryClient) -> None:
    with TestClient(create_app(connected(memory), Tokens(), HttpLimits(max_lookup_bytes=500)), headers=BEARER) as http:
        assert http.post("/v1/operators/users/lookup", json={"keys": [1]}).status_code == 200
        answer = http.post("/v1/operators/users/lookup", json={"keys": list(range(100))})
    assert (answer.status_code, answer.json()["error"]) == (413, "RequestLimitError")


def test_the_remedies_of_limits_work(memory: MemoryClient) -> None:
    limits = HttpLimits(max_lookup_bytes=500, max_keys=50, max_rows=1500)
    with TestClient(create_app(connected(memory), Tokens(), limits), headers=BEARER) as http:

        def ask(path: str, **body: Any) -> httpx.Response:
            return http.post(f"/v1/operators/users/{path}", json=body)

        assert "50" in ask("lookup", keys=list(range(51))).json()["detail"]
        assert "Ask for fewer" in ask("lookup", keys=list(range(50))).json()["detail"]
        assert ask("lookup", keys=[1]).status_code == 200
        assert "1500 rows that a scan may give" in ask("scan", limit=1501).json()["detail"]
        assert len(ask("scan", limit=1500).text.splitlines()) == 1500
    app = create_app(connected(memory), Tokens(), limits)
    pieces, _ = raw(app, "POST", "/v1/operators/users/scan", b"{}")
    assert "or say limit" in json.loads(b"".join(pieces).splitlines()[-1])["problem"]["detail"]
    pieces, ended = raw(app, "POST", "/v1/operators/users/scan", b'{"limit": 1500}')
    assert ended and len(b"".join(pieces).splitlines()) == 1500


def test_a_missing_request_body_times_out(memory: MemoryClient) -> None:
    app = create_app(connected(memory), Tokens(), HttpLimits(body_seconds=0.2))

    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(HANG)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", headers=BEARER) as client:
            return await asyncio.wait_for(client.post("/v1/operators/users/lookup", content=slowly()), PATIENCE)

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.headers["content-type"]) == (408, PROBLEM)


def test_more_rows_than_allowed_end_a_scan(memory: MemoryClient) -> None:
    app = create_app(connected(memory), Tokens(), HttpLimits(max_rows=1500))
    pieces, ended = raw(app, "POST", "/v1/operators/users/scan", b"{}")
    lines = b"".join(pieces).splitlines()
    assert json.loads(lines[-1])["problem"]["status"] == 413
    assert not ended
    assert len(lines) <= 1501


def test_scans_end_after_their_time(memory: MemoryClient) -> None:
    memory.pause = 0.2
    app = create_app(connected(memory), Tokens(), HttpLimits(scan_seconds=0.5))
    pieces, ended = raw(app, "POST", "/v1/operators/users/scan", b"{}")
    lines = b"".join(pieces).splitlines()
    assert json.loads(lines[-1])["problem"]["status"] == 504
    assert not ended
    assert len(lines) <= 2001, "more batches do not come within the time"
    assert memory.open_scans == 0


def test_too_many_at_once() -> None:
    memory = HeldClient()
    app = create_app(connected(memory), Tokens(), HttpLimits(max_requests=5, max_scans=2))

    async def ask() -> tuple[list[int], list[int]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", headers=BEARER) as client:

            async def statuses(requests: list[Awaitable[httpx.Response]]) -> list[int]:
                """Answer an admitted request only after all others have been refused."""
                together = memory.together = Together(len(requests))

                async def status(request: Awaitable[httpx.Response]) -> int:
                    answer = await request
                    if answer.status_code == 429:
                        together.come()
                    return answer.status_code

                return sorted(await asyncio.gather(*map(status, requests)))

            await client.get("/v1/operators/users/keys/1")
            keys = await statuses([client.get(f"/v1/operators/users/keys/{n}") for n in range(8)])
            scans = await statuses([client.post("/v1/operators/users/scan", json={"limit": 1}) for _ in range(4)])
            return keys, scans

    keys, scans = asyncio.run(ask())
    assert keys == [200] * 5 + [429] * 3
    assert scans == [200] * 2 + [429] * 2
    assert asyncio.run(ask()) == (keys, scans)


def test_a_caller_that_disconnects_ends_its_scan(memory: MemoryClient) -> None:
    memory.pause = 0.05
    app = create_app(connected(memory), Tokens())
    pieces, ended = raw(app, "POST", "/v1/operators/users/scan", b"{}", leave_after=2)
    assert len(pieces) < 6 and not ended
    assert memory.open_scans == 0


def test_the_key_columns_that_are_kept_are_bounded(memory: MemoryClient) -> None:
    service = StateService(connected(memory), HttpLimits())

    async def asked() -> None:
        for n in range(1100):
            CALLER_SCOPE.set(Scope(namespaces=("statestore", f"other{n}")))
            await service.shape("users", None, None)

    asyncio.run(asked())
    assert len(service._shapes) <= 1000
