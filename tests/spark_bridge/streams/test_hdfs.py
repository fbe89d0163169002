"""Streams whose checkpoint and state are on HDFS, while the driver and the NameNode are killed."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession

from backends.storage.checkpoint_storage import CheckpointStorage
from spark_bridge import QueryableStateClient, read_state, restore_savepoint, state_table, trigger_savepoint
from spark_bridge.cli.main import app
from tests.command_line import CliRunner
from tests.patience import PATIENCE
from tests.services.hadoop import Hdfs
from tests.spark_bridge.conftest import Stream, settle, wait_until
from tests.spark_bridge.streams.flow import NULL, SCHEMA, Flow, Sink, same_state, start
from tests.spark_bridge.streams.other_driver import Driver

pytestmark = [pytest.mark.spark, pytest.mark.spark42_only, pytest.mark.service]


@pytest.fixture
def flow(spark: SparkSession, hdfs: Hdfs, tmp_path: Path) -> Flow:
    """A stream from local files whose checkpoint, and so its state, is on HDFS."""
    (tmp_path / "in").mkdir()
    return Flow(Stream(spark, tmp_path, SCHEMA, checkpoint=f"{hdfs.url}/{uuid.uuid4().hex}/checkpoint"))


@pytest.fixture(scope="module")
def client(spark: SparkSession) -> QueryableStateClient:
    return QueryableStateClient.connect()


def check_stored(flow: Flow, checkpoint: str, state: Callable[[str, str], pd.DataFrame]) -> None:
    """Compare stored state with what pandas computes."""
    for operator, wanted in flow.expected().items():
        rows = state(checkpoint, operator)
        keys = [name for name in wanted.index.names if name is not None]
        rows = rows.assign(s=rows["s"].fillna(NULL)).set_index(keys)
        same_state(rows[list(wanted.columns)], wanted)


def stored(checkpoint: str, operator: str) -> pd.DataFrame:
    """Return state as a program without Spark reads it."""
    rows: pd.DataFrame = state_table(checkpoint, operator).to_pandas()
    return rows


def statestore(*arguments: str) -> Any:
    """Return what a command says."""
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def test_killed_driver_goes_on_exactly_once(flow: Flow, client: QueryableStateClient, tmp_path: Path) -> None:
    """A driver dies with a batch at its sink. The next one repeats that batch."""
    flow.add(5)
    with Driver(flow.stream, tmp_path, ray="same", die_in_batch=2) as driver:
        driver.wait_for_death()
    flow.add(2)
    query = start(flow.frame(3, 2), flow.stream.checkpoint, Sink())
    settle(query)
    flow.check(client, query)
    check_stored(flow, flow.stream.checkpoint, stored)
    query.stop()
    assert not list(tmp_path.glob("checkpoint*"))


def test_query_continues_after_the_name_node_dies(flow: Flow, hdfs: Hdfs, client: QueryableStateClient) -> None:
    """State answers while it is down. Whether Spark waits or ends the query, no batch is lost or counted twice."""
    flow.add(3)
    query = start(flow.frame(3, 2), flow.stream.checkpoint, Sink())
    settle(query)
    hdfs.name_node.kill()
    try:
        flow.check(client, query)
        flow.add(2)
    finally:
        hdfs.name_node.up()
    hdfs.wait_for(2)

    def is_done() -> bool:
        commits = CheckpointStorage.open(f"{flow.stream.checkpoint}/commits")
        return query.exception() is not None or commits.exists("4")

    wait_until(is_done)
    if query.exception() is not None:
        query = start(flow.frame(3, 2), flow.stream.checkpoint, Sink())
    flow.add(1)
    settle(query)
    flow.check(client, query)
    check_stored(flow, flow.stream.checkpoint, stored)


def test_commands_frames_and_savepoints(flow: Flow, hdfs: Hdfs, spark: SparkSession) -> None:
    flow.add(3)
    query = start(flow.frame(3, 2), flow.stream.checkpoint, Sink())
    settle(query)
    check_stored(flow, flow.stream.checkpoint, lambda at, operator: read_state(spark, at, operator).toPandas())
    directory = f"{hdfs.url}/{uuid.uuid4().hex}"
    savepoint = trigger_savepoint(query, directory).result(PATIENCE)
    query.stop()
    assert statestore("verify", flow.stream.checkpoint)["is_sound"]
    files = statestore("files", flow.stream.checkpoint)
    assert {"manifest", "changelog"} <= {file["kind"] for file in files}
    assert {file["path"] for file in files} <= {path for path, _ in storage_of(flow).list()}
    [listed] = statestore("savepoint", "list", directory)
    assert listed["path"] == savepoint
    restored = f"{directory}/restored"
    restore_savepoint(savepoint, restored, num_partitions=2)
    check_stored(flow, restored, stored)
    flow.stream.checkpoint = restored
    flow.add(2)
    query = start(flow.frame(2, 2), restored, Sink())
    settle(query)
    check_stored(flow, restored, stored)


def storage_of(flow: Flow) -> CheckpointStorage:
    return CheckpointStorage.open(f"{flow.stream.checkpoint}/statestore")
