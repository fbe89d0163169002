"""``lookup`` in real streams: one recorded version per batch, read again however often and wherever the batch runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_bridge import aggregate, lookup
from spark_bridge import functions as S
from tests.spark_bridge.conftest import Stream, settle

pytestmark = [pytest.mark.spark, pytest.mark.spark42]


def totals_of(stream: Stream) -> Any:
    frame = aggregate(stream.read(), by="k", operator="looked_up", n=S.count(), total=S.sum("v"), num_partitions=3)
    writer = frame.writeStream.outputMode("append").option("checkpointLocation", stream.checkpoint)
    query = writer.format("noop").start()
    settle(query)
    return query


def test_a_batch_reads_its_version_again_though_the_other_query_went_on(make_stream: Callable[..., Stream]) -> None:
    looked_up, stream = make_stream(), make_stream("k long, w double")
    looked_up.add([(k, 1.0) for k in range(10)])
    query = totals_of(looked_up)
    seen: list[tuple[int, list[Any]]] = []
    fails = {"on": True}

    def keep(batch: DataFrame, batch_id: int) -> None:
        seen.append((batch_id, sorted(map(tuple, batch.collect()), key=repr)))
        if fails["on"]:
            raise RuntimeError("the sink is not there")

    stream.add([(1, 0.5), (1, 0.6), (11, 0.7), (None, 0.8)])
    enriched = lookup(stream.read(), "looked_up", on="k", columns=["n"])
    writer = enriched.writeStream.foreachBatch(keep).option("checkpointLocation", stream.checkpoint)
    with pytest.raises(Exception, match="the sink is not there"):
        writer.start().processAllAvailable()
    looked_up.add([(k, 1.0) for k in range(20)])
    settle(query)
    fails["on"] = False
    again = writer.start()
    again.processAllAvailable()
    first = [(None, 0.8, None), (1, 0.5, 1), (1, 0.6, 1), (11, 0.7, None)]
    by_key = sorted(first, key=repr)
    assert seen == [(0, by_key), (0, by_key)]
    stream.add([(1, 0.9), (11, 0.1)])
    again.processAllAvailable()
    assert seen[-1] == (1, sorted([(1, 0.9, 2), (11, 0.1, 1)], key=repr))
    again.stop()
    query.stop()
    records = sorted(p.name for p in Path(looked_up.checkpoint, "statestore/lookups").rglob("*.json"))
    assert records == [f"{n:020d}.json" for n in (0, 1)]


def test_batch_frames_ended_queries_checkpoints_and_inner_joins(
    make_stream: Callable[..., Stream], spark: SparkSession
) -> None:
    looked_up = make_stream()
    looked_up.add([(k, float(k)) for k in range(10)])
    query = totals_of(looked_up)
    frame = spark.createDataFrame([(1, "a"), (2, "b"), (77, "c"), (None, "d")], "key long, name string")
    now = lookup(frame, "looked_up", on={"key": "k"}, how="inner")
    looked_up.add([(1, 1.0)])
    settle(query)
    query.stop()
    assert now.columns == ["key", "name", "n", "total"]
    assert sorted(map(tuple, now.collect())) == [(1, "a", 1, 1.0), (2, "b", 1, 2.0)], "as of the call"
    for options in ({}, {"checkpoint": looked_up.checkpoint}):
        after = lookup(frame, "looked_up", on={"key": "k"}, columns=["total"], **options)
        assert sorted(map(tuple, after.collect()), key=repr) == sorted(
            [(1, "a", 2.0), (2, "b", 2.0), (77, "c", None), (None, "d", None)], key=repr
        )
        earlier = lookup(frame, "looked_up", on={"key": "k"}, how="inner", version=1, **options)
        assert sorted(map(tuple, earlier.collect())) == [(1, "a", 1, 1.0), (2, "b", 1, 2.0)]
