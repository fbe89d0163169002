"""The work of ``aggregate`` with session windows in a state task: sessions per key, extended and merged by new rows.

The sessions of a key are one row of state. They never touch, so that they are in the order of their starts and of their
ends at once. A second column family has the keys by due time. No session of a key ends before its due time. Most
sessions grow with each batch, and the due time does not move with them: it is corrected once the watermark reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import DEFAULT_FAMILY
from backends.encoding.columns import Mask, fixed_array, list_array, list_parts, struct_array
from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import OperatorSchema
from spark_bridge.aggregates.aggregator import Aggregator, ListTooLargeError
from spark_bridge.aggregates.row_groups import group_rows
from spark_bridge.operators.aggregate_task import GroupedBatch
from spark_bridge.state_format.layouts import END, ENDS_FAMILY, START
from spark_bridge.task import keyed_rows
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.state_task import EventTime, Times, all_keys, between
from spark_bridge.task.task_store import Spool, StateAccess

# Sessions of keys as rows: which rows make one session, and sessions to and from their stored form.
#
# In a task, a session is a row of its start and end (int64, microseconds since 1970) and the state columns of the
# aggregator. The state has all sessions of a key in one array, in order; see ``state_format.layouts.session_schema``.


def joined_sessions(
    ids: keyed_rows.Ids, starts: Times, ends: Times
) -> tuple[keyed_rows.Ids, keyed_rows.Ids, Times, Times]:
    """Join the sessions of each key whose times touch, as Spark's ``MergingSessionsExec`` does.

    ``ids`` are the numbers of the rows' keys. Returns for each row the number of its session, and for each session its
    key, start and end. Sessions are numbered by key and start.
    """
    order = np.lexsort((starts, ids))
    keys, begun, ended = ids[order], starts[order], ends[order]
    is_new = np.ones(len(ids), np.bool_)
    same_key = keys[1:] == keys[:-1]
    reached = ended
    if (same_key & (ended[1:] < ended[:-1])).any():
        # ``reached`` is the greatest end among this row and the rows of the same key before it. The number
        # ``keys * len(distinct) + ranks`` orders by key first, so that a running maximum never comes from another key.
        distinct, ranks = np.unique(ended, return_inverse=True)
        reached = distinct[np.maximum.accumulate(keys * len(distinct) + ranks) - keys * len(distinct)]
    is_new[1:] = ~same_key | (begun[1:] > reached[:-1])
    of_rows = np.empty(len(ids), np.int64)
    of_rows[order] = np.cumsum(is_new) - 1
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(ids)) - 1
    return of_rows, keys[first], begun[first], reached[last] if len(ids) else ended


@dataclass(frozen=True)
class SessionColumns:
    """The columns of sessions: ``states`` of the aggregator, ``value`` of the stored row of a key."""

    states: pa.Schema
    value: pa.Schema

    @property
    def time(self) -> pa.DataType:
        """Return the type of stored starts, ends and due times."""
        return self.value.field(1).type

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(START, pa.int64()), pa.field(END, pa.int64()), *self.states])

    def rows(self, starts: Times, ends: Times, states: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array(starts), pa.array(ends), *states.columns], schema=self.schema)

    def windows(self, sessions: pa.RecordBatch, kind: pa.DataType) -> pa.Array:
        """Return the bounds of sessions as structs of type ``kind``."""
        starts, ends = (sessions.column(i).cast(self.time) for i in (0, 1))
        return struct_array([starts, ends], sessions.num_rows, None, kind)

    def decoded(self, values: pa.RecordBatch) -> tuple[keyed_rows.Ids, pa.RecordBatch, pa.Array]:
        """Return the sessions of stored rows with the numbers of their keys, and the due time of each key."""
        elements, offsets = list_parts(values.column(0))
        ids = np.repeat(np.arange(values.num_rows, dtype=np.int64), np.diff(offsets))
        start, end, *states = elements.flatten()
        columns = [start.cast(pa.int64()), end.cast(pa.int64()), *states]
        return ids, pa.RecordBatch.from_arrays(columns, schema=self.schema), values.column(1)

    def stored(self, sessions: pa.RecordBatch, offsets: npt.NDArray[np.int64], due: Times) -> pa.RecordBatch:
        """Return the rows to store of n keys: the sessions between each key's n+1 ``offsets``, and its due time."""
        kind = self.value.field(0).type
        starts, ends, *states = sessions.columns
        columns = [starts.cast(self.time), ends.cast(self.time), *states]
        element = struct_array(columns, sessions.num_rows, None, kind.value_type)
        row = [list_array(element, offsets, None, kind), fixed_array(due, None, self.time)]
        return pa.RecordBatch.from_arrays(row, schema=self.value)


