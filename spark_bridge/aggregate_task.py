"""The work of an ``aggregate`` operator in a state task: columns in, columns out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.keys import decode_keys, encode_keys
from backends.values import decode_values, encode_values
from spark_bridge.aggregation import Aggregator, plain, results
from spark_bridge.exceptions import StateTooLargeError
from spark_bridge.protocol import CHANGES_SCHEMA
from spark_bridge.state_task import KEY_GROUP_COLUMN, StepTimer
from spark_bridge.task_client import TaskStore

ROWS_PER_STEP = 1 << 18
"""Rows aggregated at once; only their partial results, one per key, are kept."""
PARTIALS_PER_MERGE = 1 << 20


@dataclass(frozen=True)
class AggregateLogic:
    """Running aggregates by key: every key touched in the batch gives one row (``output_mode="update"``)."""

    keys: pa.Schema
    aggregator: Aggregator
    output: pa.Schema

    def process(self, batches: Iterable[pa.RecordBatch], store: TaskStore, timer: StepTimer) -> pa.RecordBatch:
        """Aggregate the rows, merge with the old states of their keys, commit, and give the new results."""
        keys, states = self._aggregate(batches, timer)
        order = pc.sort_indices(keys)
        keys, states = keys.take(order), states.take(order)
        timer.step("aggregate_ms")
        old = store.get_many(keys) if len(keys) else pa.array([], pa.binary())
        timer.step("get_ms")
        states = self._merge_old(decode_values(old, self.aggregator.state_schema), pc.is_valid(old), states)
        changes = pa.record_batch([keys, encode_values(states)], schema=CHANGES_SCHEMA)
        columns = [*decode_keys(keys, self.keys).columns, *results(states)]
        timer.step("merge_ms")
        store.commit(changes, timer.milliseconds)
        return pa.RecordBatch.from_arrays(columns, schema=self.output)

    def _aggregate(self, batches: Iterable[pa.RecordBatch], timer: StepTimer) -> tuple[pa.Array, pa.RecordBatch]:
        partials: list[tuple[pa.Array, pa.RecordBatch]] = []
        waiting: list[pa.RecordBatch] = []
        rows = 0

        def step() -> None:
            nonlocal rows
            # Several, if a column has more than 2 GiB.
            partials.extend(map(self._partial, pa.Table.from_batches(waiting).combine_chunks().to_batches()))
            waiting.clear()
            rows = 0
            if sum(len(keys) for keys, _ in partials) > PARTIALS_PER_MERGE:
                partials[:] = [self._merge(partials)]

        timer.restart()
        for batch in batches:
            timer.step("input_wait")
            waiting.append(batch)
            rows += batch.num_rows
            if rows >= ROWS_PER_STEP:
                step()
            timer.step("aggregate_ms")
        timer.step("input_wait")
        if waiting:
            step()
        return self._merge(partials)

    def _partial(self, rows: pa.RecordBatch) -> tuple[pa.Array, pa.RecordBatch]:
        columns = [plain(rows.column(f.name)).cast(f.type) for f in self.keys]
        encoded = encode_keys(
            pa.RecordBatch.from_arrays(columns, schema=self.keys),
            rows.column(KEY_GROUP_COLUMN).to_numpy(zero_copy_only=False),
        ).dictionary_encode()
        return encoded.dictionary, self.aggregator.partial(encoded.indices, len(encoded.dictionary), rows)

    def _merge(self, partials: list[tuple[pa.Array, pa.RecordBatch]]) -> tuple[pa.Array, pa.RecordBatch]:
        if not partials:
            return pa.array([], pa.binary()), empty(self.aggregator.state_schema)
        if len(partials) == 1:
            return partials[0]
        encoded = pa.concat_arrays([keys for keys, _ in partials]).dictionary_encode()
        states = one_batch([s for _, s in partials])
        return encoded.dictionary, self.aggregator.merge(encoded.indices, len(encoded.dictionary), states)

    def _merge_old(self, old: pa.RecordBatch, present: pa.BooleanArray, new: pa.RecordBatch) -> pa.RecordBatch:
        """Merge the states from the store, aligned by key, into those of the batch."""
        if not new.num_rows or not pc.any(present).as_py():
            return new
        ids = np.arange(new.num_rows, dtype=np.int32)
        held = ids[present.to_numpy(zero_copy_only=False)]
        both = one_batch([old.filter(present), new])
        return self.aggregator.merge(pa.array(np.concatenate([held, ids])), new.num_rows, both)


def one_batch(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows of all parts; raises ``StateTooLargeError`` if a column of them has more than 2 GiB."""
    batches = pa.Table.from_batches(parts).combine_chunks().to_batches()
    if not batches:
        return parts[0]
    if len(batches) > 1:
        raise StateTooLargeError(
            f"The states of the {sum(map(len, parts))} keys of one partition and batch have more than 2 GiB in one column: use "
            "more partitions (num_partitions=), or smaller batches."
        )
    return batches[0]


def empty(schema: pa.Schema) -> pa.RecordBatch:
    """A batch without rows."""
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
