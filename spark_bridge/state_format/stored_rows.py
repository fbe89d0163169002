"""The rows of a state variable as users see them: which columns they have, and how stored pairs become rows.

There is one row per value, list element, map entry or timer. Pairs (stored key, stored value) are decoded whole columns
at a time. ``partition_rows`` reads all rows of a partition, ``stored_changes`` what changed between versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import list_parts
from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import TIMERS, OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from backends.encoding.schema_evolution import nullable
from backends.ids import DEFAULT_FAMILY
from spark_bridge.aggregates.aggregator import is_aggregate_state, result_fields, results
from spark_bridge.state_format.families import CHUNKS, ENDS_FAMILY, ENTRIES, TIMERS_BY_EXPIRY, family_of
from spark_bridge.state_format.layouts import (
    ELEMENTS,
    END,
    ENTRY_KEY,
    ENTRY_VALUE,
    LIST,
    MAP,
    MAP_ENTRIES,
    PRESENT,
    ROWS,
    SESSIONS,
    START,
    TAIL,
    TTL_COLUMN,
)
from spark_bridge.state_format.user_columns import (
    EXPIRATION,
    KEY_GROUP,
    LIST_VALUE,
    MAP_VALUE,
    PARTITION,
    SESSION_WINDOW,
    TTL,
    with_distinct_names,
)

_NEVER = np.iinfo(np.int64).max
_ARRAYS = {(LIST, True): TAIL, (LIST, False): ELEMENTS, (MAP, True): MAP_ENTRIES, (SESSIONS, True): SESSIONS}
"""The column whose array elements are rows, by the kind of state and whether the family is the main one."""

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DecodedRows:
    """Rows of stored pairs: ``pair`` is the position of each row's pair, ascending; all columns are as long as it."""

    pair: Positions
    columns: list[pa.Array]


