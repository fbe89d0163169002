"""Which key has the event time."""

from __future__ import annotations

import pytest
from pyspark.sql import types as T

from coordinator_actor.messages import BatchTimes
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.columns import (
    session_event_time,
    watermark_columns,
    watermark_lag_ms,
    with_event_time,
    without_event_time,
)
from spark_bridge.task.state_task import WATERMARK_METADATA, EventTime

SESSION = T.StructType().add("start", T.TimestampType()).add("end", T.TimestampType())
MARK = {WATERMARK_METADATA: 1000}


@pytest.mark.parametrize("output_mode", ["append", "update"])
def test_watermark_next_to_the_session_window_is_rejected(output_mode: str) -> None:
    beside = T.StructType().add("session_window", SESSION).add("ts2", T.TimestampType(), metadata=MARK)
    with pytest.raises(InvalidOperatorError, match=r"'ts2' has the watermark.*'session_window'.*withWatermark"):
        session_event_time(beside, ["session_window", "ts2"], "session_window", output_mode)
    assert session_event_time(beside, ["session_window", "ts2"], "session_window", "complete") is None
    assert session_event_time(beside, ["session_window"], "session_window", output_mode) is None


def test_delayed_columns_carry_their_watermark_lag() -> None:
    source = T.StructField("t", T.TimestampType(), metadata={**MARK, "comment": "of the source"})
    plain = T.StructField("at", T.TimestampType(), metadata={"comment": "own"})
    at_once, waited = with_event_time(plain, source, 0), with_event_time(source, source, 2500)
    assert at_once.metadata == {**MARK, "comment": "own"}
    # Spark's own operators would take the rows for late, and find no watermark.
    assert WATERMARK_METADATA not in waited.metadata
    schema = T.StructType([at_once, waited])
    assert watermark_columns(schema) == ["at", "t"]
    assert [watermark_lag_ms(schema, time) for time in (EventTime("at"), EventTime("t"), None)] == [0, 2500, 0]
    assert without_event_time(waited).metadata == {"comment": "of the source"}


def test_the_watermark_counts_later_for_rows_that_have_waited() -> None:
    assert BatchTimes(7, 9000, 4000).behind(2500) == BatchTimes(7, 6500, 1500)
    assert BatchTimes(7, 9000, 0).behind(10_000) == BatchTimes(7, 0, 0)


def test_the_session_window_has_the_event_time() -> None:
    schema = T.StructType().add("session_window", SESSION, metadata=MARK).add("k", T.LongType())
    event_time = session_event_time(schema, ["session_window", "k"], "session_window", "append")
    assert event_time == EventTime("session_window", is_window=True)
