"""Reading the state of a running stream, from clients and for the rows of a DataFrame, compared with Redis."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from suite.machine import directory
from suite.model import Case, Comparison, Contestant, Measured, Size, Target
from suite.runner import Steps

OURS, REDIS = "ours", "redis"
SCAN = "scan of all rows"
UNITS = {"single": "lookups/s", "async": "lookups/s", "batched": "keys/s"}
WORK = {"single": "single blocking lookups", "async": "64 lookups in flight", "batched": "1,000 random keys a call"}


CONTESTANTS = {
    OURS: Contestant(
        "QueryableStateClient and AsyncQueryableStateClient, with an idle stream on RayDP", {"direct": "True"}, True
    ),
    REDIS: Contestant(
        "redis-py with hiredis, the same values by msgpack under totals:<user>", {"save": "''", "appendonly": "no"}
    ),
}


def run(size: Size, steps: Steps) -> Measured:
    """Measure lookups by several client processes, and a scan, in turns."""
    import queries

    keys, turns = size["keys"], size["turns"]
    measured = Measured(CONTESTANTS)
    steps.expect(2 * turns * (len(size["work"]) * len(size["clients"]) + 1))
    with queries.running_stream(keys, size["partitions"]), queries.running_redis(keys) as port:
        queries.check_equal(port, keys)
        places = {OURS: queries.address_for_clients(), REDIS: str(port)}
        for work in size["work"]:
            for count in size["clients"]:
                what = f"{WORK[work]}, {count} client{'s' if count > 1 else ''}"
                with ExitStack() as stack:
                    begun = {
                        name: stack.enter_context(queries.clients(name, work, place, count, size["seconds"], keys))
                        for name, place in places.items()
                    }
                    found = steps.take_turns(what, places, turns, lambda name, begun=begun: queries.turn(begun[name]))
                for figure, of in (("keys_per_second", ""), ("p50_ms", ", p50"), ("p99_ms", ", p99")):
                    label, is_rate = what + of, not of
                    its = {name: [[f[figure]] for f in figures] for name, figures in found.items()}
                    measured.cases.append(Case(label, UNITS[work] if is_rate else "ms", its, more_is_better=is_rate))
        measured.cases.append(_scan(keys, port, turns, steps))
    measured.notes += [
        "Before anything was timed, 2,000 keys, absent ones among them, had the same values in both; both scans had "
        "the same sums.",
        "Clients are processes that know an address and have neither Ray nor Spark. Servers, clients and the stream "
        "share the cores. p99 is that of the slowest client.",
    ]
    return measured


def _scan(keys: int, port: int, turns: int, steps: Steps) -> Case:
    """Measure a scan of all rows: ours as Arrow batches, Redis' by SCAN and MGET with unpacked values."""
    import msgpack
    import pyarrow.compute as pc
    import redis
    from query_clients import OPERATOR

    from spark_bridge import QueryableStateClient

    store = redis.Redis(port=port)

    def ours() -> tuple[int, float]:
        rows, spent = 0, 0.0
        with QueryableStateClient.connect() as client:
            for batch in client.scan(OPERATOR):
                rows += batch.num_rows
                spent += pc.sum(batch.column("spent")).as_py()
        return rows, spent

    def theirs() -> tuple[int, float]:
        rows, spent, cursor = 0, 0.0, 0
        while True:
            cursor, found = store.scan(cursor, count=10_000)
            values = [msgpack.unpackb(value) for value in store.mget(found)] if found else []
            rows += len(values)
            spent += sum(value[1] for value in values)
            if not cursor:
                return rows, spent

    expected = (keys, keys * (keys - 1) / 4)
    work = {OURS: ours, REDIS: theirs}

    def rate(name: str) -> list[float]:
        began = time.perf_counter()
        found = work[name]()
        seconds = time.perf_counter() - began
        if found != expected:
            raise AssertionError(f"The scan of {name} gave {found}, not {expected} (rows, sum of spent).")
        return [keys / seconds]

    return Case(SCAN, "rows/s", steps.take_turns("scan", work, turns, rate), more_is_better=True)


SINGLE, BATCHED = WORK["single"], f"{WORK['batched']}, 8 clients"
QUERIES = Comparison(
    name="queries",
    title="Queries of a running stream and of Redis",
    about="Of each user a count, a sum and the last time, kept by `aggregate`, and the same values in Redis.",
    run=run,
    sizes={
        "full": dict(keys=1_000_000, partitions=4, work=["single", "async", "batched"], clients=[1, 8])
        | dict(turns=5, seconds=3.0),
        "smoke": dict(keys=20_000, partitions=4, work=["single", "batched"], clients=[1], turns=3, seconds=0.5),
    },
    minutes={"full": 20, "smoke": 6},
    targets=(
        *(Target.times(what, what, OURS, 0.8, REDIS) for what in (f"{SINGLE}, 1 client", f"{SINGLE}, 8 clients")),
        Target.times(f"{BATCHED}, against `MGET`", BATCHED, OURS, 1.2, REDIS),
        Target(SCAN, SCAN, OURS, 5e6, "value", unit="rows/s", at_least=True),
    ),
)

# -- rows that are enriched with the state, compared with mapInArrow and Redis

FILES = 2
TIMEOUT = 300.0
LOOKUP, MGET, NOTHING = "lookup", "mapInArrow with Redis MGET", "mapInArrow that looks nothing up"


