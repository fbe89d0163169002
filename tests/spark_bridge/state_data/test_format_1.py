"""A query continues from the files of an earlier tree: checkpoint and savepoint of each backend, on both backends."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_bridge import QueryableStateClient, read_state, restore_savepoint, state_metadata_table
from spark_bridge.session.current import current_cluster
from tests.spark_bridge.conftest import wait_until
from tests.spark_bridge.state_data.format_fixtures import BACKENDS, Stored, copied, moved
from tests.spark_bridge.state_data.format_program import (
    STORED_BATCHES,
    Model,
    in_order,
    processing_times,
    read,
    start,
    write_input,
)

pytestmark = [pytest.mark.spark, pytest.mark.spark42_only, pytest.mark.slow]


@pytest.fixture(params=BACKENDS)
def goes_on_with(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[str]:
    """The backend of the queries that the test starts, as if the session had been made with it."""
    cluster = current_cluster()
    before = cluster.conf
    cluster.conf = dataclasses.replace(before, provider=request.param)
    yield request.param
    cluster.conf = before


@pytest.mark.in_turns("checkpoint", "savepoint")
@pytest.mark.parametrize("kind", ["checkpoint", "savepoint"])
@pytest.mark.parametrize("made_by", BACKENDS)
def test_query_continues_from_stored_format_1(
    spark: SparkSession, tmp_path: Path, made_by: str, kind: str, goes_on_with: str
) -> None:
    stored, checkpoint = Stored(made_by), str(tmp_path / "checkpoint")
    if kind == "checkpoint":
        copied(stored.checkpoint, tmp_path / "checkpoint")
    else:
        restore_savepoint(stored.savepoint, checkpoint, backend=goes_on_with)
    moved(checkpoint, tmp_path / "in", round(time.time() * 1000))
    for batch in range(STORED_BATCHES + 1):
        write_input(tmp_path / "in", batch)

    # One batch: a shorter trigger would add a batch without rows.
    query = start(spark, tmp_path / "in", checkpoint, processingTime="1 hour")
    committed = Path(checkpoint, "commits", str(STORED_BATCHES))
    wait_until(lambda: committed.exists() or not query.isActive)
    assert query.exception() is None

    times = processing_times(checkpoint)
    known = stored.expected()["processing_times_ms"]
    if kind == "checkpoint":
        assert times[:-1] == known
    wanted = Model.after([*known, times[-1]]).state()
    totals = {(k, g): figures for k, g, *figures in wanted["totals"]}
    with QueryableStateClient.connect() as client:
        # Hosts learn of the version a moment after Spark has committed the batch.
        last = {"n": 3, "note": "3 rows"}
        wait_until(lambda: client.get("visits", "many", state="last", query=str(query.id)) == last)
        keys = [*totals, ("nobody", 0)]
        answers = client.get_many("totals", keys, query=str(query.id), version=STORED_BATCHES + 1).to_pylist()
    query.stop()
    assert [row["n"] for row in answers] == [*(figures[0] for figures in totals.values()), None]
    assert [row["all"] for row in answers] == [*(figures[7] for figures in totals.values()), None]

    assert read(checkpoint) == wanted
    assert set(state_metadata_table(checkpoint)["provider"].to_pylist()) == {goes_on_with}
    with_spark = read_state(spark, checkpoint, "visits", "seen").drop("key_group", "partition_id")
    assert in_order([list(row) for row in with_spark.collect()]) == wanted["visits.seen"]
