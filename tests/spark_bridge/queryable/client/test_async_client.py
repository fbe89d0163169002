"""The client for event loops, against real hosts in this process."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_bridge.exceptions import (
    QueryableStateError,
    QueryTimeoutError,
    UnknownKeyOrNamespaceError,
    UnknownOperatorError,
)
from spark_bridge.queryable.client import watch
from spark_bridge.queryable.client.async_client import AsyncQueryableStateClient
from spark_bridge.queryable.client.async_results import AsyncStateScan, AsyncStateWatch
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.scans import StateScan
from spark_bridge.queryable.server import request_handler
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.client_world import TOKEN, Cluster, served
from tests.spark_bridge.state_flows import Flow

USERS = {i: (i, f"user {i}") for i in range(300)}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Users 0 to 299; only read."""
    made = Cluster(tmp_path_factory.mktemp("filled"))
    made.batch(USERS)
    yield made
    made.close()


def run(
    cluster: Cluster, what: Callable[[AsyncQueryableStateClient], Coroutine[Any, Any, None]], **arguments: Any
) -> None:
    async def main() -> None:
        given = {"address": cluster.hosts[0].address, "token": TOKEN, "direct": True, "timeout": PATIENCE, **arguments}
        async with await AsyncQueryableStateClient.connect(**given) as client:
            await asyncio.wait_for(what(client), HANG)

    asyncio.run(main())


@pytest.mark.parametrize(
    "verb", ["connect", "count", "describe", "find", "get", "get_many", "key_rows", "operators", "scan", "watch"]
)
def test_both_clients_take_the_same_arguments(verb: str) -> None:
    of_both = (inspect.signature(getattr(of, verb)) for of in (QueryableStateClient, AsyncQueryableStateClient))
    one, other = ([p.replace(annotation=p.empty) for p in of.parameters.values()] for of in of_both)
    assert one == other


@pytest.mark.parametrize(
    ("verb", "result"), [("scan", "AsyncStateScan"), ("watch", "AsyncStateWatch"), ("count", "int")]
)
def test_the_other_clients_methods_say_what_they_return_and_whose_they_are(verb: str, result: str) -> None:
    method = getattr(AsyncQueryableStateClient, verb)
    assert method.__annotations__["return"] == result
    assert method.__qualname__ == f"AsyncQueryableStateClient.{verb}"
    assert inspect.iscoroutinefunction(method) == (verb == "count")


def count_batches(client: AsyncQueryableStateClient) -> list[int]:
    """How many keys each batch of lookups has from now on."""
    sizes: list[int] = []
    get_each = client._client.get_each

    def counting(operator: str, keys: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(keys))
        return get_each(operator, keys, *args, **kwargs)

    client._client.get_each = counting  # type: ignore[method-assign]
    return sizes


def test_the_same_verbs(filled: Cluster) -> None:
    async def check(client: AsyncQueryableStateClient) -> None:
        five = {"n": 5, "name": "user 5"}
        assert await client.get("totals", 5) == await client.get("totals", 5, version=1) == five
        assert await client.get("totals", 5000) is None
        assert (await client.get_many("totals", [5, 6])).column("n").to_pylist() == [5, 6]
        assert await client.count("totals", start=10, end=20) == 10
        assert [o["operator"] for o in await client.operators()] == ["totals"]
        assert (await client.describe("totals"))["operator"] == "totals"
        users = [user async for batch in client.scan("totals", columns=["user"]) for user in batch["user"].to_pylist()]
        assert sorted(users) == list(USERS)
        async with client.scan("totals", prefix=5) as rows:
            assert (rows.version, rows.schema.names) == (1, ["user", "n", "name"])
            assert (await rows.to_arrow()).to_pylist() == [{"user": 5, **five}]
        assert await client.key_rows("totals", [5, 5000]).to_pylist() == [{"user": 5, **five}]
        assert (await client.scan("totals", prefix=5).to_pandas())["n"].tolist() == [5]
        assert (await client.scan("totals", prefix=5).to_polars())["n"].to_list() == [5]
        begun = await client.scan("totals", limit=1)
        assert begun.version == 1
        await begun.aclose()
        with pytest.raises(RuntimeError, match="not begun"):
            _ = client.scan("totals").version
        with pytest.raises(UnknownOperatorError, match="'totals'"):
            await client.get("nothing", 1)
        with pytest.raises(UnknownOperatorError, match="'totals'"):
            await client.scan("nothing")

    run(filled, check)
    run(filled, check, direct=False)


