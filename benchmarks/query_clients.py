"""One client process of ``queries.py``: reads from one contestant for some seconds a turn, and prints figures as JSON.

    python benchmarks/query_clients.py CONTESTANT WORK ADDRESS SECONDS KEYS SEED [PER_SECOND]

CONTESTANT is "ours" or "redis", WORK "single", "async", "batched" or "features". ADDRESS is a host's query address, or
Redis' port; our token is in STATESTORE_TOKEN. With PER_SECOND a client of single lookups asks so many a second instead
of as many as it can. One of features asks at that rate in open loop: requests begin on schedule, whether earlier ones
are answered or not, and the latency of each is from its scheduled time. There a third contestant, "nothing", asks no
server: its latencies are those of the event loop.

Once it is warm, it prints "ready", and then takes a turn for each line of its input: clients that run together begin
together, and none measures while another is starting.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

OPERATOR = "totals"
VIEW = "fifty"
BATCH = 1000
IN_FLIGHT = 64
WARM_UP, AGAIN = 0.5, 0.1
"""Seconds of calls that do not count: before the first turn, and at the beginning of each."""

Report = dict[str, Any]


def redis_key(user: int) -> bytes:
    """Return the key under which Redis has a user's totals."""
    return b"totals:%d" % user


def features_key(user: int) -> bytes:
    """Return the key under which Redis has a user's features, by name."""
    return b"features:%d" % user


def report(latencies: list[float], seconds: float, keys_each: int, cpu: float) -> Report:
    """Figures of one client: lookups of so many keys each, and how long each took."""
    sorted_ms = np.sort(np.array(latencies)) * 1e3
    return {
        "keys_per_second": len(latencies) * keys_each / seconds,
        "p50_ms": float(np.quantile(sorted_ms, 0.5)),
        "p99_ms": float(np.quantile(sorted_ms, 0.99)),
        "max_ms": float(sorted_ms[-1]),
        "cpu_us_per_key": cpu * 1e6 / (len(latencies) * keys_each),
    }


def say(line: str) -> None:
    print(line, flush=True)


