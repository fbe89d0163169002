"""How Spark writes the files of checkpoints: without processes on local disks, by its default elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from spark_bridge.session.spark_settings import FILE_MANAGER_CONF, file_manager_of_local_disks

pytestmark = pytest.mark.spark


@pytest.fixture
def viewed(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """Give a location that Hadoop has no local disk for, though its files are on one."""
    link = f"fs.viewfs.mounttable.default.link./{tmp_path.name}"
    spark.conf.set(link, f"file://{tmp_path}")
    yield f"viewfs:///{tmp_path.name}"
    spark.conf.unset(link)


def native_state(spark: SparkSession, source: Path, checkpoint: str) -> StreamingQuery:
    spark.range(3).write.mode("append").parquet(str(source))
    counts = spark.readStream.schema("id long").parquet(str(source)).groupBy("id").count()
    writer = counts.writeStream.outputMode("update").format("noop").option("checkpointLocation", checkpoint)
    query = writer.start()
    query.processAllAvailable()
    return query


def execution_of(query: StreamingQuery) -> Any:
    return query._jsq.streamingQuery()


def manager_of_state(query: StreamingQuery) -> str:
    return str(execution_of(query).sparkSessionForStream().conf().get(FILE_MANAGER_CONF, ""))


def test_a_query_on_a_local_disk_renames_without_processes(spark: SparkSession, tmp_path: Path) -> None:
    query = native_state(spark, tmp_path / "in", str(tmp_path / "ck"))
    ours = file_manager_of_local_disks(spark)
    assert execution_of(query).offsetLog().fileManager().getClass().getName() == ours
    assert manager_of_state(query) == ours
    query.stop()


def test_elsewhere_native_state_keeps_the_default(spark: SparkSession, tmp_path: Path, viewed: str) -> None:
    query = native_state(spark, tmp_path / "in", f"{viewed}/ck")
    assert manager_of_state(query) == ""
    assert (tmp_path / "ck" / "commits" / "0").exists()
    query.stop()
    assert spark.conf.get(FILE_MANAGER_CONF) == file_manager_of_local_disks(spark)


def test_a_file_that_is_there_is_not_replaced(spark: SparkSession, tmp_path: Path) -> None:
    jvm, path = spark._jvm, tmp_path / "7"
    assert jvm is not None
    query = native_state(spark, tmp_path / "in", str(tmp_path / "ck"))
    manager = execution_of(query).offsetLog().fileManager()
    written = jvm.org.apache.hadoop.fs.Path(str(path))
    late = manager.createAtomic(written, False)
    late.writeBytes("late")
    first = manager.createAtomic(written, False)
    first.writeBytes("first")
    assert not path.exists()
    first.close()
    with pytest.raises(Py4JJavaError, match="FileAlreadyExists"):
        late.close()
    assert path.read_text() == "first"
    query.stop()
