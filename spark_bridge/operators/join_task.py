"""The work of ``join`` in a state task: rows of both sides by key, matched with each other and with those that wait.

The rows of a batch are sorted by key, and the chunks of waiting rows that the watermark has reached with them. For some
keys at a time, new rows of one side are matched with the waiting and the new rows of the other side. Then the rows that
can find no match any more leave the state; if the join asks for it, those that never had one are emitted. Spark's
counterpart is ``StreamingSymmetricHashJoinExec``: in one batch, all matches come before any row is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import Mask, distinct_names
from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.messages import OperatorFigures
from spark_bridge.aggregates.row_groups import as_type, group_rows
from spark_bridge.exceptions import StatefulProcessorError
from spark_bridge.operators import join_sides
from spark_bridge.operators.waiting_rows import Due, Waiting, WaitingRows
from spark_bridge.state_format.layouts import LEFT, MATCHED, NO_TIME, RIGHT, join_schema
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.keyed_rows import Ids, KeyedRows, RowReducer, StepSize, empty, in_steps, one_batch, parts_of
from spark_bridge.task.state_task import Times
from spark_bridge.task.task_store import Spool, StateAccess

# The output of a join: matching rows of both sides, and rows of one side that have no match.


Apply: TypeAlias = Callable[[pa.Table, pa.Table], "pa.Table | pa.RecordBatch"]
"""Takes matching rows of both sides, row by row, and yields output."""


@dataclass(frozen=True)
class SideRows:
    """All rows of one side that a step handles: first the new ones, then those that were waiting.

    ``can_match`` is false for rows with a null in their key, or without a time if the join has bounds.
    """

    waiting: Waiting
    due: Due
    num_new: int
    ids: Ids
    times: Times
    rows: pa.RecordBatch
    can_match: Mask

    def matchable(self, *, new: bool, old: bool) -> join_sides.RowsToMatch:
        """Return the new rows, the waiting rows, or both, as far as they can match."""
        chosen = self.can_match.copy()
        if not new:
            chosen[: self.num_new] = False
        if not old:
            chosen[self.num_new :] = False
        return join_sides.RowsToMatch(self.ids, self.times, np.arange(len(self.ids))).where(chosen)


SomeRows: TypeAlias = tuple[SideRows, Ids] | None
"""Rows of a side by their numbers; None: nulls instead of rows of the side."""


@dataclass(frozen=True)
class JoinOutput:
    """Makes the rows of the output; the fields are those of ``JoinLogic``."""

    keys: pa.Schema
    sides: tuple[join_sides.JoinSide, join_sides.JoinSide]
    output: pa.Schema
    apply: Apply | None
    table_columns: tuple[tuple[str, ...], tuple[str, ...]]

    def emit(self, keys: pa.RecordBatch, left: SomeRows, right: SomeRows, spool: Spool) -> None:
        """Put pairs of rows into the spool."""
        num_rows = next(len(rows[1]) for rows in (left, right) if rows is not None)
        for first in range(0, num_rows, join_sides.PAIRS_AT_ONCE):
            part = slice(first, first + join_sides.PAIRS_AT_ONCE)
            spool.add(self._output(keys, [rows and (rows[0], rows[1][part]) for rows in (left, right)]))

    def _output(self, keys: pa.RecordBatch, both: Sequence[SomeRows]) -> pa.RecordBatch:
        n = next(len(rows[1]) for rows in both if rows is not None)
        key_columns: list[pa.RecordBatch | None] = []
        columns: list[list[pa.Array]] = []
        for side, rows in zip(self.sides, both, strict=True):
            if rows is None:
                key_columns.append(None)
                columns.append([pa.nulls(n, kind) for kind in side.columns.types])
            else:
                of_side, numbers = rows
                key_columns.append(keys.take(pa.array(of_side.ids[numbers])))
                columns.append(of_side.rows.take(pa.array(numbers)).columns)
        if self.apply is not None:
            return self._applied(key_columns, columns, n)
        of_keys = next(k for k in key_columns if k is not None)
        named = {f.name: c for f, c in zip(self.keys, of_keys.columns, strict=True)}
        for side, arrays in zip(self.sides, columns, strict=True):
            named.update({f.name: c for f, c in zip(side.columns, arrays, strict=True) if f.name in self.output.names})
        return pa.RecordBatch.from_arrays([named[f.name] for f in self.output], schema=self.output)

    def _applied(
        self, key_columns: list[pa.RecordBatch | None], columns: list[list[pa.Array]], n: int
    ) -> pa.RecordBatch:
        """Return the output of the user's function for rows of both sides."""
        assert self.apply is not None
        tables = []
        for side, of_keys, arrays, names in zip(self.sides, key_columns, columns, self.table_columns, strict=True):
            of_key = [pa.nulls(n, f.type) for f in self.keys] if of_keys is None else of_keys.columns
            named = dict(zip([*self.keys.names, *side.columns.names], [*of_key, *arrays], strict=True))
            tables.append(pa.table({name: named[name] for name in names}))
        result = self.apply(tables[0], tables[1])
        if not isinstance(result, (pa.Table, pa.RecordBatch)):
            raise StatefulProcessorError(
                f"apply= of a join returned {type(result).__name__}: it must return a pyarrow.Table or RecordBatch."
            )
        if any(result.schema.names.count(name) != 1 for name in self.output.names):
            raise StatefulProcessorError(
                f"apply= of a join returned the columns {', '.join(result.schema.names) or 'none'}; output= declares "
                f"one each of {', '.join(self.output.names)}."
            )
        table = pa.Table.from_batches([result]) if isinstance(result, pa.RecordBatch) else result
        return one_batch(table.select(self.output.names).cast(self.output).to_batches() or [empty(self.output)])


