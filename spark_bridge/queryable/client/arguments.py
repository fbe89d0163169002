"""Converts the arguments of a client: keys, bounds of scans, conditions, and the version of a call.

A key is a plain value if it has one column, else a tuple in the order of the operator's ``by``, or a dict by column
name. Many keys are a list of keys, a numpy array, a pandas or Polars series or frame, or an Arrow array or table. The
columns of frames and tables count by name; if none of them is a key column, they count by order.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from backends.encoding import user_values
from backends.encoding.key_groups import key_groups
from backends.encoding.keys import KEY_GROUP_BYTES, encode_keys, first_key_after
from backends.encoding.single_rows import KeyEncoder
from backends.exceptions import StateStoreError
from spark_bridge.exceptions import RequestError, UnknownKeyOrNamespaceError
from spark_bridge.queryable.protocol import WATERMARK, At, Comparison

# Many keys in the containers of pandas, Polars, numpy and Arrow, as columns.


@dataclass(frozen=True)
class NamedColumns:
    """Columns that have names."""

    names: list[str]
    columns: list[Any]


def key_columns(schema: pa.Schema, keys: Any) -> list[Any] | NamedColumns | None:
    """Return the columns of keys that come as columns; None for a sequence of single keys.

    All but columns of Arrow, which never change, are copied: they are part of an answer, and callers reuse arrays.
    """
    if isinstance(keys, str | bytes):
        raise UnknownKeyOrNamespaceError(f"{keys!r} is one key; many keys are a list of them: [{keys!r}].")
    if isinstance(keys, Mapping):
        return NamedColumns(
            list(keys), [c if isinstance(c, pa.Array | pa.ChunkedArray) else list(c) for c in keys.values()]
        )
    if isinstance(keys, pa.RecordBatch | pa.Table):
        return NamedColumns(keys.schema.names, keys.columns)
    if isinstance(keys, pa.Array | pa.ChunkedArray):
        return _of_array(schema, keys)
    # By the classes: pandas may be a module without names while another thread imports it, as Arrow does.
    if any(kind.__module__.partition(".")[0] == "pandas" for kind in type(keys).__mro__):
        columns = _of_pandas(schema, keys, sys.modules["pandas"])
        if columns is not None:
            return columns
    if isinstance(keys, np.ndarray):
        return _of_numpy(schema, keys)
    if hasattr(keys, "__arrow_c_stream__"):
        return _of_array(schema, pa.chunked_array(keys))
    if hasattr(keys, "__arrow_c_array__"):
        return _of_array(schema, pa.array(keys))
    if not isinstance(keys, Iterable):
        raise UnknownKeyOrNamespaceError(
            f"keys must be a list, an array or a table, not {keys!r} ({type(keys).__name__})."
        )
    return None


def _of_array(schema: pa.Schema, keys: Any) -> list[Any] | NamedColumns:
    if not pa.types.is_struct(keys.type) or (len(schema) == 1 and pa.types.is_struct(schema.field(0).type)):
        return NamedColumns([""], [keys])
    return NamedColumns([f.name for f in keys.type], keys.flatten())


def _of_pandas(schema: pa.Schema, keys: Any, pandas: Any) -> list[Any] | NamedColumns | None:
    if isinstance(keys, pandas.MultiIndex):
        keys = keys.to_frame(index=False)
    if isinstance(keys, pandas.DataFrame):
        if not set(schema.names) & set(keys.columns) and set(schema.names) <= set(keys.index.names):
            keys = keys.index.to_frame(index=False)
        columns = [_of_series(keys.iloc[:, i]) for i in range(keys.shape[1])]
        return NamedColumns([str(name) for name in keys.columns], columns)
    if isinstance(keys, pandas.Index):
        keys = keys.to_series(index=range(len(keys)))
    if isinstance(keys, pandas.Series):
        column = _of_series(keys)
        if isinstance(column, list):  # any Python objects: single keys, which may be tuples and dicts
            is_plain = len(schema) == 1 and not any(isinstance(key, tuple | dict) for key in column)
            return NamedColumns([""], [column]) if is_plain else None
        return _of_array(schema, column)
    return None


def _of_series(series: Any) -> Any:
    """Return a pandas column as an Arrow array, or the Python objects in it as a list; NaN is null, as in pandas."""
    if series.dtype == object:
        return [None if user_values.is_missing(value, nan=True) else value for value in series]
    return pa.array(series.copy(), from_pandas=True)


def _of_numpy(schema: pa.Schema, keys: Any) -> list[Any] | NamedColumns | None:
    if keys.dtype.names:
        return NamedColumns(list(keys.dtype.names), [pa.array(keys[name].copy()) for name in keys.dtype.names])
    if keys.dtype == object:
        return None
    if keys.ndim == 2:
        return NamedColumns([""] * keys.shape[1], [pa.array(column.copy()) for column in keys.T])
    if keys.ndim == 1:
        return NamedColumns([""], [pa.array(keys.copy())])
    raise UnknownKeyOrNamespaceError(f"Keys are an array of one or two dimensions, not of {keys.ndim}.")


@dataclass(frozen=True)
class KeyCodec:
    """The keys of one operator.

    ``stored`` are their columns as they are stored, ``by`` their names in the user's order. ``kind`` says of what
    ``operator`` is the name, for messages: a feature view has keys, too. Every method raises
    ``UnknownKeyOrNamespaceError`` for values that cannot be a key of these columns. The error names the key and the
    columns.
    """

    operator: str
    stored: pa.Schema
    by: tuple[str, ...]
    num_groups: int
    kind: str = "operator"

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
        """The function that returns the stored key of one key, in a few us for the columns' own Python types."""
        encode, by_columns = self.encode_plain, self._one_by_columns

        def encode_one(key: Any) -> bytes:
            encoded = encode(key)
            return by_columns(key) if encoded is None else encoded

        return encode_one

    @cached_property
    def encode_plain(self) -> Callable[[Any], bytes | None]:
        """The function of ``encode_one`` that returns None for keys of other than the columns' own Python types."""
        encoder = KeyEncoder.of(self.stored, self.num_groups)
        if encoder is None:
            return lambda key: None
        encode, width = encoder.encode, len(self.by)
        if self.is_in_order:
            return encode
        arranged = itemgetter(*(self.by.index(name) for name in self.stored.names))
        return lambda key: encode(arranged(key)) if type(key) is tuple and len(key) == width else None

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
        return f"{self.kind} {self.operator!r} (key columns {self.in_words})"

    @cached_property
    def columns_schema(self) -> pa.Schema:
        return pa.schema([pa.field(f.name, f.type) for f in self.schema])

    def _chosen(self, named: NamedColumns) -> list[Any]:
        """Return the columns of the key among named columns: by name, else by order."""
        missing = [name for name in self.by if named.names.count(name) != 1]
        if not missing:
            return [named.columns[named.names.index(name)] for name in self.by]
        if len(missing) == len(self.by) == len(named.names):
            return named.columns
        raise UnknownKeyOrNamespaceError(
            f"The columns {', '.join(map(repr, named.names)) or '(none)'} are not the key columns of {self.owner}: "
            f"{', '.join(map(repr, missing))} must be present once. Name them so, or give the key columns alone, in "
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
                    f"Key {wrong!r} is not a key of {self.owner}: give a tuple of {width} values in that order, or a "
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
                f"Key {key!r} is not a key of {self.owner}: a dict must have exactly these columns."
            )
        return tuple(key[name] for name in self.by)

    def column(self, field: pa.Field, values: Any) -> pa.Array:
        """Return values or an Arrow array as an array of the column's type, if nothing is lost by it."""
        if isinstance(values, list):
            return self._of_values(field, values)
        try:
            return user_values.cast_without_loss(values, field.type)
        except user_values.CAST_ERRORS as error:
            raise self._refused(field, values.type, error) from error

    def _of_values(self, field: pa.Field, values: list[Any]) -> pa.Array:
        try:
            return user_values.array_without_loss(values, field.type)
        except user_values.CAST_ERRORS as error:
            for value in values:
                try:
                    user_values.array_without_loss([value], field.type)
                except user_values.CAST_ERRORS as why:
                    raise self._refused(field, repr(value), why) from error
            raise self._refused(field, f"a list of {len(values)} values", error) from error

    def _refused(self, field: pa.Field, what: object, why: Exception) -> UnknownKeyOrNamespaceError:
        reason = str(why).split("\n", 1)[0].strip().removesuffix(".")
        return UnknownKeyOrNamespaceError(
            f"Key column {field.name!r} is {field.type}, and {what} cannot be converted to it without loss: {reason}. "
            f"Nothing was looked up in {self.owner}."
        )


