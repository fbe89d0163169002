"""The layout of each kind of state: the column families, and the columns of their keys and values.

The key of a row begins with the columns of the grouping key, unless another column is named first.

============== ==================== ================ =============================================================
kind           family               key after it    value
============== ==================== ================ =============================================================
rows           ``default``                           the state columns of an ``aggregate``, see ``state_columns``
..             ``default.-index-c`` column ``c``     ``present``
                                    first
sessions       ``default``                           ``sessions`` (an array, ascending), ``__due``
..             ``sessions.-ends``   ``__due`` first  ``present``
rolling        ``default``                           ``recent`` and ``older`` (arrays of pieces), ``__due``
..             ``default.-tiles``                   ``tiles`` (an array of pieces), ``__merged_at``
..             ``default.-due``     ``__due`` first  ``present``
..             ``default.-lost``    ``__group`` only ``__lost``
deduplicated   ``default``                           ``present``, or ``__expires_at`` where keys expire
..             ``default.-expiry``  ``__expires_at`` ``present``
                                    first
joined side    ``left``, ``right``                   as a list: the rows that wait, ``matched`` where it is needed
..             ``left.-chunks``     ``__chunk``      as a list
..             ``left.-due``        ``__due`` first, ``present``
                                    ``__chunk``
                                    last
value ``n``    ``n``                                 the fields of the value
list ``n``     ``n``                                 ``length``, ``chunks``, ``tail`` (the last elements)
..             ``n.-chunks``        ``__chunk``      ``elements``
map ``n``      ``n``                                 ``large``, ``entries`` (of a small map)
..             ``n.-entries``       the user's key   the fields of the value (of an entry of a large map)
timers         ``timers.-keys``                      ``expiries`` (an array, ascending)
..             ``timers.-expiry``   ``__expiry``     ``present``
                                    first
============== ==================== ================ =============================================================

With a TTL, every value, element and entry has the column ``__ttl_expiration_ms`` as its last one. Times of a TTL and of
timers are int64, in ms since 1970; times of sessions and of deduplicated keys have the type of the event time.

Clients and hosts import this module: it must not import Spark or pandas, whose import would delay their start.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.encoding.columns import distinct_names
from backends.encoding.operator_schema import INDEX_FAMILY, INDEXED_PREFIX, TIMERS, OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema

# The names of the column families that operators keep state in; ``layouts`` has their columns.
#
# A variable of a processor is in a family with its name, or with ``stored_name`` if no file can have such a
# name. Lists, maps and timers have further families, whose names have a part after that.


PART_SEPARATOR = ".-"
"""Begins every part. A variable's own family has it in its name only if ``stored_name`` put it there."""
_ESCAPED = "n.-"
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_LETTER = re.compile(r"[A-Za-z0-9_]")
CHUNKS = ".-chunks"
"""The part of a list that has all elements but the last ones."""
CHUNKS_BY_TIME = ".-due"
"""The part of a side of ``join`` that has its chunks by the time when their first row is due."""
ENTRIES = ".-entries"
"""The part of a map that has the entries of large maps."""
TIMERS_BY_KEY = ".-keys"
"""The part of the timers that has the timers of each grouping key."""
TIMERS_BY_EXPIRY = ".-expiry"
"""The part of the timers that has all timers by the time when they fire."""
ENDS_FAMILY = "sessions.-ends"
"""The family of ``aggregate`` with session windows that has the keys by the time when they are due."""
TILES_FAMILY, DUE_FAMILY = "default.-tiles", "default.-due"
"""The families of ``aggregate`` with horizons: the older pieces of keys, and the keys by the time when they are due."""
LOST_FAMILY = "default.-lost"
"""The family of ``aggregate`` with horizons that has, for a key group that lost rows, the newest time of these rows."""
EXPIRY_FAMILY = "default.-expiry"
"""The family of ``deduplicate`` that has the keys by the time when they expire."""

SWEEP_FAMILY = "ttl.-sweep"
"""The family that records, by key group and family, the key up to which the sweep of expired values has come.

It is in no schema, because its rows are not state: a key is the key group (2 bytes) and the family's name in UTF-8, a
value is a stored key. A savepoint leaves them out, and the next sweep begins a key group again.
"""


def stored_name(variable: str) -> str:
    """Return the name of the main family of a variable: that of the variable, or its ASCII encoding.

    The latter is ``n.-`` and the name in UTF-8, where every byte but letters, digits and ``_`` is ``-`` and two
    hexadecimal digits. No other family has such a name: a name with ``.-`` in it is not kept unchanged, and the ``.-``
    of a part is not followed by another ``-``.
    """
    if _PLAIN.fullmatch(variable) and PART_SEPARATOR not in variable:
        return variable
    return _ESCAPED + "".join(chr(b) if _LETTER.fullmatch(chr(b)) else f"-{b:02x}" for b in variable.encode())


