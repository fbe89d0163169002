"""``join`` and ``join_asof`` as streams: the rows of Spark's own join and of pandas, from the same files."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from spark_bridge import QueryableStateClient, aggregate, join, join_asof, restore_savepoint, trigger_savepoint
from spark_bridge import functions as S
from spark_bridge.exceptions import InvalidOperatorError
from tests.effort import only_thorough
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import Stream, settle, wait_until
from tests.spark_bridge.streams.flow import backend, kept_by
from tests.spark_bridge.streams.running import Running, flat, start

pytestmark = [pytest.mark.spark]

START = dt.datetime(2024, 3, 9, 23, 50, tzinfo=dt.timezone.utc)
SCHEMAS = ("k long, lt timestamp, a long", "k long, b string, rt timestamp")
WITHIN = ("-10 seconds", "30 seconds")
FILES = 4


class Sides:
    """Two streams whose files are a minute apart. Rows are either late or not, whichever batch has raised the watermark
    last: those without data do it as they like.
    """

    def __init__(self, make_stream: Callable[..., Stream], seed: int = 3) -> None:
        self.streams = [make_stream(schema) for schema in SCHEMAS]
        self.random = np.random.default_rng(seed)
        self.files = 0

    def add(self, files: int = 1, rows: int = 60) -> None:
        """Add files of both sides."""
        for _ in range(files):
            for side, stream in enumerate(self.streams):
                offsets = self.random.integers(-15, 60, rows)
                if self.files >= 2:
                    offsets[:5] = self.random.integers(-300, -90, 5)
                offsets[-1] = 59
                stream.add([self.row(side, self.files * 60 + int(offset)) for offset in offsets])
            self.files += 1

    def row(self, side: int, at: int) -> tuple[Any, ...]:
        """A row of a side; some have no key."""
        key = None if self.random.random() < 0.05 else int(self.random.integers(0, 12))
        time, value = START + dt.timedelta(seconds=at), int(self.random.integers(1 << 40))
        return (key, time, value) if side == 0 else (key, str(value), time)

    def all_planned(self, checkpoint: str) -> bool:
        """Whether all files of both sides are in some batch."""
        logs = [path for side in (0, 1) for path in Path(checkpoint, "sources", str(side)).glob("[0-9]*")]
        return sum(log.read_text().count(".parquet") for log in logs) >= sum(s.files for s in self.streams)

    def end(self) -> None:
        """Add rows far ahead, which nothing matches."""
        for side, stream in enumerate(self.streams):
            time = START + dt.timedelta(hours=3 + side)
            stream.add([(99, time, 0) if side == 0 else (98, "0", time)])

    def read(self, how: str) -> tuple[DataFrame, DataFrame]:
        """Both streams with their watermarks."""
        left, right = (stream.read() for stream in self.streams)
        if how == "full":  # where null matches null in Spark
            right = right.where("k is not null")
        return left.withWatermark("lt", "20 seconds"), right.withWatermark("rt", "25 seconds")

    def native(self, how: str) -> DataFrame:
        """Spark's own join."""
        left, right = self.read(how)
        right = right.withColumnRenamed("k", "rk")
        condition = (
            (F.col("k") == F.col("rk"))
            & (F.col("rt") >= F.col("lt") - F.expr("interval 10 seconds"))
            & (F.col("rt") <= F.col("lt") + F.expr("interval 30 seconds"))
        )
        joined = left.join(right, condition, "left" if how == "left_anti" else how)
        if how == "left_anti":  # Spark has none of streams
            joined = joined.where("rt is null")
        if how in ("left_semi", "left_anti"):
            return joined.select("k", "lt", "a")
        return joined.select(F.coalesce("k", "rk").alias("k"), "lt", "a", "b", "rt")

    def ours(self, how: str, **options: Any) -> DataFrame:
        """The same join by the state store."""
        return join(*self.read(how), on="k", how=how, within=WITHIN, operator="joined", **options)


@pytest.fixture
def sides(make_stream: Callable[..., Stream]) -> Sides:
    return Sides(make_stream)


