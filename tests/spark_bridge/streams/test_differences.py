"""The claims of docs/explanation/differences.md on batches and time, compared with Spark's operators on equal files."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from spark_bridge import aggregate, deduplicate
from spark_bridge import functions as S
from tests.effort import effort, only_thorough
from tests.spark_bridge.conftest import Stream, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow]

NO_DATA_CONF = "spark.sql.streaming.noDataMicroBatches.enabled"
SCHEMA = "k string, t timestamp, n long"
START = dt.datetime(2024, 3, 9, 12, tzinfo=dt.timezone.utc)
Rows = Sequence[tuple[str, int]]
"""Keys, and seconds since ``START``."""


class Contestant:
    """A query over a stream, ours or Spark's, that may be stopped and started again; its rows by batch."""

    def __init__(self, df: DataFrame, stream: Stream, name: str, mode: str = "append") -> None:
        self.df, self.mode = df, mode
        self.checkpoint = Path(stream.root, name)
        self.found: list[list[Any]] = []
        self.query: StreamingQuery | None = None

    def start(self) -> None:
        def take(batch: DataFrame, _: int) -> None:
            self.found.append(sorted(tuple(row) for row in batch.collect()))

        writer = self.df.writeStream.outputMode(self.mode).option("checkpointLocation", str(self.checkpoint))
        self.query = writer.foreachBatch(take).start()

    def given(self) -> list[Any]:
        """Return the rows of all batches since the last call, once nothing is waiting."""
        assert self.query is not None
        self.query.processAllAvailable()
        rows = sorted(row for batch in self.found for row in batch)
        self.found.clear()
        return rows

    def error(self) -> Exception | None:
        assert self.query is not None
        return self.query.exception()

    def rows(self) -> int:
        """Return how many rows the batches have given so far."""
        return sum(map(len, self.found))

    def watermark(self) -> dt.datetime:
        """Return the watermark of the newest batch, as Spark's offset log has it."""
        logs = [path.read_text().splitlines() for path in (self.checkpoint / "offsets").glob("[0-9]*")]
        newest = max((json.loads(lines[1])["batchWatermarkMs"] for lines in logs if len(lines) > 1), default=0)
        return dt.datetime.fromtimestamp(newest / 1000, dt.timezone.utc)

    def stop(self) -> None:
        assert self.query is not None
        self.query.stop()


@contextmanager
def no_data_batches(spark: SparkSession, are_run: bool) -> Iterator[None]:
    """Spark's batches without data, which raise the watermark behind a batch that has rows."""
    spark.conf.set(NO_DATA_CONF, str(are_run).lower())
    try:
        yield
    finally:
        spark.conf.unset(NO_DATA_CONF)


def add(stream: Stream, rows: Rows) -> None:
    stream.add([(k, START + dt.timedelta(seconds=s), n) for n, (k, s) in enumerate(rows)])


def in_turns(
    stream: Stream, ours: DataFrame, sparks: DataFrame, files: Sequence[Rows], mode: str = "append"
) -> tuple[list[Any], list[Any]]:
    """Feed file by file, the next when nothing is waiting; return what ours and Spark's gave for each."""
    contestants = Contestant(ours, stream, "ours"), Contestant(sparks, stream, "spark", mode)
    for one in contestants:
        one.start()
    answers: tuple[list[Any], list[Any]] = ([], [])
    for rows in files:
        add(stream, rows)
        for one, answer in zip(contestants, answers, strict=True):
            answer.append(one.given())
    for one in contestants:
        one.stop()
    return answers


def keys_of(answers: list[Any]) -> list[list[str]]:
    return [[row[0] for row in rows] for rows in answers]


# Deduplication -----------------------------------------------------------------------------------------------------

LATE_ROWS = [[("d", 40)], [("e", 60)], [("a", 41)], [("a", 42)]]
FORGOTTEN_KEYS = [[("a", 17)], [("a", 16)], [("a", 13)], [("b", 22), ("c", 21)], [("a", 21)], [("a", 22)]]


def with_and_without_expiry(stream: Stream, is_within: bool, delay: str) -> tuple[DataFrame, DataFrame]:
    """Our deduplication and Spark's: by key until the watermark, or by key and time."""
    df = stream.read().withWatermark("t", delay)
    if is_within:
        return deduplicate(df, "k", operator="o", within=delay, num_partitions=1), df.dropDuplicatesWithinWatermark(
            ["k"]
        )
    return deduplicate(df, ["k", "t"], operator="o", num_partitions=1), df.dropDuplicates(["k", "t"])


@pytest.mark.parametrize(
    ("is_within", "files", "here", "in_spark"),
    [
        only_thorough(False, LATE_ROWS, ["d", "e", "a", ""], ["d", "e", "", ""]),
        (True, FORGOTTEN_KEYS, ["a", "", "", "bc", "", "a"], ["a", "", "", "bc", "a", ""]),
    ],
)
def test_rows_are_late_and_keys_forgotten_one_batch_later(
    stream_of_keys: Stream, is_within: bool, files: list[Rows], here: list[str], in_spark: list[str]
) -> None:
    """The tables of docs/explanation/differences.md."""
    with no_data_batches(stream_of_keys.spark, True):
        ours, sparks = in_turns(stream_of_keys, *with_and_without_expiry(stream_of_keys, is_within, "2 seconds"), files)
    assert keys_of(ours) == [list(keys) for keys in here]
    assert keys_of(sparks) == [list(keys) for keys in in_spark]


