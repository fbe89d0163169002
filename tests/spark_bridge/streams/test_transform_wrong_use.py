"""``transform_with_state`` used wrongly: said while the DataFrame is built, naming what to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.stateful.stateful_processor import ArrowBatch, StatefulProcessor, TimerValues, arrow_processor
from spark_bridge.stateful.transform_with_state import (
    transform_with_state,
    transform_with_state_in_arrow,
    transform_with_state_in_pandas,
)
from spark_bridge.task.state_task import WATERMARK_METADATA
from tests.spark_bridge.conftest import Stream

pytestmark = [pytest.mark.spark, pytest.mark.spark42]

OUTPUT = "k long, n long"


class Counts(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Any]:
        return iter(())


class Timed(Counts):
    """Needs processing time."""

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("count", "n long", 1000)


class Twice(Counts):
    def init(self, handle: Any) -> None:
        handle.getValueState("count", "n long")
        handle.getListState("count", "n long")


class Locked(Counts):
    """Cannot be sent anywhere."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Broken(Counts):
    def init(self, handle: Any) -> None:
        raise OSError("no such host")


class OtherNames(Counts):
    """As Spark, tasks call ``handleExpiredTimer`` by name."""

    def handleExpiredTimer(self, key: Any, timers: Any, info: Any) -> Any:  # type: ignore[override]
        return iter(())


class TooFew(Counts):
    def handleInputRows(self, key: Any, rows: Any) -> Any:  # type: ignore[override]
        return iter(())


@arrow_processor("n long")
def nothing(batch: ArrowBatch) -> pa.Table | None:
    return None


@pytest.fixture
def typed(make_stream: Callable[..., Stream]) -> Stream:
    return make_stream("k long, s string, m map<string,int>, t timestamp")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "nope"}, r"by='nope'.*does not exist.*k, s, m, t"),
        ({"by": []}, "no key column"),
        ({"by": ["k", "k"]}, "twice"),
        ({"by": "m"}, r"'m'.*cannot be a key"),
        ({"operator": "a/b"}, "cannot be the name of an operator"),
        ({"output_mode": "complete"}, r"'complete'.*update, append"),
        ({"output_mode": None}, "output_mode=None"),
        ({"time_mode": "wallclock"}, r"'wallclock'.*\"processingTime\" or \"eventTime\""),
        ({"time_mode": "EventTime"}, "withWatermark"),
        ({"num_partitions": 0}, "positive integer"),
        ({"processor": Counts}, r"class.*Counts\(\)"),
        ({"processor": object()}, r"has no init, handleInputRows, handleExpiredTimer, close.*StatefulProcessor"),
        ({"processor": nothing}, "transform_with_state_in_arrow"),
        ({"processor": Timed()}, r"(?i)ttl.*processing"),
        ({"processor": Twice()}, "'count'"),
        (
            {"processor": OtherNames(), "time_mode": "processingTime"},
            r"OtherNames\.handleExpiredTimer\(key.*declare .*\(self, key, timerValues, expiredTimerInfo\)",
        ),
        ({"processor": TooFew()}, r"TooFew\.handleInputRows\(key.*too many positional arguments.*by position"),
        ({"processor": Locked()}, r"Locked cannot be pickled.*init\(\)"),
        ({"output_schema": ""}, "no fields"),
        ({"output_schema": "k lonng"}, "lonng"),
        ({"output_schema": T.StructType().add("v", T.DayTimeIntervalType())}, "interval"),
        ({"output_schema": "k long, k long"}, r"several columns named 'k'"),
        ({"event_time_column": "k"}, "watermark of the DataFrame, which has none"),
        ({"initial_state": 5}, "initial_state=5"),
    ],
)
def test_arguments_that_are_wrong_by_themselves(typed: Stream, arguments: dict[str, Any], message: str) -> None:
    given = {"by": "k", "processor": Counts(), "output_schema": OUTPUT, "operator": "wrong", **arguments}
    for form in (transform_with_state, transform_with_state_in_pandas):
        with pytest.raises(InvalidOperatorError, match=f"(?s){message}"):
            form(typed.read(), **given)


def test_an_error_of_init_is_raised(typed: Stream) -> None:
    with pytest.raises(OSError, match="no such host"):
        transform_with_state(typed.read(), "k", Broken(), OUTPUT, operator="o")


