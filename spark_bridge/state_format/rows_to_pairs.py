"""Stored pairs, made of the rows of a state variable as users see them: the inverse of ``stored_rows``.

A batch has all rows of each of its keys. So lists can be cut into chunks, and timers and sessions get their families by
time, as if an operator had written them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import Offsets, list_array, struct_array
from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import TIMERS
from backends.encoding.sorted_pairs import SortedPairs
from backends.encoding.values import encode_values
from spark_bridge.state_format import layouts
from spark_bridge.state_format.partition_rows import are_large, chunk_keys, cut_lists, flat_ranges, pick, structs
from spark_bridge.state_format.stored_rows import (
    VariableRows,
    by_expiry,
    by_value,
    columns_of_key,
    indexed_values,
    key_groups_of,
    with_more,
)

FamilyPairs: TypeAlias = tuple[str, SortedPairs]
"""A column family, and pairs of it."""


@dataclass(frozen=True)
class PairsOfRows:
    """Makes the pairs of one variable from batches of rows.

    ``rows`` must be ``raw``, and must not ``collect``. ``times`` returns the times of rows of a side of ``join``, in
    microseconds (``NO_TIME`` for a row without a time).

    A batch has the columns of the key in the user's order, then the inner columns, which distinguish the rows of one
    key, and then those of the value (``columns``).
    """

    rows: VariableRows
    times: Callable[[pa.RecordBatch], npt.NDArray[np.int64]] | None = None

    @cached_property
    def columns(self) -> pa.Schema:
        """Return the columns of a row. A field that is not nullable must have a value in every row."""
        names = self.rows.output.names
        fields = [*(self.rows.key.field(i) for i in self.rows.key_order), *self.rows.inner, *self.rows.value]
        # The time of a timer and the bounds of a session are never null.
        inner = [f.with_nullable(self.rows.kind == layouts.MAP) for f in self.rows.inner]
        declared = [*(self._keys.field(i) for i in self.rows.key_order), *inner, *self._values]
        nullable = [f.nullable for f in declared] + [True] * (len(fields) - len(declared))
        return pa.schema([pa.field(n, f.type, null) for n, f, null in zip(names, fields, nullable, strict=False)])

    @property
    def is_by_time_of_program(self) -> bool:
        """Return whether the rows are those of a side of ``join`` without ``times``, which only the program knows."""
        return self.times is None and any(f.endswith(layouts.CHUNKS_BY_TIME) for f in self.rows.variable.families)

    @property
    def has_equal_keys(self) -> bool:
        """Return whether several rows may have equal keys: elements of a list, and timers, which are stored once."""
        return self.rows.kind in (layouts.LIST, TIMERS)

    @cached_property
    def _keys(self) -> pa.Schema:
        """Return the key's columns in stored order, as they are declared."""
        fields = list(self.rows.variable.families[self.rows.main].key)
        return pa.schema(fields[1:] if self.rows.kind == TIMERS else fields)

    @cached_property
    def _values(self) -> list[pa.Field]:
        """Return the stored columns of a value, as they are declared, without the TTL's."""
        rows = self.rows
        if rows.kind == TIMERS or not len(rows.stored_value):
            return []
        stored = rows.variable.families[rows.second or rows.main].value
        if rows.kind == layouts.SESSIONS:
            of_session = stored.field(layouts.SESSIONS).type.value_type
            return [f for f in of_session if f.name not in (layouts.START, layouts.END)]
        fields = stored.field(layouts.ELEMENTS).type.value_type if rows.kind == layouts.LIST else stored
        return [f for f in fields if f.name != layouts.TTL_COLUMN]

    # -- keys ----------------------------------------------------------------------------------

    def keys(self, batch: pa.RecordBatch, num_groups: int) -> pa.BinaryArray:
        """Return the sort keys of rows: the stored key, and then the inner columns."""
        columns = self._key_columns(batch)
        keys = encode_keys(columns, key_groups(columns, num_groups))
        if not len(self.rows.inner):
            return keys
        return with_more(keys, columns_of_key(self._part(batch, len(self._keys), self.rows.inner)))

    def _key_columns(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        places = np.argsort(self.rows.key_order).tolist()
        return pa.RecordBatch.from_arrays([batch.column(i) for i in places], schema=_nullable(self.rows.key))

    def _part(self, batch: pa.RecordBatch, first: int, schema: pa.Schema) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(batch.columns[first : first + len(schema)], schema=_nullable(schema))

    # -- pairs ---------------------------------------------------------------------------------

    def pairs(self, batch: pa.RecordBatch, keys: pa.BinaryArray) -> Iterator[FamilyPairs]:
        """Yield the pairs of rows that come in the order of ``keys``, of every column family that gets some.

        No key comes twice unless ``has_equal_keys``. All rows of a grouping key are in the batch.
        """
        if not batch.num_rows:
            return
        match self.rows.kind:
            case "list":
                yield from self._lists(batch, keys)
            case "map":
                yield from self._maps(batch, keys)
            case "timers":
                yield from self._timers(batch, keys)
            case "sessions":
                yield from self._sessions(batch, keys)
            case _:
                yield from self._single(batch, keys)

    def _single(self, batch: pa.RecordBatch, keys: pa.BinaryArray) -> Iterator[FamilyPairs]:
        family, schema = self.rows.main, self.rows.variable.families[self.rows.main]
        values = self._stored_values(batch, schema.value)
        yield family, SortedPairs(keys, schema.encode_values(values))
        if self.rows.variable.kind == layouts.ROWS and layouts.EXPIRY_FAMILY in self.rows.variable.families:
            yield self._by_time(layouts.EXPIRY_FAMILY, values.column(0), self._key_columns(batch), key_groups_of(keys))
        for column, index in self.rows.variable.indexes.items():
            indexed = indexed_values(column, self._key_columns(batch), values)
            yield index, _present(by_value(keys, indexed))

    def _by_time(
        self, family: str, times: pa.Array, columns: pa.RecordBatch, groups: npt.NDArray[np.int32]
    ) -> FamilyPairs:
        """Return the pairs of a family that has grouping keys by a time before them."""
        schema = self.rows.variable.families[family]
        by_time = pa.RecordBatch.from_arrays([times, *columns.columns], schema=_nullable(schema.key))
        return family, _present(encode_keys(by_time, groups))

    def _lists(self, batch: pa.RecordBatch, keys: pa.BinaryArray) -> Iterator[FamilyPairs]:
        second = self.rows.second
        assert second is not None
        head, chunk = self.rows.variable.families[self.rows.main], self.rows.variable.families[second]
        firsts, offsets = _grouped(keys)
        kind = chunk.value.field(layouts.ELEMENTS).type
        elements = structs(self._stored_values(batch, pa.schema(list(kind.value_type))), kind.value_type)
        tails, chunk_of, starts, counts = cut_lists(elements, offsets)
        chunks = np.bincount(chunk_of, minlength=len(firsts))
        lists = keys.take(pa.array(firsts))
        numbers = flat_ranges(np.zeros(len(firsts), np.int64), chunks)
        if len(chunk_of):
            rows = pa.RecordBatch.from_arrays([pick(elements, starts, counts, kind)], schema=chunk.value)
            stored = chunk_keys(lists.take(pa.array(chunk_of)), numbers)
            yield second, SortedPairs.of(stored, chunk.encode_values(rows))
        tail = head.value.field(layouts.TAIL).type
        columns = [pa.array(np.diff(offsets)), pa.array(chunks), pick(elements, tails, offsets[1:] - tails, tail)]
        rows = pa.RecordBatch.from_arrays(columns, schema=head.value)
        yield self.rows.main, SortedPairs(lists, head.encode_values(rows))
        if self.times is not None:
            times = self.times(batch)
            yield from self._chunks_by_time(lists.take(pa.array(chunk_of)), numbers, times, starts, counts)
            tail_numbers = np.full(len(firsts), layouts.TAIL_NUMBER)
            yield from self._chunks_by_time(lists, tail_numbers, times, tails, offsets[1:] - tails)

    def _chunks_by_time(
        self, owners: pa.BinaryArray, numbers: Offsets, times: npt.NDArray[np.int64], starts: Offsets, counts: Offsets
    ) -> Iterator[FamilyPairs]:
        """Yield the chunks of a side of ``join`` by the time of their first row; a chunk has at least one row."""
        if not len(owners):
            return
        least = np.minimum.reduceat(times[flat_ranges(starts, counts)], np.cumsum(counts) - counts)
        has_time = least < layouts.NO_TIME
        owners = owners.filter(pa.array(has_time))
        entries = chunk_keys(by_expiry(owners, least[has_time]), numbers[has_time])
        yield layouts.family_of(self.rows.variable, layouts.CHUNKS_BY_TIME)[0], _present(entries)

    def _maps(self, batch: pa.RecordBatch, keys: pa.BinaryArray) -> Iterator[FamilyPairs]:
        second = self.rows.second
        assert second is not None
        head, entry = self.rows.variable.families[self.rows.main], self.rows.variable.families[second]
        maps = self._grouping_keys(batch, keys)
        firsts, offsets = _grouped(maps)
        values = self._stored_values(batch, entry.value)
        kind = head.value.field(layouts.MAP_ENTRIES).type
        inner = self._part(batch, len(self._keys), self.rows.inner)
        of_user = [f for f in entry.value if f.name != layouts.TTL_COLUMN]
        columns = [
            structs(inner, kind.value_type.field(layouts.ENTRY_KEY).type),
            structs(values.select([f.name for f in of_user]), kind.value_type.field(layouts.ENTRY_VALUE).type),
            *([values.column(layouts.TTL_COLUMN)] if len(of_user) < len(entry.value) else []),
        ]
        entries = struct_array(columns, batch.num_rows, None, kind.value_type)
        large = are_large(entries, offsets)
        of_large = pa.array(np.repeat(large, np.diff(offsets)))
        yield second, SortedPairs(keys.filter(of_large), entry.encode_values(values.filter(of_large)))
        small_maps = pick(entries, offsets[:-1], np.where(large, 0, np.diff(offsets)), kind)
        rows = pa.RecordBatch.from_arrays([pa.array(large), small_maps], schema=head.value)
        yield self.rows.main, SortedPairs(maps.take(pa.array(firsts)), head.encode_values(rows))

    def _timers(self, batch: pa.RecordBatch, keys: pa.BinaryArray) -> Iterator[FamilyPairs]:
        is_first = np.ones(len(keys), np.bool_)
        is_first[1:] = np.asarray(pc.not_equal(keys[1:], keys[:-1]))
        kept = batch.filter(pa.array(is_first))
        owners = self._grouping_keys(kept, keys.filter(pa.array(is_first)))
        expiries = np.asarray(kept.column(len(self._keys)))
        firsts, offsets = _grouped(owners)
        family, schema = layouts.family_of(self.rows.variable, layouts.TIMERS_BY_KEY)
        lists = list_array(pa.array(expiries), offsets, None, schema.value.field(layouts.EXPIRIES).type)
        rows = pa.RecordBatch.from_arrays([lists], schema=schema.value)
        yield family, SortedPairs(owners.take(pa.array(firsts)), schema.encode_values(rows))
        by_time, _ = layouts.family_of(self.rows.variable, layouts.TIMERS_BY_EXPIRY)
        yield by_time, _present(by_expiry(owners, expiries))

    def _sessions(self, batch: pa.RecordBatch, keys: pa.BinaryArray) -> Iterator[FamilyPairs]:
        schema = self.rows.variable.families[self.rows.main]
        owners = self._grouping_keys(batch, keys)
        firsts, offsets = _grouped(owners)
        starts, ends = batch.column(len(self._keys)).flatten()
        kind = schema.value.field(layouts.SESSIONS).type
        states = batch.columns[len(self._keys) + 1 :]
        sessions = struct_array([starts, ends, *states], batch.num_rows, None, kind.value_type)
        due = ends.take(pa.array(firsts))
        rows = pa.RecordBatch.from_arrays([list_array(sessions, offsets, None, kind), due], schema=schema.value)
        stored = owners.take(pa.array(firsts))
        yield self.rows.main, SortedPairs(stored, schema.encode_values(rows))
        of_keys = self._key_columns(batch.take(pa.array(firsts)))
        yield self._by_time(layouts.ENDS_FAMILY, due, of_keys, key_groups_of(stored))

    def without_length(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Return the positions of the sessions that have no bounds, or do not end after they begin."""
        if self.rows.kind != layouts.SESSIONS:
            return np.zeros(0, np.int64)
        starts, ends = batch.column(len(self._keys)).flatten()
        is_right = pc.fill_null(pc.less(starts, ends), False)
        positions: npt.NDArray[np.int64] = np.flatnonzero(~np.asarray(is_right))
        return positions

    def overlapping(self, batch: pa.RecordBatch, keys: pa.BinaryArray) -> npt.NDArray[np.int64]:
        """Return the positions of the sessions that touch the session before them of the same key."""
        if self.rows.kind != layouts.SESSIONS or batch.num_rows < 2:
            return np.zeros(0, np.int64)
        owners = self._grouping_keys(batch, keys)
        starts, ends = (np.asarray(c.cast(pa.int64())) for c in batch.column(len(self._keys)).flatten())
        same = np.asarray(pc.equal(owners[1:], owners[:-1]))
        positions: npt.NDArray[np.int64] = 1 + np.flatnonzero(same & (starts[1:] <= ends[:-1]))
        return positions

    def _stored_values(self, batch: pa.RecordBatch, stored: pa.Schema) -> pa.RecordBatch:
        """Return the values as they are stored, the TTL last."""
        if stored.names == layouts.PRESENT.names and not len(self.rows.stored_value):
            return layouts.is_present(batch.num_rows)
        columns = batch.columns[len(self._keys) + len(self.rows.inner) :]
        return pa.RecordBatch.from_arrays(columns, schema=_nullable(stored))

    def _grouping_keys(self, batch: pa.RecordBatch, keys: pa.BinaryArray) -> pa.BinaryArray:
        return encode_keys(self._key_columns(batch), key_groups_of(keys))


def _grouped(keys: pa.BinaryArray) -> tuple[Offsets, Offsets]:
    """Return where each run of equal keys begins, and the n+1 bounds of the n runs."""
    starts = np.concatenate([[0], 1 + np.flatnonzero(np.asarray(pc.not_equal(keys[1:], keys[:-1])))]).astype(np.int64)
    return starts, np.append(starts, len(keys)).astype(np.int64)


def _present(keys: pa.BinaryArray) -> SortedPairs:
    """Return pairs of the keys, sorted, with the marker value ``PRESENT``."""
    return SortedPairs.of(keys, encode_values(layouts.is_present(len(keys))))


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(f.name, f.type) for f in schema])
