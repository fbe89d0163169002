"""Keys as users give them, and as they are stored: whatever has values or columns in, one pass of Arrow and numpy, bytes out.

A key is a plain value if it has one column, else a tuple in the order of the operator's ``by``, or a dict by column name.
Many keys are a list of these, a numpy array, a pandas or Polars series or frame, or anything of Arrow's. Frames and tables
count by the names of their columns, or where none of them is a key column, by order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import GROUP_BYTES, encode_keys
from backends.encoding.single_rows import KeyEncoder
from backends.exceptions import StateStoreError
from spark_bridge.exceptions import UnknownKeyOrNamespaceError

_STRING_END = 2
"""How many bytes the end of a string takes in a key."""
_INT64_DIGITS = 19
_MAX_DIGITS = 38

Range = tuple[bytes | None, bytes | None]
"""The first key and the one behind the last; None where there is no such bound."""


@dataclass(frozen=True)
class KeyCodec:
    """The keys of one operator. ``stored`` are their columns as they are stored, ``by`` their names in the user's order.

    Every method raises ``UnknownKeyOrNamespaceError`` for what cannot be a key of these columns: it says which key, and
    what the columns are.
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
        """The stored key of one key, in a few microseconds where its values are of the columns' own Python types."""
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
        """The stored keys of columns that ``columns`` has made."""
        stored = columns if self.is_in_order else columns.select(self.stored.names)
        try:
            return encode_keys(stored, key_groups(stored, self.num_groups))
        except StateStoreError as error:
            raise UnknownKeyOrNamespaceError(f"The keys of {self._whose} cannot be encoded: {error}") from error

    def columns(self, keys: Any) -> pa.RecordBatch:
        """Many keys as columns, in the order of ``by``."""
        columns = _columns_of(self.schema, keys)
        if isinstance(columns, _Named):
            columns = self._chosen(columns)
        if columns is None:
            return self._of_rows(keys.tolist() if isinstance(keys, np.ndarray) else list(keys))
        arrays = [self._column(f, c) for f, c in zip(self.schema, columns, strict=True)]
        lengths = {len(a) for a in arrays}
        if len(lengths) > 1:
            raise UnknownKeyOrNamespaceError(f"The key columns of {self._whose} have different lengths: {lengths}.")
        return pa.RecordBatch.from_arrays(arrays, schema=self.columns_schema)

    @property
    def _whose(self) -> str:
        return f"operator {self.operator!r} (key columns {self.in_words})"

    @cached_property
    def columns_schema(self) -> pa.Schema:
        """The schema of what ``columns`` returns."""
        return pa.schema([pa.field(f.name, f.type) for f in self.schema])

    def _chosen(self, given: _Named) -> list[Any]:
        """The columns of the key among named ones: by name, else by order."""
        missing = [name for name in self.by if given.names.count(name) != 1]
        if not missing:
            return [given.columns[given.names.index(name)] for name in self.by]
        if len(missing) == len(self.by) == len(given.names):
            return given.columns
        raise UnknownKeyOrNamespaceError(
            f"The columns {', '.join(map(repr, given.names)) or '(none)'} are not the key columns of {self._whose}: "
            f"{', '.join(map(repr, missing))} must be there once. Name them so, or give the key columns alone, in that order."
        )

    def _of_rows(self, keys: list[Any]) -> pa.RecordBatch:
        """Keys that are Python values, tuples or dicts."""
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
                    f"Key {wrong!r} is no key of {self._whose}: give a tuple of {width} values in that order, or a dict by name."
                )
            columns = [list(values) for values in zip(*keys, strict=True)] if keys else [[]] * width
        arrays = [self._column(f, values) for f, values in zip(self.schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.columns_schema)

    def _one_column(self, field: pa.Field, key: Any) -> Any:
        """The value of a key of one column that may be in a tuple, or in a dict under the column's name."""
        if isinstance(key, tuple) and len(key) == 1:
            return key[0]
        if isinstance(key, dict) and (list(key) == [field.name] or not pa.types.is_struct(field.type)):
            return self._by_name(key)[0]
        return key

    def _by_name(self, key: Mapping[str, Any]) -> tuple[Any, ...]:
        if set(key) != set(self.by):
            raise UnknownKeyOrNamespaceError(
                f"Key {key!r} is no key of {self._whose}: a dict must have exactly these columns."
            )
        return tuple(key[name] for name in self.by)

    def _column(self, field: pa.Field, given: Any) -> pa.Array:
        """Values or an Arrow array as an array of the column's type, if nothing is lost by it."""
        if isinstance(given, list):
            return self._of_values(field, given)
        try:
            return converted(given, field.type)
        except _REFUSED as error:
            raise self._refused(field, given.type, error) from error

    def _of_values(self, field: pa.Field, values: list[Any]) -> pa.Array:
        if pa.types.is_struct(field.type):
            values = [_in_dict(field.type, value) for value in values]
        try:
            # Of inferred type first: given one, Arrow would make 1 of 1.5.
            return converted(pa.array(values), field.type)
        except _REFUSED as error:
            # Perhaps only because they are of several types.
            arrays = []
            for value in values:
                try:
                    arrays.append(converted(pa.array([value]), field.type))
                except _REFUSED as why:
                    raise self._refused(field, repr(value), why) from error
            return pa.concat_arrays(arrays)

    def _refused(self, field: pa.Field, what: object, why: Exception) -> UnknownKeyOrNamespaceError:
        return UnknownKeyOrNamespaceError(
            f"Key column {field.name!r} is {field.type}, and {what} is not without loss: {_first_line(why)} "
            f"The keys of {self._whose} cannot be looked up."
        )

    # -- ranges --------------------------------------------------------------------------------

    def bound(self, values: Any) -> bytes:
        """The first columns of a key as they are stored, without the key group: of all of them, or fewer."""
        given = self.first_columns(values)
        return self._encoded_columns(given)

    def prefix(self, values: Any) -> Range:
        """The range of the keys that begin so.

        A tuple has whole columns: ``("ab",)`` are the keys whose first column is "ab". A plain string is the beginning of the first
        column: "ab" are "ab", "abc" and so on.
        """
        encoded = self.bound(values)
        first = self.schema.field(0).type
        if isinstance(values, str | bytes) and _is_string(first):
            encoded = encoded[:-_STRING_END]
        return encoded, _behind(encoded)

    def first_columns(self, values: Any) -> tuple[Any, ...]:
        """The values of the first columns of a key, of which ``values`` are one, a tuple or a dict."""
        first = self.schema.field(0)
        if isinstance(values, dict) and not (pa.types.is_struct(first.type) and first.name not in values):
            names = self.by[: len(values)]
            if set(values) != set(names):
                raise UnknownKeyOrNamespaceError(
                    f"{values!r} are not the first columns of a key of {self._whose}: give these from the first one on."
                )
            return tuple(values[name] for name in names)
        given = values if isinstance(values, tuple) else (values,)
        if not 1 <= len(given) <= len(self.by):
            raise UnknownKeyOrNamespaceError(
                f"{values!r} are not the first columns of a key of {self._whose}: it has {len(self.by)}."
            )
        return given

    def _encoded_columns(self, values: tuple[Any, ...]) -> bytes:
        fields = self.columns_schema
        arrays = [self._column(fields.field(i), [value]) for i, value in enumerate(values)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema([fields.field(i) for i in range(len(values))]))
        encoded: bytes = encode_keys(batch, np.zeros(1, np.uint16))[0].as_py()
        return encoded[GROUP_BYTES:]


def narrower(one: Range, other: Range) -> Range:
    """The keys that are in both ranges."""
    starts = [start for start, _ in (one, other) if start is not None]
    ends = [end for _, end in (one, other) if end is not None]
    return max(starts, default=None), min(ends, default=None)


# -- what is given -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Named:
    """Columns that have names."""

    names: list[str]
    columns: list[Any]


def _columns_of(schema: pa.Schema, keys: Any) -> list[Any] | _Named | None:
    """Keys that come as columns; None for a sequence of single keys."""
    if isinstance(keys, str | bytes):
        raise UnknownKeyOrNamespaceError(f"{keys!r} is one key; many keys are a list of them: [{keys!r}].")
    if isinstance(keys, Mapping):
        return _Named(list(keys), [c if isinstance(c, pa.Array | pa.ChunkedArray) else list(c) for c in keys.values()])
    if isinstance(keys, pa.RecordBatch | pa.Table):
        return _Named(keys.schema.names, keys.columns)
    if isinstance(keys, pa.Array | pa.ChunkedArray):
        return _of_array(schema, keys)
    pandas = sys.modules.get("pandas")
    if pandas is not None:
        found = _of_pandas(schema, keys, pandas)
        if found is not None:
            return found
    if isinstance(keys, np.ndarray):
        return _of_numpy(schema, keys)
    if hasattr(keys, "__arrow_c_stream__"):
        return _of_array(schema, pa.chunked_array(keys))
    if hasattr(keys, "__arrow_c_array__"):
        return _of_array(schema, pa.array(keys))
    if not isinstance(keys, Iterable):
        raise UnknownKeyOrNamespaceError(
            f"{keys!r} ({type(keys).__name__}) are no keys; give a list, an array or a table."
        )
    return None


def _of_array(schema: pa.Schema, keys: Any) -> list[Any] | _Named:
    if not pa.types.is_struct(keys.type) or (len(schema) == 1 and pa.types.is_struct(schema.field(0).type)):
        return _Named([""], [keys])
    return _Named([f.name for f in keys.type], keys.flatten())


def _of_pandas(schema: pa.Schema, keys: Any, pandas: Any) -> list[Any] | _Named | None:
    if isinstance(keys, pandas.MultiIndex):
        keys = keys.to_frame(index=False)
    if isinstance(keys, pandas.DataFrame):
        if not set(schema.names) & set(keys.columns) and set(schema.names) <= set(keys.index.names):
            keys = keys.index.to_frame(index=False)
        table = pa.Table.from_pandas(keys.reset_index(drop=True), preserve_index=False)
        return _Named([str(name) for name in keys.columns], table.columns)
    if isinstance(keys, pandas.Index):
        keys = keys.to_series(index=range(len(keys)))
    if isinstance(keys, pandas.Series):
        if keys.dtype == object:
            return None  # whatever Python objects they are: single keys
        return _of_array(schema, pa.array(keys, from_pandas=True))
    return None


def _of_numpy(schema: pa.Schema, keys: Any) -> list[Any] | _Named | None:
    if keys.dtype.names:
        return _Named(list(keys.dtype.names), [pa.array(np.ascontiguousarray(keys[name])) for name in keys.dtype.names])
    if keys.dtype == object:
        return None
    if keys.ndim == 2:
        return _Named([""] * keys.shape[1], [pa.array(np.ascontiguousarray(column)) for column in keys.T])
    if keys.ndim == 1:
        return _Named([""], [pa.array(keys)])
    raise UnknownKeyOrNamespaceError(f"Keys are an array of one or two dimensions, not of {keys.ndim}.")


# -- types -------------------------------------------------------------------------------------


class _OtherType(ValueError):
    """A value is of another kind than its column."""


_REFUSED = (pa.ArrowException, _OtherType, TypeError, ValueError, OverflowError, NotImplementedError)


def converted(given: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """An array of a state column's type, if no value changes by it; numbers are not read from strings.

    Raises what Arrow raises, and ``ValueError``.
    """
    if isinstance(given, pa.ChunkedArray):
        given = given.combine_chunks()
        if isinstance(given, pa.ChunkedArray):  # what some releases of Arrow give
            given = given.chunk(0) if given.num_chunks else pa.array([], given.type)
    if isinstance(given, pa.ExtensionArray):
        given = given.storage
    if pa.types.is_dictionary(given.type):
        given = given.dictionary_decode()
    if given.type == kind:
        return given
    _check_kind(given.type, kind)
    if pa.types.is_integer(given.type) and pa.types.is_decimal(kind):
        # Straight there it must have room for any integer.
        given = given.cast(pa.decimal128(min(_MAX_DIGITS, _INT64_DIGITS + 1 + max(0, kind.scale)), max(0, kind.scale)))
    made = given.cast(kind)
    if pa.types.is_date(kind) and pa.types.is_timestamp(given.type) and not made.cast(given.type).equals(given):
        raise _OtherType("these have a time of day.")
    return made


def _check_kind(given: pa.DataType, kind: pa.DataType) -> None:
    """Refuse conversions that Arrow makes and nobody means, such as of strings to numbers."""
    if pa.types.is_null(given):
        return
    there, here = _kind_of(kind), _kind_of(given)
    if there != here:
        raise _OtherType(f"{given} is another kind of type.")
    if there == "struct":
        names = [f.name for f in kind]
        if sorted(f.name for f in given) != sorted(names):
            raise _OtherType(f"its fields must be {', '.join(names)}.")
        for f in kind:
            _check_kind(given.field(given.get_field_index(f.name)).type, f.type)
    elif there == "list":
        _check_kind(given.value_type, kind.value_type)


def _kind_of(kind: pa.DataType) -> str:
    types = pa.types
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_date(kind) or types.is_timestamp(kind):
        return "time"
    if types.is_struct(kind):
        return "struct"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "list"
    return "string" if _is_string(kind) else str(kind)


def _is_string(kind: pa.DataType) -> bool:
    types = pa.types
    is_text = types.is_string(kind) or types.is_large_string(kind) or str(kind) in ("string_view", "binary_view")
    return bool(is_text or types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))


def _in_dict(kind: pa.DataType, value: Any) -> Any:
    """A struct that is given as a tuple of its fields."""
    names = [f.name for f in kind]
    if isinstance(value, tuple | list) and len(value) == len(names):
        return dict(zip(names, value, strict=True))
    return value


def _behind(prefix: bytes) -> bytes | None:
    """The first bytes that are behind all that begin with ``prefix``."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def _first_line(error: Exception) -> str:
    text = str(error).split("\n", 1)[0].strip()
    return text if text.endswith(".") else text + "."


def names_in_order(stored: pa.Schema, key_columns: Sequence[str]) -> tuple[str, ...]:
    """The names of key columns in the order in which the user names them."""
    named = [name for name in key_columns if name in stored.names]
    return (*named, *(name for name in stored.names if name not in named))
