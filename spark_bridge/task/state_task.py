"""The state task: the function that runs inside a PySpark worker for one partition and micro-batch of an operator.

The task reads all its rows, reads the old values of the keys touched in bulk, runs the operator's logic, commits, and
only then yields rows: even if Spark takes only some of the output (``head(1)``), the commit is complete. Spark's
counterpart is a task of its ``StateStoreRDD``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends import spans
from backends.encoding.key_groups import key_groups, partition_of
from backends.encoding.keys import KeyRange, encode_keys
from backends.tracing import try_set_up
from spark_bridge.exceptions import PartitionMismatchError, StateStoreRefusedError
from spark_bridge.task.executor import TRACING, StepTimer, endpoints_from, settle_worker
from spark_bridge.task.task_store import StateAccess, TaskStore
from spark_bridge.transport.protocol import TaskIdentity

OUTPUT_ROWS = 1 << 16
"""Output is yielded in batches of at most this many rows."""


class Logic(Protocol):
    """An operator's work on one partition: it takes rows, commits changes to the store, and yields output."""

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        """Take all rows, read state and commit once, and only then yield the output."""


@dataclass(frozen=True)
class StateTask:
    """The function for ``mapInArrow`` of one operator: ``num_partitions`` partitions of ``num_key_groups`` key groups.

    ``keys`` are the key columns of its rows, in storage order. ``uses_time``: the logic asks for the times of the
    batch, as the operator's ``OperatorSpec`` says. ``watermark_lag_ms``: how far behind the watermark rows may be that
    have waited in an operator before this one; the watermark is that much later for them.
    """

    operator: str
    num_partitions: int
    num_key_groups: int
    keys: tuple[str, ...]
    logic: Logic
    uses_time: bool
    watermark_lag_ms: int = 0

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Process one partition of one micro-batch: batches of rows in, batches of output out.

        Raises ``StateStoreRefusedError`` if the query may not run and ``PartitionMismatchError`` if the rows are
        not those of one shuffle partition, both before any state is changed.
        """
        from pyspark import TaskContext

        if (context := TaskContext.get()) is None:
            raise StateStoreRefusedError(f"Operator {self.operator!r} runs only inside a Spark task.")
        endpoints, run_id = endpoints_from(context.getLocalProperty, self.operator)
        try_set_up(context.getLocalProperty(TRACING), {"role": "task"})
        first = next((b for b in batches if b.num_rows), None)
        partition = self._partition(context.partitionId(), first)
        task = TaskIdentity(
            run_id=run_id,
            operator=self.operator,
            partition=partition,
            batch_id=int(context.getLocalProperty("streaming.sql.batchId")),
            attempt=str(context.taskAttemptId()),
            invocation=uuid.uuid4().hex,
            stage=context.stageId(),
        )
        timer = StepTimer()
        store = TaskStore(task, self.num_partitions, self.num_key_groups, endpoints, self.watermark_lag_ms)
        try:
            with task_span(task) as span:
                if self.uses_time or not store.knows_owner:
                    store.open()
                    timer.step("open_ms")
                for output in self.logic.process(self._checked(first, batches, partition), store, timer):
                    span.note(**timer.milliseconds)  # all of it, for output comes after the commit
                    for start in range(0, output.num_rows, OUTPUT_ROWS):
                        yield output.slice(start, OUTPUT_ROWS)
                span.note(**timer.milliseconds)
        finally:
            store.close()
            settle_worker()

    def _partition(self, task_partition: int, first: pa.RecordBatch | None) -> int:
        """Return this task's shuffle partition: that of its first row, or the task's number if it has no rows."""
        partition = task_partition if first is None else self._partitions_of(first.slice(0, 1))[0]
        if partition != task_partition or not 0 <= partition < self.num_partitions:
            raise PartitionMismatchError(
                f"Task {task_partition} of operator {self.operator!r} was given rows of shuffle partition {partition} "
                f"of {self.num_partitions}: something after the operator merges or renumbers its partitions "
                "(coalesce, union). Put .repartition(n) between the operator and it. No state was touched."
            )
        return partition

    def _partitions_of(self, rows: pa.RecordBatch) -> list[int]:
        return partitions_of(rows, self.keys, self.num_key_groups, self.num_partitions)

    def _checked(
        self, first: pa.RecordBatch | None, rest: Iterator[pa.RecordBatch], partition: int
    ) -> Iterator[pa.RecordBatch]:
        for batch in () if first is None else chain((first,), rest):
            if batch.num_rows:
                if set(self._partitions_of(end_rows(batch))) != {partition}:
                    raise PartitionMismatchError(
                        f"Operator {self.operator!r} got rows of several shuffle partitions in the task of partition "
                        f"{partition}. Put .repartition(n) between the operator and what follows it."
                    )
                yield batch


def task_span(task: TaskIdentity) -> spans.Span:
    """Begin the span of a task, from its first row on until Spark has taken its output."""
    return spans.span(
        "task",
        spans.batch(task.run_id, task.batch_id + 1),
        operator=task.operator,
        partition=task.partition,
        attempt=task.attempt,
        stage=task.stage,
    )


def end_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the first and the last row: where Spark merges partitions, it puts their rows one after the other."""
    return batch.take([0, batch.num_rows - 1])


