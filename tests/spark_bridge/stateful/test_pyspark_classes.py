"""On Spark 4.2 the objects that a processor is given are instances of PySpark's own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_bridge.stateful.handle import StatefulProcessorHandle, ValueState
from spark_bridge.stateful.list_state import ListState
from spark_bridge.stateful.map_state import MapState
from spark_bridge.stateful.stateful_processor import ExpiredTimerInfo, TimerValues
from tests.spark_bridge.host.local_partition import LocalPartition

OURS = [ValueState, ListState, MapState, StatefulProcessorHandle, TimerValues, ExpiredTimerInfo]
pytestmark = pytest.mark.spark42


@pytest.mark.parametrize("ours", OURS)
def test_each_is_of_pysparks_class_and_inherits_no_method(ours: Any) -> None:
    pyspark = pytest.importorskip("pyspark.sql.streaming.stateful_processor", reason="This Spark has no such classes.")
    theirs = getattr(pyspark, ours.__name__)
    assert issubclass(ours, theirs)
    assert [name for name in vars(theirs) if not name.startswith("_") and name not in vars(ours)] == []


def test_processor_receives_objects_of_these_classes(tmp_path: Path) -> None:
    pyspark = pytest.importorskip("pyspark.sql.streaming.stateful_processor", reason="This Spark has no such classes.")
    given: dict[str, Any] = {}

    def init(handle: Any) -> None:
        given.update(
            StatefulProcessorHandle=handle,
            ValueState=handle.getValueState("v", "x INT"),
            ListState=handle.getListState("l", "x INT"),
            MapState=handle.getMapState("m", "k INT", "x INT"),
        )

    with LocalPartition(tmp_path, init).batch() as state:
        given.update(TimerValues=state.timer_values)
    assert {name: isinstance(one, getattr(pyspark, name)) for name, one in given.items()} == dict.fromkeys(given, True)
