"""State as DataFrames: of running and of stopped queries, at versions past and present, on real Spark."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from backends.exceptions import VersionNotFoundError
from spark_bridge import (
    StatefulProcessor,
    aggregate,
    read_state,
    read_state_changes,
    state_metadata,
    state_table,
    transform_with_state,
)
from spark_bridge import functions as S
from tests.patience import HANG
from tests.spark_bridge.conftest import Stream, settle, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.spark42_only, pytest.mark.slow]

Row = tuple[Any, ...]


class Totals(StatefulProcessor):
    """Per key: a count, the values, and how often each value came."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n LONG")
        self.values = handle.getListState("values", "v DOUBLE")
        self.by_value = handle.getMapState("by_value", "v DOUBLE", "n LONG")
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        values = [row.v for row in rows]
        n = (self.count.get() or (0,))[0] + len(values)
        self.count.update((n,))
        self.values.appendList([(v,) for v in values])
        for v in values:
            self.by_value.updateValue((v,), ((self.by_value.getValue((v,)) or (0,))[0] + 1,))
        self.handle.registerTimer(4_000_000_000_000 + n)
        yield key[0], n


class Model:
    """The expected state per version."""

    def __init__(self) -> None:
        self.values: dict[int, list[float]] = defaultdict(list)
        self.timers: dict[int, set[int]] = defaultdict(set)
        self.at: list[dict[str, list[Row]]] = [self.rows()]

    def batch(self, rows: list[Row]) -> None:
        for k, v in rows:
            self.values[k].append(v)
        for k in {k for k, _ in rows}:
            self.timers[k].add(4_000_000_000_000 + len(self.values[k]))
        self.at.append(self.rows())

    def rows(self) -> dict[str, list[Row]]:
        pairs = [(k, v) for k, held in self.values.items() for v in held]
        return {
            "count": sorted((k, len(held)) for k, held in self.values.items()),
            "values": sorted(pairs),
            "by_value": sorted((k, v, pairs.count((k, v))) for k, v in set(pairs)),
            "timers": sorted((k, t) for k, held in self.timers.items() for t in held),
        }


@pytest.fixture
def few_batches_kept(spark: SparkSession) -> Iterator[None]:
    """Of Spark's logs, and so of the state, only the last versions are kept."""
    before = spark.conf.get("spark.sql.streaming.minBatchesToRetain")
    spark.conf.set("spark.sql.streaming.minBatchesToRetain", "2")
    yield
    spark.conf.set("spark.sql.streaming.minBatchesToRetain", before)


def rows_of(df: DataFrame) -> list[Row]:
    """All rows without key group and partition; the partitions are those of the DataFrame."""
    names = [n for n in df.columns if n not in ("key_group", "partition_id")]
    return sorted(tuple(row) for row in df.select(*names).collect())


def batch_rows(i: int) -> list[Row]:
    return [((i * 7 + j) % 9, float(j % 4)) for j in range(40)]


