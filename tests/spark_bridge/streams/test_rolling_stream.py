"""Rolling aggregates as a stream: its output, answers while it runs, and training rows with the same numbers."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_bridge import QueryableStateClient, aggregate, forget_keys, lookup, read_state, state_as_of
from spark_bridge import functions as S
from spark_bridge.aggregates.rolling import horizon_of
from spark_bridge.exceptions import InvalidOperatorError
from tests.effort import effort
from tests.spark_bridge.conftest import Stream, settle

pytestmark = pytest.mark.spark

START = pd.Timestamp("2024-03-09 23:50", tz="UTC")
HORIZONS = ("10 minutes", "1 hour")
SCHEMA = "k long, ts timestamp, v double"


def rolled(stream: Stream, horizons: tuple[str, ...] = HORIZONS, **options: Any) -> DataFrame:
    return aggregate(
        stream.read().withWatermark("ts", "2 minutes"),
        by="k",
        operator="rolled",
        event_time="ts",
        n=S.count().rolling(*horizons),
        total=S.sum("v").rolling(*horizons),
        last=S.last("v").rolling(horizons[-1]),
        **options,
    )


def expected(rows: pd.DataFrame, at: pd.Timestamp, horizons: tuple[str, ...] = HORIZONS) -> dict[str, Any]:
    """What pandas makes of the rows of one key."""
    answer: dict[str, Any] = {}
    moment = np.array([at.value // 1000])
    us = rows["ts"].astype("datetime64[us, UTC]").astype("int64")
    for text in horizons:
        horizon = horizon_of(text)
        window = rows[(us > horizon.start(moment)[0]) & (us <= moment[0])]
        answer[f"n_{horizon.name}"] = len(window)
        answer[f"total_{horizon.name}"] = float(window["v"].sum())
    newest = window.sort_values(["ts", "v"])["v"]
    answer[f"last_{horizon.name}"] = None if window.empty else float(newest.iloc[-1])
    return answer


def events(rng: np.random.Generator, step: int, keys: int, rows: int) -> pd.DataFrame:
    """Rows of some minutes, a part of them up to an hour late; sums of the values are exact."""
    late = np.where(rng.random(rows) < 0.2, rng.integers(0, 3000, rows), 0)
    seconds = step * 240 + rng.integers(0, 240, rows) - late
    at = START + pd.to_timedelta(seconds * 1000 + rng.integers(0, 1000, rows), unit="ms")
    return pd.DataFrame(
        {"k": rng.integers(0, keys, rows), "ts": at.astype("datetime64[us, UTC]"), "v": rng.integers(0, 50, rows) / 4}
    )


@pytest.mark.matrix
@pytest.mark.spark42
def test_stream_answers_and_training_rows_agree(make_stream: Callable[..., Stream], spark: SparkSession) -> None:
    """Each batch emits what pandas has; answers recorded by version and time are the training rows."""
    stream, rng = make_stream(SCHEMA), np.random.default_rng(5)
    keys, rows = effort(40, 2_000), effort(150, 4_000)
    seen = pd.DataFrame({"k": [], "ts": [], "v": []})
    emitted: list[dict[str, Any]] = []
    recorded: list[pd.DataFrame] = []

    def keep(batch: DataFrame, _: int) -> None:
        emitted.extend(row.asDict() for row in batch.collect())

    def begin(**options: Any) -> Any:
        frame = rolled(stream, **options)
        writer = frame.writeStream.outputMode("update").option("checkpointLocation", stream.checkpoint)
        return writer.foreachBatch(keep).start()

    query = begin(num_partitions=3)
    with QueryableStateClient.connect() as client:
        for step in range(effort(5, 12)):
            if step == 3:
                query.stop()
                query = begin(num_partitions=5)
            new = events(rng, step, keys, rows)
            seen = pd.concat([seen, new]) if step else new
            emitted.clear()
            stream.add(new)
            settle(query)
            by_key = dict(tuple(seen.groupby("k")))
            assert {row["k"] for row in emitted} == set(new["k"])
            for row in emitted[: effort(40, 400)]:
                newest = by_key[row.pop("k")]
                at = newest["ts"].max()
                assert row.pop("ts").replace(tzinfo=dt.timezone.utc) == at.to_pydatetime()
                assert row == expected(newest, at)
            for _ in range(effort(3, 8)):
                asked = rng.integers(0, keys + 2, effort(200, 11_000))
                at = seen["ts"].max() + pd.Timedelta(seconds=float(rng.choice([0.0, 1.5, 200, 4000])))
                table = client.get_many("rolled", asked, at=at.to_pydatetime()).to_pandas()
                table["at"], table["version"] = client.answered_at, client.answered_version
                recorded.append(table)
                key = int(asked[0])
                answer = client.get("rolled", key, at=at.to_pydatetime())
                assert answer == (expected(by_key[key], at) if key in by_key else None)
    query.stop()

    answers = pd.concat(recorded, ignore_index=True)
    answers["id"] = range(len(answers))
    if effort(False, True):
        assert len(answers) >= 1_000_000
    frame = spark.createDataFrame(answers[["id", "k", "at", "version"]].rename(columns={"k": "key"}))
    trained = state_as_of(frame, stream.checkpoint, "rolled", on={"key": "k"}, time="at", version="version").toPandas()
    trained = trained.set_index("id").sort_index()
    for name in [c for c in answers.columns if c.startswith(("n_", "total_", "last_"))]:
        live, again = answers[name].to_numpy(float), trained[name].to_numpy(float)
        assert np.array_equal(live, again, equal_nan=True), name
    forget_everywhere(stream, spark, by_key)


def forget_everywhere(stream: Stream, spark: SparkSession, by_key: dict[int, pd.DataFrame]) -> None:
    """Tables, the data source and lookups have the same rows; a key that is forgotten is in none of them."""
    at = max(rows["ts"].max() for rows in by_key.values()) + pd.Timedelta(minutes=3)
    for forgotten in (None, next(iter(by_key))):
        if forgotten is not None:
            forget_keys(stream.checkpoint, "rolled", [forgotten])
            del by_key[forgotten]
        answers = {key: expected(rows, at) for key, rows in by_key.items()}
        table = read_state(spark, stream.checkpoint, "rolled", at=at.to_pydatetime()).drop("key_group", "partition_id")
        assert {row.pop("k"): row for row in (r.asDict() for r in table.collect())} == answers
    frame = spark.createDataFrame([(k,) for k in (next(iter(by_key)), -1)], "k long")
    found = lookup(frame, "rolled", on="k", columns=["n_1h"], checkpoint=stream.checkpoint).collect()
    assert sorted(map(tuple, found)) == [(-1, None), (next(iter(by_key)), 0)], "as of now, long after the events"


@pytest.mark.spark42_only
def test_horizons_may_change_at_a_restart(make_stream: Callable[..., Stream], spark: SparkSession) -> None:
    """Shorter horizons answer at once; a longer one fills, and says since when it is complete."""
    stream = make_stream(SCHEMA)

    def run(horizons: tuple[str, ...], rows: list[tuple[int, int]]) -> Any:
        stream.add([(k, (START + pd.Timedelta(seconds=s)).to_pydatetime(), 1.0) for k, s in rows])
        frame = rolled(stream, horizons)
        query = (
            frame.writeStream.outputMode("update")
            .option("checkpointLocation", stream.checkpoint)
            .format("noop")
            .start()
        )
        settle(query)
        return query

    def answer(seconds: int) -> dict[str, Any]:
        with QueryableStateClient.connect() as client:
            at = (START + pd.Timedelta(seconds=seconds)).to_pydatetime()
            return dict(client.get("rolled", 1, at=at))

    run(HORIZONS, [(1, i * 10) for i in range(80)]).stop()
    run(HORIZONS, [(1, 800 + i * 10) for i in range(10)]).stop()
    query = run(("30 minutes", "1 hour", "1 day"), [(1, 1000)])
    assert {k: v for k, v in answer(1000).items() if k.startswith("n_")} == {"n_30m": 91, "n_1h": 91, "n_1d": 91}
    with QueryableStateClient.connect() as client:
        (state,) = next(o for o in client.operators() if o["operator"] == "rolled")["state"]
    assert list(state["horizons"]["n"]) == ["30m", "1h", "1d"]
    assert state["horizons"]["n"]["1h"]["since"] is None
    since = dt.datetime.fromisoformat(state["horizons"]["n"]["1d"]["since"])
    assert START - pd.Timedelta(hours=2) < since < START
    query.stop()


def test_wrong_use_is_refused_with_the_remedy(make_stream: Callable[..., Stream]) -> None:
    """Each mistake is an error before a query exists, and what the error says to do is accepted."""
    stream = make_stream(SCHEMA)
    rows = stream.read().withWatermark("ts", "2 minutes")
    n = S.count().rolling("10 minutes")
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("event_time='ts'", rows, {"n": n}),
        ("withWatermark", stream.read(), {"n": n, "event_time": "ts"}),
        ('"update" mode', rows, {"n": n, "event_time": "ts", "output_mode": "append"}),
        ("all of them .rolling", rows, {"n": n, "m": S.count(), "event_time": "ts"}),
        ("leave them out", rows, {"n": S.count(), "event_time": "ts"}),
        ("is named twice", rows, {"n": S.count().rolling("1 hour", "60 minutes"), "event_time": "ts"}),
        ("is not a horizon", rows, {"n": S.count().rolling("1 month"), "event_time": "ts"}),
        ("in whole numbers", rows, {"n": S.count().rolling("1.5 hours"), "event_time": "ts"}),
        ("two columns 'n_10m'", rows.withColumnRenamed("k", "n_10m"), {"by": "n_10m", "n": n, "event_time": "ts"}),
        ("has a window", rows, {"by": [S.window("ts", "1 hour"), "k"], "n": n, "event_time": "ts"}),
        ("Leave it out", rows, {"n": n, "event_time": "ts", "partial_aggregation": True}),
    ]  # fmt: skip
    for message, frame, arguments in wrong:
        with pytest.raises(InvalidOperatorError, match=message):
            aggregate(frame, operator="o", **{"by": "k", **arguments})
    with pytest.raises(InvalidOperatorError, match="needs limit="):
        S.collect_list("v").rolling("1 hour")
    with pytest.raises(InvalidOperatorError, match="names no horizon"):
        S.count().rolling()
    good = aggregate(
        rows, by="k", operator="o", event_time="ts", n=n, vs=S.collect_list("v", limit=5).rolling("1 hour")
    )
    assert good.columns == ["k", "ts", "n_10m", "vs_1h"]