def names_in_order(stored: pa.Schema, key_columns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the key columns in the user's order."""
    named = [name for name in key_columns if name in stored.names]
    return (*named, *(name for name in stored.names if name not in named))


# Bounds of a scan as users give them (``prefix``, ``start``, ``end``), as ranges of stored keys or as conditions.


ScanBounds: TypeAlias = tuple[bytes | None, bytes | None]
"""The first key, and the first one after the last; None for a missing bound."""
_STRING_END = 2
"""The bytes that the end of a string takes in a stored key."""


def key_range(
    codec: KeyCodec, window: str | None, prefix: Any, start: Any, end: Any
) -> tuple[ScanBounds, list[tuple[Any, ...]]]:
    """Return bounds on the key, in the order of ``by``: as a range of bytes, and as extra conditions.

    The range is without key group. If a window is stored before columns that precede it in ``by``, only whole leading
    columns are possible, as conditions. Raises ``RequestError`` and ``UnknownKeyOrNamespaceError``.
    """
    if codec.is_in_order:
        of_prefix: ScanBounds = (None, None) if prefix is None else range_of_prefix(codec, prefix)
        key_bounds = (None if start is None else bound(codec, start), None if end is None else bound(codec, end))
        first, behind = intersection(of_prefix, key_bounds)
        if first is not None and behind is not None and behind < first:
            bounds = {"prefix": prefix, "start": start, "end": end}
            named = ", ".join(f"{name}={value!r}" for name, value in bounds.items() if value is not None)
            raise RequestError(f"No key of {codec.owner} can be within {named}: these bounds end before they start.")
        return (first, behind), []
    conditions: list[tuple[Any, ...]] = []
    if prefix is not None:
        pairs = zip(codec.by, first_columns(codec, prefix), strict=False)
        conditions += [(name, "is null") if value is None else (name, "=", value) for name, value in pairs]
    for values, operator in ((start, ">="), (end, "<")):
        if values is None:
            continue
        columns = first_columns(codec, values)
        if len(columns) > 1 or codec.by[0] == window:
            raise RequestError(
                f"Operator {codec.operator!r} keeps its keys in the order {', '.join(codec.stored.names)}, so that "
                f"start= and end= can only be of its first key column {codec.by[0]!r}; use where= for others."
            )
        conditions.append((codec.by[0], operator, columns[0]))
    return (None, None), conditions


def range_of_prefix(codec: KeyCodec, values: Any) -> ScanBounds:
    """Return the range of the keys that begin with ``values``.

    A tuple has whole columns: ``("ab",)`` are the keys whose first column is "ab". A plain string is the beginning of
    the first column: "ab" are "ab", "abc" and so on.
    """
    encoded = bound(codec, values)
    if isinstance(values, str | bytes) and user_values.is_string(codec.schema.field(0).type):
        encoded = encoded[:-_STRING_END]
    return encoded, first_key_after(encoded)


def bound(codec: KeyCodec, values: Any) -> bytes:
    """Return one or more first columns of a key as they are stored, without the key group."""
    first = first_columns(codec, values)
    fields = [codec.columns_schema.field(i) for i in range(len(first))]
    arrays = [codec.column(field, [value]) for field, value in zip(fields, first, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    encoded: bytes = encode_keys(batch, np.zeros(1, np.uint16))[0].as_py()
    return encoded[KEY_GROUP_BYTES:]


def first_columns(codec: KeyCodec, values: Any) -> tuple[Any, ...]:
    """Return the values of the first columns of a key; ``values`` are one value, a tuple or a dict.

    Raises ``UnknownKeyOrNamespaceError`` if they are not the first columns.
    """
    first = codec.schema.field(0)
    if isinstance(values, dict) and not (pa.types.is_struct(first.type) and first.name not in values):
        names = codec.by[: len(values)]
        if set(values) != set(names):
            raise UnknownKeyOrNamespaceError(
                f"{values!r} are not the first columns of a key of {codec.owner}: give these from the first one on."
            )
        return tuple(values[name] for name in names)
    parts = values if isinstance(values, tuple) else (values,)
    if not 1 <= len(parts) <= len(codec.by):
        raise UnknownKeyOrNamespaceError(
            f"{values!r} are not the first columns of a key of {codec.owner}: it has {len(codec.by)}."
        )
    return parts


def intersection(one: ScanBounds, other: ScanBounds) -> ScanBounds:
    """Return the range of the keys that are in both ranges."""
    starts = [start for start, _ in (one, other) if start is not None]
    ends = [end for _, end in (one, other) if end is not None]
    return max(starts, default=None), min(ends, default=None)


# Conditions on rows as users give them (``where=``), in the form that hosts take.


WhereCondition = Comparison | tuple[Any, ...]
"""A ``Comparison``, or ``(column, operator, value)``."""
OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "in", "is null", "is not null")
_BYTES = (bytes, bytearray, memoryview)
_ALSO = {"==": "=", "<>": "!="}


def comparisons(where: Sequence[WhereCondition] | None, types: Mapping[str, pa.DataType]) -> list[Comparison]:
    """Return conditions in the form that hosts take. ``types`` are those of the columns. Raises ``RequestError``."""
    return [_comparison(condition, types) for condition in where or ()]


def equalities(conditions: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the conditions of ``find``: for each column a value, a list of accepted values, or None for null."""
    where: list[tuple[Any, ...]] = []
    for column, value in conditions.items():
        if value is None:
            where.append((column, "is null"))
        elif isinstance(value, list | tuple | set | frozenset):
            where.append((column, "in", list(value)))
        else:
            where.append((column, "=", value))
    return where


def require_index(operator: str, indexed: Collection[str], columns: Collection[str]) -> None:
    """Raise ``RequestError`` if no condition of ``find`` is on a column that has an index."""
    if not set(columns) & set(indexed):
        having = f"only {', '.join(map(repr, indexed))} have one" if indexed else "none of its columns has one"
        example = ", ".join(f"({column!r}, '=', ...)" for column in columns) or "..."
        raise RequestError(
            f"find({operator!r}) needs a condition on a column with an index, and {having}. "
            f"scan({operator!r}, where=[{example}]) reads all rows; index= of aggregate declares an index."
        )


def _comparison(condition: WhereCondition, types: Mapping[str, pa.DataType]) -> Comparison:
    if isinstance(condition, Comparison):
        return condition
    if not isinstance(condition, tuple | list) or len(condition) not in (2, 3) or not isinstance(condition[0], str):
        raise RequestError(
            f"where: {condition!r} is not a condition; give (column, operator, value), as ('n', '>', 10)."
        )
    column, operator, *operand = condition
    name: Any = _ALSO.get(operator, operator)
    name = name.lower() if isinstance(name, str) else name
    if name not in OPERATORS:
        raise RequestError(f"where: {operator!r} is not an operator; there are {', '.join(OPERATORS)}.")
    if (name in ("is null", "is not null")) != (not operand):
        raise RequestError(f"where: {condition!r}: 'is null' and 'is not null' take no value, all others one.")
    if name == "in" and (isinstance(operand[0], (str, *_BYTES)) or not isinstance(operand[0], Iterable)):
        raise RequestError(f"where: {condition!r}: 'in' takes a list of values; give ({column!r}, 'in', {operand!r}).")
    values = list(operand[0]) if name == "in" else operand
    if any(user_values.is_missing(value) for value in values):
        raise RequestError(f"where: {condition!r} compares with null, which nothing is equal to; use 'is null'.")
    kind = types.get(column)
    if kind is not None and pa.types.is_binary(kind) and any(isinstance(v, _BYTES) for v in values):
        given_bytes = [v.encode() if isinstance(v, str) else v for v in values]
        wrong = next((v for v in given_bytes if not isinstance(v, _BYTES)), None)
        if wrong is not None:
            raise _refused(wrong)
        return Comparison(column, name, [base64.b64encode(v).decode() for v in given_bytes], True)
    return Comparison(column, name, [json_value(value, kind) for value in values])


def json_value(value: Any, kind: pa.DataType | None) -> str | int | float | bool:
    """Return a value for JSON, or as a string that hosts read as the column's type. Raises ``RequestError``."""
    if isinstance(value, pa.Scalar):
        value = value.as_py()
    if isinstance(value, np.datetime64 | dt.datetime) and kind is not None and pa.types.is_timestamp(kind):
        try:
            value = user_values.plain_value(value, kind, lossless=True)
        except user_values.CAST_ERRORS as error:
            raise RequestError(f"where: {value!r} is not a {kind}: {error}") from error
    if isinstance(value, np.generic):
        value = value.astype("M8[us]").item() if isinstance(value, np.datetime64) else value.item()
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 63 else str(int(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, dt.datetime):
        return _time_text(value, kind)
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise _refused(value)


def _refused(value: Any) -> RequestError:
    return RequestError(f"where: {value!r} ({type(value).__name__}) cannot be compared with by the hosts.")


def _time_text(value: dt.datetime, kind: pa.DataType | None) -> str:
    """Return a time as Arrow reads it: with an offset if the column has a zone. Without a zone, a time is UTC."""
    if value.tzinfo is not None:
        value = value.astimezone(dt.timezone.utc)
    has_zone = value.tzinfo is not None if kind is None or not pa.types.is_timestamp(kind) else kind.tz is not None
    return value.replace(tzinfo=dt.timezone.utc if has_zone else None).isoformat()


# The version that a call asks for: its isolation level, or an exact version.


COMPLETED = At()
ISOLATIONS = ("completed", "latest")
AT_WATERMARK = -(1 << 63)
"""The moment of ``WATERMARK``, until the client knows the watermark. No client sends it."""


def requested_version(
    isolation: str, version: int | None, moment: Any = None, staleness: str | int | None = None
) -> At:
    """Return the version that a call asks for, and the time of its rolling aggregates (None: now).

    ``staleness`` is how many versions old the answer of a copy may be, as "1 version". Raises ``RequestError`` for a
    version, a time or a staleness that there cannot be.
    """
    at = _version_of(isolation, version)
    if staleness is not None:
        if at != COMPLETED:
            raise RequestError(f"staleness={staleness!r} needs isolation='completed', and no version=.")
        at = replace(at, staleness=_versions_behind(staleness))
    if isinstance(moment, str) and moment == WATERMARK:
        if at.isolation == "latest":
            raise RequestError(
                "at='watermark' needs a completed version, whose watermark is known: leave isolation='latest' out."
            )
        return replace(at, moment=AT_WATERMARK)
    return at if moment is None else replace(at, moment=_microseconds(moment))


def _versions_behind(staleness: str | int) -> int:
    number, _, unit = str(staleness).partition(" ")
    if isinstance(staleness, bool) or not number.isdecimal() or unit not in ("", "version", "versions"):
        raise RequestError(f"staleness={staleness!r} is not a number of versions, such as '1 version'.")
    return int(number)


def datetime64_of(time: dt.datetime | np.datetime64) -> np.datetime64:
    """Return a time in UTC; times without a zone are UTC."""
    if isinstance(time, dt.datetime) and time.tzinfo is not None:
        time = time.astimezone(dt.timezone.utc).replace(tzinfo=None)
    return np.datetime64(time) if isinstance(time, np.datetime64) else np.datetime64(time, "us")


def _microseconds(moment: Any) -> int:
    if isinstance(moment, dt.datetime | np.datetime64) and not np.isnat(us := datetime64_of(moment)):
        return int(us.astype("datetime64[us]").astype(np.int64))
    raise RequestError(f"at={moment!r} is not a time; give a datetime, in UTC if it has no zone, or 'watermark'.")


def _version_of(isolation: str, version: int | None) -> At:
    if version is not None:
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise RequestError(f"version={version!r} is not a version; versions are numbers from 0 on.")
        if isolation != "completed":
            raise RequestError(f"version={version} already selects the version; leave isolation={isolation!r} out.")
        return At("version", version)
    if isolation == "completed":
        return COMPLETED
    if isolation == "latest":
        return At("latest")
    raise RequestError(f"isolation={isolation!r} is none; there are {', '.join(map(repr, ISOLATIONS))}, or version=.")


def check_limit(limit: int | None) -> None:
    """Raise ``RequestError`` for a value that cannot be a limit."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise RequestError(f"limit={limit!r} is not a number of rows.")
