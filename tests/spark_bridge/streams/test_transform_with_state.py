"""``transform_with_state`` end to end on RayDP: state of every kind, timers, TTL, restarts, quiet streams, chains."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from spark_bridge import (
    ArrowBatch,
    ArrowResult,
    ArrowStatefulProcessor,
    StatefulProcessor,
    aggregate,
    transform_with_state,
    transform_with_state_in_arrow,
    transform_with_state_in_pandas,
)
from spark_bridge import functions as S
from tests.effort import only_thorough
from tests.patience import HANG
from tests.spark_bridge.conftest import Stream, wait_until
from tests.spark_bridge.streams.processors import (
    BY,
    DELAY_MS,
    INITIAL,
    INPUT,
    OUTPUT,
    Commands,
    Model,
    PandasCommands,
    Writer,
    at,
    based_on,
    composite,
    drain,
    gather,
    ordered,
    random_batches,
    random_starts,
)

pytestmark = pytest.mark.spark


def commands_on(stream: Stream, processor: type = Commands, time_mode: str = "none", **options: Any) -> DataFrame:
    """A stream of commands, watermark included, through their processor."""
    transform = transform_with_state_in_pandas if issubclass(processor, PandasCommands) else transform_with_state
    return transform(
        stream.read().withWatermark("ts", f"{DELAY_MS} milliseconds"),
        BY,
        based_on(StatefulProcessor, processor, time_mode=time_mode),
        OUTPUT,
        operator="commands",
        time_mode=time_mode,
        **{"num_partitions": 3, **options},
    )


def process_all(df: DataFrame, stream: Stream) -> list[list[tuple[Any, ...]]]:
    """Run until all is processed, and stop; the output of each batch that gave some."""
    query, found = gather(df, stream.checkpoint)
    drain(query, stream.checkpoint, stream.files)
    query.stop()
    return [ordered(found[n]) for n in sorted(found) if found[n]]


def error_of(df: DataFrame, stream: Stream) -> str:
    """The error with which a query ends."""
    with pytest.raises(Exception) as raised:
        process_all(df, stream)
    return str(raised.value)


def answers(rows: list[tuple[Any, ...]]) -> list[tuple[int, str]]:
    return sorted((seq, found) for _, _, seq, found in rows)


# State -------------------------------------------------------------------------------------------------------------


@pytest.mark.spark42
def test_state_of_every_kind_and_type_is_kept_over_batches_and_a_restart(make_stream: Callable[..., Stream]) -> None:
    stream, write = make_stream(INPUT), Writer()
    long = "x" * 300_000
    stream.add(
        write(
            ("a", 1, "v.get"),
            ("a", 1, "v.exists"),
            ("a", 1, "v.clear"),
            ("a", 1, "v.update", 5, "five"),
            ("a", 1, "l.get"),
            ("a", 1, "l.put", 3, "p"),
            ("a", 1, "l.appendValue", None, None),
            ("a", 1, "l.appendList", 2, "q"),
            ("a", 1, "m.iterator"),
            ("a", 1, "m.updateValue", 1, "x"),
            ("a", 1, "m.updateValue", None, None),
            ("a", 1, "m.updateValue", 2, "x"),
            ("a", 1, "timer.times"),
            (None, None, "v.update", None, None),
            (None, None, "l.appendList", 200, "long"),
            (None, None, "m.fill", 200, "key"),
            (None, None, "l.appendValue", 1, long),
        )
    )
    stream.add(
        write(
            ("a", 1, "v.get"),
            ("a", 1, "l.get"),
            ("a", 1, "l.peek", 9, "r"),
            ("a", 1, "m.iterator"),
            ("a", 1, "m.getValue", None, "x"),
            ("a", 1, "m.getValue", None, "nobody"),
            (None, None, "v.exists"),
            (None, None, "v.get"),
            (None, None, "m.containsKey", None, "key199"),
            (None, None, "m.removeKey", None, "key0"),
            (None, None, "m.removeKey", None, "nobody"),
            (None, 1, "v.exists"),  # a key of its own
        )
    )
    five = (composite(5, "five"),)
    elements = [(0, "p"), (1, "p"), (2, "p"), (None, None), (0, "q"), (1, "q")]
    entries = [(("x",), (2, "x")), ((None,), (None, None))]
    first, second = process_all(commands_on(stream), stream)
    assert answers(first) == [
        (0, "v.get (None,)"),
        (1, "v.exists False"),
        (4, "l.get []"),
        (8, "m.iterator []"),
        (12, "timer.times (-1, -1)"),
    ]
    assert answers(second) == [
        (17, f"v.get {five!r}"),
        (18, f"l.get {elements!r}"),
        (19, f"l.peek {([(0, 'p'), (0, 'p'), (1, 'p')], elements[1:], elements[2:])!r}"),
        (20, f"m.iterator {entries!r}"),
        (21, "m.getValue ((2, 'x'),)"),
        (22, "m.getValue (None,)"),
        (23, "v.exists True"),
        (24, f"v.get {((None,) * 9,)!r}"),
        (25, "m.containsKey True"),
        (28, "v.exists False"),
    ]

    stream.add(
        write(
            ("a", 1, "l.get"),
            ("a", 1, "l.clear"),
            ("a", 1, "l.exists"),
            ("a", 1, "m.removeKey", None, "x"),
            ("a", 1, "m.removeKey", None, None),
            ("a", 1, "m.exists"),
            ("a", 1, "v.clear"),
            (None, None, "l.get"),
            (None, None, "m.keys"),
            (None, None, "m.values"),
            (None, None, "m.clear"),
        )
    )
    stream.add(
        write(
            ("a", 1, "v.exists"),
            ("a", 1, "l.exists"),
            ("a", 1, "m.exists"),
            (None, None, "m.exists"),
            (None, None, "m.iterator"),
        )
    )
    third, fourth = process_all(commands_on(stream), stream)
    found = dict(answers(third))
    assert found[29] == f"l.get {[*elements, (9, 'r')]!r}"
    assert [found[31], found[34]] == ["l.exists False", "m.exists False"]
    many = repr([*((i, "long") for i in range(200)), (1, long)])
    assert found[36].startswith("l.get [(0, 'long'), (1, 'long')") and f" {len(many)} " in found[36]
    keys = repr(sorted(((f"key{i}",) for i in range(1, 200)), key=repr))
    assert found[37].startswith("m.keys [('key1',), ('key10',)") and f" {len(keys)} " in found[37]
    assert found[38].startswith("m.values [(1, None), (10, None)")
    assert [text.split()[-1] for _, text in answers(fourth)] == ["False", "False", "False", "False", "[]"]


@pytest.mark.parametrize(
    ("processor", "time_mode"),
    [pytest.param(Commands, "eventTime", id="rows"), only_thorough(PandasCommands, "processingTime", id="pandas")],
)
def test_random_commands_give_what_a_plain_model_gives(
    make_stream: Callable[..., Stream], processor: type, time_mode: str
) -> None:
    """On Spark 4.2, ``test_same_as_spark`` compares with Spark itself."""
    stream = make_stream(INPUT)
    starts = random_starts(time_mode)
    initial = stream.spark.createDataFrame(starts, INITIAL)
    batches = random_batches(2, time_mode, 6)
    model, found = Model(time_mode), []
    model.start_with(starts)
    for part in (batches[:3], batches[3:]):
        for batch in part:
            stream.add(batch)
        found += process_all(commands_on(stream, processor, time_mode, initial_state=initial), stream)
    for number, batch in enumerate(batches):
        assert found[number] == model.run(batch), f"batch {number}"
    assert len(found) == len(batches)


# Time --------------------------------------------------------------------------------------------------------------


@pytest.mark.spark42
def test_event_time_timers_fire_by_the_watermark_on_a_quiet_stream_too(make_stream: Callable[..., Stream]) -> None:
    stream, write = make_stream(INPUT), Writer()
    stream.add(
        [
            *write(
                ("a", 1, "timer.registerTimer", 0),
                ("a", 1, "timer.registerTimer", 90_000),
                ("a", 1, "timer.registerTimer", 90_000),
                ("a", 1, "timer.registerTimer", 90_001),
                ("a", 1, "timer.registerTimer", 80_000),
                ("a", 1, "timer.deleteTimer", 80_000),
                ("a", 1, "timer.deleteTimer", 1),
                ("a", 1, "timer.listTimers"),
                ("b", 2, "timer.registerTimer", 120_000),
                ts=at(100),
            ),
        ]
    )
    stream.add(
        [
            *write(("c", 3, "timer.times"), ts=at(89)),
            *write(("c", 3, "timer.registerTimer", 89_500), ("c", 3, "timer.listTimers"), ts=at(95)),
        ]
    )
    stream.add(
        [
            *write(("c", 3, "v.exists"), ts=at(90)),  # as old as the watermark of the batch before: late
            *write(("c", 3, "l.exists"), ts=at(90.001)),
            *write(("c", 3, "m.exists"), ts=None),
            *write(("d", 4, "v.exists"), ts=at(130)),
        ]
    )
    query, found = gather(commands_on(stream, Commands, "EventTime"), stream.checkpoint)
    drain(query, stream.checkpoint, stream.files)
    assert [answers(map(tuple, found[n])) for n in range(3)] == [
        [(-1, "expired 0 at 0 True (None, [])"), (7, "timer.listTimers [0, 90000, 90001]")],
        [
            (-1, "expired 89500 at 90000 True (None, [])"),
            (-1, "expired 90000 at 90000 True (None, [(1, 'expired')])"),
            (9, "timer.times (90000, True)"),
            (11, "timer.listTimers [89500]"),
        ],
        [(13, "l.exists True"), (14, "m.exists False"), (15, "v.exists False")],
    ]
    # No more data: the watermark of the last batch with data is that of the next one, which has none.
    wait_until(lambda: any(found[n] for n in found if n > 2))
    assert answers(map(tuple, next(found[n] for n in sorted(found) if n > 2 and found[n]))) == [
        (-1, "expired 120000 at 120000 True (None, [])"),
        (-1, "expired 90001 at 120000 True (None, [(1, 'expired')])"),
    ]
    assert query.exception() is None


def test_processing_time_timers_and_ttl_go_by_the_time_of_the_batch_on_a_quiet_stream_too(
    make_stream: Callable[..., Stream],
) -> None:
    stream, write = make_stream(INPUT), Writer()
    stream.add(
        write(
            ("a", 1, "timer.registerTimer", 1_500),
            ("a", 1, "timer.registerTimer", 10_000_000),
            ("b", 1, "timer.registerTimer", 0),
            *(("a", 1, f"{ttl}_v.update", 1, "x") for ttl in ("brief", "lasting")),
            *(("a", 1, f"{ttl}_l.put", 2, "x") for ttl in ("brief", "lasting")),
            *(("a", 1, f"{ttl}_m.updateValue", 1, "x") for ttl in ("brief", "lasting")),
            ("a", 1, "brief_v.get"),
            ("a", 1, "brief_l.get"),
            ("a", 1, "brief_m.iterator"),
        )
    )
    query, found = gather(commands_on(stream, Commands, "processingTime"), stream.checkpoint)
    drain(query, stream.checkpoint, stream.files)
    assert answers(map(tuple, found[0])) == [
        (-1, "expired True (None, [])"),
        (9, "brief_v.get ((1, 'x'),)"),
        (10, "brief_l.get [(0, 'x'), (1, 'x')]"),
        (11, "brief_m.iterator [(('x',), (1, 'x'))]"),
    ]
    # Nothing new comes in, and yet the timer fires, once.
    wait_until(lambda: any(found[n] for n in found if n))
    stream.add(
        write(
            *(("a", 1, f"{ttl}_{kind}.exists") for ttl in ("brief", "lasting") for kind in "vlm"),
            ("a", 1, "brief_v.get"),
            ("a", 1, "brief_l.appendValue", 7, "new"),
            ("a", 1, "brief_l.get"),
            ("a", 1, "brief_m.containsKey", None, "x"),
            ("a", 1, "lasting_m.getValue", None, "x"),
            ("a", 1, "timer.listTimers"),
        )
    )
    drain(query, stream.checkpoint, stream.files)
    fired, asked = (answers(map(tuple, found[n])) for n in sorted(found) if n and found[n])
    assert fired == [(-1, "expired True (None, [])")]
    assert [text for _, text in asked] == [
        "brief_v.exists False",
        "brief_l.exists False",
        "brief_m.exists False",
        "lasting_v.exists True",
        "lasting_l.exists True",
        "lasting_m.exists True",
        "brief_v.get (None,)",
        "brief_l.get [(7, 'new')]",
        "brief_m.containsKey False",
        "lasting_m.getValue ((1, 'x'),)",
        "timer.listTimers (1,)",
    ]


@pytest.mark.spark42
def test_available_now_keeps_its_batches_and_ends(make_stream: Callable[..., Stream]) -> None:
    stream, write = make_stream(INPUT), Writer()
    for _ in range(3):
        stream.add(write(("a", 1, "timer.times"), ts=at(100)))
    found: list[int] = []
    query = (
        commands_on(stream, Commands, "eventTime")
        .writeStream.trigger(availableNow=True)
        .option("checkpointLocation", stream.checkpoint)
        .foreachBatch(lambda batch, _: found.append(batch.count()))
        .start()
    )
    assert query.awaitTermination(HANG)
    assert [n for n in found if n] == [1, 1, 1]


# Initial state -----------------------------------------------------------------------------------------------------


def test_an_initial_state_is_there_once_and_before_the_first_rows(make_stream: Callable[..., Stream]) -> None:
    stream, write = make_stream(INPUT), Writer()
    initial = stream.spark.createDataFrame([(7, "a", "x", 1), (95_000, "b", "y", 2), (None, None, None, None)], INITIAL)
    stream.add(write(("a", 1, "l.get"), ("a", 1, "timer.listTimers"), (None, None, "l.get"), ("a", 1, "l.clear")))
    df = commands_on(stream, Commands, "eventTime", initial_state=initial)
    (first,) = process_all(df, stream)
    assert answers(first) == [(0, "l.get [(7, 'x')]"), (1, "timer.listTimers [7]"), (2, "l.get [(None, None)]")]

    # After a restart it does not come back; the timer of a key without any rows fires.
    stream.add(write(("a", 1, "l.get"), ts=at(106)))
    stream.add(write(("b", 2, "l.get"), ts=at(106)))
    second, third = process_all(df, stream)
    assert answers(second) == [(4, "l.get []")]
    value, element = composite(95_000, "y"), [(95_000, "y")]
    assert answers(third) == [
        (-1, f"expired 7 at 96000 True {(composite(7, 'x'), [])!r}"),
        (-1, f"expired 95000 at 96000 True {(value, element)!r}"),
        (5, f"l.get {element!r}"),
    ]


# DataFrames --------------------------------------------------------------------------------------------------------


class Frames:
    """Tells what frames it is given, and gives several, one of them empty."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        sizes, total = [], (self.total.get() or (0,))[0]
        for frame in rows:
            assert list(frame.columns) == ["k", "v", "t"] and frame.index[0] == 0
            assert (frame["k"] == key[0]).all() and frame["t"].dtype == "datetime64[ns]"
            sizes.append(len(frame))
            total += int(frame["v"].sum())
            yield frame[["v", "k"]][:1].assign(note="first", unasked=1)
        self.total.update((total,))
        yield pd.DataFrame()
        yield pd.DataFrame({0: [key[0]], 1: ["sizes"], 2: [sum(sizes)]})
        yield pd.DataFrame({"note": [f"largest {max(sizes)}"], "k": [key[0]], "v": [total]})

    def close(self) -> None:
        pass