SESSION_KEYS_PER_STEP = 1 << 14
"""Keys whose sessions are read and written at once, to begin with."""


@dataclass(frozen=True)
class SessionLogic:
    """Running aggregates by key and session.

    ``schema`` is of ``session_schema``. ``window`` names the window column of the output, and a column of the input
    rows, which has the session that each row makes on its own. ``output_mode`` "update" emits the sessions that rows of
    the batch belong to, "append" the sessions that have ended by the watermark, "complete" all sessions. Sessions that
    have ended are removed from the state, except in "complete" or without a watermark (``evicts`` False).
    """

    schema: OperatorSchema
    aggregator: Aggregator
    output: pa.Schema
    window: str
    output_mode: str = "append"
    evicts: bool = True
    limits: Limits | None = None

    @property
    def keys(self) -> pa.Schema:
        """Return the key columns, without the session."""
        return self.schema.families[DEFAULT_FAMILY].key

    @cached_property
    def columns(self) -> SessionColumns:
        return SessionColumns(self.aggregator.state_schema, self.schema.families[DEFAULT_FAMILY].value)

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        """Make sessions of the rows, merge them with the keys' stored sessions, commit, and yield the results."""
        counting = replace(self, aggregator=self.aggregator.counting())
        sessions = keyed_rows.empty(self.columns.schema)
        reducer = keyed_rows.RowReducer(self.keys, store.num_key_groups, sessions, counting.merged, self.limits)
        return _SessionBatch(counting, store, timer).results(batches, reducer, self.output)

    def by_key(self, rows: pa.RecordBatch, num_key_groups: int) -> keyed_rows.KeyedRows:
        groups = group_rows(rows, self.keys, num_key_groups)
        windows = rows.column(self.window)
        starts, ends = (pc.struct_field(windows, [i]).cast(pa.int64()).to_numpy() for i in (0, 1))
        of_rows, ids, first_starts, last_ends = joined_sessions(groups.ids, starts, ends)
        states = self.aggregator.partial(of_rows, len(ids), rows)
        return keyed_rows.KeyedRows(groups.keys, ids, self.columns.rows(first_starts, last_ends, states))

    def merged(
        self, ids: keyed_rows.Ids, num_keys: int, sessions: pa.RecordBatch
    ) -> tuple[keyed_rows.Ids, pa.RecordBatch]:
        """Return the sessions of keys, with those that touch made one, and the numbers of their keys."""
        starts, ends = (sessions.column(i).to_numpy() for i in (0, 1))
        of_rows, ids, first_starts, last_ends = joined_sessions(ids, starts, ends)
        states = self.aggregator.merge(of_rows, len(ids), sessions)
        return ids, self.columns.rows(first_starts, last_ends, states)


