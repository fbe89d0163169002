"""A bucket of a test on a real S3 protocol server, behind a proxy that makes faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef, digest
from backends.storage.requests import BucketTraffic
from tests.backends.storage.s3_faults import Fault, FaultProxy, S3Server


@dataclass
class Clock:
    """A clock that only sleeping moves, and that does so at once."""

    now: float = 0.0
    waits: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@dataclass
class S3:
    """A bucket of the test's own, and the ways to it: ``open`` through the proxy, ``direct`` past it."""

    server: S3Server
    proxy: FaultProxy
    bucket: str
    clock: Clock

    def open(self, location: str = "", *, retry_seconds: float = 10.0, **settings: str) -> CheckpointStorage:
        return self._open(self.proxy.endpoint, location, retry_seconds, settings)

    def direct(self) -> CheckpointStorage:
        return self._open(self.server.endpoint, "", 0.0, {})

    def options(self, endpoint: str, settings: dict[str, str] | None = None) -> dict[str, str]:
        """Spark's settings, as a user gives them."""
        options = {
            "endpoint": endpoint,
            "path.style.access": "true",
            "access.key": self.server.account.access_key,
            "secret.key": self.server.account.secret_key,
            **{name.replace("_", "."): value for name, value in (settings or {}).items()},
        }
        return {f"spark.hadoop.fs.s3a.{name}": value for name, value in options.items()}

    def _open(self, endpoint: str, location: str, retry_seconds: float, settings: dict[str, str]) -> CheckpointStorage:
        return CheckpointStorage.open(
            location or f"s3a://{self.bucket}/dir",
            self.options(endpoint, settings),
            clock=lambda: self.clock.now,
            sleep=self.clock.sleep,
            retry_seconds=retry_seconds,
            buckets=BucketTraffic(lambda: self.clock.now),
        )

    def plan(self, *faults: Fault) -> None:
        """Plan the next faults, and count requests from zero. A minute passes first: no request is held back."""
        self.clock.now += 60
        self.proxy.plan = list(faults)
        self.proxy.seen = []
        self.clock.waits = []


def calls_on(storage: CheckpointStorage) -> dict[str, Callable[[], object]]:
    """Every way to reach the storage, each on the file 'there' that has the content b'content'."""
    return {
        "put_new": lambda: storage.put_new("new", b"content"),
        "get": lambda: storage.get("there"),
        "read": lambda: storage.read(FileRef("there", 7, digest(b"content"))),
        "get_range": lambda: storage.get_range("there", 2, 3),
        "read a part": lambda: storage.read(FileRef("part", 3, digest(b"nte"), "there", 2)),
        "read_together": lambda: storage.read_together([FileRef("part", 3, digest(b"nte"), "there", 2)]),
        "exists": lambda: storage.exists("there"),
        "list": storage.list,
        "delete": lambda: storage.delete("there"),
        "delete_all": lambda: storage.delete_all(["there", "not there"]),
    }


TRANSIENT = {
    "503": Fault("answer", status=503),
    "500": Fault("answer", status=500),
    "400 RequestTimeout": Fault("answer", status=400),
    "broken before": Fault("drop_before"),
    "broken after": Fault("drop_after"),
    "500 after": Fault("answer_after", status=500),
}


def again(fault: Fault, times: int, method: str = "", path: str = "") -> Fault:
    """A fresh copy of a fault."""
    return Fault(fault.kind, method, path, fault.status, times)
