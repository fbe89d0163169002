"""The HTTP service over a client in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from spark_bridge.state_http.access import HttpLimits
from spark_bridge.state_http.app import create_app
from tests.patience import PATIENCE
from tests.spark_bridge.state_http.http_state import BEARER, connected
from tests.spark_bridge.state_http.memory_client import MemoryClient, Tokens


@pytest.fixture
def memory() -> MemoryClient:
    return MemoryClient()


@pytest.fixture
def http(memory: MemoryClient) -> Iterator[TestClient]:
    limits = HttpLimits(max_body_bytes=100_000, max_keys=100, max_rows=20_000, max_scans=2, scan_seconds=PATIENCE)
    with TestClient(
        create_app(connected(memory), Tokens(), limits), headers=BEARER, raise_server_exceptions=False
    ) as made:
        yield made
