"""The schema of a column family: which columns its keys and values have, and which its values had before.

A schema file names types as Spark's ``StructType.json()`` does. So Spark's own tools can read the file, and a schema
does not depend on Arrow's spelling of a type (``large_string`` or ``string``; a session's time zone in a timestamp).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from backends.encoding.columns import arrow_fields, refuse_map, spark_struct_json, to_spark_type
from backends.encoding.values import decode_values, encode_values
from backends.exceptions import IncompatibleSchemaError, InvalidStateStoreArgument

_NEEDED = (
    "A state schema needs 'key' and 'value', each a struct with 'fields', and may have a 'history' of such structs."
)
MAX_HISTORY = (1 << 16) - 1
"""The most earlier schemas of one column family: a stored row names its schema by a number of 16 bits."""


@dataclass(frozen=True)
class StateSchema:
    """The columns of the keys and values of one column family. Types are normalised on construction.

    ``history`` are the schemas that values were written with before, the oldest first: a stored row has the number of
    its schema in ``[*history, value]``. ``backends.encoding.schema`` defines which schema may follow another. ``zeros``
    names the columns that begin with zero, not with null, in rows of earlier schemas: 0, an empty list, no bytes. They
    are state columns of aggregates, whose state of no rows is not null.

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
            _refuse_maps(f.name, f.type)
        if len(self.history) > MAX_HISTORY:
            raise InvalidStateStoreArgument(
                f"A schema has {len(self.history)} earlier ones; at most {MAX_HISTORY} are possible."
            )

    def to_json(self) -> str:
        """Return canonical JSON: equal schemas give equal strings."""
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


def _refuse_maps(name: str, data_type: pa.DataType) -> None:
    refuse_map(name, data_type)
    for i in range(data_type.num_fields):
        child = data_type.field(i)
        _refuse_maps(f"{name}.{child.name}", child.type)


# Rules for changing the schema of stored values.
#
# They are those of Spark's Avro encoding of state (``StateSchemaCompatibilityChecker``): fields are matched by name,
# may be added, removed and reordered, and numbers may get wider. Every earlier schema must be readable, not only the
# last one, because the store may still hold rows of any of them. Two more changes lose nothing and are allowed:
# decimals with more digits, and strings as binary.


_WIDENING = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())
"""Each of these types can be read as any type after it, as in Avro."""


def evolved_schema(stored: StateSchema, declared: StateSchema) -> StateSchema:
    """Return the schema to continue with: the declared columns, and the stored history plus the stored values' schema.

    The history of ``declared`` is ignored. Raises ``IncompatibleSchemaError``.
    """
    key = _same_key(stored, declared)
    if declared.value.equals(stored.value):
        return StateSchema(key, stored.value, stored.history)
    for earlier in (*stored.history, stored.value):
        problem = evolution_problem(earlier, declared.value)
        if problem is not None:
            raise IncompatibleSchemaError(
                f"[STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION] Schema evolution is not possible: {problem}. "
                f"Stored: {columns_in_words(earlier)}. Program: {columns_in_words(declared.value)}."
            )
    if len(stored.history) == MAX_HISTORY:
        raise IncompatibleSchemaError(
            f"[STATE_STORE_VALUE_SCHEMA_EVOLUTION_THRESHOLD_EXCEEDED] The schema has changed {MAX_HISTORY} times, "
            f"which is as often as it can. Stored: {columns_in_words(stored.value)}. "
            f"Program: {columns_in_words(declared.value)}."
        )
    return StateSchema(key, declared.value, (*stored.history, stored.value))


def evolved_outputs(stored: StateSchema, declared: StateSchema) -> StateSchema:
    """Return the schema of an aggregate after the program has added, removed or reordered outputs.

    State columns are named ``<output>.<function>.<part>``. An added output begins with the state of no rows, even if an
    earlier schema had the output: its old state is out of date. Raises ``IncompatibleSchemaError`` for an output whose
    meaning has changed.
    """
    if _other_columns(stored.value) != _other_columns(declared.value):
        raise IncompatibleSchemaError("other columns than those of outputs differ")
    old, new = _state_columns(stored.value), _state_columns(declared.value)
    functions = dict(map(_output_of, old))
    for output, function in map(_output_of, new):
        if functions.get(output, function) != function:
            raise IncompatibleSchemaError(
                f"output {output!r} was {functions[output]} and is {function}: give the new one another name"
            )
    for name in old.keys() & new.keys():
        if not old[name].equals(new[name]):
            raise IncompatibleSchemaError(
                f"state column {name!r} was {_type(old[name])} and is {_type(new[name])}: the input of output "
                f"{_output_of(name)[0]!r} has another type now"
            )
    if len(stored.history) == MAX_HISTORY:
        raise IncompatibleSchemaError(f"the outputs have changed {MAX_HISTORY} times, which is as often as they can")
    back = new.keys() - old.keys()
    history = tuple(_without_names(earlier, back) for earlier in stored.history)
    return StateSchema(stored.key, declared.value, (*history, stored.value), declared.zeros)


def _output_of(state_column: str) -> tuple[str, str]:
    output, function, _ = state_column.rsplit(".", 2)
    return output, function


