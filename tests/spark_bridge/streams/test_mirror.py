"""A mirror shows the state of a native query of Spark, as it was at one of its batches."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from backends.exceptions import InvalidStateStoreArgument
from spark_bridge import (
    QueryableStateClient,
    StatefulProcessor,
    StatefulProcessorHandle,
    mirror,
    read_state,
    state_table,
)
from spark_bridge.operators.map_in_arrow import SOURCE_EVOLUTION_CONF
from spark_bridge.overview.from_cluster import cluster_overview
from spark_bridge.session.current import current_cluster
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import Stream, driver_environment, settle, wait_until
from tests.spark_bridge.streams.other_driver import ray_address
from tests.spark_bridge.streams.processors import native_of
from tests.spark_bridge.streams.running import EXECUTOR, dying

pytestmark = [  # CI runs more of these, on Spark 4.3
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(pyspark.__version__ < "4", reason="This Spark has no reader of state."),
]

INPUT = "user string, amount long, ts timestamp"
STORES = "org.apache.spark.sql.execution.streaming.state."
CHANGELOGS = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
INTERVAL = "100 milliseconds"
"""How often mirrors look."""


@pytest.fixture(autouse=True)
def native_settings(spark: SparkSession) -> Iterator[None]:
    """Queries keep their state in RocksDB with changelogs, and run no batch without rows."""
    settings = {
        "spark.sql.streaming.stateStore.providerClass": f"{STORES}RocksDBStateStoreProvider",
        CHANGELOGS: "true",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    }
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def run_native(df: DataFrame, location: str, mode: str = "update") -> None:
    """Run a native query until it has read all files, and stop it."""
    writer = df.writeStream.format("noop").outputMode(mode).option("checkpointLocation", location)
    writer.trigger(availableNow=True).start().awaitTermination()


def newest_batch(location: str) -> int:
    return max(int(path.name) for path in Path(location, "commits").glob("[0-9]*"))


def caught_up(query: StreamingQuery, own: str, native: str, *, sleeps: bool = False) -> None:
    """Wait until the mirror shows the newest batch, and, unless it ``sleeps`` for long, hosts know it."""

    def has_newest() -> bool:
        assert query.exception() is None, query.exception()
        if not any(Path(own, "commits").glob("[0-9]*")):
            return False
        return [row["batch"] for row in state_table(own, "mirrored_batch").to_pylist()] == [newest_batch(native)]

    wait_until(has_newest)
    if not sleeps:
        settle(query)


def rows_of(state: Sequence[Sequence[Any]]) -> list[str]:
    return sorted(repr(tuple(row)) for row in state)


def of_spark(spark: SparkSession, location: str, *columns: str, **options: Any) -> list[str]:
    """The rows of Spark's own reader, at its newest batch."""
    reader = spark.read.format("statestore").options(**{name: str(value) for name, value in options.items()})
    return rows_of(reader.load(location).selectExpr(*columns).collect())


def of_mirror(spark: SparkSession, own: str, operator: str, *columns: str) -> list[str]:
    return rows_of(read_state(spark, own, operator).selectExpr(*columns).collect())