def family_of(variable: StateVariable, part: str = "") -> tuple[str, StateSchema]:
    """Return the name and the schema of a variable's family; ``part`` is ``CHUNKS``, ..., or "" for the main family.

    A variable that was deleted and declared again is in families of other names: only this function finds these names.
    """
    family = variable.family(stored_name(variable.name) + part)
    return family, variable.families[family]


VALUE, ROWS, WINDOWS, LIST, MAP = "value", "rows", "windows", "list", "map"
"""The kinds of state that a query client distinguishes, with ``SESSIONS`` and ``TIMERS``."""

TTL_COLUMN = "__ttl_expiration_ms"
"""When a value, element or entry expires."""
PRESENT = pa.schema([pa.field("present", pa.bool_())])
"""Marker value of a key without a value."""

SESSIONS, START, END = "sessions", "start", "end"
"""The column that holds the sessions of a key, and the bounds of each session; also the kind of such state."""
ROLLING, RECENT, OLDER, TILES, MERGED_AT = "rolling", "recent", "older", "tiles", "__merged_at"
"""The kind of state of rolling aggregates; the columns of a key's newest pieces, of the merged older ones
for each horizon, and of the older pieces; the watermark of their last merge.
"""
ROLLED_FAMILY = "default.-rolled"
"""The name under which clients look up the results of rolling aggregates. Hosts compute them: nothing is stored."""
LOST, LOST_GROUP = "__lost", "__group"
"""The newest event time of the rows that were late, or went with expired keys; the column with their key group."""
DUE = "__due"
"""A time before which no session of the key ends, or no row of the chunk can be removed."""
NO_TIME = (1 << 63) - 1
"""The time of a row of ``join`` that has none, in microseconds."""
LEFT, RIGHT = "left", "right"
"""The state variables of ``join``: the rows of each side that may still find a match."""
MATCHED = "matched"
"""Whether a row of ``join`` has found a match; after the row's own columns, under another name if they have one."""
TAIL_NUMBER = -1
"""Stands for the last rows of a key, which are in no chunk, among the chunks of ``join`` by time."""
EXPIRES_AT = "__expires_at"
"""When a deduplicated key expires."""

LENGTH, NUM_CHUNKS, TAIL = "length", "chunks", "tail"
"""At the key of a list: how many elements were written, how many chunks there are, and the last elements."""
CHUNK_NUMBER, ELEMENTS = "__chunk", "elements"
"""The number of a chunk (from 0), and its elements."""

IS_LARGE, MAP_ENTRIES = "large", "entries"
"""At the key of a map: whether its entries are in a separate family, and if not, the entries."""
ENTRY_KEY, ENTRY_VALUE = "key", "value"
"""The fields of a small map's entry."""

ALL_ROWS_KEY = "all_rows"
"""The key column of an ``aggregate`` over all rows (``by=[]``), which is true."""

EXPIRIES, EXPIRY = "expiries", "__expiry"
"""When the timers of a grouping key fire, and when one timer fires."""


def is_present(num_keys: int) -> pa.RecordBatch:
    """Return marker values for keys, in the columns of ``PRESENT``."""
    return pa.RecordBatch.from_arrays([pa.repeat(pa.scalar(True), num_keys)], schema=PRESENT)


# -- operators ---------------------------------------------------------------------------------


def aggregate_schema(
    rows: StateSchema, key_columns: tuple[str, ...], indexed: Iterable[pa.Field] = ()
) -> OperatorSchema:
    """Return the schema of ``aggregate`` without session windows; ``indexed`` are the columns that get an index.

    The key of an index's entry begins with the key group of its row, so that it is always in the row's partition.
    """
    families = {DEFAULT_FAMILY: rows}
    for field in indexed:
        key = pa.schema([pa.field(INDEXED_PREFIX + field.name, field.type), *rows.key])
        families[INDEX_FAMILY + stored_name(field.name)] = StateSchema(key, PRESENT)
    return OperatorSchema((StateVariable(DEFAULT_FAMILY, ROWS, families),), key_columns)


def session_schema(
    keys: pa.Schema, time: pa.DataType, states: pa.Schema, zeros: tuple[str, ...] = ()
) -> OperatorSchema:
    """Return the schema of ``aggregate`` with session windows.

    ``time`` is the type of starts and ends, ``states`` are the state columns of the aggregator, ``zeros`` those of them
    that are not null in the state of no rows.
    """
    session = pa.struct([pa.field(START, time), pa.field(END, time), *states])
    value = pa.schema([pa.field(SESSIONS, _list_of(session)), pa.field(DUE, time)])
    families = {
        DEFAULT_FAMILY: StateSchema(keys, value, zeros=zeros),
        ENDS_FAMILY: StateSchema(pa.schema([pa.field(DUE, time), *keys]), PRESENT),
    }
    return OperatorSchema((StateVariable(DEFAULT_FAMILY, ROWS, families),), tuple(keys.names))


