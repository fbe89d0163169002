"""Streams whose checkpoint is on ``s3a://`` through Hadoop's S3A, with the state in the same bucket."""

from __future__ import annotations

import uuid
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from backends.storage.checkpoint_storage import CheckpointStorage
from spark_bridge import state_table
from tests.backends.storage.s3_faults import FaultProxy, S3Server
from tests.services.artifacts import jars
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.streams.flow import NULL, SCHEMA, Flow, same_state
from tests.spark_bridge.streams.other_driver import Driver

pytestmark = [pytest.mark.spark, pytest.mark.service]

FILE_MANAGER = "org.apache.spark.internal.io.cloud.AbortableStreamBasedCheckpointFileManager"


@pytest.mark.parametrize("place", ["the checkpoint", "elsewhere in the bucket"])
def test_killed_driver_goes_on_exactly_once(
    spark: SparkSession, servers: tuple[S3Server, FaultProxy], tmp_path: Path, place: str
) -> None:
    """A driver dies with a batch at its sink; the next one repeats that batch."""
    server, _ = servers
    bucket = f"s3a-{uuid.uuid4().hex[:8]}"
    server.make_bucket(bucket)
    s3a = {
        "endpoint": server.endpoint,
        "endpoint.region": "us-east-1",
        "path.style.access": "true",
        "connection.ssl.enabled": "false",
        "access.key": server.account.access_key,
        "secret.key": server.account.secret_key,
    }
    options = {f"spark.hadoop.fs.s3a.{name}": value for name, value in s3a.items()}
    line = "spark35-s3a" if pyspark.__version__ < "4" else "spark42-s3a"
    configs = {
        **options,
        "spark.jars": ",".join(map(str, jars(line))),
        "spark.sql.streaming.checkpointFileManagerClass": FILE_MANAGER,
    }
    checkpoint, state = f"s3a://{bucket}/checkpoint", None
    if place != "the checkpoint":
        state = configs["spark.statestore.location"] = f"s3a://{bucket}/state"
    (tmp_path / "in").mkdir()
    flow = Flow(Stream(spark, tmp_path, SCHEMA, checkpoint=checkpoint), seed=7)
    flow.add(5)
    with Driver(flow.stream, tmp_path, ray="own", die_in_batch=2, configs=configs) as driver:
        driver.wait_for_death()
    stored = CheckpointStorage.open(checkpoint, options)
    assert {"commits/0", "commits/1", "offsets/2"} <= {path for path, _ in stored.list()}
    assert not stored.exists("commits/2")
    flow.add(2)
    with Driver(flow.stream, tmp_path, ray="own", configs=configs) as driver:
        driver.wait_until_ready()
        driver.end()
    for operator, wanted in flow.expected().items():
        rows = state_table(checkpoint, operator, state_location=state, storage_options=options).to_pandas()
        rows = rows.assign(s=rows["s"].fillna(NULL)).set_index([name for name in wanted.index.names if name])
        same_state(rows[list(wanted.columns)], wanted)
    assert stored.exists("commits/6")
    assert any(path.startswith("statestore/") for path, _ in stored.list()) == (state is None)