class Seen(StatefulProcessor):
    """One variable of each kind that Spark has a feed of, with and without a TTL."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        hour = 3_600_000
        self.n = handle.getValueState("n", "n long")
        self.last = handle.getValueState("last", "amount long", hour)
        self.by_amount = handle.getMapState("by_amount", "amount long", "n long, user string")
        self.expiring = handle.getMapState("expiring", "amount long", "n long", hour)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        for amount in pd.concat(list(rows))["amount"].tolist():
            if amount < 0:
                self.n.clear()
                self.by_amount.removeKey((1,))
                continue
            self.n.update(((self.n.get()[0] if self.n.exists() else 0) + 1,))
            self.last.update((amount,))
            self.by_amount.updateValue((amount,), (amount, key[0]))
            self.expiring.updateValue((amount,), (amount,))
        yield pd.DataFrame({"user": [key[0]]})

    def close(self) -> None:
        pass


class Listed(StatefulProcessor):
    """A list beside a value."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.n = handle.getValueState("n", "n long")
        self.all = handle.getListState("all", "amount long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            self.n.update((len(frame),))
            self.all.put([(amount,) for amount in frame["amount"].tolist()])
        yield pd.DataFrame({"user": [key[0]]})

    def close(self) -> None:
        pass


def by_processor(df: DataFrame, processor: type) -> DataFrame:
    by_user = df.groupBy("user")
    return by_user.transformWithStateInPandas(native_of(processor), "user string", "update", "processingTime")


def windows(df: DataFrame) -> DataFrame:
    return df.withWatermark("ts", "1 minute").groupBy(F.window("ts", "1 minute"), "user").agg(F.avg("amount"))


def totals(df: DataFrame) -> DataFrame:
    return df.groupBy("user").agg(F.count("*"), F.sum("amount"), F.sum(F.col("amount") * 2))


AT = "2026-01-01T00:0{minute}:00Z"


def row(user: str, amount: int, minute: int = 0) -> tuple[Any, ...]:
    return user, amount, pd.Timestamp(AT.format(minute=minute))


BATCHES = (
    [row("a", 1), row("b", 2), row("a", 3)],
    [row("a", 4, 5), row("c", 5, 5)],
    [row("a", -1, 9), row("b", 6, 9), row("d", 7, 9)],
)
Transform = Callable[[DataFrame], DataFrame]
WAYS: dict[str, tuple[Transform, list[str], list[str]]] = {
    # the native query, columns of Spark, columns of the mirror
    "windows": (
        windows,
        ["key.window", "key.user", "value.sum", "value.count"],
        ["window", "user", "sum", "count"],
    ),
    "all rows": (
        lambda df: df.groupBy().agg(F.count("*")),
        ["true", "value.count"],
        ["all_rows", "count"],
    ),
    "duplicates": (lambda df: df.dropDuplicates(["user", "amount"]), ["key.user", "key.amount"], ["user", "amount"]),
    "duplicates that expire": (
        lambda df: df.withWatermark("ts", "1 minute").dropDuplicatesWithinWatermark(["user"]),
        ["key.user", "value.expiresAtMicros"],
        ["user", "expiresAtMicros"],
    ),
    "sessions": (  # a buffer has the name of a key
        lambda df: (
            df.withColumn("count", F.col("user"))
            .withWatermark("ts", "1 minute")
            .groupBy(F.session_window("ts", "2 minutes"), "count")
            .agg(F.count("*"), F.sum("amount"))
        ),
        ["key.count", "key.sessionStartTime", "value.session_window", "value.sum"],
        ["count", "sessionStartTime", "session_window", "sum"],
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.matrix if name == "windows" else pytest.mark.thorough) for name in WAYS],
)
def test_every_kind_of_state(make_stream: Callable[..., Stream], spark: SparkSession, case: str) -> None:
    """With HDFS state stores, which are Spark's default."""
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", f"{STORES}HDFSBackedStateStoreProvider")
    native_query, of_native, columns = WAYS[case]
    stream = make_stream(INPUT)
    native, own = str(stream.root / "native"), str(stream.root / "mirror")
    df = native_query(stream.read())
    mode = "append" if case == "sessions" else "update"
    stream.add(BATCHES[0])
    query = None
    for batch in (*BATCHES[1:], [row("e", 8, 9)]):
        run_native(df, native, mode)
        query = query or mirror(spark, native, own, operators={"kept": 0}, interval=INTERVAL, num_partitions=2)
        caught_up(query, own, native)
        shown = of_mirror(spark, own, "kept", *columns)
        assert shown == of_spark(spark, native, *of_native) and shown
        stream.add(batch)


@pytest.mark.matrix
def test_variables_of_a_processor(make_stream: Callable[..., Stream], spark: SparkSession) -> None:
    stream = make_stream(INPUT)
    native, own = str(stream.root / "native"), str(stream.root / "mirror")
    df = by_processor(stream.read(), Seen)
    stream.add(BATCHES[0])
    run_native(df, native)
    query = mirror(spark, native, own, interval=INTERVAL, num_partitions=2)
    caught_up(query, own, native)
    stream.add(BATCHES[1])
    stream.add(BATCHES[2])
    run_native(df, native)
    caught_up(query, own, native)
    stream.add([row("nobody", -1)])  # no change of any variable
    run_native(df, native)
    caught_up(query, own, native)
    ttl = "ttlExpirationMs"
    for variable, of_native, columns in (
        ("n", ["key.user", "value.n"], ["user", "n"]),
        ("last", ["key.user", "value.value.amount", f"value.{ttl}"], ["user", "amount", "ttl_expiration_ms"]),
        (
            "by_amount",
            ["key.user", "user_map_key.amount", "user_map_value.n", "user_map_value.user"],
            ["user", "amount", "n", "user__value"],
        ),
        (
            "expiring",
            ["key.user", "user_map_key.amount", "user_map_value.value.n", f"user_map_value.{ttl}"],
            ["user", "amount", "n", "ttl_expiration_ms"],
        ),
    ):
        shown = of_mirror(spark, own, f"operator_0_{variable}", *columns)
        assert shown == of_spark(spark, native, *of_native, stateVarName=variable) and shown, variable


