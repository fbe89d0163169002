"""``lookup`` in real streams: one recorded version per batch, read again however often and wherever the batch runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import ray
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from spark_bridge import QueryableStateClient, aggregate, lookup, read_state, state_as_of, state_table
from spark_bridge import functions as S
from spark_bridge.exceptions import InvalidOperatorError, UnknownOperatorError
from spark_bridge.session.current import current_cluster
from tests.effort import effort
from tests.spark_bridge.conftest import Stream, settle
from tests.spark_bridge.streams.running import EXECUTOR, WORKER, dying

pytestmark = pytest.mark.spark


@pytest.fixture
def client(spark: SparkSession) -> Iterator[QueryableStateClient]:
    with QueryableStateClient.connect() as made:
        yield made


def totals_of(stream: Stream) -> Any:
    frame = aggregate(stream.read(), by="k", operator="looked_up", n=S.count(), total=S.sum("v"), num_partitions=3)
    writer = frame.writeStream.outputMode("append").option("checkpointLocation", stream.checkpoint)
    query = writer.format("noop").start()
    settle(query)
    return query


@pytest.mark.matrix
@pytest.mark.spark42
def test_repeated_batch_reads_its_recorded_version(make_stream: Callable[..., Stream]) -> None:
    looked_up, stream = make_stream(), make_stream("k long, w double")
    looked_up.add([(k, 1.0) for k in range(10)])
    query = totals_of(looked_up)
    seen: list[tuple[int, list[Any]]] = []
    fails = {"on": True}

    def keep(batch: DataFrame, batch_id: int) -> None:
        seen.append((batch_id, sorted(map(tuple, batch.collect()), key=repr)))
        if fails["on"]:
            raise RuntimeError("the sink is not there")

    stream.add([(1, 0.5), (1, 0.6), (11, 0.7), (None, 0.8)])
    enriched = lookup(stream.read(), "looked_up", on="k", columns=["n"])
    writer = enriched.writeStream.foreachBatch(keep).option("checkpointLocation", stream.checkpoint)
    with pytest.raises(Exception, match="the sink is not there"):
        writer.start().processAllAvailable()
    looked_up.add([(k, 1.0) for k in range(20)])
    settle(query)
    fails["on"] = False
    again = writer.start()
    again.processAllAvailable()
    first = [(None, 0.8, None), (1, 0.5, 1), (1, 0.6, 1), (11, 0.7, None)]
    by_key = sorted(first, key=repr)
    assert seen == [(0, by_key), (0, by_key)]
    stream.add([(1, 0.9), (11, 0.1)])
    again.processAllAvailable()
    assert seen[-1] == (1, sorted([(1, 0.9, 2), (11, 0.1, 1)], key=repr))
    again.stop()
    query.stop()
    records = sorted(p.name for p in Path(looked_up.checkpoint, "statestore/lookups").rglob("*.json"))
    assert records == [f"{n:020d}.json" for n in (0, 1)]


@pytest.mark.spark42_only
def test_batch_frames_ended_queries_checkpoints_and_inner_joins(
    make_stream: Callable[..., Stream], spark: SparkSession
) -> None:
    looked_up = make_stream()
    looked_up.add([(k, float(k)) for k in range(10)])
    query = totals_of(looked_up)
    frame = spark.createDataFrame([(1, "a"), (2, "b"), (77, "c"), (None, "d")], "key long, name string")
    now = lookup(frame, "looked_up", on={"key": "k"}, how="inner")
    looked_up.add([(1, 1.0)])
    settle(query)
    query.stop()
    assert now.columns == ["key", "name", "n", "total"]
    assert sorted(map(tuple, now.collect())) == [(1, "a", 1, 1.0), (2, "b", 1, 2.0)], "as of the call"
    for options in ({}, {"checkpoint": looked_up.checkpoint}):
        after = lookup(frame, "looked_up", on={"key": "k"}, columns=["total"], **options)
        assert sorted(map(tuple, after.collect()), key=repr) == sorted(
            [(1, "a", 2.0), (2, "b", 2.0), (77, "c", None), (None, "d", None)], key=repr
        )
        earlier = lookup(frame, "looked_up", on={"key": "k"}, how="inner", version=1, **options)
        assert sorted(map(tuple, earlier.collect())) == [(1, "a", 1, 1.0), (2, "b", 1, 2.0)]


@pytest.mark.spark42_only
def test_state_as_of_equals_the_answer_of_that_time(
    make_stream: Callable[..., Stream], spark: SparkSession, client: QueryableStateClient
) -> None:
    looked_up = make_stream()
    keys = list(range(effort(2_000, 20_000)))
    rng = np.random.default_rng(7)
    answers: list[pd.DataFrame] = []

    def ask(version: int) -> None:
        """Note what a client is answered, and when: between this version's completion and the next one's."""
        for _ in range(effort(2, 10)):
            asked = pd.DataFrame({"key": rng.choice([*keys, -1], len(keys)), "at": pd.Timestamp.now("UTC")})
            asked["n"] = client.get_many("looked_up", asked["key"].to_numpy(), query=str(query.id))["n"].to_pandas()
            assert client.get("looked_up", 0, query=str(query.id)) == {"n": version, "total": float(version)}
            answers.append(asked)

    looked_up.add([(k, 1.0) for k in keys])
    query = totals_of(looked_up)
    ask(1)
    for version in range(2, effort(5, 6)):
        looked_up.add([(k, 1.0) for k in keys if k % version == 0])
        settle(query)
        ask(version)
    query.stop()
    asked = pd.concat(answers, ignore_index=True)
    asked["id"] = range(len(asked))
    frame = spark.createDataFrame(asked[["id", "key", "at"]])
    found = state_as_of(frame, looked_up.checkpoint, "looked_up", on={"key": "k"}, time="at", columns=["n"])
    live = asked.set_index("id")["n"].fillna(-1).astype(int)
    trained = found.toPandas().set_index("id").sort_index()["n"].fillna(-1).astype(int)
    assert len(trained) == len(asked) and (trained == live).all(), "no row differs"
    inner = state_as_of(frame, looked_up.checkpoint, "looked_up", on={"key": "k"}, time="at", how="inner")
    assert inner.count() == int((live >= 0).sum())
    nobody = spark.createDataFrame([(1, None)], "key long, at timestamp")
    assert state_as_of(nobody, looked_up.checkpoint, "looked_up", on={"key": "k"}, time="at").first()["n"] is None
    with pytest.raises(InvalidOperatorError, match=r"time='key' must be a timestamp column.*has at"):
        state_as_of(frame, looked_up.checkpoint, "looked_up", on={"key": "k"}, time="key")
    as_of = asked["at"].iloc[0].to_pydatetime()
    then = read_state(spark, looked_up.checkpoint, "looked_up", as_of=as_of)
    assert {row["n"] for row in then.select("n").distinct().collect()} == {1}


@pytest.mark.thorough  # the usual run has test_repeated_batch_reads_its_recorded_version
def test_every_attempt_reads_the_recorded_version(make_stream: Callable[..., Stream], tmp_path: Path) -> None:
    """Sinks fail, and hosts, the coordinator, executors and their Python workers are killed while the looked-up query
    runs.
    """
    rng = random.Random(11)
    looked_up, stream = make_stream(), make_stream("k long, w double")
    looked_up.add([(k, 1.0) for k in range(30)])
    query = totals_of(looked_up)
    attempts: dict[int, list[list[Any]]] = {}

    def keep(batch: DataFrame, batch_id: int) -> None:
        attempts.setdefault(batch_id, []).append(sorted(map(tuple, batch.collect()), key=repr))
        if rng.random() < 0.4:
            raise RuntimeError("the sink is not there")

    def process() -> None:
        while True:
            running = writer.start()
            try:
                running.processAllAvailable()
                return
            except StreamingQueryException as error:
                assert "the sink is not there" in str(error), error
                looked_up.add([(rng.randrange(40), 1.0) for _ in range(20)])
                settle(query)
            finally:
                running.stop()

    enriched = lookup(stream.read(), "looked_up", on="k", columns=["n", "total"])
    enriched = enriched.mapInArrow(dying(tmp_path), enriched.schema)
    writer = enriched.writeStream.foreachBatch(keep).option("checkpointLocation", stream.checkpoint)
    given: list[tuple[int, float]] = []
    for number in range(12):
        rows = [(rng.randrange(45), float(number)) for _ in range(200)]
        given += rows
        stream.add(rows)
        looked_up.add([(rng.randrange(40), 1.0) for _ in range(20)])
        coordinator = ray.get_actor("StateStoreCoordinator", namespace="statestore")
        strike = (None, EXECUTOR, WORKER)[number % 3]
        if strike is None:
            ray.kill(rng.choice([*current_cluster().hosts, coordinator]), no_restart=False)
        else:
            (tmp_path / strike).touch()
        process()
        assert strike is None or not (tmp_path / strike).exists(), "it was killed with rows that it had looked up"
    settle(query)
    query.stop()
    place = Path(looked_up.checkpoint, "statestore/lookups")
    records = {int(p.stem): json.loads(p.read_text().splitlines()[0])["version"] for p in place.rglob("*.json")}
    assert sorted(attempts) == sorted(records) and sum(map(len, attempts.values())) > len(records)
    versions = {n: state_table(looked_up.checkpoint, "looked_up", version=n).to_pylist() for n in records.values()}
    for batch_id, seen in attempts.items():
        assert all(rows == seen[0] for rows in seen), "every attempt is the same"
        state = {row["k"]: (row["n"], row["total"]) for row in versions[records[batch_id]]}
        assert all(row[2:] == state.get(row[0], (None, None)) for row in seen[0])
    assert sorted(row[:2] for seen in attempts.values() for row in seen[0]) == sorted(given)
    assert len(set(records.values())) > 3


@pytest.mark.spark42_only
def test_wrong_use(spark: SparkSession, make_stream: Callable[..., Stream]) -> None:
    looked_up = make_stream()
    looked_up.add([(1, 1.0)])
    totals_of(looked_up).stop()
    frame = spark.createDataFrame([(1, "a", 2)], "key long, name string, n long")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"on": "other"}, r"on='other': the key of 'looked_up' is k: int64"),
        ({"on": {"name": "k"}}, "Column 'name' is string, and the key column 'k' of 'looked_up' is int64: cast it"),
        ({"on": {"nobody": "k"}}, "the DataFrame has no nobody"),
        ({"on": {"key": "k"}, "columns": ["total", "m"]}, r"'looked_up' has \['n', 'total'\], and no m"),
        ({"on": {"key": "k"}}, "The DataFrame and 'looked_up' both have n: rename"),
        ({"on": {"key": "k"}, "how": "right"}, "how='right'"),
        ({"on": {"key": "k"}, "version": -1}, "version=-1"),
        ({"on": {"key": "k"}, "version": "latest"}, "version='latest'"),
    ]
    for options, error in wrong:
        with pytest.raises(InvalidOperatorError, match=error):
            lookup(frame, "looked_up", **options)
    with pytest.raises(UnknownOperatorError, match="operator 'nothing'"):
        lookup(frame, "nothing", on="key")
    wall_clock = frame.selectExpr("key", "timestamp_ntz'2024-01-01 00:00:00' at")
    with pytest.raises(
        InvalidOperatorError, match=r"time='at' has type timestamp_ntz.*F.col\('at'\).cast\(\"timestamp"
    ):
        state_as_of(wall_clock, looked_up.checkpoint, "looked_up", on={"key": "k"}, time="at")
