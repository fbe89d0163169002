"""Credentials that expire while a storage is open."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from backends.exceptions import StorageError
from backends.storage.checkpoint_storage import CheckpointStorage
from tests.backends.storage.s3_faults import Fault, FaultProxy, S3Server


class MachineMetadata(ThreadingHTTPServer):
    """Gives the credentials of an instance profile, as a machine of EC2 does. ``token`` is that of the next ones."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.token = "first"
        self.given: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: MachineMetadata

    def do_PUT(self) -> None:
        self._answer("of the machine")

    def do_GET(self) -> None:
        if self.path.endswith("/security-credentials/"):
            self._answer("role")
            return
        self.server.given.append(self.server.token)
        told = {"Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": "AKIA", "SecretAccessKey": "secret"}
        times = {"Expiration": "2100-01-01T00:00:00Z", "LastUpdated": "2026-01-01T00:00:00Z"}
        self._answer(json.dumps({**told, **times, "Token": self.server.token}))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests ask ``given``."""


@contextmanager
def machine_metadata() -> Iterator[MachineMetadata]:
    server = MachineMetadata()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def proxy(servers: tuple[S3Server, FaultProxy], monkeypatch: pytest.MonkeyPatch) -> FaultProxy:
    proxy = servers[1]
    for name in [*os.environ]:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    proxy.plan, proxy.seen = [], []
    return proxy


def opened(proxy: FaultProxy, bucket: str, **settings: str) -> CheckpointStorage:
    options = {"fs.s3a.endpoint": proxy.endpoint, "fs.s3a.path.style.access": "true", **settings}
    return CheckpointStorage.open(f"s3://{bucket}/ck", options, sleep=lambda _: None, retry_seconds=1.0)


def expired(token: str) -> Fault:
    """The service takes a token no more."""
    return Fault("answer", status=400, code="ExpiredToken", token=token, times=1000)


def test_credentials_of_the_machine_are_fetched_again_when_they_have_expired(
    servers: tuple[S3Server, FaultProxy], proxy: FaultProxy
) -> None:
    servers[0].make_bucket("expiring")
    with machine_metadata() as machine:
        storage = opened(proxy, "expiring", metadata_endpoint=machine.endpoint)
        ref = storage.put_new("x", b"1")
        assert machine.given == ["first"]
        proxy.plan, machine.token = [expired("first")], "second"
        assert storage.read(ref) == b"1"
        assert machine.given == ["first", "second"] and proxy.plan[0].happened == 1
        storage.put_new("y", b"1")
        proxy.plan, machine.token = [expired("second")], "third"
        assert storage.exists("x"), "the answer to HEAD says nothing but 400"
        assert machine.given == ["first", "second", "third"]


def test_permanently_expired_keys_are_an_error_with_a_remedy(
    servers: tuple[S3Server, FaultProxy], proxy: FaultProxy
) -> None:
    servers[0].make_bucket("expired")
    keys = {"fs.s3a.access.key": "any", "fs.s3a.secret.key": "any", "fs.s3a.session.token": "old"}
    storage = opened(proxy, "expired", **keys)
    proxy.plan = [expired("old")]
    for call in (lambda: storage.put_new("x", b"1"), lambda: storage.get("x"), storage.list):
        proxy.seen = []
        with pytest.raises(StorageError, match=r"ExpiredToken\. The credentials have expired.*with new ones.*profile"):
            call()
        assert len(proxy.seen) == 2, "one retry with the credentials that the store finds, no more"
    again = opened(proxy, "expired", **{**keys, "fs.s3a.session.token": "new"})
    assert again.read(again.put_new("x", b"1")) == b"1"