def test_a_key_of_many_rows_comes_in_frames_of_bounded_size(
    spark: SparkSession, make_stream: Callable[..., Stream]
) -> None:
    stream = make_stream("k string, v long, t timestamp")
    before = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "10000")
    stream.add(pd.DataFrame({"k": ["many"] * 25_000 + ["one"], "v": 1, "t": pd.Timestamp("2024-01-01", tz="UTC")}))
    df = transform_with_state_in_pandas(
        stream.read(), "k", based_on(StatefulProcessor, Frames), "k string, note string, v long", operator="frames"
    )
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", before)
    (found,) = process_all(df, stream)
    count = Counter(found)
    assert 3 <= count.pop(("many", "first", 1)) <= 10
    (largest,) = (int(note.split()[1]) for k, note, _ in count if k == "many" and note.startswith("largest"))
    assert 1_000 <= largest <= 10_000
    assert set(count) == {
        ("many", "sizes", 25_000),
        ("many", f"largest {largest}", 25_000),
        ("one", "first", 1),
        ("one", "sizes", 1),
        ("one", "largest 1", 1),
    }


# Columns -----------------------------------------------------------------------------------------------------------


class Columns(ArrowStatefulProcessor):
    """Counts and sums by key; forgets a key that comes with a negative value, or that its timer finds without rows."""

    def init(self, handle: Any) -> None:
        handle.declare_state("n long, total long")

    def process(self, batch: ArrowBatch) -> ArrowResult:
        key, v = batch.key_index.to_numpy(), batch.rows["v"].to_numpy()
        rows = np.bincount(key, minlength=batch.num_keys)
        fired = np.isin(np.arange(batch.num_keys), batch.expired_timers["key_index"].to_numpy())
        gone = fired & (rows == 0)
        n = pc.add(pc.fill_null(batch.state["n"], 0), pa.array(rows))
        total = pc.add(pc.fill_null(batch.state["total"], 0), pa.array(np.bincount(key, v, batch.num_keys).astype(int)))
        output = pa.table(
            {"k": batch.keys["k"], "what": pa.array(np.where(gone, "gone", "sum")), "n": n, "total": total}
        )
        removed = gone | (np.bincount(key, v < 0, batch.num_keys) > 0)
        last = np.zeros(batch.num_keys, np.int64)
        np.maximum.at(last, key, batch.rows["t"].cast(pa.int64()).to_numpy() // 1000)
        (timed,) = np.nonzero(~removed)
        return ArrowResult(
            output=output.filter(pa.array(~gone | np.asarray(batch.has_state))),
            state=pa.table({"total": total, "n": n}),
            removed=removed,
            # A second after the last row.
            timers=pa.table({"key_index": timed, "expiry_ms": last[timed] + 1_000}),
        )


def test_columns_come_with_the_state_of_all_keys(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream("v long, k string, t timestamp")
    df = transform_with_state_in_arrow(
        stream.read().withWatermark("t", "0 seconds"),
        "k",
        Columns(),
        "k string, what string, n long, total long",
        operator="columns",
        time_mode="eventTime",
        num_partitions=2,
    )
    stream.add([(1, "a", at(10)), (2, "a", at(11)), (5, "b", at(10)), (7, None, at(10.5))])
    stream.add([(3, "a", at(12)), (-1, "b", at(11.5)), (9, "c", at(9))])
    stream.add([(100, "a", at(11)), (4, "d", at(20))])  # the first one is late
    assert process_all(df, stream) == [
        ordered([("a", "sum", 2, 3), ("b", "sum", 1, 5), (None, "sum", 1, 7)]),
        ordered([("a", "sum", 3, 6), ("b", "sum", 2, 4), ("c", "sum", 1, 9)]),
        ordered([("a", "gone", 3, 6), ("c", "gone", 1, 9), (None, "gone", 1, 7), ("d", "sum", 1, 4)]),
    ]
    stream.add([(8, "a", at(20.5)), (1, "d", at(20.7))])
    assert process_all(df, stream) == [ordered([("a", "sum", 1, 8), ("d", "sum", 2, 5)])]


# Chains ------------------------------------------------------------------------------------------------------------


class Forward:
    """Passes rows on with their event time, each once it is sure to be complete: when the watermark has passed it."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.waiting = handle.getListState("waiting", "v double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self.waiting.appendValue((row.v,))
            self.handle.registerTimer(int(row.t.timestamp() * 1000) + 1_000)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        time = dt.datetime.fromtimestamp(expiredTimerInfo.getExpiryTimeInMs() / 1000 + 5)
        yield Row(k=key[0], total=sum(v for (v,) in self.waiting.get()), t=time)
        self.waiting.clear()

    def close(self) -> None:
        pass


class Count:
    """Counts rows, and says what the watermark is."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        n = (self.count.get() or (0,))[0] + len(list(rows))
        self.count.update((n,))
        yield Row(kind=key[0], n=n, watermark=timerValues.getCurrentWatermarkInMs())

    def close(self) -> None:
        pass


@pytest.mark.spark42
def test_operators_behind_one_another_each_have_their_state_and_the_event_time(
    make_stream: Callable[..., Stream],
) -> None:
    stream = make_stream("k long, v double, t timestamp")
    for rows in ([(1, 1.0, at(10)), (2, 2.0, at(10)), (1, 3.0, at(20))], [(3, 0.0, at(21))], [(3, 0.0, at(21))]):
        stream.add(rows)
    forwarded = transform_with_state(
        stream.read().withWatermark("t", "5 seconds"),
        "k",
        based_on(StatefulProcessor, Forward),
        "k long, total double, t timestamp",
        operator="forward",
        time_mode="eventTime",
        event_time_column="t",
        num_partitions=2,
    )
    counted = transform_with_state(
        forwarded.withColumn("kind", F.col("k") % 2),
        "kind",
        based_on(StatefulProcessor, Count),
        "kind long, n long, watermark long",
        operator="count",
        time_mode="eventTime",
        num_partitions=2,
    )
    found = process_all(counted, stream)
    # The watermark of batch 1 is 15 s: the rows of 10 s go on then, and the count behind sees them in the same batch.
    assert [[row[:2] for row in rows] for rows in found] == [[(0, 1), (1, 1)]]
    totals = aggregate(forwarded, by="k", operator="totals", n=S.count(), total=S.sum("total"))
    other = Stream(stream.spark, stream.root / "other", stream.schema)
    query, found_totals = gather(totals, other.checkpoint)
    drain(query, other.checkpoint, stream.files)
    query.stop()
    assert ordered(r for rows in found_totals.values() for r in rows) == [(1, 1, 4.0), (2, 1, 2.0)]


# Restarts and errors -----------------------------------------------------------------------------------------------


class Totals:
    """Sums up; ``schema`` and ``others`` are its state."""

    schema = "total int, last string"
    others: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    bad: Any = None

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", self.schema)
        self.other = [handle.getListState(name, "n long") for name in self.others]
        for name in self.deleted:
            handle.deleteIfExists(name)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        names = [part.split()[0] for part in self.schema.split(", ")]
        state = dict(zip(names, self.total.get() or (None,) * len(names), strict=True))
        seen = repr((state, [[n for (n,) in other.get()] for other in self.other]))
        for row in rows:
            if row.v == self.bad:
                raise ValueError(f"Not {self.bad} again.")
            state |= {"total": (state["total"] or 0) + row.v, "last": f"{row.v}"}
            for other in self.other:
                other.appendValue((row.v,))
        self.total.update(tuple(state[name] for name in names))
        yield Row(k=key[0], seen=seen)

    def close(self) -> None:
        pass


def totals_on(stream: Stream, **attributes: Any) -> DataFrame:
    return transform_with_state(
        stream.read(),
        "k",
        based_on(StatefulProcessor, Totals, **attributes),
        "k long, seen string",
        operator="totals",
        num_partitions=2,
    )


def test_state_keeps_its_meaning_when_its_schema_evolves(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream("k long, v int")

    def next_batch(**attributes: Any) -> str:
        stream.add([(1, 2)])
        ((row,),) = process_all(totals_on(stream, **attributes), stream)
        return str(row[1])

    wider = "extra double, last string, total long"
    assert next_batch(others=("old",)) == "({'total': None, 'last': None}, [[]])"
    # A field and a variable more, another order, a wider type.
    seen = next_batch(schema=wider, others=("old", "new"))
    assert seen == "({'extra': None, 'last': '2', 'total': 2}, [[2], []])"
    # A field less; a variable deleted.
    seen = next_batch(schema="total long, last string", others=("new",), deleted=("old",))
    assert seen == "({'total': 4, 'last': '2'}, [[2]])"
    # What was deleted does not come back.
    seen = next_batch(schema="total long, last string", others=("new", "old"))
    assert seen == "({'total': 6, 'last': '2'}, [[2, 2], []])"
    stream.add([(1, 2)])
    error = error_of(totals_on(stream, schema="total int, last string", others=("new", "old")), stream)
    assert "'total' was long, which cannot be read as integer" in error, error
    assert "total long)" in error and "(total integer, last string)" in error, error


@pytest.mark.spark42
def test_an_error_of_the_processor_ends_the_query_and_changes_nothing(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream("k long, v int")
    stream.add([(1, 5)])
    stream.add([(1, 13), (2, 1), (3, 1)])
    error = error_of(totals_on(stream, bad=13), stream)
    assert "ValueError: Not 13 again." in error
    # Mended and started again, it goes on from the batch that failed.
    (found,) = process_all(totals_on(stream, bad=None), stream)
    assert [(k, seen) for k, seen in found] == [
        (1, "({'total': 5, 'last': '5'}, [])"),
        (2, "({'total': None, 'last': None}, [])"),
        (3, "({'total': None, 'last': None}, [])"),
    ]


class Wrong:
    """Gives what does not fit the output schema."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield Row(k=key[0], seen={"a": 1})

    def close(self) -> None:
        pass


def test_output_that_does_not_fit_is_named(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream("k long, v int")
    stream.add([(1, 5)])
    df = transform_with_state(
        stream.read(), "k", based_on(StatefulProcessor, Wrong), "k long, seen int", operator="wrong"
    )
    error = error_of(df, stream)
    assert "seen" in error and "{'a': 1}" in error, error