def test_the_state_of_a_query_can_be_read_at_every_version_and_so_can_its_changes(
    spark: SparkSession, stream: Stream
) -> None:
    def start(n: int) -> Any:
        out = transform_with_state(
            stream.read(),
            "k",
            Totals(),
            "k LONG, n LONG",
            operator="totals",
            time_mode="processingTime",
            num_partitions=n,
        )
        counts = aggregate(out, by="k", operator="seen", num_partitions=2, most=S.max("n"))
        # With a time mode there is always something to do: this ends when all files have been read.
        writer = counts.writeStream.format("noop").trigger(availableNow=True)
        return writer.option("checkpointLocation", stream.checkpoint).start()

    model = Model()

    def feed(first: int, end: int) -> None:
        for i in range(first, end):
            stream.add(batch_rows(i))
            model.batch(batch_rows(i))

    feed(0, 3)
    assert start(2).awaitTermination(HANG)
    newest = state_metadata(spark, stream.checkpoint).first().maxVersion
    assert newest >= 3
    df = read_state(spark, stream.checkpoint, "totals", "values")
    assert df.rdd.getNumPartitions() == 2
    assert {r.partition_id for r in df.select("partition_id").distinct().collect()} <= {0, 1}
    for name in ("count", "values", "by_value", "timers"):
        assert rows_of(read_state(spark, stream.checkpoint, "totals", name)) == model.at[3][name], name
    with_spark = read_state(spark, stream.checkpoint, "totals", "by_value", newest)
    table = state_table(stream.checkpoint, "totals", "by_value", newest)
    assert with_spark.columns == table.column_names
    assert sorted(map(tuple, with_spark.collect())) == sorted(zip(*table.to_pydict().values(), strict=True))
    assert rows_of(read_state(spark, stream.checkpoint, "seen")) == model.at[3]["count"]

    feed(3, 5)
    assert start(3).awaitTermination(HANG)  # another layout
    collected = read_state(spark, stream.checkpoint, "totals", "values", flatten=False)
    assert collected.rdd.getNumPartitions() == 3
    assert {r.k: sorted(e.v for e in r.list_value) for r in collected.collect()} == {
        k: sorted(held) for k, held in model.values.items()
    }
    metadata = {
        r.stateVarName: r for r in state_metadata(spark, stream.checkpoint).collect() if r.operatorName == "totals"
    }
    assert set(metadata) == {"count", "values", "by_value", "timers"}
    first, last = metadata["count"].minVersion, metadata["count"].maxVersion
    changes = read_state_changes(spark, stream.checkpoint, "totals", "count", from_version=first)
    found = {r.k: r.n for r in read_state(spark, stream.checkpoint, "totals", "count", first).collect()}
    for r in sorted(changes.collect(), key=lambda r: r.version):
        assert (None if r.before is None else r.before.n) == found.get(r.k) and r.change_type != "delete"
        found[r.k] = r.after.n
    assert sorted(found.items()) == model.at[5]["count"] and first < last
    with pytest.raises(VersionNotFoundError, match="there are the versions 0 to"):
        read_state(spark, stream.checkpoint, "totals", "count", last + 100)


def test_readers_come_along_with_a_stream_and_its_retention(
    spark: SparkSession, stream: Stream, few_batches_kept: None
) -> None:
    counts = aggregate(stream.read(), by="k", operator="counts", num_partitions=2, n=S.count())
    query = counts.writeStream.format("noop").option("checkpointLocation", stream.checkpoint).start()
    stream.add(batch_rows(0))
    settle(query)
    old = read_state(spark, stream.checkpoint, "counts")
    assert sum(r.n for r in old.collect()) == 40
    for i in range(1, 6):
        stream.add(batch_rows(i))
        found = state_table(stream.checkpoint, "counts")
        assert sum(found.column("n").to_pylist()) % 40 == 0, "a batch is there as a whole, or not at all"
        settle(query)
    assert sum(r.n for r in read_state(spark, stream.checkpoint, "counts").collect()) == 6 * 40

    def oldest() -> int:
        return int(state_metadata(spark, stream.checkpoint).first().minVersion)

    wait_until(lambda: oldest() > 1 or stream.add(batch_rows(1)) or settle(query), timeout=HANG)

    def is_gone() -> bool:
        """A version above may still begin with its files."""
        try:
            old.collect()
        except Exception as error:  # noqa: BLE001 - Spark wraps it
            assert re.search(r"Version 1 of the state at .* was removed while it was read", str(error))
            return True
        stream.add(batch_rows(1))
        settle(query)
        return False

    wait_until(is_gone, timeout=HANG)
    with pytest.raises(VersionNotFoundError, match=r"Version 1 .* there are the versions"):
        read_state(spark, stream.checkpoint, "counts", version=1)


def test_state_that_the_session_keeps_elsewhere_is_found(spark: SparkSession, stream: Stream, tmp_path: Path) -> None:
    spark.conf.set("spark.statestore.location", str(tmp_path / "elsewhere"))
    try:
        counts = aggregate(stream.read(), by="k", operator="counts", num_partitions=2, n=S.count())
        query = counts.writeStream.format("noop").option("checkpointLocation", stream.checkpoint).start()
        stream.add(batch_rows(0))
        settle(query)
        assert read_state(spark, stream.checkpoint, "counts").count() == 9
    finally:
        spark.conf.unset("spark.statestore.location")
    assert state_table(stream.checkpoint, "counts", state_location=str(tmp_path / "elsewhere")).num_rows == 9
    assert read_state(spark, stream.checkpoint, "counts", state_location=str(tmp_path / "elsewhere")).count() == 9
