"""Hosts and the coordinator start without pandas and Spark, which nothing of theirs needs."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import HANG

# One process for all, because the imports cost the time: actors keep pandas out when they start, not before.
CODE = """
import sys

def check(what):
    assert not {"pandas", "pyspark"} & set(sys.modules), f"{what} imports pandas or Spark"

import coordinator_actor.actor
check("the coordinator")
import spark_bridge.host_actor
check("a host")

from backends.decoders import keep_pandas_out
keep_pandas_out()
import pyarrow as pa
assert pa.array([1, None]).to_pylist() == [1, None] and pa.scalar(b"x").as_py() == b"x"
check("pyarrow")
import pandas  # an explicit import still works
assert pa.array([3.0, float("nan")]).null_count == 0
"""


def test_actors_and_pyarrow_import_neither_pandas_nor_spark() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=HANG)
    assert ran.returncode == 0, ran.stderr
