"""A list per grouping key: its last elements beside the key, earlier ones in chunks under keys of their own.

So an append reads and writes one row, however long the list is, and reading goes chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import Offsets
from backends.encoding.operator_schema import StateVariable
from spark_bridge.exceptions import IllegalStateValueError
from spark_bridge.state_format.families import CHUNKS, family_of
from spark_bridge.state_format.layouts import ELEMENTS, LENGTH, NUM_CHUNKS, TAIL
from spark_bridge.state_format.stored_keys import longs_of_key, prefix_range, with_more
from spark_bridge.stateful.declaration import Declaration
from spark_bridge.stateful.ranges import (
    LazyLists,
    alive_lists,
    flat_ranges,
    offsets_of,
    pick,
    rows_of,
    sizes_of,
    structs,
)
from spark_bridge.stateful.state_values import StateValues, null_value
from spark_bridge.stateful.step import Step
from spark_bridge.stateful.ttl import Ttl

TAIL_ELEMENTS = 64
TAIL_BYTES = 16 << 10
CHUNK_ELEMENTS = 256
_FIRST_CHUNKS_READ = 4
_CHUNKS_READ = 64
_CHUNKS_REMOVED = 1 << 16


class _Change:
    """What has become of one key's list: ``added`` behind what is stored, or in its place."""

    __slots__ = ("added", "replaced")

    def __init__(self) -> None:
        self.replaced = False
        self.added: list[tuple[Any, ...]] = []


@dataclass(frozen=True)
class _Heads:
    """What is stored beside the step's keys. ``present`` says where; ``tails`` have no expired elements."""

    present: np.ndarray[Any, np.dtype[np.bool_]]
    lengths: Offsets
    chunks: Offsets
    tails: LazyLists