def begin(sides: Sides, df: DataFrame, name: str) -> Running:
    return start(df, sides.streams[0], name)


def same(ours: Running, native: Running, at_least: int = 15) -> Counter[Any]:
    """Both give the same rows in the end."""
    expected = flat(native.finish())
    assert sum(expected.values()) > at_least
    found = flat(ours.finish(sum(expected.values())))
    assert not found - expected, f"too many: {found - expected}"
    assert not expected - found, f"missing: {expected - found}"
    return found


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", *map(only_thorough, ("inner", "left", "right", "left_semi", "left_anti"))])
def test_rows_are_those_of_sparks_own_join(sides: Sides, how: str) -> None:
    sides.add(FILES)
    sides.end()
    same(begin(sides, sides.ours(how), "ours"), begin(sides, sides.native(how), "native"))


@pytest.mark.thorough  # otherwise: operators/test_join_output_time.py
def test_aggregate_after_a_join_equals_sparks(sides: Sides) -> None:
    """Rows that have waited are not late behind the join, and windows come when no more rows can."""
    sides.add(FILES)
    sides.end()
    window = F.window("lt", "1 minute").alias("w")
    native = sides.native("inner").drop("rt").groupBy("k", window).agg(F.count("b"))
    joined = sides.ours("inner", event_time_column="lt")
    by = ["k", S.window("lt", "1 minute").alias("w")]
    ours = aggregate(joined, by=by, operator="counts", output_mode="append", n=S.count())
    flat_window = ("k", "w.start", "w.end")
    columns = (*flat_window, "count(b)"), (*flat_window, "n")
    same(begin(sides, ours.select(*columns[1]), "ours"), begin(sides, native.select(*columns[0]), "native"))


def on_time(sides: Sides, side: int) -> list[dict[str, Any]]:
    """The rows of a side that are not late, and have a key."""
    rows = []
    time = ("lt", "rt")[side]
    for number in range(sides.files):
        (file,) = (sides.streams[side].root / "in").glob(f"{number:05d}.parquet")
        late = START + dt.timedelta(seconds=(number - 2) * 60 + 34) if number > 1 else START - dt.timedelta(days=1)
        rows += [r for r in pq.read_table(file).to_pylist() if r["k"] is not None and r[time] > late]
    return rows


def waiting_left(sides: Sides) -> set[tuple[Any, ...]]:
    """The rows of the left side that wait behind the last file: neither late, nor passed by the watermark."""
    # The last batch has the watermark that the files before it have made; a row matches times up to 30 s later.
    gone = START + dt.timedelta(seconds=(sides.files - 2) * 60 + 34 - 30)
    return {(r["k"], r["lt"], r["a"]) for r in on_time(sides, 0) if r["lt"] >= gone}


def check_waiting(sides: Sides, client: QueryableStateClient, query: StreamingQuery) -> None:
    """Queries see what waits: by key, by scan and by SQL."""
    expected = waiting_left(sides)
    assert len(expected) > 40
    name = str(query.id)
    found = {
        (key, row["lt"], row["a"])
        for key in {row[0] for row in expected}
        for row in client.get("joined", key, name, "left")
    }
    assert found == expected
    scanned = client.scan("joined", "left", query=name).to_pylist()
    assert {(r["k"], r["lt"], r["a"]) for r in scanned} == expected
    assert client.get("joined", 4711, name, "left") in (None, [])


def last_batch(query: StreamingQuery) -> int:
    """The number of the last batch that has ended."""
    return int((query.lastProgress or {"batchId": -1})["batchId"])


def go_on(sides: Sides, how: str, checkpoint: str, partitions: int, provider: str, found: list[Any]) -> StreamingQuery:
    """Start on a checkpoint, with these partitions and this backend, and process all files."""

    def keep(batch: DataFrame, _: int) -> None:
        found.extend(tuple(r) for r in batch.collect())

    with backend(provider):
        writer = sides.ours(how, num_partitions=partitions).writeStream.foreachBatch(keep)
        query = writer.option("checkpointLocation", checkpoint).start()
    if how in ("inner", "left_semi"):
        settle(query)
    else:  # a batch a second, so that there is always something available
        wait_until(lambda: query.exception() or sides.all_planned(checkpoint))
        planned = last_batch(query)
        wait_until(lambda: query.exception() or last_batch(query) > planned + 1)
    assert kept_by(checkpoint) == {provider}
    return query