def repeat(call: Callable[[], object], seconds: float, keys_each: int, per_second: float | None = None) -> None:
    """Take turns of some seconds of calls, each after a short time that does not count."""

    def warm_up(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            call()

    warm_up(WARM_UP)
    say("ready")
    for _ in sys.stdin:
        warm_up(AGAIN)
        latencies: list[float] = []
        cpu, began = time.process_time(), time.perf_counter()
        now = began
        while now < began + seconds:
            if per_second is not None:
                time.sleep(max(0.0, began + len(latencies) / per_second - time.perf_counter()))
            before = time.perf_counter()
            call()
            now = time.perf_counter()
            latencies.append(now - before)
        say(json.dumps(report(latencies, now - began, keys_each, time.process_time() - cpu)))


async def repeat_async(call: Callable[[int], Awaitable[object]], seconds: float, keys: int) -> None:
    """Take turns with so many calls in flight at once."""

    async def run(seconds: float) -> list[float]:
        latencies: list[float] = []
        end = time.perf_counter() + seconds

        async def worker(rng: random.Random) -> None:
            while (before := time.perf_counter()) < end:
                await call(rng.randrange(keys))
                latencies.append(time.perf_counter() - before)

        await asyncio.gather(*(worker(random.Random(i)) for i in range(IN_FLIGHT)))
        return latencies

    await run(WARM_UP)
    say("ready")
    while await asyncio.to_thread(sys.stdin.readline):
        await run(AGAIN)
        cpu, began = time.process_time(), time.perf_counter()
        latencies = await run(seconds)
        say(json.dumps(report(latencies, time.perf_counter() - began, 1, time.process_time() - cpu)))


async def open_loop(
    call: Callable[[int], Awaitable[Any]], rate: float, seconds: float, keys: int, rng: random.Random
) -> Report:
    """Ask for the features of ``rate`` random keys a second for some seconds, and return the figures.

    The latencies of requests that fail count too.
    """
    latencies: list[float] = []
    failures: dict[str, int] = {}
    asked: set[asyncio.Task[None]] = set()

    async def ask(scheduled: float) -> None:
        try:
            await call(rng.randrange(keys))
        except Exception as error:  # noqa: BLE001 - it is counted
            failures[type(error).__name__] = failures.get(type(error).__name__, 0) + 1
        latencies.append(time.perf_counter() - scheduled)

    count = max(1, round(rate * seconds))
    cpu, began = time.process_time(), time.perf_counter()
    for i in range(count):
        due = began + i / rate
        if (wait := due - time.perf_counter()) > 0 or not i % 100:
            await asyncio.sleep(max(0.0, wait))
        task = asyncio.create_task(ask(due))
        asked.add(task)
        task.add_done_callback(asked.discard)
    in_time = len(latencies)
    while asked:
        await asyncio.wait(asked)
    took = time.perf_counter() - began
    figures = report(latencies, took, 1, time.process_time() - cpu)
    figures |= {"rate": count / took, "asked": count, "waiting": count - in_time, "failures": failures}
    figures |= {"later_than_1_s": sum(latency > 1 for latency in latencies)}
    return figures


def features_of(client: Any) -> Callable[[int], Awaitable[None]]:
    """Return a call for the features of one key by our client."""

    async def call(user: int) -> None:
        rows = await client.features(VIEW, [user])
        assert len(rows.to_dict()) == 51

    return call


async def features(contestant: str, address: str, seconds: float, keys: int, rng: random.Random, rate: float) -> None:
    """Take turns of an open loop: ours, Redis by its asynchronous client, or calls that ask no server."""
    from spark_bridge import AsyncQueryableStateClient

    async with AsyncExitStack() as ended:
        if contestant == "ours":
            call = features_of(
                await ended.enter_async_context(await AsyncQueryableStateClient.connect(address=address, direct=True))
            )
        elif contestant == "redis":
            import msgpack
            from redis import asyncio as redis_asyncio

            store = await ended.enter_async_context(redis_asyncio.Redis(port=int(address), max_connections=IN_FLIGHT))

            async def call(user: int) -> None:
                assert len(msgpack.unpackb(await store.get(features_key(user)))) == 50

        else:

            async def call(user: int) -> None:
                return None

        await open_loop(call, min(rate, 200.0), WARM_UP, keys, rng)
        say("ready")
        while await asyncio.to_thread(sys.stdin.readline):
            await open_loop(call, rate, AGAIN, keys, rng)
            say(json.dumps(await open_loop(call, rate, seconds, keys, rng)))


def ours(work: str, address: str, seconds: float, keys: int, rng: random.Random, per_second: float | None) -> None:
    from spark_bridge import AsyncQueryableStateClient, QueryableStateClient

    if work == "async":

        async def run() -> None:
            async with await AsyncQueryableStateClient.connect(address=address, direct=True) as client:
                await repeat_async(lambda user: client.get(OPERATOR, user), seconds, keys)

        asyncio.run(run())
        return
    with QueryableStateClient.connect(address=address, direct=True) as client:
        if work == "single":
            repeat(lambda: client.get(OPERATOR, rng.randrange(keys)), seconds, 1, per_second)
        else:
            numbers = np.random.default_rng(rng.randrange(1 << 30))
            repeat(lambda: client.get_many(OPERATOR, numbers.integers(0, keys, BATCH)), seconds, BATCH)


def redis(work: str, port: int, seconds: float, keys: int, rng: random.Random) -> None:
    """Read from Redis, by redis-py with hiredis; values are unpacked by msgpack."""
    import msgpack
    import redis as redis_py
    from redis import asyncio as redis_asyncio

    unpack = msgpack.unpackb
    if work == "async":

        async def run() -> None:
            async with redis_asyncio.Redis(port=port, max_connections=IN_FLIGHT) as client:

                async def call(user: int) -> object:
                    return unpack(await client.get(redis_key(user)))

                await repeat_async(call, seconds, keys)

        asyncio.run(run())
        return
    client = redis_py.Redis(port=port)
    if work == "single":
        repeat(lambda: unpack(client.get(redis_key(rng.randrange(keys)))), seconds, 1)
        return
    numbers = np.random.default_rng(rng.randrange(1 << 30))

    def batched() -> object:
        asked = [redis_key(user) for user in numbers.integers(0, keys, BATCH).tolist()]
        return [unpack(value) for value in client.mget(asked)]

    repeat(batched, seconds, BATCH)


def main() -> None:
    contestant, work, address, seconds, keys, seed = sys.argv[1:7]
    rng = random.Random(int(seed))
    if work == "features":
        asyncio.run(features(contestant, address, float(seconds), int(keys), rng, float(sys.argv[7])))
    elif contestant == "redis":
        redis(work, int(address), float(seconds), int(keys), rng)
    else:
        per_second = float(sys.argv[7]) if len(sys.argv) > 7 else None
        ours(work, address, float(seconds), int(keys), rng, per_second)


if __name__ == "__main__":
    main()
