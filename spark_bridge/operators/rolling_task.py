"""The work of ``aggregate`` with horizons in a state task: newest rows and tiles of older ones per key.

A key has two rows of state. One has its newest pieces, and for each horizon the merged state of the older ones, so that
a batch emits all horizons without reading the tiles. The other row has the tiles. It is read when a horizon loses a
tile, and written when the key has many newest pieces. A third column family has the keys by a
time before which they do not expire; as with sessions, that time is corrected when the watermark gets there. A fourth
one has the newest time of the rows that each key group has lost: no horizon that begins before it can be answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import DEFAULT_FAMILY
from backends.encoding.columns import Integers, Mask, fixed_array, list_array, list_parts, struct_array
from backends.encoding.keys import decode_keys, encode_keys
from backends.encoding.operator_schema import OperatorSchema
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.rolling import Pieces, Rolling, results_of, time_order
from spark_bridge.aggregates.rolling_singles import SingleAnswers
from spark_bridge.aggregates.row_groups import group_rows, plain
from spark_bridge.operators.aggregate_task import GroupedBatch
from spark_bridge.state_format import layouts
from spark_bridge.state_format.stored_rows import key_groups_of
from spark_bridge.task import keyed_rows
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.task_store import Spool, StateAccess

ROLLING_KEYS_PER_STEP = 1 << 14
"""Keys whose pieces are read and written at once, to begin with."""
EVERY_PIECE = 1 << 62
MAX_TIME = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Detail:
    """How many pieces of a key stay apart. More are exact as of more moments, and take more time and memory.

    - ``of_batch``: the newest times among the rows of a batch. The others are merged by tile.
    - ``recent``: a key with more newest pieces moves all but ``kept`` to its tiles.
    - ``after_watermark``: the pieces after the watermark stay apart among the tiles if a key has at most this many.
    """

    of_batch: int
    recent: int
    kept: int
    after_watermark: int


FEW_ROWS = 1 << 15
FINE, COARSE = Detail(32, 16, 8, 32), Detail(0, 3, 1, 0)
"""The detail of a task with at most ``FEW_ROWS`` rows, and of one with more."""


@dataclass(frozen=True)
class RollingLogic:
    """Running aggregates over the last time of each key.

    ``schema`` is of ``rolling_schema``, ``time`` names the event time of the rows. Each batch emits a row for each key
    that it touches, as of the time of the key's newest row. ``output`` has the keys, that time, and the results.
    """

    schema: OperatorSchema
    aggregator: Aggregator
    rolling: Rolling
    output: pa.Schema
    time: str
    limits: Limits | None = None

    @property
    def keys(self) -> pa.Schema:
        return self.schema.families[DEFAULT_FAMILY].key

    @cached_property
    def columns(self) -> pa.Schema:
        """Return the columns of pieces in a task: times in microseconds."""
        times = [pa.field(name, pa.int64()) for name in ("first", "last")]
        return pa.schema([*times, *self.aggregator.state_schema])

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        """Make pieces of the rows, merge them into those of their keys, commit, and yield the results."""
        work = _RollingBatch(replace(self, aggregator=self.aggregator.counting()), store, timer)
        nothing = keyed_rows.empty(self.columns)
        reducer = keyed_rows.RowReducer(self.keys, store.num_key_groups, nothing, work.reduced, self.limits)
        return work.results(batches, reducer, self.output)


class _RollingBatch(GroupedBatch):
    """One micro-batch of one partition."""

    def __init__(self, logic: RollingLogic, store: StateAccess, timer: StepTimer) -> None:
        super().__init__(logic.aggregator, self._by_key, store, timer, None)
        self._logic = logic
        self._rolling = logic.rolling
        families = store.schema.families
        numbers = len(families[DEFAULT_FAMILY].history), len(families[layouts.TILES_FAMILY].history)
        states = logic.aggregator.state_schema
        self._singles = SingleAnswers.of(logic.rolling, states, numbers, pa.schema([]))
        self._detail = FINE
        self._watermark = store.times.watermark_ms * 1000
        self._expired = self._rolling.expired(self._watermark)
        """Rows up to this time (in microseconds) are in no horizon as of the watermark or later: they are late."""
        self._lost = np.full(store.num_key_groups, -MAX_TIME)
        """For each key group, the newest time of the rows that this batch loses."""

    # -- rows to pieces ------------------------------------------------------------------------

    def add(self, rows: pa.RecordBatch, reducer: keyed_rows.RowReducer) -> None:
        """Make pieces of the rows that are in a horizon. The others are late, as are rows without a time."""
        times = plain(rows.column(self._logic.time)).cast(pa.int64())
        in_time = pc.greater(times, self._expired).fill_null(False)
        kept = rows if pc.all(in_time).as_py() else rows.filter(in_time)
        if kept.num_rows < rows.num_rows:
            self._late += rows.num_rows - kept.num_rows
            late = rows.filter(pc.invert(pc.fill_null(pc.greater(times, self._expired), True)))
            if late.num_rows:
                by_key = group_rows(late, self._logic.keys, self._store.num_key_groups)
                of_late = np.asarray(plain(late.column(self._logic.time)).cast(pa.int64()))
                self._lose(by_key.keys.take(pa.array(by_key.ids)), of_late)
        super().add(kept, reducer)

    def _lose(self, keys: pa.BinaryArray, times: Integers) -> None:
        """Note that rows of these keys, up to these times, are gone."""
        np.maximum.at(self._lost, key_groups_of(keys), times)

    def _record_lost(self) -> None:
        """Stage the newest time of lost rows for the key groups where it has risen."""
        groups = np.flatnonzero(self._lost > -MAX_TIME)
        if not len(groups):
            return
        schema = self._store.schema.families[layouts.LOST_FAMILY]
        names = pa.record_batch([pa.array(groups, pa.int32())], names=[layouts.LOST_GROUP])
        keys = encode_keys(names, groups)
        before = schema.decode_values(self._store.get_many(keys, layouts.LOST_FAMILY)).column(0).cast(pa.int64())
        has_risen = self._lost[groups] > np.asarray(before.fill_null(-MAX_TIME))
        times = fixed_array(self._lost[groups][has_risen], None, schema.value.field(layouts.LOST).type)
        values = schema.encode_values(pa.RecordBatch.from_arrays([times], schema=schema.value))
        self._store.stage(keys.filter(pa.array(has_risen)), values, layouts.LOST_FAMILY)

    def _by_key(self, rows: pa.RecordBatch, num_key_groups: int) -> keyed_rows.KeyedRows:
        logic = self._logic
        by_key = group_rows(rows, logic.keys, num_key_groups)
        times = np.asarray(plain(rows.column(logic.time)).cast(pa.int64()))
        if rows.num_rows > FEW_ROWS:
            self._detail = COARSE
        if self._detail.of_batch:
            order = time_order(by_key.ids, times)
            groups = np.empty(len(order), np.int64)
            groups[order] = self._rolling.groups(by_key.ids[order], times[order], self._detail.of_batch)
            num = int(groups[order[-1]]) + 1
        else:
            groups, num = self._rolling.tiles_of_rows(by_key.ids, times)
        ids, first, last = np.empty(num, np.int64), np.full(num, MAX_TIME), np.full(num, -MAX_TIME)
        ids[groups] = by_key.ids
        np.minimum.at(first, groups, times)
        np.maximum.at(last, groups, times)
        states = logic.aggregator.partial(groups, num, rows)
        return keyed_rows.KeyedRows(by_key.keys, ids, self._piece_rows(Pieces(ids, first, last, states)))

    def _piece_rows(self, pieces: Pieces) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(pieces.columns(pa.int64()).columns, schema=self._logic.columns)

    def reduced(
        self, ids: keyed_rows.Ids, num_keys: int, rows: pa.RecordBatch
    ) -> tuple[keyed_rows.Ids, pa.RecordBatch]:
        """Return fewer pieces of the same keys; see ``keyed_rows.Reduce``."""
        pieces = Pieces.of_rows(ids, rows)
        pieces = self._merged(pieces.take(time_order(pieces.ids, pieces.last)), self._detail.of_batch)
        return pieces.ids, self._piece_rows(pieces)

    def _merged(self, pieces: Pieces, kept: Integers | int, reference: Integers | None = None) -> Pieces:
        """Merge pieces of one tile, but for the newest ``kept`` ones of each key. Pieces of one time become one."""
        groups = self._rolling.groups(pieces.ids, pieces.last, kept, reference)
        if len(groups) and groups[-1] < len(groups) - 1:
            # The functions that count what their limits drop are those of the operator.
            begins = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
            states = self._logic.aggregator.merge(groups, len(begins), pieces.states)
            first, last = np.minimum.reduceat(pieces.first, begins), np.maximum.reduceat(pieces.last, begins)
            return Pieces(pieces.ids[begins], first, last, states)
        return pieces

    def add_due_keys(self, reducer: keyed_rows.RowReducer) -> None:
        """Add the keys that may have expired, so that ``merge`` visits them."""
        times = self._store.times
        if times.watermark_ms <= times.late_watermark_ms:
            return  # the last batch has removed the keys that this watermark expires
        self._add_due(layouts.DUE_FAMILY, keyed_rows.empty(self._logic.columns), reducer)

    # -- pieces into state ---------------------------------------------------------------------

    def merge(self, reducer: keyed_rows.RowReducer, spool: Spool) -> None:
        """Merge the new pieces into the state, and put the results of the touched keys into the spool."""
        size = keyed_rows.StepSize(ROLLING_KEYS_PER_STEP)
        keyed_rows.in_steps(reducer, size, lambda step: self._merge_step(step, spool))
        self._record_lost()

    def _merge_step(self, new: keyed_rows.KeyedRows, spool: Spool) -> int:
        """Merge the new pieces of some keys; return the bytes that they and the stored values take."""
        num_keys, rolling = len(new.keys), self._rolling
        self._timer.step("merge_ms")
        stored = self._store.get_many(new.keys)
        self._timer.step("get_ms")
        rows = self._schema.decode_values(stored)
        older, due = rows.column(layouts.OLDER), rows.column(layouts.DUE)
        recent = Pieces.of_lists(rows.column(layouts.RECENT))
        detail = self._detail
        apart = EVERY_PIECE if detail is FINE else detail.kept
        pieces = self._merged(Pieces.concatenated(recent, Pieces.of_rows(new.ids, new.rows)), apart)
        ends = np.cumsum(np.bincount(pieces.ids, minlength=num_keys))
        newest = pieces.last[ends - 1]
        is_expired = newest <= self._expired
        counts = np.bincount(pieces.ids, minlength=num_keys)
        starts = np.stack([h.start(newest) for h in rolling.horizons], axis=1)

        merged = _OlderStates.of_lists(older)
        has_tiles, is_stale = merged.stale(starts)
        moves = (counts > detail.recent) & ~is_expired
        visits = np.flatnonzero((moves | is_stale) & ~is_expired)
        if len(visits):
            rank = (ends - 1)[pieces.ids] - np.arange(len(pieces.ids))
            is_moving = moves[pieces.ids] & (rank >= detail.kept)
            # As of its newest row a key is emitted, and clients ask as of the floored watermark or later.
            reference = self._rolling.floored(np.minimum(newest, self._watermark))
            refreshed = self._refresh(new.keys, visits, reference, pieces.take(is_moving), moves, starts)
            pieces = pieces.take(~is_moving)
            merged = merged.replaced(visits, refreshed)

        touched = np.zeros(num_keys, np.bool_)
        touched[new.ids] = True
        self._updated += int(np.count_nonzero(touched))
        self._stage(new.keys, np.asarray(stored.is_valid()), is_expired, pieces, merged, due, newest)
        if is_expired.any():
            self._lose(new.keys.filter(pa.array(is_expired)), newest[is_expired])
            gone = is_expired & has_tiles
            removed = new.keys.filter(pa.array(gone))
            self._store.stage(removed, pa.nulls(len(removed), pa.binary()), layouts.TILES_FAMILY)
        self._emit(new.keys, touched & ~is_expired, pieces, merged, starts, newest, spool)
        return int(stored.nbytes + new.rows.nbytes)

    def _refresh(
        self, keys: pa.BinaryArray, visits: Integers, reference: Integers, moving: Pieces, moves: Mask, starts: Integers
    ) -> _OlderStates:
        """Move pieces to the tiles of keys, and return the merged state of the tiles for each horizon of ``visits``."""
        schema = self._store.schema.families[layouts.TILES_FAMILY]
        number = np.full(len(keys), -1, np.int64)
        number[visits] = np.arange(len(visits))
        visited = keys.take(pa.array(visits))
        self._timer.step("merge_ms")
        stored = self._store.get_many(visited, layouts.TILES_FAMILY)
        self._timer.step("get_ms")
        decoded = None if self._singles is None else self._singles.tiles(stored)
        if decoded is None:
            rows = schema.decode_values(stored)
            merged_at = rows.column(layouts.MERGED_AT).cast(pa.int64()).fill_null(-MAX_TIME)
            decoded = Pieces.of_lists(rows.column(layouts.TILES)), np.asarray(merged_at)
        tiles, earlier = decoded
        if len(moving.ids):
            tiles = Pieces.concatenated(tiles, replace(moving, ids=number[moving.ids]))
            is_moved = moves[visits]
            of_moved = is_moved[tiles.ids]
            # A restart with longer hops rounds the watermark down further, and what is merged stays merged.
            reference = np.maximum(reference[visits], earlier)
            is_needed = tiles.last > self._rolling.longest.start(reference)[tiles.ids]
            merged = self._merged(tiles.take(of_moved & is_needed), self._kept(tiles, len(visits)), reference)
            tiles = Pieces.concatenated(tiles.take(~of_moved), merged) if not of_moved.all() else merged
            value = self._logic.schema.families[layouts.TILES_FAMILY].value
            lists = merged.lists(len(visits), value.field(0).type)
            merged_at = fixed_array(reference, None, value.field(1).type)
            moved = pa.RecordBatch.from_arrays([lists, merged_at], schema=value).filter(pa.array(is_moved))
            self._store.stage(visited.filter(pa.array(is_moved)), schema.encode_values(moved), layouts.TILES_FAMILY)
        num_horizons, of_visits = starts.shape[1], starts[visits]
        num_states = len(visits) * num_horizons
        places = [np.flatnonzero(tiles.last > of_visits[:, i][tiles.ids]) for i in range(num_horizons)]
        groups = np.concatenate([tiles.ids[chosen] * num_horizons + i for i, chosen in enumerate(places)])
        chosen_states = tiles.states.take(pa.array(np.concatenate(places)))
        states = self._logic.aggregator.merge(groups, num_states, chosen_states)
        # A start that is inside a tile is one too low: so the state is unknown, and out of date at the next look.
        begins = of_visits - self._straddled(tiles, of_visits)
        return _OlderStates(np.repeat(visits, num_horizons), begins.reshape(-1), states)

    @staticmethod
    def _straddled(pieces: Pieces, starts: Integers) -> Mask:
        """Return for each key and horizon whether the start of the horizon is inside a piece.

        That is possible after a restart with shorter tiles only.
        """
        straddled = np.zeros(starts.shape, np.bool_)
        for i in range(starts.shape[1]):
            start = starts[:, i][pieces.ids]
            straddled[pieces.ids[(pieces.first <= start) & (pieces.last > start)], i] = True
        return straddled

    def _kept(self, tiles: Pieces, num_keys: int) -> Integers:
        """Return how many of a key's pieces in tiles stay apart: those after the watermark, unless there are many."""
        after = np.bincount(tiles.ids[tiles.last > self._watermark], minlength=num_keys)
        return np.where(after + self._detail.kept > self._detail.after_watermark, 0, after)

    def _stage(
        self,
        keys: pa.BinaryArray,
        present: Mask,
        is_expired: Mask,
        pieces: Pieces,
        merged: _OlderStates,
        due: pa.Array,
        newest: Integers,
    ) -> None:
        """Stage the newest pieces of keys, the merged states of their tiles, and when they are due."""
        num_keys = len(keys)
        value = self._logic.schema.families[DEFAULT_FAMILY].value
        was_due = np.asarray(due.is_valid())
        old_due = due.cast(pa.int64()).fill_null(0).to_numpy()
        stays = ~is_expired
        holds = stays & was_due & (old_due > self._watermark)
        new_due = np.where(holds, old_due, self._rolling.due(newest))
        columns = [
            pieces.lists(num_keys, value.field(0).type),
            merged.lists(num_keys, value.field(1).type),
            fixed_array(new_due, None, value.field(2).type),
        ]
        values = self._schema.encode_values(pa.RecordBatch.from_arrays(columns, schema=value))
        changed = pa.array(stays | present)
        or_removed = values if stays.all() else pc.if_else(pa.array(stays), values, pa.scalar(None, pa.binary()))
        self._store.stage(keys.filter(changed), or_removed.filter(changed))
        self._removed += int(np.count_nonzero(is_expired & present))
        self._stage_due(keys, was_due & ~holds, old_due, layouts.DUE_FAMILY, present=False)
        self._stage_due(keys, stays & ~holds, new_due, layouts.DUE_FAMILY, present=True)

    def _emit(
        self,
        keys: pa.BinaryArray,
        chosen: Mask,
        pieces: Pieces,
        merged: _OlderStates,
        starts: Integers,
        newest: Integers,
        spool: Spool,
    ) -> None:
        """Put the results of the chosen keys as of their newest rows into the spool."""
        if not chosen.any():
            return
        logic, num_keys = self._logic, int(np.count_nonzero(chosen))
        if num_keys < len(keys):
            number = np.cumsum(chosen) - 1
            pieces = pieces.take(chosen[pieces.ids])
            pieces = replace(pieces, ids=number[pieces.ids])
            merged = merged.renumbered(chosen, number)
        states = self._states(pieces, merged, starts[chosen])
        unknown = self._straddled(pieces, starts[chosen]) | merged.unknown(starts[chosen])
        key_columns = decode_keys(keys.filter(pa.array(chosen)), logic.keys)
        columns = dict(zip(logic.keys.names, key_columns.columns, strict=True))
        columns[logic.time] = pa.array(newest[chosen]).cast(logic.output.field(logic.time).type)
        names = [f.name for f in self._rolling.fields(logic.aggregator.state_schema)]
        columns.update(zip(names, results_of(self._rolling, states, num_keys, unknown), strict=True))
        spool.add(pa.RecordBatch.from_arrays([columns[n] for n in logic.output.names], schema=logic.output))

    def _states(self, pieces: Pieces, merged: _OlderStates, starts: Integers) -> pa.RecordBatch:
        """Return the states of ``results_of`` as of the newest rows of keys, which are in every horizon."""
        aggregator, (num_keys, num_horizons) = self._logic.aggregator, starts.shape
        whole: pa.RecordBatch | None = None
        parts = []
        for i in range(num_horizons):
            is_in = pieces.last > starts[:, i][pieces.ids]
            if not is_in.all():
                some = pieces.take(is_in)
                part = aggregator.merge(some.ids, num_keys, some.states)
            elif whole is None:
                is_single = len(pieces.ids) == num_keys
                part = whole = pieces.states if is_single else aggregator.merge(pieces.ids, num_keys, pieces.states)
            else:
                part = whole
            older, present = merged.of_horizon(i, num_horizons, num_keys)
            parts.append(aggregator.merge_pairs(older, present, part))
        columns = [pa.concat_arrays(c) for c in zip(*(part.columns for part in parts), strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=aggregator.state_schema)


@dataclass(frozen=True)
class _OlderStates:
    """The merged state of a key's tiles for each horizon, key by key. ``begins`` are the starts that horizons had."""

    ids: Integers
    begins: Integers
    states: pa.RecordBatch

    @classmethod
    def of_lists(cls, lists: pa.Array) -> _OlderStates:
        elements, offsets = list_parts(lists)
        ids = np.repeat(np.arange(len(lists), dtype=np.int64), np.diff(offsets))
        begins, *states = elements.flatten()
        names = [elements.type.field(i).name for i in range(1, elements.type.num_fields)]
        return cls(ids, np.asarray(begins.cast(pa.int64())), pa.RecordBatch.from_arrays(states, names=names))

    def lists(self, num_keys: int, kind: pa.DataType) -> pa.Array:
        """Return the list of each key, as it is stored; ``kind`` is the type of the lists."""
        element = kind.value_type
        begins = pa.array(self.begins, pa.int64()).cast(element.field(0).type)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(self.ids, minlength=num_keys))])
        structs = struct_array([begins, *self.states.columns], len(self.ids), None, element)
        return list_array(structs, offsets, None, kind)

    def stale(self, starts: Integers) -> tuple[Mask, Mask]:
        """Return which keys have tiles, and for which keys the states are of other tiles than horizons have now."""
        num_keys, num_horizons = starts.shape
        counts = np.bincount(self.ids, minlength=num_keys)
        fits = counts == num_horizons
        is_stale = (counts > 0) & ~fits
        if fits.any():
            of_fitting = self.begins[fits[self.ids]].reshape(-1, num_horizons)
            is_stale[fits] = (of_fitting != starts[fits]).any(axis=1)
        return counts > 0, is_stale

    def unknown(self, starts: Integers) -> Mask:
        """Return for each key and horizon whether its state has other starts than the horizons."""
        unknown = np.zeros(starts.shape, np.bool_)
        keys = self.ids[:: starts.shape[1]]
        unknown[keys] = self.begins.reshape(-1, starts.shape[1]) != starts[keys]
        return unknown

    def replaced(self, keys: Integers, states: _OlderStates) -> _OlderStates:
        """Return the states with those of some keys replaced."""
        is_kept = ~np.isin(self.ids, keys)
        ids = np.concatenate([self.ids[is_kept], states.ids])
        order = np.argsort(ids, kind="stable")
        kept = self.states.filter(pa.array(is_kept))
        columns = [pa.concat_arrays(c) for c in zip(kept.columns, states.states.columns, strict=True)]
        both = pa.RecordBatch.from_arrays(columns, names=kept.schema.names)
        begins = np.concatenate([self.begins[is_kept], states.begins])
        return _OlderStates(ids[order], begins[order], both.take(pa.array(order)))

    def renumbered(self, chosen: Mask, number: Integers) -> _OlderStates:
        """Return the states of chosen keys, which have other numbers."""
        is_kept = chosen[self.ids]
        return _OlderStates(number[self.ids[is_kept]], self.begins[is_kept], self.states.filter(pa.array(is_kept)))

    def of_horizon(self, i: int, num_horizons: int, num_keys: int) -> tuple[pa.RecordBatch, pa.BooleanArray]:
        """Return the state of one horizon for each key, and which keys have one."""
        of_keys = self.ids[::num_horizons]
        places = np.full(num_keys, -1, np.int64)
        places[of_keys] = np.arange(len(of_keys)) * num_horizons + i
        present = places >= 0
        return self.states.take(pa.array(places, mask=~present)), pa.array(present)
