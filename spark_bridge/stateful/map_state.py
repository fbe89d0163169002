"""A map per grouping key: a small one is one row, a large one has a row for each of its entries."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row
from pyspark.sql import types as T

from backends.encoding.columns import list_array, struct_array
from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import StateVariable
from spark_bridge.state_format.families import ENTRIES, family_of
from spark_bridge.state_format.layouts import ENTRY_KEY, ENTRY_VALUE, IS_LARGE, MAP_ENTRIES, TTL_COLUMN
from spark_bridge.state_format.stored_keys import columns_of_key, prefix_range, with_more
from spark_bridge.stateful.declaration import Declaration
from spark_bridge.stateful.ranges import LazyLists, alive_lists, offsets_of, pick, rows_of, sizes_of, structs
from spark_bridge.stateful.row_values import row_class
from spark_bridge.stateful.state_values import StateValues
from spark_bridge.stateful.step import Step
from spark_bridge.stateful.ttl import Ttl

SMALL_ENTRIES = 64
SMALL_BYTES = 16 << 10
_MISSES_BEFORE_LOADING = 16
_ENTRIES_LOADED = 1 << 14

Values: TypeAlias = tuple[Any, ...]
Entry: TypeAlias = "tuple[Values, Values | None, int | None]"
"""A user key, its value (None: removed), and when it expires."""
_NAN = float("nan")


class _Map:
    """One key's map. ``entries`` are all of a small one, and what was changed of a large one.

    ``stored`` are the values of a large one that have been looked up, all of them if ``is_loaded``.
    """

    __slots__ = (
        "entries",
        "is_changed",
        "is_large",
        "is_loaded",
        "misses",
        "removed",
        "stored",
        "was_large",
        "written",
    )

    def __init__(self, is_large: bool, entries: dict[Hashable, Entry]) -> None:
        self.is_large = self.was_large = is_large
        self.entries = entries
        self.written: set[Hashable] = set()
        self.removed = 0
        self.is_changed = False
        self.is_loaded = False
        self.misses = 0
        self.stored: dict[Hashable, Values | None] = {}

    @property
    def is_wiped(self) -> bool:
        """Whether the entries in the store are to be removed."""
        return self.was_large and not self.is_large


@dataclass(frozen=True)
class _Heads:
    """What is stored beside the step's keys; ``small`` gives the entries of small maps that have not expired."""

    present: np.ndarray[Any, np.dtype[np.bool_]]
    large: list[bool]
    small: LazyLists


