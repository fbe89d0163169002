"""A state variable as a processor declares it in ``init``; ``state_format.layouts`` has the columns that are kept."""

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
from spark_bridge.state_format.layouts import (
    LIST,
    MAP,
    TTL_COLUMN,
    VALUE,
    list_families,
    map_families,
    value_families,
    with_ttl,
)
from spark_bridge.stateful.values.row_values import RowCodec


@dataclass(frozen=True)
class Declaration:
    """A state variable: its name, kind (``VALUE``, ``LIST`` or ``MAP``) and schemas.

    ``value`` are the fields of a value, of an element, or of an entry's value; ``user_key`` those of the key of a map's
    entries. ``ttl_ms`` is how long a value lives (None: for good).
    """

    name: str
    kind: str
    value: T.StructType
    user_key: T.StructType | None = None
    ttl_ms: int | None = None

    @cached_property
    def codec(self) -> RowCodec:
        """Return the codec of values, elements or the values of entries. All fields may be null."""
        return RowCodec(_nullable(self.value))

    @cached_property
    def key_codec(self) -> RowCodec:
        """Return the codec of the keys of a map's entries. All fields may be null."""
        return RowCodec(_nullable(self.user_key or T.StructType()))

    def variable(self, key_schema: pa.Schema) -> StateVariable:
        """Return the stored variable for grouping keys of ``key_schema``; raises ``StateDeclarationError``."""
        self._check()
        try:
            families = self._families(key_schema)
            for family in families:
                check_name("a column family; the name of its state variable is too long", family)
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

    def _families(self, keys: pa.Schema) -> dict[str, StateSchema]:
        value, has_ttl = list(self.codec.schema), self.ttl_ms is not None
        if self.kind == MAP:
            return map_families(self.name, keys, list(self.key_codec.schema), value, has_ttl=has_ttl)
        families = {VALUE: value_families, LIST: list_families}[self.kind]
        return families(self.name, keys, with_ttl(value) if has_ttl else value)


def check_variable_name(name: str) -> None:
    """Raise ``StateDeclarationError`` for what cannot be the name of a state variable, as in Spark."""
    if not isinstance(name, str) or not name or name != name.strip() or name == DEFAULT_FAMILY:
        raise StateDeclarationError(
            f"[STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME] {name!r} cannot be the name of a state "
            f"variable: give a text that is not {DEFAULT_FAMILY!r} and neither begins nor ends with a blank."
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise StateDeclarationError(
            f"[STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME] {name!r} cannot be the name of a state "
            f"variable: it is no Unicode text ({error.reason})."
        ) from error


def _nullable(data_type: T.DataType) -> T.DataType:
    """Return the type with every field nullable: old rows may have nulls where none is declared."""
    if isinstance(data_type, T.StructType):
        return T.StructType([T.StructField(f.name, _nullable(f.dataType), True) for f in data_type.fields])
    if isinstance(data_type, T.ArrayType):
        return T.ArrayType(_nullable(data_type.elementType), True)
    if isinstance(data_type, T.MapType):
        return T.MapType(_nullable(data_type.keyType), _nullable(data_type.valueType), True)
    return data_type
