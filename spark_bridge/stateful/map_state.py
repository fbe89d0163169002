"""``MapState``: a map per grouping key, as a processor uses it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row

from backends.encoding.columns import list_array, offsets_of, struct_array
from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import StateVariable
from spark_bridge.state_format import layouts, partition_rows
from spark_bridge.state_format.stored_rows import columns_of_key, prefix_range, with_more
from spark_bridge.stateful.ddl import hash_function, sort_key
from spark_bridge.stateful.declaration import Declaration, KeyStep, PySparkMapState
from spark_bridge.stateful.state_values import StateValues, row_class
from spark_bridge.stateful.ttl import Ttl

# The maps of one state variable in the store: reading those of a step's keys, and staging their changes.
#
# A small map is one row at its grouping key. A map that has grown large stays large: it has a row for each of its
# entries, under the grouping key followed by the user's key.


ValueTuple: TypeAlias = tuple[Any, ...]
Entry: TypeAlias = "tuple[ValueTuple, ValueTuple | None, int | None]"
"""A user's key, its value (None: removed), and when the entry expires in ms since 1970 (None: never)."""


@dataclass(slots=True, eq=False)
class KeyMap:
    """The map of one grouping key, with the changes of this step.

    ``entries`` are all entries of a small map, and the changed entries of a large map. ``stored`` are the values of a
    large map that have been looked up; if ``is_loaded``, those of all its entries. ``misses`` counts look-ups of
    entries that were not in ``stored``.
    """

    was_large: bool
    is_large: bool
    entries: dict[Hashable, Entry]
    written: set[Hashable] = field(default_factory=set)
    removed: int = 0
    is_changed: bool = False
    is_loaded: bool = False
    misses: int = 0
    stored: dict[Hashable, ValueTuple | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Heads:
    """The rows of the step's keys: which keys have one, whether the map is large, and the entries of small maps.

    Expired entries are left out.
    """

    present: np.ndarray[Any, np.dtype[np.bool_]]
    large: list[bool]
    small: partition_rows.LazyLists


class StoredMaps:
    """Reads the maps of a step's keys, and stages changed maps. ``keys`` and ``values`` check a user's values."""

    def __init__(self, declaration: Declaration, variable: StateVariable, step: KeyStep, ttl: Ttl) -> None:
        self._codec, self._key_codec = declaration.codec, declaration.key_codec
        self._family, self._schema = layouts.family_of(variable)
        self._entry_family, self._entry_schema = layouts.family_of(variable, layouts.ENTRIES)
        self._step = step
        self._ttl = ttl
        self.keys = StateValues(declaration.name, "key", declaration.key_codec)
        self.values = StateValues(declaration.name, "value", declaration.codec)
        self.num_scanned = 0
        """Stored entries that the last ``scan`` has read, expired ones included."""
        self._read_heads: _Heads | None = None

    # -- reading -------------------------------------------------------------------------------

    def begin(self) -> None:
        self._read_heads = None

    def head(self, i: int) -> tuple[bool, list[Entry]]:
        """Return whether the map of the step's key i is large, and if not, its entries."""
        heads = self._heads()
        return heads.large[i], heads.small[i]

    def _heads(self) -> _Heads:
        """Return the rows of the step's keys, read for all keys at once when the first is needed."""
        if self._read_heads is None:
            stored = self._step.store.get_many(self._step.keys, self._family)
            values = self._schema.decode_values(stored)
            elements, offsets = partition_rows.alive_lists(
                values.column(layouts.MAP_ENTRIES), self._ttl.alive if self._ttl.is_on else None
            )
            self._read_heads = _Heads(
                pc.is_valid(stored).to_numpy(zero_copy_only=False),
                values.column(layouts.IS_LARGE).fill_null(False).to_pylist(),
                partition_rows.LazyLists(elements, offsets, self._decoded),
            )
        return self._read_heads

    def _decoded(self, entries: pa.RecordBatch) -> list[Entry]:
        keys = self._key_codec.to_tuples(partition_rows.rows_of_structs(entries.column(layouts.ENTRY_KEY)))
        values = self._codec.to_tuples(partition_rows.rows_of_structs(entries.column(layouts.ENTRY_VALUE)))
        return list(zip(keys, values, self._ttl.expiries(entries), strict=True))

    def value(self, prefix: bytes, key: ValueTuple) -> ValueTuple | None:
        """Return the value of an entry of the large map under the stored key ``prefix``; None if there is none."""
        rows = self._key_codec.to_batch([key])
        stored = self._step.store.get_many(with_more(pa.array([prefix]), columns_of_key(rows)), self._entry_family)
        decoded = self._entry_schema.decode_values(stored)
        is_alive = stored.null_count == 0 and (not self._ttl.is_on or self._ttl.alive(decoded).all())
        return self._codec.to_tuples(decoded.select(self._codec.schema.names))[0] if is_alive else None

    def stored_keys(self, prefix: bytes, keys: list[ValueTuple]) -> list[bytes]:
        """Return the stored keys of entries of the large map under ``prefix``."""
        return [prefix + columns for columns in columns_of_key(self._key_codec.to_batch(keys)).to_pylist()]

    def scan(self, prefix: bytes, limit: int | None) -> Iterator[list[tuple[bytes, ValueTuple, ValueTuple]]]:
        """Yield the entries of the large map under ``prefix``, some at a time: stored key, user's key and value.

        Expired entries are left out. ``limit`` is the most entries to read, expired ones included.
        """
        group_columns = len(self._schema.key)
        self.num_scanned = 0
        for batch in self._step.store.scan([prefix_range(prefix)], self._entry_family, limit):
            self.num_scanned += batch.num_rows
            keys, values = batch.column(0), self._entry_schema.decode_values(batch.column(1))
            if self._ttl.is_on:
                alive = pa.array(self._ttl.alive(values))
                keys, values = keys.filter(alive), values.filter(alive)
            columns = decode_keys(keys, self._entry_schema.key)
            user = pa.RecordBatch.from_arrays(columns.columns[group_columns:], schema=self._key_codec.schema)
            rows = self._codec.to_tuples(values.select(self._codec.schema.names))
            yield list(zip(keys.to_pylist(), self._key_codec.to_tuples(user), rows, strict=True))

    # -- staging -------------------------------------------------------------------------------

    def stage(self, changed: list[tuple[int, KeyMap]]) -> None:
        """Stage the changed maps of the step, each with the number of its key, ascending.

        Raises ``IllegalStateValueError`` for a value out of its type's range.
        """
        if changed:
            for i, key_map in changed:
                if key_map.was_large and not key_map.is_large:
                    for batch in self._step.store.scan([prefix_range(self._step.keys[i].as_py())], self._entry_family):
                        self._step.stage(batch.column(0), None, self._entry_family)
                        key_map.removed += batch.num_rows
            self._stage_heads([(i, m) for i, m in changed if not m.is_large])
            self._stage_entries([(i, m) for i, m in changed if m.is_large])
            if self._ttl.is_on:
                self._stage_large_heads([i for i, m in changed if m.is_large])
            figures = self._step.figures
            figures.num_rows_updated += sum(len(m.written) for _, m in changed)
            figures.num_rows_removed += sum(m.removed for _, m in changed)
        heads, self._read_heads = self._read_heads, None
        if self._ttl.is_on and heads is not None:
            # Small maps that were read, not changed, and have only expired entries.
            is_over = heads.present & (np.diff(heads.small.offsets) == 0) & ~np.array(heads.large, np.bool_)
            is_over[[i for i, _ in changed]] = False
            self._step.stage(self._step.keys.filter(pa.array(is_over)), None, self._family)

    def _stage_heads(self, changed: list[tuple[int, KeyMap]]) -> None:
        """Stage maps that have been small; a map with too many entries or bytes becomes large."""
        step, heads = self._step, self._heads()
        gone = np.array([i for i, m in changed if not m.entries and heads.present[i]], np.int64)
        step.stage(step.keys.take(pa.array(gone)), None, self._family)
        if not (maps := [(i, m) for i, m in changed if m.entries]):
            return
        keys, values = self._columns([entry for _, m in maps for entry in m.entries.values()])
        kind = self._schema.value.field(layouts.MAP_ENTRIES).type
        entry = kind.value_type
        columns = [
            partition_rows.structs(keys, entry.field(layouts.ENTRY_KEY).type),
            partition_rows.structs(values.select(self._codec.schema.names), entry.field(layouts.ENTRY_VALUE).type),
        ]
        if self._ttl.is_on:
            columns.append(values.column(layouts.TTL_COLUMN))
        entries = struct_array(columns, len(keys), None, entry)
        offsets = offsets_of(np.array([len(m.entries) for _, m in maps]))
        is_large = partition_rows.are_large(entries, offsets)
        for which in np.flatnonzero(is_large).tolist():
            maps[which][1].is_large = True
        small = partition_rows.pick(entries, offsets[:-1], np.where(is_large, 0, np.diff(offsets)), kind)
        rows = pa.RecordBatch.from_arrays([pa.array(is_large), small], schema=self._schema.value)
        step.stage(step.keys.take(pa.array([i for i, _ in maps])), self._schema.encode_values(rows), self._family)

    def _stage_large_heads(self, maps: list[int]) -> None:
        """Stage the rows at the keys of large maps again: a sweep of this batch may have staged their removal."""
        kind = self._schema.value.field(layouts.MAP_ENTRIES).type
        entries = list_array(pa.array([], kind.value_type), np.zeros(len(maps) + 1, np.int64), None, kind)
        are_large = pa.repeat(pa.scalar(True), len(maps))
        rows = pa.RecordBatch.from_arrays([are_large, entries], schema=self._schema.value)
        keys = self._step.keys.take(pa.array(maps, pa.int64()))
        self._step.stage(keys, self._schema.encode_values(rows), self._family)

    def _stage_entries(self, changed: list[tuple[int, KeyMap]]) -> None:
        step = self._step
        owned = [(i, entry) for i, m in changed for entry in m.entries.values()]
        for is_removal in (True, False):
            if not (part := [(i, entry) for i, entry in owned if (entry[1] is None) == is_removal]):
                continue
            keys, values = self._columns([entry for _, entry in part])
            stored = with_more(step.keys.take(pa.array([i for i, _ in part])), columns_of_key(keys))
            encoded = None if is_removal else self._entry_schema.encode_values(values)
            step.stage(stored, encoded, self._entry_family)

    def _columns(self, entries: list[Entry]) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return the keys and the values of entries; values have the TTL's column, and removed ones are null."""
        none = (None,) * len(self._codec.schema)
        try:
            keys = self._key_codec.to_batch([entry[0] for entry in entries])
        except (TypeError, ValueError) as error:
            raise self.keys.refusal(error) from error
        try:
            values = self._codec.to_batch([none if entry[1] is None else entry[1] for entry in entries])
        except (TypeError, ValueError) as error:
            raise self.values.refusal(error) from error
        return keys, self._ttl.stamped(values, [entry[2] for entry in entries])


_MISSES_BEFORE_LOADING = 16
"""Look-ups of single entries of a large map, after which all its entries are loaded."""
_ENTRIES_LOADED = 1 << 14
"""The most entries of a large map that are loaded."""


class MapState(PySparkMapState):
    """A state variable that holds a map per grouping key, from tuples to tuples of its schemas' fields.

    Methods read and change the map of the current key; see ``StatefulProcessorHandle.getMapState``.
    """

    def __init__(self, declaration: Declaration, variable: StateVariable, step: KeyStep) -> None:
        self._step = step
        self._ttl = Ttl(declaration.ttl_ms, step)
        self._stored = StoredMaps(declaration, variable, step, self._ttl)
        self._keys, self._values = self._stored.keys, self._stored.values
        self._value_row = row_class(tuple(declaration.codec.struct.names))
        self._hashed = hash_function(declaration.key_codec.struct)
        self._maps: list[KeyMap | None] = []
        self._touched: list[int] = []

    def exists(self) -> bool:
        """Return whether the key's map has an entry."""
        key_map = self._map()
        return next(self._entries(key_map), None) is not None if key_map.is_large else bool(key_map.entries)

    def getValue(self, key: ValueTuple) -> Row | None:
        """Return the value of an entry, or None if the entry does not exist.

        Raises ``IllegalStateValueError`` if ``key`` does not fit its schema.
        """
        if (value := self._value_of(self._keys.accept(key))) is None:
            return None
        row: Row = tuple.__new__(self._value_row, value if self._values.is_immutable else self._values.copied(value))
        return row

    def containsKey(self, key: ValueTuple) -> bool:
        """Return whether the map has an entry of that key.

        Raises ``IllegalStateValueError`` if ``key`` does not fit its schema.
        """
        return self._value_of(self._keys.accept(key)) is not None

    def updateValue(self, key: ValueTuple, value: ValueTuple) -> None:
        """Set an entry; its TTL restarts.

        Raises ``IllegalStateValueError`` if ``key`` or ``value`` does not fit its schema.
        """
        key, value = self._keys.accept(key), self._values.accept(value)
        key_map, hashed = self._map(), self._hashed(key)
        key_map.entries[hashed] = (key, value, self._ttl.expiry)
        key_map.written.add(hashed)
        key_map.is_changed = True

    def iterator(self) -> Iterator[tuple[ValueTuple, ValueTuple]]:
        """Yield the entries, in the order of their keys, as they are at the time of the call.

        A large map is read some entries at a time.
        """
        entries = self._entries(self._map())
        if self._keys.is_immutable and self._values.is_immutable:
            return entries
        return ((self._keys.copied(k), self._values.copied(v)) for k, v in entries)

    def keys(self) -> Iterator[ValueTuple]:
        """Yield the keys of the entries, in order."""
        return (key for key, _ in self.iterator())

    def values(self) -> Iterator[ValueTuple]:
        """Yield the values of the entries, in the order of their keys."""
        return (value for _, value in self.iterator())

    def removeKey(self, key: ValueTuple) -> None:
        """Remove an entry, if there is one; raises ``IllegalStateValueError`` if ``key`` does not fit its schema."""
        key = self._keys.accept(key)
        key_map, hashed = self._map(), self._hashed(key)
        if key_map.is_large:
            key_map.entries[hashed] = (key, None, None)
        elif key_map.entries.pop(hashed, None) is None:
            return
        key_map.written.discard(hashed)
        key_map.removed += 1
        key_map.is_changed = True

    def clear(self) -> None:
        """Remove all entries."""
        key_map = self._map()
        if not key_map.is_large:
            key_map.removed += len(key_map.entries)
        key_map.is_large, key_map.is_changed = False, True
        key_map.entries, key_map.written = {}, set()

    def _begin(self) -> None:
        self._maps = [None] * len(self._step.keys)
        self._touched = []
        self._stored.begin()

    def _end(self) -> None:
        touched = [(i, self._maps[i]) for i in sorted(self._touched)]
        self._stored.stage([(i, m) for i, m in touched if m is not None and m.is_changed])
        self._maps, self._touched = [], []

    def _map(self) -> KeyMap:
        index = self._step.index
        key_map: KeyMap | None = self._maps[index]
        if key_map is None:
            is_large, entries = self._stored.head(index)
            by_key = {self._hashed(entry[0]): entry for entry in entries}
            key_map = self._maps[index] = KeyMap(is_large, is_large, by_key)
            self._touched.append(index)
        return key_map

    def _value_of(self, key: ValueTuple) -> ValueTuple | None:
        key_map, hashed = self._map(), self._hashed(key)
        if (entry := key_map.entries.get(hashed)) is not None:
            return entry[1]
        return self._look_up(key_map, hashed, key) if key_map.is_large else None

    def _look_up(self, key_map: KeyMap, hashed: Hashable, key: ValueTuple) -> ValueTuple | None:
        """Return the stored value of a large map's entry; after many look-ups all entries are loaded, if few enough."""
        if hashed in key_map.stored or key_map.is_loaded:
            return key_map.stored.get(hashed)
        key_map.misses += 1
        prefix = self._prefix()
        if key_map.misses == _MISSES_BEFORE_LOADING:
            loaded = list(chain.from_iterable(self._stored.scan(prefix, _ENTRIES_LOADED + 1)))
            if self._stored.num_scanned <= _ENTRIES_LOADED:
                key_map.stored = {self._hashed(k): value for _, k, value in loaded}
                key_map.is_loaded = True
                return key_map.stored.get(hashed)
        value = key_map.stored[hashed] = self._stored.value(prefix, key)
        return value

    def _prefix(self) -> bytes:
        """Return the stored key of the current key, which begins the stored keys of a large map's entries."""
        prefix: bytes = self._step.keys[self._step.current].as_py()
        return prefix

    def _entries(self, key_map: KeyMap) -> Iterator[tuple[ValueTuple, ValueTuple]]:
        """Return the entries of a map as they are at the time of the call, in the order of their keys."""
        if not key_map.is_large:
            pairs = [(key, value) for key, value, _ in key_map.entries.values() if value is not None]
            return iter(sorted(pairs, key=lambda pair: sort_key(pair[0])))
        prefix = self._prefix()
        entries = list(key_map.entries.values())
        encoded = self._stored.stored_keys(prefix, [entry[0] for entry in entries])
        changed = [(stored, key, value) for stored, (key, value, _) in zip(encoded, entries, strict=True)]
        return self._merged(prefix, sorted(changed, key=lambda c: c[0]))

    def _merged(
        self, prefix: bytes, changed: list[tuple[bytes, ValueTuple, ValueTuple | None]]
    ) -> Iterator[tuple[ValueTuple, ValueTuple]]:
        """Yield the entries in the store, with the changed entries (sorted by stored key) in their places."""
        at = 0
        for stored in self._stored.scan(prefix, None):
            for encoded, key, value in stored:
                while at < len(changed) and changed[at][0] < encoded:
                    _, changed_key, changed_value = changed[at]
                    if changed_value is not None:
                        yield changed_key, changed_value
                    at += 1
                if at == len(changed) or changed[at][0] != encoded:
                    yield key, value
        for _, changed_key, changed_value in changed[at:]:
            if changed_value is not None:
                yield changed_key, changed_value