class ListState:
    """A state variable that holds a list per grouping key, of tuples of its schema's fields."""

    def __init__(self, declaration: Declaration, variable: StateVariable, step: Step) -> None:
        self._name = declaration.name
        self._codec = declaration.codec
        self._family, self._schema = family_of(variable)
        self._chunk_family, self._chunk_schema = family_of(variable, CHUNKS)
        self._step = step
        self._ttl = Ttl(declaration.ttl_ms, step)
        self._values = StateValues(declaration.name, "element", declaration.codec)
        self._changes: list[_Change | None] = []
        self._touched: list[int] = []
        self._read_heads: _Heads | None = None

    def exists(self) -> bool:
        """Whether the key's list has an element."""
        change = self._changes[self._step.index]
        if change is not None and (change.added or change.replaced):
            return bool(change.added)
        i, heads = self._step.current, self._heads()
        if not self._ttl.is_on:
            return bool(heads.lengths[i])
        tails = heads.tails.offsets
        return bool(tails[i] < tails[i + 1]) or next(self._chunks(i, heads), None) is not None

    def get(self) -> Iterator[tuple[Any, ...]]:
        """The key's elements as they are now, in the order in which they were added; a long list is read bit by bit."""
        change = self._changes[self._step.index]
        added = list(change.added) if change is not None else []
        parts: Iterator[tuple[Any, ...]]
        if change is not None and change.replaced:
            parts = iter(added)
        else:
            i, heads = self._step.current, self._heads()
            parts = iter(heads.tails[i] + added)
            if heads.chunks[i]:
                parts = chain(self._chunks(i, heads), parts)
        return parts if self._values.is_immutable else map(self._values.copied, parts)

    def put(self, newState: Iterable[tuple[Any, ...]]) -> None:
        """Set the whole list; raises ``IllegalStateValueError`` if it is empty, or for an element that does not fit."""
        added = self._accepted(newState)
        change = self._change()
        change.replaced, change.added = True, added

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        """Add an element at the end; raises ``IllegalStateValueError`` if it does not fit the schema."""
        accepted = self._values.accept(newState)
        change = self._changes[self._step.index]
        if change is None:
            change = self._change()
        change.added.append(accepted)

    def appendList(self, newState: Iterable[tuple[Any, ...]]) -> None:
        """Add elements at the end; raises ``IllegalStateValueError`` if there are none, or for one that does not fit."""
        added = self._accepted(newState)
        self._change().added.extend(added)

    def clear(self) -> None:
        """Remove the key's list."""
        change = self._change()
        change.replaced, change.added = True, []

    def _accepted(self, elements: Iterable[tuple[Any, ...]] | None) -> list[tuple[Any, ...]]:
        if elements is None:
            raise null_value(self._name, "list")
        accepted = [self._values.accept(e) for e in elements]
        if not accepted:
            raise IllegalStateValueError(
                f"[ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE] State variable {self._name!r} was given an empty list. Give "
                "at least one element, or call clear() to remove the list."
            )
        return accepted

    def _change(self) -> _Change:
        index = self._step.index
        change: _Change | None = self._changes[index]
        if change is None:
            change = self._changes[index] = _Change()
            self._touched.append(index)
        return change

    def _begin(self) -> None:
        self._changes = [None] * len(self._step.keys)
        self._touched = []
        self._read_heads = None

    def _heads(self) -> _Heads:
        """What is stored beside the step's keys, fetched all at once when it is first needed."""
        if self._read_heads is None:
            stored = self._step.store.get_many(self._step.keys, self._family)
            found = self._schema.decode_values(stored)
            elements, offsets = alive_lists(found.column(TAIL), self._ttl.alive if self._ttl.is_on else None)
            self._read_heads = _Heads(
                pc.is_valid(stored).to_numpy(zero_copy_only=False),
                found.column(LENGTH).fill_null(0).to_numpy(),
                found.column(NUM_CHUNKS).fill_null(0).to_numpy(),
                LazyLists(elements, offsets, self._tuples),
            )
        return self._read_heads

    def _tuples(self, elements: pa.RecordBatch) -> list[tuple[Any, ...]]:
        return self._codec.to_tuples(elements.select(self._codec.schema.names))

    def _chunks(self, i: int, heads: _Heads) -> Iterator[tuple[Any, ...]]:
        """The elements of a list that are in chunks. Chunks whose elements have all expired may be gone."""
        return self._read_chunks(self._step.keys[i].as_py(), int(heads.chunks[i]))

    def _read_chunks(self, key: bytes, chunks: int) -> Iterator[tuple[Any, ...]]:
        if self._ttl.is_on:
            # Of the chunks that ever were, most may have expired and gone.
            for batch in self._step.store.scan([prefix_range(key)], self._chunk_family):
                found = self._chunk_schema.decode_values(batch.column(1))
                elements, _ = alive_lists(found.column(ELEMENTS), self._ttl.alive)
                yield from self._tuples(rows_of(elements))
            return
        first, at_once = 0, _FIRST_CHUNKS_READ
        while first < chunks:
            numbers = np.arange(first, min(first + at_once, chunks))
            stored = self._step.store.get_many(_chunk_keys(pa.array([key] * len(numbers)), numbers), self._chunk_family)
            found = self._chunk_schema.decode_values(stored.drop_null())
            elements, _ = alive_lists(found.column(ELEMENTS), None)
            yield from self._tuples(rows_of(elements))
            first, at_once = first + at_once, min(at_once * 2, _CHUNKS_READ)

    def _end(self) -> None:
        """Stage the step's changes."""
        if self._touched:
            self._stage(np.sort(np.array(self._touched, np.int64)))
        if self._ttl.is_on and self._read_heads is not None:
            self._remove_expired(self._read_heads)
        self._changes, self._touched, self._read_heads = [], [], None

    def _stage(self, lists: Offsets) -> None:
        step, heads = self._step, self._heads()
        changes = [c for c in (self._changes[i] for i in lists.tolist()) if c is not None]
        is_kept = np.array([not c.replaced for c in changes], np.bool_)
        self._remove(lists[~is_kept], heads)
        new_counts = np.array([len(c.added) for c in changes], np.int64)
        elements, offsets = self._joined(lists, is_kept, changes, new_counts, heads)
        tails, chunk_of, chunk_starts, chunk_counts = _cut(elements, offsets)
        old_chunks = np.where(is_kept, heads.chunks[lists], 0)
        new_chunks = np.bincount(chunk_of, minlength=len(lists))
        if len(chunk_of):
            numbers = old_chunks[chunk_of] + flat_ranges(np.zeros(len(lists), np.int64), new_chunks)
            kind = self._chunk_schema.value.field(ELEMENTS).type
            rows = pa.RecordBatch.from_arrays(
                [pick(elements, chunk_starts, chunk_counts, kind)], schema=self._chunk_schema.value
            )
            keys = _chunk_keys(step.keys.take(pa.array(lists[chunk_of])), numbers)
            step.stage(keys, self._chunk_schema.encode_values(rows), self._chunk_family)
        lengths = np.where(is_kept, heads.lengths[lists], 0) + new_counts
        kind = self._schema.value.field(TAIL).type
        rows = pa.RecordBatch.from_arrays(
            [pa.array(lengths), pa.array(old_chunks + new_chunks), pick(elements, tails, offsets[1:] - tails, kind)],
            schema=self._schema.value,
        )
        written = np.flatnonzero(lengths > 0)
        keys = step.keys.take(pa.array(lists[written]))
        step.stage(keys, self._schema.encode_values(rows.take(pa.array(written))), self._family)
        step.figures.num_rows_updated += int(new_counts.sum())

    def _joined(
        self, lists: Offsets, is_kept: Any, changes: list[_Change], new_counts: Offsets, heads: _Heads
    ) -> tuple[pa.Array, Offsets]:
        """The elements that these lists have beside their keys, before they are cut, and n+1 offsets."""
        kind = self._schema.value.field(TAIL).type.value_type
        try:
            added = self._codec.to_batch(list(chain.from_iterable(c.added for c in changes)))
        except (TypeError, ValueError) as error:
            raise self._values.refusal(error) from error
        fresh = structs(self._ttl.stamped(added), kind)
        tails = heads.tails
        starts = np.column_stack([tails.offsets[lists], len(tails.elements) + offsets_of(new_counts)[:-1]])
        old_counts = np.where(is_kept, tails.offsets[lists + 1] - tails.offsets[lists], 0)
        counts = np.column_stack([old_counts, new_counts])
        order = flat_ranges(starts.ravel(), counts.ravel())
        elements = pa.concat_arrays([tails.elements, fresh]).take(pa.array(order))
        return elements, offsets_of(old_counts + new_counts)

    def _remove(self, lists: Offsets, heads: _Heads) -> None:
        """Stage the removal of what is stored of these lists."""
        step = self._step
        lists = lists[heads.present[lists]]
        step.stage(step.keys.take(pa.array(lists)), None, self._family)
        step.figures.num_rows_removed += int(heads.lengths[lists].sum())
        if self._ttl.is_on:
            for i in lists[heads.chunks[lists] > 0].tolist():
                for batch in step.store.scan([prefix_range(step.keys[i].as_py())], self._chunk_family):
                    step.stage(batch.column(0), None, self._chunk_family)
            return
        owners = np.repeat(lists, heads.chunks[lists])
        numbers = flat_ranges(np.zeros(len(lists), np.int64), heads.chunks[lists])
        for first in range(0, len(owners), _CHUNKS_REMOVED):
            part = slice(first, first + _CHUNKS_REMOVED)
            keys = _chunk_keys(step.keys.take(pa.array(owners[part])), numbers[part])
            step.stage(keys, None, self._chunk_family)

    def _remove_expired(self, heads: _Heads) -> None:
        """Stage the removal of lists that were looked at, not written, and have nothing any more."""
        is_empty = np.diff(heads.tails.offsets) == 0
        is_over = heads.present & is_empty & (heads.chunks == 0)
        is_over[self._touched] = False
        self._step.stage(self._step.keys.filter(pa.array(is_over)), None, self._family)


