"""The rows of one side of a join that wait in the state for a match: reading those of a step's keys, and writing them.

They are lists (``state_format.layouts``): the last rows of a key are stored with the key, the others in chunks. So a
key with many rows is not rewritten for each row. Rows leave when the watermark has passed them, which need not be in
the order of their arrival: the rest of a chunk is rewritten, and the numbers of removed chunks stay free. If more
numbers are free than not, the chunks of the key are rebuilt.

Another column family has the chunks of all keys by the time when the first of their rows is due. So only those
chunks are read that the watermark has reached (as in Spark's state format 4 of stream-stream joins). An entry may be
too early, or belong to a removed chunk: this is checked when it is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from backends.encoding.columns import Mask, list_parts, offsets_of
from spark_bridge.aggregates.row_groups import as_type, merge_keys
from spark_bridge.operators.join_sides import JoinSide
from spark_bridge.state_format import layouts, stored_rows
from spark_bridge.state_format.layouts import NO_TIME
from spark_bridge.state_format.partition_rows import chunk_keys, flat_ranges, pick, rows_of_structs
from spark_bridge.task.keyed_rows import Ids, one_batch, scanned
from spark_bridge.task.state_task import EventTime, Times
from spark_bridge.task.task_store import StateAccess

WAITING_CHUNK_ROWS = 64
WAITING_CHUNK_BYTES = 16 << 10
"""The most rows of a chunk, and of those stored with a key, and about the most bytes; a single row may have more."""
_FEW_HOLES = 4


@dataclass(frozen=True)
class Waiting:
    """The stored rows of some keys that have been read.

    ``ids`` and ``numbers`` give for each row its key and its chunk (``TAIL_NUMBER``: stored with the key); rows are
    sorted by both, the tail last. ``lengths`` and ``chunks`` are of the keys: their numbers of rows and of chunk
    numbers in use. ``rebuilt``: keys whose rows were all read, and whose chunks are to be rebuilt.
    """

    ids: Ids
    numbers: Ids
    rows: pa.RecordBatch
    matched: Mask
    lengths: Ids
    chunks: Ids
    rebuilt: Mask
    nbytes: int


@dataclass(frozen=True)
class Due:
    """Chunks that the watermark has reached: the places of their keys, ascending, and their numbers."""

    ids: Ids
    numbers: Ids


class WaitingRows:
    """The waiting rows of one side in one batch.

    Chunks are due in this batch up to ``due_until_ms`` (ms since 1970); None if none are.
    """

    def __init__(self, side: JoinSide, store: StateAccess, due_until_ms: int | None) -> None:
        self._side = side
        self._store = store
        self._due_until_ms = due_until_ms
        variable = store.schema.variable(side.name)
        self._family, self._heads = layouts.family_of(variable)
        self._chunk_family, self._chunks = layouts.family_of(variable, layouts.CHUNKS)
        self._lists = self._heads.value.field(layouts.TAIL).type
        has_times = any(family.startswith(self._family + layouts.CHUNKS_BY_TIME) for family in variable.families)
        self._by_time = layouts.family_of(variable, layouts.CHUNKS_BY_TIME) if has_times else None

    # -- reading -------------------------------------------------------------------------------

    def due(self) -> Iterator[tuple[pa.BinaryArray, Due]]:
        """Take the chunks that are due: yield distinct keys, ascending, and their chunks."""
        if self._by_time is None or self._due_until_ms is None:
            return
        family, _ = self._by_time
        ranges = EventTime(layouts.DUE).done_ranges(self._store.key_groups, self._due_until_ms)
        for pairs in scanned(self._store, ranges, family):
            entries = pairs.column(0)
            self._store.stage(entries, pa.nulls(len(entries), pa.binary()), family)
            keys, ids, _ = merge_keys([stored_rows.without_last_long(stored_rows.without_expiry(entries))])
            order = np.argsort(ids, kind="stable")
            yield keys, Due(ids[order], stored_rows.last_longs(entries)[order])

    def read(self, keys: pa.BinaryArray, probed: Mask, due: Due) -> Waiting:
        """Read the last rows of all keys, all chunks of the keys that are ``probed``, and the chunks that are due."""
        stored = self._store.get_many(keys, self._family)
        heads = self._heads.decode_values(stored)
        lengths = heads.column(layouts.LENGTH).fill_null(0).to_numpy()
        chunks = heads.column(layouts.NUM_CHUNKS).fill_null(0).to_numpy()
        tails, offsets = list_parts(heads.column(layouts.TAIL))
        ids = np.repeat(np.arange(len(keys)), np.diff(offsets))
        parts, of_keys, of_chunks = [rows_of_structs(tails)], [ids], [np.full(len(ids), layouts.TAIL_NUMBER)]
        rebuilt, nbytes = np.zeros(len(keys), np.bool_), stored.nbytes
        wanted, numbers = self._wanted(chunks, probed, due)
        if len(wanted):
            stored_chunks = self._store.get_many(_chunk_keys(keys, wanted, numbers), self._chunk_family)
            is_there = np.asarray(stored_chunks.is_valid())
            wanted, numbers = wanted[is_there], numbers[is_there]
            decoded = self._chunks.decode_values(stored_chunks.drop_null())
            elements, offsets = list_parts(decoded.column(layouts.ELEMENTS))
            counts = np.diff(offsets)
            parts.insert(0, rows_of_structs(elements))
            of_keys.insert(0, np.repeat(wanted, counts))
            of_chunks.insert(0, np.repeat(numbers, counts))
            alive = np.bincount(wanted, minlength=len(keys))
            rebuilt = probed & (chunks - alive > alive + _FEW_HOLES)
            nbytes += stored_chunks.nbytes
        rows = one_batch(parts)
        all_ids = np.concatenate(of_keys)
        order = np.argsort(all_ids, kind="stable")
        if len(parts) > 1:
            rows = rows.take(pa.array(order))
        matched = np.zeros(len(order), np.bool_)
        if self._side.flag is not None:
            matched = np.asarray(rows.column(self._side.flag))
        chunk_of = np.concatenate(of_chunks)[order]
        return Waiting(all_ids[order], chunk_of, rows, matched, lengths, chunks, rebuilt, nbytes)

    def _wanted(self, chunks: Ids, probed: Mask, due: Due) -> tuple[Ids, Ids]:
        """Return the chunks to be read, ascending: the places of their keys, and their numbers."""
        counts = np.where(probed, chunks, 0)
        ids, numbers = np.repeat(np.arange(len(chunks)), counts), flat_ranges(np.zeros(len(chunks), np.int64), counts)
        alone = (due.numbers != layouts.TAIL_NUMBER) & ~probed[due.ids]
        if alone.any():
            # An entry too early and the one at its time may both be due.
            pairs = np.unique(np.column_stack([due.ids[alone], due.numbers[alone]]), axis=0)
            ids, numbers = np.concatenate([ids, pairs[:, 0]]), np.concatenate([numbers, pairs[:, 1]])
            order = np.lexsort((numbers, ids))
            ids, numbers = ids[order], numbers[order]
        return ids, numbers

    # -- writing -------------------------------------------------------------------------------

    def write(
        self,
        keys: pa.BinaryArray,
        waiting: Waiting,
        kept: Mask,
        matched: Mask,
        due_at: Times,
        due: Due,
        new_ids: Ids,
        new_rows: pa.RecordBatch,
        new_due_at: Times,
        *,
        has_entries: bool = True,
    ) -> None:
        """Stage the changed rows of some keys.

        ``kept``, ``matched`` and ``due_at`` are of the rows of ``waiting``: which of them stay, which have found a
        match by now, and when each is due (microseconds; ``NO_TIME``). ``due`` are the chunks whose entries by time
        were taken. ``new_rows`` come after the others; ``new_ids`` are the places of their keys. ``has_entries``:
        chunks that were not due have an entry that is not after ``due_at``.
        """
        num_keys = len(keys)
        if not (len(waiting.ids) or len(new_ids)):
            return
        old = waiting.rows
        if self._side.flag is not None:
            old = old.set_column(old.schema.get_field_index(self._side.flag), self._side.flag, pa.array(matched))
        changed = ~kept | (matched & ~waiting.matched)
        is_tail = waiting.numbers == layouts.TAIL_NUMBER
        due_tails = np.zeros(num_keys, np.bool_)
        due_tails[due.ids[due.numbers == layouts.TAIL_NUMBER]] = True
        pooled = waiting.rebuilt | due_tails
        pooled[waiting.ids[changed & is_tail]] = pooled[waiting.ids[~kept]] = pooled[new_ids] = True

        in_pool = pooled[waiting.ids] & (is_tail | waiting.rebuilt[waiting.ids])
        gone, numbers, _ = _runs(waiting, waiting.rebuilt[waiting.ids] & ~is_tail)
        self._stage(_chunk_keys(keys, gone, numbers), None, self._chunk_family)
        self._write_chunks(keys, waiting, old, kept, changed, due_at, due, ~in_pool & ~is_tail)
        chosen = in_pool & kept
        pool = one_batch([old.filter(pa.array(chosen)), new_rows]) if len(new_ids) else old.filter(pa.array(chosen))
        ids = np.concatenate([waiting.ids[chosen], new_ids])
        order = np.argsort(ids, kind="stable")
        # The tail has an entry by time that is not after this time, unless it was taken just now.
        has_entry = np.full(num_keys, NO_TIME)
        if has_entries:
            np.minimum.at(has_entry, waiting.ids[is_tail], due_at[is_tail])
            has_entry[due_tails] = NO_TIME
        removed = np.bincount(waiting.ids[~kept], minlength=num_keys)
        lengths = waiting.lengths - removed + np.bincount(new_ids, minlength=num_keys)
        times = np.concatenate([due_at[chosen], new_due_at])[order]
        self._write_pool(keys, ids[order], pool.take(pa.array(order)), times, pooled, waiting, lengths, has_entry)

    def new_rows(self, rows: pa.RecordBatch, matched: Mask) -> pa.RecordBatch:
        """Return rows of the side in their stored columns."""
        by_name = dict(zip(rows.schema.names, rows.columns, strict=True))
        if self._side.flag is not None:
            by_name[self._side.flag] = pa.array(matched)
        kind = self._lists.value_type
        stored = [kind.field(i) for i in range(kind.num_fields)]
        # The state may have columns that the program no longer has.
        arrays = [by_name[f.name] if f.name in by_name else pa.nulls(rows.num_rows, f.type) for f in stored]
        return pa.RecordBatch.from_arrays(arrays, names=[f.name for f in stored])

    def _write_chunks(
        self,
        keys: pa.BinaryArray,
        waiting: Waiting,
        rows: pa.RecordBatch,
        kept: Mask,
        changed: Mask,
        due_at: Times,
        due: Due,
        chosen: Mask,
    ) -> None:
        """Stage the chunks of the ``chosen`` rows that have changed, and entries by time for those that were due."""
        ids, numbers, firsts = _runs(waiting, chosen)
        if not len(ids):
            return
        at = np.flatnonzero(chosen)
        was_due = np.zeros(len(ids), np.bool_)
        if len(due.ids):
            span = int(max(numbers.max(), due.numbers.max())) + 2
            was_due = np.isin(ids * span + numbers + 1, due.ids * span + due.numbers + 1)
        is_changed = np.logical_or.reduceat(changed[at], firsts)
        left = np.add.reduceat(kept[at].astype(np.int64), firsts)
        gone = is_changed & (left == 0)
        self._stage(_chunk_keys(keys, ids[gone], numbers[gone]), None, self._chunk_family)
        rest = at[kept[at]]
        starts = offsets_of(left)[:-1]
        elements = rows.take(pa.array(rest))
        written = is_changed & (left > 0)
        self._stage_chunks(_chunk_keys(keys, ids[written], numbers[written]), elements, starts[written], left[written])
        entered = was_due & (left > 0)
        self._stage_entries(keys, ids[entered], numbers[entered], due_at[rest], starts[entered], left[entered])

    def _write_pool(
        self,
        keys: pa.BinaryArray,
        ids: Ids,
        rows: pa.RecordBatch,
        due_at: Times,
        pooled: Mask,
        waiting: Waiting,
        lengths: Ids,
        has_entry: Ids,
    ) -> None:
        """Stage the last rows of the keys that are ``pooled``, cutting chunks off if there are too many."""
        num_keys = len(keys)
        counts = np.bincount(ids, minlength=num_keys)
        starts = offsets_of(counts)[:-1]
        per_chunk = max(1, min(WAITING_CHUNK_ROWS, WAITING_CHUNK_BYTES * len(ids) // max(1, rows.nbytes)))
        cut = np.where(counts > per_chunk, counts // per_chunk, 0)
        base = np.where(waiting.rebuilt, 0, waiting.chunks)
        owners, places = np.repeat(np.arange(num_keys), cut), flat_ranges(np.zeros(num_keys, np.int64), cut)
        first = starts[owners] + places * per_chunk
        size = np.full(len(owners), per_chunk)
        self._stage_chunks(_chunk_keys(keys, owners, base[owners] + places), rows, first, size)
        self._stage_entries(keys, owners, base[owners] + places, due_at, first, size)

        first, size = starts + cut * per_chunk, counts - cut * per_chunk
        stays = np.flatnonzero(pooled & (lengths > 0))
        tails = pick(_structs(rows, self._lists.value_type), first[stays], size[stays], self._lists)
        columns = [pa.array(lengths[stays]), pa.array((base + cut)[stays]), tails]
        heads = pa.RecordBatch.from_arrays(columns, schema=self._heads.value)
        self._stage(keys.take(pa.array(stays)), self._heads.encode_values(heads), self._family)
        gone = np.flatnonzero(pooled & (lengths == 0))
        self._stage(keys.take(pa.array(gone)), None, self._family)
        with_rows = np.flatnonzero(pooled & (size > 0))
        number = np.full(len(with_rows), layouts.TAIL_NUMBER)
        self._stage_entries(keys, with_rows, number, due_at, first[with_rows], size[with_rows], has_entry[with_rows])

    def _stage_chunks(self, keys: pa.BinaryArray, rows: pa.RecordBatch, starts: Ids, counts: Ids) -> None:
        if not len(keys):
            return
        elements = pick(_structs(rows, self._lists.value_type), starts, counts, self._lists)
        values = pa.RecordBatch.from_arrays([elements], schema=self._chunks.value)
        self._stage(keys, self._chunks.encode_values(values), self._chunk_family)

    def _stage_entries(
        self,
        keys: pa.BinaryArray,
        ids: Ids,
        numbers: Ids,
        due_at: Times,
        starts: Ids,
        counts: Ids,
        has_entry: Ids | None = None,
    ) -> None:
        """Stage chunks by the time when their first row is due, unless they have an entry that is not after that."""
        if self._by_time is None or not len(ids):
            return
        family, schema = self._by_time
        least = np.minimum.reduceat(due_at[flat_ranges(starts, counts)], offsets_of(counts)[:-1])
        entered = least < NO_TIME if has_entry is None else least < has_entry
        ids, numbers, least = ids[entered], numbers[entered], least[entered]
        entries = chunk_keys(stored_rows.by_expiry(keys.take(pa.array(ids)), least), numbers)
        self._stage(entries, schema.encode_values(layouts.is_present(len(entries))), family)

    def _stage(self, keys: pa.BinaryArray, values: pa.BinaryArray | None, family: str) -> None:
        if len(keys):
            self._store.stage(keys, pa.nulls(len(keys), pa.binary()) if values is None else values, family)


def _runs(waiting: Waiting, chosen: Mask) -> tuple[Ids, Ids, Ids]:
    """Return the chunks of the chosen rows: the places of their keys, their numbers, and the start of their rows."""
    ids, numbers = waiting.ids[chosen], waiting.numbers[chosen]
    if not len(ids):
        return ids, numbers, ids
    firsts = np.flatnonzero(np.concatenate([[True], (np.diff(ids) != 0) | (np.diff(numbers) != 0)]))
    return ids[firsts], numbers[firsts], firsts


def _structs(rows: pa.RecordBatch, kind: pa.DataType) -> pa.StructArray:
    columns = [as_type(c, f.type) for c, f in zip(rows.columns, kind, strict=True)]
    return pa.StructArray.from_arrays(columns, fields=list(kind))


def _chunk_keys(keys: pa.BinaryArray, ids: Ids, numbers: Ids) -> pa.BinaryArray:
    return chunk_keys(keys.take(pa.array(ids)), numbers)
