"""The input of a processor's task: the columns of the rows, the key among them, and which rows are late."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
from pyspark.sql.types import StructType

from spark_bridge.task.external_sort import RowSorter
from spark_bridge.task.step_timer import StepTimer
from spark_bridge.task.watermark import EventTime, late_rows_removed


@dataclass(frozen=True)
class TaskInput:
    """The columns of the rows (``struct``) and of the key (``keys``).

    Rows that are late by ``event_time`` are dropped; None: no row is late.
    """

    struct: StructType
    keys: pa.Schema
    event_time: EventTime | None = None

    @cached_property
    def key_struct(self) -> StructType:
        """Return the columns of the key, in their order."""
        return StructType([self.struct[name] for name in self.keys.names])

    def read(
        self, batches: Iterable[pa.RecordBatch], sorter: RowSorter, late_watermark_ms: int, timer: StepTimer
    ) -> int:
        """Give all rows that are not late to the sorter; return the number of late rows."""
        num_late = 0
        timer.restart()
        for batch in batches:
            timer.step("input_wait")
            rows, late = late_rows_removed(batch, self.event_time, late_watermark_ms)
            num_late += late
            sorter.add(rows)
            timer.step("sort_ms")
        timer.step("input_wait")
        return num_late