def rolling_schema(
    keys: pa.Schema,
    key_columns: tuple[str, ...],
    pieces: Sequence[pa.Field],
    settings: Mapping[str, str],
    zeros: tuple[str, ...] = (),
) -> OperatorSchema:
    """Return the schema of ``aggregate`` with horizons; ``pieces`` are the columns of ``rolling.piece_fields``.

    A due time is one before which a key does not expire, as with sessions.
    """
    time, kind = pieces[0].type, _list_of(pa.struct(list(pieces)))
    older, due = _list_of(pa.struct([pa.field(START, time), *pieces[2:]])), pa.field(DUE, time)
    recent = pa.schema([pa.field(RECENT, kind), pa.field(OLDER, older), due])
    families = {
        DEFAULT_FAMILY: StateSchema(keys, recent, zeros=zeros),
        TILES_FAMILY: StateSchema(keys, pa.schema([pa.field(TILES, kind), pa.field(MERGED_AT, time)]), zeros=zeros),
        DUE_FAMILY: StateSchema(pa.schema([due, *keys]), PRESENT),
        LOST_FAMILY: StateSchema(pa.schema([pa.field(LOST_GROUP, pa.int32())]), pa.schema([pa.field(LOST, time)])),
    }
    return OperatorSchema((StateVariable(DEFAULT_FAMILY, ROWS, families),), key_columns, settings)


def deduplicate_schema(keys: pa.Schema, key_columns: tuple[str, ...], expiry: pa.DataType | None) -> OperatorSchema:
    """Return the schema of ``deduplicate``: the keys and, if keys expire, the time (of type ``expiry``) when each does.

    ``key_columns`` are the columns of the key in the user's order.
    """
    if expiry is None:
        order = key_columns if key_columns != tuple(keys.names) else ()
        return OperatorSchema.of_rows(StateSchema(keys, PRESENT), order)
    expires = pa.schema([pa.field(EXPIRES_AT, expiry)])
    families = {
        DEFAULT_FAMILY: StateSchema(keys, expires),
        EXPIRY_FAMILY: StateSchema(pa.schema([*expires, *keys]), PRESENT),
    }
    return OperatorSchema((StateVariable(DEFAULT_FAMILY, ROWS, families),), key_columns)


def join_schema(
    keys: pa.Schema,
    key_columns: tuple[str, ...],
    sides: Mapping[str, Sequence[pa.Field]],
    by_time: Collection[str],
    settings: Mapping[str, str],
) -> OperatorSchema:
    """Return the schema of ``join``: the waiting rows of each side as a list, with the columns ``sides`` has for it.

    The sides that are named in ``by_time`` have their chunks by time as well.
    """
    variables = []
    for name, fields in sides.items():
        families = list_families(name, keys, fields)
        if name in by_time:
            key = pa.schema([pa.field(DUE, pa.int64()), *keys, pa.field(CHUNK_NUMBER, pa.int64())])
            families[stored_name(name) + CHUNKS_BY_TIME] = StateSchema(key, PRESENT)
        variables.append(StateVariable(name, LIST, families))
    return OperatorSchema(tuple(variables), key_columns, settings)


# -- state variables of a processor ------------------------------------------------------------


def with_ttl(fields: Iterable[pa.Field]) -> list[pa.Field]:
    """Return the fields of a value that expires."""
    return [*fields, pa.field(TTL_COLUMN, pa.int64())]


def families_of(
    kind: str, name: str, keys: pa.Schema, user_key: list[pa.Field], value: list[pa.Field], *, has_ttl: bool
) -> dict[str, StateSchema]:
    """Return the families of a value, list or map state; ``value`` are the fields without the TTL's."""
    if kind == MAP:
        return map_families(name, keys, user_key, value, has_ttl=has_ttl)
    families = {VALUE: value_families, LIST: list_families}[kind]
    return families(name, keys, with_ttl(value) if has_ttl else value)


def value_families(name: str, keys: pa.Schema, value: Sequence[pa.Field]) -> dict[str, StateSchema]:
    """Return the families of a value state: ``value`` are its fields, the TTL's included."""
    return {stored_name(name): StateSchema(keys, pa.schema(value))}


