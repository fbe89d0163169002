"""Measure the online store of Feast against Feast's own Redis store: 50 features for 1 and 100 entities, in turns.

``python -m benchmarks.feast_store``, in an environment with the extra ``feast``, ``feast[redis]`` and a
``redis-server``: that of the cell "feast" of ``tests/matrix.py``. Prints a table of medians over the turns, and their
range.

One host in another process answers from the state that it has in memory; Redis has the same rows, which Feast
wrote there. One thread asks both stores through the same view of Feast. Before anything is timed, all answers are
compared.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa

ENTITIES, TURNS, SECONDS = 1000, 25, 0.3
KINDS = {
    "count": (pa.int64(), "Int64", 20),
    "amount": (pa.float64(), "Float64", 25),
    "place": (pa.string(), "String", 5),
}
NAMES = [f"{kind}_{i}" for kind, (_, _, count) in KINDS.items() for i in range(count)]


def value_of(user: int, name: str) -> Any:
    """Return a feature of an entity; both stores have it."""
    kind, _, i = name.partition("_")
    number = user * 1009 + int(i)
    return {"count": number, "amount": number / 7, "place": f"place {number}"}[kind]


def serve(directory: Path) -> None:
    """Answer as a host until stdin ends; print the address first."""
    from backends.encoding.schema import StateSchema
    from coordinator_actor.feature_views import Feature, FeatureView
    from tests.spark_bridge.queryable.client_world import KEYS
    from tests.spark_bridge.queryable.feature_world import FeatureCluster

    types = {name: KINDS[name.partition("_")[0]][0] for name in NAMES}
    schema = StateSchema(KEYS, pa.schema([(f"{name}.last.value", kind) for name, kind in types.items()]))
    cluster = FeatureCluster(directory, {"features": schema}, hosts=1)
    cluster.write({"features": {user: tuple(value_of(user, name) for name in NAMES) for user in range(ENTITIES)}})
    cluster.declare(FeatureView("bench", "user", [Feature(name, "features") for name in NAMES]))
    print(cluster.hosts[0].address, flush=True)
    while not select.select([sys.stdin], [], [], 1.0)[0]:  # as in a cluster, hosts send heartbeats
        cluster.world.now = time.time()
        cluster.complete()
    cluster.close()


@contextmanager
def stores(root: Path) -> Iterator[dict[str, Any]]:
    """Start a host and Redis, and give both stores of Feast with the same rows."""
    from feast import Entity, FeatureStore, FeatureView, Field, RepoConfig, types
    from feast.value_type import ValueType

    from tests.spark_bridge.queryable.client_world import TOKEN

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "benchmarks.feast_store", "--serve", str(root / "cluster")]
    options = ["--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(root)]
    with (
        subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host,
        subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL) as redis,
    ):
        assert host.stdout is not None
        ours = "ray_statestore.feast.RayStatestoreOnlineStore"
        online = {
            "ours": {"type": ours, "address": host.stdout.readline().strip(), "token": TOKEN},
            "Redis": {"type": "redis", "connection_string": f"127.0.0.1:{port}"},
        }
        user = Entity(name="user", join_keys=["user"], value_type=ValueType.INT64)
        fields = [Field(name="user", dtype=types.Int64)]
        fields += [Field(name=name, dtype=getattr(types, KINDS[name.partition("_")[0]][1])) for name in NAMES]
        view = FeatureView(name="bench", entities=[user], schema=fields)
        made = {}
        for name, settings in online.items():
            usual = {"project": "bench", "provider": "local", "entity_key_serialization_version": 3}
            config = RepoConfig(registry=str(root / f"{name}.db"), online_store=settings, **usual)
            made[name] = FeatureStore(config=config)
            made[name].apply([user, view])
        fill(made["Redis"])
        yield made
        asyncio.run(made["ours"]._get_provider().online_store.close())
        redis.terminate()
        host.communicate("")


def keys_of(users: list[int]) -> list[Any]:
    from feast.protos.feast.types.EntityKey_pb2 import EntityKey
    from feast.protos.feast.types.Value_pb2 import Value

    return [EntityKey(join_keys=["user"], entity_values=[Value(int64_val=user)]) for user in users]


def fill(store: Any) -> None:
    """Write the rows as Feast does when it materializes."""
    from feast.protos.feast.types.Value_pb2 import Value

    fields = {"count": "int64_val", "amount": "double_val", "place": "string_val"}
    now, users = datetime.now(timezone.utc), list(range(ENTITIES))
    data = [
        (key, {n: Value(**{fields[n.partition("_")[0]]: value_of(user, n)}) for n in NAMES}, now, None)
        for user, key in zip(users, keys_of(users), strict=True)
    ]
    store._get_provider().online_store.online_write_batch(store.config, store.get_feature_view("bench"), data, None)


def online_read(store: Any, users: list[int]) -> Callable[[], Any]:
    online, view, keys = store._get_provider().online_store, store.get_feature_view("bench"), keys_of(users)
    return lambda: online.online_read(store.config, view, keys, list(NAMES))


def get_online_features(store: Any, users: list[int]) -> Callable[[], Any]:
    features, rows = [f"bench:{name}" for name in NAMES], [{"user": user} for user in users]
    return lambda: store.get_online_features(features, rows)


def latencies(call: Callable[[Any, list[int]], Callable[[], Any]], store: Any, count: int) -> list[float]:
    """Return the milliseconds of one turn's calls, for random entities."""
    prepared = [call(store, random.sample(range(ENTITIES), count)) for _ in range(50)]
    prepared[0]()
    times, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begun = time.perf_counter()
        prepared[len(times) % len(prepared)]()
        times.append((time.perf_counter() - begun) * 1000)
    return sorted(times)


def check(made: dict[str, Any]) -> None:
    for begin in range(0, ENTITIES, 100):
        users = list(range(begin, begin + 100))
        ours, theirs = (online_read(store, users)() for store in made.values())
        assert [features for _, features in ours] == [features for _, features in theirs]
        ours, theirs = (get_online_features(store, users)().to_dict() for store in made.values())
        assert ours == theirs


def measure() -> None:
    if shutil.which("redis-server") is None:
        sys.exit("There is no redis-server: apt-get install redis-server.")
    print("| call | entities | ours p50 | Redis p50 | times as fast | range | ours p99 | Redis p99 |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory, stores(Path(directory)) as made:
        check(made)
        for call in (online_read, get_online_features):
            for count in (1, 100):
                turns: dict[str, list[list[float]]] = {name: [] for name in made}
                for turn in range(TURNS):
                    for name in sorted(made, reverse=bool(turn % 2)):
                        turns[name].append(latencies(call, made[name], count))
                p50 = {name: [statistics.median(times) for times in its] for name, its in turns.items()}
                p99 = {
                    name: statistics.median(times[int(len(times) * 0.99)] for times in its)
                    for name, its in turns.items()
                }
                ratios = sorted(r / o for o, r in zip(p50["ours"], p50["Redis"], strict=True))
                print(
                    f"| {call.__name__} | {count} | {statistics.median(p50['ours']):.3f} ms | "
                    f"{statistics.median(p50['Redis']):.3f} ms | {statistics.median(ratios):.2f} | "
                    f"{ratios[0]:.2f} to {ratios[-1]:.2f} | {p99['ours']:.3f} ms | {p99['Redis']:.3f} ms |",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.feast_store")
    parser.add_argument("--serve", type=Path, help="be the host, below this directory")
    options = parser.parse_args()
    measure() if options.serve is None else serve(options.serve)
