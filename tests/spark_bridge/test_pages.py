"""The code of the pages that needs Spark and Ray, run word by word in the suite's session."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray
from pyspark.sql import SparkSession

import spark_bridge
from tests.command_line import CliRunner
from tests.docs.pages import Page, pages, run

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ON_SPARK = [p for p in pages() if p.needs_spark]


def as_if_started(spark: SparkSession, starter: str) -> Callable[..., SparkSession]:
    """The suite's session in place of a new one, for arguments that the real function takes."""
    signature = inspect.signature(getattr(spark_bridge, starter))

    def start(*args: Any, **options: Any) -> SparkSession:
        signature.bind(*args, **options)
        return spark

    return start


def stop_queries_of(spark: SparkSession) -> None:
    for query in spark.streams.active:
        query.stop()


@pytest.fixture
def working_directory(spark: SparkSession, tmp_path: Path) -> Iterator[None]:
    """A directory of the page's own, for Python and for the driver's JVM."""
    jvm = spark._jvm
    files = jvm.org.apache.hadoop.fs.FileSystem.get(spark._jsc.hadoopConfiguration())
    before = str(Path.cwd())

    def move_to(directory: str) -> None:
        os.chdir(directory)
        jvm.java.lang.System.setProperty("user.dir", directory)
        files.setWorkingDirectory(jvm.org.apache.hadoop.fs.Path(directory))

    move_to(str(tmp_path))
    yield
    move_to(before)


def statestore(words: list[str]) -> str:
    """Run a line of the shell, and return what it prints. This process is in the Ray cluster, and stays there."""
    from spark_bridge.cli.main import app
    from spark_bridge.cli.output import FOUND

    with patch.object(ray, "init"), patch.object(ray, "shutdown"):
        outcome = CliRunner().invoke(app, [os.path.expandvars(word) for word in words[1:]])
    # The status tells of the queries that earlier tests have had fail.
    allowed = (0, FOUND) if words[1] == "status" else (0,)
    assert outcome.exit_code in allowed, f"{' '.join(words)}: {outcome.output}"
    return outcome.stdout


@pytest.mark.parametrize("page", ON_SPARK, ids=lambda p: p.name)
def test_runs(page: Page, spark: SparkSession, working_directory: None) -> None:
    ours = {name: as_if_started(spark, name) for name in ("init_spark", "attach")}
    ours["stop_spark"] = lambda: stop_queries_of(spark)
    with patch.dict(spark_bridge.__dict__, ours):
        run(page, statestore)
