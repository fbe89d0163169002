"""The stream and its client, on machine 0 of the lab.

    python -m benchmarks.on_machines.programs stream ADDRESS CHECKPOINT EXECUTORS KEYS ROWS STANDBYS
    python -m benchmarks.on_machines.programs client CHECKPOINT KEYS ROWS

The stream:

Prints what happens as JSON, one event a line, with the seconds since 1970: batches that Spark has committed, where
executors and hosts are and who owns what, and which machines Ray takes for alive. Takes commands from standard input:
``executors N`` asks for so many, ``drain ADDRESS`` lets the hosts of a machine go, ``end ADDRESS`` ends its executors.

The client asks for 100 random keys again and again, in another thread with ``staleness="2 versions"``, and prints for
each answer, as JSON, the time of the request, its duration in seconds, its version, and how many versions it is behind
the one that Spark had committed at the time of the request. If an answer does not match the state of its keys at
exactly one version, or is further behind than it may be, it is an event ``wrong``; an error is an event ``late``.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.sql.functions import col

from backends.conf import StateStoreConf
from spark_bridge import QueryableStateClient, aggregate, init_spark
from spark_bridge import functions as S
from spark_bridge.exceptions import QueryableStateError
from spark_bridge.session.current import current_cluster
from spark_bridge.session.executors import executor_cores, executor_places
from tests.lab.auditor import committed

log = logging.getLogger(__name__)

OPERATOR = "totals"
PARTITIONS = 8
LOOK_SECONDS = 0.1
CONFIGS = {
    "spark.statestore.sharedFileSystem": "true",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": str(PARTITIONS),
}


# -- the state of every key at every version, known without the stream
#
# Row ``n`` is of key ``n * STEP % keys``: each key comes once in ``keys`` rows. A batch has ``rows`` rows, and version
# ``v`` consists of rows 0 to ``v * rows - 1``.

STEP = 618_033
"""Shares no factor with a power of ten."""

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """How many keys the state has, a power of ten, and how many rows a batch."""

    keys: int
    rows: int

    def firsts(self, keys: Integers) -> Integers:
        return keys * pow(STEP, -1, self.keys) % self.keys

    def totals(self, keys: Integers, version: int) -> tuple[Integers, Integers]:
        """Return how many rows each key has at a version, and the sum of their numbers."""
        first = self.firsts(keys)
        count = np.maximum(0, -((first - version * self.rows) // self.keys))
        return count, count * first + self.keys * (count * (count - 1) // 2)

    def version_of(self, keys: Integers, counts: Integers, sums: Integers, versions: range) -> int | None:
        """Return the newest version of ``versions`` that gives the keys these counts and sums; None if none does."""
        for version in reversed(versions):
            expected = self.totals(keys, version)
            if (expected[0] == counts).all() and (expected[1] == sums).all():
                return version
        return None


# -- the stream


def say(event: str, **what: Any) -> None:
    print(json.dumps({"event": event, "at": time.time(), **what}), flush=True)


def copy_lags(described: dict[str, Any]) -> list[int]:
    """Return the number of versions that each copy of a partition lags, from the coordinator's description."""
    return [lag for q in described["queries"] for of in q["copy_lags"].values() for lags in of for lag in lags]


