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
from functools import partial
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
    return b"totals:%d" % user


def features_key(user: int) -> bytes:
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

    def run(seconds: float, per_second: float | None = None) -> Report:
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
        return report(latencies, now - began, keys_each, time.process_time() - cpu)

    run(WARM_UP)
    say("ready")
    for _ in sys.stdin:
        run(AGAIN)
        say(json.dumps(run(seconds, per_second)))


async def repeat_async(run: Callable[[float], Awaitable[Report]], seconds: float, warm_up: Awaitable[Report]) -> None:
    """Take turns of some seconds, each after a short time that does not count."""
    await warm_up
    say("ready")
    while await asyncio.to_thread(sys.stdin.readline):
        await run(AGAIN)
        say(json.dumps(await run(seconds)))


async def in_flight(call: Callable[[int], Awaitable[object]], seconds: float, keys: int) -> Report:
    """Keep so many calls in flight at once for some seconds, and return the figures."""
    latencies: list[float] = []
    cpu, began = time.process_time(), time.perf_counter()

    async def worker(rng: random.Random) -> None:
        while (before := time.perf_counter()) < began + seconds:
            await call(rng.randrange(keys))
            latencies.append(time.perf_counter() - before)

    await asyncio.gather(*(worker(random.Random(i)) for i in range(IN_FLIGHT)))
    return report(latencies, time.perf_counter() - began, 1, time.process_time() - cpu)


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


async def call_of(contestant: str, work: str, address: str, ended: AsyncExitStack) -> Callable[[int], Awaitable[Any]]:
    """Return a call for the totals or the features of one key; "nothing" asks no server."""
    from spark_bridge import AsyncQueryableStateClient

    if contestant == "ours":
        connected = await AsyncQueryableStateClient.connect(address=address, direct=True)
        client = await ended.enter_async_context(connected)
        return features_of(client) if work == "features" else lambda user: client.get(OPERATOR, user)
    if contestant == "nothing":

        async def nothing(user: int) -> None:
            return None

        return nothing
    import msgpack
    from redis import asyncio as redis_asyncio

    store = await ended.enter_async_context(redis_asyncio.Redis(port=int(address), max_connections=IN_FLIGHT))

    async def totals(user: int) -> object:
        return msgpack.unpackb(await store.get(redis_key(user)))

    async def features(user: int) -> None:
        assert len(msgpack.unpackb(await store.get(features_key(user)))) == 50

    return features if work == "features" else totals


async def run_async(
    contestant: str, work: str, address: str, seconds: float, keys: int, rng: random.Random, rate: float | None
) -> None:
    async with AsyncExitStack() as ended:
        call = await call_of(contestant, work, address, ended)
        if work == "features" and rate is not None:
            first = open_loop(call, min(rate, 200.0), WARM_UP, keys, rng)
            await repeat_async(lambda seconds: open_loop(call, rate, seconds, keys, rng), seconds, first)
        else:
            run = partial(in_flight, call, keys=keys)
            await repeat_async(run, seconds, run(WARM_UP))


def run_blocking(
    contestant: str, work: str, address: str, seconds: float, keys: int, rng: random.Random, per_second: float | None
) -> None:
    """Read single keys, or many a call; Redis by redis-py with hiredis, whose values are unpacked by msgpack."""
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    keys_each = 1 if work == "single" else BATCH
    if contestant == "ours":
        from spark_bridge import QueryableStateClient

        with QueryableStateClient.connect(address=address, direct=True) as client:
            calls: dict[str, Callable[[], object]] = {
                "single": lambda: client.get(OPERATOR, rng.randrange(keys)),
                "batched": lambda: client.get_many(OPERATOR, numbers.integers(0, keys, BATCH)),
            }
            repeat(calls[work], seconds, keys_each, per_second)
        return
    import msgpack
    import redis

    store, unpack = redis.Redis(port=int(address)), msgpack.unpackb

    def batched() -> object:
        asked = [redis_key(user) for user in numbers.integers(0, keys, BATCH).tolist()]
        return [unpack(value) for value in store.mget(asked)]

    def single() -> object:
        return unpack(store.get(redis_key(rng.randrange(keys))))

    repeat(single if work == "single" else batched, seconds, keys_each, per_second)


def main() -> None:
    contestant, work, address, seconds, keys, seed, *pace = sys.argv[1:]
    rate = float(pace[0]) if pace else None
    given = (contestant, work, address, float(seconds), int(keys), random.Random(int(seed)), rate)
    if work in ("async", "features"):
        asyncio.run(run_async(*given))
    else:
        run_blocking(*given)


if __name__ == "__main__":
    main()