@dataclass(frozen=True)
class VariableRows:
    """Makes the rows of one state variable.

    The columns of a row are those of the key (``key``), those that tell the rows of one key apart (``inner``), and
    those of the value (``value``). ``inner`` is the user's key of a map entry, the time when a timer fires, or the
    bounds of a session.

    With ``collect`` there is one row per key, which has all rows of a list or map in an array or map. With ``raw`` the
    rows of an aggregate have its state columns instead of its results. With ``alive_at`` (ms since 1970), expired
    values are left out; if ``collect`` is set as well, the column of the TTL is left out.
    """

    schema: OperatorSchema
    variable: StateVariable
    collect: bool = False
    raw: bool = False
    alive_at: int | None = None

    # -- families and columns ------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """Return the kind of the variable; ``SESSIONS`` for the rows of an aggregate with session windows."""
        return SESSIONS if ENDS_FAMILY in self.variable.families else self.variable.kind

    @cached_property
    def main(self) -> str:
        """Return the column family that every key of the variable is in."""
        if self.variable.kind == ROWS:
            return DEFAULT_FAMILY
        return family_of(self.variable, TIMERS_BY_EXPIRY if self.kind == TIMERS else "")[0]

    @cached_property
    def second(self) -> str | None:
        """Return the family of a list's chunks, or of the entries of large maps; None for other kinds."""
        part = {LIST: CHUNKS, MAP: ENTRIES}.get(self.kind)
        return None if part is None else family_of(self.variable, part)[0]

    @property
    def families(self) -> list[str]:
        """Return the families that the rows are made of: ``main``, then ``second`` if there is one."""
        return [self.main] if self.second is None else [self.main, self.second]

    @cached_property
    def key(self) -> pa.Schema:
        """Return the columns of the grouping key in stored order."""
        fields = list(self._stored[self.main].key)
        return pa.schema(fields[1:] if self.kind == TIMERS else fields)

    @cached_property
    def inner(self) -> pa.Schema:
        """Return the columns that tell the rows of one key apart; none where a key has one row."""
        if self.kind == TIMERS:
            return pa.schema([pa.field(EXPIRATION, pa.int64())])
        if self.kind == SESSIONS:
            bounds = [self._session.field(START), self._session.field(END)]
            return pa.schema([pa.field(SESSION_WINDOW, pa.struct(bounds))])
        if self.kind == MAP:
            # As declared: in the key of a large map's entries, a column may have another name.
            entry = self._stored[self.main].value.field(MAP_ENTRIES).type.value_type
            return pa.schema(list(entry.field(ENTRY_KEY).type))
        return pa.schema([])

    @cached_property
    def stored_value(self) -> pa.Schema:
        """Return the stored columns of a value; none where a value only says that its key is there."""
        if self.kind == TIMERS:
            return pa.schema([])
        if self.kind == SESSIONS:
            return pa.schema([f for f in self._session if f.name not in (START, END)])
        if self.kind == LIST:
            element = self._stored[self.second or ""].value.field(ELEMENTS).type.value_type
            return pa.schema([element.field(i) for i in range(element.num_fields)])
        stored = self._stored[self.second or self.main].value
        return pa.schema([]) if self.kind == ROWS and stored.names == PRESENT.names else stored

    @property
    def _session(self) -> pa.StructType:
        return self._stored[self.main].value.field(SESSIONS).type.value_type

    @cached_property
    def value(self) -> pa.Schema:
        """Return the columns of a value, that of the TTL last; no two have the same name."""
        if self._has_results:
            fields = [f.with_type(nullable(f.type)) for f in result_fields(self.stored_value)]
        else:
            fields = [f for f in self.stored_value if f.name != TTL_COLUMN]
        is_shown = self.has_ttl and not (self.collect and self.alive_at is not None)
        return with_distinct_names([*fields, *([pa.field(TTL, pa.int64())] if is_shown else [])])

    @property
    def has_ttl(self) -> bool:
        """Return whether values expire."""
        return TTL_COLUMN in self.stored_value.names

    @cached_property
    def _has_results(self) -> bool:
        return self.variable.kind == ROWS and not self.raw and is_aggregate_state(self.stored_value)

    @cached_property
    def key_order(self) -> list[int]:
        """Return the places of the columns of ``key`` in the order in which the user names them."""
        named = [self.key.get_field_index(n) for n in self.schema.key_columns if n in self.key.names]
        return [*named, *(i for i in range(len(self.key)) if i not in named)]

    @cached_property
    def output(self) -> pa.Schema:
        """Return the columns of a partition's rows: key (in the user's order), inner, value, key group, partition.

        No two have the same name.
        """
        keys = [self.key.field(i) for i in self.key_order]
        values = [*self.inner, *self.value]
        if self.collect and self.kind == LIST:
            values = [pa.field(LIST_VALUE, pa.list_(pa.struct(list(self.value))))]
        if self.collect and self.kind == MAP:
            values = [pa.field(MAP_VALUE, pa.map_(pa.struct(list(self.inner)), pa.struct(list(self.value))))]
        return with_distinct_names([*keys, *values, pa.field(KEY_GROUP, pa.int32()), pa.field(PARTITION, pa.int32())])

    @cached_property
    def _stored(self) -> dict[str, StateSchema]:
        """Return the families' schemas with every field nullable: old rows may have nulls where none is declared."""
        return {
            family: replace(
                given,
                key=_nullable(given.key),
                value=_nullable(given.value),
                history=tuple(map(_nullable, given.history)),
            )
            for family, given in self.variable.families.items()
        }

    # -- pairs to rows -------------------------------------------------------------------------

    def decode(self, family: str, keys: pa.BinaryArray, values: pa.BinaryArray) -> DecodedRows:
        """Return the rows of pairs of one family, as columns of key, inner and value. No value may be null.

        Raises ``SchemaMismatchError`` for pairs that do not have the family's schema.
        """
        rows = self._decoded(family, keys, values)
        if self.alive_at is None or not self.has_ttl:
            return rows
        *columns, expiry = rows.columns
        is_alive = pc.greater(expiry.fill_null(_NEVER), self.alive_at)
        kept = columns if self.collect else rows.columns
        return DecodedRows(rows.pair[np.asarray(is_alive)], [c.filter(is_alive) for c in kept])

    def _decoded(self, family: str, keys: pa.BinaryArray, values: pa.BinaryArray) -> DecodedRows:
        """Return the rows of pairs, expired ones and the column of the TTL included."""
        schema = self._stored[family]
        key_columns = decode_keys(keys, schema.key).columns
        stored = schema.decode_values(values)
        n = len(self.key)
        if self.kind == TIMERS:
            return DecodedRows(np.arange(len(keys)), [*key_columns[1:], key_columns[0]])
        arrays = _ARRAYS.get((self.kind, family == self.main))
        if arrays is not None:
            elements, pair = _elements(stored.column(stored.schema.get_field_index(arrays)))
            of_key = [c.take(pa.array(pair)) for c in key_columns[:n]]
            made = {LIST: self._of_list, MAP: self._of_map, SESSIONS: self._of_sessions}[self.kind](elements)
            return DecodedRows(pair, [*of_key, *made])
        if not self.stored_value.names:
            return DecodedRows(np.arange(len(keys)), key_columns)
        return DecodedRows(np.arange(len(keys)), [*key_columns, *self._values(stored.columns, stored.schema)])

    def _of_list(self, elements: pa.StructArray) -> list[pa.Array]:
        return self._values(elements.flatten(), elements.type)

    def _of_sessions(self, sessions: pa.StructArray) -> list[pa.Array]:
        parts = _parts(sessions)
        bounds = [parts.pop(START), parts.pop(END)]
        window = pa.StructArray.from_arrays(bounds, fields=list(self.inner.field(0).type))
        return [window, *self._values(list(parts.values()), self.stored_value)]

    def _of_map(self, entries: pa.StructArray) -> list[pa.Array]:
        """Return the inner and value columns of the entries of small maps."""
        parts = _parts(entries)
        values = _parts(parts[ENTRY_VALUE])
        fields = list(parts[ENTRY_VALUE].type)
        if TTL_COLUMN in parts:
            values[TTL_COLUMN] = parts[TTL_COLUMN]
            fields.append(pa.field(TTL_COLUMN, pa.int64()))
        return [*parts[ENTRY_KEY].flatten(), *self._values(list(values.values()), fields)]

    def _values(self, columns: Sequence[pa.Array], fields: Iterable[pa.Field]) -> list[pa.Array]:
        """Return the columns of ``value``, made of the stored columns, which have these fields."""
        given = {f.name: column for f, column in zip(fields, columns, strict=True)}
        if self._has_results:
            made = results(pa.RecordBatch.from_arrays(list(columns), names=list(given)))
        else:
            ttl = [given.pop(TTL_COLUMN)] if TTL_COLUMN in given else []
            made = [*given.values(), *ttl]
        types = [*self.value.types, pa.int64()] if len(made) > len(self.value) else self.value.types
        return [c.cast(kind) for c, kind in zip(made, types, strict=True)]


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(f.name, nullable(f.type)) for f in schema])


def _parts(structs: pa.StructArray) -> dict[str, pa.Array]:
    """Return the fields of structs by name."""
    return dict(zip([f.name for f in structs.type], structs.flatten(), strict=True))


def _elements(lists: pa.Array) -> tuple[pa.StructArray, Positions]:
    """Return all elements of arrays, and for each element the position of its array."""
    elements, offsets = list_parts(lists)
    return elements, np.repeat(np.arange(len(lists)), np.diff(offsets))