JOIN_KEYS_PER_STEP = 1 << 14
"""Keys whose waiting rows are read and written at once, to begin with."""
_CHUNK = "__statestore_chunk"
"""The number of a chunk that is due, in a placeholder row; such rows are of ``DUE_SIDES``."""
DUE_SIDES = (join_sides.LEFT_ROW + 2, join_sides.RIGHT_ROW + 2)


@dataclass(frozen=True)
class JoinLogic:
    """A join of the rows of two sides that have one key.

    ``keys`` are the key columns as stored. ``slots`` are the types of the shared columns that hold the rows of both
    sides. ``bounds`` decide which of these rows match. ``output`` are the columns of the output: the keys, those of
    the left side, and those of the right side unless ``how`` emits left rows only. With ``apply``, they are the columns
    that it returns; ``table_columns`` are the columns of the two tables that it takes.
    """

    schema: OperatorSchema
    keys: pa.Schema
    slots: tuple[pa.DataType, ...]
    left: join_sides.JoinSide
    right: join_sides.JoinSide
    how: str
    bounds: join_sides.Bounds
    output: pa.Schema
    apply: Apply | None = None
    table_columns: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    limits: Limits | None = None

    @property
    def sides(self) -> tuple[join_sides.JoinSide, join_sides.JoinSide]:
        return self.left, self.right

    @property
    def row_schema(self) -> pa.Schema:
        """Return the columns of rows that are sorted by key: side, chunk number and shared columns."""
        slots = (pa.field(join_sides.slot_name(i), kind) for i, kind in enumerate(self.slots))
        return pa.schema([pa.field(join_sides.SIDE, pa.int8()), pa.field(_CHUNK, pa.int64()), *slots])

    def batch(self, store: StateAccess, timer: StepTimer) -> JoinBatch:
        return JoinBatch(self, store, timer)

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        """Match the rows with each other and with those that wait, commit, and yield the output."""
        work = self.batch(store, timer)
        with (
            RowReducer(self.keys, store.num_key_groups, empty(self.row_schema), _sorted, self.limits) as reducer,
            Spool(self.output) as spool,
        ):
            for rows in parts_of(batches, timer, "sort_ms"):
                work.add(rows, reducer)
            work.add_due(reducer)
            in_steps(reducer, StepSize(JOIN_KEYS_PER_STEP), lambda step: work.step(step, spool))
            timer.step("join_ms")
            store.commit(work.figures(), timer.milliseconds)
            yield from spool.batches()


