"""The work of a lookup in a PySpark worker: Arrow batches in, the same rows with the columns of the state out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.tracing import spans, trace_ids
from backends.tracing.set_up import try_set_up
from coordinator_actor.durable.lookup_records import LookupRecord
from coordinator_actor.reading.stored_versions import StatePlace
from spark_bridge.exceptions import StateStoreRefusedError
from spark_bridge.lookups.looked_up_state import Batch, LookedUpState, in_storage, state_in_cluster
from spark_bridge.task.local_properties import RUN_ID, TRACING, local_endpoints

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Spark's local properties of the jobs of a streaming query."""


@dataclass(frozen=True)
class LookupTask:
    """Looks the rows of a partition up. All tasks of a batch read one version.

    ``keys`` are the columns of the rows by key column, ``columns`` the wanted columns of the state; ``schema`` is that
    of the output. With ``fixed`` it is that version, also of a stream. With ``place`` storage is read, else the hosts.
    """

    operator: str
    query: str
    state: str | None
    keys: dict[str, str]
    columns: tuple[str, ...]
    schema: pa.Schema
    is_inner: bool
    is_stream: bool
    fixed: LookupRecord | None
    place: StatePlace | None

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Give the rows with the columns of the state after them."""
        filled = (batch for batch in batches if batch.num_rows)
        first = next(filled, None)
        if first is None:
            return  # a task without rows asks nobody
        rows = 0
        with self._span() as span:
            with spans.step("lookup.version"):
                found = self._found()
            for batch in chain((first,), filled):
                rows += batch.num_rows
                yield from self.enriched(batch, found)
            span.note(num_rows=rows)

    def _span(self) -> spans.Span:
        """Begin the span of a task: in the trace of its batch, if its query has state, and else in one of its own."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "a task runs in a worker of Spark"
        try_set_up(context.getLocalProperty(TRACING), {"role": "task"})
        said = {
            "operator": self.operator,
            "looked_up": self.query,
            "partition": context.partitionId(),
            "attempt": str(context.taskAttemptId()),
            "stage": context.stageId(),
        }
        run_id, batch_id = context.getLocalProperty(RUN_ID), context.getLocalProperty(BATCH_ID)
        if run_id is None or not self.is_stream or batch_id is None:
            return spans.alone("lookup", **said)
        return spans.span("lookup", trace_ids.batch(run_id, int(batch_id) + 1), **said)

    def enriched(self, batch: pa.RecordBatch, found: LookedUpState) -> Iterator[pa.RecordBatch]:
        """Give the rows of one batch. A key with a null has no match, as in SQL."""
        columns = {key: batch.column(batch.schema.get_field_index(name)) for key, name in self.keys.items()}
        is_known = np.ones(batch.num_rows, np.bool_)
        for column in columns.values():
            if column.null_count:
                is_known &= np.asarray(column.is_valid())
        keys = pa.RecordBatch.from_pydict(columns)
        if not is_known.all():
            keys = keys.filter(pa.array(is_known))
        codec = found.view.codec
        # Each key once: rows of one key come together often, and all share the answer.
        once = codec.encode(codec.columns(keys)).dictionary_encode()
        with spans.step("lookup.read", num_keys=len(once.dictionary)):
            stored = found.values(once.dictionary)
        values = found.view.unexpired(stored, found.at_ms)
        indices = np.full(batch.num_rows, -1, np.int64)
        indices[is_known] = np.asarray(once.indices)
        taken = pa.array(indices, mask=indices < 0)
        names = [f.name for f in found.view.value_fields]
        state = dict(zip(names, found.view.value_columns(values, found.at_ms), strict=True))
        out = [*batch.columns, *(state[name].take(taken) for name in self.columns)]
        typed = [_as(column, field.type) for column, field in zip(out, self.schema, strict=True)]
        rows = pa.RecordBatch.from_arrays(typed, schema=self.schema)
        if self.is_inner:
            rows = rows.filter(values.is_valid().take(taken).fill_null(False))
        if rows.num_rows:
            yield rows

    def _found(self) -> LookedUpState:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "a task runs in a worker of Spark"
        batch = None
        if self.is_stream and self.fixed is None:
            by, number = (context.getLocalProperty(p) for p in (QUERY_ID, BATCH_ID))
            batch = Batch(str(by), int(str(number)))
        if self.place is not None:
            return in_storage(self.place, self.operator, self.state, batch, self.fixed)
        endpoints = local_endpoints(context.getLocalProperty)
        if endpoints is None:
            raise StateStoreRefusedError(
                f"A lookup in {self.operator!r} runs in a query of a Spark session without a state store: use the "
                "session that init_spark returned or that attach(spark) was called with, or give checkpoint=."
            )
        return state_in_cluster(endpoints, self.operator, self.query, self.state, batch, self.fixed)


def _as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else pc.cast(column, kind)
