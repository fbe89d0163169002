"""Streams from a real Kafka broker: the options of the source, lost records, and processes that die.

One dictionary of counts and sums per key, computed from the records that were sent, is what the state must equal.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from spark_bridge import (
    QueryableStateClient,
    aggregate,
    deduplicate,
    restore_savepoint,
    state_table,
    trigger_savepoint,
)
from spark_bridge import functions as S
from tests.patience import PATIENCE
from tests.scratch import SCRATCH
from tests.services.kafka import KafkaBroker, Record
from tests.services.kafka_stream import KafkaStream
from tests.spark_bridge.conftest import settle, wait_until
from tests.spark_bridge.streams.bank import run_bank
from tests.spark_bridge.streams.flow import SCHEMA, Flow, Sink, start
from tests.spark_bridge.streams.other_driver import Driver
from tests.spark_bridge.streams.running import EXECUTOR, dying

pytestmark = [pytest.mark.spark, pytest.mark.service]
TOMBSTONE = "tombstones"
"""The key under which records without a value are counted."""


@dataclass
class Topics:
    """Some topics, and the expected state over their records: ``(number, sum)`` by key."""

    spark: SparkSession
    broker: KafkaBroker
    checkpoint: str
    prefix: str = field(default_factory=lambda: f"t{uuid.uuid4().hex[:8]}")
    seed: int = 5
    totals: defaultdict[str, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def create(self, *names: str, partitions: int = 3) -> None:
        """Create topics ``<prefix>-<name>``."""
        for name in names:
            self.broker.topics.create(f"{self.prefix}-{name}", partitions)

    def send(self, name: str, number: int, *, partition: int | None = None, is_counted: bool = True) -> None:
        """Append so many records, a tenth of them tombstones, with the amount in the value and a bonus in a header."""
        records = []
        for _ in range(number):
            key, amount, bonus = (self._random.randrange(n) for n in (12, 100, 5))
            is_tombstone = self._random.random() < 0.1
            value = None if is_tombstone else json.dumps({"amount": amount}).encode()
            headers = (("bonus", str(bonus).encode()), ("trace", b"\x00\xff"))
            records.append(Record(f"k{key}".encode(), value, headers, partition))
            if is_counted:
                count, total = self.totals[TOMBSTONE if is_tombstone else f"k{key}"]
                self.totals[TOMBSTONE if is_tombstone else f"k{key}"] = (count + 1, total + amount + bonus)
                if is_tombstone:
                    self.totals[TOMBSTONE] = (count + 1, total + bonus)
        self.broker.topics.send(f"{self.prefix}-{name}", records)

    def read(self, **options: Any) -> DataFrame:
        """Return the stream of all topics of the prefix; options in camel case are those of the source."""
        reader = self.spark.readStream.format("kafka").option("kafka.bootstrap.servers", self.broker.address)
        defaults = {"subscribePattern": f"{self.prefix}-.*", "startingOffsets": "earliest", "includeHeaders": "true"}
        # A topic or a partition that appears is looked for after this time, 5 minutes by default.
        chosen = {**defaults, "kafka.metadata.max.age.ms": "500", **options}
        return reader.options(**{name: value for name, value in chosen.items() if value is not None}).load()

    def totals_of(self, records: DataFrame) -> DataFrame:
        """Return the query: number and sum of amounts and bonuses by key."""
        amount = F.coalesce(F.get_json_object(F.col("value").cast("string"), "$.amount").cast("long"), F.lit(0))
        bonus = F.expr("cast(cast(filter(headers, h -> h.key = 'bonus')[0].value as string) as long)")
        key = F.when(F.col("value").isNull(), F.lit(TOMBSTONE)).otherwise(F.col("key").cast("string"))
        rows = records.select(key.alias("k"), (amount + bonus).alias("v"))
        return aggregate(rows, by="k", operator="totals", num_partitions=3, n=S.count(), total=S.sum("v"))

    def start(self, frame: DataFrame, **trigger: Any) -> StreamingQuery:
        """Start the query over this object's checkpoint."""
        writer = frame.writeStream.option("checkpointLocation", self.checkpoint).format("noop")
        return (writer.trigger(**trigger) if trigger else writer).start()

    def stored(self) -> dict[str, tuple[int, int]]:
        """Return the newest completed state of the checkpoint."""
        rows = state_table(self.checkpoint, "totals").to_pylist()
        return {row["k"]: (row["n"], row["total"]) for row in rows}


