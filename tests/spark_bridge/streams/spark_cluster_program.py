"""A stream on a Spark cluster that RayDP did not start: ``python spark_cluster_program.py ray-on-spark|beside ROOT``.

``ROOT/in`` has the input, and the checkpoint is in ROOT unless its location is the last argument. Prints one
line of JSON: the counts by key, and the earlier refusals.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from spark_bridge import aggregate, attach, setup_ray_on_spark, state_table, stop_spark
from spark_bridge import functions as S
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.session.ray_cluster import core_use, token_for_nodes

SMALL = {
    "memory_worker_node": 200 << 20,
    "object_store_memory_worker_node": 100 << 20,
    "memory_head_node": 200 << 20,
    "object_store_memory_head_node": 100 << 20,
    "num_cpus_head_node": 0,
}


def refusal(of: Callable[[], object]) -> str:
    """Return why something is refused."""
    try:
        of()
    except EnvironmentProblemError as error:
        return str(error)
    return "nothing was refused"


def counted(spark: SparkSession, root: Path, checkpoint: str) -> dict[str, int]:
    """Count the keys of the input as a stream, and return what the state has at the end."""
    rows = spark.readStream.schema("k long").option("maxFilesPerTrigger", 1).parquet(f"file://{root}/in")
    query = (
        aggregate(rows, by="k", operator="counts", n=S.count())
        .writeStream.outputMode("append")
        .option("checkpointLocation", checkpoint)
        .format("noop")
        .start()
    )
    query.processAllAvailable()
    query.stop()
    found = state_table(checkpoint, "counts").to_pydict()
    return dict(zip(map(str, found["k"]), found["n"], strict=True))


def main(kind: str, root: Path, master: str, ray_address: str = "", checkpoint: str = "") -> None:
    """Run; ``ray_address`` is only for ``beside``."""
    checkpoint = checkpoint or f"file://{root}/checkpoint"
    conf = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2", "spark.executor.memory": "512m"}
    builder = SparkSession.builder.master(master).appName("cluster")
    for name, value in conf.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    refused = []
    if kind == "beside":
        attach(spark, ray_address=ray_address, num_hosts=2)
        counts = counted(spark, root, checkpoint)
        stop_spark()
    else:
        from ray.util.spark import setup_ray_cluster, shutdown_ray_cluster

        refused.append(refusal(lambda: setup_ray_on_spark(spark, 2, 2, **SMALL)))
        setup_ray_on_spark(spark, 2, 1, **SMALL)
        use = core_use(spark)
        assert (use.all, use.of_ray) == (4, 2), use
        attach(spark, num_hosts=2)
        counts = counted(spark, root, checkpoint)
        stop_spark()
        shutdown_ray_cluster()
        with token_for_nodes():
            setup_ray_cluster(
                min_worker_nodes=2, max_worker_nodes=2, num_cpus_worker_node=2, num_gpus_worker_node=0, **SMALL
            )
        refused.append(refusal(lambda: attach(spark)))
        shutdown_ray_cluster()
    spark.stop()
    print(json.dumps({"counts": counts, "refused": refused}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
