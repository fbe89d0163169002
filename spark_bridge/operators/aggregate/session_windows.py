"""The work of an ``aggregate`` operator with session windows: sessions per key, extended and merged by what comes.

A key's sessions are one row of state: their starts, ends and aggregates as an array, in order. As they never touch,
they are ordered by their ends too. A second column family has the keys by ``due``, a time that no session of the key
ends before; since most sessions go on and on, it is left behind where it is and only corrected when the watermark
gets there. What belongs together is what Spark's ``MergingSessionsExec`` puts together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import fixed_array, list_array, list_parts, struct_array
from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.ids import DEFAULT_FAMILY
from coordinator_actor.messages import OperatorFigures
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.row_groups import group_rows
from spark_bridge.state_format.families import ENDS_FAMILY
from spark_bridge.state_format.layouts import DUE, END, START, is_present
from spark_bridge.state_format.stored_keys import by_expiry, without_expiry
from spark_bridge.task.keyed_rows import Ids, KeyedRows, RowReducer, StepSize, empty, one_batch, parts_of, scanned
from spark_bridge.task.sorted_runs import Limits
from spark_bridge.task.spool import Spool
from spark_bridge.task.state_access import StateAccess
from spark_bridge.task.state_task import StepTimer
from spark_bridge.task.watermark import EventTime, all_keys, between, late_rows_removed

KEYS_PER_STEP = 1 << 14

Times = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SessionLogic:
    """Running aggregates by key and session.

    ``schema`` is of ``session_schema``; ``window`` names the column of the rows that has the session which each would be by
    itself, and the output's. ``output_mode`` "update" emits the sessions that rows of the batch belong to, "append"
    sessions that have ended by the watermark, "complete" all sessions. What has ended goes from the state, except in
    "complete".
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
        """The key columns, without the session."""
        return self.schema.families[DEFAULT_FAMILY].key

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        """Make sessions of the rows, merge them with the keys' old ones, commit, and give the results."""
        work = _Work(self, store, timer)
        sessions = empty(self._session_columns())
        with RowReducer(self.keys, store.num_key_groups, sessions, self.merged, self.limits) as reducer:
            for rows in parts_of(batches, timer, "aggregate_ms"):
                work.add(rows, reducer)
            work.add_due_keys(reducer)
            with Spool(self.output) as spool:
                work.merge(reducer, spool)
                timer.step("merge_ms")
                store.commit(work.figures(), timer.milliseconds)
                yield from spool.batches()

    def by_key(self, rows: pa.RecordBatch, num_key_groups: int) -> KeyedRows:
        """The sessions of rows by key."""
        groups = group_rows(rows, self.keys, num_key_groups)
        windows = rows.column(self.window)
        starts, ends = (pc.struct_field(windows, [i]).cast(pa.int64()).to_numpy() for i in (0, 1))
        of_rows, ids, first_starts, last_ends = joined_sessions(groups.ids, starts, ends)
        states = self.aggregator.partial(of_rows, len(ids), rows)
        return KeyedRows(groups.keys, ids, self._sessions(first_starts, last_ends, states))

    def merged(self, ids: Ids, num_keys: int, sessions: pa.RecordBatch) -> tuple[Ids, pa.RecordBatch]:
        """Sessions of keys, those that touch made one."""
        starts, ends = (sessions.column(i).to_numpy() for i in (0, 1))
        of_rows, ids, first_starts, last_ends = joined_sessions(ids, starts, ends)
        states = self.aggregator.merge(of_rows, len(ids), sessions)
        return ids, self._sessions(first_starts, last_ends, states)

    def _session_columns(self) -> pa.Schema:
        return pa.schema([pa.field(START, pa.int64()), pa.field(END, pa.int64()), *self.aggregator.state_schema])

    def _sessions(self, starts: Times, ends: Times, states: pa.RecordBatch) -> pa.RecordBatch:
        columns = [pa.array(starts), pa.array(ends), *states.columns]
        return pa.RecordBatch.from_arrays(columns, schema=self._session_columns())


