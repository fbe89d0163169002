"""Schemas of keys and values, written in the names that Spark's ``StructType.json()`` uses.

So a schema file can be read with Spark's own tools, and a schema does not depend on Arrow's spelling
of a type (``large_string`` or ``string``; a session's time zone in a timestamp).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from backends.exceptions import InvalidStateStoreArgument, UnsupportedTypeError

_TO_SPARK: dict[pa.DataType, str] = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.large_string(): "string",
    pa.binary(): "binary",
    pa.large_binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp_ntz",
}
_FROM_SPARK: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")


def normalized_type(name: str, data_type: pa.DataType) -> pa.DataType:
    """The one Arrow type that stands for a column's Spark type; raises ``UnsupportedTypeError``.

    ``name`` is the column's, for the message.
    """
    return from_spark_type(to_spark_type(name, data_type))


def to_spark_type(name: str, data_type: pa.DataType) -> Any:
    """Spark's JSON for an Arrow type: a name, or a dict for arrays, maps and structs."""
    if pa.types.is_dictionary(data_type):
        return to_spark_type(name, data_type.value_type)
    if pa.types.is_timestamp(data_type) and data_type.tz is not None and data_type.unit == "us":
        return "timestamp"
    if pa.types.is_decimal128(data_type):
        return f"decimal({data_type.precision},{data_type.scale})"
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        return {
            "type": "array",
            "elementType": to_spark_type(f"{name}.element", data_type.value_type),
            "containsNull": data_type.value_field.nullable,
        }
    if pa.types.is_map(data_type):
        return {
            "type": "map",
            "keyType": to_spark_type(f"{name}.key", data_type.key_type),
            "valueType": to_spark_type(f"{name}.value", data_type.item_type),
            "valueContainsNull": data_type.item_field.nullable,
        }
    if pa.types.is_struct(data_type):
        return _struct([data_type.field(i) for i in range(data_type.num_fields)], f"{name}.")
    spark = _TO_SPARK.get(data_type)
    if spark is None:
        raise UnsupportedTypeError(
            f"Column {name!r} has the type {data_type}, which cannot be stored. Cast it to one of: "
            f"{', '.join(_FROM_SPARK)}, decimal(p,s), array, map or struct (timestamps in microseconds)."
        )
    return spark


def _struct(fields: list[pa.Field], prefix: str = "") -> dict[str, Any]:
    names = [f.name for f in fields]
    if len(set(names)) != len(names):
        raise InvalidStateStoreArgument(f"Two columns have the same name: {', '.join(prefix + n for n in names)}.")
    return {
        "type": "struct",
        "fields": [
            {
                "name": f.name,
                "type": to_spark_type(prefix + f.name, f.type),
                "nullable": f.nullable,
                "metadata": {},
            }
            for f in fields
        ],
    }


def from_spark_type(spark: Any) -> pa.DataType:
    """The Arrow type of one of Spark's JSON types; raises ``InvalidStateStoreArgument``."""
    if isinstance(spark, str):
        decimal = _DECIMAL.fullmatch(spark)
        if decimal:
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        if spark in _FROM_SPARK:
            return _FROM_SPARK[spark]
    elif isinstance(spark, dict):
        match spark:
            case {"type": "array", "elementType": element, "containsNull": bool(nullable)}:
                return pa.list_(pa.field("element", from_spark_type(element), nullable))
            case {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": bool(nullable)}:
                return pa.map_(from_spark_type(key), pa.field("value", from_spark_type(value), nullable))
            case {"type": "struct", "fields": list(fields)}:
                return pa.struct(_fields(fields))
    raise InvalidStateStoreArgument(f"{spark!r} is not a type that Spark's StructType.json() writes.")


def _fields(fields: list[Any]) -> list[pa.Field]:
    made = []
    for f in fields:
        match f:
            case {"name": str(name), "type": spark, "nullable": bool(nullable)}:
                made.append(pa.field(name, from_spark_type(spark), nullable))
            case _:
                raise InvalidStateStoreArgument(f"{f!r} is not a field as Spark's StructType.json() writes it.")
    return made


_NEEDED = (
    "A state schema needs 'key' and 'value', each a struct with 'fields', and may have a 'history' of such structs."
)
MAX_HISTORY = (1 << 16) - 1
"""Earlier schemas of one column family: a stored row tells by 16 bits which schema it was written with."""


@dataclass(frozen=True)
class StateSchema:
    """What a store's keys and values are made of. Types are normalised on construction.

    ``history`` are the schemas that values were written with before, the oldest first: a stored row has
    the number of its schema in ``[*history, value]``. Which one may follow on which, ``backends.encoding.schema_evolution`` says.

    Raises ``UnsupportedTypeError`` naming column and type, also for a map inside a key.
    """

    key: pa.Schema
    value: pa.Schema
    history: tuple[pa.Schema, ...] = ()

    def encode_values(self, rows: pa.RecordBatch) -> pa.BinaryArray:
        """The bytes of rows of the value's columns; see ``backends.encoding.values``."""
        from backends.encoding.values import encode_values

        return encode_values(rows, len(self.history))

    def decode_values(self, values: pa.Array | pa.ChunkedArray) -> pa.RecordBatch:
        """The rows of stored values, in the value's columns, whichever schema of the history they were written with.

        A null gives a row of nulls. See ``backends.encoding.values``.
        """
        from backends.encoding.values import decode_values

        return decode_values(values, self.value, self.history)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _normalized(self.key))
        object.__setattr__(self, "value", _normalized(self.value))
        object.__setattr__(self, "history", tuple(map(_normalized, self.history)))
        for f in self.key:
            _refuse_map(f.name, f.type)
        if len(self.history) > MAX_HISTORY:
            raise InvalidStateStoreArgument(
                f"A schema has {len(self.history)} earlier ones; at most {MAX_HISTORY} are possible."
            )

    def to_json(self) -> str:
        """Canonical JSON: equal schemas give equal text."""
        content: dict[str, Any] = {"key": _struct(list(self.key)), "value": _struct(list(self.value))}
        if self.history:
            content["history"] = [_struct(list(earlier)) for earlier in self.history]
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> StateSchema:
        """Read what ``to_json`` wrote; raises ``InvalidStateStoreArgument``."""
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidStateStoreArgument(f"A state schema is not JSON: {error}") from error
        match content:
            case {"key": key, "value": value, "history": list(history)}:
                return cls(_schema(key), _schema(value), tuple(map(_schema, history)))
            case {"key": key, "value": value} if "history" not in content:
                return cls(_schema(key), _schema(value))
        raise InvalidStateStoreArgument(_NEEDED)

    @property
    def id(self) -> str:
        """A short digest of the canonical JSON: the name of the schema's file."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def _normalized(schema: pa.Schema) -> pa.Schema:
    return pa.schema(_fields(_struct(list(schema))["fields"]))


def _schema(content: object) -> pa.Schema:
    match content:
        case {"fields": list(fields)}:
            return pa.schema(_fields(fields))
    raise InvalidStateStoreArgument(_NEEDED)


def _refuse_map(name: str, data_type: pa.DataType) -> None:
    if pa.types.is_map(data_type):
        raise UnsupportedTypeError(f"Column {name!r} has the type {data_type}: a map has no order and cannot be a key.")
    for i in range(data_type.num_fields):
        child = data_type.field(i)
        _refuse_map(f"{name}.{child.name}", child.type)
