"""A stream through two operators whose state pandas computes as well, and the sinks that see its batches."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from coordinator_actor.durable.fencing import FENCE
from spark_bridge import QueryableStateClient, aggregate
from spark_bridge import functions as S
from spark_bridge.session.current import current_cluster
from tests.spark_bridge.conftest import Stream, wait_until

SCHEMA = "k long, s string, v double"
NULL = "<null>"
"""How a null key is written in frames, which do not group by nulls as Spark does."""
MapInArrow = Callable[[Iterator[Any]], Iterator[Any]]


@dataclass
class Flow:
    """A stream, its query of two operators, and what their state must be. One file is one batch, unless said
    otherwise.
    """

    stream: Stream
    seed: int = 1
    frames: list[pd.DataFrame] = field(default_factory=list)
    batch_of: list[int] = field(default_factory=list)

    def add(self, batches: int = 1) -> None:
        """Feed so many batches of 150 rows; sums of such values are exact in any order."""
        for _ in range(batches):
            rng = np.random.default_rng([self.seed, self.stream.files])
            rows = pd.DataFrame(
                {
                    "k": rng.integers(-40, 40, 150),
                    "s": rng.choice(np.array(["a", "b", "c", "", "naïve", None], dtype=object), 150),
                    "v": rng.integers(1, 1000, 150).astype(float),
                }
            )
            self.stream.add(rows)
            self.frames.append(rows)
            self.batch_of.append(self.batch_of[-1] + 1 if self.batch_of else 0)

    def merge_last(self, files: int) -> None:
        """Spark will read, or has read, the last files as one batch."""
        self.batch_of[-files:] = [self.batch_of[-files]] * files

    def with_merged(self, batch: int, ahead: int) -> Flow:
        """The same rows, if that batch has the files of the next ones as well."""
        batch_of = [b if b < batch else max(batch, b - ahead) for b in self.batch_of]
        return dataclasses.replace(self, batch_of=batch_of)

    def frame(
        self, n: int = 3, m: int = 2, *, before: MapInArrow | None = None, between: MapInArrow | None = None
    ) -> DataFrame:
        """The query: ``n`` and ``m`` partitions; ``before`` sees the rows first, ``between`` what the first operator
        emits.
        """
        rows = self.stream.read()
        if before is not None:
            rows = rows.mapInArrow(before, SCHEMA)
        per_key = aggregate(
            rows,
            by=["k", "s"],
            operator="per_key",
            num_partitions=n,
            n=S.count(),
            total=S.sum("v"),
            top=S.max("v"),
        )
        if between is not None:
            per_key = per_key.mapInArrow(between, "k long, s string, n long, total double, top double")
        return aggregate(
            per_key, by="s", operator="per_s", num_partitions=m, rows=S.count(), best=S.max("total"), mean=S.mean("n")
        )

    def rows(self, last_batch: int | None = None) -> pd.DataFrame:
        """All rows, or those of the batches up to one, with their batch."""
        some = [
            frame.assign(batch=batch)
            for frame, batch in zip(self.frames, self.batch_of, strict=True)
            if last_batch is None or batch <= last_batch
        ]
        rows = pd.concat(some, ignore_index=True)
        return rows.assign(s=rows["s"].fillna(NULL))

    def expected(self, last_batch: int | None = None) -> dict[str, pd.DataFrame]:
        """The state of each operator, indexed by key, as pandas computes it from the rows."""
        rows = self.rows(last_batch)
        per_key = rows.groupby(["k", "s"]).agg(n=("v", "size"), total=("v", "sum"), top=("v", "max"))
        updates = rows.groupby(["batch", "k", "s"]).agg(n=("v", "size"), total=("v", "sum")).reset_index()
        running = updates.groupby(["k", "s"])
        updates = updates.assign(n=running["n"].cumsum(), total=running["total"].cumsum())
        per_s = updates.groupby("s").agg(rows=("n", "size"), best=("total", "max"), mean=("n", "mean"))
        return {"per_key": per_key, "per_s": per_s}

    def check(
        self,
        client: QueryableStateClient,
        query: StreamingQuery | str,
        operators: Sequence[str] = ("per_key", "per_s"),
    ) -> None:
        """Ask the running query, or the one of an id, for every key there is, and for as many that are not."""
        query_id = query if isinstance(query, str) else str(query.id)
        expected = self.expected()
        for operator in operators:
            wanted = expected[operator]
            keys = [unmarked(key) for key in wanted.index]
            absent = [(k + 1000, s) if operator == "per_key" else f"{s}-" for k, s in expected["per_key"].index]
            got = client.get_many(operator, [*keys, *absent], query=query_id).to_pandas()
            values = got[list(wanted.columns)]
            assert values.iloc[len(keys) :].isna().all(axis=None), operator
            same_state(values.iloc[: len(keys)].set_index(wanted.index), wanted)


def unmarked(key: Any) -> Any:
    """A key of a frame as the client takes it."""
    return tuple(map(unmarked, key)) if isinstance(key, tuple) else None if key == NULL else key


def same_state(got: pd.DataFrame, wanted: pd.DataFrame) -> None:
    """Both have the same keys, none of them twice, and the same values; only a mean may be rounded otherwise."""
    pd.testing.assert_frame_equal(got.sort_index(), wanted.sort_index(), check_dtype=False, rtol=1e-12)


class Sink:
    """A ``foreachBatch`` function that notes which batches it got; a pause keeps the stream busy for a test.

    Spark calls it before a batch has run, so that a batch whose tasks are held has been announced, but not seen.
    """

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.seen: list[int] = []

    def __call__(self, batch: DataFrame, n: int) -> None:
        batch.collect()
        self.seen.append(n)
        time.sleep(self.pause)


def start(df: DataFrame, checkpoint: str, sink: Sink, name: str | None = None) -> StreamingQuery:
    writer = df.writeStream.outputMode("append").option("checkpointLocation", checkpoint).foreachBatch(sink)
    return (writer if name is None else writer.queryName(name)).start()


@contextmanager
def backend(name: str) -> Iterator[None]:
    """The backend of the queries that are started in the block, as if the session had been made with it."""
    cluster = current_cluster()
    before = cluster.conf
    cluster.conf = dataclasses.replace(before, provider=name)
    try:
        yield
    finally:
        cluster.conf = before


def newest_manifest(checkpoint: str) -> dict[str, Any]:
    newest = max(
        p for p in Path(checkpoint, "statestore", "manifests").glob("*.json") if p.stat().st_size != len(FENCE)
    )
    manifest: dict[str, Any] = json.loads(newest.read_text().splitlines()[0])
    return manifest


def kept_by(checkpoint: str) -> set[str]:
    """The backends that the newest manifest names."""
    return {operator["backend"] for operator in newest_manifest(checkpoint)["operators"].values()}


def progressed(query: StreamingQuery, batch: int) -> None:
    """Wait until a batch is done, or fail with the query's own error."""

    def done() -> bool:
        error = query.exception()
        assert error is None, error
        return bool((query.lastProgress or {"batchId": -1})["batchId"] >= batch)

    wait_until(done)