def _state_columns(schema: Iterable[pa.Field]) -> dict[str, pa.DataType]:
    """Return the types of an aggregate's state columns by name. Sessions keep them in an array of structs."""
    columns: dict[str, pa.DataType] = {}
    for field in schema:
        if field.name.count(".") >= 2:
            columns[field.name] = field.type
        elif pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type):
            columns |= _state_columns(field.type.value_type)
    return columns


def _other_columns(schema: Iterable[pa.Field]) -> list[object]:
    columns: list[object] = []
    for field in schema:
        if field.name.count(".") >= 2:
            continue
        if pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type):
            columns.append((field.name, _other_columns(field.type.value_type)))
        else:
            columns.append((field.name, field.type))
    return columns


def _without_names(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """Rename columns of an earlier schema, so that the later column of the same name does not read them."""

    def renamed(field: pa.Field) -> pa.Field:
        if field.name in names:
            return field.with_name(f"{field.name}.-removed")
        if field.name.count(".") < 2 and pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type):
            element = field.type.value_field
            return field.with_type(pa.list_(element.with_type(pa.struct(map(renamed, element.type)))))
        return field

    return pa.schema(map(renamed, schema))


def _same_key(stored: StateSchema, declared: StateSchema) -> pa.Schema:
    """Return the key's columns, nullable where either schema says so: stored keys do not tell."""
    old, new = ([(f.name, nullable(f.type)) for f in schema.key] for schema in (stored, declared))
    if old != new:
        raise IncompatibleSchemaError(
            "[STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] The columns of a key cannot change. Stored: "
            f"{columns_in_words(stored.key)}. Program: {columns_in_words(declared.key)}."
        )
    return stored.key if stored.key.equals(declared.key) else pa.schema([pa.field(*column) for column in new])


def evolution_problem(earlier: pa.Schema, later: pa.Schema) -> str | None:
    """Return the reason why rows of ``earlier`` cannot be read as rows of ``later``; None if they can.

    Both schemas are normalised, as those of a ``StateSchema``.
    """
    return next(_problems("", list(earlier), list(later)), None)


def _problems(prefix: str, earlier: Sequence[pa.Field], later: Sequence[pa.Field]) -> Iterator[str]:
    by_name = {f.name: f for f in earlier}
    for field in later:
        name = prefix + field.name
        before = by_name.get(field.name)
        if before is not None:
            yield from _field_problems(name, before, field)
        elif not field.nullable:
            yield f"field {name!r} is new and not null; stored rows have none, so it must be nullable"


def _field_problems(name: str, before: pa.Field, field: pa.Field) -> Iterator[str]:
    if before.nullable and not field.nullable:
        yield f"field {name!r} was nullable, so that nulls may be stored, and is not any more"
    was, is_now = before.type, field.type
    if pa.types.is_struct(was) and pa.types.is_struct(is_now):
        yield from _problems(f"{name}.", list(was), list(is_now))
    elif pa.types.is_list(was) and pa.types.is_list(is_now):
        yield from _field_problems(f"{name}.element", was.value_field, is_now.value_field)
    elif pa.types.is_map(was) and pa.types.is_map(is_now):
        if not was.key_type.equals(is_now.key_type):
            old, new = _type(was.key_type), _type(is_now.key_type)
            yield f"the keys of map {name!r} were {old} and are {new}: they cannot change"
        yield from _field_problems(f"{name}.value", was.item_field, is_now.item_field)
    elif not (was.equals(is_now) or _is_wider(was, is_now)):
        yield f"field {name!r} was {_type(was)}, which cannot be read as {_type(is_now)}"


def _is_wider(was: pa.DataType, is_now: pa.DataType) -> bool:
    if was in _WIDENING and is_now in _WIDENING:
        return _WIDENING.index(was) < _WIDENING.index(is_now)
    if pa.types.is_decimal128(was) and pa.types.is_decimal128(is_now):
        return bool(was.scale == is_now.scale and was.precision < is_now.precision)
    return bool(pa.types.is_string(was) and pa.types.is_binary(is_now))


def nullable(kind: pa.DataType) -> pa.DataType:
    """Return the type with everything in it nullable, at every depth."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, nullable(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(nullable(kind.key_type), pa.field("value", nullable(kind.item_type)))
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", nullable(kind.value_type)))
    return kind


def nullable_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema whose columns are all nullable, also inside nested types."""
    return pa.schema([pa.field(f.name, nullable(f.type)) for f in schema])


def columns_in_words(schema: pa.Schema) -> str:
    """Return the columns of a schema, for messages."""
    columns = (f"{f.name} {_type(f.type)}{'' if f.nullable else ' not null'}" for f in schema)
    return f"({', '.join(columns)})"


def _type(kind: pa.DataType) -> str:
    """Return a type as Spark writes it in short."""
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{f.name}: {_type(f.type)}' for f in kind)}>"
    if pa.types.is_map(kind):
        return f"map<{_type(kind.key_type)}, {_type(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"array<{_type(kind.value_type)}>"
    return str(to_spark_type("", kind))
