"""The schema of rewritten state where the program is not given: that of the old state, with the new rows' columns."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from backends.encoding.operator_schema import TIMERS, StateVariable
from backends.encoding.schema import StateSchema
from backends.encoding.spark_types import normalized_type
from backends.exceptions import InvalidStateStoreArgument
from backends.ids import DEFAULT_FAMILY
from spark_bridge.state_format.families import ENDS_FAMILY, EXPIRY_FAMILY
from spark_bridge.state_format.layouts import LIST, MAP, ROWS, TTL_COLUMN, VALUE, list_families, map_families
from spark_bridge.state_format.layouts import value_families as families_of_value
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_format.windowed_keys import window_place
from spark_bridge.state_surgery.stages.given_rows import DERIVED


def inferred_variable(
    owner: str, source: VariableRows, made: pa.Schema, key_columns: Sequence[str], name: str
) -> tuple[StateVariable, tuple[str, ...]]:
    """Return the variable ``name`` with rows of the columns ``made``, of the kind of ``source``, and its key columns.

    ``key_columns`` are in the user's order. A column that has the name and type of one of ``source`` keeps its
    declaration; others may be null. ``owner`` names the rows in messages. Raises ``InvalidStateStoreArgument`` if a key
    column is missing, for a type that state cannot have, and for state whose layout only a program can declare.
    """
    variable = source.variable
    if ENDS_FAMILY in variable.families or EXPIRY_FAMILY in variable.families or variable.kind == TIMERS:
        raise InvalidStateStoreArgument(
            f"The rows of {owner} are kept by time as well: give program=, the DataFrame of the query that goes on."
        )
    shown = _shown(source)
    columns = {f.name: f for f in made if f.name not in DERIVED or f.name in shown or f.name in key_columns}
    missing = [name for name in key_columns if name not in columns]
    if missing:
        raise InvalidStateStoreArgument(
            f"The rows of {owner} came without the key columns {', '.join(map(repr, missing))}, with "
            f"{', '.join(map(repr, columns))}: name the columns of the key with key=."
        )
    first = next(iter(variable.families.values()))
    keys = [_field(columns.pop(name), first.key) for name in key_columns]
    stored = first.key.names
    window = window_place(variable)
    if set(stored) == set(key_columns):
        keys.sort(key=lambda f: stored.index(f.name))
    elif window is not None:  # first in stored keys, so that the keys of a window lie together
        keys.sort(key=lambda f: f.name != stored[window])
    key = pa.schema(keys)
    has_ttl = source.has_ttl and columns.pop(source.value.names[-1], None) is not None
    inner = [_named(columns.pop(s), o, key) for s, o in shown.items() if s in columns and o in source.inner.names]
    inner = [_field(f, source.inner) for f in inner]
    before = pa.schema([f for f in source.stored_value if f.name != TTL_COLUMN])
    taken = pa.schema([*key, *inner])
    value = [_field(_named(f, shown.get(s, s), taken), before) for s, f in columns.items()]
    families = _families(variable.kind, name, key, inner, value, has_ttl=has_ttl)
    made_variable = StateVariable(name, variable.kind, families, variable.ttl_ms if has_ttl else None)
    in_order = tuple(key.names) == tuple(key_columns)
    return made_variable, () if in_order and variable.kind == ROWS else tuple(key_columns)


def _shown(source: VariableRows) -> dict[str, str]:
    """Return the names that rows show of the columns after the key, with the names that they have in the state."""
    own = [f.name for f in (*source.inner, *source.stored_value) if f.name != TTL_COLUMN]
    names = PairsOfRows(source).columns.names[len(source.key) :]
    return dict(zip(names, own, strict=False))


def _named(field: pa.Field, own: str, taken: pa.Schema) -> pa.Field:
    """Return a field under its own name if rows show it under another: where a column before has that name."""
    return field.with_name(own) if own in taken.names else field


def _families(
    kind: str, name: str, key: pa.Schema, inner: list[pa.Field], value: list[pa.Field], *, has_ttl: bool
) -> dict[str, StateSchema]:
    ttl = [pa.field(TTL_COLUMN, pa.int64())] if has_ttl else []
    if kind == VALUE:
        return families_of_value(name, key, [*value, *ttl])
    if kind == LIST:
        return list_families(name, key, [*value, *ttl])
    if kind == MAP:
        return map_families(name, key, inner, value, has_ttl=has_ttl)
    return {DEFAULT_FAMILY: StateSchema(key, pa.schema(value))}


def _field(given: pa.Field, before: pa.Schema) -> pa.Field:
    kind = normalized_type(given.name, given.type)
    at = before.get_field_index(given.name)
    if at >= 0 and before.field(at).type == kind:
        return before.field(at)
    return pa.field(given.name, kind)