@pytest.mark.spark42_only
@pytest.mark.parametrize("how", ["inner", *map(only_thorough, ("full", "left_semi", "left_anti"))])
def test_rescaled_restarted_saved_and_queried(sides: Sides, tmp_path: Path, how: str) -> None:
    client = QueryableStateClient.connect()
    checkpoint = str(tmp_path / "ck")
    found: list[Any] = []
    sides.add(2)
    go_on(sides, how, checkpoint, 2, "rocksdb", found).stop()
    sides.add()
    query = go_on(sides, how, checkpoint, 3, "file", found)
    if how == "inner":
        check_waiting(sides, client, query)
    # A batch after the savepoint would repeat its output.
    saved = trigger_savepoint(query, str(tmp_path / "savepoints"), stop=True).result(PATIENCE)
    restored = str(tmp_path / "restored")
    restore_savepoint(saved, restored, num_partitions=1, backend="rocksdb")
    sides.add()
    query = go_on(sides, how, restored, 1, "rocksdb", found)
    if how == "inner":
        check_waiting(sides, client, query)
    query.stop()
    sides.end()
    expected = flat(begin(sides, sides.native(how), "native").finish())
    query = go_on(sides, how, restored, 4, "file", found)
    wait_until(lambda: query.exception() or len(found) >= sum(expected.values()))
    query.stop()
    assert Counter(found) == expected
    assert sum(expected.values()) > (15 if how == "left_anti" else 30)


def delays(left: pa.Table, right: pa.Table) -> pa.Table:
    """Half of the matches, with how much later the right row is, in seconds."""
    waited = pc.divide(pc.subtract(right["rt"].cast("int64"), left["lt"].cast("int64")), 1_000_000)
    rows = pa.table({"later": waited, "k": left["k"], "b": right["b"]})
    return rows.filter(pc.equal(pc.bit_wise_and(left["a"], 1), 0))


def test_apply_makes_the_output_of_matches(sides: Sides) -> None:
    sides.add(3)
    df = sides.ours("inner", apply=delays, output="k long, b string, later long")
    native = sides.native("inner").where("a % 2 = 0")
    native = native.select("k", "b", (F.col("rt").cast("long") - F.col("lt").cast("long")).alias("later"))
    found, expected = begin(sides, df, "ours").finish(), begin(sides, native, "native").finish()
    assert flat(found) == flat(expected)
    assert found