def list_families(name: str, keys: pa.Schema, element: Sequence[pa.Field]) -> dict[str, StateSchema]:
    """Return the families of a list state: ``element`` are the fields of an element, the TTL's included."""
    elements = pa.list_(pa.struct(element))
    head = [pa.field(LENGTH, pa.int64()), pa.field(NUM_CHUNKS, pa.int64()), pa.field(TAIL, elements)]
    chunk_key = [*keys, pa.field(CHUNK_NUMBER, pa.int64())]
    return {
        stored_name(name): StateSchema(keys, pa.schema(head)),
        stored_name(name) + CHUNKS: StateSchema(pa.schema(chunk_key), pa.schema([pa.field(ELEMENTS, elements)])),
    }


def map_families(
    name: str, keys: pa.Schema, user_key: Sequence[pa.Field], value: Sequence[pa.Field], *, has_ttl: bool
) -> dict[str, StateSchema]:
    """Return the families of a map state: ``user_key`` and ``value`` are the fields of an entry, without the TTL's.

    In the key of a large map's entries, a field of the user's key that is named as a grouping column is renamed.
    """
    fields = [pa.field(ENTRY_KEY, pa.struct(user_key)), pa.field(ENTRY_VALUE, pa.struct(value))]
    entries = pa.list_(pa.struct(with_ttl(fields) if has_ttl else fields))
    head = pa.schema([pa.field(IS_LARGE, pa.bool_()), pa.field(MAP_ENTRIES, entries)])
    key = pa.schema(list(keys))
    for field in user_key:
        renamed = field.name
        while renamed in key.names:
            renamed += "_key"
        key = key.append(field.with_name(renamed))
    return {
        stored_name(name): StateSchema(keys, head),
        stored_name(name) + ENTRIES: StateSchema(key, pa.schema(with_ttl(value) if has_ttl else value)),
    }


def timers_variable(keys: pa.Schema) -> StateVariable:
    """Return the variable that keeps the timers of grouping keys, by grouping key and by time."""
    families = {
        TIMERS + TIMERS_BY_KEY: StateSchema(keys, pa.schema([pa.field(EXPIRIES, pa.list_(pa.int64()))])),
        TIMERS + TIMERS_BY_EXPIRY: StateSchema(pa.schema([pa.field(EXPIRY, pa.int64()), *keys]), PRESENT),
    }
    return StateVariable(TIMERS, TIMERS, families)


def _list_of(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", element))


# The names of the columns under which users see stored rows, in state data, scans and answers to queries.


TTL = "ttl_expiration_ms"
"""When a row expires, in ms since 1970 (int64)."""
EXPIRATION = "expiration_timestamp_ms"
"""When a timer fires, in ms since 1970 (int64)."""
SESSION_WINDOW = "session_window"
"""The bounds of a session: a struct of the timestamps ``start`` and ``end``."""
KEY_GROUP = "key_group"
"""The key group of a row's key (int32)."""
PARTITION = "partition_id"
"""The number of the state partition that has the row (int32)."""
LIST_VALUE = "list_value"
"""All elements of a key's list, if there is one row per key."""
MAP_VALUE = "map_value"
"""All entries of a key's map, if there is one row per key."""


def with_distinct_names(fields: Iterable[pa.Field]) -> pa.Schema:
    """Return the fields, renamed if an earlier field has the same name; see ``distinct_names`` for the rule."""
    all_fields = list(fields)
    names = distinct_names([field.name for field in all_fields])
    return pa.schema([field.with_name(name) for field, name in zip(all_fields, names, strict=True)])


# Finds the column of a stored key that is the window of a windowed aggregate, for clients and hosts alike.
#
# The key group of such a key is computed from all its columns, the window included: the windows of one grouping key
# are in all partitions. A client that asks ``KeyRows`` for all windows of keys therefore asks every owner. The client
# sends the keys without the column of the window, under any key group: a host does not look at the key group. Session
# windows are not part of the key.


def rows_kind(variable: StateVariable) -> str:
    """Return the kind of an operator's rows: ``SESSIONS``, ``ROLLING``, or ``ROWS`` for all others."""
    if ENDS_FAMILY in variable.families:
        return SESSIONS
    return ROLLING if TILES_FAMILY in variable.families else ROWS


def window_place(variable: StateVariable) -> int | None:
    """Return the place of the window in the stored key of an aggregate's rows; None if the key has no window.

    A window is a struct of the timestamps ``start`` and ``end``. If there are several such columns, the first one in
    stored order counts; the others are ordinary columns of the key.
    """
    if variable.kind != ROWS or len(variable.families) != 1 + len(variable.indexes):
        return None
    key = variable.families[DEFAULT_FAMILY].key
    return next((i for i, field in enumerate(key) if _is_window(field.type)), None)


def _is_window(kind: pa.DataType) -> bool:
    """Return whether values of a type are windows of time."""
    if not pa.types.is_struct(kind) or kind.num_fields != 2:
        return False
    bounds = [kind.field(i) for i in range(2)]
    return [b.name for b in bounds] == [START, END] and all(pa.types.is_timestamp(b.type) for b in bounds)
