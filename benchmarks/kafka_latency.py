"""From a record's append to a topic to its value at a client: ``comparisons/kafka.py`` declares the comparison.

    python benchmarks/kafka_latency.py load BROKER TOPIC RATE SECONDS KEYS PROBES    appends, and says when and where
    python quix BROKER TOPIC DIRECTORY REDIS_PORT                               counts with Quix Streams, into Redis

All contestants count the records of a key. The load is open: record i is appended at its scheduled time, whatever the
contestant does. Every 20 ms one record is a probe, whose key nothing else has. A client asks for the oldest probe that
it has not seen every 2 ms, and the time from the probe's schedule to the answer is its latency.

- ``ours``: ``aggregate`` over the topic, a client that asks the hosts.
- ``identity``: the same rows through the same shuffle and a Python task that returns them. The probe is there once
  Spark has committed its batch. No result can be older than this.
- ``foreach_batch``: Spark's own aggregate in update mode, whose changed rows ``foreachBatch`` writes to Redis from the
  executors, in pipelines.
- ``quix``: Quix Streams counts in its RocksDB state and sets each result in Redis. It has no lookup from other
  processes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

PROBE_SECONDS = 0.02
ASK_SECONDS = 0.002
"""Asking every 0.5 ms would take a sixth of a core from the contestants."""
OPERATOR = "counts"
PARTITIONS = 2


def keys_of(rate: int, seconds: float, keys: int, probes: str) -> Iterator[tuple[float, str]]:
    """Yield the schedule in seconds, and the key, of each record; those of probes begin with ``probes``.

    Two runs of one rate have the same records.
    """
    rng = random.Random(rate)
    every = max(1, int(rate * PROBE_SECONDS))
    for i in range(int(rate * seconds)):
        yield i / rate, f"{probes}-{i // every}" if i % every == 0 else f"user-{rng.randrange(keys)}"


def expected(rate: int, seconds: float, keys: int, probes: str) -> Counter[str]:
    return Counter(key for _, key in keys_of(rate, seconds, keys, probes))


def load(broker: str, topic: str, rate: int, seconds: float, keys: int, probes: str) -> None:
    """Append the records at their times; write the time, partition and offset of each probe as a line of JSON."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": broker, "linger.ms": 1, "queue.buffering.max.messages": 2_000_000})
    value = json.dumps({"amount": 1}).encode()
    records = list(keys_of(rate, seconds, keys, probes))
    step = max(0.001, 1 / rate)
    begun = time.time() + 0.2

    def tell(at: float) -> Callable[[Any, Any], None]:
        def delivered(error: Any, message: Any) -> None:
            assert error is None, error
            where = {"at": at, "key": message.key().decode(), "partition": message.partition()}
            print(json.dumps({**where, "offset": message.offset()}), flush=True)

        return delivered

    for after, key in records:
        while (wait := begun + after - time.time()) > 0:
            producer.poll(min(wait, step))
        if key.startswith(probes):
            producer.produce(topic, value, key.encode(), on_delivery=tell(begun + after))
            producer.poll(0)
        else:
            producer.produce(topic, value, key.encode())
    behind = time.time() - begun - records[-1][0]
    producer.flush()
    print(json.dumps({"behind": behind}), flush=True)


