"""After Spark has reported a batch as done, clients are answered from that batch or a later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame

from spark_bridge import QueryableStateClient, aggregate
from spark_bridge import functions as S
from tests.effort import effort
from tests.spark_bridge.conftest import Stream

pytestmark = [pytest.mark.spark, pytest.mark.spark42_only]
QUERIES = effort(8, 100)


def counts(stream: Stream) -> DataFrame:
    return aggregate(stream.read(), by="k", operator="counts", n=S.count(), num_partitions=2)


def test_a_short_query_that_has_ended_is_never_answered_from_before_its_batch(
    make_stream: Callable[..., Stream],
) -> None:
    for _ in range(QUERIES):
        stream = make_stream()
        stream.add([(1, 1.0), (2, 1.0), (2, 1.0)])
        writer = counts(stream).writeStream.format("noop").option("checkpointLocation", stream.checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        with QueryableStateClient.connect() as client:
            assert client.get("counts", 2, query=str(query.id)) == {"n": 2}


def test_each_batch_is_seen_by_the_time_at_which_spark_says_that_it_is_done(stream: Stream) -> None:
    """By a new client after ``processAllAvailable``, and by ``foreachBatch`` in the next batch."""
    seen: list[tuple[int, Any]] = []

    def ask(batch: DataFrame, batch_id: int) -> None:
        batch.collect()
        if batch_id:
            with QueryableStateClient.connect() as client:
                seen.append((batch_id, client.get("counts", 1)))

    writer = counts(stream).writeStream.foreachBatch(ask).option("checkpointLocation", stream.checkpoint)
    stream.add([(1, 1.0)])
    query = writer.start()
    query.processAllAvailable()
    for n in range(2, QUERIES):
        stream.add([(1, 1.0)])
        query.processAllAvailable()
        with QueryableStateClient.connect() as client:
            assert client.get("counts", 1) == {"n": n}
    query.stop()
    assert seen == [(i, {"n": i}) for i in range(1, QUERIES - 1)]
