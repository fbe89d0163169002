"""The layout of each kind of state: the column families, and the columns of their keys and values.

The key of a row begins with the columns of the grouping key, unless another column is named first.

============== ==================== ================ =============================================================
kind           family               key after it    value
============== ==================== ================ =============================================================
rows           ``default``                           the state columns of an ``aggregate``, see ``state_columns``
sessions       ``default``                           ``sessions`` (an array, ascending), ``__due``
..             ``sessions.-ends``   ``__due`` first  ``present``
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

from collections.abc import Collection, Iterable, Mapping, Sequence

import pyarrow as pa

from backends.encoding.operator_schema import TIMERS, OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from backends.ids import DEFAULT_FAMILY
from spark_bridge.state_format.families import (
    CHUNKS,
    CHUNKS_BY_TIME,
    ENDS_FAMILY,
    ENTRIES,
    EXPIRY_FAMILY,
    TIMERS_BY_EXPIRY,
    TIMERS_BY_KEY,
    stored_name,
)

VALUE, ROWS, WINDOWS, LIST, MAP = "value", "rows", "windows", "list", "map"
"""The kinds of state that a query client tells apart, with ``SESSIONS`` and ``TIMERS``."""

TTL_COLUMN = "__ttl_expiration_ms"
"""When a value, element or entry expires."""
PRESENT = pa.schema([pa.field("present", pa.bool_())])
"""The value of a key that says no more than that the key is there."""

SESSIONS, START, END = "sessions", "start", "end"
"""The column that holds the sessions of a key, and the bounds of each session; also the kind of such state."""
DUE = "__due"
"""A time before which no session of the key ends, or no row of the chunk can be removed."""
LEFT, RIGHT = "left", "right"
"""The state variables of ``join``: the rows of each side that may still find a match."""
MATCHED = "matched"
"""Whether a row of ``join`` has found a match; after the row's own columns, under another name if they have one."""
TAIL_NUMBER = -1
"""Stands for the last rows of a key, which are in no chunk, among the chunks of ``join`` by time."""
EXPIRES_AT = "__expires_at"
"""When a deduplicated key expires."""

LENGTH, NUM_CHUNKS, TAIL = "length", "chunks", "tail"
"""Beside the key of a list: how many elements were written, how many chunks there are, and the last elements."""
CHUNK_NUMBER, ELEMENTS = "__chunk", "elements"
"""The number of a chunk (from 0), and its elements."""

IS_LARGE, MAP_ENTRIES = "large", "entries"
"""Beside the key of a map: whether its entries stand in a family of their own, and if not, the entries."""
ENTRY_KEY, ENTRY_VALUE = "key", "value"
"""The fields of a small map's entry."""

ALL_ROWS_KEY = "all_rows"
"""The key column of an ``aggregate`` over all rows (``by=[]``), which is true."""

EXPIRIES, EXPIRY = "expiries", "__expiry"
"""When the timers of a grouping key fire, and when one timer fires."""


def is_present(num_keys: int) -> pa.RecordBatch:
    """Return the values of keys that are there, in the columns of ``PRESENT``."""
    return pa.RecordBatch.from_arrays([pa.repeat(pa.scalar(True), num_keys)], schema=PRESENT)


# -- operators ---------------------------------------------------------------------------------


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


def deduplicate_schema(keys: pa.Schema, key_columns: tuple[str, ...], expiry: pa.DataType | None) -> OperatorSchema:
    """Return the schema of ``deduplicate``: the keys and, if keys expire, the time (of type ``expiry``) when each does.

    ``key_columns`` are the columns of the key in the order in which the user names them.
    """
    if expiry is None:
        return OperatorSchema.of_rows(
            StateSchema(keys, PRESENT), key_columns if key_columns != tuple(keys.names) else ()
        )
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
    taken = set(keys.names)
    return {
        stored_name(name): StateSchema(
            keys, pa.schema([pa.field(IS_LARGE, pa.bool_()), pa.field(MAP_ENTRIES, entries)])
        ),
        stored_name(name) + ENTRIES: StateSchema(
            pa.schema([*keys, *(_renamed(field, taken) for field in user_key)]),
            pa.schema(with_ttl(value) if has_ttl else value),
        ),
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


def _renamed(field: pa.Field, taken: set[str]) -> pa.Field:
    """Return the field under a name that is not in ``taken``, and add the name to ``taken``."""
    name = field.name
    while name in taken:
        name += "_key"
    taken.add(name)
    return field.with_name(name)
