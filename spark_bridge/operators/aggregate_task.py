"""The work of ``aggregate`` without session windows in a state task: columns in, columns out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from backends.conf import DEFAULT_FAMILY
from backends.encoding.columns import Integers, Mask, fixed_dtype
from backends.encoding.key_groups import key_groups
from backends.encoding.keys import KeyRange, decode_keys, encode_keys
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs, key_order
from coordinator_actor.messages import OperatorFigures
from spark_bridge.aggregates.aggregator import Aggregator, ListTooLargeError
from spark_bridge.aggregates.row_groups import group_rows, plain
from spark_bridge.operators.columns import spark_struct
from spark_bridge.operators.index_entries import move_entries, remove_entries
from spark_bridge.operators.map_in_arrow import map_in_arrow
from spark_bridge.state_format.layouts import DUE, is_present
from spark_bridge.state_format.stored_rows import by_expiry, without_expiry
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.keyed_rows import Ids, KeyedRows, RowReducer, StepSize, empty, in_steps, parts_of, scanned
from spark_bridge.task.state_task import OUTPUT_ROWS, EventTime, all_keys, between, late_rows_removed
from spark_bridge.task.task_store import Spool, StateAccess

FIXED_KEYS_PER_STEP = 1 << 18
LIST_KEYS_PER_STEP = 1 << 8
AGGREGATE_KEYS_PER_STEP = 1 << 14
"""Keys whose states are read and written at once, to begin with: if all states have a fixed width, if lists keep
all elements, and otherwise.
"""


@dataclass(frozen=True)
class AggregateLogic:
    """Running aggregates by key.

    ``schema`` has the stored keys, whose first column is that of ``event_time`` if there is one, and the aggregator's
    states. ``output_mode`` "update" emits every key that the batch touched, "append" the keys that are done (whose
    event time the watermark has passed), "complete" all keys. Keys that are done are removed from the state, except in
    "complete". ``is_partial`` marks the rows as partial results. ``is_global``: there is one key, true, which each
    batch touches, also one without rows, as in Spark. Spark's counterpart is ``StateStoreSaveExec``.
    """

    schema: StateSchema
    aggregator: Aggregator
    output: pa.Schema
    output_mode: str = "update"
    event_time: EventTime | None = None
    is_partial: bool = False
    limits: Limits | None = None
    is_global: bool = False

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        """Aggregate the rows, merge them with the stored states of their keys, commit, and yield the results."""
        counting = replace(self, aggregator=self.aggregator.counting())
        columns = empty(self.aggregator.state_schema)
        reducer = RowReducer(self.schema.key, store.num_key_groups, columns, counting._reduce, self.limits)
        if self.is_global:
            reducer.add(self._nothing(store.num_key_groups))
        return _AggregateBatch(counting, store, timer).results(batches, reducer, self.output)

    def by_key(self, rows: pa.RecordBatch, num_key_groups: int) -> KeyedRows:
        groups = group_rows(rows, self.schema.key, num_key_groups)
        if self.is_partial:
            rows = rows.select(self.aggregator.state_schema.names)
            states = self.aggregator.merge(groups.ids, len(groups.keys), rows)
        else:
            states = self.aggregator.partial(groups.ids, len(groups.keys), rows)
        return KeyedRows(groups.keys, np.arange(len(groups.keys)), states)

    def _nothing(self, num_key_groups: int) -> KeyedRows:
        """Return the only key of an aggregate over all rows, with the state of no rows."""
        key = pa.RecordBatch.from_arrays([pa.array([True])], schema=self.schema.key)
        states = self.aggregator.partial(np.zeros(0, np.int64), 1, empty(self.aggregator.input_schema))
        return KeyedRows(encode_keys(key, key_groups(key, num_key_groups)), np.zeros(1, np.int64), states)

    def _reduce(self, ids: Ids, num_keys: int, states: pa.RecordBatch) -> tuple[Ids, pa.RecordBatch]:
        return np.arange(num_keys), self.aggregator.merge(ids, num_keys, states)


class GroupedBatch:
    """One micro-batch of one partition of an ``aggregate``, with session windows or without.

    ``by_key`` makes states of rows, given the number of key groups. Rows are late by ``late_by``; None: never.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        by_key: Callable[[pa.RecordBatch, int], KeyedRows],
        store: StateAccess,
        timer: StepTimer,
        late_by: EventTime | None,
    ) -> None:
        self._aggregator = aggregator
        self._by_key = by_key
        self._store = store
        self._timer = timer
        self._late_by = late_by
        self._rows = self._late = self._updated = self._removed = 0

    @property
    def _schema(self) -> StateSchema:
        """Return the schema of stored rows with its history. Ask after the first read, which opens the partition."""
        return self._store.schema.families[DEFAULT_FAMILY]

    def results(
        self, batches: Iterable[pa.RecordBatch], reducer: RowReducer, output: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """Make states of the rows, merge them into the state, commit, and yield the rows to emit."""
        with reducer:
            for rows in parts_of(batches, self._timer, "aggregate_ms"):
                self.add(rows, reducer)
            self.add_due_keys(reducer)
            with Spool(output) as spool:
                self.merge(reducer, spool)
                self._timer.step("merge_ms")
                self._store.commit(self.figures(), self._timer.milliseconds)
                yield from spool.batches()

    def add_due_keys(self, reducer: RowReducer) -> None:
        """Add the keys that ``merge`` must visit although no row has them."""

    def merge(self, reducer: RowReducer, spool: Spool) -> None:
        """Merge the new states into the state, and put the rows to emit into the spool."""
        raise NotImplementedError

    def figures(self) -> OperatorFigures:
        """Return the counts of rows that came, and of late rows, and of updated and removed rows of state."""
        custom = self._aggregator.figures()
        return OperatorFigures(self._rows, self._updated, self._removed, self._late, custom)

    def add(self, rows: pa.RecordBatch, reducer: RowReducer) -> None:
        """Make states of the rows that are not late."""
        if self._late_by is not None:
            rows, late = late_rows_removed(rows, self._late_by, self._store.times.late_watermark_ms)
            self._late += late
        self._rows += rows.num_rows
        if rows.num_rows:
            reducer.add(self._by_key(rows, self._store.num_key_groups))

    def _add_due(self, family: str, no_rows: pa.RecordBatch, reducer: RowReducer) -> None:
        """Add the keys that are due by the watermark in a family, without rows."""
        ranges = EventTime(DUE).done_ranges(self._store.key_groups, self._store.times.watermark_ms)
        for pairs in scanned(self._store, ranges, family):
            keys = without_expiry(pairs.column(0))
            reducer.add(KeyedRows(keys.take(key_order(keys)), np.zeros(0, np.int64), no_rows))

    def _stage_due(self, keys: pa.BinaryArray, chosen: Mask, due: Integers, family: str, *, present: bool) -> None:
        """Stage the chosen keys by their due times in a family, or the removal of such keys."""
        if not chosen.any():
            return
        by_due = by_expiry(keys.filter(pa.array(chosen)), due[chosen])
        schema = self._store.schema.families[family]
        values = schema.encode_values(is_present(len(by_due))) if present else pa.nulls(len(by_due), pa.binary())
        self._store.stage(by_due, values, family)


class _AggregateBatch(GroupedBatch):
    def __init__(self, logic: AggregateLogic, store: StateAccess, timer: StepTimer) -> None:
        # Without event time, nothing is ever late or done; in "complete", nothing is removed.
        self._event_time = logic.event_time if logic.output_mode != "complete" else None
        super().__init__(logic.aggregator, logic.by_key, store, timer, self._event_time)
        self._logic = logic

    def merge(self, reducer: RowReducer, spool: Spool) -> None:
        is_fixed = all(fixed_dtype(f.type) is not None for f in self._logic.aggregator.state_schema)
        has_lists = any(o.max_bytes is not None for o in self._logic.aggregator.outputs)
        keys = FIXED_KEYS_PER_STEP if is_fixed else LIST_KEYS_PER_STEP if has_lists else AGGREGATE_KEYS_PER_STEP
        size = StepSize(keys)
        ranges = self._ranges_to_visit()

        def visit(behind: bytes | None, up_to: bytes | None, touched: pa.BinaryArray) -> None:
            self._visit(between(ranges, behind, up_to), touched, spool)

        in_steps(reducer, size, lambda step: self._merge_step(step.keys, step.rows, spool), visit if ranges else None)

    def _ranges_to_visit(self) -> list[KeyRange]:
        """Return the ranges of keys that must be emitted or removed although the batch does not touch them."""
        if self._logic.output_mode == "complete":
            return all_keys(self._store.key_groups)
        times = self._store.times if self._event_time is not None else None
        if self._event_time is None or times is None or times.watermark_ms <= times.late_watermark_ms:
            return []  # the last batch has removed the keys that this watermark finishes
        return self._event_time.done_ranges(self._store.key_groups, times.watermark_ms)

    def _merge_step(self, keys: pa.BinaryArray, states: pa.RecordBatch, spool: Spool) -> int:
        """Merge the new states of keys into the stored states; return the bytes that both take."""
        logic, store = self._logic, self._store
        self._timer.step("merge_ms")
        old = store.get_many(keys)
        self._timer.step("get_ms")
        present = old.is_valid()
        before = self._schema.decode_values(old)
        try:
            states = logic.aggregator.merge_pairs(before, present, states)
        except ListTooLargeError as error:
            key = decode_keys(keys.slice(error.group, 1), logic.schema.key)
            raise error.of_key(key) from error
        self._updated += len(keys)
        if self._event_time is None:
            store.stage(keys, self._schema.encode_values(states))
            move_entries(store, keys, before, present, states)
            spool.add(self._output(keys, states))
            return int(old.nbytes + states.nbytes)
        columns = decode_keys(keys, logic.schema.key)
        done = self._event_time.is_done(columns, store.times.watermark_ms)
        if not done.any():
            store.stage(keys, self._schema.encode_values(states))
            move_entries(store, keys, before, present, states)
        else:
            is_done = pa.array(done)
            stays = pc.invert(is_done)
            store.stage(keys.filter(stays), self._schema.encode_values(states.filter(stays)))
            move_entries(store, keys, before, present, states, stays)
            self._remove(keys.filter(pc.and_(is_done, present)))
            # As in Spark, a key that comes and goes in one batch counts both as updated and as removed.
            self._removed += int(np.count_nonzero(done & ~np.asarray(present)))
        if logic.output_mode == "update":
            spool.add(self._output(keys, states))
        elif done.any():
            spool.add(self._output(keys.filter(is_done), states.filter(is_done)))
        return int(old.nbytes + states.nbytes)

    def _visit(self, ranges: list[KeyRange], touched: pa.BinaryArray, spool: Spool) -> None:
        """Emit the stored keys of some ranges that are not among ``touched``, and remove those that are done."""
        logic = self._logic
        pairs_touched = SortedPairs(touched, touched)
        for pairs in scanned(self._store, ranges):
            keys, values = pairs.column(0), pairs.column(1)
            near = pairs_touched.between(keys[0].as_py(), keys[-1].as_py() + b"\x00").keys
            if len(near):
                others = pc.invert(pc.is_in(keys, near))
                keys, values = keys.filter(others), values.filter(others)
            if self._event_time is not None and not self._event_time.is_exact:
                columns = decode_keys(keys, logic.schema.key)
                done = pa.array(self._event_time.is_done(columns, self._store.times.watermark_ms))
                keys, values = keys.filter(done), values.filter(done)
            if self._event_time is not None:
                remove_entries(self._store, keys, values)
                self._remove(keys)
            if logic.output_mode != "update" and len(keys):
                spool.add(self._output(keys, self._schema.decode_values(values)))

    def _remove(self, keys: pa.BinaryArray) -> None:
        if len(keys):
            self._store.stage(keys, pa.nulls(len(keys), pa.binary()))
            self._removed += len(keys)

    def _output(self, keys: pa.BinaryArray, states: pa.RecordBatch) -> pa.RecordBatch:
        logic = self._logic
        columns = dict(zip(logic.schema.key.names, decode_keys(keys, logic.schema.key).columns, strict=True))
        results = logic.aggregator.results(states)
        columns.update(zip((o.name for o in logic.aggregator.outputs), results, strict=True))
        return pa.RecordBatch.from_arrays([columns[n] for n in logic.output.names], schema=logic.output)


# Aggregating before the shuffle: the rows of one key in a task become one partial result.
#
# This costs another pass through Python. It pays if few keys have most of the rows, or if the network is slow:
# with 500,000 rows on one machine, 100,000 keys took 0.25 s longer than without, and 100 keys as long as without. A
# task that finds few rows per key stops grouping and makes a partial result of each row, which is cheap.


WORTHWHILE = 0.5
"""The most results per row at which a task still groups."""


def aggregated_ahead(df: DataFrame, logic: AggregateLogic) -> DataFrame:
    """Return partial results of the rows; the operator's tasks take them by the same logic with ``is_partial`` set."""
    columns = pa.schema([*logic.schema.key, *logic.aggregator.state_schema])
    # The tasks after the shuffle count the elements that their limits drop.
    ahead = replace(logic, aggregator=logic.aggregator.unlimited())
    return map_in_arrow(df, PartialTask(ahead, columns).run, "partial_aggregation", spark_struct(columns))


@dataclass(frozen=True)
class PartialTask:
    """The function of the tasks before the shuffle; ``columns`` are the stored keys and the states."""

    logic: AggregateLogic
    columns: pa.Schema

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        is_worthwhile = True
        for rows in parts_of(batches, StepTimer(), "aggregate_ms"):
            part = self._by_key(rows) if is_worthwhile else self._each(rows)
            is_worthwhile = is_worthwhile and part.num_rows <= rows.num_rows * WORTHWHILE
            for start in range(0, part.num_rows, OUTPUT_ROWS):
                yield part.slice(start, OUTPUT_ROWS)

    def _by_key(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        part = self.logic.by_key(rows, 1)  # key groups are computed after the shuffle
        keys = decode_keys(part.keys, self.logic.schema.key)
        return self._batch([*keys.columns, *part.rows.columns])

    def _each(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        keys = [plain(rows.column(name)) for name in self.logic.schema.key.names]
        states = self.logic.aggregator.partial(np.arange(rows.num_rows), rows.num_rows, rows)
        return self._batch([*keys, *states.columns])

    def _batch(self, columns: list[pa.Array]) -> pa.RecordBatch:
        cast = [c.cast(f.type) for c, f in zip(columns, self.columns, strict=True)]
        return pa.RecordBatch.from_arrays(cast, schema=self.columns)
