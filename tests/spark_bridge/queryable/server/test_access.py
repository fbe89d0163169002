"""The cluster's token opens every port, a read-only token the query port, and anything else is rejected."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.access_tokens import AccessTokens, MemoryTokenStore
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import HostInfo
from spark_bridge.exceptions import AccessDeniedError, HostUnavailableError
from spark_bridge.flight_server import HostFlightServer
from spark_bridge.host.host import Host
from spark_bridge.queryable.client_connection import ClientConnection
from spark_bridge.queryable.protocol import LookupReply, LookupRequest, pack_one
from spark_bridge.queryable.server import request_handler
from spark_bridge.queryable.server.server import KvStateServer
from spark_bridge.queryable.server.tokens import ClusterTokens
from spark_bridge.transport.flight_client import HostClient
from spark_bridge.transport.protocol import GetCommand, TaskIdentity
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.memory_reads import MemoryReads

SECRET = "5ec4e7" * 8


class Cluster:
    """A coordinator and one host, each with its real servers, and no Ray."""

    def __init__(self, root: Path) -> None:
        self.now = time.time()
        self.tokens = AccessTokens(SECRET, MemoryTokenStore(), lambda: self.now)
        self.calls: list[str] = []
        coordinator = Coordinator(lambda: self.now, CheckpointStorage.open, tokens=self.tokens)
        self.host = Host(HostInfo("h0", "a", "grpc://127.0.0.1:1", "node", "s"), coordinator, root / "local")
        self.host.register()
        self.verifier = ClusterTokens(SECRET, lambda: self.host.revoked_tokens, lambda: self.now)
        self.flight = HostFlightServer(lambda: self.host, "127.0.0.1", SECRET, self._call)
        self.query = KvStateServer(MemoryReads(), self.verifier, ip="127.0.0.1")
        self.query.start()

    def _call(self, method: str, args: dict[str, object]) -> object:
        self.calls.append(method)
        return None

    def connect(self, token: str) -> ClientConnection:
        return ClientConnection(self.query.server_address, token, None, time.monotonic() + 10)

    def close(self) -> None:
        self.query.shutdown()
        self.flight.shutdown()
        self.host.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def looked_up(connection: ClientConnection) -> Any:
    deadline = time.monotonic() + PATIENCE
    connection.send(LookupRequest("run", "totals"), pack_one(b"k1"), deadline)
    return connection.receive(deadline)[0]


WRONG = {"": "No token", "wrong": "unknown", SECRET[:-1]: "unknown", "ßecret": "unknown", "ssr1.x": "malformed"}


@pytest.mark.parametrize("token", WRONG)
def test_without_a_valid_token_no_port_answers(cluster: Cluster, token: str) -> None:
    cluster.host.heartbeat()
    with pytest.raises(AccessDeniedError, match=WRONG[token]) as caught:
        cluster.verifier.verify(token)
    assert SECRET[:-1] not in str(caught.value)
    with pytest.raises(AccessDeniedError, match=WRONG[token]):
        cluster.connect(token)
    if token.isascii():
        client = HostClient(cluster.flight.address, token, 10)
        with pytest.raises(AccessDeniedError, match="cluster's token"):
            client.describe()
        client.close()


def test_the_clusters_token_is_for_every_port(cluster: Cluster) -> None:
    grant = cluster.verifier.verify(SECRET)
    assert grant.name == "cluster" and not grant.read_only
    connection = cluster.connect(SECRET)
    assert isinstance(looked_up(connection), LookupReply)
    connection.close()
    client = HostClient(cluster.flight.address, SECRET, 10)
    assert client.describe()["host_id"] == "h0"
    client.close()


def test_a_read_only_token_is_for_the_query_port_alone(cluster: Cluster) -> None:
    token = cluster.tokens.issue_token("dashboard")
    cluster.host.heartbeat()
    grant = cluster.verifier.verify(token)
    assert grant.read_only and grant.name == cluster.tokens.list_tokens()[0].id
    connection = cluster.connect(token)
    assert isinstance(looked_up(connection), LookupReply)
    connection.close()
    client = HostClient(cluster.flight.address, token, 10)
    task = TaskIdentity("run", "op", 0, 0, "1", "i")
    calls = [
        lambda: client.open(task),
        lambda: client.call_coordinator("deactivate_instances", {"run_id": "run"}),
        lambda: client.locate("op"),
        client.describe,
        lambda: client.get_many(GetCommand("run", "op", 0), pa.array([b"k"])),
    ]
    for call in calls:
        with pytest.raises(AccessDeniedError, match="read-only token is for its query address"):
            call()
    client.close()
    assert cluster.calls == []


def test_a_revocation_reaches_a_host_with_its_heartbeat(cluster: Cluster) -> None:
    token = cluster.tokens.issue_token("dashboard")
    cluster.host.heartbeat()
    assert cluster.verifier.verify(token)
    cluster.tokens.revoke_token("dashboard")
    cluster.host.heartbeat()
    with pytest.raises(AccessDeniedError, match="revoked"):
        cluster.verifier.verify(token)
    with pytest.raises(AccessDeniedError, match="revoked"):
        cluster.connect(token)


def test_a_revocation_ends_connections_that_are_open(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_handler, "TOKEN_SECONDS", 0.05)
    token = cluster.tokens.issue_token("dashboard")
    cluster.host.heartbeat()
    connection = cluster.connect(token)
    assert isinstance(looked_up(connection), LookupReply)
    cluster.tokens.revoke_token("dashboard")
    cluster.host.heartbeat()
    deadline = time.monotonic() + PATIENCE
    while isinstance(answer := looked_up(connection), LookupReply):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert answer.error == "AccessDeniedError" and "revoked" in answer.message
    connection.close()


def test_an_expired_token_is_refused(cluster: Cluster) -> None:
    token = cluster.tokens.issue_token("dashboard", 60)
    cluster.host.heartbeat()
    assert cluster.verifier.verify(token)
    cluster.now += 61
    with pytest.raises(AccessDeniedError, match="expired"):
        cluster.connect(token)


def test_host_without_a_revocation_list_says_so(cluster: Cluster) -> None:
    token = cluster.tokens.issue_token("dashboard")
    assert not cluster.verifier.verify(SECRET).read_only
    with pytest.raises(HostUnavailableError, match="ask again soon"):
        cluster.connect(token)
    cluster.host.heartbeat()
    cluster.connect(token).close()
    cluster.host._clock = lambda: time.monotonic() + 61  # it has not reached the coordinator since
    with pytest.raises(HostUnavailableError, match="ask again soon"):
        cluster.connect(token)
    cluster.host.heartbeat()
    cluster.connect(token).close()


def test_an_answer_to_a_heartbeat_that_was_overtaken_brings_no_token_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = cluster.tokens.issue_token("dashboard")
    early = cluster.host.coordinator.heartbeat_host("h0", "a")
    cluster.tokens.revoke_token("dashboard")
    cluster.host.heartbeat()
    monkeypatch.setattr(cluster.host.coordinator, "heartbeat_host", lambda *_: early)
    cluster.host.heartbeat()
    with pytest.raises(AccessDeniedError, match="revoked"):
        cluster.verifier.verify(token)
