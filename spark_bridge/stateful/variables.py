"""From what a processor declares to the column families that keep it.

Every family's key begins with the columns of the grouping key, timers' second one apart. A variable ``n`` is kept in:

- value: ``n``: one row per grouping key.
- list: ``n``: how many elements have been written, how many chunks there are, and the last elements themselves;
  ``n.-chunks``: the elements before those, under the number of their chunk.
- map: ``n``: the entries of a small map, or that it is large; ``n.-entries``: a large map's, each under its own key.
- timers: ``timers.-keys``: when the timers of a grouping key fire; ``timers.-expiry``: the same by time.

With a TTL, every value, element or entry has the column ``__ttl_expiration_ms``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
from pyspark.sql import types as T

from backends.encoding.operator_schema import StateVariable
from backends.encoding.schema import StateSchema
from backends.exceptions import InvalidStateStoreArgument, UnsupportedTypeError
from backends.ids import DEFAULT_FAMILY, check_name
from spark_bridge.exceptions import StateDeclarationError
from spark_bridge.state_format.families import CHUNKS, ENTRIES, TIMERS_BY_EXPIRY, TIMERS_BY_KEY, TTL_COLUMN
from spark_bridge.stateful.row_values import RowCodec

CHUNK_COLUMN = "__chunk"
EXPIRY_COLUMN = "__expiry"
TIMERS = "timers"
_SEPARATOR = ".-"


@dataclass(frozen=True)
class Declaration:
    """A state variable as its processor declares it. ``user_key`` is the key of a map's entries."""

    name: str
    kind: str
    value: T.StructType
    user_key: T.StructType | None = None
    ttl_ms: int | None = None

    @cached_property
    def codec(self) -> RowCodec:
        """Reads and writes the values (elements, entries' values), which may all be null."""
        return RowCodec(_nullable(self.value))

    @cached_property
    def key_codec(self) -> RowCodec:
        """Reads and writes the keys of a map's entries."""
        return RowCodec(_nullable(self.user_key or T.StructType()))

    @property
    def _ttl_fields(self) -> list[pa.Field]:
        return [] if self.ttl_ms is None else [pa.field(TTL_COLUMN, pa.int64())]

    def variable(self, key_schema: pa.Schema) -> StateVariable:
        """What to keep for it, with grouping keys of ``key_schema``; raises ``StateDeclarationError``."""
        self._check()
        try:
            families = self._families(list(key_schema))
        except (InvalidStateStoreArgument, UnsupportedTypeError) as error:
            raise StateDeclarationError(f"State variable {self.name!r} cannot be kept: {error}") from error
        return StateVariable(self.name, self.kind, families, self.ttl_ms)

    def _check(self) -> None:
        check_variable_name(self.name)
        for struct in (self.value, self.user_key):
            if struct is None:
                continue
            if not struct.fields:
                raise StateDeclarationError(
                    f"State variable {self.name!r} has a schema without fields. Name at least one, such as 'value INT'."
                )
            if TTL_COLUMN in struct.names:
                raise StateDeclarationError(
                    f"State variable {self.name!r} has a field {TTL_COLUMN!r}, which is the name of the column for its "
                    "TTL. Rename the field."
                )

    def _families(self, keys: list[pa.Field]) -> dict[str, StateSchema]:
        values = [*self.codec.schema, *self._ttl_fields]
        match self.kind:
            case "value":
                return {self.name: StateSchema(pa.schema(keys), pa.schema(values))}
            case "list":
                elements = pa.list_(pa.struct(values))
                counts = [pa.field("length", pa.int64()), pa.field("chunks", pa.int64())]
                return {
                    self.name: StateSchema(pa.schema(keys), pa.schema([*counts, pa.field("tail", elements)])),
                    self.name + CHUNKS: StateSchema(
                        pa.schema([*keys, pa.field(CHUNK_COLUMN, pa.int64())]),
                        pa.schema([pa.field("elements", elements)]),
                    ),
                }
            case "map":
                key_fields, value_fields = list(self.key_codec.schema), list(self.codec.schema)
                entry = [pa.field("key", pa.struct(key_fields)), pa.field("value", pa.struct(value_fields))]
                entries = pa.list_(pa.struct([*entry, *self._ttl_fields]))
                taken = {f.name for f in keys}
                return {
                    self.name: StateSchema(
                        pa.schema(keys), pa.schema([pa.field("large", pa.bool_()), pa.field("entries", entries)])
                    ),
                    self.name + ENTRIES: StateSchema(
                        pa.schema([*keys, *(_renamed(f, taken) for f in key_fields)]), pa.schema(values)
                    ),
                }
        raise StateDeclarationError(f"{self.kind!r} is no kind of state variable that a processor declares.")


def timers_variable(key_schema: pa.Schema) -> StateVariable:
    """What to keep for the timers of grouping keys of ``key_schema``."""
    expiry = pa.field(EXPIRY_COLUMN, pa.int64())
    return StateVariable(
        TIMERS,
        "timers",
        {
            TIMERS + TIMERS_BY_KEY: StateSchema(key_schema, pa.schema([pa.field("expiries", pa.list_(pa.int64()))])),
            TIMERS + TIMERS_BY_EXPIRY: StateSchema(
                pa.schema([expiry, *key_schema]), pa.schema([pa.field("present", pa.bool_())])
            ),
        },
    )


def check_variable_name(name: str) -> None:
    """Raise ``StateDeclarationError`` for what cannot be the name of a state variable."""
    try:
        check_name("a state variable", name)
    except InvalidStateStoreArgument as error:
        raise StateDeclarationError(f"[STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME] {error}") from error
    if name == DEFAULT_FAMILY or _SEPARATOR in name:
        raise StateDeclarationError(
            f"[STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME] {name!r} cannot be the name of a state variable: "
            f"{DEFAULT_FAMILY!r} and names with {_SEPARATOR!r} in them are taken. Choose another name."
        )


def _renamed(field: pa.Field, taken: set[str]) -> pa.Field:
    """The field under a name that is not taken, which then is."""
    name = field.name
    while name in taken:
        name += "_key"
    taken.add(name)
    return field.with_name(name)


def _nullable(data_type: T.DataType) -> T.DataType:
    """The type with every field nullable: whether it was declared so must not decide whether state can be read."""
    if isinstance(data_type, T.StructType):
        return T.StructType([T.StructField(f.name, _nullable(f.dataType), True) for f in data_type.fields])
    if isinstance(data_type, T.ArrayType):
        return T.ArrayType(_nullable(data_type.elementType), True)
    if isinstance(data_type, T.MapType):
        return T.MapType(_nullable(data_type.keyType), _nullable(data_type.valueType), True)
    return data_type