def random_files(seed: int, files: int) -> list[Rows]:
    """Return files with one row per key, so that Spark's choice among rows is deterministic."""
    rng = np.random.default_rng(seed)
    made = []
    for n in range(files):
        keys = rng.choice(np.array(list("abcdefgh")), int(rng.integers(1, 6)), replace=False)
        made.append([(str(k), int(max(0, n * 3 + rng.integers(-12, 6)))) for k in keys])
    return made


@pytest.mark.thorough  # otherwise: the test above, and Spark's rules in operators/test_deduplicate.py
@pytest.mark.parametrize("is_within", [False, True])
def test_without_batches_without_data_the_same_keys_go_through_in_each_batch(
    make_stream: Callable[..., Stream], is_within: bool
) -> None:
    examples = {f"random {seed}": random_files(seed, effort(8, 20)) for seed in range(effort(1, 3))}
    examples |= effort({}, {"late rows": LATE_ROWS, "forgotten keys": FORGOTTEN_KEYS})
    for name, files in examples.items():
        stream = make_stream(SCHEMA)
        with no_data_batches(stream.spark, False):
            ours, sparks = in_turns(stream, *with_and_without_expiry(stream, is_within, "4 seconds"), files)
        assert ours == sparks, name


# Two operators -----------------------------------------------------------------------------------------------------


def chain(stream: Stream, second: str) -> tuple[DataFrame, DataFrame]:
    """Ours and Spark's: a deduplication, and behind it an operator that has the same key columns."""
    df, by = stream.read().withWatermark("t", "4 seconds"), ["k", "t"]
    once, native = deduplicate(df, by, operator="once", num_partitions=2), df.dropDuplicates(by)
    if second == "deduplicate":
        return deduplicate(once, by, operator="twice", num_partitions=2), native.dropDuplicates(by)
    counts = aggregate(once, by=by, operator="counts", output_mode="append", num_partitions=2, n=S.count())
    return counts, native.groupBy(by).agg(F.count("*").alias("n"))


@pytest.mark.thorough  # otherwise: test_rows_are_late_and_keys_forgotten_one_batch_later
@pytest.mark.parametrize("second", ["aggregate", "deduplicate"])
def test_the_watermark_advances_for_two_operators_with_the_same_keys(stream_of_keys: Stream, second: str) -> None:
    # The last file but one closes what is open, once its time is the watermark: in the batch of the last one.
    for rows in [*random_files(11, 6), [("z", 1000)], [("z", 1001)]]:
        add(stream_of_keys, rows)
    ours, sparks = chain(stream_of_keys, second)
    found = []
    with no_data_batches(stream_of_keys.spark, False):
        # Spark first: it says how many rows there will be. Where quiet streams tick, something is always available.
        native = Contestant(sparks, stream_of_keys, "spark")
        native.start()
        found.append(native.given())
        native.stop()
        own = Contestant(ours, stream_of_keys, "ours")
        own.start()
        wait_until(lambda: own.error() or own.watermark() >= START + dt.timedelta(seconds=996))
        wait_until(lambda: own.error() or own.rows() >= len(found[0]))
        own.stop()
        found.append(sorted(row for batch in own.found for row in batch))
    assert native.watermark() == START + dt.timedelta(seconds=996)
    assert found[1] == found[0]
    assert len(found[0]) > 8


# Restarts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["update", only_thorough("complete")])
def test_a_restart_with_one_new_file_waiting_gives_its_batch(stream_of_keys: Stream, mode: str) -> None:
    """The batch is complete when ``processAllAvailable`` returns, as in Spark. The last restart uses the other mode."""
    df = stream_of_keys.read().withWatermark("t", "1 hour")  # no row is late
    sparks = df.groupBy(F.window("t", "5 seconds"), "k").agg(F.count("*").alias("n"))
    by = [S.window("t", "5 seconds"), "k"]
    files = random_files(5, effort(3, 8))
    other = "complete" if mode == "update" else "update"
    for turn, rows in enumerate(files):
        now = mode if turn < len(files) - 1 else other
        add(stream_of_keys, [*rows, ("new", turn * 3 + 5)])
        ours = aggregate(df, by=by, operator="o", output_mode=now, num_partitions=2, n=S.count())
        given = []
        for one in Contestant(ours, stream_of_keys, "ours"), Contestant(sparks, stream_of_keys, "spark", now):
            one.start()
            given.append(one.given())
            one.stop()
        assert given[0] == given[1], f"restart {turn}"
        assert any(row[1] == "new" for row in given[0]), f"restart {turn}"


@pytest.fixture
def stream_of_keys(make_stream: Callable[..., Stream]) -> Stream:
    return make_stream(SCHEMA)