def join_logic(
    keys: pa.Schema,
    columns: tuple[pa.Schema, pa.Schema],
    how: str,
    bounds: join_sides.Bounds,
    output: pa.Schema,
    apply: Apply | None = None,
    table_columns: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
) -> JoinLogic:
    """Return the work of a join; ``columns`` are those that are stored of both sides, without the keys.

    Raises ``StateStoreError`` for types that cannot be kept.
    """
    slots, numbers = join_sides.shared_slots(columns[0].types, columns[1].types)
    flag = distinct_names([MATCHED], [*keys.names, *columns[0].names, *columns[1].names])[0]
    keeping = (
        how in (join_sides.LEFT_OUTER, join_sides.FULL, join_sides.ANTI),
        how in (join_sides.RIGHT_OUTER, join_sides.FULL),
    )
    left, right = (
        join_sides.JoinSide(
            (LEFT, RIGHT)[i],
            columns[i],
            numbers[i],
            (bounds.left, bounds.right)[i],
            (bounds.left_late, bounds.right_late)[i],
            bounds.expires_after_us[i],
            keeps_unmatched=keeping[i],
            leaves_once_matched=i == 0 and how in (join_sides.SEMI, join_sides.ANTI),
            flag=flag if keeping[i] and how != join_sides.ANTI else None,
        )
        for i in (0, 1)
    )
    schema = join_schema(
        keys,
        tuple(keys.names),
        {s.name: [*s.columns, *([pa.field(s.flag, pa.bool_())] if s.flag else [])] for s in (left, right)},
        [s.name for s in (left, right) if s.expires_after_us is not None],
        {"how": how, "within": bounds.in_words},
    )
    return JoinLogic(schema, keys, slots, left, right, how, bounds, output, apply, table_columns)


def _sorted(ids: Ids, num_keys: int, rows: pa.RecordBatch) -> tuple[Ids, pa.RecordBatch]:
    order = np.argsort(ids, kind="stable")
    return ids[order], rows.take(pa.array(order))


