"""Windows, output modes and deduplication as streams, against Spark's own operators on the same files."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_bridge import aggregate
from spark_bridge import functions as S
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.deduplicate import deduplicate
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.streams.running import flat, start

pytestmark = [pytest.mark.spark, pytest.mark.slow]

START = dt.datetime(2024, 3, 9, 23, 50, tzinfo=dt.timezone.utc)
SCHEMA = "k long, ts timestamp, v long"
DELAY = "20 seconds"


def events(stream: Stream, files: int = 3, rows: int = 80) -> None:
    """Files of events a minute apart, out of order, some of them late, some without a time or a key."""
    rng = np.random.default_rng(7)
    for i in range(files):
        at = (i * 60 + rng.integers(-90, 60, rows)).tolist()
        stream.add(
            [
                (
                    None if rng.random() < 0.05 else int(rng.integers(0, 6)),
                    None if rng.random() < 0.05 else START + dt.timedelta(seconds=s),
                    int(rng.integers(0, 100)),
                )
                for s in at
            ]
        )
    # Far ahead, so that what is open closes.
    stream.add([(99, START + dt.timedelta(hours=3), 0)])


def outputs(ours: DataFrame, native: DataFrame, stream: Stream, mode: str = "append") -> tuple[list[Any], list[Any]]:
    """The rows of each micro-batch of both, which run side by side."""
    running = start(ours, stream, "ours"), start(native, stream, "native", mode)
    expected = running[1].finish()
    return running[0].finish(), expected


@pytest.fixture
def stream(make_stream: Callable[..., Stream]) -> Stream:
    made = make_stream(SCHEMA)
    events(made)
    return made


def read(stream: Stream) -> DataFrame:
    return stream.read().withWatermark("ts", DELAY)


def same_when_closed(ours: DataFrame, native: DataFrame, stream: Stream, at_least: int = 10) -> None:
    """Both emit the same rows in the end."""
    running = start(ours, stream, "ours"), start(native, stream, "native")
    expected = flat(running[1].finish())
    assert len(expected) > at_least
    assert flat(running[0].finish(sum(expected.values()))) == expected


AGGREGATES = {"n": S.count(), "total": S.sum("v"), "mean": S.mean("v")}


def native_aggregates() -> list[Any]:
    return [F.count("*").alias("n"), F.sum("v").alias("total"), F.avg("v").alias("mean")]


@pytest.mark.matrix
@pytest.mark.spark42
def test_windows_that_close_are_those_of_spark(stream: Stream) -> None:
    ours = aggregate(
        read(stream), by=[S.window("ts", "30 seconds"), "k"], operator="closed", output_mode="append", **AGGREGATES
    )
    native = read(stream).groupBy(F.window("ts", "30 seconds"), "k").agg(*native_aggregates())
    same_when_closed(ours, native, stream)


def test_sessions_that_end_are_those_of_spark(stream: Stream) -> None:
    ours = aggregate(
        read(stream),
        by=["k", S.session_window("ts", "7 seconds")],
        operator="ended",
        output_mode="append",
        **AGGREGATES,
    )
    native = read(stream).groupBy("k", F.session_window("ts", "7 seconds")).agg(*native_aggregates())
    same_when_closed(ours, native, stream)


@pytest.mark.spark42
def test_sessions_with_a_gap_of_each_row_are_those_of_spark(stream: Stream) -> None:
    df = read(stream).withColumn("gap", F.when(F.col("v") < 50, "3 seconds").otherwise("9 seconds"))
    by_value = F.when(F.col("v") < 50, "3 seconds").otherwise("9 seconds")
    for gap in (F.col("gap"), by_value, F.expr("make_interval(0, 0, 0, 0, 0, 0, 9)"), df.gap):
        by = [S.session_window("ts", gap), "k"]
        ours = aggregate(df, by=by, operator="gaps", output_mode="append", **AGGREGATES)
        assert ours.columns == ["session_window", "k", *AGGREGATES]
    native = df.groupBy(F.session_window("ts", df.gap), "k").agg(*native_aggregates())
    same_when_closed(ours, native, stream)
    for wrong in (df.v, F.col("nope")):
        with pytest.raises(InvalidOperatorError, match="must be a column of durations such as '10 minutes'"):
            aggregate(df, by=[S.session_window("ts", wrong), "k"], operator="gaps", n=S.count())


def test_windows_of_windows_are_those_of_spark(stream: Stream) -> None:
    """The watermark of the second operator is what the first one lets through."""
    first = aggregate(
        read(stream), by=[S.window("ts", "10 seconds"), "k"], operator="first", output_mode="append", n=S.count()
    )
    ours = aggregate(first, by=S.window("window", "1 minute"), operator="second", output_mode="append", n=S.sum("n"))
    native = (
        read(stream)
        .groupBy(F.window("ts", "10 seconds"), "k")
        .agg(F.count("*").alias("n"))
        .groupBy(F.window("window", "1 minute"))
        .agg(F.sum("n").alias("n"))
    )
    same_when_closed(ours, native, stream, at_least=3)


def test_sliding_windows_touched_in_each_batch_are_those_of_spark(stream: Stream) -> None:
    ours = aggregate(
        read(stream),
        by=["k", S.window("ts", "40 seconds", "15 seconds", start_time="5 seconds")],
        operator="touched",
        partial_aggregation=True,
        **AGGREGATES,
    )
    native = (
        read(stream).groupBy("k", F.window("ts", "40 seconds", "15 seconds", "5 seconds")).agg(*native_aggregates())
    )
    got, expected = outputs(ours, native, stream, "update")
    assert got == expected


def test_the_whole_table_each_batch_is_that_of_spark(stream: Stream) -> None:
    ours = aggregate(
        read(stream), by=[S.window("ts", "1 minute"), "k"], operator="whole", output_mode="complete", **AGGREGATES
    )
    native = read(stream).groupBy(F.window("ts", "1 minute"), "k").agg(*native_aggregates())
    got, expected = outputs(ours, native, stream, "complete")
    assert got == expected


@pytest.mark.matrix
def test_duplicates_are_dropped_as_by_spark(stream: Stream) -> None:
    by = ["k", "ts"]
    ours = deduplicate(read(stream), by, operator="duplicates")
    native = read(stream).dropDuplicates(by)

    def keys(batches: list[list[Any]]) -> list[list[Any]]:
        return [sorted([(r[0], r[1]) for r in batch], key=repr) for batch in batches]

    got, expected = outputs(ours, native, stream)
    assert keys(got) == keys(expected)


def test_duplicates_within_the_watermark_are_dropped_as_by_spark(make_stream: Callable[..., Stream]) -> None:
    # With one time per key and file, Spark's choice among rows does not depend on their order.
    stream = make_stream(SCHEMA)
    rng = np.random.default_rng(3)
    for i in range(6):
        at = {k: START + dt.timedelta(seconds=i * 15 + int(rng.integers(-25, 15))) for k in range(12)}
        stream.add([(k, at[k], 0) for k in rng.integers(0, 12, 20).tolist()])
    ours = deduplicate(read(stream), "k", operator="within", within=DELAY)
    native = read(stream).dropDuplicatesWithinWatermark(["k"])
    got, expected = outputs(ours, native, stream)
    assert sum(map(len, expected)) > 20
    assert got == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": S.window("ts", "1 minute"), "output_mode": "append", "n": S.count()}, "no key has a watermark"),
        ({"by": "k", "output_mode": "append", "n": S.count()}, "no key has a watermark"),
        ({"by": S.session_window("ts", "1 minute"), "n": S.count()}, "another key"),
        ({"by": [S.window("ts", "1 minute"), S.window("ts", "2 minutes")], "n": S.count()}, "there can be one"),
        ({"by": ["k", S.window("ts", "1 minute").alias("k")], "n": S.count()}, "a different name"),
        ({"by": ["k", S.window("ts", "1 minute").alias("v")], "n": S.sum("v")}, "a different name"),
        ({"by": ["k", 3], "n": S.count()}, "is not a key"),
        ({"by": S.window("nope", "1 minute"), "n": S.count()}, "S.window: 'nope': the column does not exist"),
        ({"by": S.window("TS", "1 minute"), "n": S.count()}, "case-sensitive here, .*: write 'ts'"),
        ({"by": S.window("v", "1 minute"), "n": S.count()}, "'v' has type bigint; it must be a timestamp"),
        ({"by": ["k", S.session_window("v", "1 minute")], "n": S.count()}, "S.session_window: column 'v' has type big"),
        ({"by": S.window("ts", "1 foo"), "n": S.count()}, "'1 foo' is not a duration"),
        ({"by": S.window("ts", "1 hour", start_time="now"), "n": S.count()}, "'now' is not a duration"),
        ({"by": ["k", S.session_window("ts", "1 foo")], "n": S.count()}, "'1 foo' is not a duration"),
        ({"by": S.window("ts", "1 minute", "1 hour"), "n": S.count()}, "Spark has no such windows.*slide"),
        ({"by": S.window("ts", "1 month"), "n": S.count()}, "Spark has no such windows.*greater than a month"),
        (
            {"by": ["k", S.session_window("ts", "1 minute")], "n": S.count(), "partial_aggregation": True},
            "session windows",
        ),
    ],
)
def test_wrong_windows_are_rejected_while_building(
    make_stream: Callable[..., Stream], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOperatorError, match=message):
        aggregate(make_stream(SCHEMA).read(), **{"operator": "wrong", **arguments})


def test_a_window_of_an_ambiguous_column_is_refused(make_stream: Callable[..., Stream]) -> None:
    df = make_stream("k long, ts timestamp, ts2 timestamp").read().toDF("k", "ts", "ts")
    for by in (S.window("ts", "1 minute"), ["k", S.session_window("ts", "1 minute")]):
        with pytest.raises(InvalidOperatorError, match="'ts': the column is ambiguous"):
            aggregate(df, by=by, operator="wrong", n=S.count())


def test_a_session_window_without_the_watermark_is_refused(make_stream: Callable[..., Stream]) -> None:
    df = make_stream("ts timestamp, ts2 timestamp").read().withWatermark("ts2", DELAY)
    by = [S.session_window("ts", "1 minute"), "ts2"]
    with pytest.raises(InvalidOperatorError, match="'ts2' has the watermark"):
        aggregate(df, by=by, operator="wrong", output_mode="append", n=S.count())


@pytest.mark.parametrize(
    ("by", "within", "message"),
    [
        ("nope", None, "does not exist"),
        ([], None, "no key column"),
        ("k", "10 minutes", "withWatermark"),
        ("k", "ten minutes", "withWatermark"),
    ],
)
def test_wrong_deduplication_is_rejected_while_building(
    make_stream: Callable[..., Stream], by: Any, within: str | None, message: str
) -> None:
    df = make_stream(SCHEMA).read()
    with pytest.raises(InvalidOperatorError, match=message):
        deduplicate(df, by, operator="wrong", within=within)
    with pytest.raises(InvalidOperatorError, match="not a duration"):
        deduplicate(df.withWatermark("ts", DELAY), "k", operator="wrong", within="ten minutes")
    with pytest.raises(InvalidOperatorError, match="dropDuplicates"):
        deduplicate(df.sparkSession.range(3), "id", operator="wrong")
