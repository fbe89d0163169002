"""``ListState``: a list per grouping key, as a processor uses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import Offsets, offsets_of
from backends.encoding.operator_schema import StateVariable
from spark_bridge.exceptions import IllegalStateValueError
from spark_bridge.state_format.layouts import CHUNKS, ELEMENTS, LENGTH, NUM_CHUNKS, TAIL, family_of
from spark_bridge.state_format.partition_rows import (
    LazyLists,
    alive_lists,
    chunk_keys,
    cut_lists,
    flat_ranges,
    pick,
    rows_of_structs,
    structs,
)
from spark_bridge.state_format.stored_rows import prefix_range
from spark_bridge.stateful.declaration import Declaration, KeyStep, PySparkListState
from spark_bridge.stateful.state_values import StateValues, null_value
from spark_bridge.stateful.ttl import Ttl

# The lists of one state variable in the store: reading those of a step's keys, and staging their changes.
#
# The last elements of a list are stored with its grouping key, the elements before them in chunks, under the grouping
# key followed by the number of the chunk. So an append reads and writes one row, however long the list is.


_FIRST_CHUNKS_READ = 4
_CHUNKS_READ = 64
"""Chunks read at once: first few, as a reader may need no more, then twice as many each time up to the most."""
_CHUNKS_REMOVED = 1 << 16
"""The most chunks whose removal is staged at once."""


@dataclass(slots=True, eq=False)
class ListChange:
    """The change of one key's list: ``added`` goes after the stored elements, or if ``replaced`` in their place."""

    replaced: bool = False
    added: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class _Heads:
    """The rows of the step's keys: which keys have one, and the lengths, numbers of chunks and tails of the lists.

    Expired elements are left out of ``tails``; ``lengths`` counts them.
    """

    present: np.ndarray[Any, np.dtype[np.bool_]]
    lengths: Offsets
    chunks: Offsets
    tails: LazyLists