def _cut(elements: pa.Array, offsets: Offsets) -> tuple[Offsets, Offsets, Offsets, Offsets]:
    """Where each list's tail begins, and the chunks of what does not fit in: their lists, starts and lengths."""
    ends = offsets_of(sizes_of(elements))
    tails = offsets[:-1].copy()
    is_long = (np.diff(offsets) > TAIL_ELEMENTS) | (ends[offsets[1:]] - ends[offsets[:-1]] > TAIL_BYTES)
    chunks: list[tuple[int, int, int]] = []
    for i in np.flatnonzero(is_long).tolist():
        start, stop = int(offsets[i]), int(offsets[i + 1])
        while stop - start > TAIL_ELEMENTS or ends[stop] - ends[start] > TAIL_BYTES:
            by_bytes = int(np.searchsorted(ends, ends[start] + TAIL_BYTES, "right")) - 1
            end = min(max(by_bytes, start + 1), start + CHUNK_ELEMENTS, stop)
            chunks.append((i, start, end - start))
            start = end
        tails[i] = start
    columns = np.array(chunks, np.int64).reshape(-1, 3)
    return tails, columns[:, 0], columns[:, 1], columns[:, 2]


def _chunk_keys(keys: pa.BinaryArray, numbers: Offsets) -> pa.BinaryArray:
    return with_more(keys, longs_of_key(numbers))
