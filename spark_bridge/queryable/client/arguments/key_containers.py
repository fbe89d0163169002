"""Many keys in the containers of pandas, Polars, numpy and Arrow, as columns."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from backends.encoding.given_values import is_missing
from spark_bridge.exceptions import UnknownKeyOrNamespaceError


@dataclass(frozen=True)
class NamedColumns:
    """Columns that have names."""

    names: list[str]
    columns: list[Any]


def key_columns(schema: pa.Schema, keys: Any) -> list[Any] | NamedColumns | None:
    """Return the columns of keys that come as columns; None for a sequence of single keys."""
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
        return [None if is_missing(value, nan=True) else value for value in series]
    return pa.array(series, from_pandas=True)


def _of_numpy(schema: pa.Schema, keys: Any) -> list[Any] | NamedColumns | None:
    if keys.dtype.names:
        return NamedColumns(
            list(keys.dtype.names), [pa.array(np.ascontiguousarray(keys[name])) for name in keys.dtype.names]
        )
    if keys.dtype == object:
        return None
    if keys.ndim == 2:
        return NamedColumns([""] * keys.shape[1], [pa.array(np.ascontiguousarray(column)) for column in keys.T])
    if keys.ndim == 1:
        return NamedColumns([""], [pa.array(keys)])
    raise UnknownKeyOrNamespaceError(f"Keys are an array of one or two dimensions, not of {keys.ndim}.")
