"""A stream's program as users write one: counts by key, until the file ``end`` is there; writes the counts then."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from spark_bridge import aggregate, attach, init_spark, state_table
from spark_bridge import functions as S


def session(*, is_local: bool) -> SparkSession:
    """Start Spark by RayDP, or within this process, which takes less time."""
    configs = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}
    if not is_local:
        return init_spark("counting", num_executors=1, executor_memory="512m", configs=configs)
    builder = SparkSession.builder.master("local[1]").config(map=configs)
    return attach(builder.getOrCreate(), num_hosts=1)


def main(root: Path, *, is_local: bool) -> None:
    """Run in ``root``: ``in/`` has the input, ``pids/`` gets a file for each start, ``counts.json`` the result."""
    spark = session(is_local=is_local)
    rows = spark.readStream.schema("k long").option("maxFilesPerTrigger", 1).parquet(f"{root}/in")
    query = (
        aggregate(rows, by="k", operator="counts", n=S.count())
        .writeStream.outputMode("append")
        .option("checkpointLocation", f"{root}/checkpoint")
        .format("noop")
        .start()
    )
    (root / "pids" / str(os.getpid())).touch()
    while not (root / "end").exists():
        if not query.isActive:
            query.awaitTermination()  # raises what the query has ended with
        time.sleep(0.1)
    query.processAllAvailable()
    query.stop()
    found = state_table(f"{root}/checkpoint", "counts").to_pydict()
    (root / "counts.json").write_text(json.dumps(dict(zip(map(str, found["k"]), found["n"], strict=True))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_local=sys.argv[2:] == ["local"])