class Places:
    """Says where executors, hosts and partitions are, whenever that has changed; counts partitions that have moved."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark
        self._owners: list[str] = []
        self._moved = 0
        self._said: dict[str, Any] = {}

    def look(self) -> None:
        """Look once. Raises what Ray or the coordinator raise."""
        import ray

        owners = [owner.ip for owner in current_cluster().coordinator.locate(OPERATOR).owners]
        if len(self._owners) == len(owners):
            self._moved += sum(a != b for a, b in zip(self._owners, owners, strict=True))
        self._owners = owners
        described = current_cluster().coordinator.describe()
        found = {
            "executors": executor_cores(self._spark),
            "hosts": dict(Counter(h["address"].rpartition("//")[2].rpartition(":")[0] for h in described["hosts"])),
            "owners": dict(Counter(owners)),
            "moved": self._moved,
            "copies": len(copy_lags(described)),
            "nodes": sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]),
        }
        if found != self._said:
            self._said = found
            say("places", **found)


def look_always(places: Places) -> None:
    """Look again and again; looks fail at times while machines are lost."""
    while True:
        try:
            places.look()
        except Exception:  # the thread must not end
            log.warning("a look failed", exc_info=True)
        time.sleep(LOOK_SECONDS)


def say_batches(query: Any) -> None:
    last = -1
    while query.isActive:
        for progress in query.recentProgress:
            if progress["batchId"] > last:
                last = progress["batchId"]
                say("batch", batch=last, seconds=progress["durationMs"]["triggerExecution"] / 1e3)
        time.sleep(0.02)


def obey(spark: Any, words: list[str]) -> None:
    import ray

    from coordinator_actor.actor import ClusterStore

    scala, jvm = spark.sparkContext._jsc.sc(), spark.sparkContext._jvm
    match words:
        case ["executors", number]:
            scala.requestTotalExecutors(int(number), 0, jvm.org.apache.spark.api.python.PythonUtils.toScalaMap({}))
        case ["drain", address]:
            node = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == address)
            ClusterStore("statestore", "StateStoreCoordinator").drain(node)
        case ["end", address]:
            for executor, place in executor_places(spark).items():
                if place is not None and place[0] == address:
                    scala.killExecutor(executor)
        case ["steps"]:
            records = current_cluster().coordinator.checkpoint_stats("stream")["history"]
            say("steps", steps=[[r["version"], {n: t["max_ms"] for n, t in r["steps"].items()}] for r in records])
        case _:
            raise ValueError(f"no command: {words}")
    say("done", command=" ".join(words))


def started(spark: Any, checkpoint: str, keys: int, rows: int, every: str) -> Any:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows)
    numbers = source.option("startTimestamp", 1_000_000).option("numPartitions", 4).load()
    keyed = numbers.select((col("value") * STEP % keys).alias("k"), col("value").alias("v"))
    totals = aggregate(keyed, by="k", operator=OPERATOR, n=S.count(), s=S.sum("v"))
    out = totals.writeStream.queryName("stream").format("noop").trigger(processingTime=every)
    return out.option("checkpointLocation", checkpoint).start()


def run_stream(address: str, checkpoint: str, executors: int, keys: int, rows: int, standbys: int) -> None:
    """Run the stream until standard input ends."""
    conf = StateStoreConf(standby_replicas=standbys)
    spark = init_spark("machines", executors, 1, "768m", ray_address=address, configs=CONFIGS, conf=conf)
    query = started(spark, checkpoint, keys, rows, "500 milliseconds")
    for target, argument in ((say_batches, query), (look_always, Places(spark))):
        threading.Thread(target=target, args=(argument,), daemon=True).start()
    for line in sys.stdin:
        obey(spark, line.split())


# -- the client

PAUSE = 0.1
AT_ONCE = 100
STALENESS = 2
HEARTBEAT_VERSIONS = 10
"""At most so many versions are completed between two heartbeats."""


def ask(
    client: QueryableStateClient, shape: Shape, keys: np.ndarray, checkpoint: str, staleness: int
) -> dict[str, object]:
    newest, began, at = committed(checkpoint), time.perf_counter(), time.time()
    told = {"at": at, "stale": bool(staleness)}
    try:
        rows = client.get_many(OPERATOR, keys, staleness=staleness or None)
    except QueryableStateError as error:
        return {"event": "late", **told, "seconds": time.perf_counter() - began, "error": repr(error)[:200]}
    told["seconds"] = time.perf_counter() - began
    counts, sums = (rows.column(name).fill_null(0).to_numpy() for name in ("n", "s"))
    # A host counts versions from the newest one that it knows: it learns of a commit within a heartbeat.
    least = max(0, newest - staleness - HEARTBEAT_VERSIONS) if staleness else newest
    version = shape.version_of(keys, counts, sums, range(least, committed(checkpoint) + 1))
    if version is None:
        return {"event": "wrong", **told}
    return {"event": "answer", **told, "version": version, "behind": max(0, newest - version)}


def run_client(checkpoint: str, keys: int, rows: int) -> None:
    """Ask in two threads: a request that waits for a lost owner must not hold up those that copies answer."""
    threading.Thread(target=ask_always, args=(checkpoint, Shape(keys, rows), STALENESS), daemon=True).start()
    ask_always(checkpoint, Shape(keys, rows), 0)


def ask_always(checkpoint: str, shape: Shape, staleness: int) -> None:
    draws = np.random.default_rng(1 + staleness)
    with QueryableStateClient.connect(timeout=60) as client:
        while True:
            drawn = draws.integers(0, shape.keys, AT_ONCE)
            # In one piece, unlike print: the other thread writes lines as well.
            sys.stdout.write(json.dumps(ask(client, shape, drawn, checkpoint, staleness)) + "\n")
            sys.stdout.flush()
            time.sleep(PAUSE)


if __name__ == "__main__":
    program, *words = sys.argv[1:]
    if program == "stream":
        run_stream(words[0], words[1], *(int(word) for word in words[2:]))
    else:
        run_client(words[0], int(words[1]), int(words[2]))