def partitions_of(rows: pa.RecordBatch, keys: Sequence[str], num_key_groups: int, num_partitions: int) -> list[int]:
    """Return the shuffle partition of each of a few rows, by their key columns."""
    groups = key_groups(rows.select(list(keys)), num_key_groups)
    return [partition_of(group, num_key_groups, num_partitions) for group in groups.tolist()]


# Applies the watermark: which rows are late, and which keys are done, by the event time of rows and keys.
#
# Spark computes the watermark, and the coordinator reads it from Spark's offset log for each batch (``BatchTimes``,
# ``coordinator_actor/durable/spark_commits.py``). A timestamp is compared with the watermark itself, a window by its
# end, as in Spark's ``WatermarkSupport``. A key column with event time is stored first, so that the keys that are
# done are adjacent in every key group.


WATERMARK_METADATA = "spark.watermarkDelayMs"
"""Where Spark notes that a column has a watermark."""

Times = npt.NDArray[np.int64]
"""Microseconds since 1970."""

_MAX_TIME = np.iinfo(np.int64).max


@dataclass(frozen=True)
class EventTime:
    """A column of event time: timestamps, or windows (structs of start and end).

    ``window_us`` is the length of the windows in microseconds if they all have the same, else 0.
    """

    column: str
    is_window: bool = False
    window_us: int = 0

    def times(self, rows: pa.RecordBatch) -> pa.Int64Array:
        """Return the time of each row, in microseconds since 1970."""
        column = rows.column(rows.schema.get_field_index(self.column))
        if self.is_window:
            column = pc.struct_field(column, [1])
        return column.cast(pa.int64())

    def is_done(self, rows: pa.RecordBatch, watermark_ms: int) -> npt.NDArray[np.bool_]:
        """Return for each row whether the watermark (in ms) has reached its time; False for a row without time."""
        done: npt.NDArray[np.bool_] = np.asarray(pc.less_equal(self.times(rows), watermark_ms * 1000).fill_null(False))
        return done

    @property
    def is_exact(self) -> bool:
        """Return whether ``done_ranges`` has only keys that are done."""
        return not self.is_window or self.window_us > 0

    def done_ranges(self, key_groups: tuple[int, int], watermark_ms: int) -> list[KeyRange]:
        """Return the ranges that contain all done keys, if this column is their first.

        Unless ``is_exact``, they contain other keys, too.
        Windows are stored by their start: a window that begins after the watermark cannot have ended.
        """
        begin = np.array([min(watermark_ms * 1000 - self.window_us + 1, _MAX_TIME)])
        time = pa.array(begin)
        first = pa.StructArray.from_arrays([time], ["start"]) if self.is_window else time
        end = encode_keys(pa.record_batch({self.column: first}), np.zeros(1, np.uint16))[0].as_py()[2:]
        # From the first byte of a key that has a time: keys without time come before.
        return [(g + b"\x01", g + end) for g in map(_group, range(*key_groups))]


def late_rows_removed(
    rows: pa.RecordBatch, event_time: EventTime | None, late_watermark_ms: int
) -> tuple[pa.RecordBatch, int]:
    """Return the rows that are not late, and the number of late rows."""
    if event_time is None:
        return rows, 0
    late = event_time.is_done(rows, late_watermark_ms)
    count = int(np.count_nonzero(late))
    return (rows.filter(pa.array(~late)), count) if count else (rows, 0)


def all_keys(key_groups: tuple[int, int]) -> list[KeyRange]:
    """Return the range of all keys of some key groups: from the first (included) to the last (not included)."""
    first, last = key_groups
    return [(_group(first), _group(last) if last < 1 << 16 else None)]


def between(ranges: Sequence[KeyRange], after: bytes | None, up_to: bytes | None) -> list[KeyRange]:
    """Return the parts of ascending ranges after ``after`` and up to ``up_to`` (None: no limit)."""
    if after is None and up_to is None:
        return list(ranges)
    clipped = []
    for start, end in ranges:
        low = start if after is None else max(start, after + b"\x00")
        high = end
        if up_to is not None:
            high = up_to + b"\x00" if end is None else min(end, up_to + b"\x00")
        if high is None or low < high:
            clipped.append((low, high))
    return clipped


def _group(group: int) -> bytes:
    return group.to_bytes(2, "big")
