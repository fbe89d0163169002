"""The stream, on machine 0: ``python -m benchmarks.on_machines.stream ADDRESS CHECKPOINT EXECUTORS KEYS ROWS``.

Prints what happens as JSON, one event a line, with the seconds since 1970: batches that Spark has committed, where
executors and hosts are and who owns what, and which machines Ray takes for alive. Takes commands from standard input:
``executors N`` asks for so many, ``drain ADDRESS`` lets the hosts of a machine go, ``end ADDRESS`` ends its executors.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import Counter
from typing import Any

from pyspark.sql.functions import col

from benchmarks.on_machines.expected import STEP
from spark_bridge import aggregate, init_spark
from spark_bridge import functions as S
from spark_bridge.session.current import current_cluster
from spark_bridge.session.executors import executor_cores, executor_places

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


def say(event: str, **what: Any) -> None:
    """Print an event."""
    print(json.dumps({"event": event, "at": time.time(), **what}), flush=True)


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
        described = current_cluster().coordinator.describe()["hosts"]
        found = {
            "executors": executor_cores(self._spark),
            "hosts": dict(Counter(h["address"].rpartition("//")[2].rpartition(":")[0] for h in described)),
            "owners": dict(Counter(owners)),
            "moved": self._moved,
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
    """Say each batch that Spark has committed."""
    last = -1
    while query.isActive:
        for progress in query.recentProgress:
            if progress["batchId"] > last:
                last = progress["batchId"]
                say("batch", batch=last, seconds=progress["durationMs"]["triggerExecution"] / 1e3)
        time.sleep(0.02)


def obey(spark: Any, words: list[str]) -> None:
    """Carry out a command."""
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


def main(address: str, checkpoint: str, executors: int, keys: int, rows: int) -> None:
    """Run the stream until standard input ends."""
    spark = init_spark("machines", executors, 1, "768m", ray_address=address, configs=CONFIGS)
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows)
    numbers = source.option("startTimestamp", 1_000_000).option("numPartitions", 4).load()
    keyed = numbers.select((col("value") * STEP % keys).alias("k"), col("value").alias("v"))
    totals = aggregate(keyed, by="k", operator=OPERATOR, n=S.count(), s=S.sum("v"))
    out = totals.writeStream.queryName("stream").format("noop").trigger(processingTime="500 milliseconds")
    query = out.option("checkpointLocation", checkpoint).start()
    for target, argument in ((say_batches, query), (look_always, Places(spark))):
        threading.Thread(target=target, args=(argument,), daemon=True).start()
    for line in sys.stdin:
        obey(spark, line.split())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(word) for word in sys.argv[3:6]))
