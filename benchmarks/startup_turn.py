"""One turn of the comparison ``startup``, in a separate process: starts a session, and prints seconds as JSON.

    python startup_turn.py CONTESTANT EXECUTORS ROWS

The processes of a turn have the same ``RAY_TMPDIR`` in their environment.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

BEGAN = psutil.Process().create_time()  # the imports belong to a start
KEYS = 100
MASTER = "spark.ray.raydp_spark_master.actor.resource."
NATIVE_STORE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
BATCH_SECONDS = 300.0


class Turn:
    """The marks of one turn: seconds since the mark before, and CPU seconds of all processes of the turn."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._at, self._cpu_at = BEGAN, 0.0

    def mark(self, name: str) -> None:
        self.seconds[name] = time.time() - self._at
        cpu = cpu_seconds()
        self.cpu[name] = cpu - self._cpu_at
        self.skip()

    def skip(self) -> None:
        """Leave out what was done since the last mark."""
        self._at, self._cpu_at = time.time(), cpu_seconds()


def cpu_seconds() -> float:
    """Return the CPU seconds of all living processes that have this turn's directory in their environment."""
    total = 0.0
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == os.environ["RAY_TMPDIR"]:
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.Error:  # it has ended, or is another user's
            continue
    return total


def start_ray(executors: int) -> None:
    import ray

    ray.init(
        address="local",
        num_cpus=max(executors, os.cpu_count() or 1),
        namespace="statestore",
        log_to_driver=False,
        logging_level=logging.WARNING,
        _system_config={"worker_niceness": 0},
    )


def start_raydp(executors: int) -> Any:
    """Start Ray and RayDP with the settings that ours has too, and wait until all executors are there."""
    import raydp

    from spark_bridge.session.executors import SHUFFLE

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    head = {f"{MASTER}CPU": "0", f"{MASTER}node:__internal_head__": "0.001"}
    partitions = {"spark.sql.shuffle.partitions": str(executors), "spark.ui.showConsoleProgress": "false"}
    return raydp.init_spark("startup", executors, 1, "1g", configs={**head, **SHUFFLE, **partitions})


def first_batch(spark: Any, rows: int, totals: Any, mode: str) -> None:
    """Run one batch of totals by key until Spark has committed it. Raises ``RuntimeError`` if the totals are wrong."""
    root = Path(tempfile.mkdtemp(dir=os.environ["RAY_TMPDIR"]))
    (root / "in").mkdir()
    (root / "in" / "rows.json").write_text("\n".join(json.dumps({"k": i % KEYS, "v": i}) for i in range(rows)))
    stream = spark.readStream.schema("k long, v long").json(str(root / "in"))
    writer = totals(stream).writeStream.format("memory").queryName("totals").outputMode(mode)
    query = writer.option("checkpointLocation", str(root / "checkpoint")).trigger(availableNow=True).start()
    until = time.monotonic() + BATCH_SECONDS
    while not (root / "checkpoint" / "commits" / "0").exists():
        if query.exception() is not None or time.monotonic() > until:
            raise RuntimeError(f"The first batch was not committed: {query.exception()}")
        time.sleep(0.01)


def check(spark: Any, rows: int) -> None:
    """Raise ``RuntimeError`` unless the batch's output has the right totals."""
    for query in spark.streams.active:
        query.awaitTermination()
    made = {(row.k, row.total, row.n) for row in spark.table("totals").collect()}
    right = {(k, sum(range(k, rows, KEYS)), len(range(k, rows, KEYS))) for k in range(min(KEYS, rows))}
    if made != right:
        raise RuntimeError(f"The first batch has wrong totals: {sorted(made ^ right)[:4]}")


def run_raydp(turn: Turn, executors: int, rows: int) -> None:
    """Start Ray and RayDP; then Spark's own aggregate, and the session is joined by ``attach``."""
    import raydp

    start_ray(executors)
    spark = start_raydp(executors)
    turn.mark("session")
    from spark_bridge.session.executors import await_executors

    await_executors(spark, executors)
    turn.mark("executors")
    import pyspark.sql.functions as F

    spark.conf.set("spark.sql.streaming.stateStore.providerClass", NATIVE_STORE)
    totals = lambda df: df.groupBy("k").agg(F.sum("v").alias("total"), F.count("*").alias("n"))  # noqa: E731
    first_batch(spark, rows, totals, "update")
    turn.mark("batch")
    check(spark, rows)
    turn.skip()
    from spark_bridge import attach, stop_spark

    attach(spark)
    turn.mark("attach")
    stop_spark()
    raydp.stop_spark()


def run_ours(turn: Turn, executors: int, rows: int) -> None:
    from spark_bridge import init_spark

    spark = init_spark("startup", executors)
    turn.mark("session")
    turn.mark("executors")  # it waits for them
    from spark_bridge import aggregate, stop_spark
    from spark_bridge import functions as S

    first_batch(
        spark, rows, lambda df: aggregate(df, by="k", operator="totals", total=S.sum("v"), n=S.count()), "append"
    )
    turn.mark("batch")
    check(spark, rows)
    stop_spark()


def main(contestant: str, executors: int, rows: int) -> None:
    turn = Turn()
    if contestant == "ray":
        start_ray(executors)
        turn.mark("session")
    elif contestant == "raydp":
        run_raydp(turn, executors, rows)
    else:
        run_ours(turn, executors, rows)
    print(json.dumps({"seconds": turn.seconds, "cpu": turn.cpu}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
