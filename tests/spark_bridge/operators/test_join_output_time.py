"""Which column of a join's output has the event time, and how far its rows may be behind the watermark."""

from __future__ import annotations

import pytest
from pyspark.sql import types as T

from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.asof_join import Asof
from spark_bridge.operators.columns import LAG_METADATA, watermark_columns
from spark_bridge.operators.join import SideTime, timed_output
from spark_bridge.operators.join_sides import Bounds
from spark_bridge.task.state_task import WATERMARK_METADATA, EventTime

MARK = {WATERMARK_METADATA: 10_000}
LEFT, RIGHT = (T.StructField(name, T.TimestampType(), metadata=MARK) for name in ("lt", "rt"))
OUTPUT = T.StructType([T.StructField("k", T.LongType()), LEFT, RIGHT])
SECOND = 1_000_000


def times(left: int | None, right: int | None) -> list[SideTime]:
    return [SideTime(LEFT, left), SideTime(RIGHT, right)]


@pytest.mark.parametrize(
    ("lower", "upper", "waits"),
    [
        (0, 3600, (3_600_001, 1)),
        (-10, 5, (5001, 10_001)),
        (-30, -10, (0, 30_001)),
        (None, 5, (5001, None)),
        (5, None, (None, 0)),
    ],
)
def test_a_row_waits_for_the_last_one_that_it_can_match(
    lower: int | None, upper: int | None, waits: tuple[int | None, int | None]
) -> None:
    us = [None if s is None else s * SECOND for s in (lower, upper)]
    assert Bounds(EventTime("lt"), EventTime("rt"), lower_us=us[0], upper_us=us[1]).waits_ms == waits


@pytest.mark.parametrize(
    ("asof", "waits"),
    [
        (Asof("backward"), (0, None)),
        (Asof("backward", 1500), (0, 2)),
        (Asof("forward"), (None, None)),
        (Asof("forward", 3 * SECOND), (3000, 3000)),
        (Asof("nearest", 3 * SECOND), (3000, 6000)),
    ],
)
def test_the_nearest_row_may_be_as_far_as_the_tolerance(asof: Asof, waits: tuple[int | None, int | None]) -> None:
    assert asof.waits_ms == waits


def test_column_carries_the_delay_of_its_rows() -> None:
    for column, lag in (("lt", 7000), ("rt", 2500)):
        output = timed_output(OUTPUT, column, times(5000, 500), 2000)
        assert watermark_columns(output) == [column]
        assert output[column].metadata == {LAG_METADATA: lag}
    # Rows that do not wait can be left to Spark's own operators as well.
    assert timed_output(OUTPUT, "lt", times(0, 500), 0)["lt"].metadata == MARK
    assert watermark_columns(timed_output(OUTPUT, None, times(0, 0), 0)) == []


def test_function_output_may_use_the_times_of_either_side() -> None:
    made = T.StructType([T.StructField("at", T.TimestampType()), T.StructField("n", T.LongType())])
    output = timed_output(made, "at", times(500, 5000), 0, made_by_apply=True)
    assert output["at"].metadata == {LAG_METADATA: 5000}
    with pytest.raises(InvalidOperatorError, match="event_time_column='n' has type bigint"):
        timed_output(made, "n", times(500, 5000), 0, made_by_apply=True)


@pytest.mark.parametrize(
    ("column", "given", "words"),
    [
        ("at", times(0, 0), "the output has no such column; it has k, lt, rt"),
        ("k", times(0, 0), "is not an event time of a side; these are lt, rt"),
        ("lt", times(None, 0), "wait for ever.*Give both bounds of within="),
        ("lt", [], "needs to know how long rows wait: put withWatermark on both sides and give within="),
    ],
)
def test_a_column_without_event_time_is_refused(column: str, given: list[SideTime], words: str) -> None:
    with pytest.raises(InvalidOperatorError, match=words):
        timed_output(OUTPUT, column, given, 0)