JOINED = {
    LOOKUP: Contestant("lookup(df, ...) in a running stream, at one version", {}, True),
    MGET: Contestant(
        "each batch of Arrow: MGET of its distinct keys by redis-py with hiredis, values by msgpack into columns",
        {"save": "''", "appendonly": "no"},
    ),
    NOTHING: Contestant("the same rows with columns of nulls"),
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
            once, kinds = batch.column("user").dictionary_encode(), (pa.int64(), pa.float64())
            if store is None:
                columns = [pa.nulls(batch.num_rows, kind) for kind in kinds]
            else:
                found = store.mget([redis_key(user) for user in once.dictionary.to_pylist()])
                values = [(None, None, None) if value is None else msgpack.unpackb(value) for value in found]
                columns = [pa.array([v[i] for v in values], kind).take(once.indices) for i, kind in enumerate(kinds)]
            yield pa.RecordBatch.from_arrays([*batch.columns, *columns], names=[*batch.schema.names, "n", "spent"])

    return df.mapInArrow(run, "id long, user long, n long, spent double")


class _Stream:
    """A streaming query that looks up what it is given, one batch of ``FILES`` files at a time."""

    def __init__(self, spark: Any, root: Path, looked_up: Callable[[Any], Any]) -> None:
        (root / "input").mkdir(parents=True)
        read = spark.readStream.schema("id long, user long").option("maxFilesPerTrigger", FILES)
        writer = looked_up(read.parquet(f"{root}/input/*")).writeStream.format("noop")
        self.query = writer.option("checkpointLocation", str(root / "checkpoint")).start()
        self._root = root
        self._given = 0

    def seconds(self, batch: Path) -> float:
        """Process a directory of files as one batch; return the seconds that Spark says."""
        draft = self._root / "draft"
        shutil.copytree(batch, draft, copy_function=os.link)
        draft.rename(self._root / "input" / f"{self._given:04}")
        deadline = time.monotonic() + TIMEOUT
        while True:
            done = [p for p in self.query.recentProgress if p["batchId"] == self._given and p["numInputRows"]]
            if done:
                self._given += 1
                return float(done[0]["durationMs"]["triggerExecution"]) / 1e3
            if not self.query.isActive or time.monotonic() > deadline:
                raise RuntimeError(f"Batch {self._given} was not done in {TIMEOUT:g} s: {self.query.exception()}")
            time.sleep(0.05)


def _streamed(given: Any, frames: dict[str, Callable[[Any], Any]], rows: int, turns: int, steps: Steps) -> Case:
    """Measure the same as streams: a batch of all rows a turn."""
    with directory() as root:
        given.repartition(FILES).write.parquet(str(root / "written"))
        (root / "batch").mkdir()
        for n, path in enumerate(sorted((root / "written").glob("*.parquet"))):
            path.rename(root / "batch" / f"{n}.parquet")
        streams = {name: _Stream(given.sparkSession, root / str(n), f) for n, (name, f) in enumerate(frames.items())}
        try:
            for stream in streams.values():
                stream.seconds(root / "batch")
            rates = steps.take_turns(
                "as a stream", frames, turns, lambda name: [rows / streams[name].seconds(root / "batch")]
            )
        finally:
            for stream in streams.values():
                stream.query.stop()
    return Case("rows with random keys, a batch of a stream", "rows/s", rates, more_is_better=True)


def run_enrichment(size: Size, steps: Steps) -> Measured:
    """Measure batches of rows with random keys, a fifth of them unknown, in turns."""
    import queries
    from pyspark.sql import SparkSession
    from query_clients import OPERATOR

    from spark_bridge import lookup

    keys, rows, turns = size["keys"], size["rows"], size["turns"]
    measured = Measured(JOINED)
    steps.expect(turns * 6)
    with queries.running_stream(keys, size["partitions"]), queries.running_redis(keys) as port:
        spark = SparkSession.active()
        given = spark.range(0, rows, 1, 2).selectExpr("id", f"abs(xxhash64(id)) % {keys + keys // 4} as user")
        frames: dict[str, Callable[[Any], Any]] = {
            LOOKUP: lambda df: lookup(df, OPERATOR, on="user", columns=["n", "spent"]),
            MGET: lambda df: _mapped(df, port),
            NOTHING: lambda df: _mapped(df, None),
        }
        sums = [frames[n](given).selectExpr("sum(n)", "sum(spent)", "count(*)").first() for n in (LOOKUP, MGET)]
        if sums[0] != sums[1]:
            raise AssertionError(f"The rows differ: {sums}.")

        def rate(name: str) -> list[float]:
            began = time.perf_counter()
            frames[name](given).write.format("noop").mode("overwrite").save()
            return [rows / (time.perf_counter() - began)]

        rates = steps.take_turns("as a batch", frames, turns, rate)
        measured.cases.append(Case("rows with random keys", "rows/s", rates, more_is_better=True))
        measured.cases.append(_streamed(given, frames, rows, turns, steps))
    measured.notes += [
        f"Before anything was timed, the sums of {rows:,} rows were the same in both. A fifth of the keys is unknown.",
        "The executors, Redis, the hosts and the idle stream share the cores.",
    ]
    return measured


ENRICHMENT = Comparison(
    name="enrichment",
    title="Rows enriched with the state of a running stream, and from Redis",
    about="Random users, as a batch DataFrame and as a stream, and the count and sum of each, kept by `aggregate` or "
    "in Redis.",
    run=run_enrichment,
    sizes={
        "full": dict(keys=1_000_000, rows=2_000_000, partitions=4, turns=3),
        "smoke": dict(keys=20_000, rows=100_000, partitions=4, turns=3),
    },
    minutes={"full": 15, "smoke": 6},
)
COMPARISONS = (QUERIES, ENRICHMENT)
