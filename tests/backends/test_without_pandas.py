"""Hosts and the coordinator start without pandas and Spark, which nothing of theirs needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patience import HANG


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG)


def test_pyarrow_does_not_import_pandas_any_more() -> None:
    run(
        """
import sys
from backends.without_pandas import keep_pandas_out
keep_pandas_out()
import pyarrow as pa
assert pa.array([1, None]).to_pylist() == [1, None] and pa.scalar(b"x").as_py() == b"x"
assert "pandas" not in sys.modules
import pandas  # whoever wants it has it
assert pa.array([3.0, float("nan")]).null_count == 0
"""
    )


@pytest.mark.parametrize("module", ["spark_bridge.host_actor.actor", "coordinator_actor.on_ray.actor"])
def test_actors_import_neither_pandas_nor_spark(module: str) -> None:
    run(f"import sys, {module}; assert not {{'pandas', 'pyspark'}} & set(sys.modules)")
