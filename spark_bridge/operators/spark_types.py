"""Types of Spark as Arrow types and back, and which of them have an order."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import types as T

from backends.encoding.spark_types import from_spark_type, to_spark_type
from backends.exceptions import StateStoreError
from spark_bridge.exceptions import InvalidOperatorError

NUMERIC = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType, T.DoubleType, T.DecimalType)
ORDERED = (
    *NUMERIC,
    T.BooleanType,
    T.StringType,
    T.BinaryType,
    T.DateType,
    T.TimestampType,
    T.TimestampNTZType,
)


def is_ordered(kind: T.DataType) -> bool:
    """Return whether values of the type can be compared: all but maps, and types that contain a map."""
    if isinstance(kind, T.StructType):
        return all(is_ordered(f.dataType) for f in kind.fields)
    if isinstance(kind, T.ArrayType):
        return is_ordered(kind.elementType)
    return isinstance(kind, ORDERED)


def column_type(schema: T.StructType, column: str, where: str) -> T.DataType:
    """Return the type of a column, which must be in the schema once; raises ``InvalidOperatorError``.

    ``where`` begins the message of the error.
    """
    names = schema.names
    if names.count(column) != 1:
        problem = "is ambiguous" if column in names else "does not exist"
        raise InvalidOperatorError(
            f"{where}{column!r}: the column {problem}; the DataFrame has {', '.join(names)}."
            f"{other_case([column], names)}"
        )
    return schema[column].dataType


def other_case(wanted: Sequence[str], names: Sequence[str]) -> str:
    """Return a sentence for an error if ``names`` has a wanted name in another case only; "" if it has none.

    Spark resolves names without regard to case by default. State and its clients tell names apart by case.
    """
    missing = {name.casefold() for name in wanted if name not in names}
    alike = [name for name in names if name.casefold() in missing]
    if not alike:
        return ""
    return (
        f" Names are case-sensitive here, whatever spark.sql.caseSensitive says: write {', '.join(map(repr, alike))}."
    )


def column_literal(name: str) -> str:
    """Return a column name as code gives it to Spark's ``col`` and ``withWatermark``: in quotes, as Spark resolves it.

    Spark takes a dot outside backticks for a field of a struct.
    """
    return repr("`" + name.replace("`", "``") + "`" if "." in name or "`" in name else name)


def arrow_type(kind: T.DataType) -> pa.DataType:
    """Return the Arrow type that a Spark type is kept as; raises ``InvalidOperatorError`` if there is none."""
    try:
        return from_spark_type(kind.jsonValue())
    except StateStoreError as error:
        raise InvalidOperatorError(f"The type {kind.simpleString()} cannot be kept as state: {error}") from error


def spark_struct(fields: pa.Schema) -> T.StructType:
    """Return Arrow fields as Spark's fields; raises ``StateStoreError`` for a type that Spark does not have."""
    of_spark = [
        {"name": f.name, "type": to_spark_type(f.name, f.type), "nullable": f.nullable, "metadata": {}} for f in fields
    ]
    return T.StructType.fromJson({"type": "struct", "fields": of_spark})
