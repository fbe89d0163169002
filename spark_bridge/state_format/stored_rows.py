"""The rows of a state variable as users see it, from the pairs that it is kept in, whole columns at a time.

One row per value, list element, map entry or timer. What is kept in two column families (a list's last elements and
its chunks, small and large maps) is read from both at once, in the order of the keys, a few megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import binary_content, gather_fixed, list_parts
from backends.encoding.keys import decode_keys, encode_keys
from backends.encoding.operator_schema import OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from backends.encoding.schema_evolution import nullable
from backends.encoding.sorted_pairs import SortedPairs, as_binary
from backends.ids import DEFAULT_FAMILY
from backends.partition.partition_state import PartitionState
from coordinator_actor import state_reader
from coordinator_actor.savepoints.savepoint_format import VALUE_SUFFIX
from spark_bridge.aggregates.aggregator import result_fields, results
from spark_bridge.state_format.families import CHUNKS, ENTRIES, TIMERS_BY_EXPIRY, TTL_COLUMN, family_of
from spark_bridge.state_format.layouts import END, ENDS_FAMILY, PRESENT, SESSIONS, START

TTL = "ttl_expiration_ms"
EXPIRATION = "expiration_timestamp_ms"
KEY_GROUP = "key_group"
PARTITION = "partition_id"
LIST_VALUE = "list_value"
MAP_VALUE = "map_value"
SESSION_WINDOW = "session_window"
STEP_ROWS = 1 << 14
STEP_BYTES = 4 << 20
"""Of pairs that are decoded at once; longer rows come in fewer of them."""
_BEHIND_CHUNKS = b"\x02"
_CHUNK_BYTES = 9
_NEVER = np.iinfo(np.int64).max
_ARRAYS = {
    ("list", True): "tail",
    ("list", False): "elements",
    ("map", True): "entries",
    (SESSIONS, True): SESSIONS,
}
"""What rows are made of that are kept in arrays, by kind and whether it is the kind's main family."""

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Rows of stored pairs: ``pair`` is the position of each row's pair, and the pairs ascend."""

    pair: Positions
    columns: list[pa.Array]


