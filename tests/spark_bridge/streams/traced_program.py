"""A stream whose processes send their spans to a collector: ``python traced_program.py ROOT``.

``STATESTORE_TRACING`` says where that is. Prints one line of JSON: the ids of the runs, and the savepoint's path.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge import aggregate, attach, restore_savepoint, scale_hosts, stop_spark, trigger_savepoint
from spark_bridge import functions as S
from spark_bridge.session.current import current_cluster
from spark_bridge.session.ray_cluster import ensure_java
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import Stream, settle, wait_until


def main(root: Path) -> None:
    """Run a stream through its life: batches, a lost coordinator, a savepoint, other partitions, another host."""
    ensure_java()
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    attach(spark, num_hosts=2)
    (root / "in").mkdir()
    stream = Stream(spark, root, "k long, v double")

    def start(partitions: int) -> StreamingQuery:
        totals = aggregate(stream.read(), by="k", operator="totals", num_partitions=partitions, n=S.count())
        writer = totals.writeStream.queryName("traced").outputMode("append").format("noop")
        return writer.option("checkpointLocation", stream.checkpoint).start()

    def batch(query: StreamingQuery) -> None:
        stream.add([(k, 1.0) for k in range(100)])
        settle(query)

    said: dict[str, Any] = {}
    query = start(2)
    said["first"] = str(query.runId)
    batch(query)
    batch(query)
    before = coordinator_id()
    ray.kill(ray.get_actor(COORDINATOR_NAME, namespace=NAMESPACE), no_restart=False)
    wait_until(lambda: has_other_coordinator(before))
    batch(query)
    said["savepoint"] = trigger_savepoint(query, str(root / "saved")).result(PATIENCE)
    query.stop()

    query = start(3)
    said["second"] = str(query.runId)
    batch(query)
    scale_hosts(3)
    wait_until(lambda: len({owner.host_id for owner in current_cluster().coordinator.locate("totals").owners}) == 3)
    batch(query)
    query.stop()
    restore_savepoint(said["savepoint"], str(root / "restored"))
    stop_spark()
    spark.stop()
    ray.shutdown()
    print(json.dumps(said))


def coordinator_id() -> str:
    """Return the id of the process of the coordinator."""
    described: Callable[..., Any] = current_cluster().coordinator.call
    return str(described("describe")["pid"])


def has_other_coordinator(before: str) -> bool:
    """Return whether another coordinator has the query by now."""
    described = current_cluster().coordinator.call("describe")
    return str(described["pid"]) != before and len(described["queries"]) == 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