class JoinBatch:
    """One micro-batch of one partition."""

    def __init__(self, logic: JoinLogic, store: StateAccess, timer: StepTimer) -> None:
        self._logic = logic
        self._store = store
        self._timer = timer
        self._watermark = store.times.watermark_ms if logic.bounds.uses_time else 0
        self.output = JoinOutput(logic.keys, logic.sides, logic.output, logic.apply, logic.table_columns)
        self._state = [WaitingRows(side, store, self._due_until(side)) for side in logic.sides]
        self._rows = self._late = self._updated = self._removed = 0

    def figures(self) -> OperatorFigures:
        return OperatorFigures(self._rows, self._updated, self._removed, self._late)

    def _due_until(self, side: join_sides.JoinSide) -> int | None:
        """Return the time up to which chunks of a side are due; None if the last batch has handled all of them."""
        if side.expires_after_us is None or self._watermark <= self._store.times.late_watermark_ms:
            return None
        return self._watermark - side.expires_after_us // 1000

    def add(self, rows: pa.RecordBatch, reducer: RowReducer) -> None:
        """Keep the rows that are not late."""
        logic = self._logic
        is_right = np.asarray(rows.column(join_sides.SIDE)) == join_sides.RIGHT_ROW
        if logic.bounds.uses_time:
            late_watermark = self._store.times.late_watermark_ms
            of_left, of_right = (side.is_late(rows, late_watermark) for side in logic.sides)
            late = np.where(is_right, of_right, of_left)
            if late.any():
                self._late += int(np.count_nonzero(late))
                rows = rows.filter(pa.array(~late))
        self._rows += rows.num_rows
        if not rows.num_rows:
            return
        groups = group_rows(rows, logic.keys, self._store.num_key_groups)
        columns = [rows.column(join_sides.SIDE).cast(pa.int8()), pa.nulls(rows.num_rows, pa.int64())]
        columns += [as_type(rows.column(join_sides.slot_name(i)), kind) for i, kind in enumerate(logic.slots)]
        ids, sorted_rows = _sorted(groups.ids, 0, pa.RecordBatch.from_arrays(columns, schema=logic.row_schema))
        reducer.add(KeyedRows(groups.keys, ids, sorted_rows))

    def add_due(self, reducer: RowReducer) -> None:
        """Add the chunks that the watermark has reached, as rows of separate sides."""
        for state, code in zip(self._state, DUE_SIDES, strict=True):
            for keys, due in state.due():
                n = len(due.ids)
                columns = [pa.array(np.full(n, code, np.int8)), pa.array(due.numbers)]
                columns += [pa.nulls(n, kind) for kind in self._logic.slots]
                rows = pa.RecordBatch.from_arrays(columns, schema=self._logic.row_schema)
                reducer.add(KeyedRows(keys, due.ids, rows))

    def step(self, part: KeyedRows, spool: Spool) -> int:
        """Match the rows of some keys; return the bytes that they and the waiting rows take."""
        logic = self._logic
        keys = decode_keys(part.keys, logic.keys)
        no_nulls = self.no_nulls(keys, len(part.keys))
        codes = np.asarray(part.rows.column(join_sides.SIDE))
        sides = []
        for i in (join_sides.LEFT_ROW, join_sides.RIGHT_ROW):
            probed = np.zeros(len(part.keys), np.bool_)
            probed[part.ids[codes == 1 - i]] = True
            sides.append(self.side(i, part, keys, no_nulls, probed & no_nulls, codes))
        left, right = sides
        self._timer.step("get_ms")
        pairs = [
            (left.matchable(new=True, old=False), right.matchable(new=True, old=True)),
            (left.matchable(new=False, old=True), right.matchable(new=True, old=False)),
        ]
        matches = [join_sides.matches(*pair, logic.bounds.lower_us, logic.bounds.upper_us) for pair in pairs]
        matched = [np.zeros(len(side.ids), np.bool_) for side in (left, right)]
        for one in matches:
            matched[0][one.matched_probes] = True
            matched[1][one.matched_others] = True
        if logic.how == join_sides.SEMI:
            self.output.emit(keys, (left, np.flatnonzero(matched[0])), None, spool)
        elif logic.how != join_sides.ANTI:
            for one in matches:
                for of_left, of_right in one.pairs():
                    self.output.emit(keys, (left, of_left), (right, of_right), spool)
        for i in (join_sides.LEFT_ROW, join_sides.RIGHT_ROW):
            self._settle(i, part, keys, no_nulls, sides[i], matched[i], spool)
        return int(part.rows.nbytes + left.waiting.nbytes + right.waiting.nbytes)

    @staticmethod
    def no_nulls(keys: pa.RecordBatch, num_keys: int) -> Mask:
        no_nulls = np.ones(num_keys, np.bool_)
        for column in keys.columns:
            no_nulls &= np.asarray(column.is_valid())
        return no_nulls

    def side(
        self, i: int, part: KeyedRows, keys: pa.RecordBatch, no_nulls: Mask, probed: Mask, codes: npt.NDArray[np.int8]
    ) -> SideRows:
        """Return the rows of a side: the new ones, and those that wait, all of them for the keys ``probed``."""
        side, state = self._logic.sides[i], self._state[i]
        is_due = codes == DUE_SIDES[i]
        due = Due(part.ids[is_due], part.rows.column(_CHUNK).filter(pa.array(is_due)).to_numpy())
        self._timer.step("join_ms")
        waiting = state.read(part.keys, probed, due)
        is_new = codes == i
        new_ids = part.ids[is_new]
        rows = one_batch([side.rows(part.rows.filter(pa.array(is_new))), waiting.rows.select(side.columns.names)])
        ids = np.concatenate([new_ids, waiting.ids])
        times = side.times(keys, ids, rows)
        return SideRows(waiting, due, len(new_ids), ids, times, rows, no_nulls[ids] & (times != NO_TIME))

    def _settle(
        self,
        i: int,
        part: KeyedRows,
        keys: pa.RecordBatch,
        no_nulls: Mask,
        of_side: SideRows,
        matched: Mask,
        spool: Spool,
    ) -> None:
        """Emit the rows of a side that have found no match and can find none any more; stage the others."""
        side, n, waiting = self._logic.sides[i], of_side.num_new, of_side.waiting
        matched = matched | np.concatenate([np.zeros(n, np.bool_), waiting.matched])
        expired = side.expired(of_side.times, self._watermark)
        if side.keeps_unmatched and (unmatched := np.flatnonzero(expired & ~matched)).size:
            rows = of_side, unmatched
            self.output.emit(keys, rows if i == 0 else None, rows if i == 1 else None, spool)
        kept = ~expired
        if side.leaves_once_matched:
            kept &= ~matched
        if not side.keeps_unmatched:
            kept[:n] &= no_nulls[of_side.ids[:n]]
        self.write(i, part, of_side, kept, matched, of_side.times)

    def write(
        self,
        i: int,
        part: KeyedRows,
        of_side: SideRows,
        kept: Mask,
        matched: Mask,
        due_at: Times,
        *,
        has_entries: bool = True,
    ) -> None:
        """Stage the changed rows of a side; see ``WaitingRows.write``."""
        n, state = of_side.num_new, self._state[i]
        stored = np.flatnonzero(kept[:n])
        self._updated += len(stored)
        self._removed += int(np.count_nonzero(~kept[n:]))
        state.write(
            part.keys,
            of_side.waiting,
            kept[n:],
            matched[n:],
            due_at[n:],
            of_side.due,
            of_side.ids[stored],
            state.new_rows(of_side.rows.take(pa.array(stored)), matched[stored]),
            due_at[stored],
            has_entries=has_entries,
        )
