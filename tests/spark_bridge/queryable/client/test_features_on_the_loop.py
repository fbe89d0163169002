"""Requests for few features that the asynchronous client sends and reads on its event loop, and what helps them."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from spark_bridge.exceptions import QueryableStateError, QueryTimeoutError, StaleFeatureError
from spark_bridge.queryable import client_connection, connections
from spark_bridge.queryable.client import async_client
from spark_bridge.queryable.client.arguments import KeyCodec
from spark_bridge.queryable.client.async_client import AsyncQueryableStateClient
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.queryable.routing import feature_reads
from spark_bridge.queryable.routing.feature_reads import FeatureReads
from spark_bridge.queryable.routing.router import owner_of_features
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.feature_world import VIEW, FeatureCluster

USERS = 24
ROUNDS = 50


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FeatureCluster]:
    made = FeatureCluster(tmp_path, send_buffer=4096)
    rows = {user: (user, f"user {user}") for user in range(USERS)}
    made.write({"totals": rows, "profile": {user: (user / 4, user, True) for user in range(USERS)}})
    made.declare()
    yield made
    made.close()


def run(cluster: FeatureCluster, steps: Callable[[AsyncQueryableStateClient], Awaitable[None]]) -> None:
    """Run steps with a client that asks the owners, and has connections to all of them."""

    async def started() -> None:
        client = AsyncQueryableStateClient(cluster.client(direct=True))
        await warm(client)
        await asyncio.wait_for(steps(client), PATIENCE)
        await client.close()

    asyncio.run(started())


async def warm(client: AsyncQueryableStateClient) -> None:
    """Ask until no thread is needed: then there are enough connections."""
    submit, num_submitted = client._pool.submit, 0

    def counted(*args: Any) -> Any:
        nonlocal num_submitted
        num_submitted += 1
        return submit(*args)

    client._pool.submit = counted  # type: ignore[method-assign]
    for _ in range(ROUNDS):
        num_submitted = 0
        await answers(client, range(USERS))
        if not num_submitted:
            break
    assert not num_submitted
    client._pool.submit = submit  # type: ignore[method-assign]


async def answers(client: AsyncQueryableStateClient, users: Any) -> None:
    """Ask for single users at once, and compare the answers."""
    rows = await asyncio.gather(*(client.features("risk", [user]) for user in users))
    assert [row.to_dict() for row in rows] == [expected(user) for user in users]


def expected(user: int) -> dict[str, list[Any]]:
    columns = {"user": user, "n": user, "score": user / 4, "user_name": f"user {user}", "level": user}
    return {name: [value] for name, value in columns.items()}


def num_busy(client: AsyncQueryableStateClient) -> int:
    """Return the number of connections that are neither closed nor idle."""
    return sum(pool.num_open - len(pool.idle) for pool in client._client._connections._pools.values())


def first_blocked(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let the first request for features wait in its host; return the events of its coming and of its release."""
    came, released = threading.Event(), threading.Event()
    read = FeatureReads.features

    def features(self: FeatureReads, *args: Any) -> Any:
        if not came.is_set():
            came.set()
            assert released.wait(PATIENCE)
        return read(self, *args)

    monkeypatch.setattr(FeatureReads, "features", features)
    return came, released


