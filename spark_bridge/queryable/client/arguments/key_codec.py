"""Keys as users give them, as stored keys: from values or columns, in one pass of Arrow and numpy.

A key is a plain value if it has one column, else a tuple in the order of the operator's ``by``, or a dict by column
name. Many keys are a list of keys, a numpy array, a pandas or Polars series or frame, or an Arrow array or table. The
columns of frames and tables count by name; if none of them is a key column, they count by order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from backends.encoding.given_values import CAST_ERRORS, array_without_loss, cast_without_loss
from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.single_rows import KeyEncoder
from backends.exceptions import StateStoreError
from spark_bridge.exceptions import UnknownKeyOrNamespaceError
from spark_bridge.queryable.client.arguments.key_containers import NamedColumns, key_columns


@dataclass(frozen=True)
class KeyCodec:
    """The keys of one operator.

    ``stored`` are their columns as they are stored, ``by`` their names in the user's order. Every method raises
    ``UnknownKeyOrNamespaceError`` for values that cannot be a key of these columns. The error says which key, and which
    columns.
    """

    operator: str
    stored: pa.Schema
    by: tuple[str, ...]
    num_groups: int

    @cached_property
    def schema(self) -> pa.Schema:
        """The key's columns in the order of ``by``."""
        return pa.schema([self.stored.field(name) for name in self.by])

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the columns are stored in the order of ``by``, so that bounds on the key are ranges of bytes."""
        return tuple(self.stored.names) == self.by

    @cached_property
    def in_words(self) -> str:
        """The columns, for messages."""
        return ", ".join(f"{f.name}: {f.type}" for f in self.schema)

    # -- one key -------------------------------------------------------------------------------

    @cached_property
    def encode_one(self) -> Callable[[Any], bytes]:
        """The function that returns the stored key of one key.

        It takes a few microseconds for values of the columns' own Python types.
        """
        encoder = KeyEncoder.of(self.stored, self.num_groups)
        by_columns = self._one_by_columns
        if encoder is None:
            return by_columns
        encode, width = encoder.encode, len(self.by)
        arranged = None if self.is_in_order else itemgetter(*(self.by.index(name) for name in self.stored.names))

        def encode_one(key: Any) -> bytes:
            given = key
            if arranged is not None:
                given = arranged(key) if type(key) is tuple and len(key) == width else None
            encoded = None if given is None and arranged is not None else encode(given)
            return by_columns(key) if encoded is None else encoded

        return encode_one

    def _one_by_columns(self, key: Any) -> bytes:
        encoded: bytes = self.encode(self.columns([key]))[0].as_py()
        return encoded

    # -- many keys -----------------------------------------------------------------------------

    def encode(self, columns: pa.RecordBatch) -> pa.BinaryArray:
        """Return the stored keys of the columns that ``columns`` returns."""
        stored = columns if self.is_in_order else columns.select(self.stored.names)
        try:
            return encode_keys(stored, key_groups(stored, self.num_groups))
        except StateStoreError as error:
            raise UnknownKeyOrNamespaceError(f"The keys of {self.owner} cannot be encoded: {error}") from error

    def columns(self, keys: Any) -> pa.RecordBatch:
        """Return many keys as columns, in the order of ``by``."""
        columns = key_columns(self.schema, keys)
        if isinstance(columns, NamedColumns):
            columns = self._chosen(columns)
        if columns is None:
            return self._of_rows(keys.tolist() if isinstance(keys, np.ndarray) else list(keys))
        arrays = [self.column(f, c) for f, c in zip(self.schema, columns, strict=True)]
        lengths = {len(a) for a in arrays}
        if len(lengths) > 1:
            raise UnknownKeyOrNamespaceError(f"The key columns of {self.owner} have different lengths: {lengths}.")
        return pa.RecordBatch.from_arrays(arrays, schema=self.columns_schema)

    @property
    def owner(self) -> str:
        """The operator and its key columns, for messages."""
        return f"operator {self.operator!r} (key columns {self.in_words})"

    @cached_property
    def columns_schema(self) -> pa.Schema:
        """The schema of what ``columns`` returns."""
        return pa.schema([pa.field(f.name, f.type) for f in self.schema])

    def _chosen(self, given: NamedColumns) -> list[Any]:
        """Return the columns of the key among named columns: by name, else by order."""
        missing = [name for name in self.by if given.names.count(name) != 1]
        if not missing:
            return [given.columns[given.names.index(name)] for name in self.by]
        if len(missing) == len(self.by) == len(given.names):
            return given.columns
        raise UnknownKeyOrNamespaceError(
            f"The columns {', '.join(map(repr, given.names)) or '(none)'} are not the key columns of {self.owner}: "
            f"{', '.join(map(repr, missing))} must be there once. Name them so, or give the key columns alone, in "
            "that order."
        )

    def _of_rows(self, keys: list[Any]) -> pa.RecordBatch:
        """Return the columns of keys that are Python values, tuples or dicts."""
        kinds = set(map(type, keys))
        width = len(self.by)
        if width == 1:
            field = self.schema.field(0)
            if any(issubclass(kind, tuple | dict) for kind in kinds):
                keys = [self._one_column(field, key) for key in keys]
            columns = [keys]
        else:
            if any(issubclass(kind, dict) for kind in kinds):
                keys = [self._by_name(key) if isinstance(key, dict) else key for key in keys]
            if any(not issubclass(kind, tuple | list | dict) for kind in kinds) or set(map(len, keys)) - {width}:
                wrong = next(k for k in keys if not isinstance(k, tuple | list) or len(k) != width)
                raise UnknownKeyOrNamespaceError(
                    f"Key {wrong!r} is no key of {self.owner}: give a tuple of {width} values in that order, or a "
                    "dict by name."
                )
            columns = [list(values) for values in zip(*keys, strict=True)] if keys else [[]] * width
        arrays = [self.column(f, values) for f, values in zip(self.schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.columns_schema)

    def _one_column(self, field: pa.Field, key: Any) -> Any:
        """Return the value of a key of one column, which may be in a tuple, or in a dict under the column's name."""
        if isinstance(key, tuple) and len(key) == 1:
            return key[0]
        if isinstance(key, dict) and (list(key) == [field.name] or not pa.types.is_struct(field.type)):
            return self._by_name(key)[0]
        return key

    def _by_name(self, key: Mapping[str, Any]) -> tuple[Any, ...]:
        if set(key) != set(self.by):
            raise UnknownKeyOrNamespaceError(
                f"Key {key!r} is no key of {self.owner}: a dict must have exactly these columns."
            )
        return tuple(key[name] for name in self.by)

    def column(self, field: pa.Field, given: Any) -> pa.Array:
        """Return values or an Arrow array as an array of the column's type, if nothing is lost by it."""
        if isinstance(given, list):
            return self._of_values(field, given)
        try:
            return cast_without_loss(given, field.type)
        except CAST_ERRORS as error:
            raise self._refused(field, given.type, error) from error

    def _of_values(self, field: pa.Field, values: list[Any]) -> pa.Array:
        try:
            return array_without_loss(values, field.type)
        except CAST_ERRORS as error:
            for value in values:
                try:
                    array_without_loss([value], field.type)
                except CAST_ERRORS as why:
                    raise self._refused(field, repr(value), why) from error
            raise self._refused(field, f"a list of {len(values)} values", error) from error

    def _refused(self, field: pa.Field, what: object, why: Exception) -> UnknownKeyOrNamespaceError:
        return UnknownKeyOrNamespaceError(
            f"Key column {field.name!r} is {field.type}, and {what} cannot be converted to it without loss: "
            f"{_first_line(why)} Nothing was looked up in {self.owner}."
        )


def _first_line(error: Exception) -> str:
    text = str(error).split("\n", 1)[0].strip()
    return text if text.endswith(".") else text + "."


def names_in_order(stored: pa.Schema, key_columns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the key columns in the user's order."""
    named = [name for name in key_columns if name in stored.names]
    return (*named, *(name for name in stored.names if name not in named))
