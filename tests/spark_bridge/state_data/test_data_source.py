"""The format ``ray_statestore`` of Spark 4: state as a table and as a stream, on real Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

from spark_bridge import aggregate, read_state, read_state_changes
from spark_bridge import functions as S
from tests.backends.storage.s3_server import faulty_s3
from tests.patience import HANG
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.state_data.format_fixtures import Stored

pytestmark = [  # CI runs these on Spark 4.3
    pytest.mark.spark,
    pytest.mark.skipif(pyspark.__version__ < "4", reason="3.5 has no Python data sources."),
]
FORMAT = "ray_statestore"
FILTERS = pyspark.__version__ >= "4.1"
"""Since Spark 4.1."""
LIMITS = pyspark.__version__ >= "4.2"
"""Since Spark 4.2."""


def batch_rows(i: int) -> list[tuple[int, float]]:
    return [((i * 7 + j) % 30, float(j % 4)) for j in range(40)]


def run(stream: Stream) -> None:
    """Work through the files that there are."""
    counts = aggregate(stream.read(), by="k", operator="counts", num_partitions=3, n=S.count())
    writer = counts.writeStream.format("noop").trigger(availableNow=True)
    assert writer.option("checkpointLocation", stream.checkpoint).start().awaitTermination(HANG)


def test_the_package_is_imported_cheaply() -> None:
    program = "import sys, pyspark_ray_statestore; assert 'spark_bridge.state_data.state_reader' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG)


@pytest.mark.matrix
def test_state_is_a_table_and_the_source_of_a_stream(spark: SparkSession, stream: Stream, tmp_path: Path) -> None:
    for i in range(3):
        stream.add(batch_rows(i))
    run(stream)

    def table(**options: Any) -> Any:
        return spark.read.format(FORMAT).options(operator="counts", **options).load(stream.checkpoint)

    expected = sorted(map(tuple, read_state(spark, stream.checkpoint, "counts").collect()))
    df = table()
    assert sorted(map(tuple, df.collect())) == expected and df.rdd.getNumPartitions() == 3
    assert [tuple(row) for row in df.where("k = 5").collect()] == [row for row in expected if row[0] == 5]
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    one = table().where("k = 5")
    num_read = 1 if FILTERS else 3
    assert one.rdd.getNumPartitions() == num_read, "the partitions of other keys are not read"
    assert [tuple(row) for row in one.collect()] == [row for row in expected if row[0] == 5]
    some = table().where("k >= 3 and k < 9 and n > 0").collect()
    assert sorted(map(tuple, some)) == [row for row in expected if 3 <= row[0] < 9]
    older = read_state(spark, stream.checkpoint, "counts", version=2)
    assert sorted(map(tuple, table(batchId=1).collect())) == sorted(map(tuple, older.collect()))
    feed = table(readChangeFeed=True, changeStartBatchId=1, changeEndBatchId=1)
    changed = read_state_changes(spark, stream.checkpoint, "counts", from_version=1, to_version=2)
    assert sorted(map(repr, feed.collect())) == sorted(map(repr, changed.collect()))
    assert table().where("k = 1000").collect() == [], "no partition can have such a key"
    assert table().where("k > 5 and k < 5").count() == 0
    invalid = "STDS_INVALID_OPTION_VALUE.WITH_MESSAGE"
    for wrong, says in (
        ({"batch": 1}, "no option"),
        ({"batchId": "x"}, "must be a number"),
        ({"batchId": 99}, "STDS_COMMITTED_BATCH_UNAVAILABLE.*versions"),
        ({"snapshotStartBatchId": 3}, invalid),
        ({"readChangeFeed": True, "changeStartBatchId": 2, "changeEndBatchId": 1}, invalid),
        ({"readChangeFeed": True, "changeStartBatchId": 3}, f"{invalid}.*the last batch is 2"),
    ):
        with pytest.raises(Exception, match=says):
            table(**wrong).collect()

    spark.conf.unset("spark.sql.python.filterPushdown.enabled")

    # One query's state is another's source: the state as it is, and what changes from there on, each once.
    sink = str(tmp_path / "sink")

    limit = {"maxVersionsPerTrigger": 1} if LIMITS else {}

    def follow() -> list[Any]:
        changes = spark.readStream.format(FORMAT).options(operator="counts", readChangeFeed=True, **limit)
        writer = changes.load(stream.checkpoint).writeStream.format("parquet").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(tmp_path / "of-sink"))
        assert writer.start(sink).awaitTermination(HANG)
        return list(spark.read.parquet(sink).collect())

    first = follow()
    assert {row.version for row in first} == {3} and {row.change_type for row in first} == {"insert"}
    for i in range(3, 5):
        stream.add(batch_rows(i))
    run(stream)
    state: dict[int, int] = {}
    for row in sorted(follow(), key=lambda row: row.version):
        assert (row.before and row.before.n) == state.get(row.k), "no change is missing, and none comes twice"
        state[row.k] = row.after.n
    assert sorted(state.items()) == sorted((r.k, r.n) for r in read_state(spark, stream.checkpoint, "counts").collect())
    assert len(follow()) == len(spark.read.parquet(sink).collect())


@pytest.mark.thorough
def test_state_on_s3_is_a_table(spark: SparkSession) -> None:
    """Workers read objects, with the settings that are given to the reader."""
    stored = Path(Stored("rocksdb").checkpoint)
    with faulty_s3() as server:
        server.put_all("bucket", "ck", stored)
        there = sorted(map(repr, read_state(spark, str(stored), "totals").collect()))
        settings = {f"storage.{name}": value for name, value in server.settings.items()}
        found = spark.read.format(FORMAT).options(operator="totals", **settings).load("s3a://bucket/ck")
        assert sorted(map(repr, found.collect())) == there
