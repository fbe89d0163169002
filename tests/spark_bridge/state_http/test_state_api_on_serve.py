"""The state over HTTP on real Ray Serve."""

from __future__ import annotations

import json
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE
from tests.scratch import SCRATCH
from tests.spark_bridge.state_http.memory_client import TOKEN

COORDINATOR = "of-state-api"

# Otherwise: the application without Serve, in test_state_api.py and test_state_api_on_hosts.py.
pytestmark = [pytest.mark.ray, pytest.mark.thorough]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve with the application at ``/state``, and at ``/memory`` one whose scans fail in the middle."""
    import ray
    from ray import serve

    from coordinator_actor.actor import get_or_create_coordinator
    from spark_bridge.state_http.serve_app import Settings, build_app

    ray_dir = tempfile.mkdtemp(prefix="rs-", dir=SCRATCH)
    ray.init(
        address="local",
        num_cpus=2,
        namespace="statestore",
        log_to_driver=False,
        logging_level="WARNING",
        include_dashboard=False,
        _temp_dir=ray_dir,
        object_store_memory=100 << 20,
    )
    try:
        get_or_create_coordinator(name=COORDINATOR)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        limits = {"max_body_bytes": 1000, "timeout": PATIENCE}
        settings = Settings.model_validate({"coordinator_name": COORDINATOR, "limits": limits})
        serve.run(build_app(settings), name="state", route_prefix="/state")
        serve.run(failing(), name="memory", route_prefix="/memory")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(ray_dir, ignore_errors=True)


def failing() -> Any:
    from fastapi import FastAPI
    from ray import serve

    def http() -> FastAPI:
        from spark_bridge.exceptions import QueryTimeoutError
        from spark_bridge.state_http.app import create_app
        from tests.spark_bridge.state_http.memory_client import MemoryClient, Tokens

        async def connect() -> Any:
            return MemoryClient(failure=QueryTimeoutError("a host is gone"), fail_after=2)

        return create_app(connect, Tokens())

    return serve.deployment(serve.ingress(http)(), name="Failing", ray_actor_options={"num_cpus": 0}).bind()


def coordinator(method: str, *args: object, name: str = COORDINATOR) -> Any:
    import ray

    actor = ray.get_actor(name, namespace="statestore")
    return ray.get(getattr(actor, method).remote(*args), timeout=PATIENCE)


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"not within {PATIENCE} s"
        time.sleep(0.1)


def test_the_application_on_serve(address: str) -> None:
    token = coordinator("issue_token", "browser")
    with httpx.Client(base_url=f"{address}/state", auth=("", token), timeout=PATIENCE) as http:
        wait_until(lambda: http.get("/v1/operators").status_code == 200)
        for path in ("/openapi.json", "/v1/operators", "/nothing"):
            assert http.get(path, auth=("", "wrong")).status_code == 401
            assert http.get(path, auth=None).status_code == 401
        assert http.get("/v1/operators").json() == {"operators": []}
        answer = http.post("/v1/sql", json={"sql": "select 1 as a"})
        assert answer.json()["rows"] == [{"a": 1}], answer.text
        assert "/v1/operators/{operator}/scan" in http.get("/openapi.json").json()["paths"]
        for answer in (
            http.get("/v1/operators/nothing/keys/1"),
            http.post("/v1/operators/nothing/lookup", json={"keys": [1]}),
            http.post("/v1/operators/nothing/scan", json={}),
        ):
            assert (answer.status_code, answer.json()["error"]) == (404, "UnknownOperatorError")
        assert http.post("/v1/operators/nothing/lookup", content=b"x" * 1001).status_code == 413
        coordinator("revoke_token", "browser")
        wait_until(lambda: http.get("/v1/operators").status_code == 401)


def test_a_scan_that_fails_is_cut_short_on_the_wire(address: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=f"{address}/memory", headers=headers, timeout=PATIENCE) as http:
        received = b""
        with (
            pytest.raises(httpx.RemoteProtocolError),
            http.stream("POST", "/v1/operators/users/scan", json={}) as answer,
        ):
            assert (answer.status_code, answer.headers["x-statestore-version"]) == (200, "7")
            for piece in answer.iter_bytes():
                received += piece
        lines = received.splitlines()
        assert json.loads(lines[-1])["problem"]["detail"] == "a host is gone"
        assert json.loads(lines[0]) == {"user": 0, "name": "user 0"}
        assert http.get("/v1/operators").status_code == 200


def test_the_page_below_a_prefix(address: str) -> None:
    """Sign in with a token for people, and see that no query runs while the coordinator does."""
    act = coordinator("issue_token", "anna")
    with httpx.Client(base_url=f"{address}/state", headers={"Accept": "text/html"}, timeout=PATIENCE) as http:
        led = http.get("/", follow_redirects=True)
        assert led.status_code == 401 and led.url.path == "/state/ui/"
        assert http.get("/ui/static/page.css").headers["content-type"].startswith("text/css")
        fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', led.text))
        wait_until(lambda: http.post("/ui/signin", data={**fields, "token": act}).status_code == 303)
        front = http.get("/ui/")
        assert front.status_code == 200 and "No query runs" in front.text and 'href="/state/ui/hosts"' in front.text
        coordinator("revoke_token", "anna")
        wait_until(lambda: http.get("/ui/").status_code == 401)


def test_state_that_is_served_without_a_stream(address: str) -> None:
    """The state of a checkpoint, under the name of the serving process."""
    from ray import serve

    from spark_bridge import serve_state
    from spark_bridge.state_http.serve_app import Settings, build_app
    from tests.spark_bridge.state_data.format_fixtures import Stored

    with serve_state(Stored("rocksdb").checkpoint, operators=["visits"], name="copy", replicas=1) as serving:
        settings = Settings.model_validate({"coordinator_name": serving.coordinator_name})
        serve.run(build_app(settings), name="served", route_prefix="/served")
        token = coordinator("issue_token", "browser", name=serving.coordinator_name)
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=f"{address}/served", headers=headers, timeout=PATIENCE) as http:
            wait_until(lambda: http.get("/v1/operators").status_code == 200)
            (operator,) = http.get("/v1/operators").json()["operators"]
            assert operator["operator"] == "visits"
            counted = http.post("/v1/sql", json={"sql": 'select max(n) as most from "visits.last"'})
            assert counted.status_code == 200 and counted.json()["rows"][0]["most"] > 1, counted.text
            found = http.get("/v1/operators/visits/keys/many", params={"state": "last"})
            assert found.status_code == 200 and found.json(), found.text
        serve.delete("served")