@dataclass
class Turn:
    """A turn: the latency of each probe in ms, how many seconds the load was late in the end, and the cores in use."""

    latencies: list[float] = field(default_factory=list)
    load_behind: float = 0.0
    cores: float = 0.0

    @property
    def p50(self) -> float:
        return sorted(self.latencies)[len(self.latencies) // 2]

    @property
    def p99(self) -> float:
        return sorted(self.latencies)[len(self.latencies) * 99 // 100]

    @property
    def is_sustained(self) -> bool:
        """Whether the load kept its times, and latency did not grow: by less than twice and a second.

        The last third of the probes is compared with the first tenth: rows that wait longer and longer have waited for
        seconds already when a third of the time is over.
        """
        tenth, third = len(self.latencies) // 10, len(self.latencies) // 3
        first, last = median(self.latencies[:tenth]), median(self.latencies[-third:])
        return self.load_behind < 0.5 and last < 2 * first + 1000


def measure(command: list[str], sees: Callable[[dict[str, Any]], bool], patience: float) -> Turn:
    """Run a load, and look for its probes by ``sees`` until all are there.

    Raises ``TimeoutError`` if no probe appears for ``patience`` seconds.
    """
    probes: list[dict[str, Any]] = []
    turn = Turn()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout

        def read() -> None:
            for line in map(json.loads, lines):
                if "behind" in line:
                    turn.load_behind = line["behind"]
                else:
                    probes.append(line)

        reader = Thread(target=read, daemon=True)
        reader.start()
        last = time.time()
        while True:
            is_over = not reader.is_alive()
            if len(turn.latencies) < len(probes):
                probe = probes[len(turn.latencies)]
                if sees(probe):
                    last = time.time()
                    turn.latencies.append((last - probe["at"]) * 1000)
                    continue
            elif is_over:
                break
            if time.time() - last > patience:
                raise TimeoutError(f"{command}: no further probe within {patience} s, after {len(turn.latencies)}")
            time.sleep(ASK_SECONDS)
    return turn


# -- contestants

Running = tuple[Callable[[dict[str, Any]], bool], Callable[[], dict[str, int]] | None]
"""What sees a probe, and what returns all counts; None if nothing has them."""


def records(spark: Any, broker: str, topic: str) -> Any:
    """Return the stream of keys, as every contestant on Spark reads it."""
    from pyspark.sql import functions as F

    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", broker).option("subscribe", topic)
    amount = F.get_json_object(F.col("value").cast("string"), "$.amount").cast("long")
    return (
        reader.option("startingOffsets", "earliest")
        .load()
        .select(F.col("key").cast("string").alias("k"), amount.alias("v"))
    )


@contextmanager
def ours(spark: Any, broker: str, topic: str, directory: Path) -> Iterator[Running]:
    """Start our query; give what sees a probe, and what returns all counts."""
    from spark_bridge import QueryableStateClient, aggregate
    from spark_bridge import functions as S

    counts = aggregate(records(spark, broker, topic), by="k", operator=OPERATOR, num_partitions=PARTITIONS, n=S.count())
    query = counts.writeStream.option("checkpointLocation", str(directory / "ck")).format("noop").start()
    with QueryableStateClient.connect() as client:
        of = str(query.id)

        def sees(probe: dict[str, Any]) -> bool:
            return client.get(OPERATOR, probe["key"], query=of) is not None

        def all_counts() -> dict[str, int]:
            with client.scan(OPERATOR, query=of) as scan:
                return {row["k"]: row["n"] for batch in scan for row in batch.to_pylist()}

        with stopped_in_the_end(query, lambda: has_state(client, of)):
            yield sees, all_counts


@contextmanager
def stopped_in_the_end(query: Any, is_ready: Callable[[], bool]) -> Iterator[None]:
    """Wait until a query is ready for the block, and stop it behind the block."""
    try:
        while not is_ready():
            if not query.isActive:
                raise RuntimeError(f"The query ended before it was ready: {query.exception()}")
            time.sleep(0.05)
        yield
    finally:
        query.stop()


def has_state(client: Any, query: str) -> bool:
    """Whether the query has had its first batch, of the record that warms the topic."""
    from spark_bridge.exceptions import SparkBridgeError

    try:
        return client.get(OPERATOR, "warm-up", query=query) is not None
    except SparkBridgeError:
        return False


@contextmanager
def identity(spark: Any, broker: str, topic: str, directory: Path) -> Iterator[Running]:
    """Start a query without state over the same path; a probe is seen when Spark has committed its offset."""

    def same(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches

    rows = records(spark, broker, topic).repartition(PARTITIONS, "k").mapInArrow(same, "k string, v long")
    query = rows.writeStream.option("checkpointLocation", str(directory / "ck")).format("noop").start()
    commits, offsets = directory / "ck/commits", directory / "ck/offsets"
    committed: dict[int, int] = {}
    seen = -1

    def sees(probe: dict[str, Any]) -> bool:
        nonlocal seen
        while (commits / str(seen + 1)).exists():
            seen += 1
            ends = json.loads((offsets / str(seen)).read_text().splitlines()[2])[topic]
            committed.update({int(partition): end for partition, end in ends.items()})
        return committed.get(probe["partition"], 0) > probe["offset"]

    with stopped_in_the_end(query, (commits / "0").exists):
        yield sees, None


@contextmanager
def foreach_batch(spark: Any, broker: str, topic: str, directory: Path, port: int) -> Iterator[Running]:
    """Start Spark's own aggregate, whose changed rows each batch writes to Redis from the executors."""
    import redis

    server = redis.Redis(port=port)
    server.flushall()

    def write(rows: Iterator[Any]) -> Iterator[Any]:
        import redis

        pipe = redis.Redis(port=port).pipeline(transaction=False)
        for batch in rows:
            for key, count in zip(batch["k"].to_pylist(), batch["n"].to_pylist(), strict=True):
                pipe.set(key, count)
            pipe.execute()
            yield batch.slice(0, 0)

    def save(batch: Any, _: int) -> None:
        batch.mapInArrow(write, "k string, n long").write.format("noop").mode("overwrite").save()

    counts = records(spark, broker, topic).groupBy("k").count().withColumnRenamed("count", "n")
    writer = counts.writeStream.outputMode("update").option("checkpointLocation", str(directory / "ck"))
    query = writer.foreachBatch(save).start()
    with stopped_in_the_end(query, lambda: bool(server.exists("warm-up"))):
        yield running_in(server)


def running_in(server: Any) -> Running:
    """Return what sees a probe in Redis, and what returns all counts there."""

    def all_counts() -> dict[str, int]:
        keys = list(server.scan_iter(count=10_000))
        return {key.decode(): int(value) for key, value in zip(keys, server.mget(keys), strict=True)}

    return lambda probe: bool(server.exists(probe["key"])), all_counts


@contextmanager
def quix(python: Path, broker: str, topic: str, directory: Path, port: int) -> Iterator[Running]:
    """Start Quix Streams in its environment; it writes each count to Redis."""
    import redis

    server = redis.Redis(port=port)
    server.flushall()
    command = [str(python), "-W", "ignore", __file__, "quix", broker, topic, str(directory), str(port)]
    with (
        (directory.parent / f"{topic}.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as app,
    ):
        try:
            while not server.exists("warm-up"):
                if app.poll() is not None:
                    raise RuntimeError((directory.parent / f"{topic}.log").read_text(errors="replace")[-2000:])
                time.sleep(0.05)
            yield running_in(server)
        finally:
            app.terminate()


def load_command(broker: str, topic: str, rate: int, seconds: float, keys: int, probes: str) -> list[str]:
    return [sys.executable, __file__, "load", broker, topic, str(rate), str(seconds), str(keys), probes]


def run_quix(broker: str, topic: str, directory: str, port: int) -> None:
    """Count the records of each key in RocksDB, and set the count in Redis; both happen before a commit."""
    import redis
    from quixstreams import Application
    from quixstreams.sinks.base import BatchingSink, SinkBatch

    class RedisSink(BatchingSink):  # type: ignore[misc]
        """Writes the last count of each key in a pipeline, when Quix Streams commits."""

        def write(self, batch: SinkBatch) -> None:
            pipe = redis.Redis(port=port).pipeline(transaction=False)
            for item in batch:
                pipe.set(item.key, item.value)
            pipe.execute()

    settings = {"auto_offset_reset": "earliest", "commit_interval": 0.1, "loglevel": "WARNING"}
    app = Application(broker_address=broker, consumer_group=topic, state_dir=directory, **settings)

    def count(_: Any, state: Any) -> int:
        n = int(state.get("n", 0)) + 1
        state.set("n", n)
        return n

    rows = app.dataframe(app.topic(topic, key_deserializer="str", value_deserializer="json"))
    rows.apply(count, stateful=True).sink(RedisSink())
    app.run()


if __name__ == "__main__":
    if sys.argv[1] == "load":
        load(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]), sys.argv[7])
    else:
        run_quix(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
