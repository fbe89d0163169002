"""The schema of a column family: which columns its keys and values have, and which its values had before.

A schema file names types as Spark's ``StructType.json()`` does. So Spark's own tools can read the file, and a schema
does not depend on Arrow's spelling of a type (``large_string`` or ``string``; a session's time zone in a timestamp).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from backends.encoding.spark_types import arrow_fields, spark_struct_json
from backends.encoding.values import decode_values, encode_values
from backends.exceptions import InvalidStateStoreArgument, UnsupportedTypeError

_NEEDED = (
    "A state schema needs 'key' and 'value', each a struct with 'fields', and may have a 'history' of such structs."
)
MAX_HISTORY = (1 << 16) - 1
"""The most earlier schemas of one column family: a stored row names its schema by a number of 16 bits."""


@dataclass(frozen=True)
class StateSchema:
    """The columns of the keys and values of one column family. Types are normalised on construction.

    ``history`` are the schemas that values were written with before, the oldest first: a stored row has the number of
    its schema in ``[*history, value]``. ``backends.encoding.schema_evolution`` says which schema may follow on which.
    ``zeros`` names the columns that begin with zero, not with null, in rows of earlier schemas: 0, an empty list, no
    bytes. They are state columns of aggregates, whose state of no rows is not null.

    Raises ``UnsupportedTypeError`` naming column and type, also for a map inside a key.
    """

    key: pa.Schema
    value: pa.Schema
    history: tuple[pa.Schema, ...] = ()
    zeros: tuple[str, ...] = ()

    def encode_values(self, rows: pa.RecordBatch) -> pa.BinaryArray:
        """Return the bytes of rows of the value's columns; see ``backends.encoding.values``."""
        return encode_values(rows, len(self.history))

    def decode_values(self, values: pa.Array | pa.ChunkedArray) -> pa.RecordBatch:
        """Return the rows of stored values in the value's columns, whichever schema of the history wrote each.

        A null gives a row of nulls. See ``backends.encoding.values``.
        """
        return decode_values(values, self.value, self.history, self.zeros)

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
        """Return canonical JSON: equal schemas give equal text."""
        content: dict[str, Any] = {
            "key": spark_struct_json(list(self.key)),
            "value": spark_struct_json(list(self.value)),
        }
        if self.history:
            content["history"] = [spark_struct_json(list(earlier)) for earlier in self.history]
        if self.zeros:
            content["zeros"] = list(self.zeros)
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> StateSchema:
        """Read what ``to_json`` wrote; raises ``InvalidStateStoreArgument``."""
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidStateStoreArgument(f"A state schema is not JSON: {error}") from error
        match content:
            case {"key": key, "value": value}:
                history, zeros = content.get("history", []), content.get("zeros", [])
                if isinstance(history, list) and isinstance(zeros, list):
                    return cls(_schema(key), _schema(value), tuple(map(_schema, history)), tuple(map(str, zeros)))
        raise InvalidStateStoreArgument(_NEEDED)

    @property
    def id(self) -> str:
        """A short digest of the canonical JSON: the name of the schema's file."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


@lru_cache(256)
def _normalized(schema: pa.Schema) -> pa.Schema:
    return pa.schema(arrow_fields(spark_struct_json(list(schema))["fields"]))


def _schema(content: object) -> pa.Schema:
    match content:
        case {"fields": list(fields)}:
            return pa.schema(arrow_fields(fields))
    raise InvalidStateStoreArgument(_NEEDED)


def _refuse_map(name: str, data_type: pa.DataType) -> None:
    if pa.types.is_map(data_type):
        raise UnsupportedTypeError(f"Column {name!r} has the type {data_type}: a map has no order and cannot be a key.")
    for i in range(data_type.num_fields):
        child = data_type.field(i)
        _refuse_map(f"{name}.{child.name}", child.type)
