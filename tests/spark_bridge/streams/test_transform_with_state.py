"""``transform_with_state`` end to end on RayDP: state of every kind, initial states, chains of operators."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql import functions as F

from spark_bridge import (
    StatefulProcessor,
    aggregate,
    transform_with_state,
)
from spark_bridge import functions as S
from tests.effort import only_thorough
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.streams.processors import (
    INITIAL,
    INPUT,
    Commands,
    Model,
    PandasCommands,
    Writer,
    answers,
    at,
    based_on,
    commands_on,
    composite,
    drain,
    gather,
    ordered,
    process_all,
    random_batches,
    random_starts,
)

pytestmark = pytest.mark.spark


# State -------------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
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
            (None, 1, "v.exists"),  # null is a separate key
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
def test_random_commands_match_a_plain_model(
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


# Initial state -----------------------------------------------------------------------------------------------------


def test_initial_state_is_applied_once_before_the_first_rows(make_stream: Callable[..., Stream]) -> None:
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


# Chains ------------------------------------------------------------------------------------------------------------


class Forward:
    """Passes on each row with its event time, once the watermark has passed that time."""

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
    """Counts rows, and returns the watermark."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        n = (self.count.get() or (0,))[0] + len(list(rows))
        self.count.update((n,))
        yield Row(kind=key[0], n=n, watermark=timerValues.getCurrentWatermarkInMs())

    def close(self) -> None:
        pass


@pytest.mark.matrix
@pytest.mark.spark42
def test_chained_operators_have_separate_state_and_the_event_time(
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
    # The watermark of batch 1 is 15 s: it releases the rows of 10 s, and the next count sees them in the same batch.
    assert [[row[:2] for row in rows] for rows in found] == [[(0, 1), (1, 1)]]
    totals = aggregate(forwarded, by="k", operator="totals", n=S.count(), total=S.sum("total"))
    other = Stream(stream.spark, stream.root / "other", stream.schema)
    query, found_totals = gather(totals, other.checkpoint)
    drain(query, other.checkpoint, stream.files)
    query.stop()
    assert ordered(r for rows in found_totals.values() for r in rows) == [(1, 1, 4.0), (2, 1, 2.0)]
