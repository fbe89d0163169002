"""Hosts, and a router to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.routing.router import StateRouter
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import TOKEN, Cluster


@pytest.fixture
def connections() -> Iterator[KvConnections]:
    with KvConnections(TOKEN, timeout=PATIENCE) as made:
        yield made


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, hosts=2, partitions=5)
    made.batch({user: (user, "a") for user in range(1000)})
    yield made
    made.close()


@pytest.fixture(params=["direct", "via"])
def router(request: pytest.FixtureRequest, cluster: Cluster, connections: KvConnections) -> StateRouter:
    return StateRouter(connections, via=cluster.hosts[0].address if request.param == "via" else None)