def test_concurrent_lookups_go_in_batches(filled: Cluster) -> None:
    async def check(client: AsyncQueryableStateClient) -> None:
        sizes = count_batches(client)
        found = await asyncio.gather(*(client.get("totals", k) for k in [*USERS, *USERS]))
        assert [row["n"] for row in found] == [*USERS, *USERS]
        assert sum(sizes) == 600
        assert len(sizes) <= 3
        sizes.clear()
        many = await asyncio.gather(*(client.get("totals", k % 300) for k in range(2500)))
        assert len(many) == 2500
        assert max(sizes) == 1000
        sizes.clear()

        async def ask(worker: int) -> None:
            for k in range(20):
                assert (await client.get("totals", worker * 10 + k))["n"] == worker * 10 + k

        await asyncio.gather(*(ask(worker) for worker in range(20)))
        assert sum(sizes) == 400
        assert len(sizes) <= 200

    run(filled, check)


def test_each_gets_its_own_error(filled: Cluster) -> None:
    async def check(client: AsyncQueryableStateClient) -> None:
        keys = [1, 1.5, 2, "x", 5000]
        found = await asyncio.gather(*(client.get("totals", k) for k in keys), return_exceptions=True)
        assert [type(f) for f in found] == [
            dict,
            UnknownKeyOrNamespaceError,
            dict,
            UnknownKeyOrNamespaceError,
            type(None),
        ]
        others = await asyncio.gather(
            client.get("totals", 1),
            client.get("nothing", 1),
            client.get("totals", 1, isolation="x"),
            return_exceptions=True,
        )
        assert others[0] == {"n": 1, "name": "user 1"}
        assert isinstance(others[1], UnknownOperatorError)
        assert "'x'" in str(others[2])

    run(filled, check)


def test_cancelling_one_leaves_the_others(filled: Cluster) -> None:
    async def check(client: AsyncQueryableStateClient) -> None:
        await client.get("totals", 0)
        sizes = count_batches(client)
        for _ in range(5):
            tasks = [asyncio.ensure_future(client.get("totals", k)) for k in range(100)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(d, asyncio.CancelledError) for d in done[::2])
            assert [d["n"] for d in done[1::2]] == list(range(1, 100, 2))  # type: ignore[call-overload,index]
        assert sum(sizes) == 250  # those who do not wait are not asked for
        slow = asyncio.ensure_future(client.get("totals", 1))
        await asyncio.sleep(0.001)
        slow.cancel()
        assert (await client.get("totals", 2))["n"] == 2
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.get("totals", 1), 0)
        assert (await client.get("totals", 2))["n"] == 2

    run(filled, check)


def test_a_batch_that_hangs_does_not_hold_up_the_next(filled: Cluster) -> None:
    async def check(client: AsyncQueryableStateClient) -> None:
        await client.get("totals", 0)
        get_each = client._client.get_each
        stuck = threading.Event()

        def hanging(operator: str, keys: Any, *args: Any, **kwargs: Any) -> Any:
            if 13 in keys:
                stuck.wait(HANG)
            return get_each(operator, keys, *args, **kwargs)

        client._client.get_each = hanging  # type: ignore[method-assign]
        unlucky = asyncio.ensure_future(client.get("totals", 13))
        await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(client.get("totals", 14), PATIENCE))["n"] == 14
        assert not unlucky.done()
        stuck.set()
        assert (await unlucky)["n"] == 13

    run(filled, check)


def test_lookups_of_other_timeouts_go_together_and_nothing_is_kept_of_them(filled: Cluster) -> None:
    async def check(client: AsyncQueryableStateClient) -> None:
        sizes = count_batches(client)
        found = await asyncio.gather(*(client.get("totals", k, timeout=PATIENCE + k / 1000) for k in range(100)))
        assert [row["n"] for row in found] == list(range(100))
        assert len(sizes) <= 2
        await asyncio.sleep(0.05)
        assert client._lookups == {}

    run(filled, check)


