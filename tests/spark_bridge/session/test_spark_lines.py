"""Differences between the lines of Spark that a query meets: one test for each, named after it."""

from __future__ import annotations

import datetime as dt
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_bridge import (
    StatefulProcessor,
    aggregate,
    join,
    restore_savepoint,
    state_table,
    transform_with_state_in_pandas,
    trigger_savepoint,
)
from spark_bridge import functions as S
from spark_bridge.operators.map_in_arrow import FRAME_BYTES_CONF, SOURCE_EVOLUTION_CONF, frame_limits
from tests.effort import only_thorough
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import CONFIGS, IS_ATTACHED, Stream, driver_environment, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.matrix]


def is_since(line: str) -> bool:
    """Return whether this is that line of Spark or a later one."""
    here = tuple(map(int, pyspark.__version__.split(".")[:2]))
    return here >= tuple(map(int, line.split(".")))


def since(line: str) -> pytest.MarkDecorator:
    """Skip a test on earlier lines of Spark."""
    return pytest.mark.skipif(not is_since(line), reason=f"Spark {line} has brought this.")


def until(line: str) -> pytest.MarkDecorator:
    """Skip a test on that line of Spark and later ones."""
    return pytest.mark.skipif(is_since(line), reason=f"Spark {line} has changed this.")


OFFSET_LOG_CONF = "spark.sql.streaming.offsetLog.formatVersion"
STATE_CHECKPOINT_CONF = "spark.sql.streaming.stateStore.checkpointFormatVersion"
SINK_EVOLUTION_CONF = "spark.sql.streaming.queryEvolution.enableSinkEvolution"
FILTER_PUSHDOWN_CONF = "spark.sql.python.filterPushdown.enabled"
Configure = Callable[[str, str], None]
MINUTE = dt.timedelta(minutes=1)
NOON = dt.datetime(2024, 1, 1, 12)


