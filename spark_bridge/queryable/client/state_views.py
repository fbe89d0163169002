"""State variables as a client reads them: their column families, and the form of their values and rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.encoding.operator_schema import TIMERS, OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from spark_bridge.aggregates.aggregator import result_fields
from spark_bridge.aggregates.rolling import Rolling
from spark_bridge.exceptions import RequestError, UnknownKvStateIdError
from spark_bridge.queryable.client.arguments import KeyCodec, names_in_order
from spark_bridge.queryable.client.results import KeyedResults, plain_values, whole
from spark_bridge.queryable.protocol import At
from spark_bridge.state_format import layouts
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_format.stored_values import StoredValues, now_ms

ONE_ROW = (layouts.VALUE, layouts.ROWS, layouts.WINDOWS, layouts.ROLLING)
"""The kinds that have one stored value per key, which a client decodes itself."""
ALL_ROWS_COLUMNS = {
    layouts.LIST: layouts.LIST_VALUE,
    layouts.MAP: layouts.MAP_VALUE,
    TIMERS: TIMERS,
    layouts.SESSIONS: layouts.SESSIONS,
    layouts.WINDOWS: layouts.WINDOWS,
}
"""The kinds that have several rows per key, and the column of ``get_many`` that has all rows of a key."""


@dataclass(frozen=True)
class StateView:
    """One state variable of one operator.

    ``kind`` is that of the variable, or ``WINDOWS``, ``SESSIONS`` or ``ROLLING`` for an aggregate by these. Make one
    with ``state_view``. ``codec`` encodes a key (of windows: with the window).
    """

    operator: str
    variable: StateVariable
    kind: str
    codec: KeyCodec
    operator_schema: OperatorSchema

    def as_of(self, at: At, now_us: Callable[[], int]) -> At:
        """Return ``at`` with the moment of rolling aggregates (default: now). Raises ``RequestError`` without any."""
        if self.kind != layouts.ROLLING:
            if at.moment is not None:
                raise RequestError(
                    f"Operator {self.operator!r} has no rolling aggregates, and at= is the time that those are of: "
                    "leave it out. version= reads an older state."
                )
            return at
        return at if at.moment is not None else msgspec.structs.replace(at, moment=now_us())

    @cached_property
    def rolling(self) -> Rolling:
        """The horizons, if the kind is ``ROLLING``."""
        rolling = VariableRows(self.operator_schema, self.variable).rolling
        assert rolling is not None
        return rolling

    @cached_property
    def family(self) -> str:
        """The column family of single values."""
        if self.kind == layouts.ROLLING:
            return layouts.ROLLED_FAMILY
        return DEFAULT_FAMILY if self.variable.kind == layouts.ROWS else layouts.family_of(self.variable)[0]

    @cached_property
    def schema(self) -> StateSchema:
        """The schema of ``family``. Hosts compute the values of rolling aggregates, whose columns are the results."""
        if self.kind == layouts.ROLLING:
            rows = VariableRows(self.operator_schema, self.variable)
            return StateSchema(rows.key, rows.value)
        return self.variable.families[self.family]

    @cached_property
    def window(self) -> str | None:
        """The key column that is the window, if the kind is ``WINDOWS``."""
        at = layouts.window_place(self.variable)
        return None if at is None else str(self.codec.stored.names[at])

    @cached_property
    def without_window(self) -> KeyCodec:
        """The codec of keys without the window, for requests of all windows of a key; else the same as ``codec``."""
        if self.window is None:
            return self.codec
        at = self.codec.stored.get_field_index(self.window)
        by = tuple(name for name in self.codec.by if name != self.window)
        return KeyCodec(self.operator, self.codec.stored.remove(at), by, self.codec.num_groups)

    # -- single values -------------------------------------------------------------------------

    @cached_property
    def stored_values(self) -> StoredValues:
        """The values of ``family``, for the kinds that have one row per key."""
        return StoredValues(self.schema, self.variable.kind == layouts.ROWS and self.kind != layouts.ROLLING)

    def table(self, keys: pa.RecordBatch, values: pa.BinaryArray) -> pa.Table:
        """Return a row per key: the columns of the key, then those of its value."""
        usual_keys, schema = self._table_schema
        if keys.schema != usual_keys:
            schema = self._schema_behind(keys.schema)
        return pa.Table.from_arrays([*keys.columns, *self.stored_values.columns(values, now_ms())], schema=schema)

    @cached_property
    def _table_schema(self) -> tuple[pa.Schema, pa.Schema]:
        """The key columns that a table usually has, and all columns of such a table."""
        keys = self.codec.columns_schema
        return keys, self._schema_behind(keys)

    def _schema_behind(self, keys: pa.Schema) -> pa.Schema:
        return layouts.with_distinct_names([*keys, *self.stored_values.fields])

    # -- rows ----------------------------------------------------------------------------------

    @cached_property
    def row_fields(self) -> tuple[list[pa.Field], list[pa.Field]]:
        """The columns of a row after those of the key: the columns that distinguish a key's rows, and the value."""
        inner: list[pa.Field] = []
        if self.kind == TIMERS:
            return [pa.field(layouts.EXPIRATION, pa.int64())], []
        if self.kind == layouts.SESSIONS:
            session = self.schema.value.field(layouts.SESSIONS).type.value_type
            bounds = [session.field(name) for name in (layouts.START, layouts.END)]
            state = pa.schema([f for f in session if f.name not in (layouts.START, layouts.END)])
            return [pa.field(layouts.SESSION_WINDOW, pa.struct(bounds))], result_fields(state)
        if self.kind == layouts.LIST:
            value = list(self.schema.value.field(layouts.TAIL).type.value_type)
        elif self.kind == layouts.MAP:
            entry = self.schema.value.field(layouts.MAP_ENTRIES).type.value_type
            inner = list(entry.field(layouts.ENTRY_KEY).type)
            value = list(entry.field(layouts.ENTRY_VALUE).type)
        elif self.schema.value.names == layouts.PRESENT.names and not self.stored_values.is_aggregate:
            value = []
        else:
            value = self.stored_values.fields
        return inner, [f for f in value if f.name != layouts.TTL_COLUMN]

    @cached_property
    def row_columns(self) -> tuple[list[str], list[str]]:
        """The names of ``row_fields``. A host may rename them, so that no two columns of a table have the same name."""
        inner, value = self.row_fields
        return [f.name for f in inner], [f.name for f in value]

    @cached_property
    def scan_fields(self) -> list[pa.Field]:
        """The columns of a scan, without key group and partition."""
        inner, value = self.row_fields
        return list(layouts.with_distinct_names([*self.codec.schema, *inner, *value]))

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The types of ``scan_fields``."""
        return {f.name: f.type for f in self.scan_fields}

    def rows_of(self, answer: pa.Table) -> KeyedResults:
        """Return the rows of an answer with ``position``, the columns of the key, those of the rows, and others."""
        inner, value = self.row_columns
        columns = answer.columns
        at = 1 + len(self.codec.by)
        keys = dict(zip(self.codec.by, columns[1:at], strict=True))
        inner_columns = [whole(c) for c in columns[at : at + len(inner)]]
        if self.window is not None:
            inner, inner_columns = [self.window], [whole(keys[self.window])]
        behind = at + len(self.row_columns[0])
        return KeyedResults(
            whole(columns[0]),
            dict(zip(inner, inner_columns, strict=True)),
            dict(zip(value, map(whole, columns[behind : behind + len(value)]), strict=True)),
        )

    def one_answer(self, rows: KeyedResults) -> Any:
        """Return the result of ``get`` for the rows of one key: a list, for a map a dict, or None without rows."""
        if not len(rows.position):
            return None
        if self.kind == layouts.MAP:
            return dict(zip(plain_values(rows.inner, hashable=True), plain_values(rows.value), strict=True))
        in_order = rows.ordered(by_window=self.kind in (layouts.WINDOWS, layouts.SESSIONS))
        return plain_values({**in_order.inner, **in_order.value})

    def listed(self, rows: KeyedResults, n: int) -> pa.Array:
        """Return all rows of each of ``n`` keys in a list, or a map; null for a key without rows."""
        in_order = rows.ordered(by_window=self.kind in (layouts.WINDOWS, layouts.SESSIONS))
        return in_order.maps(n) if self.kind == layouts.MAP else in_order.lists(n)

    def listed_table(self, keys: pa.RecordBatch, listed: pa.Array) -> pa.Table:
        """Return a row per key: the columns of the key, and all that ``listed`` has of it."""
        schema = layouts.with_distinct_names([*keys.schema, pa.field(ALL_ROWS_COLUMNS[self.kind], listed.type)])
        return pa.Table.from_arrays([*keys.columns, listed], schema=schema)


def state_view(operator: str, schema: OperatorSchema, key_groups: int, state: str | None) -> StateView:
    """Return the state variable that is asked for. ``state`` None means the only one, apart from timers.

    Raises ``UnknownKvStateIdError`` naming the state variables that there are.
    """
    variables = schema.in_use
    if state is None:
        named = list(variables) if len(variables) == 1 else [v for v in variables if v.kind != TIMERS]
    else:
        named = [v for v in variables if v.name == state]
    if len(named) != 1:
        names = ", ".join(f"{v.name!r} ({v.kind})" for v in variables) or "none"
        wanted = "needs state=, one of" if state is None else f"has no state variable {state!r}; there are"
        raise UnknownKvStateIdError(f"Operator {operator!r} {wanted} its state variables: {names}.")
    (variable,) = named
    stored, kind = _stored_key(variable)
    codec = KeyCodec(operator, stored, names_in_order(stored, schema.key_columns), key_groups)
    return StateView(operator, variable, kind, codec, schema)


def _stored_key(variable: StateVariable) -> tuple[pa.Schema, str]:
    """Return the columns of the key as they are stored, and the kind."""
    if variable.kind == layouts.ROWS:
        stored = variable.families[DEFAULT_FAMILY].key
        kind = layouts.rows_kind(variable)
        return stored, layouts.WINDOWS if kind == layouts.ROWS and layouts.window_place(variable) is not None else kind
    if variable.kind == TIMERS:
        return layouts.family_of(variable, layouts.TIMERS_BY_KEY)[1].key, TIMERS
    return layouts.family_of(variable)[1].key, variable.kind
