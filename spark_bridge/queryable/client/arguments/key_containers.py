"""Many keys in the containers of pandas, Polars, numpy and Arrow, as columns."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

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
        table = pa.Table.from_pandas(keys.reset_index(drop=True), preserve_index=False)
        return NamedColumns([str(name) for name in keys.columns], table.columns)
    if isinstance(keys, pandas.Index):
        keys = keys.to_series(index=range(len(keys)))
    if isinstance(keys, pandas.Series):
        if keys.dtype == object:
            return None  # any Python objects: single keys
        return _of_array(schema, pa.array(keys, from_pandas=True))
    return None


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