@pytest.fixture
def topics(spark: SparkSession, kafka: KafkaBroker, tmp_path: Path) -> Topics:
    return Topics(spark, kafka, str(tmp_path / "checkpoint"))


@pytest.fixture(scope="module")
def client(spark: SparkSession) -> QueryableStateClient:
    return QueryableStateClient.connect()


def drained(query: StreamingQuery) -> list[int]:
    """Wait for the end of an ``availableNow`` query; return the number of rows of each of its batches."""
    assert query.awaitTermination(PATIENCE)
    return [p["numInputRows"] for p in query.recentProgress]


@pytest.mark.spark42
def test_state_equals_topics_with_headers_and_tombstones(topics: Topics) -> None:
    """Several topics, more tasks than partitions, small batches, a topic and partitions that come later."""
    topics.create("a", "b")
    topics.send("a", 100)
    topics.send("b", 60)
    frame = topics.totals_of(topics.read(maxOffsetsPerTrigger="40", minPartitions="8"))
    sizes = drained(topics.start(frame, availableNow=True))
    assert sum(sizes) == 160
    assert max(sizes) <= 40
    assert topics.stored() == topics.totals
    topics.create("c", partitions=1)
    topics.send("c", 30)
    topics.broker.topics.add_partitions(f"{topics.prefix}-a", 5)
    topics.send("a", 20, partition=4)
    assert sum(drained(topics.start(frame, availableNow=True))) == 50
    assert topics.stored() == topics.totals


def test_starting_offsets(topics: Topics) -> None:
    """By partition in JSON: the records before them are not read."""
    topics.create("a", partitions=2)
    topics.send("a", 10, partition=0, is_counted=False)
    topics.send("a", 15, partition=0)
    topics.send("a", 5, partition=1)
    offsets = json.dumps({f"{topics.prefix}-a": {"0": 10, "1": -2}})
    options = {"subscribePattern": None, "subscribe": f"{topics.prefix}-a", "startingOffsets": offsets}
    assert sum(drained(topics.start(topics.totals_of(topics.read(**options)), availableNow=True))) == 20
    assert topics.stored() == topics.totals


def test_emptied_topic_fails_the_query_or_is_skipped_as_configured(topics: Topics) -> None:
    """The topic loses records that the stopped query has not read."""
    topics.create("a", partitions=1)
    topics.send("a", 25)
    assert sum(drained(topics.start(topics.totals_of(topics.read()), availableNow=True))) == 25
    topics.send("a", 30, is_counted=False)
    topics.broker.topics.delete_records(f"{topics.prefix}-a", {0: -1})
    topics.send("a", 10)
    query = topics.start(topics.totals_of(topics.read(failOnDataLoss="true")), availableNow=True)
    with pytest.raises(Exception, match=r"(?is)failOnDataLoss|data.?loss|may have been missed"):
        query.awaitTermination(PATIENCE)
    kept = topics.stored()
    assert sum(count for count, _ in kept.values()) == 25
    frame = topics.totals_of(topics.read(failOnDataLoss="false"))
    assert sum(drained(topics.start(frame, availableNow=True))) == 10
    assert topics.stored() == topics.totals


def test_query_continues_after_the_broker_dies(topics: Topics, client: QueryableStateClient) -> None:
    """State answers while the broker is down, and the query continues when it is back."""
    topics.create("a")
    topics.send("a", 50)
    query = topics.start(topics.totals_of(topics.read()))
    settle(query)
    topics.broker.kill()
    try:
        expected = topics.totals["k1"]
        row = client.get("totals", "k1", query=str(query.id))
        assert row is not None
        assert (row["n"], row["total"]) == expected
    finally:
        topics.broker.start()
    topics.send("a", 40)
    wait_until(lambda: query.exception() or topics.stored() == topics.totals)
    assert query.exception() is None
    query.stop()
    assert topics.stored() == topics.totals


