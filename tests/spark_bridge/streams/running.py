"""Queries whose rows a test keeps, batch by batch; and the death of executors and workers. ``Totals`` is a
stream of known totals.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from spark_bridge import QueryableStateClient, aggregate
from spark_bridge import functions as S
from tests.spark_bridge.conftest import Stream, wait_until


@dataclass
class Running:
    """A query, and the rows of each of its micro-batches that gave any."""

    query: StreamingQuery
    batches: list[list[Any]] = field(default_factory=list)

    def finish(self, number: int = 0) -> list[list[Any]]:
        """Stop when all input is processed, and so many rows have come."""
        try:
            if not number:
                self.query.processAllAvailable()
            # Where quiet streams tick there is always something available.
            wait_until(lambda: self.query.exception() or sum(map(len, self.batches)) >= number)
        finally:
            self.query.stop()
        return self.batches


def start(df: DataFrame, stream: Stream, name: str, mode: str = "append") -> Running:
    batches: list[list[Any]] = []

    def keep(batch: DataFrame, _: int) -> None:
        rows = [tuple(r) for r in batch.collect()]
        if rows:
            batches.append(sorted(rows, key=repr))

    writer = df.writeStream.outputMode(mode).option("checkpointLocation", str(stream.root / name))
    return Running(writer.foreachBatch(keep).start(), batches)


def flat(batches: list[list[Any]]) -> Counter[Any]:
    return Counter(row for batch in batches for row in batch)


EXECUTOR, WORKER = "executor", "worker"


def dying(strikes: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function of tasks that kills its executor or its Python worker, once for each file of that name."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for name in (EXECUTOR, WORKER):
                try:
                    (strikes / name).unlink()
                except FileNotFoundError:
                    continue
                worker = psutil.Process()
                # The worker's parent is PySpark's daemon, which the executor has started.
                victim = worker if name == WORKER else worker.parents()[1]
                victim.kill()
            yield batch

    return run


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


def start_totals(df: DataFrame, stream: Stream) -> StreamingQuery:
    return df.writeStream.format("noop").outputMode("append").option("checkpointLocation", stream.checkpoint).start()
