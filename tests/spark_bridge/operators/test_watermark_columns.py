"""Which key has the event time."""

from __future__ import annotations

import pytest
from pyspark.sql import types as T

from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.watermark_columns import session_event_time
from spark_bridge.task.watermark import WATERMARK_METADATA, EventTime

SESSION = T.StructType().add("start", T.TimestampType()).add("end", T.TimestampType())
MARK = {WATERMARK_METADATA: 1000}


@pytest.mark.parametrize("output_mode", ["append", "update"])
def test_a_watermark_beside_the_session_window_is_refused(output_mode: str) -> None:
    beside = T.StructType().add("session_window", SESSION).add("ts2", T.TimestampType(), metadata=MARK)
    with pytest.raises(InvalidOperatorError, match=r"'ts2' has the watermark.*'session_window'.*withWatermark"):
        session_event_time(beside, ["session_window", "ts2"], "session_window", output_mode)
    assert session_event_time(beside, ["session_window", "ts2"], "session_window", "complete") is None
    assert session_event_time(beside, ["session_window"], "session_window", output_mode) is None


def test_the_session_window_has_the_event_time() -> None:
    schema = T.StructType().add("session_window", SESSION, metadata=MARK).add("k", T.LongType())
    event_time = session_event_time(schema, ["session_window", "k"], "session_window", "append")
    assert event_time == EventTime("session_window", is_window=True)
