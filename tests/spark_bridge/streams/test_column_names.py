"""Columns with names that Spark would parse or treat as equal, through every operator and entry point."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_bridge import (
    QueryableStateClient,
    StatefulProcessor,
    aggregate,
    bootstrap_state,
    deduplicate,
    join,
    join_asof,
    lookup,
    read_state,
    read_state_changes,
    state_as_of,
    state_metadata,
    transform_with_state,
    transform_with_state_in_arrow,
    transform_with_state_in_pandas,
)
from spark_bridge import functions as S
from spark_bridge.stateful.stateful_processor import ArrowBatch, ArrowResult, arrow_processor
from tests.spark_bridge.conftest import Stream, settle

pytestmark = [pytest.mark.spark, pytest.mark.spark42_only]

KEYS = ["user.id", "USER.ID", "two words"]
VALUES = ["v`a`", "V`A`", "Größe"]
TIME = "at.time"
SCHEMA = "k1 string, k2 string, k3 string, v1 long, v2 long, v3 long, t timestamp"
"""Spark reads no file that has two columns whose names differ only in case; a projection makes them."""
START = dt.datetime(2024, 3, 9, 12, tzinfo=dt.timezone.utc)
ROWS = [("a", "A", "x y", 1, 10, 100, START), ("a", "A", "x y", 2, 20, 200, START), ("b", "B", "z", 3, 30, 300, START)]
PLACE = [*KEYS, *VALUES, TIME]
OUTPUT = "`user.id` string, `USER.ID` string, `two words` string, `sum.of` long, `SUM.of` long"


class Awkward(Stream):
    """A stream whose columns are renamed."""

    def read(self) -> DataFrame:
        return super().read().toDF(*PLACE)


@pytest.fixture
def awkward(make_stream: Callable[..., Stream]) -> Stream:
    plain = make_stream(SCHEMA)
    plain.add(ROWS)
    return Awkward(plain.spark, plain.root, plain.schema, plain.files)


def rows_of(df: DataFrame, stream: Stream, name: str, *, until: int = 0) -> list[Any]:
    """Run a query over all input; return its rows. A query that ticks ends after ``until`` rows."""
    from tests.spark_bridge.streams.running import start

    running = start(df, stream, name)
    return sorted((row for batch in running.finish(until) for row in batch), key=repr)


class Summing(StatefulProcessor):
    """Sums two columns whose names differ only in case, beginning with an initial state."""

    def init(self, handle: Any) -> None:
        self._sums = handle.getValueState("sums", "`sum.of` long, `SUM.of` long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._sums.update((initialState["v`a`"], initialState["V`A`"]))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        first, second = self._sums.get() or (0, 0)
        for row in rows:
            first, second = first + row["v`a`"], second + row["V`A`"]
        self._sums.update((first, second))
        yield (*key, first, second)


class SummingFrames(StatefulProcessor):
    """The same with pandas."""

    def init(self, handle: Any) -> None:
        self._sums = handle.getValueState("sums", "`sum.of` long, `SUM.of` long")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        first, second = self._sums.get() or (0, 0)
        for frame in rows:
            first, second = first + int(frame["v`a`"].sum()), second + int(frame["V`A`"].sum())
        self._sums.update((first, second))
        values = dict(zip([*KEYS, "sum.of", "SUM.of"], (*key, first, second), strict=True))
        yield pd.DataFrame({name: [value] for name, value in values.items()})


@arrow_processor("`sum.of` long, `SUM.of` long")
def summing_columns(batch: ArrowBatch) -> ArrowResult:
    """The same in columns, over one batch."""
    values = {"i": batch.key_index, "sum.of": batch.rows["v`a`"], "SUM.of": batch.rows["V`A`"]}
    sums = pa.table(values).group_by("i").aggregate([("sum.of", "sum"), ("SUM.of", "sum")]).sort_by("i")
    state = pa.table({"sum.of": sums["sum.of_sum"], "SUM.of": sums["SUM.of_sum"]})
    output = pa.Table.from_arrays([*batch.keys.columns, *state.columns], names=[*KEYS, "sum.of", "SUM.of"])
    return ArrowResult(output=output, state=state)


def totals(df: DataFrame, **options: Any) -> DataFrame:
    outputs: dict[str, Any] = {"sum.of": S.sum("v`a`"), "SUM.of": S.sum("V`A`"), "last`one": S.last("Größe", by=TIME)}
    return aggregate(df, by=KEYS, operator="totals", **options, **outputs)


OF_TOTALS = [("a", "A", "x y", 3, 30, 200), ("b", "B", "z", 3, 30, 300)]
OF_PROCESSORS = [row[:5] for row in OF_TOTALS]


def test_every_operator(awkward: Stream) -> None:
    df = awkward.read()
    assert rows_of(totals(df), awkward, "totals") == OF_TOTALS
    assert rows_of(totals(df, partial_aggregation=True), awkward, "partial") == OF_TOTALS
    sums: dict[str, Any] = {"n`": S.sum("v`a`"), "N`": S.sum("V`A`")}
    everything = aggregate(df, by=[], operator="all", **sums)
    assert rows_of(everything, awkward, "all") == [(6, 60)]
    once = deduplicate(df, KEYS, operator="once")
    assert once.columns == PLACE
    assert [row[:4] for row in rows_of(once, awkward, "once")] == [("a", "A", "x y", 1), ("b", "B", "z", 3)]

    timed = df.withWatermark(f"`{TIME}`", "1 second")
    of_window: dict[str, Any] = {"n.n": S.sum("V`A`")}
    of_session: dict[str, Any] = {"n.n": S.sum("v`a`")}
    window = S.window(TIME, "1 minute").alias("at.window")
    by_window = aggregate(timed, by=["user.id", window], operator="windows", **of_window)
    assert [(row[0], row[2]) for row in rows_of(by_window, awkward, "windows")] == [("a", 30), ("b", 30)]
    closing = aggregate(timed, by=["user.id", window], operator="closing", output_mode="append", **of_window)
    assert closing.columns == ["user.id", "at.window", "n.n"], "the window has the watermark of its column"
    session = S.session_window(TIME, "1 minute").alias("at.session")
    by_session = aggregate(timed, by=["USER.ID", session], operator="sessions", **of_session)
    assert [(row[0], row[2]) for row in rows_of(by_session, awkward, "sessions")] == [("A", 3), ("B", 3)]

    processed = transform_with_state(df, KEYS, Summing(), OUTPUT, operator="rows")
    assert rows_of(processed, awkward, "rows") == OF_PROCESSORS
    processed = transform_with_state_in_pandas(df, KEYS, SummingFrames(), OUTPUT, operator="pandas")
    assert rows_of(processed, awkward, "pandas") == OF_PROCESSORS
    processed = transform_with_state_in_arrow(df, KEYS, summing_columns, OUTPUT, operator="arrow")
    assert rows_of(processed, awkward, "arrow") == OF_PROCESSORS


def test_an_initial_state_and_ticks(awkward: Stream, spark: SparkSession) -> None:
    earlier = spark.createDataFrame([("a", "A", "x y", 5, 50)], ["user.id", "USER.ID", "two words", "v`a`", "V`A`"])
    df = transform_with_state(
        awkward.read(), KEYS, Summing(), OUTPUT, operator="from", initial_state=earlier, time_mode="processingTime"
    )
    assert rows_of(df, awkward, "from", until=2) == [("a", "A", "x y", 8, 80), ("b", "B", "z", 3, 30)]


def test_joins(awkward: Stream, make_stream: Callable[..., Stream]) -> None:
    other = make_stream("k1 string, k2 string, w long, t timestamp")
    other.add([("a", "A", 7, START), ("b", "B", 8, START)])
    on = ["user.id", "USER.ID"]
    left = awkward.read().withWatermark(f"`{TIME}`", "1 second")
    for of_right in (["o.v", "right.time"], ["V`a`", "AT.time"]):  # the second ones differ from the left's only in case
        right = other.read().toDF(*on, *of_right).withWatermark(f"`{of_right[1]}`", "1 second")
        joined = join(left, right, on=on, operator="joined", within=("0 seconds", "1 minute"))
        assert joined.columns == [*on, "two words", *VALUES, TIME, *of_right]
        found = [(row[0], row[3], row[4], row[7]) for row in rows_of(joined, awkward, f"joined {of_right[0]}")]
        assert found == [("a", 1, 10, 7), ("a", 2, 20, 7), ("b", 3, 30, 8)]
        nearest = join_asof(left, right, on=on, operator="nearest", tolerance="1 minute")
        assert nearest.columns == joined.columns
    of_key = other.read().toDF("user.id", "two WORDS", "w", "t").withWatermark("t", "1 second")
    by_key = join(left, of_key, on="user.id", operator="by_key", within=("0 seconds", "1 minute"))
    assert by_key.columns == ["user.id", "USER.ID", "two words", *VALUES, TIME, "two WORDS", "w", "t"]


@pytest.mark.thorough  # otherwise: the tests of each entry point, with usual names
def test_state_by_every_entry_point(awkward: Stream, spark: SparkSession, tmp_path: Path) -> None:
    query = (
        totals(awkward.read())
        .writeStream.outputMode("append")
        .option("checkpointLocation", awkward.checkpoint)
        .format("noop")
        .start()
    )
    settle(query)
    with QueryableStateClient.connect() as client:
        assert client.get("totals", ("a", "A", "x y")) == {"sum.of": 3, "SUM.of": 30, "last`one": 200}
        assert client.scan("totals", where=[("USER.ID__value", "=", "B")], columns=["SUM.of__value"]).to_pylist() == [
            {"SUM.of__value": 30}
        ]
    given = spark.createDataFrame([("a", "A", "x y", 1, START), ("c", "C", "z", 2, START)], [*KEYS, "d.n", TIME])
    found = lookup(given, "totals", on=KEYS)
    assert found.columns == [*KEYS, "d.n", TIME, "sum.of", "SUM.of", "last`one"]
    assert sorted((row[0], *row[5:]) for row in found.collect()) == [("a", 3, 30, 200), ("c", None, None, None)]
    now = given.withColumn("NOW.time", F.current_timestamp())
    as_of = state_as_of(now, awkward.checkpoint, "totals", on=KEYS, time="NOW.time")
    assert sorted((row[0], *row[6:]) for row in as_of.collect()) == [("a", 3, 30, 200), ("c", None, None, None)]
    query.stop()
    stored = read_state(spark, awkward.checkpoint, "totals")
    assert sorted(tuple(row)[:6] for row in stored.collect()) == OF_TOTALS
    changes = read_state_changes(spark, awkward.checkpoint, "totals", from_version=0)
    assert sorted(row["after"][1] for row in changes.collect()) == [30, 30]
    assert state_metadata(spark, awkward.checkpoint).count() > 0

    kept = read_state(spark, awkward.checkpoint, "totals", state_columns=True)
    program = totals(awkward.read(), num_partitions=2)
    bootstrap_state(kept.drop("key_group", "partition_id"), str(tmp_path / "copied"), program)
    copied = read_state(spark, str(tmp_path / "copied"), "totals")
    assert sorted(tuple(row)[:6] for row in copied.collect()) == OF_TOTALS
    made_of_input = spark.read.parquet(str(awkward.root / "in")).toDF(*PLACE).repartition(3)
    bootstrap_state(made_of_input, str(tmp_path / "made"), program, as_input=True)
    made = read_state(spark, str(tmp_path / "made"), "totals")
    assert sorted(tuple(row)[:6] for row in made.collect()) == OF_TOTALS