class Seen(StatefulProcessor):
    """Counts the rows of a key."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timers: Any) -> Iterator[pd.DataFrame]:
        before = self.count.get()
        n = (0 if before is None else before[0]) + sum(map(len, rows))
        self.count.update((n,))
        yield pd.DataFrame({"k": [key[0]], "n": [n]})

    def close(self) -> None:
        pass


def append_aggregate(df: DataFrame) -> DataFrame:
    by = [S.window("t", "1 minute").alias("w"), "k"]
    return aggregate(df, by=by, operator="by-minute", output_mode="append", n=S.count())


def chained_appends(df: DataFrame) -> DataFrame:
    minutes = append_aggregate(df)
    return aggregate(minutes, by=["w"], operator="of.minutes", output_mode="append", n=S.count())


def left_join(df: DataFrame, other: DataFrame) -> DataFrame:
    return join(df, other, on="k", how="left", within=("-1 minute", "1 minute"), operator="joined")


def timed(mode: str) -> Callable[[DataFrame], DataFrame]:
    return lambda df: transform_with_state_in_pandas(df, "k", Seen(), "k long, n long", operator="seen", time_mode=mode)


PLANS = {
    "append aggregate": append_aggregate,
    "chained appends": chained_appends,
    "processing time": timed("ProcessingTime"),
    "event time": timed("EventTime"),
}


@pytest.fixture
def configure(spark: SparkSession) -> Iterator[Configure]:
    """Set settings of the session until the test ends."""
    names: list[str] = []

    def set_one(name: str, value: str) -> None:
        names.append(name)
        spark.conf.set(name, value)

    yield set_one
    for name in names:
        spark.conf.unset(name)


@pytest.fixture
def named_sources(configure: Configure) -> None:
    configure(SOURCE_EVOLUTION_CONF, "true")
    configure(OFFSET_LOG_CONF, "2")


def begin(df: DataFrame, stream: Stream, seen: list[int]) -> Any:
    """Start the query; ``seen`` gets the number of rows of each batch."""
    writer = df.writeStream.option("checkpointLocation", stream.checkpoint)
    return writer.foreachBatch(lambda batch, n: seen.append(batch.count())).start()


def run_batches(query: Any, seen: list[int]) -> None:
    """Run some batches, of which quiet ones come from ticks; then stop the query."""
    begun = len(seen)
    wait_until(lambda: len(seen) > begun + 2 or query.exception())
    query.stop()
    assert query.exception() is None


@since("4.2")
@pytest.mark.parametrize(
    "plan", ["chained appends", "event time", *map(only_thorough, ("append aggregate", "left join", "processing time"))]
)
def test_spark_4_2_with_named_sources_runs_operators_that_tick(
    named_sources: None, make_stream: Callable[..., Stream], plan: str
) -> None:
    stream, other = make_stream("k long, t timestamp"), make_stream("k long, u timestamp")
    seen: list[int] = []

    def made() -> DataFrame:
        df = stream.read(name="clicks").withWatermark("t", "1 minute")
        if plan == "left join":
            return left_join(df, other.read(name="views").withWatermark("u", "1 minute"))
        return PLANS[plan](df)

    for minute in range(2):
        other.add([(9, dt.datetime(2024, 1, 1, 0, 10 * minute))])
        stream.add([(k, dt.datetime(2024, 1, 1, 0, 10 * minute)) for k in range(5)])
        run_batches(begin(made(), stream, seen), seen)
    offsets = max(Path(stream.checkpoint, "offsets").glob("[0-9]*"), key=lambda path: int(path.name)).read_text()
    assert "ticks_" in offsets and "clicks" in offsets
    assert sum(seen) > 0


@since("4.2")
def test_spark_4_2_with_named_sources_lets_an_operator_change_its_output_mode(
    named_sources: None, stream: Stream
) -> None:
    """Without names, Spark knows sources by their places: the restart is refused (``test_wrong_use.py``)."""
    stream.schema = "k long, t timestamp"
    seen: list[int] = []

    def counts(mode: str) -> DataFrame:
        df = stream.read(name="clicks").withWatermark("t", "1 minute")
        by = [S.window("t", "1 minute").alias("w"), "k"]
        return aggregate(df, by=by, operator="counts", output_mode=mode, n=S.count())

    stream.add([(1, dt.datetime(2024, 1, 1))])
    run_batches(begin(counts("append"), stream, seen), seen)
    assert sum(seen) == 0
    stream.add([(1, dt.datetime(2024, 1, 1, 0, 0, 30))])
    query = begin(counts("update"), stream, seen)
    query.processAllAvailable()
    assert seen[-1] == 1
    query.stop()
    stream.add([(1, dt.datetime(2024, 1, 1, 1))])
    run_batches(begin(counts("append"), stream, seen), seen)


@since("4.2")  # CI runs it on 4.3
def test_spark_4_2_with_a_real_time_trigger_is_refused_and_runs_with_the_remedy(
    spark: SparkSession, stream: Stream
) -> None:
    """On 4.3 the same query had an error about async progress tracking, which Spark had set itself."""
    stream.add([(1, 1.0)])
    if "realTime" not in inspect.signature(DataStreamWriter.trigger).parameters:
        pytest.skip(f"PySpark {pyspark.__version__} has no real-time trigger.")
    counts = aggregate(stream.read(), by="k", operator="o", n=S.count())
    writer = counts.writeStream.format("console").outputMode("update").option("checkpointLocation", stream.checkpoint)
    query = writer.trigger(realTime="5 seconds").start()
    with pytest.raises(Exception, match="real-time trigger") as error:
        query.awaitTermination()
    remedy = re.search(r'trigger\(processingTime="(0 seconds)"\)', str(error.value))
    assert remedy is not None
    query = writer.trigger(processingTime=remedy[1]).start()
    query.processAllAvailable()
    assert query.exception() is None
    query.stop()


@since("4.2")
@pytest.mark.parametrize(
    ("setting", "value", "log", "version"),
    [
        (OFFSET_LOG_CONF, "2", "offsets", "v2"),
        (STATE_CHECKPOINT_CONF, "2", "commits", "v2"),
        (SINK_EVOLUTION_CONF, "true", "commits", "v3"),
    ],
)
def test_spark_4_2_with_newer_logs_restarts_and_restores(
    configure: Configure,
    stream: Stream,
    tmp_path: Path,
    setting: str,
    value: str,
    log: str,
    version: str,
) -> None:
    """The times of a batch are in ``offsets``, its end is in ``commits``, and a savepoint has both."""
    configure(setting, value)
    stream.schema = "k long, t timestamp"

    def start(checkpoint: str) -> Any:
        df = stream.read().withWatermark("t", "1 minute")
        counts = aggregate(df, by=[S.window("t", "1 minute").alias("w"), "k"], operator="counts", n=S.count())
        writer = counts.writeStream.option("checkpointLocation", checkpoint)
        writer = writer.foreachBatch(lambda batch, _: batch.collect())
        if setting == SINK_EVOLUTION_CONF:
            writer._jwrite = writer._jwrite.name("counts")  # PySpark has no method for it
        return writer.start()

    def run(checkpoint: str, *minutes: int) -> Any:
        for minute in minutes:
            stream.add([(1, NOON + minute * MINUTE)])
        query = start(checkpoint)
        query.processAllAvailable()
        return query

    def windows(checkpoint: str) -> dict[int, int]:
        """Return the count of each window, by its minute after noon."""
        rows = state_table(checkpoint, "counts").to_pylist()
        return {(row["w"]["start"].replace(tzinfo=None) - NOON) // MINUTE: row["n"] for row in rows}

    run(stream.checkpoint, 0, 10).stop()
    # The third row is too late: its window ended before the watermark of the batch before.
    query = run(stream.checkpoint, 0, 11)
    files = Path(stream.checkpoint, log).glob("[0-9]*")
    assert {path.read_text().split("\n")[0] for path in files} == {version}
    last = windows(stream.checkpoint)
    assert last[11] == 1 and last.get(0) in (None, 1)
    saved = trigger_savepoint(query, str(tmp_path / "savepoints"), stop=True).result(PATIENCE)
    restored = str(tmp_path / "restored")
    restore_savepoint(saved, restored)
    assert windows(restored) == last
    run(restored, 0, 11).stop()
    assert windows(restored) == {**{m: n for m, n in windows(restored).items() if m != 11}, 11: 2}
    assert 0 not in windows(restored) or windows(restored)[0] == 1


def run_available(df: DataFrame, stream: Stream) -> None:
    writer = df.writeStream.format("noop").option("checkpointLocation", stream.checkpoint)
    assert writer.trigger(availableNow=True).start().awaitTermination(PATIENCE)


@pytest.mark.spark42_only
def test_spark_4_2_available_now_makes_batches_of_a_backlog_beside_an_operator_that_ticks(stream: Stream) -> None:
    """Its own way to do that makes one batch of everything, if one of the sources is a rate source."""
    stream.schema = "k long, t timestamp"
    for minute in range(3):
        stream.add([(1, NOON + minute * MINUTE)])
    run_available(append_aggregate(stream.read().withWatermark("t", "1 minute")), stream)
    assert len(list(Path(stream.checkpoint, "sources", "0").glob("[0-9]*"))) == 3


@pytest.mark.spark42_only
def test_spark_4_1_ends_a_query_before_its_first_batch(stream: Stream) -> None:
    """The classes of a running query have moved to another package."""
    stream.add([(1, 1.0)])
    df = stream.read()
    twice = aggregate(df, by="k", operator="same", n=S.count()).union(
        aggregate(df, by="k", operator="same", n=S.count())
    )
    query = twice.writeStream.format("noop").option("checkpointLocation", stream.checkpoint).start()
    with pytest.raises(Exception, match="'same'"):
        query.awaitTermination()
    assert not list(Path(stream.checkpoint, "offsets").glob("[0-9]*")), "the query has begun a batch"


@since("4.0")
def test_spark_4_0_reads_state_as_a_table(spark: SparkSession, configure: Configure, stream: Stream) -> None:
    """Spark 4.1 has brought filters, and 4.2 takes the time zone of the columns."""
    stream.schema = "k long, t timestamp"
    stream.add([(k, NOON + k * MINUTE) for k in range(20)])
    run_available(aggregate(stream.read(), by="k", operator="last", num_partitions=3, t=S.max("t")), stream)

    def table() -> DataFrame:
        return spark.read.format("ray_statestore").option("operator", "last").load(stream.checkpoint)

    assert sorted((row.k, row.t) for row in table().collect()) == [(k, NOON + k * MINUTE) for k in range(20)]
    configure(FILTER_PUSHDOWN_CONF, "true")
    one = table().where("k = 5")
    assert [(row.k, row.t) for row in one.collect()] == [(5, NOON + 5 * MINUTE)]
    assert one.rdd.getNumPartitions() == (1 if is_since("4.1") else 3)


@since("4.0")
@until("4.2")
def test_spark_4_0_refuses_a_limit_of_versions_in_a_stream_of_changes(spark: SparkSession, stream: Stream) -> None:
    """Its readers have no say in the limit of a batch."""
    stream.add([(1, 1.0)])
    run_available(aggregate(stream.read(), by="k", operator="counts", n=S.count()), stream)
    changes = spark.readStream.format("ray_statestore").option("operator", "counts").option("readChangeFeed", True)
    limited = changes.option("maxVersionsPerTrigger", 1).load(stream.checkpoint)
    query = limited.writeStream.format("noop").option("checkpointLocation", f"{stream.checkpoint}-2").start()
    with pytest.raises(Exception, match=r"on Spark 4\.0 or 4\.1 has no option 'maxVersionsPerTrigger'"):
        query.awaitTermination()


@pytest.mark.spark42_only
def test_spark_4_0_limits_the_bytes_of_a_frame(spark: SparkSession, configure: Configure) -> None:
    """Spark 3.5 does not know the setting, and has no limit unless a program sets one."""
    assert frame_limits(spark)[1] > 1 << 20
    configure(FRAME_BYTES_CONF, "3MB")
    assert frame_limits(spark)[1] == 3 << 20


@pytest.mark.spark42_only
def test_spark_4_0_gives_processors_objects_of_its_own_classes() -> None:
    from spark_bridge.stateful import declaration

    names = ("ValueState", "ListState", "MapState", "StatefulProcessorHandle", "TimerValues", "ExpiredTimerInfo")
    for name in names:
        base = getattr(declaration, f"PySpark{name}")
        if is_since("4.0"):
            from pyspark.sql.streaming import stateful_processor

            assert base is getattr(stateful_processor, name)
        else:
            assert base is object


@pytest.mark.spark42_only
@pytest.mark.skipif(IS_ATTACHED, reason="The level is set by init_spark.")
def test_spark_4_0_keeps_the_log_level_that_it_was_given(spark: SparkSession) -> None:
    """Ray, which starts in the same Java process, sets another one."""
    level = spark._jvm.org.apache.logging.log4j.LogManager.getRootLogger().getLevel()
    assert level.toString() == CONFIGS["spark.log.level"]


CONNECT_PROGRAM = """
from pyspark.sql import SparkSession
from spark_bridge import aggregate, attach, functions as S
spark = SparkSession.builder.remote("local[1]").getOrCreate()
rates = spark.readStream.format("rate").load()
for call in (lambda: attach(spark), lambda: aggregate(rates, by="value", operator="o", n=S.count())):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
spark.stop()
"""


@pytest.mark.spark42_only
@since("4.0")
def test_spark_4_with_connect_is_refused_with_the_place_to_run(tmp_path: Path) -> None:
    pytest.importorskip(
        "grpc_status", reason="Spark Connect needs grpcio-status, which this environment does not have."
    )
    environment = {name: value for name, value in driver_environment(tmp_path).items() if name != "SPARK_REMOTE"}
    command = [sys.executable, "-c", CONNECT_PROGRAM]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE * 4)
    refusals = [line for line in ran.stdout.splitlines() if "Spark Connect" in line]
    assert [line.split()[0] for line in refusals] == ["SessionError", "InvalidOperatorError"]
    assert all("without remote()" in line and "spark-submit" in line for line in refusals)
