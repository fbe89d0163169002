"""The state over HTTP: routes, errors, the description, on a client in memory."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import json
import random
import re
import threading
from typing import Any

import httpx
import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from spark_bridge.exceptions import (
    AccessDeniedError,
    HostUnavailableError,
    QueryEndedError,
    QueryTimeoutError,
    RequestError,
    RequestLimitError,
    StateVersionError,
    TooManyRequestsError,
    UnknownKeyOrNamespaceError,
    UnknownKvStateIdError,
    UnknownOperatorError,
)
from spark_bridge.overview.model import OVERVIEW_FORMAT_VERSION, Fault, Overview
from spark_bridge.state_http.app import ARROW, add_overview, create_app
from spark_bridge.state_http.service import StateService
from tests.patience import PATIENCE
from tests.spark_bridge.state_http.http_state import BEARER, PROBLEM, HeldClient, Together, connected, raw
from tests.spark_bridge.state_http.memory_client import TOTALS, UTC, MemoryClient, Tokens

# -- routes --------------------------------------------------------------------------------------


def test_the_overview_is_asked_for_once_a_second_however_many_want_it(memory: MemoryClient) -> None:
    app, now, asked = create_app(connected(memory), Tokens()), [0.0], list[float]()

    def ask() -> Overview:
        asked.append(now[0])
        if now[0] > 2:
            raise HostUnavailableError("The coordinator does not answer.")
        return Overview("cluster", int(now[0] * 1000), faults=(Fault("error", "skew", "a", "b", "c"),))

    add_overview(app, ask, clock=lambda: now[0])
    with TestClient(app, raise_server_exceptions=False) as made:
        assert made.get("/v1/overview").status_code == 401
        for now[0] in (0.0, 0.5, 1.0, 1.5):
            found = made.get("/v1/overview", headers=BEARER).json()
        assert (found["taken_ms"], found["format_version"]) == (1000, OVERVIEW_FORMAT_VERSION)
        assert found["faults"][0]["remedy"] == "c" and asked == [0.0, 1.0]
        description = made.get("/openapi.json", headers=BEARER).text
        schemas = json.loads(description)["components"]["schemas"]
        assert "faults" in schemas["Overview"]["properties"]
        assert set(re.findall(r'"#/components/schemas/([^"]+)"', description)) <= set(schemas)
        now[0] = 3.0
        assert made.get("/v1/overview", headers=BEARER).json()["error"] == "HostUnavailableError"


def test_operators_and_one_of_them(http: TestClient) -> None:
    found = http.get("/v1/operators").json()["operators"]
    assert [o["operator"] for o in found] == ["totals", "users", "per_minute", "by_window"]
    assert http.get("/v1/operators/totals").json()["hosts"] == []
    missing = http.get("/v1/operators/nothing")
    assert (missing.status_code, missing.headers["content-type"]) == (404, PROBLEM)
    assert missing.json()["error"] == "UnknownOperatorError"


def test_a_key_of_several_columns_and_values_of_all_types(http: TestClient, memory: MemoryClient) -> None:
    answer = http.get("/v1/operators/totals/keys/de,1", params={"query": "clicks", "state": "default"})
    assert answer.json() == {
        "operator": "totals",
        "key": ["de", 1],
        "value": {
            "n": 1,
            "mean": 1.5,
            "spent": "1.20",
            "last": "2024-03-09T23:00:00.000007Z",
            "day": "2024-03-09",
            "code": base64.b64encode(b"\x00\xff").decode(),
            "tags": ["x", None],
            "pages": {"a": 1},
            "by_id": [{"key": 7, "value": "x"}],
        },
    }
    assert memory.asked[-1][:5] == ("get", "totals", ("de", 1), "clicks", "default")
    assert http.get("/v1/operators/totals/keys/de,2").json()["value"]["n"] == str(2**53)
    assert http.get("/v1/operators/totals/keys/de,2").json()["value"]["mean"] == "NaN"
    assert http.get("/v1/operators/totals/keys/fr,1").json()["value"]["mean"] == "Infinity"
    assert http.get(f'/v1/operators/totals/keys/"a,""b",{2**62}').json()["key"] == ['a,"b', str(2**62)]


def test_a_key_that_is_not_there_is_404_and_one_that_cannot_be_400(http: TestClient) -> None:
    missing = http.get("/v1/operators/users/keys/10000")
    assert (missing.status_code, missing.json()["error"]) == (404, "MissingKey")
    for path in (
        "users/keys/x",
        "users/keys/1.5",
        "users/keys/",
        "totals/keys/de",
        "totals/keys/de,1,2",
        'totals/keys/"de,1',
        'totals/keys/"de"x,1',
    ):
        wrong = http.get(f"/v1/operators/{path}")
        assert (wrong.status_code, wrong.json()["error"]) == (400, "UnknownKeyOrNamespaceError"), path
    assert http.get("/v1/operators/nothing/keys/1").status_code == 404


def test_windows(http: TestClient, memory: MemoryClient) -> None:
    start, end = dt.datetime(2024, 3, 9, 23, tzinfo=UTC), dt.datetime(2024, 3, 10, tzinfo=UTC)
    assert http.get("/v1/operators/per_minute/keys/42?window=2024-03-09T23:00:00Z").json()["value"] == {"n": 3}
    assert memory.asked[-1][2] == 42
    assert memory.asked[-1][5]["window"] == start
    http.get("/v1/operators/per_minute/keys/42", params={"window": "2024-03-10T00:00:00+01:00/2024-03-10T00:00:00"})
    assert memory.asked[-1][5]["window"] == (start, end)
    http.get("/v1/operators/by_window/keys/2024-03-09T23:00:00Z")
    assert memory.asked[-1][2] == start
    for wrong in ("soon", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"):
        assert http.get("/v1/operators/per_minute/keys/42", params={"window": wrong}).status_code == 400
    bounds = {"start": "2024-03-09T23:00:00Z", "end": "2024-03-10T00:00:00Z"}
    http.post("/v1/operators/per_minute/lookup", json={"keys": [[42, bounds]]})
    assert memory.asked[-1][2] == [(42, {"start": start, "end": end})]


def test_isolation_and_version(http: TestClient, memory: MemoryClient) -> None:
    http.get("/v1/operators/users/keys/1?isolation=latest")
    assert memory.asked[-1][5]["isolation"] == "latest"
    http.get("/v1/operators/users/keys/1?version=3")
    assert memory.asked[-1][5]["version"] == 3
    for wrong in ("isolation=none", "version=-1", "version=x"):
        answer = http.get(f"/v1/operators/users/keys/1?{wrong}")
        assert (answer.status_code, answer.json()["error"]) == (400, "RequestError")


def test_many_keys(http: TestClient, memory: MemoryClient) -> None:
    answer = http.post(
        "/v1/operators/totals/lookup", json={"keys": [["de", 1], {"user": "2", "country": "de"}, ["xx", 3]]}
    )
    rows = answer.json()["rows"]
    assert [(r["country"], r["user"], r["n"]) for r in rows] == [("de", 1, 1), ("de", 2, str(2**53)), ("xx", 3, None)]
    assert http.post("/v1/operators/users/lookup", json={"keys": [1, "2", [3]]}).json()["rows"][2] == {
        "user": 3,
        "name": "user 3",
    }
    assert http.post("/v1/operators/users/lookup", json={"keys": []}).json()["rows"] == []
    arrow = http.post("/v1/operators/totals/lookup", json={"keys": [["de", 1]]}, headers={"Accept": ARROW})
    assert arrow.headers["content-type"] == ARROW
    with pa.ipc.open_stream(arrow.content) as reader:
        assert reader.read_all().equals(TOTALS.slice(0, 1))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"keys": 3},
        {"keys": [1], "unknown": 2},
        {"keys": [[1, 2]]},
        {"keys": [True]},
        {"keys": [1.5]},
        {"keys": [{"x": 1}]},
        {"keys": [1], "version": -1},
        {"keys": [1], "window": "soon"},
        [],
        None,
    ],
)
def test_invalid_lookups(http: TestClient, body: Any) -> None:
    answer = http.post("/v1/operators/users/lookup", json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (400, PROBLEM)


def test_a_scan_streams_lines(http: TestClient, memory: MemoryClient) -> None:
    body = {
        "prefix": "d",
        "where": [{"column": "n", "comparison": ">", "value": 0}, {"column": "n", "comparison": "is not null"}],
        "columns": ["user"],
    }
    answer = http.post("/v1/operators/totals/scan", json=body)
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert answer.headers["x-statestore-version"] == "7"
    assert [json.loads(line) for line in answer.text.splitlines()] == [
        {"user": 1},
        {"user": 2},
        {"user": 1},
        {"user": str(2**62)},
    ]
    options = memory.asked[-1][4]
    assert (options["prefix"], options["where"]) == ("d", [("n", ">", 0), ("n", "is not null")])
    http.post("/v1/operators/totals/scan", json={"start": ["de", "1"], "end": ["de"], "limit": 2})
    assert (memory.asked[-1][3], memory.asked[-1][4]["start"], memory.asked[-1][4]["end"]) == (2, ("de", 1), ("de",))
    everything = http.post("/v1/operators/users/scan", json={})
    assert [json.loads(line)["user"] for line in everything.text.splitlines()] == list(range(10_000))
    assert memory.open_scans == 0


def test_a_scan_as_arrow(http: TestClient) -> None:
    answer = http.post("/v1/operators/totals/scan", json={}, headers={"Accept": f"{ARROW}, */*"})
    with pa.ipc.open_stream(answer.content) as reader:
        assert str(reader.read_all().to_pylist()) == str(TOTALS.to_pylist())
    empty = http.post("/v1/operators/totals/scan", json={"limit": 0}, headers={"Accept": ARROW})
    with pa.ipc.open_stream(empty.content) as reader:
        assert reader.read_all().schema.equals(TOTALS.schema)


@pytest.mark.parametrize(
    "body",
    [
        {"where": [{"column": "n", "comparison": "~", "value": 1}]},
        {"where": [{"column": "n", "comparison": "in", "value": 1}]},
        {"where": [{"column": "n", "comparison": "="}]},
        {"where": [{"column": "n", "comparison": "is null", "value": 1}]},
        {"where": [{"column": "n", "comparison": "=", "value": {"a": 1}}]},
        {"start": ["de", 1, 2]},
        {"start": ["de", "x"]},
        {"limit": -1},
        {"unknown": 1},
    ],
)
def test_invalid_scans(http: TestClient, memory: MemoryClient, body: dict[str, Any]) -> None:
    assert http.post("/v1/operators/totals/scan", json=body).status_code == 400
    assert memory.open_scans == 0


def test_concurrent_keys_reach_the_client_together() -> None:
    memory = HeldClient()
    app = create_app(connected(memory), Tokens())

    async def ask() -> None:
        memory.together = Together(50)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", headers=BEARER) as client:
            answers = await asyncio.gather(*(client.get(f"/v1/operators/users/keys/{n}") for n in range(50)))
            assert [a.json()["value"]["name"] for a in answers] == [f"user {n}" for n in range(50)]

    asyncio.run(ask())  # none of them was answered before all had come
    assert memory.together.missing == 0


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnknownOperatorError("what there is"), 404),
        (UnknownKvStateIdError("what there is"), 404),
        (QueryEndedError("when"), 409),
        (StateVersionError("versions"), 409),
        (UnknownKeyOrNamespaceError("types"), 400),
        (RequestError("how"), 400),
        (RequestLimitError("limit"), 413),
        (TooManyRequestsError("later"), 429),
        (HostUnavailableError("nobody"), 503),
        (AccessDeniedError("its own token"), 503),
        (QueryTimeoutError("late"), 504),
        (ZeroDivisionError("the password is 1234"), 500),
    ],
)
def test_errors_of_the_client(http: TestClient, memory: MemoryClient, error: Exception, status: int) -> None:
    memory.failure = error
    for answer in (
        http.get("/v1/operators/users/keys/1"),
        http.post("/v1/operators/users/lookup", json={"keys": [1]}),
        http.post("/v1/operators/users/scan", json={}),
    ):
        assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM)
        body = answer.json()
        assert (body["status"], "1234" in answer.text) == (status, False)
        assert ("Retry-After" in answer.headers) == (status in (429, 503))
        if status != 500:
            assert (body["error"], body["detail"]) == (type(error).__name__, str(error))


def test_an_error_in_the_middle_of_a_scan_cuts_the_answer(memory: MemoryClient) -> None:
    memory.failure, memory.fail_after = QueryTimeoutError("a host is gone"), 2
    app = create_app(connected(memory), Tokens())
    pieces, ended = raw(app, "POST", "/v1/operators/users/scan", json.dumps({}).encode())
    lines = b"".join(pieces).splitlines()
    assert len(lines) == 2001
    assert json.loads(lines[-1])["problem"]["detail"] == "a host is gone"
    assert not ended
    assert memory.open_scans == 0


def test_unknown_paths_and_methods(http: TestClient) -> None:
    for answer, status in (
        (http.get("/v2"), 404),
        (http.delete("/v1/operators"), 405),
        (http.get("/docs"), 404),
        (http.get("/redoc"), 404),
    ):
        assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM)


def test_without_a_client_requests_are_503_and_share_one_attempt_to_connect(
    memory: MemoryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = 0
    is_there = False
    together = Together(5)
    client = StateService.client

    async def needed(service: StateService) -> Any:
        together.come()
        return await client(service)

    async def connect() -> Any:
        nonlocal attempts
        attempts += 1
        # The attempt is over when all of them need it.
        await asyncio.wait_for(together.all.wait(), PATIENCE)
        if not is_there:
            raise HostUnavailableError("The coordinator has not started.")
        return memory

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=BEARER) as client:
            return [a.status_code for a in await asyncio.gather(*(client.get("/v1/operators") for _ in range(5)))]

    monkeypatch.setattr(StateService, "client", needed)
    transport = httpx.ASGITransport(create_app(connect, Tokens()))
    assert (asyncio.run(ask()), attempts) == ([503] * 5, 1)
    is_there, together = True, Together(5)
    assert (asyncio.run(ask()), attempts) == ([200] * 5, 2)


# -- the page and the description ----------------------------------------------------------------


async def told(scope: Any, receive: Any, send: Any) -> None:
    """A page that answers with its path."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"{scope['root_path']}|{scope['path']}".encode()})


