"""Answers in the form that a caller asks for: Python values, Arrow, pandas, Polars."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from backends.encoding.columns import one_array
from backends.encoding.user_values import python_rows, python_values
from backends.lazy_names import import_optional
from spark_bridge.exceptions import RequestError, RequestLimitError

FORMS = ("arrow", "pandas", "polars", "pylist")


def check_form(as_: str) -> None:
    """Raise ``RequestError`` for an unknown form."""
    if as_ not in FORMS:
        raise RequestError(f"as_={as_!r} is not a form of a table; there are {', '.join(map(repr, FORMS))}.")


def formed(table: pa.Table, as_: str) -> Any:
    """Return a table in a form. Raises ``RequestError`` for an unknown one, or if pandas or Polars is missing."""
    check_form(as_)
    if as_ == "pandas":
        return to_pandas(table)
    if as_ == "polars":
        return to_polars(table)
    return python_rows(table) if as_ == "pylist" else table


def to_pandas(table: pa.Table) -> Any:
    """Return a pandas frame; columns with times that Python's datetime cannot hold have ``python_values``.

    Raises ``RequestError`` if pandas is not installed.
    """
    pandas = import_optional("pandas", "A pandas frame", RequestError)
    try:
        return table.to_pandas()
    except (pa.ArrowException, OverflowError, ValueError):
        return pandas.DataFrame({i: _series(column) for i, column in enumerate(table.columns)}).set_axis(
            table.column_names, axis=1
        )


def _series(column: pa.ChunkedArray) -> Any:
    import pandas

    try:
        return column.to_pandas()
    except (pa.ArrowException, OverflowError, ValueError):
        return pandas.Series(python_values(column), dtype=object)


def to_polars(table: pa.Table) -> Any:
    """Return a Polars frame. Raises ``RequestError`` if Polars is not installed."""
    return import_optional("polars", "A Polars frame", RequestError).from_arrow(table)


@dataclass(frozen=True)
class KeyedResults:
    """Rows of several keys: the position of each row's key, the columns that distinguish its rows, and the values."""

    position: pa.Array
    inner: Mapping[str, pa.Array]
    value: Mapping[str, pa.Array]

    def ordered(self, *, by_window: bool) -> KeyedResults:
        """Return the rows ordered by key; within a key by the start of the window in ``inner``, or as they are."""
        keys = {"position": self.position}
        if by_window:
            (window,) = self.inner.values()
            keys["start"] = window.field(0)
        # Stable, so that elements of a list stay in their order.
        order = pa.array(np.lexsort([np.asarray(c.cast(pa.int64()).fill_null(-1)) for c in reversed(keys.values())]))
        inner = {name: column.take(order) for name, column in self.inner.items()}
        value = {name: column.take(order) for name, column in self.value.items()}
        return KeyedResults(self.position.take(order), inner, value)

    def of_each(self, n: int) -> Iterator[KeyedResults]:
        """Yield the rows of each of ``n`` keys."""
        rows = self.ordered(by_window=False)
        bounds = np.searchsorted(np.asarray(rows.position), np.arange(n + 1)).tolist()
        for begin, end in itertools.pairwise(bounds):
            inner = {name: column.slice(begin, end - begin) for name, column in rows.inner.items()}
            value = {name: column.slice(begin, end - begin) for name, column in rows.value.items()}
            yield KeyedResults(rows.position.slice(begin, end - begin), inner, value)

    def lists(self, n: int) -> pa.Array:
        """Return the rows of each of ``n`` keys as a list of structs, or of one column's values; null without rows."""
        return pa.ListArray.from_arrays(self._offsets(n), _elements({**self.inner, **self.value}))

    def maps(self, n: int) -> pa.Array:
        """Return the rows of each of ``n`` keys as a map of ``inner`` to ``value``; null without rows."""
        return pa.MapArray.from_arrays(self._offsets(n), _elements(self.inner), _elements(self.value))

    def _offsets(self, n: int) -> pa.Array:
        counts = np.bincount(np.asarray(self.position), minlength=n)
        offsets = np.zeros(n + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        return pa.array(offsets, mask=np.append(counts == 0, False))


def _elements(columns: Mapping[str, pa.Array]) -> pa.Array:
    if len(columns) == 1:
        return next(iter(columns.values()))
    return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))


def plain_values(columns: Mapping[str, pa.Array], *, hashable: bool = False) -> list[Any]:
    """Return rows as Python values: those of several columns are dicts, or tuples if they must be ``hashable``."""
    values: list[list[Any]] = [python_values(column) for column in columns.values()]
    if hashable:
        rows = [tuple(map(_hashable, row)) for row in zip(*values, strict=True)]
        return [row[0] for row in rows] if len(values) == 1 else rows
    if len(values) == 1:
        return values[0]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(map(_hashable, value.values()))
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column as one array. Raises ``RequestLimitError`` if it has more bytes than an Arrow array can."""
    try:
        return one_array(column)
    except pa.ArrowInvalid as error:
        raise RequestLimitError(
            f"The rows of these keys do not fit into one Arrow array ({error}): ask for fewer keys."
        ) from error