@pytest.mark.spark42_only
def test_mirror_stays_correct_through_restarts_gaps_and_rollbacks(
    make_stream: Callable[..., Stream], spark: SparkSession
) -> None:
    stream = make_stream(INPUT)
    native, own = str(stream.root / "native"), str(stream.root / "mirror")
    df = windows(stream.read())

    def start() -> StreamingQuery:
        return mirror(spark, native, own, operators={"kept": 0}, interval=INTERVAL, num_partitions=2)

    def check(query: StreamingQuery) -> None:
        caught_up(query, own, native)
        shown = of_mirror(spark, own, "kept", "window", "user", "sum", "count")
        assert shown == of_spark(spark, native, "key.window", "key.user", "value.sum", "value.count") and shown

    stream.add(BATCHES[0])
    run_native(df, native)
    query = start()
    check(query)
    query.stop()
    # The mirror stops between its own plan and its commit: the batch runs again, with the same bounds.
    stream.add(BATCHES[1])
    run_native(df, native)
    query = start()
    check(query)
    query.stop()
    last = newest_batch(own)
    Path(own, "commits", str(last)).unlink()
    Path(own, "commits", f".{last}.crc").unlink(missing_ok=True)
    stream.add(BATCHES[2])
    run_native(df, native)
    query = start()
    check(query)
    assert newest_batch(own) > last
    query.stop()
    # The Spark query writes no changes for a while.
    spark.conf.set(CHANGELOGS, "false")
    stream.add([row("e", 8, 9)])
    run_native(df, native)
    spark.conf.set(CHANGELOGS, "true")
    stream.add([row("f", 8, 9)])
    run_native(df, native)
    query = start()
    check(query)
    # The user rolls the Spark query back by two batches, and other rows come.
    first = newest_batch(native) - 1
    for number in (first, first + 1):
        for directory in ("commits", "offsets"):
            Path(native, directory, str(number)).unlink()
    run_native(df.where("user <> 'f'"), native)
    check(query)
    # The user removes the checkpoint: a new query begins there.
    shutil.rmtree(native)
    run_native(df.where("user <> 'a'"), native)
    check(query)
    query_id = json.loads(Path(native, "metadata").read_text())["id"]
    assert of_mirror(spark, own, "mirrored_batch", "query") == rows_of([(query_id,)])
    assert query.isActive


@pytest.mark.matrix
def test_missing_changes_of_one_operator(make_stream: Callable[..., Stream], spark: SparkSession) -> None:
    """The tasks of the other operator have committed when Spark does not find them: the whole state replaces that."""
    stream = make_stream(INPUT)
    native, own = str(stream.root / "native"), str(stream.root / "mirror")
    df = stream.read().dropDuplicates(["user", "amount"]).groupBy("user").agg(F.count("*"))
    stream.add(BATCHES[0])
    stream.add(BATCHES[1])
    run_native(df, native)
    query = mirror(spark, native, own, interval=INTERVAL, num_partitions=2)
    caught_up(query, own, native)
    query.stop()
    stream.add(BATCHES[2])
    spark.conf.set(CHANGELOGS, "false")
    run_native(df, native)
    operators = spark.read.format("state-metadata").load(native).collect()
    names = {one["operatorId"]: one["operatorName"] for one in operators}
    version = newest_batch(native) + 1
    for partition in Path(native, "state", "0").glob("[0-9]*"):
        shutil.copy(partition / f"{version - 1}.changelog", partition / f"{version}.changelog")
    spark.conf.set(CHANGELOGS, "true")
    stream.add([row("e", 8, 9)])
    run_native(df, native)
    query = mirror(spark, native, own, interval=INTERVAL, num_partitions=2)
    caught_up(query, own, native)
    for number, name in names.items():
        of_native, columns = {
            "dedupe": (["key.user", "key.amount"], ["user", "amount"]),
            "stateStoreSave": (["key.user", "value.count"], ["user", "count"]),
        }[name]
        shown = of_mirror(spark, own, f"operator_{number}", *columns)
        assert shown == of_spark(spark, native, *of_native, operatorId=number) and shown


@pytest.mark.thorough
def test_named_sources(make_stream: Callable[..., Stream], spark: SparkSession) -> None:
    stream = make_stream(INPUT)
    native, own = str(stream.root / "native"), str(stream.root / "mirror")
    stream.add(BATCHES[0])
    run_native(totals(stream.read()), native)
    spark.conf.set(SOURCE_EVOLUTION_CONF, "true")
    try:
        for _ in range(2):  # the second one reads the offsets of the first one
            query = mirror(spark, native, own, interval=INTERVAL, num_partitions=2)
            caught_up(query, own, native)
            query.stop()
    finally:
        spark.conf.unset(SOURCE_EVOLUTION_CONF)


