"""A watch over HTTP, on real hosts: server-sent events, keep-alive comments, and resumption after the last event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from spark_bridge.queryable.client.async_client import AsyncQueryableStateClient
from spark_bridge.state_http import models
from spark_bridge.state_http.access import HttpLimits
from spark_bridge.state_http.app import create_app
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import Cluster, go_back
from tests.spark_bridge.queryable.memory_reads import eventually
from tests.spark_bridge.state_http.memory_client import TOKEN, Tokens
from tests.spark_bridge.ui.browser import serving

BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    made.batch({1: (1, "a"), 2: (2, "b")})
    yield made
    made.close()


@contextmanager
def served(cluster: Cluster, tokens: Tokens | None = None, **limits: Any) -> Iterator[str]:
    made = AsyncQueryableStateClient(cluster.client())

    async def connect() -> AsyncQueryableStateClient:
        return made

    limits = {"timeout": PATIENCE, "heartbeat_seconds": 0.2, **limits}
    with serving(create_app(connect, tokens or Tokens(), HttpLimits(**limits))) as address:
        yield f"{address}/v1/operators/totals/watch"


@contextmanager
def events(url: str, headers: dict[str, str] | None = None, **params: Any) -> Iterator[Iterator[dict[str, str]]]:
    """Yield the blocks of a stream as they arrive; a block that is a comment has the key ``"comment"``."""
    given = {**BEARER, **(headers or {})}
    with httpx.Client(timeout=PATIENCE) as client, client.stream("GET", url, headers=given, params=params) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield blocks(answer.iter_lines())


def blocks(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    block: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            block[name or "comment"] = value
        else:
            yield block
            block = {}


def changes(stream: Iterator[dict[str, str]]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    for block in stream:
        if "event" in block:
            assert block["event"] == "change", block
            yield block.get("id"), json.loads(block["data"])


def test_versions_arrive_as_they_complete_and_a_caller_resumes_after_the_last_event(cluster: Cluster) -> None:
    with served(cluster) as url:
        with events(url) as stream:
            assert next(stream) == {"id": "1/run1", "comment": "watching"}
            cluster.batch({2: (20, "b"), 3: (3, "c")})
            version, data = next(changes(stream))
        assert version == "2/run1" and data["version"] == 2 and data["is_last"]
        rows = sorted(data["rows"], key=lambda row: row["user"])
        assert rows == [
            {"change_type": "update", "user": 2, "before": {"n": 2, "name": "b"}, "after": {"n": 20, "name": "b"}},
            {"change_type": "insert", "user": 3, "before": None, "after": {"n": 3, "name": "c"}},
        ]
        cluster.batch({1: None})
        cluster.batch({1: (5, "e")})
        with events(url, {"Last-Event-ID": "2"}) as stream:
            found = changes(stream)
            assert [next(found)[0] for _ in range(2)] == ["3/run1", "4/run1"]
        with events(url, {"Last-Event-ID": "3/run1"}, from_version=1) as stream:
            assert next(changes(stream))[0] == "4/run1"


def test_a_caller_that_resumes_after_a_rollback_is_told_that_its_versions_are_invalid(cluster: Cluster) -> None:
    with served(cluster) as url:
        with events(url, from_version=0) as stream:
            cluster.batch({2: (20, "b")})
            found = changes(stream)
            last = [next(found)[0] for _ in range(2)][-1]
        go_back(cluster, 1, "run2")
        cluster.batch({2: (21, "other")})
        cluster.batch({2: (22, "other")})
        with events(url, {"Last-Event-ID": str(last)}) as stream:
            told = next(block for block in stream if "event" in block)
        assert told["event"] == "problem", told
        problem = json.loads(told["data"])
        assert (problem["status"], problem["error"]) == (409, "StateVersionError")
        assert "rolled back" in problem["detail"]
        with events(url, from_version=2) as stream:  # "Read the state again, and watch it from there."
            version, data = next(changes(stream))
    assert data["version"] == 3 and [row["after"] for row in data["rows"]] == [{"n": 22, "name": "other"}], version


def test_a_watch_of_some_keys_has_only_their_changes(cluster: Cluster) -> None:
    with served(cluster) as url, events(url, from_version=0, key=["2", "7"]) as stream:
        cluster.batch({1: (9, "a")})
        cluster.batch({7: (7, "g")})
        found = changes(stream)
        assert [(v, [row["user"] for row in d["rows"]]) for v, d in (next(found), next(found))] == [
            ("1/run1", [2]),
            ("3/run1", [7]),
        ]


def test_keep_alive_comments_advance_over_versions_without_changes(cluster: Cluster) -> None:
    with served(cluster) as url, events(url, key=["2"]) as stream:
        assert next(stream)["id"] == "1/run1"
        assert next(stream) == {"id": "1/run1", "comment": "nothing new"}
        for _ in range(3):
            cluster.batch({1: (9, "a")})
        # One behind the last one, whose change may be on its way.
        assert next(block for block in stream if block["id"] == "3/run1")["comment"] == "nothing new"


def test_a_large_version_comes_in_pieces_of_which_only_the_last_has_an_id(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "PIECE_ROWS", 10)
    with served(cluster) as url, events(url, from_version=1) as stream:
        cluster.batch({n: (n, "x") for n in range(100, 125)})
        found = changes(stream)
        pieces = [next(found) for _ in range(3)]
    assert [(v, d["is_last"], len(d["rows"])) for v, d in pieces] == [
        (None, False, 10),
        (None, False, 10),
        ("2/run1", True, 5),
    ]


def test_a_revoked_token_ends_the_watch(cluster: Cluster) -> None:
    tokens = Tokens()
    with served(cluster, tokens) as url, events(url) as stream:
        assert next(stream)["id"] == "1/run1"
        tokens.valid.clear()
        problem = next(block for block in stream if "event" in block)
        assert problem["event"] == "problem" and json.loads(problem["data"])["error"] == "AccessDeniedError"
        assert next(stream, None) is None


def test_what_cannot_be_is_refused(cluster: Cluster) -> None:
    for _ in range(8):
        cluster.batch({1: (9, "a")})
    with served(cluster, max_watches=1) as url:

        def refused(status: int, error: str, headers: dict[str, str] | None = None, **params: Any) -> str:
            answer = httpx.get(url, params=params, headers={**BEARER, **(headers or {})}, timeout=PATIENCE)
            assert (answer.status_code, answer.json()["error"]) == (status, error), answer.text
            return str(answer.json()["detail"])

        refused(404, "UnknownOperatorError", query="nothing")
        refused(404, "UnknownKvStateIdError", state="nothing")
        refused(400, "UnknownKeyOrNamespaceError", key="x")
        refused(400, "RequestError", from_version=-1)
        assert "'soon'" in refused(400, "RequestError", {"Last-Event-ID": "soon"})
        assert httpx.get(url).status_code == 401
        with events(url) as stream:
            next(stream)
            refused(429, "TooManyRequestsError")
        eventually(lambda: is_free(url))


def is_free(url: str) -> bool:
    """Whether the watch that was left is over."""
    with httpx.Client(timeout=PATIENCE) as client, client.stream("GET", url, headers=BEARER) as answer:
        return answer.status_code == 200


def test_versions_that_are_gone_are_named(cluster: Cluster) -> None:
    with served(cluster) as url:

        def oldest() -> int:
            cluster.batch({1: (9, "a")})
            cluster.remove_old_versions()
            (operator,) = cluster.client().operators()
            return int(operator["oldest_version"])

        eventually(lambda: oldest() > 1)
        answer = httpx.get(url, params={"from_version": 0}, headers=BEARER, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["error"]) == (409, "StateVersionError")
        assert "are kept" in answer.json()["detail"]
