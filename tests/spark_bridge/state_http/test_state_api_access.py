"""Who may ask the HTTP service: tokens of headers, passwords, the page."""

from __future__ import annotations

import base64

import pytest
from fastapi.testclient import TestClient

from spark_bridge import exceptions
from spark_bridge.exceptions import AccessDeniedError, QueryableStateError
from spark_bridge.state_http.access import problem_of, token_of_header
from spark_bridge.state_http.app import create_app
from tests.spark_bridge.state_http.http_state import BEARER, PROBLEM, connected
from tests.spark_bridge.state_http.memory_client import TOKEN, MemoryClient, Tokens

PATHS = [
    ("GET", "/"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/v1/operators"),
    ("GET", "/v1/operators/users"),
    ("GET", "/v1/operators/users/keys/1"),
    ("POST", "/v1/operators/users/lookup"),
    ("POST", "/v1/operators/users/scan"),
    ("GET", "/nothing"),
    ("OPTIONS", "/v1/operators"),
    ("HEAD", "/"),
]


def test_no_error_of_a_client_is_an_internal_one() -> None:
    kinds = {kind for kind in vars(exceptions).values() if isinstance(kind, type)}
    answers = [
        kind("Ask for less.") for kind in kinds if issubclass(kind, QueryableStateError) and kind != QueryableStateError
    ]
    assert len(answers) > 10
    # An application with a wrong certificate does not start.
    named = {type(error).__name__ for error in answers if problem_of(error)["status"] == 500}
    assert named == {"TlsError"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Digest {TOKEN}"},
        {"Authorization": "Basic !"},
        {"Authorization": TOKEN},
    ],
)
def test_no_token_no_answer(memory: MemoryClient, headers: dict[str, str]) -> None:
    with TestClient(create_app(connected(memory), Tokens())) as http:
        for method, path in PATHS:
            answer = http.request(method, path, headers=headers)
            assert (answer.status_code, answer.headers["content-type"]) == (401, PROBLEM), path
            assert answer.headers["www-authenticate"].startswith("Basic ")
    assert memory.asked == []


def test_basic_access_with_the_token_as_password(memory: MemoryClient) -> None:
    with TestClient(create_app(connected(memory), Tokens())) as http:
        assert http.get("/v1/operators", auth=("anybody", TOKEN)).status_code == 200
        assert http.get("/v1/operators", auth=(TOKEN, "")).status_code == 401
        two = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer other")]
        assert http.get("/v1/operators", headers=two).status_code == 401


def test_a_token_that_is_revoked_is_refused_at_once(memory: MemoryClient) -> None:
    tokens = Tokens()
    with TestClient(create_app(connected(memory), tokens), headers=BEARER) as http:
        assert http.get("/v1/operators").status_code == 200
        tokens.valid.clear()
        assert http.get("/v1/operators").status_code == 401


def test_the_token_of_a_header() -> None:
    assert token_of_header("bearer  abc ") == "abc"
    assert token_of_header("BASIC " + base64.b64encode(b"user:a:b").decode()) == "a:b"
    assert token_of_header("") == ""
    for wrong in ("abc", "Basic é", "Basic " + "A" * 5000, "Bearer " + "a" * 5000):
        with pytest.raises(AccessDeniedError):
            token_of_header(wrong)
