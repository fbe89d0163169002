"""One client process of ``queries.py``: reads at one contestant for some seconds, and prints what it has measured as JSON.

    python benchmarks/query_clients.py CONTESTANT WORK ADDRESS SECONDS KEYS SEED [PER_SECOND]

CONTESTANT is "ours" or "redis", WORK "single", "async" or "batched". ADDRESS is a host's query address, or Redis' port; our token
is in STATESTORE_TOKEN. With PER_SECOND a client of single lookups asks so many a second instead of as many as it can.

Once it is warm it says "ready" and waits for a line: clients that are to run at once begin at once, and none measures while another one still
starts.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

OPERATOR = "totals"
BATCH = 1000
IN_FLIGHT = 64
WARM_UP = 0.5

Report = dict[str, Any]


def redis_key(user: int) -> bytes:
    """The key under which Redis has a user's totals."""
    return b"totals:%d" % user


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


def await_start() -> None:
    """Say that this client is ready, and wait for the others."""
    print("ready", flush=True)
    sys.stdin.readline()


def repeat(call: Callable[[], object], seconds: float, keys_each: int, per_second: float | None = None) -> Report:
    """Call for some seconds, after a short time that does not count."""
    end = time.perf_counter() + WARM_UP
    while time.perf_counter() < end:
        call()
    await_start()
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


async def repeat_async(call: Callable[[int], Awaitable[object]], seconds: float, keys: int) -> Report:
    """The same with so many calls in flight at once."""

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
    await_start()
    cpu, began = time.process_time(), time.perf_counter()
    latencies = await run(seconds)
    return report(latencies, time.perf_counter() - began, 1, time.process_time() - cpu)


def ours(work: str, address: str, seconds: float, keys: int, rng: random.Random, per_second: float | None) -> Report:
    """Reads of the state store."""
    from spark_bridge import AsyncQueryableStateClient, QueryableStateClient

    if work == "async":

        async def run() -> Report:
            async with await AsyncQueryableStateClient.connect(address=address, direct=True) as client:
                return await repeat_async(lambda user: client.get(OPERATOR, user), seconds, keys)

        return asyncio.run(run())
    with QueryableStateClient.connect(address=address, direct=True) as client:
        if work == "single":
            return repeat(lambda: client.get(OPERATOR, rng.randrange(keys)), seconds, 1, per_second)
        numbers = np.random.default_rng(rng.randrange(1 << 30))
        return repeat(lambda: client.get_many(OPERATOR, numbers.integers(0, keys, BATCH)), seconds, BATCH)


def redis(work: str, port: int, seconds: float, keys: int, rng: random.Random) -> Report:
    """The same of Redis, by redis-py with hiredis, its values unpacked by msgpack."""
    import msgpack
    import redis as redis_py
    from redis import asyncio as redis_asyncio

    unpack = msgpack.unpackb
    if work == "async":

        async def run() -> Report:
            async with redis_asyncio.Redis(port=port, max_connections=IN_FLIGHT) as client:

                async def call(user: int) -> object:
                    return unpack(await client.get(redis_key(user)))

                return await repeat_async(call, seconds, keys)

        return asyncio.run(run())
    client = redis_py.Redis(port=port)
    if work == "single":
        return repeat(lambda: unpack(client.get(redis_key(rng.randrange(keys)))), seconds, 1)
    numbers = np.random.default_rng(rng.randrange(1 << 30))

    def batched() -> object:
        asked = [redis_key(user) for user in numbers.integers(0, keys, BATCH).tolist()]
        return [unpack(value) for value in client.mget(asked)]

    return repeat(batched, seconds, BATCH)


def main() -> None:
    """See the head of this file."""
    contestant, work, address, seconds, keys, seed = sys.argv[1:7]
    rng = random.Random(int(seed))
    if contestant == "redis":
        found = redis(work, int(address), float(seconds), int(keys), rng)
    else:
        per_second = float(sys.argv[7]) if len(sys.argv) > 7 else None
        found = ours(work, address, float(seconds), int(keys), rng, per_second)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
