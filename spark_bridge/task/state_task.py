"""The state task: the function that runs inside a PySpark worker for one partition and micro-batch of an operator.

The task reads all its rows, reads the old values of the keys touched in bulk, runs the operator's logic, commits, and
only then gives rows: even if Spark takes only some of the output (``head(1)``), the commit is whole. Spark's
counterpart is a task of its ``StateStoreRDD``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import pyarrow as pa

from backends.encoding.key_groups import key_groups, partition_of
from backends.tracing import spans, trace_ids
from backends.tracing.set_up import try_set_up
from spark_bridge.exceptions import PartitionMismatchError, StateStoreRefusedError
from spark_bridge.task.local_properties import TRACING, endpoints_from
from spark_bridge.task.state_access import StateAccess
from spark_bridge.task.step_timer import StepTimer
from spark_bridge.task.task_store import TaskStore
from spark_bridge.task.worker_process import settle_worker
from spark_bridge.transport.protocol import TaskIdentity

OUTPUT_ROWS = 1 << 16
"""Output is given in batches of at most this many rows."""


class Logic(Protocol):
    """An operator's work on one partition: it takes rows, commits changes to the store, and gives output."""

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        """Take all rows, read state and commit once, and only then give the output."""


@dataclass(frozen=True)
class StateTask:
    """The function for ``mapInArrow`` of one operator: ``num_partitions`` partitions of ``num_key_groups`` key groups.

    ``keys`` are the key columns of its rows, in the order in which they are stored. ``uses_time``: the logic asks for
    the times of the batch, as the operator's ``OperatorSpec`` says. ``watermark_lag_ms``: rows that have waited in an
    operator before this one may be so far behind the watermark; it counts so much later for them.
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

        Raises ``StateStoreRefusedError`` where the query may not run and ``PartitionMismatchError`` where the rows are
        not those of one shuffle partition, both before any state is changed.
        """
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
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
        trace_ids.batch(task.run_id, task.batch_id + 1),
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
