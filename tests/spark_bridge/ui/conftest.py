"""Pages of a model, of real hosts and of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from starlette.testclient import TestClient

from spark_bridge.ui.app import create_ui
from spark_bridge.ui.requests import System
from tests.spark_bridge.ui.systems import ACT, Served, Tokens, served

Look = Callable[..., TestClient]


@pytest.fixture
def look() -> Look:
    """Makes a client of the page of a system, with a token in the header as programs have it."""

    def make(system: System, token: str | None = ACT, **options: object) -> TestClient:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return TestClient(create_ui(system, Tokens()), headers=headers, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Users 0 to 199: three versions, each with n one higher for fewer users."""
    made = served(tmp_path_factory.mktemp("page"))
    for batch, users in enumerate((200, 100, 10)):
        made.cluster.batch({i: (i + batch, f"user {i}") for i in range(users)})
    yield made
    made.cluster.close()