@pytest.mark.thorough  # executors take long to come back
def test_killed_executors(make_stream: Callable[..., Stream], spark: SparkSession, tmp_path: Path) -> None:
    """Clients read a version of the mirror that the Spark query had, whichever executors and hosts die."""
    stream = make_stream(INPUT)
    native, own = str(stream.root / "native"), str(stream.root / "mirror")
    df = totals(stream.read())
    stream.add([row(f"u{i}", 0) for i in range(50)])
    run_native(df, native)
    query = mirror(spark, native, own, operators={"totals": 0}, name="kills", interval=INTERVAL, num_partitions=2)
    caught_up(query, own, native)
    client = QueryableStateClient.connect()
    for number in range(1, 7):
        stream.add([row(f"u{i}", number) for i in range(50)])
        run_native(df, native)
        if number % 2:  # while the mirror reads
            (tmp_path / EXECUTOR).touch()
            spark.range(1).mapInArrow(dying(tmp_path), "id long").collect()
        sums = {r["sum"] for r in client.scan("totals").to_pylist()}
        assert len(sums) == 1 and sums <= {n * (n + 1) // 2 for n in range(number + 1)}, sums
    caught_up(query, own, native)
    assert {(r["count"], r["sum"]) for r in client.scan("totals").to_pylist()} == {(7, 21)}
    (at,) = client.scan("mirrored_batch").to_pylist()
    assert at["batch"] == newest_batch(native) and query.exception() is None


PROGRAM = """
import sys
import ray
from pathlib import Path
from pyspark.sql import SparkSession
from spark_bridge import attach, mirror
from spark_bridge.session.ray_cluster import ensure_java
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.streams.test_mirror import CHANGELOGS, INPUT, STORES, totals

what, root, address = sys.argv[1:]
ensure_java()
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config(CHANGELOGS, "true")
builder = builder.config("spark.sql.streaming.stateStore.providerClass", STORES + "RocksDBStateStoreProvider")
spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
if what == "native":
    writer = totals(Stream(spark, Path(root), INPUT).read()).writeStream.format("noop").outputMode("update")
    query = writer.option("checkpointLocation", root + "/native").start()
else:
    ray.init(address=address, namespace="statestore", log_to_driver=False, logging_level="WARNING")
    attach(spark, num_hosts=1, namespace="statestore")
    query = mirror(spark, root + "/native", root + "/mirror", operators={"totals": 0}, num_partitions=2)
query.awaitTermination()
"""


@contextmanager
def killed_driver(what: str, root: Path, log: Path) -> Iterator[None]:
    """Run the native query, or the mirror, in another process; at the end, kill it with all that it has started."""
    with log.open("ab") as said:
        command = [sys.executable, "-c", PROGRAM, what, str(root), ray_address()]
        driver = subprocess.Popen(command, env=driver_environment(log.parent), stdout=said, stderr=said)
    try:
        yield
        assert driver.poll() is None, log.read_text()[-3000:]
    finally:
        if driver.poll() is None:
            of_driver = psutil.Process(driver.pid)
            for process in (*of_driver.children(recursive=True), of_driver):
                process.kill()
        driver.wait()


@pytest.mark.thorough  # otherwise: test_mirror_stays_correct_through_restarts_gaps_and_rollbacks
def test_killed_drivers_of_either_side(make_stream: Callable[..., Stream], spark: SparkSession, tmp_path: Path) -> None:
    stream = make_stream(INPUT)
    native, own = stream.root / "native", stream.root / "mirror"
    for number in range(60):
        stream.add([row(f"u{number % 7}", number), row("every", 1)])
    log, rng = tmp_path / "driver.log", random.Random()
    with killed_driver("native", stream.root, log):
        wait_until((native / "commits" / str(rng.randrange(3, 6))).exists, every=0.001)
    for round in range(2):
        before = newest_batch(str(native))
        events = [own / what / str(2 * round + rng.randrange(2)) for what in ("offsets", "commits")]
        with killed_driver("mirror", stream.root, log), killed_driver("native", stream.root, log):
            wait_until(rng.choice(events).exists, every=0.001)
            wait_until(lambda last=before: newest_batch(str(native)) > last, every=0.001)
        print("killed at", newest_batch(str(native)), sorted(path.name for path in (own / "commits").glob("[0-9]*")))
    run_native(totals(stream.read()), str(native))
    query = mirror(spark, str(native), str(own), operators={"totals": 0}, interval=INTERVAL, num_partitions=2)
    caught_up(query, str(own), str(native))
    counts = {r["user"]: r["count"] for r in state_table(str(own), "totals").to_pylist()}
    sums = {r["user"]: r["sum"] for r in state_table(str(own), "totals").to_pylist()}
    users = [f"u{number % 7}" for number in range(60)]
    assert counts == {"every": 60, **Counter(users)}
    assert sums == {"every": 60} | {u: sum(n for n in range(60) if f"u{n % 7}" == u) for u in users}


@pytest.mark.spark42_only
def test_answers_and_the_page_have_the_lag(make_stream: Callable[..., Stream], spark: SparkSession) -> None:
    stream = make_stream(INPUT)
    native, own = str(stream.root / "native"), str(stream.root / "mirror")
    df = totals(stream.read())
    stream.add(BATCHES[0])
    run_native(df, native)
    query = mirror(spark, native, own, operators={"totals": 0}, name="late", interval="1 day", num_partitions=2)
    caught_up(query, own, native, sleeps=True)
    client = QueryableStateClient.connect()
    wait_until(lambda: client.get("totals", "a") == {"count": 2, "sum": 4, "sum__value": 8})

    def lag() -> float:
        client.get("totals", "a")
        return client.lag_seconds

    wait_until(lambda: 0 < lag() < 60)
    stream.add(BATCHES[1])
    run_native(df, native)  # the mirror sleeps for a day
    committed = Path(native, "commits", str(newest_batch(native))).stat().st_mtime
    for path in Path(native, "commits").glob(f"*{newest_batch(native)}"):
        os.utime(path, (committed - 3600, committed - 3600))
    wait_until(lambda: lag() > 3600)
    options = current_cluster().options
    overview = cluster_overview(options.namespace, options.coordinator_name, PATIENCE)
    (shown,) = [one for one in overview.queries if one.query_id == str(query.id)]
    assert shown.is_mirror and shown.lag_ms > 3_600_000
    assert "mirror-late" in [fault.kind for fault in overview.faults]


@pytest.mark.spark42_only
def test_refusals_name_what_spark_has_no_feed_of(make_stream: Callable[..., Stream], spark: SparkSession) -> None:
    stream = make_stream(INPUT)
    native, own = str(stream.root / "native"), stream.root / "mirror"
    stream.add(BATCHES[0])

    def refusal(location: str, **options: Any) -> str:
        with pytest.raises(InvalidStateStoreArgument) as refused:
            mirror(spark, location, str(own), **options)
        assert not own.exists()
        return str(refused.value)

    assert "not the checkpoint of a query" in refusal(str(stream.root / "in"))
    df = stream.read().withWatermark("ts", "1 minute")
    joined = df.join(df.select(F.col("user").alias("u"), F.col("ts").alias("t")), F.expr("user = u AND t = ts"))
    run_native(joined, native, "append")
    assert "symmetricHashJoin), a join." in refusal(native)

    listed = str(stream.root / "listed")
    run_native(by_processor(stream.read(), Listed), listed)
    said = refusal(listed)
    assert "'all' is a list. Mirror the other states: operators={'operator_0_n': (0, 'n')}" in said
    assert "The states of" in refusal(listed, operators={"n": (0, "m")}) and "(0, 'n')" in said
    # The remedy.
    query = mirror(spark, listed, str(own), operators={"operator_0_n": (0, "n")}, num_partitions=2)
    caught_up(query, str(own), listed)
    with pytest.raises(InvalidStateStoreArgument, match="use serve_state"):
        mirror(spark, str(own), str(stream.root / "of a mirror"))
    with pytest.raises(InvalidStateStoreArgument, match="not the checkpoint of a mirror"):
        mirror(spark, listed, listed, operators={"operator_0_n": (0, "n")})
    query.stop()
    shutil.rmtree(own)

    # RocksDB without changelogs, and the remedy.
    unlogged = str(stream.root / "unlogged")
    spark.conf.set(CHANGELOGS, "false")
    run_native(totals(stream.read()), unlogged)
    assert f"{CHANGELOGS}=true" in refusal(unlogged)
    spark.conf.set(CHANGELOGS, "true")
    stream.add(BATCHES[1])
    run_native(totals(stream.read()), unlogged)
    query = mirror(spark, unlogged, str(own), operators={"totals": 0}, num_partitions=2)
    caught_up(query, str(own), unlogged)
    assert {r["user"] for r in state_table(str(own), "totals").to_pylist()} == {"a", "b", "c"}
