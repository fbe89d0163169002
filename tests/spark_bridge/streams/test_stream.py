"""Streams end to end on RayDP: results, restarts, every operator in every batch, the state while it runs."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from coordinator_actor.durable.fencing import FENCE
from spark_bridge import QueryableStateClient, aggregate
from spark_bridge import functions as S
from spark_bridge.exceptions import UnknownKeyOrNamespaceError, UnknownOperatorError
from spark_bridge.session.current import current_cluster
from spark_bridge.task import executor
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import IS_ATTACHED, Stream, settle, wait_until

pytestmark = pytest.mark.spark


def start(df: DataFrame, stream: Stream, **options: str) -> StreamingQuery:
    writer = df.writeStream.outputMode("append").format("noop").option("checkpointLocation", stream.checkpoint)
    for name, value in options.items():
        writer = writer.option(name, value)
    return writer.start()


def run_all(df: DataFrame, stream: Stream) -> None:
    """Process what is there and stop."""
    query = start(df, stream)
    query.processAllAvailable()
    query.stop()


def manifests(stream: Stream) -> list[dict[str, Any]]:
    return [
        json.loads(p.read_text().splitlines()[0])
        for p in sorted(Path(stream.checkpoint, "statestore", "manifests").glob("*.json"))
        if p.stat().st_size != len(FENCE)
    ]


@pytest.fixture(scope="module")
def client(spark: Any) -> QueryableStateClient:
    return QueryableStateClient.connect()


@pytest.mark.spark42
def test_the_driver_logs_at_the_level_asked_for(spark: SparkSession) -> None:
    root = spark._jvm.org.apache.logging.log4j.LogManager.getRootLogger()  # type: ignore[union-attr]
    assert root.getLevel().toString() == "ERROR"


@pytest.mark.matrix
@pytest.mark.spark42
def test_running_totals_go_to_the_sink_and_can_be_asked_for_while_the_query_runs(
    stream: Stream, client: QueryableStateClient
) -> None:
    stream.add([(1, 1.0), (1, 2.5), (2, 4.0), (None, 7.0)])
    totals = aggregate(stream.read(), by="k", operator="totals", n=S.count(), total=S.sum("v"), mean=S.mean("v"))
    out: list[Any] = []
    query = (
        totals.writeStream.outputMode("append")
        .option("checkpointLocation", stream.checkpoint)
        .foreachBatch(lambda batch, n: out.extend((n, *r) for r in batch.collect()))
        .start()
    )
    settle(query)
    stream.add([(1, 10.0), (3, None)])
    settle(query)
    assert sorted(out, key=repr) == sorted(
        [
            (0, 1, 2, 3.5, 1.75),
            (0, 2, 1, 4.0, 4.0),
            (0, None, 1, 7.0, 7.0),
            (1, 1, 3, 13.5, 4.5),
            (1, 3, 1, None, None),
        ],
        key=repr,
    )
    assert client.get("totals", 1) == {"n": 3, "total": 13.5, "mean": 4.5}
    assert client.get("totals", None) == {"n": 1, "total": 7.0, "mean": 7.0}
    assert client.get("totals", 99) is None
    table = client.get_many("totals", [3, 99, 1, 1, None])
    assert table.to_pydict() == {
        "k": [3, 99, 1, 1, None],
        "n": [1, None, 3, 3, 1],
        "total": [None, None, 13.5, 13.5, 7.0],
        "mean": [None, None, 4.5, 4.5, 7.0],
    }
    assert client.get_many("totals", []).num_rows == 0
    with pytest.raises(UnknownKeyOrNamespaceError, match="'one'"):
        client.get("totals", "one")
    with pytest.raises(UnknownOperatorError, match="Did you mean 'totals'"):
        client.get("totalz", 1)
    local = Path(ray._private.worker._global_node.get_session_dir_path()) / "statestore"
    assert any("totals" in Path(directory).parts for directory, _, _ in os.walk(local)), "hosts keep state on the disk"
    for directory, _, files in os.walk(local):
        for path in (Path(directory), *(Path(directory, name) for name in files)):
            with suppress(FileNotFoundError):  # maintenance removes temporary directories at any moment
                assert not path.stat().st_mode & 0o077, f"other users can read {path}"
    durable = next(Path(stream.checkpoint, "statestore", "manifests").glob("*.json"))
    assert durable.stat().st_mode & 0o777 == 0o644


def test_a_process_without_ray_reads_by_address_and_token(stream: Stream, client: QueryableStateClient) -> None:
    from spark_bridge.session.current import current_cluster

    stream.add([(5, 1.0)])
    query = start(aggregate(stream.read(), by="k", operator="outside", n=S.count()), stream)
    settle(query)
    cluster = current_cluster()
    address = cluster.query_addresses()[0]
    with QueryableStateClient.connect(address=address, token=cluster.token) as outside:
        assert outside.get("outside", 5) == {"n": 1}
    stranger = QueryableStateClient.connect(address=address, token="wrong", timeout=PATIENCE)
    with stranger, pytest.raises(Exception, match="token"):
        stranger.get("outside", 5)


def test_two_queries_with_the_same_operator_name_need_query(
    make_stream: Callable[..., Stream], client: QueryableStateClient
) -> None:
    queries = []
    for i in (1, 2):
        stream = make_stream()
        stream.add([(1, float(i))])
        query = start(aggregate(stream.read(), by="k", operator="twin", t=S.sum("v")), stream)
        settle(query)
        queries.append(query)
    with pytest.raises(UnknownOperatorError, match="query="):
        client.get("twin", 1)
    assert [client.get("twin", 1, query=str(q.id)) for q in queries] == [{"t": 1.0}, {"t": 2.0}]


@pytest.mark.matrix
@pytest.mark.spark42
def test_every_type_as_key_and_value_nulls_included(
    make_stream: Callable[..., Stream], client: QueryableStateClient
) -> None:
    utc = dt.timezone.utc
    samples: dict[str, list[Any]] = {
        "boolean": [True, False],
        "byte": [-128, 127],
        "short": [-5, 300],
        "int": [-(2**31), 7],
        "long": [-(2**63), 2**40],
        "float": [1.5, -math.inf],
        "double": [-2.25, 1e300],
        "decimal(20,3)": [Decimal("-1.250"), Decimal("12345678901234567.891")],
        "string": ["", "naïve\u0000x"],
        "binary": [b"", b"\x00\xff"],
        "date": [dt.date(1960, 1, 2), dt.date(2026, 11, 21)],
        "timestamp": [dt.datetime(1969, 5, 6, 7, 8, 9, 10, utc), dt.datetime(2026, 1, 1, tzinfo=utc)],
        "timestamp_ntz": [dt.datetime(1969, 5, 6, 7, 8, 9, 10), dt.datetime(2026, 1, 1)],
    }
    names = [f"c{i}" for i in range(len(samples))]
    stream = make_stream(", ".join(f"{n} {t}" for n, t in zip(names, samples, strict=True)))
    rows = [tuple(v[i] for v in samples.values()) for i in (0, 1)] + [tuple(None for _ in samples)]
    stream.add(rows)
    stream.add(rows)
    values = {f"max_{n}": S.max(n) for n in names}
    last = {f"last_{n}": S.last(n, by="c11") for n in names}
    query = start(aggregate(stream.read(), by=names, operator="types", n=S.count(), **values, **last), stream)
    settle(query)
    for row in rows:
        got = client.get("types", row)
        assert got is not None, row
        assert got["n"] == 2
        assert [got[f"max_{n}"] for n in names] == list(row)
        assert [got[f"last_{n}"] for n in names] == list(row)


def test_negative_zero_and_nan_are_one_key_each(
    make_stream: Callable[..., Stream], client: QueryableStateClient
) -> None:
    stream = make_stream("k double, v long")
    nan = float("nan")
    stream.add([(0.0, 1), (-0.0, 1), (nan, 1)])
    stream.add([(-0.0, 1), (nan, 1), (-nan, 1)])
    query = start(aggregate(stream.read(), by="k", operator="floats", n=S.count()), stream)
    settle(query)
    assert client.get_many("floats", [0.0, -0.0, nan])["n"].to_pylist() == [3, 3, 3]


@pytest.mark.matrix
def test_restarted_query_continues_from_its_checkpoint(stream: Stream, client: QueryableStateClient) -> None:
    expected: dict[int, float] = defaultdict(float)
    for round_ in range(3):
        for _ in range(2):
            rows = [(k, float(k + round_)) for k in range(50)]
            for k, v in rows:
                expected[k] += v
            stream.add(rows)
        query = start(aggregate(stream.read(), by="k", operator="again", total=S.sum("v")), stream)
        settle(query)
        table = client.get_many("again", list(expected))
        assert dict(zip(table["k"].to_pylist(), table["total"].to_pylist(), strict=True)) == expected
        query.stop()
    # Each run begins by making what is there its own record, and a task that Spark had to run again adds a manifest as
    # well.
    versions = [m["version"] for m in manifests(stream)]
    assert versions == sorted(versions)
    assert set(versions) == {1, 2, 3, 4, 5, 6}


def test_a_stopped_query_is_answered_on_until_it_runs_again(stream: Stream, client: QueryableStateClient) -> None:
    stream.add([(1, 1.0)])
    query = start(aggregate(stream.read(), by="k", operator="stays", n=S.count()), stream)
    settle(query)
    query.stop()
    wait_until(lambda: [o["ended"] for o in client.operators() if o["operator"] == "stays"] == [True])
    assert client.get("stays", 1) == {"n": 1}
    assert list(client.watch("stays", timeout=2.0)) == []
    stream.add([(1, 1.0)])
    query = start(aggregate(stream.read(), by="k", operator="stays", n=S.count()), stream)
    settle(query)
    assert client.get("stays", 1) == {"n": 2}
    assert [o["ended"] for o in client.operators() if o["operator"] == "stays"] == [False]
    query.stop()


def test_results_do_not_depend_on_the_number_of_partitions(
    make_stream: Callable[..., Stream], client: QueryableStateClient
) -> None:
    rng = np.random.default_rng(5)
    frame = pd.DataFrame({"k": rng.integers(0, 300, 5000), "v": rng.normal(size=5000)})
    answers = []
    for n in (1, 7):
        stream = make_stream()
        for part in np.array_split(frame.sample(frac=1, random_state=n), 3):
            stream.add(part)
        query = start(
            aggregate(
                stream.read(),
                by="k",
                operator=f"spread{n}",
                num_partitions=n,
                n=S.count(),
                t=S.sum("v"),
                lo=S.min("v"),
                f=S.first("v", by="v"),
            ),
            stream,
        )
        settle(query)
        answers.append(client.get_many(f"spread{n}", list(range(300))).to_pandas())
        query.stop()
    pd.testing.assert_frame_equal(answers[0], answers[1], rtol=1e-9)
    wanted = frame.groupby("k").v.agg(["count", "sum", "min"])
    np.testing.assert_allclose(answers[0][["n", "t", "lo"]].to_numpy(), wanted.to_numpy(), rtol=1e-9)


@pytest.mark.matrix
@pytest.mark.spark42
def test_every_operator_runs_all_its_partitions_in_every_batch(make_stream: Callable[..., Stream]) -> None:
    """After an operator without output, with an empty side of a union, and in an empty batch."""
    stream, quiet = make_stream(), make_stream()
    df = stream.read().union(quiet.read().where("k < 0"))
    first = aggregate(df, by="k", operator="first", num_partitions=3, v=S.sum("v"))
    nothing = first.where("v > 1e9")
    second = aggregate(nothing, by="k", operator="second", num_partitions=4, n=S.count())
    for i in range(4):
        stream.add([(i, 1.0)])
    quiet.add([(5, 1.0)])
    stream.add([(5, 2e9)])
    run_all(second, stream)
    made = manifests(stream)
    assert len(made) >= 5
    for manifest in made:
        counted = {name: len(entry["partitions"]["attempt"]) for name, entry in manifest["operators"].items()}
        assert counted == {"first": 3, "second": 4}, manifest["version"]


def test_state_may_be_stored_outside_the_checkpoint(spark: Any, stream: Stream, tmp_path: Path) -> None:
    spark.conf.set("spark.statestore.location", str(tmp_path / "elsewhere"))
    try:
        stream.add([(1, 1.0)])
        run_all(aggregate(stream.read(), by="k", operator="away", n=S.count()), stream)
    finally:
        spark.conf.unset("spark.statestore.location")
    assert list((tmp_path / "elsewhere").glob("*/manifests/*.json"))
    assert not Path(stream.checkpoint, "statestore").exists()


@pytest.mark.spark42
def test_pyspark_workers_do_not_join_ray_and_hosts_take_no_cpu(stream: Stream) -> None:
    stream.add([(1, 1.0)])
    seen: list[Any] = []
    df = aggregate(stream.read(), by="k", operator="light", n=S.count())

    def modules(batches: Any) -> Any:
        import sys

        for batch in batches:
            yield pa.record_batch(
                {"joined": [("ray" in sys.modules and sys.modules["ray"].is_initialized())] * batch.num_rows}
            )

    query = (
        df.mapInArrow(modules, "joined boolean")
        .writeStream.option("checkpointLocation", stream.checkpoint)
        .foreachBatch(lambda b, n: seen.extend(r.joined for r in b.collect()))
        .start()
    )
    settle(query)
    assert seen == [False]
    executors = 0 if IS_ATTACHED else 2  # of RayDP: actors with a CPU each
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"] - executors


def test_output_goes_to_any_sink(stream: Stream, spark: Any, tmp_path: Path) -> None:
    stream.add([(1, 1.0), (2, 2.0)])
    df = aggregate(stream.read(), by="k", operator="sink", n=S.count(), last=S.last("v", by="v")).withColumn(
        "m", F.col("n") * 2
    )
    query = (
        df.writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", stream.checkpoint)
    ).start()
    settle(query)
    query.stop()
    assert sorted(tuple(r) for r in spark.read.parquet(str(tmp_path / "out")).collect()) == [
        (1, 1, 1.0, 2),
        (2, 1, 2.0, 2),
    ]


def test_the_token_is_not_in_sparks_event_log(spark: SparkSession, tmp_path: Path) -> None:
    context = spark.sparkContext
    name = executor.TOKEN
    assert context.getLocalProperty(name) == current_cluster().token
    jvm: Any = context._jvm
    log = jvm.org.apache.spark.scheduler.EventLoggingListener(
        "app", jvm.scala.Option.empty(), jvm.java.net.URI(tmp_path.as_uri()), context._jsc.sc().conf()
    )
    properties = jvm.java.util.Properties()
    properties.setProperty(name, "the secret")
    written = log.redactProperties(properties).getProperty(name)
    assert "secret" not in written
    assert "redacted" in written


@pytest.mark.spark42_only
@pytest.mark.parametrize("output_mode", ["update", "complete"])
def test_aggregate_over_all_rows_emits_the_same_as_spark(stream: Stream, output_mode: str) -> None:
    """The first batch and the third have no rows behind the filter."""
    given = stream.read().where("v > 0")
    found: dict[str, list[Any]] = {"ours": [], "spark": []}

    def started(name: str, df: DataFrame, mode: str) -> Any:
        def take(batch: DataFrame, _: int) -> None:
            found[name].append([tuple(row) for row in batch.collect()])

        return (
            df.writeStream.outputMode(mode)
            .foreachBatch(take)
            .option("checkpointLocation", f"{stream.checkpoint}/{name}")
        )

    ours = aggregate(given, by=[], operator="everything", output_mode=output_mode, n=S.count(), total=S.sum("v"))
    spark = given.groupBy().agg(F.count("*").alias("n"), F.sum("v").alias("total"))
    assert ours.columns == spark.columns
    queries = [started("ours", ours, "append").start(), started("spark", spark, output_mode).start()]
    for rows in ([(1, -1.0)], [(1, 2.0), (2, 3.0)], [(1, -1.0)], [(3, 4.0)]):
        stream.add(rows)
        for query in queries:
            query.processAllAvailable()
    settle(queries[0])
    assert found["ours"] == found["spark"] == [[(0, None)], [(2, 5.0)], [(2, 5.0)], [(3, 9.0)]]
    assert QueryableStateClient.connect().get("everything", True) == {"n": 3, "total": 9.0}