@pytest.mark.parametrize("root", ["", "/state"])
def test_the_page_checks_tokens_by_itself(memory: MemoryClient, root: str) -> None:
    with TestClient(create_app(connected(memory), Tokens(), page=told), root_path=root) as http:
        assert http.get("/ui/query").text.startswith(f"{root}/ui|")
        assert http.get("/", follow_redirects=False).headers["location"] == f"{root}/ui/"
        for path in ("/v1/operators", "/uix", "/openapi.json", "/v1/../ui/../v1/operators"):
            assert http.get(path).status_code == 401, path


def test_without_a_page_there_is_none(http: TestClient) -> None:
    assert http.get("/").status_code == http.get("/ui/").status_code == 404


def test_the_description(http: TestClient) -> None:
    described = http.get("/openapi.json").json()
    assert set(described["paths"]) == {
        "/v1/features",
        "/v1/features/{view}",
        "/v1/operators",
        "/v1/operators/{operator}",
        "/v1/operators/{operator}/keys/{key}",
        "/v1/operators/{operator}/lookup",
        "/v1/operators/{operator}/scan",
        "/v1/operators/{operator}/watch",
        "/v1/sql",
    }
    schemas = described["components"]["schemas"]
    assert {"Problem", "LookupRequest", "LookupAnswer", "ScanRequest", "KeyAnswer"} <= set(schemas)
    assert {"HTTPBearer", "HTTPBasic"} <= set(described["components"]["securitySchemes"])
    text = json.dumps(described)
    refs = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert refs <= set(schemas)
    for path in described["paths"].values():
        for operation in path.values():
            assert {"200", "400", "401", "403", "404", "409", "413", "429", "503", "504"} == set(operation["responses"])
            assert operation["security"] and operation["summary"]


