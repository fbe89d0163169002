"""A program changes the outputs of a running aggregate: what sink, clients, savepoints and readers get afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming import StreamingQuery

from spark_bridge import QueryableStateClient, aggregate, restore_savepoint, state_table, trigger_savepoint
from spark_bridge import functions as S
from tests.spark_bridge.conftest import Stream, settle

pytestmark = [pytest.mark.ray, pytest.mark.spark, pytest.mark.spark42_only]


def test_outputs_of_a_running_aggregate_change_at_restarts(stream: Stream, tmp_path: Path) -> None:
    sink: list[dict[str, Any]] = []

    def start(checkpoint: str = stream.checkpoint, **outputs: S.AggregateFunction) -> StreamingQuery:
        frame = aggregate(stream.read(), by="k", operator="changing", num_partitions=2, **outputs)
        return (
            frame.writeStream.outputMode("append")
            .option("checkpointLocation", checkpoint)
            .foreachBatch(lambda batch, _: sink.extend(row.asDict() for row in batch.collect()))
            .start()
        )

    def run(*rows: tuple[int, float], **outputs: S.AggregateFunction) -> StreamingQuery:
        sink.clear()
        stream.add(list(rows))
        query = start(**outputs)
        settle(query)
        return query

    run((1, 1.0), (2, 2.0), n=S.count()).stop()
    query = run((1, 5.0), total=S.sum("v"), n=S.count(), seen=S.approx_count_distinct("v"))
    assert sink == [{"k": 1, "total": 5.0, "n": 2, "seen": 1}]
    untouched = {"total": None, "n": 1, "seen": 0}
    with QueryableStateClient.connect() as client:
        assert client.get("changing", 2) == untouched
        assert client.get_many("changing", [2, 1]).to_pylist() == [
            {"k": 2, **untouched},
            {"k": 1, "total": 5.0, "n": 2, "seen": 1},
        ]
        assert client.scan("changing", where=[("seen", "=", 0)]).to_pylist() == [{"k": 2, **untouched}]
        assert client.sql("select sum(n), sum(seen) from changing").fetchall() == [(3, 1)]
        assert client.get("changing", 2, version=1) == untouched, "older versions have the outputs of now"
    rows = state_table(stream.checkpoint, "changing").drop_columns(["key_group", "partition_id"]).to_pylist()
    assert {"k": 2, **untouched} in rows
    saved = trigger_savepoint(query, str(tmp_path / "savepoints")).result()
    query.stop()

    restored = str(tmp_path / "restored")
    restore_savepoint(saved, restored)
    outputs = {"seen": S.approx_count_distinct("v"), "n": S.count(), "best": S.max("v")}
    sink.clear()
    stream.add([(2, 7.0)])
    for checkpoint in (stream.checkpoint, restored):
        query = start(checkpoint, **outputs)
        settle(query)
        query.stop()
    assert sink == [{"k": 2, "seen": 1, "n": 2, "best": 7.0}] * 2

    sink.clear()
    with pytest.raises(
        Exception, match=r"output 'n' was count and is sum: give the new one another name.*rewrite_state"
    ):
        settle(start(n=S.sum("v"), seen=S.approx_count_distinct("v"), best=S.max("v")))
    run((2, 9.0), total=S.sum("v"), n=S.count()).stop()
    assert sink == [{"k": 2, "total": 9.0, "n": 3}], "an output that comes back begins empty"
