"""A bucket for each test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.backends.storage.s3_bucket import S3, Clock
from tests.backends.storage.s3_faults import FaultProxy, S3Server


@pytest.fixture
def s3(
    servers: tuple[S3Server, FaultProxy], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3]:
    server, proxy = servers
    for name in [*os.environ]:
        if name.startswith("AWS_") or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name)
    bucket = f"bucket-{time.time_ns()}"
    server.make_bucket(bucket)
    made = S3(server, proxy, bucket, Clock())
    made.plan()
    yield made
    made.plan()
