"""A stream of known totals."""

from __future__ import annotations

from collections import defaultdict

from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from spark_bridge import QueryableStateClient, aggregate
from spark_bridge import functions as S
from tests.spark_bridge.conftest import Stream

KEYS = 40


class Totals:
    """A stream of known totals: each batch adds ``batch + 1`` to every key."""

    def __init__(self, stream: Stream, operator: str) -> None:
        self.stream = stream
        self.operator = operator
        self.expected: dict[int, float] = defaultdict(float)

    def add(self, batches: int = 1) -> None:
        for _ in range(batches):
            n = self.stream.files
            self.stream.add([(k, float(n + 1)) for k in range(KEYS)])
            for k in range(KEYS):
                self.expected[k] += n + 1

    def frame(self, n: int = 4) -> DataFrame:
        """With ``n`` partitions, twice as many as tasks run at once."""
        return aggregate(
            self.stream.read(), by="k", operator=self.operator, num_partitions=n, n=S.count(), total=S.sum("v")
        )

    def check(self, client: QueryableStateClient) -> None:
        table = client.get_many(self.operator, list(range(KEYS)))
        assert dict(zip(table["k"].to_pylist(), table["total"].to_pylist(), strict=True)) == self.expected
        assert set(table["n"].to_pylist()) == {self.stream.files}


def start(df: DataFrame, stream: Stream) -> StreamingQuery:
    return df.writeStream.format("noop").outputMode("append").option("checkpointLocation", stream.checkpoint).start()