def joined_sessions(ids: Ids, starts: Times, ends: Times) -> tuple[Ids, Ids, Times, Times]:
    """Which rows belong to one session: those of one key whose times touch.

    Gives for each row the number of its session, and for each session its key, start and end. Sessions are numbered by
    key and start.
    """
    order = np.lexsort((starts, ids))
    keys, begun, ended = ids[order], starts[order], ends[order]
    is_new = np.ones(len(ids), np.bool_)
    same_key = keys[1:] == keys[:-1]
    reached = ended
    if (same_key & (ended[1:] < ended[:-1])).any():
        # The greatest end so far of the same key: of numbers that order by key and then by end.
        distinct, ranks = np.unique(ended, return_inverse=True)
        reached = distinct[np.maximum.accumulate(keys * len(distinct) + ranks) - keys * len(distinct)]
    is_new[1:] = ~same_key | (begun[1:] > reached[:-1])
    of_rows = np.empty(len(ids), np.int64)
    of_rows[order] = np.cumsum(is_new) - 1
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(ids)) - 1
    return of_rows, keys[first], begun[first], reached[last] if len(ids) else ended


class _Work:
    """One batch of one partition."""

    def __init__(self, logic: SessionLogic, store: StateAccess, timer: StepTimer) -> None:
        self._logic = logic
        self._store = store
        self._timer = timer
        self._time = logic.schema.families[ENDS_FAMILY].key.field(0).type
        self._removes = logic.evicts and logic.output_mode != "complete"
        self._watermark = store.times.watermark_ms * 1000 if self._removes else np.iinfo(np.int64).min
        """Sessions that end until then have ended, in microseconds."""
        self._rows = self._late = self._updated = self._removed = 0

    def figures(self) -> OperatorFigures:
        """What was done to the state; rows of state are sessions."""
        return OperatorFigures(self._rows, self._updated, self._removed, self._late)

    def add(self, rows: pa.RecordBatch, reducer: RowReducer) -> None:
        """Make sessions of rows."""
        if self._logic.evicts:
            window = EventTime(self._logic.window, is_window=True)
            rows, late = late_rows_removed(rows, window, self._store.times.late_watermark_ms)
            self._late += late
        self._rows += rows.num_rows
        if rows.num_rows:
            reducer.add(self._logic.by_key(rows, self._store.num_key_groups))

    def add_due_keys(self, reducer: RowReducer) -> None:
        """Have the keys visited that may have sessions which have ended."""
        if not self._removes or self._store.times.watermark_ms <= self._store.times.late_watermark_ms:
            return  # what the last watermark has ended is gone already
        ranges = EventTime(DUE).done_ranges(self._store.key_groups, self._store.times.watermark_ms)
        without = empty(self._logic._session_columns())
        for pairs in scanned(self._store, ranges, ENDS_FAMILY):
            keys = without_expiry(pairs.column(0))
            reducer.add(KeyedRows(keys.take(pc.sort_indices(keys)), np.zeros(0, np.int64), without))

    def merge(self, reducer: RowReducer, spool: Spool) -> None:
        """Merge what was made into the state, and what is to be emitted into the spool."""
        size = StepSize(KEYS_PER_STEP)
        is_complete = self._logic.output_mode == "complete"
        behind = None
        for part in reducer.steps():
            start = 0
            while start < len(part.keys):
                step = part.slice(start, size.keys)
                start += len(step.keys)
                size.seen(len(step.keys), self._merge_step(step, spool))
                if is_complete:
                    last = step.keys[-1].as_py()
                    self._emit_others(behind, last, step.keys, spool)
                    behind = last
        if is_complete:
            self._emit_others(behind, None, pa.array([], pa.binary()), spool)

    def _merge_step(self, new: KeyedRows, spool: Spool) -> int:
        logic, store = self._logic, self._store
        schema = logic.schema.families[DEFAULT_FAMILY]
        self._timer.step("merge_ms")
        stored = store.get_many(new.keys)
        self._timer.step("get_ms")
        present = np.asarray(stored.is_valid())
        old_ids, old, due = self._decoded(schema.decode_values(stored))
        both_ids = np.concatenate([old_ids, new.ids])
        both = one_batch([old, new.rows])
        starts, ends = (both.column(i).to_numpy() for i in (0, 1))
        of_rows, ids, first_starts, last_ends = joined_sessions(both_ids, starts, ends)
        touched = np.zeros(len(ids), np.bool_)
        touched[of_rows[len(old_ids) :]] = True
        states = logic.aggregator.merge(of_rows, len(ids), both)
        sessions = logic._sessions(first_starts, last_ends, states)
        ended = last_ends <= self._watermark
        self._updated += int(np.count_nonzero(touched))
        self._removed += int(np.count_nonzero(ended))
        emitted = {"update": touched, "append": ended, "complete": np.ones(len(ids), np.bool_)}[logic.output_mode]
        if emitted.any():
            spool.add(self._output(new.keys, ids[emitted], sessions.filter(pa.array(emitted))))
        stays = ~ended
        self._stage(new.keys, present, due, ids[stays], sessions.filter(pa.array(stays)))
        return int(stored.nbytes + both.nbytes)

    def _decoded(self, values: pa.RecordBatch) -> tuple[Ids, pa.RecordBatch, pa.Array]:
        """The sessions of stored keys with the numbers of their keys, and when the keys are due."""
        elements, offsets = list_parts(values.column(0))
        ids = np.repeat(np.arange(values.num_rows, dtype=np.int64), np.diff(offsets))
        start, end, *states = elements.flatten()
        columns = [start.cast(pa.int64()), end.cast(pa.int64()), *states]
        return ids, pa.RecordBatch.from_arrays(columns, schema=self._logic._session_columns()), values.column(1)

    def _stage(self, keys: pa.BinaryArray, present: Mask, due: pa.Array, ids: Ids, sessions: pa.RecordBatch) -> None:
        """Stage the sessions that stay; ``present`` and ``due`` tell what is stored of each key."""
        num_keys = len(keys)
        counts = np.bincount(ids, minlength=num_keys)
        has_sessions = counts > 0
        offsets = np.concatenate([[0], np.cumsum(counts)])
        earliest = np.zeros(num_keys, np.int64)
        earliest[has_sessions] = sessions.column(1).to_numpy()[offsets[:-1][has_sessions]]
        was_due = np.asarray(due.is_valid())
        old_due = due.cast(pa.int64()).fill_null(0).to_numpy()
        holds = has_sessions & was_due & (old_due > self._watermark) & (old_due <= earliest)
        new_due = np.where(holds, old_due, earliest)

        schema = self._logic.schema.families[DEFAULT_FAMILY]
        kind = schema.value.field(0).type
        starts, ends, *states = sessions.columns
        element = struct_array(
            [starts.cast(self._time), ends.cast(self._time), *states], sessions.num_rows, None, kind.value_type
        )
        row = [list_array(element, offsets, None, kind), fixed_array(new_due, None, self._time)]
        values = schema.encode_values(pa.RecordBatch.from_arrays(row, schema=schema.value))
        changed = pa.array(has_sessions | present)
        gone = pc.if_else(pa.array(has_sessions), values, pa.scalar(None, pa.binary()))
        self._store.stage(keys.filter(changed), gone.filter(changed))
        self._stage_due(keys, was_due & ~holds, old_due, present=False)
        self._stage_due(keys, has_sessions & ~holds, new_due, present=True)

    def _stage_due(self, keys: pa.BinaryArray, chosen: Mask, due: Times, *, present: bool) -> None:
        """Put the chosen keys among those by ``due``, or remove them there."""
        if not chosen.any():
            return
        by_due = by_expiry(keys.filter(pa.array(chosen)), due[chosen])
        schema = self._logic.schema.families[ENDS_FAMILY]
        values = schema.encode_values(is_present(len(by_due))) if present else pa.nulls(len(by_due), pa.binary())
        self._store.stage(by_due, values, ENDS_FAMILY)

    def _emit_others(self, behind: bytes | None, up_to: bytes | None, touched: pa.BinaryArray, spool: Spool) -> None:
        """Emit the sessions of stored keys in a range that are not among those touched."""
        for pairs in scanned(self._store, between(all_keys(self._store.key_groups), behind, up_to)):
            others = pairs.filter(pc.invert(pc.is_in(pairs.column(0), touched)))
            ids, sessions, _ = self._decoded(
                self._logic.schema.families[DEFAULT_FAMILY].decode_values(others.column(1))
            )
            spool.add(self._output(others.column(0), ids, sessions))

    def _output(self, keys: pa.BinaryArray, ids: Ids, sessions: pa.RecordBatch) -> pa.RecordBatch:
        logic = self._logic
        key_columns = decode_keys(keys, logic.keys).take(pa.array(ids))
        columns = dict(zip(logic.keys.names, key_columns.columns, strict=True))
        starts, ends, *states = sessions.columns
        window = logic.output.field(logic.window).type
        times = [starts.cast(self._time), ends.cast(self._time)]
        columns[logic.window] = struct_array(times, len(ids), None, window)
        results = logic.aggregator.results(pa.RecordBatch.from_arrays(states, schema=logic.aggregator.state_schema))
        columns.update(zip((o.name for o in logic.aggregator.outputs), results, strict=True))
        return pa.RecordBatch.from_arrays([columns[n] for n in logic.output.names], schema=logic.output)