# -- fuzz ----------------------------------------------------------------------------------------


def test_random_requests_crash_nothing(http: TestClient, memory: MemoryClient) -> None:
    rng = random.Random(5)
    threads = threading.active_count()
    paths = [
        "/v1/operators/users/lookup",
        "/v1/operators/totals/scan",
        "/v1/operators/users/keys/",
        "/v1/operators/",
        "/",
    ]
    good = [b'{"keys": [1]}', b'{"limit": 5}', b'{"where": [{"column": "n", "comparison": "=", "value": 1}]}']
    for _ in range(200):
        body = bytearray(rng.choice(good)) if rng.random() < 0.6 else bytearray(rng.randbytes(rng.randrange(300)))
        for _ in range(rng.randrange(4)):
            if body:
                body[rng.randrange(len(body))] = rng.randrange(256)
        path = rng.choice(paths) + "".join(f"%{rng.randrange(256):02X}" for _ in range(rng.randrange(6)))
        query = (
            "?"
            + "&".join(
                f"{k}=%{rng.randrange(256):02X}"
                for k in rng.sample(["window", "version", "isolation", "query", "state"], 2)
            )
            if rng.random() < 0.3
            else ""
        )
        headers = {
            "Content-Type": rng.choice(
                ["application/json", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded"]
            )
        }
        if rng.random() < 0.2:
            headers["Accept"] = ARROW
        answer = http.request(rng.choice(["GET", "POST", "PUT"]), path + query, content=bytes(body), headers=headers)
        assert answer.status_code in (200, 400, 404, 405, 413, 307), (path, query, bytes(body), answer.text)
        if answer.status_code >= 400:
            assert answer.json()["status"] == answer.status_code
    deep = b'{"keys": [' + b"[" * 20_000 + b"]" * 20_000 + b"]}"
    assert (
        http.post("/v1/operators/users/lookup", content=deep, headers={"Content-Type": "application/json"}).status_code
        == 400
    )
    assert (
        http.post(
            "/v1/operators/users/lookup",
            content=b'{"keys": [' + b"9" * 50_000 + b"]}",
            headers={"Content-Type": "application/json"},
        ).status_code
        == 400
    )
    assert memory.open_scans == 0
    assert threading.active_count() <= threads + 40
    assert http.get("/v1/operators/users/keys/1").status_code == 200