def test_rows_nearest_in_time_are_those_of_pandas(sides: Sides) -> None:
    sides.add(3)
    sides.end()
    left, right = sides.read("asof")
    df = join_asof(left, right, on="k", direction="nearest", tolerance="4 seconds", operator="nearest")
    frames = [pd.DataFrame(on_time(sides, side)) for side in (0, 1)]
    merged = pd.merge_asof(
        frames[0].sort_values("lt"),
        frames[1].sort_values(["rt", "b"]),
        left_on="lt",
        right_on="rt",
        by="k",
        direction="nearest",
        tolerance=pd.Timedelta("4 seconds"),
    )
    expected = Counter((r.k, r.a, None if pd.isna(r.b) else r.b) for r in merged.itertuples())
    without_key = sum(pq.read_table(f)["k"].null_count for f in (sides.streams[0].root / "in").glob("*.parquet"))
    rows = flat(begin(sides, df, "ours").finish(sum(expected.values()) + without_key))
    found = Counter({(k, a, b): n for (k, _, a, b, _), n in rows.items() if k is not None})
    assert found == expected
    assert sum(b is not None for _, _, b in expected.elements()) > 20


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "how": ({"how": "cross"}, "how='cross' is not one of 'inner'"),
    "no key": ({"on": []}, "names no key column"),
    "unknown key": ({"on": "nobody"}, "left=: .*'nobody': the column does not exist"),
    "other types": ({"on": "b"}, "has type bigint on the left side and string on the right side: cast"),
    "one name": ({"on": "k", "right": "both"}, "Both sides have columns named lt that are not keys: rename"),
    "durations": ({"within": ("1 hour", "now")}, "'now' is not a duration"),
    "order": ({"within": ("2 hours", "1 hour")}, "The first is greater than the second"),
    "one bound": ({"within": "1 hour"}, "must be two durations"),
    "outer, open": ({"how": "left", "within": ("1 hour", None)}, "give within= with its upper bound"),
    "right outer, open": ({"how": "right", "within": (None, "1 hour")}, "give within= with its lower bound"),
    "outer, no bounds": ({"how": "full", "within": None}, "needs to know when a row of the left side"),
    "times, no bounds": ({"within": None, "left_time": "lt"}, "give within= as well"),
    "no watermark": ({"right": "unmarked"}, "needs a watermark on a time column of the right side"),
    "time without one": ({"left_time": "a"}, "left_time='a' has no watermark"),
    "batch": ({"right": "batch"}, "right= is a batch DataFrame"),
    "apply alone": ({"apply": delays}, "apply= and output= go together"),
    "apply, semi": ({"apply": delays, "output": "n long", "how": "left_semi"}, "emits rows of the left side alone"),
    "output": ({"apply": delays, "output": "n lang"}, "output='n lang' is not a schema"),
    "name": ({"operator": "a/b"}, "operator="),
}


def test_wrong_use_is_refused_with_the_remedy(sides: Sides) -> None:
    left, right = sides.read("inner")
    rights = {
        "both": right.withColumn("lt", F.lit(1)),
        "unmarked": sides.streams[1].read(),
        "batch": sides.streams[0].spark.createDataFrame([], SCHEMAS[1]),
    }
    lefts = {"b": left.withColumn("b", F.lit(1).cast("long"))}
    for name, (changed, words) in REFUSED.items():
        options = {"on": "k", "within": WITHIN, "operator": "refused", **changed}
        of_left = lefts.get(str(options["on"]), left)
        with pytest.raises(InvalidOperatorError, match=words):
            join(of_left, rights.get(options.pop("right", ""), right), **options)
            pytest.fail(f"{name} was taken")


REFUSED_ASOF: dict[str, tuple[dict[str, Any], str]] = {
    "direction": ({"direction": "sideways"}, "direction='sideways' is not one of 'backward', 'forward', 'nearest'"),
    "tolerance": ({"tolerance": "-1 second"}, "tolerance='-1 second' is negative"),
    "time in the key": ({"on": ["k", "lt"], "right": "lt"}, "The key 'lt' has the watermark"),
    "no watermark": ({"right": "unmarked"}, "join_asof needs a watermark on a time column of the right side"),
}


def test_wrong_use_of_asof_is_refused_with_the_remedy(sides: Sides) -> None:
    left, right = sides.read("asof")
    rights = {"lt": right.withColumnRenamed("rt", "lt"), "unmarked": sides.streams[1].read()}
    for name, (changed, words) in REFUSED_ASOF.items():
        options = {"on": "k", "operator": "refused", **changed}
        with pytest.raises(InvalidOperatorError, match=words):
            join_asof(left, rights.get(options.pop("right", ""), right), **options)
            pytest.fail(f"{name} was taken")


def test_a_join_that_keeps_all_rows_warns(sides: Sides) -> None:
    left, right = sides.read("inner")
    for within, whose in (
        (None, "both sides"),
        ((None, "1 hour"), "the right side"),
        (("1 hour", None), "the left side"),
    ):
        with pytest.warns(UserWarning) as warned:
            join(left, right, on="k", within=within, operator="grows")
        (ours,) = [w for w in warned if "keeps all rows" in str(w.message)]
        assert f"keeps all rows of {whose} for ever" in str(ours.message)
        assert ours.filename == __file__
