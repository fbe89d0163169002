"""The types of columns by their names in Spark's ``StructType.json()``, and the Arrow type that stands for each."""

from __future__ import annotations

import re
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


_STORABLE = f"State can have {', '.join(_FROM_SPARK)}, decimal(p,s), array, map and struct."
INTERVAL_REMEDY = (
    "Keep an interval of days to seconds as its seconds, extract(DAY FROM i) * 86400L + extract(HOUR FROM i) * 3600 + "
    "extract(MINUTE FROM i) * 60 + extract(SECOND FROM i), and one of years to months as its months, "
    "extract(YEAR FROM i) * 12 + extract(MONTH FROM i)."
)
_DECIMAL = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")


def normalized_type(name: str, data_type: pa.DataType) -> pa.DataType:
    """Return the one Arrow type that stands for a column's Spark type; raises ``UnsupportedTypeError``.

    ``name`` is the column's, for the message.
    """
    return from_spark_type(to_spark_type(name, data_type))


def to_spark_type(name: str, data_type: pa.DataType) -> Any:
    """Return Spark's JSON for an Arrow type: a name, or a dict for arrays, maps and structs.

    ``name`` is the column's, for the message. Raises ``UnsupportedTypeError``.
    """
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
        return spark_struct_json([data_type.field(i) for i in range(data_type.num_fields)], f"{name}.")
    spark = _TO_SPARK.get(data_type)
    if spark is None:
        raise UnsupportedTypeError(
            f"Column {name!r} has the type {data_type}, which cannot be stored. Cast it to one of: "
            f"{', '.join(_FROM_SPARK)}, decimal(p,s), array, map or struct (timestamps in microseconds)."
        )
    return spark


def spark_struct_json(fields: list[pa.Field], prefix: str = "") -> dict[str, Any]:
    """Return Spark's JSON for a struct of Arrow fields; ``prefix`` comes before their names in messages.

    Raises ``UnsupportedTypeError``, and ``InvalidStateStoreArgument`` for two fields of one name.
    """
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
    """Return the Arrow type of one of Spark's JSON types; raises ``InvalidStateStoreArgument``."""
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
                return pa.struct(arrow_fields(fields))
    remedy = "Cast the column to one of these."
    if isinstance(spark, str) and spark.startswith("interval"):
        remedy = INTERVAL_REMEDY
    raise InvalidStateStoreArgument(f"{spark!r} is not a type that state can have. {_STORABLE} {remedy}")


def arrow_fields(fields: list[Any]) -> list[pa.Field]:
    """Return the Arrow fields of the ``fields`` of Spark's JSON for a struct; raises ``InvalidStateStoreArgument``."""
    made = []
    for f in fields:
        match f:
            case {"name": str(name), "type": spark, "nullable": bool(nullable)}:
                try:
                    made.append(pa.field(name, from_spark_type(spark), nullable))
                except InvalidStateStoreArgument as error:
                    raise InvalidStateStoreArgument(f"Field {name!r}: {error}") from error
            case _:
                raise InvalidStateStoreArgument(f"{f!r} is not a field as Spark's StructType.json() writes it.")
    return made