class _SessionBatch(GroupedBatch):
    """One micro-batch of one partition; the rows of state are sessions."""

    def __init__(self, logic: SessionLogic, store: StateAccess, timer: StepTimer) -> None:
        late_by = EventTime(logic.window, is_window=True) if logic.evicts else None
        super().__init__(logic.aggregator, logic.by_key, store, timer, late_by)
        self._logic = logic
        self._columns = logic.columns
        self._removes = logic.evicts and logic.output_mode != "complete"
        self._watermark = store.times.watermark_ms * 1000 if self._removes else np.iinfo(np.int64).min
        """In microseconds: a session whose end is not after this time has ended."""

    def add_due_keys(self, reducer: keyed_rows.RowReducer) -> None:
        """Add the keys that may have sessions which have ended, so that ``merge`` visits them."""
        if not self._removes or self._store.times.watermark_ms <= self._store.times.late_watermark_ms:
            return  # the last batch has removed the sessions that this watermark ends
        self._add_due(ENDS_FAMILY, keyed_rows.empty(self._columns.schema), reducer)

    def merge(self, reducer: keyed_rows.RowReducer, spool: Spool) -> None:
        keyed_rows.in_steps(
            reducer,
            keyed_rows.StepSize(SESSION_KEYS_PER_STEP),
            lambda step: self._merge_step(step, spool),
            partial(self._emit_others, spool=spool) if self._logic.output_mode == "complete" else None,
        )

    def _merge_step(self, new: keyed_rows.KeyedRows, spool: Spool) -> int:
        """Merge the new sessions of some keys; return the bytes that they and the stored values take."""
        logic, store = self._logic, self._store
        self._timer.step("merge_ms")
        stored = store.get_many(new.keys)
        self._timer.step("get_ms")
        present = np.asarray(stored.is_valid())
        old_ids, old, due = self._columns.decoded(self._schema.decode_values(stored))
        both_ids = np.concatenate([old_ids, new.ids])
        both = keyed_rows.one_batch([old, new.rows])
        starts, ends = (both.column(i).to_numpy() for i in (0, 1))
        of_rows, ids, first_starts, last_ends = joined_sessions(both_ids, starts, ends)
        touched = np.zeros(len(ids), np.bool_)
        touched[of_rows[len(old_ids) :]] = True
        try:
            states = logic.aggregator.merge(of_rows, len(ids), both)
        except ListTooLargeError as error:
            key = decode_keys(new.keys.slice(int(ids[error.group]), 1), logic.keys)
            raise error.of_key(key) from error
        sessions = self._columns.rows(first_starts, last_ends, states)
        ended = last_ends <= self._watermark
        self._updated += int(np.count_nonzero(touched))
        self._removed += int(np.count_nonzero(ended))
        emitted = {"update": touched, "append": ended, "complete": np.ones(len(ids), np.bool_)}[logic.output_mode]
        if emitted.any():
            spool.add(self._output(new.keys, ids[emitted], sessions.filter(pa.array(emitted))))
        stays = ~ended
        self._stage(new.keys, present, due, ids[stays], sessions.filter(pa.array(stays)))
        return int(stored.nbytes + both.nbytes)

    def _stage(
        self, keys: pa.BinaryArray, present: Mask, due: pa.Array, ids: keyed_rows.Ids, sessions: pa.RecordBatch
    ) -> None:
        """Stage the sessions that stay; ``present`` and ``due`` describe the stored rows of each key."""
        num_keys = len(keys)
        counts = np.bincount(ids, minlength=num_keys)
        has_sessions = counts > 0
        offsets = np.concatenate([[0], np.cumsum(counts)])
        earliest = np.zeros(num_keys, np.int64)
        earliest[has_sessions] = sessions.column(1).to_numpy()[offsets[:-1][has_sessions]]
        was_due = np.asarray(due.is_valid())
        old_due = due.cast(pa.int64()).fill_null(0).to_numpy()
        keeps_due = has_sessions & was_due & (old_due > self._watermark) & (old_due <= earliest)
        new_due = np.where(keeps_due, old_due, earliest)

        values = self._schema.encode_values(self._columns.stored(sessions, offsets, new_due))
        changed = pa.array(has_sessions | present)
        values_or_null = pc.if_else(pa.array(has_sessions), values, pa.scalar(None, pa.binary()))
        self._store.stage(keys.filter(changed), values_or_null.filter(changed))
        self._stage_due(keys, was_due & ~keeps_due, old_due, ENDS_FAMILY, present=False)
        self._stage_due(keys, has_sessions & ~keeps_due, new_due, ENDS_FAMILY, present=True)

    def _emit_others(self, behind: bytes | None, up_to: bytes | None, touched: pa.BinaryArray, spool: Spool) -> None:
        """Emit the sessions of the stored keys in a range that are not among ``touched``."""
        for pairs in keyed_rows.scanned(self._store, between(all_keys(self._store.key_groups), behind, up_to)):
            others = pairs.filter(pc.invert(pc.is_in(pairs.column(0), touched)))
            values = self._schema.decode_values(others.column(1))
            ids, sessions, _ = self._columns.decoded(values)
            spool.add(self._output(others.column(0), ids, sessions))

    def _output(self, keys: pa.BinaryArray, ids: keyed_rows.Ids, sessions: pa.RecordBatch) -> pa.RecordBatch:
        logic = self._logic
        key_columns = decode_keys(keys, logic.keys).take(pa.array(ids))
        columns = dict(zip(logic.keys.names, key_columns.columns, strict=True))
        columns[logic.window] = self._columns.windows(sessions, logic.output.field(logic.window).type)
        states = pa.RecordBatch.from_arrays(sessions.columns[2:], schema=self._columns.states)
        results = logic.aggregator.results(states)
        columns.update(zip((o.name for o in logic.aggregator.outputs), results, strict=True))
        return pa.RecordBatch.from_arrays([columns[n] for n in logic.output.names], schema=logic.output)
