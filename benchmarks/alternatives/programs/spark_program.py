"""PySpark's own ways and ours, on either line of Spark. The queries are those of ``totals``.

Ours run on RayDP as ``init_spark`` starts Spark, with two executors of one core and two hosts; Spark's own run on
``local[2]``. A session is used for all contestants of one kind; the state of each is in its query's checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lanes
import protocol
from alternatives.turns import SLICES
from pyspark.sql import DataFrame, SparkSession
from totals import CONTESTANTS, ON_ROCKSDB, Workload

from spark_bridge.session.ray_cluster import ensure_java

PARTITIONS = 2
WORKLOAD = Workload(0, 0)  # its columns: the rows are given
OPERATORS = {
    **dict.fromkeys(("aggregate", "aggregate_partial"), "totals"),
    **{"arrow": "arrow_totals", "rows": "row_totals", "pandas": "pandas_totals"},
}


class Spark(protocol.Program):
    look_every = 0.005

    def __init__(self) -> None:
        self._spark: SparkSession | None = None
        self._provider = ""
        self._open = ExitStack()
        self._client: Any = None

    def start(self, contestant: str, directory: Path, collect: bool, checkpoint_seconds: float) -> None:
        """Start a query. Spark commits each batch; ``checkpoint_seconds`` is for others."""
        name, _, provider = contestant.partition(" ")
        spark = self._session_of(provider)
        made = CONTESTANTS[name]
        given = spark.readStream.schema(WORKLOAD.input).option("maxFilesPerTrigger", SLICES)
        totals = made.make(given.json(str(directory / "input")), WORKLOAD)
        writer = totals.writeStream.queryName(name).outputMode(made.output_mode)
        writer = writer.option("checkpointLocation", str(directory / "state"))
        self._results = protocol.Results(directory / "results") if collect else None
        writer = writer.foreachBatch(self._collect) if collect else writer.format("noop")
        self._query = writer.start()
        self._name, self._rows, self._seen = name, 0, -1

    def _session_of(self, provider: str) -> SparkSession:
        """Return the session for ours with this provider, or for Spark's own if there is none."""
        if self._spark is None or provider != self._provider:
            self._open.close()
            self._client = None  # it knows the cluster that has just ended
            made = lanes.session(PARTITIONS, provider=provider, configs=lanes.AT_ONCE) if provider else _local()
            self._spark, self._provider = self._open.enter_context(made), provider
        return self._spark

    def _collect(self, batch: DataFrame, number: int) -> None:
        assert self._results is not None
        for user, n, spent in batch.collect():
            self._results.write(user, n, spent)

    def rows(self) -> int:
        if (error := self._query.exception()) is not None:
            raise error
        events = self._query._jsq.recentProgress()
        for i in range(len(events)):
            if events[i].batchId() > self._seen:
                self._seen = events[i].batchId()
                self._rows += events[i].numInputRows()
        return self._rows

    def sees(self, user: int) -> int:
        from spark_bridge import QueryableStateClient

        if self._name not in OPERATORS:
            return super().sees(user)
        self._client = self._client or QueryableStateClient.connect()
        return (self._client.get(OPERATORS[self._name], user) or {"n": 0})["n"]

    def stop(self) -> None:
        self._query.stop()

    def close(self) -> None:
        """End the session, with all its processes."""
        self._open.close()


@contextmanager
def _local() -> Iterator[SparkSession]:
    """Give a session without Ray, for Spark's own ways."""
    ensure_java()
    settings = {
        "spark.driver.memory": "3g",
        "spark.sql.shuffle.partitions": str(PARTITIONS),
        "spark.sql.streaming.numRecentProgressUpdates": "1000",
        "spark.ui.enabled": "false",
        **lanes.AT_ONCE,
        **ON_ROCKSDB,
    }
    spark = SparkSession.builder.master(f"local[{PARTITIONS}]").config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


if __name__ == "__main__":
    protocol.serve(Spark())
