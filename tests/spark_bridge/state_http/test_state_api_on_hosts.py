"""The state over HTTP, from real hosts by the real client."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from fastapi.testclient import TestClient
from msgspec.structs import replace

from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.queryable.client.async_client import AsyncQueryableStateClient
from spark_bridge.queryable.server.tokens import STALE_SECONDS, CoordinatorTokens
from spark_bridge.state_http.access import HttpLimits
from spark_bridge.state_http.app import ARROW, create_app
from tests.effort import effort
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client.client_rows import ROWS, UntilGone, windowed
from tests.spark_bridge.queryable.client_world import Cluster, served
from tests.spark_bridge.queryable.feature_world import VIEW, FeatureCluster
from tests.spark_bridge.queryable.memory_reads import eventually
from tests.spark_bridge.state_flows import Flow
from tests.spark_bridge.state_http.http_state import SECRET, TokensOnly, answering


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Users 0 to 4,999 with n of ten times that."""
    made = Cluster(tmp_path_factory.mktemp("http"))
    users: dict[Any, Any] = {i: (10 * i, f"user {i}" if i % 3 else None) for i in range(5_000)}
    made.batch(users)
    yield made
    made.close()


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[TestClient]:
    with answering(cluster.client()) as made:
        yield made


def test_all_routes(http: TestClient) -> None:
    (operator,) = http.get("/v1/operators").json()["operators"]
    assert (operator["operator"], operator["completed_version"]) == ("totals", 1)
    assert http.get("/v1/operators/totals").json()["query_id"] == "q"
    assert http.get("/v1/operators/totals/keys/41").json() == {
        "operator": "totals",
        "key": 41,
        "value": {"n": 410, "name": "user 41"},
    }
    assert http.get("/v1/operators/totals/keys/42?version=1&state=default&query=q").json()["value"]["n"] == 420
    rows = http.post("/v1/operators/totals/lookup", json={"keys": [3, 99_999, 1]}).json()["rows"]
    assert rows == [
        {"user": 3, "n": 30, "name": None},
        {"user": 99_999, "n": None, "name": None},
        {"user": 1, "n": 10, "name": "user 1"},
    ]
    found = http.post(
        "/v1/operators/totals/scan",
        json={"where": [{"column": "n", "comparison": ">=", "value": 49_970}], "columns": ["user"]},
    )
    assert sorted(json.loads(line)["user"] for line in found.text.splitlines()) == [4997, 4998, 4999]
    assert found.headers["x-statestore-version"] == "1"
    ranged = http.post("/v1/operators/totals/scan", json={"start": [10], "end": [13]})
    assert sorted(json.loads(line)["user"] for line in ranged.text.splitlines()) == [10, 11, 12]
    everything = http.post("/v1/operators/totals/scan", json={}, headers={"Accept": ARROW})
    with pa.ipc.open_stream(everything.content) as reader:
        assert sorted(reader.read_all()["user"].to_pylist()) == list(range(5_000))


def test_answers_of_a_late_follower_have_its_lag_in_a_header(http: TestClient, cluster: Cluster) -> None:
    asked = [
        ("GET", "keys/41", None),
        ("POST", "lookup", {"keys": [1, 2]}),
        ("POST", "scan", {"start": [10], "end": [13]}),
    ]

    def lags() -> list[str | None]:
        answers = [http.request(verb, f"/v1/operators/totals/{path}", json=body) for verb, path, body in asked]
        answers.append(http.post("/v1/sql", json={"sql": "select count(*) from totals where n > 5"}))
        assert all(answer.status_code == 200 for answer in answers)
        return [answer.headers.get("x-statestore-lag-seconds") for answer in answers]

    for one in cluster.hosts:
        one.host._looked_at = {cluster.run: time.monotonic() - 30.0}
    try:
        late = [float(lag or 0) for lag in lags()]
        assert all(lag >= 30 for lag in late)
    finally:
        for one in cluster.hosts:
            one.host._looked_at = {}
    assert lags() == [None] * 4


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("nothing", 404, "UnknownOperatorError"),
        ("totals?query=nothing", 404, "UnknownOperatorError"),
        ("totals/keys/99999", 404, "MissingKey"),
        ("totals/keys/x", 400, "UnknownKeyOrNamespaceError"),
        ("totals/keys/1?state=nothing", 404, "UnknownKvStateIdError"),
        ("totals/keys/1?version=99", 409, "StateVersionError"),
        ("totals/keys/1?window=2024-01-01", 400, "RequestError"),
    ],
)
def test_errors_say_what_there_is(http: TestClient, path: str, status: int, error: str) -> None:
    answer = http.get(f"/v1/operators/{path}")
    assert (answer.status_code, answer.json()["error"]) == (status, error), answer.text