def test_savepoint_reads_on_from_its_offsets(topics: Topics, tmp_path: Path) -> None:
    """A restored query reads the records behind the savepoint, and none twice."""
    topics.create("a")
    topics.send("a", 50)
    query = topics.start(topics.totals_of(topics.read()))
    settle(query)
    savepoint = trigger_savepoint(query, str(tmp_path / "savepoints")).result(PATIENCE)
    at_savepoint = dict(topics.totals)
    topics.send("a", 45)
    settle(query)
    query.stop()
    assert topics.stored() == topics.totals
    topics.checkpoint = str(tmp_path / "restored")
    restore_savepoint(savepoint, topics.checkpoint, num_partitions=2)
    assert topics.stored() == at_savepoint
    topics.send("a", 5)
    # The number of partitions is the restored one.
    frame = topics.totals_of(topics.read(maxOffsetsPerTrigger="20"))
    assert sum(drained(topics.start(frame, availableNow=True))) == 50
    assert topics.stored() == topics.totals


@pytest.mark.spark42
def test_ticks_beside_kafka_in_a_chain(topics: Topics) -> None:
    """An append aggregate adds a source of ticks to Kafka's; a backlog still comes in batches of the cap."""
    topics.create("a")
    topics.send("a", 90)
    end = F.get_json_object(F.col("value").cast("string"), "$.end").cast("long")
    time = F.timestamp_seconds(F.coalesce(end, F.col("offset") + 1_600_000_000)).alias("time")
    rows = topics.read(maxOffsetsPerTrigger="30").select("partition", "offset", time)
    twice = rows.withColumn("copy", F.explode(F.array(F.lit(1), F.lit(2)))).withWatermark("time", "10 minutes")
    once = deduplicate(twice, ["partition", "offset"], operator="seen", within="1 hour")
    windows = aggregate(
        once, by=[S.window("time", "10 seconds")], operator="windows", output_mode="append", n=S.count()
    )
    emitted: list[int] = []

    def keep(batch: DataFrame, _: int) -> None:
        emitted.extend(row["n"] for row in batch.collect())

    writer = windows.writeStream.option("checkpointLocation", topics.checkpoint).foreachBatch(keep)
    sizes = drained(writer.trigger(availableNow=True).start())
    assert len(sizes) >= 3
    assert max(sizes) <= 31, "a tick may come with a batch"
    assert emitted == []
    assert state_table(topics.checkpoint, "seen").num_rows == 90
    for seconds in (1_700_000_000, 1_700_000_001):  # the first moves the watermark, the second brings the next batch
        record = Record(None, json.dumps({"end": seconds}).encode())
        topics.broker.topics.send(f"{topics.prefix}-a", [record])
        drained(writer.trigger(availableNow=True).start())
    assert sum(emitted) == 90


def test_killed_driver_goes_on_exactly_once(
    spark: SparkSession, kafka: KafkaBroker, client: QueryableStateClient, tmp_path: Path
) -> None:
    """A driver dies with a batch at its sink; the next one repeats that batch from Kafka, and both states agree."""
    flow = Flow(KafkaStream(spark, tmp_path, SCHEMA, address=kafka.address), seed=3)
    flow.add(5)
    with Driver(flow.stream, tmp_path, ray="same", die_in_batch=2) as driver:
        driver.wait_for_death()
    flow.add(2)
    query = start(flow.frame(3, 2), flow.stream.checkpoint, Sink())
    settle(query)
    flow.check(client, query)


@dataclass
class DoomedStream(KafkaStream):
    """A stream whose tasks kill their executor, once for each file ``strikes/executor``."""

    def read(self, name: str | None = None) -> DataFrame:
        """Return the stream."""
        return super().read(name).mapInArrow(dying(self.root / "strikes"), self.schema)