class MapState:
    """A state variable that holds a map per grouping key, from tuples to tuples of its schemas' fields."""

    def __init__(self, declaration: Declaration, variable: StateVariable, step: Step) -> None:
        self._codec, self._key_codec = declaration.codec, declaration.key_codec
        self._family, self._schema = family_of(variable)
        self._entry_family, self._entry_schema = family_of(variable, ENTRIES)
        self._step = step
        self._ttl = Ttl(declaration.ttl_ms, step)
        self._keys = StateValues(declaration.name, "key", declaration.key_codec)
        self._values = StateValues(declaration.name, "value", declaration.codec)
        self._value_row = row_class(tuple(declaration.codec.struct.names))
        self._hashed = _hashed(declaration.key_codec.struct)
        self._maps: list[_Map | None] = []
        self._num_scanned = 0
        self._touched: list[int] = []
        self._read_heads: _Heads | None = None

    def exists(self) -> bool:
        """Whether the key's map has an entry."""
        found = self._map()
        return next(self._entries(found), None) is not None if found.is_large else bool(found.entries)

    def getValue(self, key: Values) -> Row | None:
        """The value of an entry, or None. Raises ``IllegalStateValueError`` if the key does not fit its schema."""
        value = self._value_of(self._keys.accept(key))
        if value is None:
            return None
        row: Row = tuple.__new__(self._value_row, value if self._values.is_immutable else self._values.copied(value))
        return row

    def containsKey(self, key: Values) -> bool:
        """Whether the map has an entry of that key."""
        return self._value_of(self._keys.accept(key)) is not None

    def updateValue(self, key: Values, value: Values) -> None:
        """Set an entry; its TTL begins anew. Raises ``IllegalStateValueError`` if key or value do not fit."""
        key, value = self._keys.accept(key), self._values.accept(value)
        found, hashed = self._map(), self._hashed(key)
        found.entries[hashed] = (key, value, self._ttl.expiry)
        found.written.add(hashed)
        found.is_changed = True

    def iterator(self) -> Iterator[tuple[Values, Values]]:
        """The entries as they are now, in the order of their keys; a large map is read bit by bit."""
        entries = self._entries(self._map())
        if self._keys.is_immutable and self._values.is_immutable:
            return entries
        return ((self._keys.copied(k), self._values.copied(v)) for k, v in entries)

    def keys(self) -> Iterator[Values]:
        """The keys of the entries, in order."""
        return (key for key, _ in self.iterator())

    def values(self) -> Iterator[Values]:
        """The values of the entries, in the order of their keys."""
        return (value for _, value in self.iterator())

    def removeKey(self, key: Values) -> None:
        """Remove an entry, if there is one."""
        key = self._keys.accept(key)
        found, hashed = self._map(), self._hashed(key)
        if found.is_large:
            found.entries[hashed] = (key, None, None)
        elif found.entries.pop(hashed, None) is None:
            return
        found.written.discard(hashed)
        found.removed += 1
        found.is_changed = True

    def clear(self) -> None:
        """Remove all entries."""
        found = self._map()
        if not found.is_large:
            found.removed += len(found.entries)
        found.is_large, found.is_changed = False, True
        found.entries, found.written = {}, set()

    def _begin(self) -> None:
        self._maps = [None] * len(self._step.keys)
        self._touched = []
        self._read_heads = None

    def _heads(self) -> _Heads:
        """What is stored beside the step's keys, fetched all at once when it is first needed."""
        if self._read_heads is None:
            stored = self._step.store.get_many(self._step.keys, self._family)
            found = self._schema.decode_values(stored)
            elements, offsets = alive_lists(found.column(MAP_ENTRIES), self._ttl.alive if self._ttl.is_on else None)
            self._read_heads = _Heads(
                pc.is_valid(stored).to_numpy(zero_copy_only=False),
                found.column(IS_LARGE).fill_null(False).to_pylist(),
                LazyLists(elements, offsets, self._decoded),
            )
        return self._read_heads

    def _decoded(self, entries: pa.RecordBatch) -> list[Entry]:
        keys = self._key_codec.to_tuples(rows_of(entries.column(ENTRY_KEY)))
        values = self._codec.to_tuples(rows_of(entries.column(ENTRY_VALUE)))
        return list(zip(keys, values, self._ttl.expiries(entries), strict=True))

    def _map(self) -> _Map:
        index = self._step.index
        found: _Map | None = self._maps[index]
        if found is None:
            heads = self._heads()
            is_large = heads.large[index]
            entries = {self._hashed(entry[0]): entry for entry in heads.small[index]}
            found = self._maps[index] = _Map(is_large, entries)
            self._touched.append(index)
        return found

    def _value_of(self, key: Values) -> Values | None:
        found, hashed = self._map(), self._hashed(key)
        entry = found.entries.get(hashed)
        if entry is not None:
            return entry[1]
        return self._look_up(found, hashed, key) if found.is_large else None

    def _look_up(self, found: _Map, hashed: Hashable, key: Values) -> Values | None:
        """A large map's value in the store. Who looks up many gets all of them at once, unless there are too many."""
        if hashed in found.stored or found.is_loaded:
            return found.stored.get(hashed)
        found.misses += 1
        prefix = self._step.keys[self._step.current].as_py()
        if found.misses == _MISSES_BEFORE_LOADING:
            loaded = list(chain.from_iterable(self._scanned(prefix, _ENTRIES_LOADED + 1)))
            if self._num_scanned <= _ENTRIES_LOADED:
                found.stored = {self._hashed(k): value for _, k, value in loaded}
                found.is_loaded = True
                return found.stored.get(hashed)
        rows = self._key_codec.to_batch([key])
        stored = self._step.store.get_many(with_more(pa.array([prefix]), columns_of_key(rows)), self._entry_family)
        decoded = self._entry_schema.decode_values(stored)
        is_alive = stored.null_count == 0 and (not self._ttl.is_on or self._ttl.alive(decoded).all())
        value = self._codec.to_tuples(decoded.select(self._codec.schema.names))[0] if is_alive else None
        found.stored[hashed] = value
        return value

    def _entries(self, found: _Map) -> Iterator[tuple[Values, Values]]:
        """The entries of a map as it is when this is called, in the order of their keys."""
        if not found.is_large:
            pairs = [(key, value) for key, value, _ in found.entries.values() if value is not None]
            return iter(sorted(pairs, key=lambda pair: _ordered(pair[0])))
        prefix = self._step.keys[self._step.current].as_py()
        entries = list(found.entries.values())
        encoded = columns_of_key(self._key_codec.to_batch([entry[0] for entry in entries])).to_pylist()
        changed = [(prefix + columns, key, value) for columns, (key, value, _) in zip(encoded, entries, strict=True)]
        return self._merged(prefix, sorted(changed, key=lambda c: c[0]))

    def _merged(
        self, prefix: bytes, changed: list[tuple[bytes, Values, Values | None]]
    ) -> Iterator[tuple[Values, Values]]:
        """The entries in the store with those changed (in order) in their places."""
        at = 0
        for stored in self._scanned(prefix, None):
            for encoded, key, value in stored:
                while at < len(changed) and changed[at][0] < encoded:
                    _, changed_key, changed_value = changed[at]
                    if changed_value is not None:
                        yield changed_key, changed_value
                    at += 1
                if at < len(changed) and changed[at][0] == encoded:
                    continue
                yield key, value
        for _, changed_key, changed_value in changed[at:]:
            if changed_value is not None:
                yield changed_key, changed_value

    def _scanned(self, prefix: bytes, limit: int | None) -> Iterator[list[tuple[bytes, Values, Values]]]:
        """A large map's entries in the store that have not expired, some at a time: stored key, key and value."""
        group_columns = len(self._schema.key)
        self._num_scanned = 0
        for batch in self._step.store.scan([prefix_range(prefix)], self._entry_family, limit):
            self._num_scanned += batch.num_rows  # those that have expired as well
            keys, values = batch.column(0), self._entry_schema.decode_values(batch.column(1))
            if self._ttl.is_on:
                alive = pa.array(self._ttl.alive(values))
                keys, values = keys.filter(alive), values.filter(alive)
            columns = decode_keys(keys, self._entry_schema.key)
            user = pa.RecordBatch.from_arrays(columns.columns[group_columns:], schema=self._key_codec.schema)
            rows = self._codec.to_tuples(values.select(self._codec.schema.names))
            yield list(zip(keys.to_pylist(), self._key_codec.to_tuples(user), rows, strict=True))

    def _end(self) -> None:
        """Stage the step's changes."""
        changed = [
            (i, m) for i, m in ((i, self._maps[i]) for i in sorted(self._touched)) if m is not None and m.is_changed
        ]
        if changed:
            for i, found in changed:
                if found.is_wiped:
                    self._wipe(i, found)
            self._stage_heads([(i, m) for i, m in changed if not m.is_large])
            self._stage_entries([(i, m) for i, m in changed if m.is_large])
            if self._ttl.is_on:
                self._stage_large_heads([i for i, m in changed if m.is_large])
            figures = self._step.figures
            figures.num_rows_updated += sum(len(m.written) for _, m in changed)
            figures.num_rows_removed += sum(m.removed for _, m in changed)
        if self._ttl.is_on and self._read_heads is not None:
            self._remove_expired(self._read_heads, [i for i, _ in changed])
        self._maps, self._touched, self._read_heads = [], [], None

    def _wipe(self, i: int, found: _Map) -> None:
        """Stage the removal of a large map's entries."""
        prefix = self._step.keys[i].as_py()
        for batch in self._step.store.scan([prefix_range(prefix)], self._entry_family):
            self._step.stage(batch.column(0), None, self._entry_family)
            found.removed += batch.num_rows

    def _stage_heads(self, changed: list[tuple[int, _Map]]) -> None:
        """Stage maps that have been small; those that no longer are become large, for good."""
        step, heads = self._step, self._heads()
        gone = np.array([i for i, m in changed if not m.entries and heads.present[i]], np.int64)
        step.stage(step.keys.take(pa.array(gone)), None, self._family)
        maps = [(i, m) for i, m in changed if m.entries]
        if not maps:
            return
        keys, values = self._columns([entry for _, m in maps for entry in m.entries.values()])
        kind = self._schema.value.field(MAP_ENTRIES).type
        entry = kind.value_type
        columns = [
            structs(keys, entry.field(ENTRY_KEY).type),
            structs(values.select(self._codec.schema.names), entry.field(ENTRY_VALUE).type),
        ]
        if self._ttl.is_on:
            columns.append(values.column(TTL_COLUMN))
        entries = struct_array(columns, len(keys), None, entry)
        offsets = offsets_of(np.array([len(m.entries) for _, m in maps]))
        ends = offsets_of(sizes_of(entries))
        is_large = (np.diff(offsets) > SMALL_ENTRIES) | (ends[offsets[1:]] - ends[offsets[:-1]] > SMALL_BYTES)
        for which in np.flatnonzero(is_large).tolist():
            maps[which][1].is_large = True
        rows = pa.RecordBatch.from_arrays(
            [pa.array(is_large), pick(entries, offsets[:-1], np.where(is_large, 0, np.diff(offsets)), kind)],
            schema=self._schema.value,
        )
        step.stage(step.keys.take(pa.array([i for i, _ in maps])), self._schema.encode_values(rows), self._family)

    def _stage_large_heads(self, maps: list[int]) -> None:
        """Stage the heads of large maps once more: the sweep may have found that all of their entries had gone."""
        kind = self._schema.value.field(MAP_ENTRIES).type
        entries = list_array(pa.array([], kind.value_type), np.zeros(len(maps) + 1, np.int64), None, kind)
        rows = pa.RecordBatch.from_arrays(
            [pa.array([True] * len(maps), pa.bool_()), entries], schema=self._schema.value
        )
        keys = self._step.keys.take(pa.array(maps, pa.int64()))
        self._step.stage(keys, self._schema.encode_values(rows), self._family)

    def _stage_entries(self, changed: list[tuple[int, _Map]]) -> None:
        """Stage the changed entries of large maps."""
        step = self._step
        owned = [(i, entry) for i, m in changed for entry in m.entries.values()]
        for is_removal in (True, False):
            part = [(i, entry) for i, entry in owned if (entry[1] is None) == is_removal]
            if not part:
                continue
            keys, values = self._columns([entry for _, entry in part])
            stored = with_more(step.keys.take(pa.array([i for i, _ in part])), columns_of_key(keys))
            encoded = None if is_removal else self._entry_schema.encode_values(values)
            step.stage(stored, encoded, self._entry_family)

    def _columns(self, entries: list[Entry]) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Entries' keys and, with their expiries if there is a TTL, values; those of removed ones are null."""
        none = (None,) * len(self._codec.schema)
        try:
            keys = self._key_codec.to_batch([entry[0] for entry in entries])
        except (TypeError, ValueError) as error:
            raise self._keys.refusal(error) from error
        try:
            values = self._codec.to_batch([none if entry[1] is None else entry[1] for entry in entries])
        except (TypeError, ValueError) as error:
            raise self._values.refusal(error) from error
        return keys, self._ttl.stamped(values, [entry[2] for entry in entries])

    def _remove_expired(self, heads: _Heads, changed: list[int]) -> None:
        """Stage the removal of small maps that were looked at, not written, and have nothing any more."""
        is_over = heads.present & (np.diff(heads.small.offsets) == 0) & ~np.array(heads.large, np.bool_)
        is_over[changed] = False
        self._step.stage(self._step.keys.filter(pa.array(is_over)), None, self._family)


def _hashed(struct: T.StructType) -> Callable[[Values], Hashable]:
    """A function from keys of the schema to what tells them apart in a dict, as their stored bytes would."""
    kinds = {type(f.dataType) for f in struct.fields}
    if kinds & {T.ArrayType, T.StructType, T.FloatType, T.DoubleType, T.TimestampType}:
        return _frozen
    return lambda key: key


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dt.datetime):
        return value, value.fold
    # One NaN: it equals itself only by identity.
    return _NAN if isinstance(value, float) and math.isnan(value) else value


def _ordered(value: Any) -> Any:
    """What sorts as the stored bytes of a value do: nulls first, NaN last."""
    if value is None:
        return (0,)
    if isinstance(value, (list, tuple)):
        return (1, *map(_ordered, value))
    if isinstance(value, float):
        return (1, 1, 0.0) if math.isnan(value) else (1, 0, value)
    return (1, value)