@dataclass(frozen=True)
class VariableRows:
    """How the rows of one state variable are made.

    The columns are those of the key (``key``), what tells the rows of one key apart (``inner``: the key of a map's entry,
    when a timer fires), and ``value``. With ``collect`` there is one row per key, with an array or a map of them.
    ``raw``: an aggregate's state, not its results. ``alive_at`` (ms since 1970): what has expired by then is no row, and with
    ``collect`` the others do not show when they will.
    """

    schema: OperatorSchema
    variable: StateVariable
    collect: bool = False
    raw: bool = False
    alive_at: int | None = None

    @property
    def kind(self) -> str:
        """The kind of the variable; "sessions" for the rows of an aggregate by session windows."""
        return SESSIONS if ENDS_FAMILY in self.variable.families else self.variable.kind

    @cached_property
    def main(self) -> str:
        """The column family that every key of the variable is in."""
        if self.variable.kind == "rows":
            return DEFAULT_FAMILY
        return family_of(self.variable, TIMERS_BY_EXPIRY if self.kind == "timers" else "")[0]

    @cached_property
    def second(self) -> str | None:
        """The family of a list's chunks, or of the entries of large maps."""
        part = {"list": CHUNKS, "map": ENTRIES}.get(self.kind)
        return None if part is None else family_of(self.variable, part)[0]

    @property
    def families(self) -> list[str]:
        """The families that the rows are made of."""
        return [self.main] if self.second is None else [self.main, self.second]

    @cached_property
    def key(self) -> pa.Schema:
        """The columns of the key as they are stored."""
        fields = list(self._stored[self.main].key)
        return pa.schema(fields[1:] if self.kind == "timers" else fields)

    @cached_property
    def inner(self) -> pa.Schema:
        """What tells the rows of one key apart."""
        if self.kind == "timers":
            return pa.schema([pa.field(EXPIRATION, pa.int64())])
        if self.kind == SESSIONS:
            bounds = [self._session.field(START), self._session.field(END)]
            return pa.schema([pa.field(SESSION_WINDOW, pa.struct(bounds))])
        if self.kind == "map":
            # As declared: beside each other, the columns of a large map's keys may need other names.
            entry = self._stored[self.main].value.field("entries").type.value_type
            return pa.schema(list(entry.field("key").type))
        return pa.schema([])

    @cached_property
    def stored_value(self) -> pa.Schema:
        """The columns of a value as they are stored; none for what merely says that a key is there."""
        if self.kind == "timers":
            return pa.schema([])
        if self.kind == SESSIONS:
            return pa.schema([f for f in self._session if f.name not in (START, END)])
        if self.kind == "list":
            element = self._stored[self.second or ""].value.field("elements").type.value_type
            return pa.schema([element.field(i) for i in range(element.num_fields)])
        stored = self._stored[self.second or self.main].value
        return pa.schema([]) if self.kind == "rows" and stored.names == PRESENT.names else stored

    @property
    def _session(self) -> pa.StructType:
        return self._stored[self.main].value.field(SESSIONS).type.value_type

    @cached_property
    def value(self) -> pa.Schema:
        """The columns of a value, the one of its TTL last; no two have the same name."""
        if self._has_results:
            fields = [f.with_type(nullable(f.type)) for f in result_fields(self.stored_value)]
        else:
            fields = [f for f in self.stored_value if f.name != TTL_COLUMN]
        is_shown = self.has_ttl and not (self.collect and self.alive_at is not None)
        return distinct([*fields, *([pa.field(TTL, pa.int64())] if is_shown else [])])

    @property
    def has_ttl(self) -> bool:
        """Whether rows expire."""
        return TTL_COLUMN in self.stored_value.names

    @cached_property
    def _has_results(self) -> bool:
        return self.variable.kind == "rows" and not self.raw and is_aggregate(self.stored_value)

    @cached_property
    def key_order(self) -> list[int]:
        """The places of the key's columns in the order in which the user names them."""
        named = [self.key.get_field_index(n) for n in self.schema.key_columns if n in self.key.names]
        return [*named, *(i for i in range(len(self.key)) if i not in named)]

    @cached_property
    def _stored(self) -> dict[str, StateSchema]:
        """The families' schemas with everything nullable: what a program declares otherwise need not hold for old rows."""
        return {
            family: StateSchema(_nullable(given.key), _nullable(given.value), tuple(map(_nullable, given.history)))
            for family, given in self.variable.families.items()
        }

    # -- all rows ------------------------------------------------------------------------------

    @cached_property
    def output(self) -> pa.Schema:
        """The columns of ``scan``, and the partition's number behind them; no two have the same name."""
        keys = [self.key.field(i) for i in self.key_order]
        values = [*self.inner, *self.value]
        if self.collect and self.kind == "list":
            values = [pa.field(LIST_VALUE, pa.list_(pa.struct(list(self.value))))]
        if self.collect and self.kind == "map":
            values = [pa.field(MAP_VALUE, pa.map_(pa.struct(list(self.inner)), pa.struct(list(self.value))))]
        return distinct([*keys, *values, pa.field(KEY_GROUP, pa.int32()), pa.field(PARTITION, pa.int32())])

    def scan(self, state: PartitionState, partition: int) -> Iterator[pa.RecordBatch]:
        """All rows of a partition, in the order of the stored keys."""
        return self.rows({family: state_reader.scan(state, family) for family in self.families}, partition)

    def rows(self, pairs: Mapping[str, Iterator[pa.RecordBatch]], partition: int) -> Iterator[pa.RecordBatch]:
        """The rows of a partition's pairs, which come by family in the order of their keys."""
        rows = self._rows(pairs)
        if self.collect and self.second is not None:
            rows = self._collected(rows)
        for batch in rows:
            *columns, groups = batch.columns
            keys = [columns[i] for i in self.key_order]
            number = pa.repeat(pa.scalar(partition, pa.int32()), batch.num_rows)
            yield pa.RecordBatch.from_arrays([*keys, *columns[len(self.key) :], groups, number], schema=self.output)

    def _rows(self, pairs_by_family: Mapping[str, Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """Rows of key, inner and value columns, and the key group."""
        streams = [self._ordered(family, pairs_by_family[family]) for family in self.families]
        for step in in_step(streams):
            parts = [
                self._with_groups(family, self.stored_keys(family, pairs.keys), pairs.values)
                for family, pairs in zip(self.families, step, strict=True)
            ]
            batch = self._interleaved([pairs.keys for pairs in step], parts)
            if batch.num_rows:
                yield batch

    def _with_groups(self, family: str, keys: pa.BinaryArray, values: pa.BinaryArray) -> Rows:
        rows = self.decode(family, keys, values)
        return Rows(rows.pair, [*rows.columns, pa.array(key_groups_of(keys)[rows.pair], pa.int32())])

    def _ordered(self, family: str, batches: Iterator[pa.RecordBatch]) -> Iterator[SortedPairs]:
        """Pairs a few megabytes at a time, with keys by which rows of both families are in order."""
        for batch in batches:
            keys, values = as_binary("keys", batch.column(0)), as_binary("values", batch.column(1))
            pairs = SortedPairs(self.order_keys(family, keys), values)
            length = max(1, min(STEP_ROWS, STEP_BYTES * len(pairs) // max(1, pairs.nbytes)))
            for at in range(0, len(pairs), length):
                yield pairs.slice(at, length)

    def order_keys(self, family: str, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Stored keys such that a list's last elements come behind those of its chunks."""
        if self.kind != "list" or family != self.main:
            return keys
        return pc.binary_join_element_wise(keys, _BEHIND_CHUNKS, pa.scalar(b""))

    def stored_keys(self, family: str, ordered: pa.BinaryArray) -> pa.BinaryArray:
        """The inverse of ``order_keys``."""
        if self.kind != "list" or family != self.main:
            return ordered
        return pc.binary_slice(ordered, 0, -1) if len(ordered) else ordered

    def list_keys(self, family: str, keys: pa.BinaryArray) -> pa.BinaryArray:
        """The stored keys of the lists that elements belong to."""
        if family == self.main or not len(keys):
            return keys
        return pc.binary_slice(keys, 0, -_CHUNK_BYTES)

    def _interleaved(self, keys: Sequence[pa.BinaryArray], parts: Sequence[Rows]) -> pa.RecordBatch:
        """The rows of several families in the order of their pairs' keys."""
        schema = pa.schema([*self.key, *self.inner, *self.value, pa.field(KEY_GROUP, pa.int32())])
        held = [(k, part) for k, part in zip(keys, parts, strict=True) if len(part.pair)]
        if len(held) < 2:
            columns = held[0][1].columns if held else [pa.array([], f.type) for f in schema]
            return pa.RecordBatch.from_arrays(columns, names=numbered(schema))
        order = pa.array(order_of([k for k, _ in held], [part.pair for _, part in held]))
        columns = [pa.concat_arrays(c).take(order) for c in zip(*(part.columns for _, part in held), strict=True)]
        return pa.RecordBatch.from_arrays(columns, names=numbered(schema))

    def _collected(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A row per key, of rows that come in the order of the keys."""
        pending: list[pa.RecordBatch] = []
        last: bytes | None = None
        for batch in batches:
            ids = encode_keys(self._keys_of(batch), np.asarray(batch.column(batch.num_columns - 1)))
            starts = np.concatenate([[0], 1 + np.flatnonzero(np.asarray(pc.not_equal(ids[1:], ids[:-1])))])
            if pending and ids[0].as_py() == last:
                starts = starts[1:]
            if len(starts):
                cut = int(starts[-1])
                held = sum(b.num_rows for b in pending)
                bounds = np.concatenate([[0] if pending else [], held + starts]).astype(np.int64)
                if held + cut:
                    yield self._in_arrays(one([*pending, batch.slice(0, cut)]), bounds)
                pending, batch = [], batch.slice(cut)  # noqa: PLW2901 - what is left of it
            pending.append(batch)
            last = ids[len(ids) - 1].as_py()
        if pending:
            yield self._in_arrays(one(pending), np.array([0, sum(b.num_rows for b in pending)]))

    def _keys_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(batch.columns[: len(self.key)], schema=self.key)

    def _in_arrays(self, rows: pa.RecordBatch, bounds: Positions) -> pa.RecordBatch:
        n, inner = len(self.key), len(self.inner)
        firsts = pa.array(bounds[:-1])
        offsets = pa.array(bounds, pa.int32())
        columns = rows.columns
        values = _struct(columns[n + inner : -1], self.value)
        kind = self.output.field(n).type
        if self.kind == "map":
            keys = _struct(columns[n : n + inner], self.inner)
            made = pa.MapArray.from_arrays(offsets, keys, values).cast(kind)
        else:
            made = pa.ListArray.from_arrays(offsets, values).cast(kind)
        taken = [c.take(firsts) for c in (*columns[:n], columns[-1])]
        return pa.RecordBatch.from_arrays(
            [*taken[:-1], made, taken[-1]], names=[*map(str, range(n)), "value", KEY_GROUP]
        )

    # -- of pairs ------------------------------------------------------------------------------

    def decode(self, family: str, keys: pa.BinaryArray, values: pa.BinaryArray) -> Rows:
        """The rows of pairs of one family, as columns of key, inner and value. No value may be null.

        Raises ``SchemaMismatchError`` if they are not of the family's schema.
        """
        rows = self._decoded(family, keys, values)
        if self.alive_at is None or not self.has_ttl:
            return rows
        *columns, expiry = rows.columns
        is_alive = pc.greater(expiry.fill_null(_NEVER), self.alive_at)
        kept = columns if self.collect else rows.columns
        return Rows(rows.pair[np.asarray(is_alive)], [c.filter(is_alive) for c in kept])

    def _decoded(self, family: str, keys: pa.BinaryArray, values: pa.BinaryArray) -> Rows:
        """The same with what has expired, and when it has."""
        schema = self._stored[family]
        key_columns = decode_keys(keys, schema.key).columns
        stored = schema.decode_values(values)
        n = len(self.key)
        if self.kind == "timers":
            return Rows(np.arange(len(keys)), [*key_columns[1:], key_columns[0]])
        arrays = _ARRAYS.get((self.kind, family == self.main))
        if arrays is not None:
            elements, pair = _elements(stored.column(stored.schema.get_field_index(arrays)))
            of_key = [c.take(pa.array(pair)) for c in key_columns[:n]]
            made = {"list": self._of_list, "map": self._of_map, SESSIONS: self._of_sessions}[self.kind](elements)
            return Rows(pair, [*of_key, *made])
        if not self.stored_value.names:
            return Rows(np.arange(len(keys)), key_columns)
        return Rows(np.arange(len(keys)), [*key_columns, *self._values(stored.columns, stored.schema)])

    def _of_list(self, elements: pa.StructArray) -> list[pa.Array]:
        return self._values(elements.flatten(), elements.type)

    def _of_sessions(self, sessions: pa.StructArray) -> list[pa.Array]:
        parts = _parts(sessions)
        bounds = [parts.pop(START), parts.pop(END)]
        window = pa.StructArray.from_arrays(bounds, fields=list(self.inner.field(0).type))
        return [window, *self._values(list(parts.values()), self.stored_value)]

    def _of_map(self, entries: pa.StructArray) -> list[pa.Array]:
        """Inner and value columns of the entries of small maps."""
        parts = _parts(entries)
        values = _parts(parts["value"])
        fields = list(parts["value"].type)
        if TTL_COLUMN in parts:
            values[TTL_COLUMN] = parts[TTL_COLUMN]
            fields.append(pa.field(TTL_COLUMN, pa.int64()))
        return [*parts["key"].flatten(), *self._values(list(values.values()), fields)]

    def _values(self, columns: Sequence[pa.Array], fields: Iterable[pa.Field]) -> list[pa.Array]:
        """Value columns in the order of ``value``, of the stored ones."""
        given = {f.name: column for f, column in zip(fields, columns, strict=True)}
        if self._has_results:
            made = results(pa.RecordBatch.from_arrays(list(columns), names=list(given)))
        else:
            ttl = [given.pop(TTL_COLUMN)] if TTL_COLUMN in given else []
            made = [*given.values(), *ttl]
        types = [*self.value.types, pa.int64()] if len(made) > len(self.value) else self.value.types
        return [c.cast(kind) for c, kind in zip(made, types, strict=True)]


def is_aggregate(state: pa.Schema) -> bool:
    """Whether these are the columns of an aggregate's state, which has results."""
    try:
        return bool(result_fields(state))
    except ValueError:  # other names than those that outputs are kept under
        return False


def distinct(fields: Sequence[pa.Field]) -> pa.Schema:
    """The fields under names of their own, upper and lower case being equal; as ``savepoint_format.column_names`` makes them."""
    own = {field.name.casefold() for field in fields}
    taken: set[str] = set()
    named = []
    for field in fields:
        name = field.name
        while name.casefold() in taken or (name != field.name and name.casefold() in own):
            name += VALUE_SUFFIX
        taken.add(name.casefold())
        named.append(field.with_name(name))
    return pa.schema(named)


def in_step(streams: Sequence[Iterator[SortedPairs]]) -> Iterator[list[SortedPairs]]:
    """Parts of several sorted streams, a part of each, such that all keys of one are above those of the one before."""
    held: list[SortedPairs | None] = [next(stream, None) for stream in streams]
    while True:
        for i, stream in enumerate(streams):
            while (pairs := held[i]) is not None and not len(pairs):
                held[i] = next(stream, None)
        lasts = [pairs.keys[len(pairs) - 1].as_py() for pairs in held if pairs is not None]
        if not lasts:
            return
        end = min(lasts) + b"\x00"
        step = []
        for i, pairs in enumerate(held):
            if pairs is None:
                step.append(SortedPairs.empty())
                continue
            cut = pairs.lower_bound(end)
            step.append(pairs.slice(0, cut))
            held[i] = pairs.slice(cut)
        yield step


def order_of(keys: Sequence[pa.BinaryArray], pairs: Sequence[Positions]) -> Positions:
    """The order of rows by the keys of their pairs: ``pairs`` are the positions in ``keys``, for each of several parts."""
    ranks = np.empty(sum(map(len, keys)), np.int64)
    ranks[np.asarray(pc.sort_indices(pa.concat_arrays(keys)))] = np.arange(len(ranks))
    begins = np.cumsum([0, *map(len, keys)])[:-1]
    of_rows = np.concatenate([ranks[at + positions] for at, positions in zip(begins, pairs, strict=True)])
    return np.argsort(of_rows, kind="stable")


def key_groups_of(keys: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """The key groups that stored keys begin with."""
    content, offsets = binary_content(keys)
    groups: npt.NDArray[np.int32] = gather_fixed(content, offsets[:-1], np.dtype(">u2")).astype(np.int32)
    return groups


def one(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows of all batches in one."""
    columns = [pa.concat_arrays(c) for c in zip(*(b.columns for b in batches), strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=batches[0].schema.names)


def numbered(schema: pa.Schema) -> list[str]:
    """Names for columns whose own names may be equal."""
    return [str(i) for i in range(len(schema))]


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(f.name, nullable(f.type)) for f in schema])


def _parts(structs: pa.StructArray) -> dict[str, pa.Array]:
    """The fields of structs by name."""
    return dict(zip([f.name for f in structs.type], structs.flatten(), strict=True))


def _elements(lists: pa.Array) -> tuple[pa.StructArray, Positions]:
    """All elements of arrays, and for each the position of its array."""
    elements, offsets = list_parts(lists)
    return elements, np.repeat(np.arange(len(lists)), np.diff(offsets))


def _struct(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.StructArray:
    return pa.StructArray.from_arrays(list(columns), fields=list(schema))
