"""The rows of a state variable as users see them: which columns they have, and how stored pairs become rows.

There is one row per value, list element, map entry or timer. Pairs (stored key, stored value) are decoded whole columns
at a time. ``partition_rows`` reads all rows of a partition, ``stored_changes`` what changed between versions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import DEFAULT_FAMILY
from backends.encoding.columns import (
    binary_array,
    binary_content,
    gather_fixed,
    gather_ranges,
    join_columns,
    list_parts,
)
from backends.encoding.keys import KEY_GROUP_BYTES, KeyRange, decode_keys, encode_keys
from backends.encoding.operator_schema import HORIZONS, TIMERS, OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema, nullable, nullable_schema
from backends.encoding.values import encode_values
from spark_bridge.aggregates.aggregator import is_aggregate_state, result_fields, results
from spark_bridge.aggregates.computation import outputs_of
from spark_bridge.aggregates.rolling import NO_MOMENT, Moment, Pieces, Rolling, answers_as_of
from spark_bridge.aggregates.rolling_singles import SingleAnswers
from spark_bridge.exceptions import StateTimeError
from spark_bridge.state_format import layouts

_NEVER = np.iinfo(np.int64).max
_ARRAYS = {
    (layouts.LIST, True): layouts.TAIL,
    (layouts.LIST, False): layouts.ELEMENTS,
    (layouts.MAP, True): layouts.MAP_ENTRIES,
    (layouts.SESSIONS, True): layouts.SESSIONS,
}
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
    values are left out; if ``collect`` is set as well, the column of the TTL is left out. The results of rolling
    aggregates are as of ``moment`` (microseconds since 1970), or of each key's newest row.
    """

    schema: OperatorSchema
    variable: StateVariable
    collect: bool = False
    raw: bool = False
    alive_at: int | None = None
    moment: Moment = field(default=None, compare=False)

    # -- families and columns ------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """Return the kind of the variable; of an aggregate with session windows or horizons, of these."""
        return layouts.rows_kind(self.variable) if self.variable.kind == layouts.ROWS else self.variable.kind

    @cached_property
    def main(self) -> str:
        """Return the column family that every key of the variable is in."""
        if self.variable.kind == layouts.ROWS:
            return DEFAULT_FAMILY
        return layouts.family_of(self.variable, layouts.TIMERS_BY_EXPIRY if self.kind == TIMERS else "")[0]

    @cached_property
    def second(self) -> str | None:
        """Return the family of a list's chunks, the entries of large maps, or tiles; None for other kinds."""
        if self.kind == layouts.ROLLING:
            return layouts.TILES_FAMILY
        part = {layouts.LIST: layouts.CHUNKS, layouts.MAP: layouts.ENTRIES}.get(self.kind)
        return None if part is None else layouts.family_of(self.variable, part)[0]

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
        """Return the columns that distinguish the rows of one key; none if a key has one row."""
        if self.kind == TIMERS:
            return pa.schema([pa.field(layouts.EXPIRATION, pa.int64())])
        if self.kind == layouts.SESSIONS:
            bounds = [self._session.field(layouts.START), self._session.field(layouts.END)]
            return pa.schema([pa.field(layouts.SESSION_WINDOW, pa.struct(bounds))])
        if self.kind == layouts.MAP:
            # As declared: in the key of a large map's entries, a column may have another name.
            entry = self._stored[self.main].value.field(layouts.MAP_ENTRIES).type.value_type
            return pa.schema(list(entry.field(layouts.ENTRY_KEY).type))
        return pa.schema([])

    @cached_property
    def stored_value(self) -> pa.Schema:
        """Return the stored columns of a value; none if the value is only a marker."""
        if self.kind == TIMERS:
            return pa.schema([])
        if self.kind == layouts.SESSIONS:
            return pa.schema([f for f in self._session if f.name not in (layouts.START, layouts.END)])
        if self.kind == layouts.ROLLING:
            return pa.schema(list(self._stored[self.main].value.field(layouts.RECENT).type.value_type)[2:])
        if self.kind == layouts.LIST:
            return pa.schema(list(self._stored[self.second or ""].value.field(layouts.ELEMENTS).type.value_type))
        stored = self._stored[self.second or self.main].value
        return pa.schema([]) if self.kind == layouts.ROWS and stored.names == layouts.PRESENT.names else stored

    @property
    def _session(self) -> pa.StructType:
        return self._stored[self.main].value.field(layouts.SESSIONS).type.value_type

    @cached_property
    def value(self) -> pa.Schema:
        """Return the columns of a value, that of the TTL last; no two have the same name."""
        if self.kind == layouts.ROLLING and self.raw:
            recent, tiles = self._stored[self.main].value, self._stored[layouts.TILES_FAMILY].value
            fields = [recent.field(layouts.RECENT), tiles.field(layouts.TILES)]
        elif self._has_results:
            of_state = (self.rolling.fields if self.rolling is not None else result_fields)(self.stored_value)
            fields = [f.with_type(nullable(f.type)) for f in of_state]
        else:
            fields = [f for f in self.stored_value if f.name != layouts.TTL_COLUMN]
        is_shown = self.has_ttl and not (self.collect and self.alive_at is not None)
        return layouts.with_distinct_names([*fields, *([pa.field(layouts.TTL, pa.int64())] if is_shown else [])])

    @property
    def has_ttl(self) -> bool:
        return layouts.TTL_COLUMN in self.stored_value.names

    @cached_property
    def _has_results(self) -> bool:
        return self.variable.kind == layouts.ROWS and not self.raw and is_aggregate_state(self.stored_value)

    @cached_property
    def rolling(self) -> Rolling | None:
        """Return the horizons of rolling aggregates; None for other kinds."""
        return Rolling.of_text(self.schema.settings[HORIZONS]) if self.kind == layouts.ROLLING else None

    @cached_property
    def singles(self) -> SingleAnswers | None:
        """Return the answers of single keys with rolling aggregates; None if columns must make them."""
        if self.rolling is None:
            return None
        numbers = len(self._stored[self.main].history), len(self._stored[layouts.TILES_FAMILY].history)
        return SingleAnswers.of(self.rolling, self.stored_value, numbers, self.value)

    def first_moment(self, lost: Iterable[pa.BinaryArray]) -> int:
        """Return the first moment that rolling aggregates can be as of, by values of ``layouts.LOST_FAMILY``."""
        if self.rolling is None:
            return NO_MOMENT
        schema = self._stored[layouts.LOST_FAMILY]
        newest = NO_MOMENT
        for values in lost:
            of_groups = pc.max(schema.decode_values(values).column(0).cast(pa.int64())).as_py()
            newest = newest if of_groups is None else max(newest, of_groups)
        return self.rolling.first_moment(newest)

    def require_retained(self, first: int) -> None:
        """Raise ``StateTimeError`` if ``moment`` is before the first one that rolling aggregates can be as of."""
        if self.rolling is None or self.raw or self.moment is None:
            return
        earliest = self.moment if isinstance(self.moment, int) else int(min(self.moment, default=first))
        if earliest < first:
            raise StateTimeError.lost(earliest, first)

    def as_of(self, alive_at: int, moment: int | None) -> VariableRows:
        """Return the same rows at a time in ms, with rolling aggregates as of ``moment`` (by default that time)."""
        if not self.has_ttl and self.rolling is None:
            return self
        rows = copy.copy(self)  # with all that is cached, unlike by ``replace``
        object.__setattr__(rows, "alive_at", alive_at)
        object.__setattr__(rows, "moment", alive_at * 1000 if moment is None else moment)
        return rows

    @cached_property
    def key_order(self) -> list[int]:
        """Return the places of the columns of ``key`` in the user's order."""
        named = [self.key.get_field_index(n) for n in self.schema.key_columns if n in self.key.names]
        return [*named, *(i for i in range(len(self.key)) if i not in named)]

    @cached_property
    def output(self) -> pa.Schema:
        """Return the columns of a partition's rows: key (in the user's order), inner, value, key group, partition.

        No two have the same name.
        """
        keys = [self.key.field(i) for i in self.key_order]
        values = [*self.inner, *self.value]
        if self.collect and self.kind == layouts.LIST:
            values = [pa.field(layouts.LIST_VALUE, pa.list_(pa.struct(list(self.value))))]
        if self.collect and self.kind == layouts.MAP:
            values = [pa.field(layouts.MAP_VALUE, pa.map_(pa.struct(list(self.inner)), pa.struct(list(self.value))))]
        return layouts.with_distinct_names(
            [*keys, *values, pa.field(layouts.KEY_GROUP, pa.int32()), pa.field(layouts.PARTITION, pa.int32())]
        )

    @cached_property
    def _stored(self) -> dict[str, StateSchema]:
        """Return the families' schemas with every field nullable: old rows may have undeclared nulls."""
        return {
            family: replace(
                schema,
                key=nullable_schema(schema.key),
                value=nullable_schema(schema.value),
                history=tuple(map(nullable_schema, schema.history)),
            )
            for family, schema in self.variable.families.items()
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
        if self.kind == TIMERS:
            return DecodedRows(np.arange(len(keys)), [*key_columns[1:], key_columns[0]])
        if (arrays := _ARRAYS.get((self.kind, family == self.main))) is not None:
            elements, pair = _elements(stored.column(stored.schema.get_field_index(arrays)))
            of_key = [c.take(pa.array(pair)) for c in key_columns[: len(self.key)]]
            if self.kind == layouts.LIST:
                return DecodedRows(pair, [*of_key, *self._values(elements.flatten(), elements.type)])
            of_elements = self._of_map(elements) if self.kind == layouts.MAP else self._of_sessions(elements)
            return DecodedRows(pair, [*of_key, *of_elements])
        if not self.stored_value.names:
            return DecodedRows(np.arange(len(keys)), key_columns)
        return DecodedRows(np.arange(len(keys)), [*key_columns, *self._values(stored.columns, stored.schema)])

    def decode_rolling(self, keys: pa.BinaryArray, values: pa.BinaryArray, tiles: pa.BinaryArray) -> DecodedRows:
        """Return the rows of keys with horizons, from their values in both families; those of tiles may be null."""
        return DecodedRows(np.arange(len(keys)), [*decode_keys(keys, self.key).columns, *self.rolled(values, tiles)])

    def rolled(self, values: pa.BinaryArray, tiles: pa.BinaryArray) -> list[pa.Array]:
        """Return the columns of ``value`` for the values of both families, as of ``moment``."""
        assert self.rolling is not None
        pieces = None if self.singles is None or self.raw else self.singles.pieces(values, tiles)
        if pieces is None:
            recent = self._stored[self.main].decode_values(values)
            older = self._stored[layouts.TILES_FAMILY].decode_values(tiles)
            lists = [recent.column(layouts.RECENT), older.column(layouts.TILES)]
            if self.raw:
                return lists
            never = np.iinfo(np.int64).min
            merged_at = np.asarray(older.column(layouts.MERGED_AT).cast(pa.int64()).fill_null(never))
            pieces = Pieces.of_lists(lists[0]), Pieces.of_lists(lists[1]), merged_at
        answers = answers_as_of(self.rolling, *pieces, self.moment)
        return [c.cast(kind) for c, kind in zip(answers, self.value.types, strict=True)]

    def _of_sessions(self, sessions: pa.StructArray) -> list[pa.Array]:
        parts = _parts(sessions)
        bounds = [parts.pop(layouts.START), parts.pop(layouts.END)]
        window = pa.StructArray.from_arrays(bounds, fields=list(self.inner.field(0).type))
        return [window, *self._values(list(parts.values()), self.stored_value)]

    def _of_map(self, entries: pa.StructArray) -> list[pa.Array]:
        """Return the inner and value columns of the entries of small maps."""
        parts = _parts(entries)
        values = _parts(parts[layouts.ENTRY_VALUE])
        fields = list(parts[layouts.ENTRY_VALUE].type)
        if layouts.TTL_COLUMN in parts:
            values[layouts.TTL_COLUMN] = parts[layouts.TTL_COLUMN]
            fields.append(pa.field(layouts.TTL_COLUMN, pa.int64()))
        return [*parts[layouts.ENTRY_KEY].flatten(), *self._values(list(values.values()), fields)]

    def _values(self, columns: Sequence[pa.Array], fields: Iterable[pa.Field]) -> list[pa.Array]:
        """Return the columns of ``value``, made of the stored columns, which have these fields."""
        by_name = {f.name: column for f, column in zip(fields, columns, strict=True)}
        if self._has_results:
            results_of_state = results(pa.RecordBatch.from_arrays(list(columns), names=list(by_name)))
        else:
            ttl = [by_name.pop(layouts.TTL_COLUMN)] if layouts.TTL_COLUMN in by_name else []
            results_of_state = [*by_name.values(), *ttl]
        types = [*self.value.types, pa.int64()] if len(results_of_state) > len(self.value) else self.value.types
        return [c.cast(kind) for c, kind in zip(results_of_state, types, strict=True)]


def _parts(structs: pa.StructArray) -> dict[str, pa.Array]:
    return dict(zip([f.name for f in structs.type], structs.flatten(), strict=True))


def _elements(lists: pa.Array) -> tuple[pa.StructArray, Positions]:
    """Return all elements of arrays, and for each element the position of its array."""
    elements, offsets = list_parts(lists)
    return elements, np.repeat(np.arange(len(lists)), np.diff(offsets))


# Stored keys made of parts of other keys, without decoding: each column adds its own bytes to a key.
#
# ``backends.encoding.keys`` has the encoding of a key: two bytes of the key group, then each column's bytes.


INT64_KEY_BYTES = 9
"""Bytes of an int64 that is not null in a key: a byte that marks the value as present, and eight of the value."""
_LONG = pa.schema([pa.field("long", pa.int64())])


def columns_of_key(rows: pa.RecordBatch) -> pa.BinaryArray:
    """Return the bytes that these columns add to a key, row by row."""
    return _sliced(encode_keys(rows, np.zeros(rows.num_rows, np.uint16)), KEY_GROUP_BYTES)


def longs_of_key(values: npt.NDArray[np.int64]) -> pa.BinaryArray:
    """Return the bytes that an int64 column adds to a key, row by row."""
    return columns_of_key(pa.RecordBatch.from_arrays([pa.array(values, pa.int64())], schema=_LONG))


def with_more(keys: pa.BinaryArray, more: pa.BinaryArray) -> pa.BinaryArray:
    """Return keys with the bytes of further columns after them."""
    return join_columns([keys, more])


def by_expiry(keys: pa.BinaryArray, expiries: npt.NDArray[np.int64]) -> pa.BinaryArray:
    """Return grouping keys as keys whose first column is an expiry, so that those that expire first come first."""
    return join_columns([_sliced(keys, 0, KEY_GROUP_BYTES), longs_of_key(expiries), _sliced(keys, KEY_GROUP_BYTES)])


def without_expiry(keys: pa.BinaryArray) -> pa.BinaryArray:
    """Return the grouping keys that ``by_expiry`` was given."""
    return join_columns([_sliced(keys, 0, KEY_GROUP_BYTES), _sliced(keys, KEY_GROUP_BYTES + INT64_KEY_BYTES)])


def by_value(keys: pa.BinaryArray, values: pa.Array) -> pa.BinaryArray:
    """Return the entries of a secondary index: stored keys with the indexed value as their first column."""
    first = columns_of_key(pa.RecordBatch.from_arrays([values], names=["value"]))
    return join_columns([_sliced(keys, 0, KEY_GROUP_BYTES), first, _sliced(keys, KEY_GROUP_BYTES)])


def without_value(entries: pa.BinaryArray, index: StateSchema) -> pa.BinaryArray:
    """Return the stored keys that ``by_value`` was given; ``index`` is the schema of the index's family."""
    columns = decode_keys(entries, index.key)
    return encode_keys(columns.select(range(1, columns.num_columns)), key_groups_of(entries))


def indexed_values(column: str, keys: pa.RecordBatch, states: pa.RecordBatch) -> pa.Array:
    """Return the values of an indexed column: a column of the key, or an output of the states of an ``aggregate``."""
    at = keys.schema.get_field_index(column)
    if at >= 0:
        return keys.column(at)
    fields = next(fields for output, _, fields in outputs_of(states.schema) if output == column)
    return results(states.select([field.name for field in fields]))[0]


def last_longs(keys: pa.BinaryArray) -> npt.NDArray[np.int64]:
    """Return the int64 that is the last column of each key; none is null."""
    content, offsets = binary_content(keys)
    longs: npt.NDArray[np.uint64] = gather_fixed(content, offsets[1:] - 8, np.dtype(">u8")).astype(np.uint64)
    return longs.view(np.int64) ^ np.iinfo(np.int64).min


def without_last_long(keys: pa.BinaryArray) -> pa.BinaryArray:
    """Return the keys without their last column, an int64."""
    content, offsets = binary_content(keys)
    return binary_array(*gather_ranges(content, offsets[:-1], offsets[1:] - INT64_KEY_BYTES))


def expired_ranges(key_groups: tuple[int, int], until_ms: int) -> list[KeyRange]:
    """Return the ranges of the keys of ``by_expiry`` whose expiry is at most ``until_ms``, one per key group.

    ``key_groups`` are the first key group and the one after the last.
    """
    end = longs_of_key(np.array([min(until_ms + 1, np.iinfo(np.int64).max)]))[0].as_py()
    groups = [group.to_bytes(KEY_GROUP_BYTES, "big") for group in range(*key_groups)]
    return [(group, group + end) for group in groups]


def group_range(group: int) -> KeyRange:
    """Return the range of the keys of one key group."""
    return prefix_range(group.to_bytes(KEY_GROUP_BYTES, "big"))


def prefix_range(prefix: bytes) -> KeyRange:
    """Return the range of the keys that begin with ``prefix``."""
    kept = prefix.rstrip(b"\xff")
    return prefix, kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def key_groups_of(keys: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """Return the key groups that stored keys begin with."""
    content, offsets = binary_content(keys)
    groups: npt.NDArray[np.int32] = gather_fixed(content, offsets[:-1], np.dtype(">u2")).astype(np.int32)
    return groups


def _sliced(keys: pa.BinaryArray, start: int, stop: int | None = None) -> pa.BinaryArray:
    """Return the bytes of each key from ``start`` to ``stop``; keys are that long."""
    content, offsets = binary_content(keys)
    stops = offsets[1:] if stop is None else offsets[:-1] + stop
    return binary_array(*gather_ranges(content, offsets[:-1] + start, stops))


# The order of rows in two column families, such as a list's chunks and its last elements.
#
# The last elements of a list are stored under the list's own key, which begins the keys of its chunks. For
# the elements to be in order, such a key gets a byte appended that is greater than the next byte of any chunk's key.


_BEHIND_CHUNKS = b"\x02"


def order_keys(rows: VariableRows, family: str, keys: pa.BinaryArray) -> pa.BinaryArray:
    """Return stored keys in a form whose byte order is the order of the rows."""
    if rows.kind != layouts.LIST or family != rows.main:
        return keys
    return pc.binary_join_element_wise(keys, _BEHIND_CHUNKS, pa.scalar(b""))


def without_order(rows: VariableRows, family: str, ordered: pa.BinaryArray) -> pa.BinaryArray:
    """Return the stored keys that ``order_keys`` was given."""
    if rows.kind != layouts.LIST or family != rows.main:
        return ordered
    return pc.binary_slice(ordered, 0, -1) if len(ordered) else ordered


def list_keys(rows: VariableRows, family: str, keys: pa.BinaryArray) -> pa.BinaryArray:
    """Return the stored keys of the lists whose elements are stored under ``keys`` of ``family``."""
    if family == rows.main or not len(keys):
        return keys
    return pc.binary_slice(keys, 0, -INT64_KEY_BYTES)


def row_order(keys: Sequence[pa.BinaryArray], pairs: Sequence[Positions]) -> Positions:
    """Return the order of the rows of several parts by the keys of their pairs.

    ``pairs`` are, for each part, the positions of its rows' pairs in that part of ``keys``.
    """
    ranks = np.empty(sum(map(len, keys)), np.int64)
    ranks[np.asarray(pc.sort_indices(pa.concat_arrays(keys)))] = np.arange(len(ranks))
    begins = np.cumsum([0, *map(len, keys)])[:-1]
    of_rows = np.concatenate([ranks[at + positions] for at, positions in zip(begins, pairs, strict=True)])
    return np.argsort(of_rows, kind="stable")


# Finds the rows that differ between two moments, and the columns that show the differences.


CHANGE_TYPE = "change_type"
BEFORE = "before"
AFTER = "after"
INSERT, UPDATE, DELETE = "insert", "update", "delete"


@dataclass(frozen=True)
class ComparedRows:
    """Rows as they are at one of the two moments.

    ``ids`` has an id of each row; of a list's elements, that of the list. ``columns`` are ``num_keys`` columns that
    tell what a row is about, and those of its value.
    """

    ids: pa.BinaryArray
    columns: list[pa.Array]
    num_keys: int

    def __getitem__(self, rows: slice) -> ComparedRows:
        return replace(self, ids=self.ids[rows], columns=[column[rows] for column in self.columns])

    def comparable(self) -> pa.Array:
        """Return bytes that are equal for rows with equal values."""
        values = self.columns[self.num_keys :]
        if not values:
            return pa.repeat(pa.scalar(b""), len(self.ids))
        return encode_values(pa.RecordBatch.from_arrays(values, names=[str(i) for i in range(len(values))]))


def change_fields(value: Sequence[pa.Field]) -> list[pa.Field]:
    """Return the fields of values before and after a change; none if there are no values."""
    kind = pa.struct(list(value))
    return [pa.field(BEFORE, kind), pa.field(AFTER, kind)] if len(value) else []


def change_columns(
    before: ComparedRows, after: ComparedRows, changed: tuple[Positions, Positions], value: Sequence[pa.Field]
) -> tuple[pa.Array, list[pa.Array], list[pa.Array]]:
    """Return the columns of changes: their types, the columns that tell what they are about, and ``change_fields``.

    ``changed`` has the position of each changed row among the rows before and among those after, -1 for none. ``value``
    has the fields of the value.
    """
    of_before, of_after = changed
    types = np.where(of_after < 0, DELETE, np.where(of_before < 0, INSERT, UPDATE))
    either = pa.array(np.where(of_after >= 0, of_after + len(before.ids), of_before), pa.int64())
    n = before.num_keys
    keys = [pa.concat_arrays([b, a]).take(either) for b, a in zip(before.columns[:n], after.columns[:n], strict=True)]
    structs = []
    for side, positions in ((before, of_before), (after, of_after)) if len(value) else ():
        rows = pa.StructArray.from_arrays(side.columns[n:], fields=list(value))
        structs.append(rows.take(pa.array(positions, pa.int64(), mask=positions < 0)))
    return pa.array(types, pa.string()), keys, structs


def changed_rows(
    ids: tuple[pa.BinaryArray, pa.BinaryArray], values: tuple[pa.Array, pa.Array]
) -> tuple[Positions, Positions]:
    """Return the changed rows by id: the position of each among the old rows and among the new rows, -1 for none.

    Both arguments have an array for the old rows and one for the new: ``ids`` are different for different rows,
    ``values`` are bytes that are equal for rows with equal values.
    """
    (ids_before, ids_after), (values_before, values_after) = ids, values
    at = np.asarray(pc.fill_null(pc.index_in(ids_after, value_set=ids_before), -1)).astype(np.int64)
    stays = at >= 0
    same = np.zeros(len(at), np.bool_)
    kept_rows = pa.array(at[stays])
    same[stays] = np.asarray(pc.equal(values_before.take(kept_rows), values_after.filter(pa.array(stays))))
    gone = np.ones(len(ids_before), np.bool_)
    gone[at[stays]] = False
    lost, changed = np.flatnonzero(gone), np.flatnonzero(~same)
    of_before = np.concatenate([lost, at[changed]])
    of_after = np.concatenate([np.full(len(lost), -1), changed])
    changed_ids = pa.concat_arrays([ids_before.take(pa.array(lost)), ids_after.take(pa.array(changed))])
    order = np.asarray(pc.sort_indices(changed_ids))
    return of_before[order], of_after[order]