def test_each_waits_for_its_own_time(filled: Cluster) -> None:
    async def check(client: AsyncQueryableStateClient) -> None:
        get_each = client._client.get_each
        stuck = threading.Event()

        def hanging(*args: Any, **kwargs: Any) -> Any:
            assert kwargs["timeout"] > PATIENCE
            stuck.wait(HANG)
            return get_each(*args, **kwargs)

        client._client.get_each = hanging  # type: ignore[method-assign]
        begun = time.monotonic()
        patient = asyncio.ensure_future(client.get("totals", 1, timeout=HANG))
        hurried = [client.get("totals", 2, timeout=0.2), client.get("totals", 3)]
        ended = await asyncio.gather(*hurried, return_exceptions=True)
        assert [type(error) for error in ended] == [QueryTimeoutError] * 2
        assert time.monotonic() - begun < PATIENCE
        assert not patient.done()
        stuck.set()
        assert (await patient)["n"] == 1

    run(filled, check, timeout=0.5)


def test_silence_is_a_timeout_for_each_lookup() -> None:
    async def main() -> None:
        client = await AsyncQueryableStateClient.connect(address="127.0.0.1:1", token=TOKEN, timeout=0.2)
        found = await asyncio.gather(*(client.get("totals", k) for k in range(3)), return_exceptions=True)
        assert all(isinstance(f, QueryTimeoutError) for f in found)
        await client.close()
        with pytest.raises(QueryableStateError, match="closed"):
            await asyncio.wait_for(client.get("totals", 1), PATIENCE)

    asyncio.run(main())


def test_one_client_for_one_loop_after_the_other(filled: Cluster) -> None:
    client = asyncio.run(
        AsyncQueryableStateClient.connect(address=filled.hosts[0].address, token=TOKEN, direct=True, timeout=PATIENCE)
    )
    for _ in range(3):
        assert asyncio.run(client.get("totals", 1)) == {"n": 1, "name": "user 1"}
    asyncio.run(client.close())


def test_lists_and_maps_are_gathered_too(tmp_path: Path) -> None:
    def fill(of: Any) -> None:
        of.visits.appendList([("/", 1), ("/b", 2)])
        of.pages.updateValue(("/a", "x"), (1, None))

    flow = Flow(tmp_path)
    flow.batch({("a", 1): fill, ("b", 2): fill})
    with served(flow) as outside:

        async def check() -> None:
            client = AsyncQueryableStateClient(outside)
            keys: list[Any] = [("a", 1), ("b", 2), ("c", 3), ("a", 1), 5]
            visits = await asyncio.gather(*(client.get("op", k, state="visits") for k in keys), return_exceptions=True)
            expected = [{"page": "/", "at": 1}, {"page": "/b", "at": 2}]
            assert visits[:4] == [expected, expected, None, expected]
            assert isinstance(visits[4], UnknownKeyOrNamespaceError)
            pages = await asyncio.gather(*(client.get("op", k, state="pages") for k in keys[:3]))
            assert pages == [{("/a", "x"): {"n": 1, "note": None}}] * 2 + [None]

        asyncio.run(check())
    flow.close()


def test_watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "AWAIT_SECONDS", 0.2)
    cluster = Cluster(tmp_path)
    cluster.batch(USERS)

    async def check(client: AsyncQueryableStateClient) -> None:
        versions = []
        async with client.watch("totals", from_version=0) as changes:
            async for change in changes:
                versions.append((change.version, change.batch.num_rows))
                if change.version == 3:
                    break
                await asyncio.to_thread(cluster.batch, {1: (change.version * 100, "x")})
        assert versions == [(1, 300), (2, 1), (3, 1)]
        # Who is cancelled while waiting, and waits again, has lost nothing.
        changes = client.watch("totals", from_version=3)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(changes), 0.1)
        await asyncio.to_thread(cluster.batch, {1: (1, "x")})
        assert (await asyncio.wait_for(anext(changes), PATIENCE)).version == 4
        await changes.aclose()
        with pytest.raises((StopAsyncIteration, RuntimeError)):
            await asyncio.wait_for(anext(changes), PATIENCE)

    run(cluster, check)
    cluster.close()


async def cancel(rows: AsyncStateScan | AsyncStateWatch, what: Coroutine[Any, Any, Any], *, with_answer: bool) -> None:
    """Cancel a call under way, or in the same round of the loop in which its answer comes."""
    caller = asyncio.ensure_future(what)
    while rows._calls._pending is None:
        await asyncio.sleep(0)
    while with_answer and not rows._calls._pending.done():
        await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def iterated(scan: AsyncStateScan) -> list[int]:
    return [user async for batch in scan for user in batch["user"].to_pylist()]


async def in_a_table(scan: AsyncStateScan) -> list[int]:
    users: list[int] = (await scan.to_arrow())["user"].to_pylist()
    return users


