"""Wrong use: said while the DataFrame is built, when the query starts, or by init_spark."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from backends.formats.manifest import seal, unseal
from coordinator_actor.durable.manifests import QueryFile
from spark_bridge import aggregate, attach, deduplicate, init_spark, join, state_as_of, state_table
from spark_bridge import functions as S
from spark_bridge.exceptions import InvalidOperatorError, SessionError
from spark_bridge.session.current import current_cluster
from tests.spark_bridge.conftest import Stream, remove_checkpoint, wait_until

pytestmark = pytest.mark.spark


def start(df: DataFrame, stream: Stream, **options: str) -> Any:
    writer = df.writeStream.format("noop").outputMode("append").option("checkpointLocation", stream.checkpoint)
    for name, value in options.items():
        writer = writer.option(name, value)
    return writer.start()


def refusal(df: DataFrame, stream: Stream, **options: str) -> str:
    """What query.exception() says; and no state may have been touched."""
    before = sorted(p.name for p in Path(stream.checkpoint, "statestore").rglob("*.changelog*"))
    query = start(df, stream, **options)
    with pytest.raises(Exception, match=r"."):
        query.processAllAvailable()
    assert sorted(p.name for p in Path(stream.checkpoint, "statestore").rglob("*.changelog*")) == before
    return str(query.exception())


@pytest.fixture
def typed(make_stream: Callable[..., Stream]) -> Stream:
    return make_stream("k long, s string, v double, m map<string,int>, t timestamp")


@pytest.mark.spark42
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "nope", "n": S.count()}, r"by='nope'.*does not exist.*k, s, v, m, t"),
        ({"by": [], "n": S.count(), "num_partitions": 2}, "in one partition"),
        ({"by": [], "n": S.count(), "output_mode": "append"}, "no key has a watermark"),
        ({"by": [], "all_rows": S.count()}, "name of a key column"),
        ({"by": ["k", "k"], "n": S.count()}, "twice"),
        ({"by": "m", "n": S.count()}, r"map<string,int>.*cannot be a key"),
        ({"by": "k"}, "at least one output"),
        ({"by": "k", "n": S.sum("nope")}, r"nope.*does not exist"),
        ({"by": "k", "n": S.sum("s")}, "type string, which sum does not take"),
        ({"by": "k", "n": S.max("m")}, "which max does not take"),
        ({"by": "k", "n": S.last("s")}, "event time"),
        ({"by": "k", "n": S.last("s", by="m")}, "no order"),
        ({"by": "k", "k": S.count()}, "name of a key column"),
        ({"by": "k", "n": "count"}, "not an aggregate function"),
        ({"by": "k", "n": S.count(), "num_partitions": 0}, "positive integer"),
        ({"by": "k", "n": S.count(), "num_partitions": 5000}, "key groups, 1024"),
        ({"by": "k", "n": S.count(), "output_mode": "overwrite"}, "output_mode='overwrite'"),
        ({"by": "k", "n": S.count(), "operator": "a/b"}, "cannot be the name of an operator"),
        ({"by": "k", "n": S.count(), "index": "s"}, "index='s': the operator has no such column; it has 'k', 'n'"),
        ({"by": "k", "n": S.count(), "index": ["n", "n"]}, "names a column twice"),
        ({"by": "k", "index": S.count()}, "An output cannot be called index"),
        (
            {"by": "k", "n": S.collect_set("s"), "index": "n"},
            "index='n': the column is list.*, which can have no index",
        ),
        ({"by": ["k", S.window("t", "1 hour")], "n": S.count(), "index": "window"}, "is struct.*can have no index"),
        ({"by": ["k", S.session_window("t", "1 hour")], "n": S.count(), "index": "n"}, "no index can have them"),
        (
            {"by": "k", "n": S.count().rolling("1 hour"), "event_time": "t", "index": "k"},
            "horizons: their values change with time",
        ),
    ],
)
def test_errors_in_the_dataframe_are_raised_while_building_it(
    typed: Stream, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOperatorError, match=f"(?s){message}"):
        aggregate(typed.read(), **{"operator": "wrong", **arguments})


@pytest.mark.spark42
def test_columns_are_given_by_their_names(typed: Stream) -> None:
    df = typed.read()
    other: Any = F.col("k")
    for call in (
        lambda: S.sum(other),
        lambda: S.count(other),
        lambda: S.last("s", by=other),
        lambda: S.top_k(other, 3),
        lambda: S.merge(other, state="n long", partial=len, merge=len),  # type: ignore[arg-type]
        lambda: S.window(other, "1 minute"),
        lambda: S.session_window(other, "1 minute"),
        lambda: aggregate(df, by="k", operator="o", event_time=other, n=S.count().rolling("1 hour")),
        lambda: deduplicate(df, other, operator="o"),
        lambda: deduplicate(df, [other], operator="o"),
        lambda: join(df, df, on=other, operator="o"),
        lambda: join(df, df, on=["s", other], operator="o"),
        lambda: join(df, df.select("k"), on="k", operator="o", within=("0 seconds", "1 hour"), left_time=other),
        lambda: state_as_of(df.sparkSession.range(1), "nowhere", "o", on="id", time=other),
    ):
        with pytest.raises(InvalidOperatorError, match=r"'k'.* is not the name of a column: give the column's name"):
            call()
    for by in (other, ["s", other]):
        with pytest.raises(InvalidOperatorError, match=r"by=Column.*'k'.* is not a key; give column names"):
            aggregate(df, by=by, operator="o", n=S.count())
    with pytest.raises(InvalidOperatorError, match=r"index=.* must name the columns to index"):
        aggregate(df, by="k", operator="o", index=other, n=S.count())


@pytest.mark.spark42
def test_a_batch_dataframe_is_pointed_to_group_by(spark: Any) -> None:
    with pytest.raises(InvalidOperatorError, match="groupBy"):
        aggregate(spark.range(3), by="id", operator="batch", n=S.count())


@pytest.mark.spark42
def test_an_operator_name_used_twice_in_a_chain(stream: Stream) -> None:
    once = aggregate(stream.read(), by="k", operator="same", v=S.sum("v"))
    with pytest.raises(InvalidOperatorError, match="'same' is used twice"):
        aggregate(once, by="k", operator="same", n=S.count())


def test_an_operator_name_used_on_both_sides_of_a_union(stream: Stream) -> None:
    stream.add([(1, 1.0)])
    side = aggregate(stream.read(), by="k", operator="both", v=S.sum("v")).repartition(2)
    assert "'both' is used twice" in refusal(side.union(side), stream)


@pytest.mark.spark42
def test_event_time_comes_from_the_watermark(typed: Stream) -> None:
    df = aggregate(typed.read().withWatermark("t", "1 hour"), by="k", operator="marked", s=S.last("s"))
    assert df.columns == ["k", "s"]


def test_no_checkpoint_location(stream: Stream) -> None:
    stream.add([(1, 1.0)])
    query = aggregate(stream.read(), by="k", operator="o", n=S.count()).writeStream.format("console").start()
    with pytest.raises(Exception, match="checkpointLocation"):
        query.processAllAvailable()


@pytest.mark.matrix
@pytest.mark.spark42_only
def test_async_progress_tracking(stream: Stream, spark: Any) -> None:
    stream.add([(1, 1.0)])
    message = refusal(
        aggregate(stream.read(), by="k", operator="o", n=S.count()),
        stream,
        asyncProgressTrackingEnabled="true",
    )
    named = re.search(r"""remove \.option\("(\w+)", "true"\)""", message)
    assert named is not None and named[1] == "asyncProgressTrackingEnabled"
    query = start(aggregate(stream.read(), by="k", operator="o", n=S.count()), stream)
    query.processAllAvailable()
    query.stop()


@pytest.mark.spark42
def test_a_continuous_trigger(spark: Any, tmp_path: Path) -> None:
    """Spark itself refuses a shuffle there; if it ever stops doing so, the listener refuses."""
    rates = spark.readStream.format("rate").load().withColumnRenamed("value", "k")
    df = aggregate(rates, by="k", operator="o", n=S.count())
    writer = df.writeStream.format("console").option("checkpointLocation", str(tmp_path / "ck"))
    with pytest.raises(Exception, match=r"(?i)continuous"):
        writer.trigger(continuous="1 second").start().processAllAvailable()


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("spark.statestore.location", "webhdfs://somewhere/state", "state_location="),
        ("spark.statestore.storagePrices", "putt=0.005", "spark.statestore.storagePrices: 'putt=0.005' is not a price"),
    ],
)
def test_invalid_setting_is_rejected(stream: Stream, spark: Any, setting: str, value: str, remedy: str) -> None:
    stream.add([(1, 1.0)])
    spark.conf.set(setting, value)
    try:
        message = refusal(aggregate(stream.read(), by="k", operator="o", n=S.count()), stream)
    finally:
        spark.conf.unset(setting)
    assert value in message and remedy in message


def test_local_files_on_a_cluster_of_several_machines(
    stream: Stream, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.add([(1, 1.0)])
    monkeypatch.setattr(current_cluster(), "machines", lambda: ["10.0.0.1", "10.0.0.2"])
    message = refusal(aggregate(stream.read(), by="k", operator="o", n=S.count()), stream)
    assert "2 machines" in message
    named = re.search(r"if all machines share that directory, set (\S+)=true\.", message)
    assert named is not None
    spark.conf.set(named[1], "true")
    try:
        query = start(aggregate(stream.read(), by="k", operator="o", n=S.count()), stream)
        query.processAllAvailable()
        query.stop()
    finally:
        spark.conf.unset(named[1])


@pytest.mark.spark42_only
@pytest.mark.parametrize("remedy", ["Unset", "move the state there"])
def test_checkpoint_with_its_own_state_is_not_started_elsewhere(
    stream: Stream, spark: Any, tmp_path: Path, remedy: str
) -> None:
    def go_on() -> None:
        stream.add([(1, 1.0)])
        query = start(aggregate(stream.read(), by="k", operator="o", num_partitions=2, n=S.count()), stream)
        query.processAllAvailable()
        query.stop()

    go_on()
    spark.conf.set("spark.statestore.location", str(tmp_path / "base"))
    try:
        stream.add([(1, 1.0)])
        message = refusal(aggregate(stream.read(), by="k", operator="o", num_partitions=2, n=S.count()), stream)
        printed = re.search(r"\((\S+)\), but (\S+) points to (\S+): .*Unset \2, or move the state there", message)
        assert printed is not None, message
        if remedy == "Unset":
            spark.conf.unset(printed[2])
        else:
            target = Path(printed[3].removeprefix("file:"))
            target.parent.mkdir(exist_ok=True)
            Path(printed[1].removeprefix("file:")).rename(target)
        go_on()
        rows = state_table(stream.checkpoint, "o", state_location=str(tmp_path / "base")).to_pylist()
        assert [row["n"] for row in rows] == [3]
    finally:
        spark.conf.unset("spark.statestore.location")


def test_foreign_checkpoint_is_rejected_and_unchanged(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream("k long, j long, v double")

    def made(by: Any = "k", operator: str = "o", n: Any = None) -> DataFrame:
        return aggregate(stream.read(), by=by, operator=operator, num_partitions=3, n=n or S.count())

    def go_on() -> None:
        stream.add([(1, 1, 1.0)])
        query = start(made(), stream)
        query.processAllAvailable()
        query.stop()

    go_on()
    stream.add([(1, 1, 1.0)])
    state = Path(stream.checkpoint, "statestore")
    for df, words in [
        (made(by=["k", "j"]), ["key", "long"]),
        (made(n=S.sum("v")), ["n.count", "n.sum"]),
        (made(operator="p"), ["'o'", "'p'"]),
    ]:
        message = refusal(df, stream)
        for word in words:
            assert word in message, message
    path = state / "query.json"
    right = path.read_bytes()
    path.write_bytes(seal(msgspec.structs.replace(unseal(right, QueryFile, str(path)), query_id="another")))
    assert "another" in refusal(made(), stream)
    path.write_bytes(right)
    go_on()

    # Lost state does not restart from empty.
    remove_checkpoint(state)
    stream.add([(1, 1, 1.0)])
    assert "version 3" in refusal(made(), stream)


@pytest.mark.spark42
def test_restart_that_adds_or_removes_a_source_names_the_modes(make_stream: Callable[..., Stream]) -> None:
    """Spark only asserts that the checkpoint has as many sources as the query."""
    stream = make_stream("k long, t timestamp")
    df = stream.read().withWatermark("t", "1 minute")

    def made(output_mode: str) -> DataFrame:
        return aggregate(df, by=["t", "k"], operator="o", output_mode=output_mode, num_partitions=2, n=S.count())

    stream.add([(1, dt.datetime(2024, 1, 1))])
    query = start(made("update"), stream)
    query.processAllAvailable()
    query.stop()
    stream.add([(1, dt.datetime(2024, 1, 2))])
    message = refusal(made("append"), stream)
    assert "STATE_STORE_INVALID_CONFIG_AFTER_RESTART" in message
    assert "2 sources now" in message and "has 1" in message and 'output_mode="append"' in message
    # Spark itself would run this one, whose sources are as they were, until its tasks raise the refusal.
    refused = start(aggregate(df, by=["t", "k"], operator="p", num_partitions=2, n=S.count()), stream)
    with pytest.raises(Exception, match="'p'"):
        refused.awaitTermination()
    begun = {path.name for path in Path(stream.checkpoint, "offsets").iterdir()}
    assert begun == {"0", ".0.crc"}, "the query that was refused has begun a batch"
    query = start(made("update"), stream)
    query.processAllAvailable()


@pytest.mark.spark42_only
def test_offsets_of_format_2_give_the_same_error(make_stream: Callable[..., Stream], spark: Any) -> None:
    """They have no line for a source that has given nothing, so that they do not tell how many there are."""
    stream, second = make_stream("k long, t timestamp"), make_stream("k long, t timestamp")
    df = stream.read().withWatermark("t", "1 minute")

    def made(output_mode: str) -> DataFrame:
        counts = aggregate(df, by=["t", "k"], operator="o", output_mode=output_mode, num_partitions=2, n=S.count())
        return counts.select("t", "k").union(second.read().select("t", "k"))

    offsets = Path(stream.checkpoint, "offsets")
    stream.add([(1, dt.datetime(2024, 1, 1))])
    if spark.version >= "4":
        spark.conf.set("spark.sql.streaming.offsetLog.formatVersion", "2")
    try:
        query = start(made("append"), stream)
        wait_until(lambda: query.lastProgress is not None)
        query.stop()
        for rows in ([], [(2, dt.datetime(2024, 1, 2))]):
            if rows:
                second.add(rows)
                query = start(made("append"), stream)
                wait_until(lambda: any(p.read_text().count("logOffset") == 2 for p in offsets.glob("[0-9]*")))
                query.stop()
            message = refusal(made("update"), stream)
            assert "STATE_STORE_INVALID_CONFIG_AFTER_RESTART" in message and 'output_mode="append"' in message
    finally:
        if spark.version >= "4":
            spark.conf.unset("spark.sql.streaming.offsetLog.formatVersion")


@pytest.mark.spark42_only
def test_a_source_that_changes_its_place_is_refused(make_stream: Callable[..., Stream]) -> None:
    stream, second = make_stream("k long, t timestamp"), make_stream("k long, t timestamp")

    def made(*output_modes: str) -> DataFrame:
        both = [
            aggregate(
                one.read().withWatermark("t", "1 minute"),
                by=["t", "k"],
                operator=f"o{i}",
                output_mode=output_mode,
                num_partitions=2,
                n=S.count(),
            )
            for i, (one, output_mode) in enumerate(zip((stream, second), output_modes, strict=True))
        ]
        return both[0].repartition(1).union(both[1].repartition(1))

    for one in (stream, second):
        one.add([(1, dt.datetime(2024, 1, 1))])
    query = start(made("append", "update"), stream)
    wait_until(lambda: query.lastProgress is not None)
    query.stop()
    message = refusal(made("update", "append"), stream)
    assert "at place 3 among its sources now" in message and "has them at place 2" in message


@pytest.mark.slow
def test_a_session_without_the_listener(stream: Stream, spark: Any) -> None:
    stream.add([(1, 1.0)])
    other = Stream(spark.newSession(), stream.root, stream.schema)
    df = aggregate(other.read(), by="k", operator="o", num_partitions=2, n=S.count())
    assert "listener" in refusal(df, stream)


def test_a_setting_that_loses_tasks_is_refused(stream: Stream, spark: Any) -> None:
    stream.add([(1, 1.0)])
    rules = spark.conf.get("spark.sql.optimizer.excludedRules")
    spark.conf.unset("spark.sql.optimizer.excludedRules")
    spark.conf.set("spark.sql.optimizer.excludedRules", "")
    try:
        assert "PropagateEmptyRelation" in refusal(aggregate(stream.read(), by="k", operator="o", n=S.count()), stream)
    finally:
        spark.conf.set("spark.sql.optimizer.excludedRules", rules)


@pytest.mark.spark42
def test_a_second_session_in_one_process(spark: Any) -> None:
    with pytest.raises(SessionError, match="already"):
        init_spark("second")
    with pytest.raises(SessionError, match="already"):
        attach(spark)