def test_a_processor_in_columns_is_another_kind(typed: Stream) -> None:
    with pytest.raises(InvalidOperatorError, match=r"ArrowStatefulProcessor.*@arrow_processor"):
        transform_with_state_in_arrow(typed.read(), "k", Counts(), OUTPUT, operator="o")  # type: ignore[arg-type]
    interval = typed.read().withColumn("i", F.expr("interval 1 day"))
    with pytest.raises(InvalidOperatorError, match="interval"):
        transform_with_state_in_arrow(interval, "k", nothing, OUTPUT, operator="o")


def test_a_batch_dataframe_has_no_state(spark: Any) -> None:
    with pytest.raises(InvalidOperatorError, match="streaming DataFrame"):
        transform_with_state(spark.range(3), "id", Counts(), OUTPUT, operator="o")


def test_columns_with_ambiguous_names(typed: Stream) -> None:
    twice = typed.read().select("k", "s", F.col("k").alias("s"))
    with pytest.raises(InvalidOperatorError, match="several columns named 's'"):
        transform_with_state(twice, "k", Counts(), OUTPUT, operator="o")


def test_an_initial_state_that_does_not_fit(typed: Stream, spark: Any) -> None:
    def of(initial: Any) -> None:
        transform_with_state(typed.read(), "k", Counts(), OUTPUT, operator="o", initial_state=initial)

    with pytest.raises(InvalidOperatorError, match="streaming DataFrame"):
        of(typed.read())
    with pytest.raises(InvalidOperatorError, match=r"lacks the key column 'k'; it has id"):
        of(spark.range(3))
    with pytest.raises(
        InvalidOperatorError, match="'k' of initial_state has type string, and that of the stream bigint"
    ):
        of(spark.createDataFrame([("a",)], "k string"))
    of(spark.createDataFrame([(1,)], "k long").groupBy("k"))


def test_the_processor_itself_is_left_as_it_is(typed: Stream) -> None:
    processor = Counts()
    transform_with_state(typed.read(), "k", processor, OUTPUT, operator="o")
    assert vars(processor) == {}


def test_event_time_continues_under_another_name(typed: Stream) -> None:
    marked = typed.read().withWatermark("t", "10 seconds")
    arguments: dict[str, Any] = {"operator": "o", "time_mode": "eventTime"}
    output = "k long, at timestamp, n long"
    df = transform_with_state(marked, "k", Counts(), output, event_time_column="at", **arguments)
    assert df.schema["at"].metadata == {WATERMARK_METADATA: 10_000}
    assert df.schema["k"].metadata == {}
    plain = transform_with_state(marked, "k", Counts(), output, **arguments)
    assert all(f.metadata == {} for f in plain.schema.fields)
    for column, message in (
        ("nope", "no such column; it has k, at, n"),
        ("n", "type bigint; event time is a timestamp"),
    ):
        with pytest.raises(InvalidOperatorError, match=message):
            transform_with_state(marked, "k", Counts(), output, event_time_column=column, **arguments)


def test_a_restart_with_another_time_mode_is_refused_by_name(make_stream: Callable[..., Stream]) -> None:
    """A time mode adds a source, and Spark only asserts that the checkpoint has the same number of sources."""
    stream = make_stream("k long, v double")

    def start(time_mode: str, output_mode: str = "update") -> Any:
        counts = transform_with_state(
            stream.read(),
            "k",
            Counts(),
            OUTPUT,
            output_mode=output_mode,
            operator="counts",
            time_mode=time_mode,
            num_partitions=1,
        )
        return counts.writeStream.format("noop").option("checkpointLocation", stream.checkpoint).start()

    stream.add([(1, 1.0)])
    query = start("none")
    query.processAllAvailable()
    query.stop()
    refused = start("processingTime")
    with pytest.raises(Exception, match=r"AFTER_RESTART\] time_mode cannot change from 'none' to 'processingtime'"):
        refused.processAllAvailable()
    stream.add([(1, 1.0)])
    query = start("none", "append")  # another output mode changes nothing in the state
    query.processAllAvailable()
    assert query.lastProgress["batchId"] == 1