def test_each_host_gets_the_keys_it_owns(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(client: AsyncQueryableStateClient) -> None:
        router = client._client._router
        begin, requests = router.begin_features, []

        def begun(location: Any, request: Any, keys: Any, deadline: float) -> Any:
            stored = [keys] if isinstance(keys, bytes) else keys
            requests.append([owner_of_features(location, key) for key in stored])
            return begin(location, request, keys, deadline)

        monkeypatch.setattr(router, "begin_features", begun)
        await answers(client, range(USERS))
        assert not [timer for timer in asyncio.get_running_loop()._scheduled if "_give_up" in repr(timer)]  # type: ignore[attr-defined]
        assert {len(set(owners)) for owners in requests} == {1} and max(map(len, requests)) > 1
        assert {owner for owners in requests for owner in owners} == {host.address for host in cluster.hosts}

    run(cluster, steps)


def test_a_connection_that_was_closed_is_replaced_by_a_thread(
    cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(client: AsyncQueryableStateClient) -> None:
        connect, threads = client_connection._connected, []

        def connected(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return connect(*args)

        monkeypatch.setattr(client_connection, "_connected", connected)
        for pool in client._client._connections._pools.values():
            for connection in pool.idle:
                connection.cut()
        await answers(client, range(USERS))
        assert threads and threading.current_thread() not in threads

    run(cluster, steps)


def test_a_host_that_hangs_is_asked_again(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(client: AsyncQueryableStateClient) -> None:
        monkeypatch.setattr(async_client, "SMALL_LOOKUP_SECONDS", 0.2)
        _, released = first_blocked(monkeypatch)
        await answers(client, [3])
        assert num_busy(client) == 0, "its connection is closed"
        released.set()

    run(cluster, steps)


def test_a_request_ends_with_its_timeout(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(client: AsyncQueryableStateClient) -> None:
        _, released = first_blocked(monkeypatch)
        with pytest.raises(QueryTimeoutError, match=r"features\('risk'\) of 1 keys"):
            await client.features("risk", [3], timeout=0.2)
        released.set()
        await answers(client, [3])

    run(cluster, steps)


def test_a_caller_that_leaves_does_not_disturb_the_next(
    cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(client: AsyncQueryableStateClient) -> None:
        came, released = first_blocked(monkeypatch)
        left = asyncio.create_task(client.features("risk", [3]))
        assert await asyncio.to_thread(came.wait, PATIENCE)
        left.cancel()
        await answers(client, [4])
        released.set()
        await answers(client, range(USERS))

    run(cluster, steps)


def test_a_request_without_a_caller_is_not_repeated(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(client: AsyncQueryableStateClient) -> None:
        monkeypatch.setattr(async_client, "SMALL_LOOKUP_SECONDS", 0.2)
        came, released = first_blocked(monkeypatch)
        left = asyncio.create_task(client.features("risk", [3]))
        assert await asyncio.to_thread(came.wait, PATIENCE)
        left.cancel()
        submit, repeated = client._pool.submit, []
        monkeypatch.setattr(client._pool, "submit", lambda *asked: repeated.append(submit(*asked)))
        while client._lookups:  # the last lookup of a group ends it
            await asyncio.sleep(0.01)
        assert not repeated
        released.set()

    run(cluster, steps)


def test_closing_the_client_ends_its_requests(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(client: AsyncQueryableStateClient) -> None:
        came, released = first_blocked(monkeypatch)
        task = asyncio.create_task(client.features("risk", [3]))
        assert await asyncio.to_thread(came.wait, PATIENCE)
        await client.close()
        with pytest.raises(
            QueryableStateError, match="The client has been closed, or is used on another event loop: connect again"
        ):
            await task
        released.set()

    run(cluster, steps)


def test_the_next_loop_has_none_of_the_connections_of_an_ended_one(
    cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = AsyncQueryableStateClient(cluster.client(direct=True))
    asyncio.run(warm(client))

    async def leave() -> None:
        left = asyncio.create_task(client.features("risk", [3]))
        assert await asyncio.to_thread(came.wait, PATIENCE)
        left.cancel()

    came, released = first_blocked(monkeypatch)
    asyncio.run(leave())
    assert num_busy(client) == 1
    asyncio.run(answers(client, [4, 5]))
    assert num_busy(client) == 0
    released.set()
    asyncio.run(client.close())


def test_an_answer_in_many_parts(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(client: AsyncQueryableStateClient) -> None:
        num_looks, look = 0, async_client.LookupBatcher._read

        def counted(self: Any, descriptor: int) -> None:
            nonlocal num_looks
            num_looks += 1
            look(self, descriptor)

        monkeypatch.setattr(async_client.LookupBatcher, "_read", counted)
        name = "x" * (4 << 20)
        cluster.write({"totals": {3: (3, name)}})
        rows = await client.features("risk", [3])
        assert rows.to_dict() == expected(3) | {"user_name": [name]}
        assert num_looks > 1

    run(cluster, steps)


def test_an_error_of_the_host_comes_once_a_thread_has_asked_too(
    cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_reads, "VIEW_SECONDS", 0.0)
    monkeypatch.setattr(feature_reads, "LOOK_AGAIN_SECONDS", 0.0)

    async def steps(client: AsyncQueryableStateClient) -> None:
        cluster.declare(replace(VIEW, max_age="1 second"))
        cluster.write({}, ago=60.0)
        for _ in range(2):
            with pytest.raises(StaleFeatureError):
                await client.features("risk", [3])

    run(cluster, steps)


def test_a_fork_leaves_the_requests_of_its_parent(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has the parent's set of watched sockets too, and must not take any out of it."""

    async def steps(client: AsyncQueryableStateClient) -> None:
        came, released = first_blocked(monkeypatch)
        task = asyncio.create_task(client.features("risk", [3]))
        assert await asyncio.to_thread(came.wait, PATIENCE)
        child = os.fork()
        if not child:
            try:
                client._end_lookups()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        released.set()
        assert (await task).to_dict() == expected(3)
        assert time.monotonic() - began < async_client.SMALL_LOOKUP_SECONDS, "not by the thread that repeats it"

    began = time.monotonic()
    run(cluster, steps)


def test_keys_that_arrow_converts_are_for_threads(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's first array of Python values imports pandas, and the loop would stand still."""

    async def steps(client: AsyncQueryableStateClient) -> None:
        threads, columns = [], KeyCodec.columns

        def noted(self: KeyCodec, keys: Any) -> Any:
            threads.append(threading.current_thread())
            return columns(self, keys)

        monkeypatch.setattr(KeyCodec, "columns", noted)
        rows = await client.features("risk", [np.int64(3)])
        assert rows.values() == {name: values for name, values in expected(3).items() if name != "user"}
        assert threads and threading.current_thread() not in threads
        threads.clear()
        array = pa.array

        def noted_array(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread())
            return array(*args, **kwargs)

        monkeypatch.setattr(pa, "array", noted_array)
        await answers(client, range(USERS))
        assert threading.current_thread() not in threads

    run(cluster, steps)


def test_requests_leave_nothing_to_the_garbage_collector(cluster: FeatureCluster) -> None:
    """A collection of everything takes as long as a hundred requests, and they wait.

    Threads of earlier tests that end leave something in one round. Requests would do so in each.
    """

    async def steps(client: AsyncQueryableStateClient) -> None:
        gc.collect()
        gc.disable()
        try:
            collected = []
            for _ in range(3):
                for user in range(USERS):
                    await answers(client, [user, (user + 1) % USERS])
                collected.append(gc.collect())
            assert min(collected) < USERS, collected
        finally:
            gc.enable()

    run(cluster, steps)


def test_few_keys_of_a_host_are_of_one_version(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is completed between the look-ups of two keys."""
    lookup_one, num_lookups = HostReads.lookup_one, 0

    def lookup(self: HostReads, *args: Any) -> Any:
        nonlocal num_lookups
        num_lookups += 1
        if num_lookups == 2:
            cluster.write({"totals": {user: (1000 + user, "new") for user in range(USERS)}})
        return lookup_one(self, *args)

    cluster.declare(replace(VIEW, features=VIEW.features[:1]))
    client = cluster.client(direct=True)
    location = client._access.answer_of_view("", "risk", None, lambda target, _: target)
    first = owner_of_features(location.location, location.codec.encode_one(0))
    own = [u for u in range(USERS) if owner_of_features(location.location, location.codec.encode_one(u)) == first][:5]
    monkeypatch.setattr(HostReads, "lookup_one", lookup)
    rows = client.features("risk", own)
    assert rows.to_dict()["n"] == [1000 + user for user in own] and rows.versions == {"name": cluster.version}
    assert num_lookups == len(own), "the keys are looked up one by one before the host notices"


def test_keys_of_few_and_of_many_are_the_same(cluster: FeatureCluster) -> None:
    client = cluster.client(direct=True)
    many = client.features("risk", list(range(USERS))).to_dict()
    few = [client.features("risk", list(range(begin, begin + 12))).to_dict() for begin in range(0, USERS, 12)]
    assert many == {name: [value for part in few for value in part[name]] for name in many}
    keys = client.features("risk", [1, 2]).keys
    assert keys.equals(pa.record_batch({"user": pa.array([1, 2], pa.int64())}))


def test_a_thread_sends_what_is_not_small(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop must not wait until a host takes it."""

    async def steps(client: AsyncQueryableStateClient) -> None:
        monkeypatch.setattr(connections, "SMALL_BODY", 4)
        send, threads = client_connection.ClientConnection.send, []

        def sent(*args: Any) -> None:
            threads.append(threading.current_thread())
            send(*args)

        monkeypatch.setattr(client_connection.ClientConnection, "send", sent)
        await answers(client, [3])
        assert threads and threading.current_thread() not in threads

    run(cluster, steps)


def test_on_a_loop_without_readers_threads_ask(cluster: FeatureCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(client: AsyncQueryableStateClient) -> None:
        def add_reader(*_: Any) -> None:
            raise NotImplementedError

        with monkeypatch.context() as while_it_asks:
            while_it_asks.setattr(asyncio.get_running_loop(), "add_reader", add_reader)
            await answers(client, range(USERS))
        while num_busy(client):
            await answers(client, range(USERS))
            client._client._connections._drain_abandoned()

    run(cluster, steps)
