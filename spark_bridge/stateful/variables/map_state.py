"""``MapState``: a map per grouping key, as a processor uses it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain

from pyspark.sql import Row

from backends.encoding.operator_schema import StateVariable
from spark_bridge.stateful.values.map_keys import hash_function, sort_key
from spark_bridge.stateful.values.row_values import row_class
from spark_bridge.stateful.variables.declaration import Declaration
from spark_bridge.stateful.variables.pyspark_classes import PySparkMapState
from spark_bridge.stateful.variables.step import KeyStep
from spark_bridge.stateful.variables.stored_maps import KeyMap, StoredMaps, ValueTuple
from spark_bridge.stateful.variables.ttl import Ttl

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
        found = self._map()
        return next(self._entries(found), None) is not None if found.is_large else bool(found.entries)

    def getValue(self, key: ValueTuple) -> Row | None:
        """Return the value of an entry, None if there is no such entry.

        Raises ``IllegalStateValueError`` if ``key`` does not fit its schema.
        """
        value = self._value_of(self._keys.accept(key))
        if value is None:
            return None
        row: Row = tuple.__new__(self._value_row, value if self._values.is_immutable else self._values.copied(value))
        return row

    def containsKey(self, key: ValueTuple) -> bool:
        """Return whether the map has an entry of that key.

        Raises ``IllegalStateValueError`` if ``key`` does not fit its schema.
        """
        return self._value_of(self._keys.accept(key)) is not None

    def updateValue(self, key: ValueTuple, value: ValueTuple) -> None:
        """Set an entry; its TTL begins anew.

        Raises ``IllegalStateValueError`` if ``key`` or ``value`` does not fit its schema.
        """
        key, value = self._keys.accept(key), self._values.accept(value)
        found, hashed = self._map(), self._hashed(key)
        found.entries[hashed] = (key, value, self._ttl.expiry)
        found.written.add(hashed)
        found.is_changed = True

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
        self._stored.begin()

    def _end(self) -> None:
        """Stage the step's changes."""
        touched = [(i, self._maps[i]) for i in sorted(self._touched)]
        self._stored.stage([(i, m) for i, m in touched if m is not None and m.is_changed])
        self._maps, self._touched = [], []

    def _map(self) -> KeyMap:
        index = self._step.index
        found: KeyMap | None = self._maps[index]
        if found is None:
            is_large, entries = self._stored.head(index)
            found = self._maps[index] = KeyMap(is_large, {self._hashed(entry[0]): entry for entry in entries})
            self._touched.append(index)
        return found

    def _value_of(self, key: ValueTuple) -> ValueTuple | None:
        found, hashed = self._map(), self._hashed(key)
        entry = found.entries.get(hashed)
        if entry is not None:
            return entry[1]
        return self._look_up(found, hashed, key) if found.is_large else None

    def _look_up(self, found: KeyMap, hashed: Hashable, key: ValueTuple) -> ValueTuple | None:
        """Return the stored value of a large map's entry; after many look-ups all entries are loaded, if few enough."""
        if hashed in found.stored or found.is_loaded:
            return found.stored.get(hashed)
        found.misses += 1
        prefix = self._prefix()
        if found.misses == _MISSES_BEFORE_LOADING:
            loaded = list(chain.from_iterable(self._stored.scan(prefix, _ENTRIES_LOADED + 1)))
            if self._stored.num_scanned <= _ENTRIES_LOADED:
                found.stored = {self._hashed(k): value for _, k, value in loaded}
                found.is_loaded = True
                return found.stored.get(hashed)
        value = found.stored[hashed] = self._stored.value(prefix, key)
        return value

    def _prefix(self) -> bytes:
        """Return the stored key of the current key, with which the stored keys of a large map's entries begin."""
        prefix: bytes = self._step.keys[self._step.current].as_py()
        return prefix

    def _entries(self, found: KeyMap) -> Iterator[tuple[ValueTuple, ValueTuple]]:
        """Return the entries of a map as they are at the time of the call, in the order of their keys."""
        if not found.is_large:
            pairs = [(key, value) for key, value, _ in found.entries.values() if value is not None]
            return iter(sorted(pairs, key=lambda pair: sort_key(pair[0])))
        prefix = self._prefix()
        entries = list(found.entries.values())
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
                if at < len(changed) and changed[at][0] == encoded:
                    continue
                yield key, value
        for _, changed_key, changed_value in changed[at:]:
            if changed_value is not None:
                yield changed_key, changed_value
