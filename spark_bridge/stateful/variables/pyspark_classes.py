"""PySpark's own classes of ``transformWithState``, of which ours are subclasses where PySpark has them (from 4.0 on).

So a processor may ask ``isinstance(state, pyspark.sql.streaming.stateful_processor.ValueState)``. Ours inherit nothing
but that: each public method of PySpark's is one of ours. On Spark 3.5 each name here stands for ``object``.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("pyspark.sql.streaming.stateful_processor") is None:
    PySparkValueState = object
    PySparkListState = object
    PySparkMapState = object
    PySparkStatefulProcessorHandle = object
    PySparkTimerValues = object
    PySparkExpiredTimerInfo = object
else:
    from pyspark.sql.streaming import stateful_processor as theirs

    PySparkValueState = theirs.ValueState
    PySparkListState = theirs.ListState
    PySparkMapState = theirs.MapState
    PySparkStatefulProcessorHandle = theirs.StatefulProcessorHandle
    PySparkTimerValues = theirs.TimerValues
    PySparkExpiredTimerInfo = theirs.ExpiredTimerInfo
