"""A copied checkpoint in real Spark: rejected until it is forked, then a separate query."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator_actor.durable.moved_checkpoints import fork_checkpoint
from spark_bridge import aggregate, read_state
from spark_bridge import functions as S
from tests.spark_bridge.conftest import Stream

pytestmark = [pytest.mark.spark, pytest.mark.spark42, pytest.mark.thorough]


def test_a_fork_and_the_original_both_continue(make_stream: Callable[..., Stream], spark: Any, tmp_path: Path) -> None:
    stream, base, copy = make_stream(), str(tmp_path / "base"), str(tmp_path / "copy")
    totals = aggregate(stream.read(), by="k", operator="totals", num_partitions=2, n=S.count())

    def run(checkpoint: str) -> str:
        query = totals.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
        try:
            query.processAllAvailable()
            return str(query.id)
        finally:
            query.stop()

    def count(checkpoint: str) -> int:
        return int(read_state(spark, checkpoint, "totals", state_location=base).collect()[0]["n"])

    spark.conf.set("spark.statestore.location", base)
    try:
        stream.add([(1, 1.0)])
        original = run(stream.checkpoint)
        shutil.copytree(stream.checkpoint, copy)
        stream.add([(1, 1.0)])  # a task raises the error, and without rows there is no task
        with pytest.raises(Exception, match="statestore checkpoint fork"):
            run(copy)
        forked = fork_checkpoint(copy, base)
        assert run(copy) == forked.query_id
        assert (count(copy), count(stream.checkpoint)) == (2, 1)
        assert run(stream.checkpoint) == original
        assert (count(copy), count(stream.checkpoint)) == (2, 2)
    finally:
        spark.conf.unset("spark.statestore.location")