def test_bank_is_consistent_while_hosts_executors_and_the_broker_die(
    spark: SparkSession, kafka: KafkaBroker, tmp_path: Path
) -> None:
    for name in ("tellers", "strikes"):
        (tmp_path / name).mkdir()
    stream = DoomedStream(spark, tmp_path, "account long, amount long", address=kafka.address)

    def restart_broker() -> None:
        kafka.kill()
        kafka.start()

    strikes = {"broker": restart_broker, EXECUTOR: (tmp_path / "strikes" / EXECUTOR).touch}
    at_least = (500, 8)
    answers, blows, newest = run_bank(
        stream, tmp_path / "tellers", 9, 2_000, 25, pause=2.0, at_least=at_least, strikes=strikes
    )
    assert answers >= at_least[0]
    assert newest >= at_least[1]
    assert blows["broker"]
    assert blows[EXECUTOR]
    assert not (tmp_path / "strikes" / EXECUTOR).exists(), "no task killed its executor"


@pytest.mark.thorough  # otherwise: this file has its source, test_rolling_stream.py and test_feature_stream.py the rest
def test_example_answers_while_a_host_dies(tmp_path: Path) -> None:
    """``make demo ARGS=--kafka`` as a process: it kills a host and ends well, with frauds caught."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    with tempfile.TemporaryDirectory(prefix="rs-", dir=SCRATCH) as directory:
        done = subprocess.run(
            [sys.executable, "-m", "examples.fraud", "--seconds", "30", "--picture", str(tmp_path / "fraud.svg")],
            cwd=Path(__file__).parents[3],
            env={**environment, "RAY_TMPDIR": directory, "TMPDIR": directory},
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "is killed" in done.stdout
    caught = re.search(r"caught (\d+) of the last (\d+) frauds", done.stdout)
    assert caught is not None
    assert int(caught[1]) > 0
    assert "15,300 payments scored" in done.stdout
    assert (tmp_path / "fraud.svg").read_text().startswith("<svg")


@pytest.mark.spark42_only
def test_recipe_of_the_page_writes_changes_to_a_topic(topics: Topics, tmp_path: Path) -> None:
    """The code of ``docs/how-to/kafka.md`` for Spark 4, with the names of this test."""
    page = Path(__file__).parents[3] / "docs" / "how-to" / "kafka.md"
    recipe = page.read_text().partition("### From Spark 4")[2].partition("```python\n")[2].partition("```")[0]
    names = {"broker:9092": topics.broker.address, "ck/": topics.checkpoint, "ck-of-feed/": str(tmp_path / "feed")}
    names |= {"user-totals": f"changes-{topics.prefix}"}
    for name, value in names.items():
        assert f'"{name}"' in recipe
        recipe = recipe.replace(f'"{name}"', repr(value))
    topics.create("a")
    topics.send("a", 5)
    topics.broker.topics.create(names["user-totals"], 2)
    user = F.col("key").cast("string").alias("user")
    counted = aggregate(topics.read().select(user), by="user", operator="user_totals", num_partitions=3, n=S.count())
    counts = topics.start(counted)
    settle(counts)
    variables: dict[str, Any] = {"spark": topics.spark}
    exec(recipe.replace("(feed.select", "query = (feed.select"), variables)
    feed: StreamingQuery = variables["query"]
    feed.processAllAvailable()  # it begins with the version that is completed now
    for _ in range(3):
        topics.send("a", 50)
        settle(counts)
        feed.processAllAvailable()
    newest: dict[str, tuple[int, int]] = {}
    versions = set()
    for record in topics.broker.topics.records(names["user-totals"]):
        assert record.key is not None and record.value is not None
        version = int(dict(record.headers)["statestore-version"])
        key = json.loads(record.key)["user"]
        assert version >= newest.get(key, (0, 0))[0]
        versions.add(version)
        newest[key] = version, json.loads(record.value)["n"]
    stored = {row["user"]: row["n"] for row in state_table(topics.checkpoint, "user_totals").to_pylist()}
    assert {key: n for key, (_, n) in newest.items()} == stored
    assert versions == {1, 2, 3, 4}
    feed.stop()
    counts.stop()
