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

from spark_bridge import StatefulProcessor, aggregate, join, transform_with_state_in_pandas
from spark_bridge import functions as S
from spark_bridge.operators.map_in_arrow import SOURCE_EVOLUTION_CONF
from tests.effort import only_thorough
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import Stream, driver_environment, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.matrix]


def since(line: str) -> pytest.MarkDecorator:
    """Skip a test on earlier lines of Spark."""
    here = tuple(map(int, pyspark.__version__.split(".")[:2]))
    return pytest.mark.skipif(here < tuple(map(int, line.split("."))), reason=f"Spark {line} has brought this.")


OFFSET_LOG_CONF = "spark.sql.streaming.offsetLog.formatVersion"


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
def named_sources(spark: SparkSession) -> Iterator[None]:
    settings = {SOURCE_EVOLUTION_CONF: "true", OFFSET_LOG_CONF: "2"}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield
    for name in settings:
        spark.conf.unset(name)


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


@pytest.mark.spark42_only
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


@pytest.mark.spark42_only
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


@pytest.mark.spark42_only
@since("4.2")
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