class StoredLists:
    """Reads the lists of a step's keys, and stages changed lists. ``values`` checks a user's values."""

    def __init__(self, declaration: Declaration, variable: StateVariable, step: KeyStep) -> None:
        self._codec = declaration.codec
        self._family, self._schema = family_of(variable)
        self._chunk_family, self._chunk_schema = family_of(variable, CHUNKS)
        self._step = step
        self._ttl = Ttl(declaration.ttl_ms, step)
        self.values = StateValues(declaration.name, "element", declaration.codec)
        self._read_heads: _Heads | None = None

    # -- reading -------------------------------------------------------------------------------

    def begin(self) -> None:
        self._read_heads = None

    def has_elements(self, i: int) -> bool:
        """Return whether the list of the step's key i has an element that has not expired."""
        heads = self._heads()
        if not self._ttl.is_on:
            return bool(heads.lengths[i])
        tails = heads.tails.offsets
        return bool(tails[i] < tails[i + 1]) or next(self._chunks(i, heads), None) is not None

    def elements(self, i: int, added: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Return the elements of the step's key i, then ``added``; a long list is read some chunks at a time."""
        heads = self._heads()
        parts = iter(heads.tails[i] + added)
        return chain(self._chunks(i, heads), parts) if heads.chunks[i] else parts

    def _heads(self) -> _Heads:
        """Return the rows of the step's keys, read for all keys at once when the first is needed."""
        if self._read_heads is None:
            stored = self._step.store.get_many(self._step.keys, self._family)
            values = self._schema.decode_values(stored)
            elements, offsets = alive_lists(values.column(TAIL), self._ttl.alive if self._ttl.is_on else None)
            self._read_heads = _Heads(
                pc.is_valid(stored).to_numpy(zero_copy_only=False),
                values.column(LENGTH).fill_null(0).to_numpy(),
                values.column(NUM_CHUNKS).fill_null(0).to_numpy(),
                LazyLists(elements, offsets, self._tuples),
            )
        return self._read_heads

    def _tuples(self, elements: pa.RecordBatch) -> list[tuple[Any, ...]]:
        return self._codec.to_tuples(elements.select(self._codec.schema.names))

    def _chunks(self, i: int, heads: _Heads) -> Iterator[tuple[Any, ...]]:
        """Yield the elements of a list that are in chunks; chunks with only expired elements may have been removed."""
        return self._read_chunks(self._step.keys[i].as_py(), int(heads.chunks[i]))

    def _read_chunks(self, key: bytes, chunks: int) -> Iterator[tuple[Any, ...]]:
        if self._ttl.is_on:
            # Most chunks may have expired and been removed: a scan finds the others.
            for batch in self._step.store.scan([prefix_range(key)], self._chunk_family):
                decoded = self._chunk_schema.decode_values(batch.column(1))
                elements, _ = alive_lists(decoded.column(ELEMENTS), self._ttl.alive)
                yield from self._tuples(rows_of_structs(elements))
            return
        first, at_once = 0, _FIRST_CHUNKS_READ
        while first < chunks:
            numbers = np.arange(first, min(first + at_once, chunks))
            stored = self._step.store.get_many(chunk_keys(pa.array([key] * len(numbers)), numbers), self._chunk_family)
            decoded = self._chunk_schema.decode_values(stored.drop_null())
            elements, _ = alive_lists(decoded.column(ELEMENTS), None)
            yield from self._tuples(rows_of_structs(elements))
            first, at_once = first + at_once, min(at_once * 2, _CHUNKS_READ)

    # -- staging -------------------------------------------------------------------------------

    def stage(self, changes: list[ListChange | None], touched: list[int]) -> None:
        """Stage the changes of the step's keys; ``touched`` are the numbers of the keys that have one.

        Raises ``IllegalStateValueError`` for a value out of its type's range.
        """
        if touched:
            self._stage(changes, np.sort(np.array(touched, np.int64)))
        heads, self._read_heads = self._read_heads, None
        if self._ttl.is_on and heads is not None:
            # Lists that were read, not changed, and have only expired elements.
            is_over = heads.present & (np.diff(heads.tails.offsets) == 0) & (heads.chunks == 0)
            is_over[touched] = False
            self._step.stage(self._step.keys.filter(pa.array(is_over)), None, self._family)

    def _stage(self, all_changes: list[ListChange | None], lists: Offsets) -> None:
        step, heads = self._step, self._heads()
        changes = [c for c in (all_changes[i] for i in lists.tolist()) if c is not None]
        is_kept = np.array([not c.replaced for c in changes], np.bool_)
        self._remove(lists[~is_kept], heads)
        new_counts = np.array([len(c.added) for c in changes], np.int64)
        elements, offsets = self._joined(lists, is_kept, changes, new_counts, heads)
        tails, chunk_of, chunk_starts, chunk_counts = cut_lists(elements, offsets)
        old_chunks = np.where(is_kept, heads.chunks[lists], 0)
        new_chunks = np.bincount(chunk_of, minlength=len(lists))
        if len(chunk_of):
            numbers = old_chunks[chunk_of] + flat_ranges(np.zeros(len(lists), np.int64), new_chunks)
            chunks = pick(elements, chunk_starts, chunk_counts, self._chunk_schema.value.field(ELEMENTS).type)
            rows = pa.RecordBatch.from_arrays([chunks], schema=self._chunk_schema.value)
            keys = chunk_keys(step.keys.take(pa.array(lists[chunk_of])), numbers)
            step.stage(keys, self._chunk_schema.encode_values(rows), self._chunk_family)
        lengths = np.where(is_kept, heads.lengths[lists], 0) + new_counts
        tail = pick(elements, tails, offsets[1:] - tails, self._schema.value.field(TAIL).type)
        columns = [pa.array(lengths), pa.array(old_chunks + new_chunks), tail]
        rows = pa.RecordBatch.from_arrays(columns, schema=self._schema.value)
        written = np.flatnonzero(lengths > 0)
        keys = step.keys.take(pa.array(lists[written]))
        step.stage(keys, self._schema.encode_values(rows.take(pa.array(written))), self._family)
        step.figures.num_rows_updated += int(new_counts.sum())

    def _joined(
        self, lists: Offsets, is_kept: Any, changes: list[ListChange], new_counts: Offsets, heads: _Heads
    ) -> tuple[pa.Array, Offsets]:
        """Return the tails of these n lists with the added elements, before chunks are cut off, and n+1 offsets."""
        kind = self._schema.value.field(TAIL).type.value_type
        try:
            added = self._codec.to_batch(list(chain.from_iterable(c.added for c in changes)))
        except (TypeError, ValueError) as error:
            raise self.values.refusal(error) from error
        fresh = structs(self._ttl.stamped(added), kind)
        tails = heads.tails
        starts = np.column_stack([tails.offsets[lists], len(tails.elements) + offsets_of(new_counts)[:-1]])
        old_counts = np.where(is_kept, tails.offsets[lists + 1] - tails.offsets[lists], 0)
        counts = np.column_stack([old_counts, new_counts])
        order = flat_ranges(starts.ravel(), counts.ravel())
        elements = pa.concat_arrays([tails.elements, fresh]).take(pa.array(order))
        return elements, offsets_of(old_counts + new_counts)

    def _remove(self, lists: Offsets, heads: _Heads) -> None:
        """Stage the removal of all stored rows of these lists."""
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
            keys = chunk_keys(step.keys.take(pa.array(owners[part])), numbers[part])
            step.stage(keys, None, self._chunk_family)


class ListState(PySparkListState):
    """A state variable that holds a list per grouping key, of tuples of its schema's fields.

    Methods read and change the list of the current key; see ``StatefulProcessorHandle.getListState``.
    """

    def __init__(self, declaration: Declaration, variable: StateVariable, step: KeyStep) -> None:
        self._name = declaration.name
        self._step = step
        self._stored = StoredLists(declaration, variable, step)
        self._values = self._stored.values
        self._changes: list[ListChange | None] = []
        self._touched: list[int] = []

    def exists(self) -> bool:
        """Return whether the key's list has an element."""
        change = self._changes[self._step.index]
        if change is not None and (change.added or change.replaced):
            return bool(change.added)
        return self._stored.has_elements(self._step.current)

    def get(self) -> Iterator[tuple[Any, ...]]:
        """Yield the key's elements in the order of their addition, as they are at the time of the call.

        A long list is read some chunks at a time.
        """
        change = self._changes[self._step.index]
        added = list(change.added) if change is not None else []
        parts: Iterator[tuple[Any, ...]]
        if change is not None and change.replaced:
            parts = iter(added)
        else:
            parts = self._stored.elements(self._step.current, added)
        return parts if self._values.is_immutable else map(self._values.copied, parts)

    def put(self, newState: Iterable[tuple[Any, ...]]) -> None:
        """Set the whole list; raises ``IllegalStateValueError`` if it is empty, or for an element that does not fit."""
        added = self._accepted(newState)
        change = self._change()
        change.replaced, change.added = True, added

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        """Add an element at the end; raises ``IllegalStateValueError`` if it does not fit the schema."""
        accepted = self._values.accept(newState)
        (self._changes[self._step.index] or self._change()).added.append(accepted)

    def appendList(self, newState: Iterable[tuple[Any, ...]]) -> None:
        """Add elements at the end; raises ``IllegalStateValueError`` for no elements, or for one that does not fit."""
        added = self._accepted(newState)
        self._change().added.extend(added)

    def clear(self) -> None:
        """Remove the key's list."""
        change = self._change()
        change.replaced, change.added = True, []

    def _accepted(self, elements: Iterable[tuple[Any, ...]] | None) -> list[tuple[Any, ...]]:
        if elements is None:
            raise null_value(self._name, "list")
        if not (accepted := [self._values.accept(e) for e in elements]):
            raise IllegalStateValueError(
                f"[ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE] State variable {self._name!r} was given an empty list. "
                "Give at least one element, or call clear() to remove the list."
            )
        return accepted

    def _change(self) -> ListChange:
        index = self._step.index
        change: ListChange | None = self._changes[index]
        if change is None:
            change = self._changes[index] = ListChange()
            self._touched.append(index)
        return change

    def _begin(self) -> None:
        self._changes = [None] * len(self._step.keys)
        self._touched = []
        self._stored.begin()

    def _end(self) -> None:
        self._stored.stage(self._changes, self._touched)
        self._changes, self._touched = [], []
