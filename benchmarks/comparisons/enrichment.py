"""Rows that are enriched with the state of a running stream, compared with ``mapInArrow`` and Redis."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from suite.comparison import Comparison, Measured
from suite.model import Case, Contestant, Size
from suite.progress import Steps

from comparisons.streams import directory

FILES = 2
TIMEOUT = 300.0
OURS, REDIS, NOTHING = "lookup", "mapInArrow with Redis MGET", "mapInArrow that looks nothing up"


def _contestants() -> dict[str, Contestant]:
    return {
        OURS: Contestant("lookup(df, ...) in a running stream, at one version", {}, True),
        REDIS: Contestant(
            "each batch of Arrow: MGET of its distinct keys by redis-py with hiredis, values by msgpack into columns",
            {"save": "''", "appendonly": "no"},
        ),
        NOTHING: Contestant("the same rows with columns of nulls", {}),
    }


def _mapped(df: Any, port: int | None) -> Any:
    """Return the rows with the columns that Redis has, or with nulls if there is no ``port``."""
    from query_clients import redis_key

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import msgpack
        import pyarrow as pa
        import redis

        store = None if port is None else redis.Redis(port=port)
        for batch in batches:
            once = batch.column("user").dictionary_encode()
            if store is None:
                columns = [pa.nulls(batch.num_rows, kind) for kind in (pa.int64(), pa.float64())]
            else:
                found = store.mget([redis_key(user) for user in once.dictionary.to_pylist()])
                values = [(None, None, None) if value is None else msgpack.unpackb(value) for value in found]
                columns = [
                    pa.array([value[i] for value in values], kind).take(once.indices)
                    for i, kind in enumerate((pa.int64(), pa.float64()))
                ]
            yield pa.RecordBatch.from_arrays([*batch.columns, *columns], names=[*batch.schema.names, "n", "spent"])

    return df.mapInArrow(run, "id long, user long, n long, spent double")


class _Stream:
    """A streaming query that looks up what it is given, one batch of ``FILES`` files at a time."""

    def __init__(self, spark: Any, root: Path, looked_up: Callable[[Any], Any]) -> None:
        (root / "input").mkdir(parents=True)
        read = spark.readStream.schema("id long, user long").option("maxFilesPerTrigger", FILES)
        writer = looked_up(read.parquet(f"{root}/input/*")).writeStream.format("noop")
        self._query = writer.option("checkpointLocation", str(root / "checkpoint")).start()
        self._root = root
        self._given = 0

    def seconds(self, batch: Path) -> float:
        """Process a directory of files as one batch; return the seconds that Spark says."""
        draft = self._root / "draft"
        shutil.copytree(batch, draft, copy_function=os.link)
        draft.rename(self._root / "input" / f"{self._given:04}")
        deadline = time.monotonic() + TIMEOUT
        while True:
            done = [p for p in self._query.recentProgress if p["batchId"] == self._given and p["numInputRows"]]
            if done:
                self._given += 1
                return float(done[0]["durationMs"]["triggerExecution"]) / 1e3
            if not self._query.isActive or time.monotonic() > deadline:
                raise RuntimeError(f"Batch {self._given} was not done in {TIMEOUT:g} s: {self._query.exception()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End the query."""
        self._query.stop()


def _streamed(given: Any, frames: dict[str, Callable[[Any], Any]], rows: int, turns: int, steps: Steps) -> Case:
    """Measure the same as streams: a batch of all rows a turn."""
    with directory() as root:
        given.repartition(FILES).write.parquet(str(root / "written"))
        (root / "batch").mkdir()
        for n, path in enumerate(sorted((root / "written").glob("*.parquet"))):
            path.rename(root / "batch" / f"{n}.parquet")
        rates: dict[str, list[list[float]]] = {name: [] for name in frames}
        streams = {name: _Stream(given.sparkSession, root / str(n), f) for n, (name, f) in enumerate(frames.items())}
        try:
            for stream in streams.values():
                stream.seconds(root / "batch")
            for turn in range(turns):
                for name in list(frames) if turn % 2 == 0 else list(frames)[::-1]:
                    steps.now(f"turn {turn + 1} of {turns}, as a stream, {name}")
                    rates[name].append([rows / streams[name].seconds(root / "batch")])
                    steps.advance()
        finally:
            for stream in streams.values():
                stream.stop()
    return Case("rows with random keys, a batch of a stream", "rows/s", rates, more_is_better=True)


def run(size: Size, steps: Steps) -> Measured:
    """Measure batches of rows with random keys, a fifth of them unknown, in turns."""
    import queries
    from pyspark.sql import SparkSession
    from query_clients import OPERATOR

    from spark_bridge import lookup

    keys, rows, turns = size["keys"], size["rows"], size["turns"]
    measured = Measured(_contestants())
    steps.expect(turns * 6)
    with queries.running_stream(keys, size["partitions"], {}), queries.running_redis(keys) as port:
        spark = SparkSession.active()
        given = spark.range(0, rows, 1, 2).selectExpr("id", f"abs(xxhash64(id)) % {keys + keys // 4} as user")
        frames: dict[str, Callable[[Any], Any]] = {
            OURS: lambda df: lookup(df, OPERATOR, on="user", columns=["n", "spent"]),
            REDIS: lambda df: _mapped(df, port),
            NOTHING: lambda df: _mapped(df, None),
        }
        sums = {
            name: frames[name](given).selectExpr("sum(n)", "sum(spent)", "count(*)").first() for name in (OURS, REDIS)
        }
        if sums[OURS] != sums[REDIS]:
            raise AssertionError(f"The rows differ: {sums}.")
        rates: dict[str, list[list[float]]] = {name: [] for name in frames}
        for turn in range(turns):
            for name in list(frames) if turn % 2 == 0 else list(frames)[::-1]:
                steps.now(f"turn {turn + 1} of {turns}, {name}")
                began = time.perf_counter()
                frames[name](given).write.format("noop").mode("overwrite").save()
                rates[name].append([rows / (time.perf_counter() - began)])
                steps.advance()
        measured.cases.append(Case("rows with random keys", "rows/s", rates, more_is_better=True))
        measured.cases.append(_streamed(given, frames, rows, turns, steps))
    measured.notes += [
        f"Before anything was timed, the sums of {rows:,} rows were the same in both. A fifth of the keys is unknown.",
        "The executors, Redis, the hosts and the idle stream share the cores.",
    ]
    return measured


COMPARISONS = (
    Comparison(
        name="enrichment",
        title="Rows enriched with the state of a running stream, beside Redis",
        about="Random users, as a batch DataFrame and as a stream, and the count and sum of each, kept by `aggregate` "
        "or in Redis.",
        run=run,
        sizes={
            "full": {"keys": 1_000_000, "rows": 2_000_000, "partitions": 4, "turns": 3},
            "smoke": {"keys": 20_000, "rows": 100_000, "partitions": 4, "turns": 3},
        },
        minutes={"full": 15, "smoke": 6},
        picture="bars",
    ),
)