@pytest.mark.parametrize("with_answer", [False, True])
@pytest.mark.parametrize("then", [iterated, in_a_table])
@pytest.mark.parametrize("cancelled", [AsyncStateScan.__anext__, AsyncStateScan.to_arrow])
def test_a_cancelled_read_of_a_scan_loses_no_rows(
    filled: Cluster,
    cancelled: Callable[[AsyncStateScan], Coroutine[Any, Any, Any]],
    then: Callable[[AsyncStateScan], Coroutine[Any, Any, list[int]]],
    with_answer: bool,
) -> None:
    async def check(client: AsyncQueryableStateClient) -> None:
        scan = await client.scan("totals")
        await cancel(scan, cancelled(scan), with_answer=with_answer)
        assert sorted(await then(scan)) == list(USERS)

    run(filled, check)


@pytest.mark.parametrize("with_answer", [False, True])
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_scan_that_is_cancelled_while_it_begins_is_closed(
    filled: Cluster, with_answer: bool, is_closed: bool
) -> None:
    async def check(client: AsyncQueryableStateClient) -> None:
        begun: list[StateScan] = []

        def begin() -> StateScan:
            begun.append(client._client.scan("totals"))
            return begun[0]

        scan = AsyncStateScan(begin)
        await cancel(scan, scan.to_arrow(), with_answer=with_answer)
        if is_closed:
            await scan.aclose()
        elif scan._calls._pending is not None:
            await asyncio.wait([scan._calls._pending])
            await asyncio.sleep(0.01)
        assert begun[0].to_arrow().num_rows == 0, "it was closed"

    run(filled, check)


def test_a_scan_whose_loop_has_ended_while_it_begins_is_closed(filled: Cluster) -> None:
    begun, may_begin = list[StateScan](), threading.Event()
    client = filled.client()

    def begin() -> StateScan:
        assert may_begin.wait(PATIENCE)
        begun.append(client.scan("totals"))
        return begun[0]

    async def leave() -> None:
        scan = AsyncStateScan(begin)
        await cancel(scan, scan.to_arrow(), with_answer=False)

    asyncio.run(leave())
    may_begin.set()
    (thread,) = [t for t in threading.enumerate() if t.name == "statestore-scan"]
    thread.join(PATIENCE)
    assert begun[0].to_arrow().num_rows == 0, "it was closed"


def test_a_scan_whose_first_caller_was_cancelled_begins_for_the_next_one(filled: Cluster) -> None:
    async def check(client: AsyncQueryableStateClient) -> None:
        scan = client.scan("totals")
        await cancel(scan, scan.to_arrow(), with_answer=False)
        pending = scan._calls._pending
        assert sorted(await iterated(scan)) == list(USERS)
        assert pending is not None and pending.result() is scan._scan, "it has begun once"

    run(filled, check)


def test_a_change_that_comes_as_its_caller_is_cancelled_is_not_lost(filled: Cluster) -> None:
    async def check(client: AsyncQueryableStateClient) -> None:
        async with client.watch("totals", from_version=0) as changes:
            await cancel(changes, changes.__anext__(), with_answer=True)
            assert (await asyncio.wait_for(anext(changes), PATIENCE)).version == 1

    run(filled, check)


def test_readers_of_one_scan_at_once_share_its_rows(filled: Cluster) -> None:
    async def check(client: AsyncQueryableStateClient) -> None:
        scan = await client.scan("totals")
        parts = await asyncio.gather(iterated(scan), iterated(scan), in_a_table(scan))
        assert sorted(user for part in parts for user in part) == list(USERS)

    run(filled, check)


def test_a_watch_that_was_left_does_not_hold_up_the_end_of_the_program(
    filled: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long a host is asked to wait for the next version, and does so.
    monkeypatch.setattr(request_handler, "MAX_AWAIT_SECONDS", HANG)
    code = f"""
import asyncio
from spark_bridge import AsyncQueryableStateClient
from spark_bridge.queryable.client import watch

watch.AWAIT_SECONDS = {HANG}

async def main():
    where = dict(address={filled.hosts[0].address!r}, token={TOKEN!r}, timeout={2 * HANG})
    client = await AsyncQueryableStateClient.connect(**where)
    changes = client.watch("totals")
    try:
        await asyncio.wait_for(anext(changes), 0.3)
    except asyncio.TimeoutError:
        pass

asyncio.run(main())
"""
    root = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE, env=environment)
