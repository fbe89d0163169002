"""The connections that a process keeps to hosts, while several threads use them and one of them gives a host up."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.flight_server import HostFlightServer
from spark_bridge.transport import flight_client
from spark_bridge.transport.flight_client import client_for, forget_client
from tests.coordinator_actor.coordinator_world import World
from tests.effort import effort
from tests.spark_bridge.conftest import wait_until
from tests.spark_bridge.host.host_steps import make_host

TOKEN = "token"
CALLERS, CALLS = 3, effort(8, 5_000)


@pytest.fixture(autouse=True)
def nobody_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port of one test may be that of the next one."""
    monkeypatch.setattr(flight_client, "_given_up", set())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HostFlightServer]:
    world = World(tmp_path)
    host = make_host(world, world.coordinator(0), 0, tmp_path)
    made = HostFlightServer(lambda: host, "127.0.0.1", TOKEN, lambda method, args: None)
    yield made
    made.shutdown()
    host.close()


def test_host_given_up_by_one_thread_still_serves_the_others(server: HostFlightServer) -> None:
    address = f"grpc://127.0.0.1:{server.port}"

    def ask(_: int) -> None:
        for _ in range(CALLS):
            assert client_for(address, TOKEN).describe()["host_id"] == "h0"

    with ThreadPoolExecutor(CALLERS) as threads:
        asking = [threads.submit(ask, i) for i in range(CALLERS)]
        while not all(one.done() for one in asking):
            forget_client(address, TOKEN)
        for one in asking:
            one.result()
    forget_client(address, TOKEN)


def test_abandoned_connection_is_closed_after_its_last_call(server: HostFlightServer) -> None:
    address = f"grpc://127.0.0.1:{server.port}"

    def is_connected() -> bool:
        gc.collect()
        found = psutil.Process().net_connections("tcp")
        return any(c.raddr and c.raddr.port == server.port and c.status == psutil.CONN_ESTABLISHED for c in found)

    client = client_for(address, TOKEN)
    forget_client(address, TOKEN)
    assert client.describe()["host_id"] == "h0", "its current users may keep it"
    assert client_for(address, TOKEN) is not client
    forget_client(address, TOKEN)
    assert is_connected()
    del client
    wait_until(lambda: not is_connected())


def test_host_that_accepts_connections_again_is_called_again() -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        address = f"grpc://127.0.0.1:{place.getsockname()[1]}"
        first = client_for(address, TOKEN)
        forget_client(address, TOKEN)
        for _ in range(2):
            with pytest.raises(HostUnavailableError, match="where a call was given up before"):
                client_for(address, TOKEN)
        place.listen()
        assert client_for(address, TOKEN) is not first
    assert client_for(address, TOKEN), "it has not been given up since"
