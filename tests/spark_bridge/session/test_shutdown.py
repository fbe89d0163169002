"""Programs that end without ``stop_spark``: what they show is their own error."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import HANG
from tests.scratch import SCRATCH
from tests.spark_bridge.conftest import driver_environment

pytestmark = pytest.mark.spark

PROGRAM = """
import threading
import pandas as pd
from spark_bridge import aggregate, functions as S, init_spark
from spark_bridge.session.cluster import lost_executors, spark_master
from spark_bridge.session.hosts import host_placement
from spark_bridge.session.queries import driver_heartbeats, listener

lost_executors.EXECUTOR_LOOK_SECONDS = host_placement.PLACEMENT_LOOK_SECONDS = 0.02
spark_master.MASTER_LOOK_SECONDS = 0.02
looks = threading.Semaphore(0)
look = host_placement.HostPlacement.look

def counted(placement):
    try:
        look(placement)
    finally:
        looks.release()

host_placement.HostPlacement.look = counted
settings = {"spark.log.level": "OFF", "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1"}
spark = init_spark("ends", num_executors=1, executor_cores=1, executor_memory="512m", configs=settings)
pd.DataFrame({"k": [1, 2]}).to_parquet("clicks.parquet")
clicks = spark.readStream.schema("k long").option("pathGlobFilter", "*.parquet").parquet(".")
counts = aggregate(clicks, by="k", operator="counts", n=S.count())
query = counts.writeStream.format("noop").option("checkpointLocation", "ck").start()
query.processAllAvailable()
STOPS
raise RuntimeError("the program's own error")
"""
STOPS = {
    "dies": "",
    "stops Spark first": "spark.stop()\nfor _ in range(20):\n    assert looks.acquire(timeout=60)",
}


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="rs-", dir=SCRATCH))  # short, for Ray's sockets
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.spark42
@pytest.mark.parametrize("how", STOPS)
def test_a_program_that_dies_shows_its_own_error_alone(how: str, directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("STOPS", STOPS[how])],
        cwd=directory,
        env={**driver_environment(directory), "RAY_TMPDIR": str(directory), "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert "RuntimeError: the program's own error" in done.stderr
    for ours in ("looked after", "not reported", "not renewed", "not taken", "not published", "gone for good"):
        assert ours not in done.stderr, done.stderr