def test_wrong_scans(http: TestClient) -> None:
    for body in (
        {"columns": ["nothing"]},
        {"where": [{"column": "nothing", "comparison": "=", "value": 1}]},
        {"where": [{"column": "n", "comparison": "=", "value": "x"}]},
    ):
        answer = http.post("/v1/operators/totals/scan", json=body)
        assert answer.status_code == 400, answer.text


CALLERS = effort(40, 90)


def test_concurrent_callers(cluster: Cluster) -> None:
    made = AsyncQueryableStateClient(cluster.client())
    tokens = CoordinatorTokens(TokensOnly())
    tokens.ask()

    async def connect() -> AsyncQueryableStateClient:
        return made

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(create_app(connect, tokens, HttpLimits(timeout=PATIENCE)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x", auth=("", SECRET)) as client:
            answers = await asyncio.gather(*(client.get(f"/v1/operators/totals/keys/{n}") for n in range(CALLERS)))
            return [a.json()["value"]["n"] for a in answers]

    assert asyncio.run(ask()) == [10 * n for n in range(CALLERS)]


def test_windows(tmp_path: Path) -> None:
    query = windowed(tmp_path, ("window", "user"), ("user", "window"), ROWS)
    with served(query) as client, answering(client) as http:
        path = "/v1/operators/op/keys/1"
        every = http.get(path).json()["value"]
        assert [row["n"] for row in every] == [10, 11]
        first = every[0]["window"]
        assert first["start"].endswith("Z")
        assert http.get(path, params={"window": first["start"]}).json()["value"] == {"n": 10}
        assert http.get(path, params={"window": f"{first['start']}/{first['end']}"}).json()["value"] == {"n": 10}
        assert http.get("/v1/operators/op/keys/9").status_code == 404
        rows = http.post("/v1/operators/op/lookup", json={"keys": [1, 2, 3]}).json()["rows"]
        assert [r["windows"] and [w["n"] for w in r["windows"]] for r in rows] == [[10, 11], [21], None]
        rows = http.post("/v1/operators/op/lookup", json={"keys": [[1, first], [2, first]]}).json()["rows"]
        assert [r["n"] for r in rows] == [10, None]
        rows = http.post("/v1/operators/op/lookup", json={"keys": [1, 2], "window": first["start"]}).json()["rows"]
        assert [r["n"] for r in rows] == [10, None]
    query.close()


def test_processors_variables(tmp_path: Path) -> None:
    def fill(of: Any) -> None:
        of.total.update((3, "u3"))
        of.visits.appendList([("/", 1), (None, 2)])
        of.pages.updateValue(("/a", "x"), (1, ("text",)))
        of.timers.registerTimer(5000)

    flow = Flow(tmp_path)
    flow.batch({("a", 1): fill})
    with served(flow) as client, answering(client) as http:

        def value(state: str) -> Any:
            return http.get("/v1/operators/op/keys/a,1", params={"state": state}).json()["value"]

        assert value("total") == {"n": 3, "user": "u3"}
        assert value("visits") == [{"page": "/", "at": 1}, {"page": None, "at": 2}]
        assert value("pages") == [{"key": ["/a", "x"], "value": {"n": 1, "note": {"text": "text"}}}]
        assert value("timers") == [5000]
        assert http.get("/v1/operators/op/keys/a,1").status_code == 404  # which of the variables is not said
        rows = http.post(
            "/v1/operators/op/lookup", json={"keys": [["a", 1], {"user": "b", "shard": 1}], "state": "visits"}
        ).json()["rows"]
        assert [r["list_value"] for r in rows] == [[{"page": "/", "at": 1}, {"page": None, "at": 2}], None]
        lines = http.post("/v1/operators/op/scan", json={"state": "pages", "prefix": "a"}).text.splitlines()
        assert len(lines) == 1
    flow.close()


def test_a_dead_host_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    made = Cluster(tmp_path)
    made.batch({i: (i, "x") for i in range(1000)})
    try:
        with answering(made.client(), HttpLimits(timeout=1.0)) as http:
            # Not always with the first request: a machine that stands still takes all the time of one.
            eventually(lambda: http.get("/v1/operators/totals/keys/1").status_code == 200)
            for host in made.hosts:
                host.kill()
            # A thread of a host in this process may still answer a request that it has begun to read.
            eventually(lambda: http.get("/v1/operators/totals/keys/1").status_code in (503, 504))
            assert http.post("/v1/operators/totals/scan", json={}).status_code in (503, 504)
    finally:
        made.close()


def test_a_query_that_has_ended_is_409_also_for_its_earlier_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Cluster(tmp_path)
    made.batch({1: (1, "x")})
    try:
        with answering(made.client()) as http:
            assert http.get("/v1/operators/totals/keys/1").status_code == 200
            monkeypatch.setattr("spark_bridge.queryable.client.discovery.Attempts", UntilGone)
            made.c.deactivate_instances("run1")
            for host in made.hosts:
                host.host.heartbeat()
            for answer in (
                http.get("/v1/operators/totals/keys/1"),
                http.post("/v1/operators/totals/lookup", json={"keys": [1]}),
                http.post("/v1/operators/totals/scan", json={}),
            ):
                assert (answer.status_code, answer.json()["error"]) == (409, "QueryEndedError")
            assert http.get("/v1/operators/nothing/keys/1").status_code == 404
    finally:
        made.close()


def test_scans_leave_no_threads(http: TestClient) -> None:
    before = threading.active_count()
    for _ in range(20):
        assert http.post("/v1/operators/totals/scan", json={"limit": 3}).status_code == 200
    assert threading.active_count() < before + 10


# -- tokens of the coordinator -------------------------------------------------------------------


def test_tokens_are_those_of_the_coordinator() -> None:
    now = [0.0]
    coordinator = TokensOnly()
    tokens = CoordinatorTokens(coordinator, lambda: now[0])
    token = coordinator.tokens.issue_token("browser")
    made = create_app(_nobody, tokens)

    def status(given: str) -> Any:
        with TestClient(made) as http:
            return http.get("/openapi.json", headers={"Authorization": f"Bearer {given}"}).status_code

    assert (status(token), status("")) == (503, 401)
    tokens.ask()
    assert (status(token), status(SECRET), status("wrong"), status(token + "0")) == (200, 200, 401, 401)
    coordinator.tokens.revoke_token("browser")
    assert status(token) == 200
    tokens.ask()
    assert status(token) == 401
    other = coordinator.tokens.issue_token("other")
    coordinator.is_away = True
    with pytest.raises(HostUnavailableError):
        tokens.ask()
    assert status(other) == 200
    now[0] += STALE_SECONDS + 1
    assert status(other) == 503


def test_a_replica_keeps_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_bridge.queryable.server.tokens.REVOCATION_SECONDS", 0.02)
    coordinator = TokensOnly()
    coordinator.is_away = True
    tokens = CoordinatorTokens(coordinator)
    token = coordinator.tokens.issue_token("browser")

    def status(http: TestClient) -> Any:
        return http.get("/openapi.json", headers={"Authorization": f"Bearer {token}"}).status_code

    with TestClient(create_app(_nobody, tokens, lifespan=tokens.kept_up)) as http:
        assert status(http) == 503
        coordinator.is_away = False
        eventually(lambda: status(http) == 200)
        coordinator.tokens.revoke_token("browser")
        eventually(lambda: status(http) == 401)


async def _nobody() -> Any:
    raise HostUnavailableError("No host runs.")


# -- feature views -----------------------------------------------------------------------------


@pytest.fixture
def features(tmp_path: Path) -> Iterator[TestClient]:
    cluster = FeatureCluster(tmp_path)
    cluster.write({"totals": {1: (10, "one")}, "profile": {1: (0.5, 3, True)}}, ago=70.0)
    cluster.declare()
    cluster.declare(replace(VIEW, name="strict", max_age="1 minute"))
    with answering(cluster.client()) as http:
        yield http
    cluster.close()


def test_feature_views_are_listed_and_read(features: TestClient) -> None:
    views = features.get("/v1/features").json()["views"]
    assert [(v["view"], v["owner"], v["max_age"]) for v in views] == [
        ("risk", "fraud", None),
        ("strict", "fraud", "1 minute"),
    ]
    answer = features.post("/v1/features/risk", json={"keys": [1, [2]]}).json()
    assert answer["rows"] == [
        {"user": 1, "n": 10, "score": 0.5, "user_name": "one", "level": 3},
        {"user": 2, "n": 0, "score": None, "user_name": "unknown", "level": None},
    ]
    assert (answer["view"], answer["versions"]) == ("risk", {"name": 1})
    assert 69 < answer["ages"]["n"] < 70 + PATIENCE
    plain = features.post("/v1/features/risk", json={"keys": [2], "defaults": False, "versions": {"name": 1}}).json()
    assert plain["rows"][0]["user_name"] is None
    both = features.post("/v1/features/risk", json={"keys": [2], "versions": {"name": 1}, "isolation": "latest"})
    assert both.status_code == 400 and "already select the versions" in both.json()["detail"]
    arrow = features.post("/v1/features/risk", json={"keys": [1]}, headers={"Accept": ARROW})
    assert pa.ipc.open_stream(arrow.content).read_all().to_pydict()["n"] == [10]
    assert arrow.headers["X-Statestore-Versions"] == "name=1"


def test_features_are_as_of_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FeatureCluster(tmp_path)
    cluster.write({"totals": {1: (10, "one")}, "profile": {1: (0.5, 3, True)}})
    cluster.declare()
    client = cluster.client()
    find = client._access.find_views

    def views(request: Any, deadline: float) -> Any:
        return [replace(location, is_rolling=True) for location in find(request, deadline)]

    monkeypatch.setattr(client._access, "find_views", views)
    with answering(client) as http:
        asked = {"keys": [1], "at": "2026-01-01T00:00:00Z"}
        assert http.post("/v1/features/risk", json=asked).json()["at"] == "2026-01-01T00:00:00Z"
        arrow = http.post("/v1/features/risk", json=asked, headers={"Accept": ARROW})
        assert arrow.headers["X-Statestore-Time"] == "2026-01-01T00:00:00Z"
        now = http.post("/v1/features/risk", json={"keys": [1]}).json()["at"]
        again = http.post("/v1/features/risk", json={"keys": [1], "at": now}).json()
        assert again["at"] == now and again["rows"][0]["n"] == 10
    cluster.close()


@pytest.mark.parametrize(
    ("view", "body", "status", "error"),
    [
        ("none", {"keys": [1]}, 404, "UnknownFeatureViewError"),
        ("strict", {"keys": [1]}, 409, "StaleFeatureError"),
        ("risk", {"keys": ["x"]}, 400, "UnknownKeyOrNamespaceError"),
        ("risk", {"keys": [1], "versions": {"name": 9}}, 409, "StateVersionError"),
        ("risk", {"keys": [1], "at": "2026-01-01T00:00:00Z"}, 400, "RequestError"),
        ("risk", {"keys": [1], "at": "yesterday"}, 400, "RequestError"),
        ("risk", {"keys": [1], "what": 1}, 400, "RequestError"),
    ],
)
def test_refused_features_say_why(
    features: TestClient, view: str, body: dict[str, Any], status: int, error: str
) -> None:
    answer = features.post(f"/v1/features/{view}", json=body)
    assert (answer.status_code, answer.json().get("error")) == (status, error)
