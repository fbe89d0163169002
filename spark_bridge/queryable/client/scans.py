"""What a scan is asked for, and its rows as they come to a client."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.client.keys import KeyCodec, Range, narrower
from spark_bridge.queryable.client.results import to_polars
from spark_bridge.queryable.protocol.messages import Comparison
from spark_bridge.queryable.routing.router import RoutedAnswer

Condition = Comparison | tuple[Any, ...]
"""A ``Comparison``, or ``(column, operator, value)``."""
OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "in", "is null", "is not null")
_ALSO = {"==": "=", "<>": "!="}


class StateScan:
    """The rows of a state variable at one version, batch by batch as they come from the hosts.

    Iterate over it for ``pyarrow.RecordBatch``es, or take all that is left at once; once only. Memory stays flat while batches are
    used one after the other. Whoever stops early should ``close`` it, or use it in a ``with``: the hosts then stop too.

        with client.scan("user_totals", prefix=("de",), columns=["user", "n"]) as rows:
            for batch in rows:
                ...
        frame = client.scan("user_totals", where=[("n", ">", 10)]).to_polars()
    """

    def __init__(self, answer: RoutedAnswer, limit: int | None, columns: Sequence[int] | None = None) -> None:
        self._answer = answer
        self._columns = columns
        self._rows = self._limited(limit)

    @property
    def version(self) -> int:
        """The version that all rows are of."""
        return self._answer.version

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch."""
        schema = self._answer.schema
        return schema if self._columns is None else pa.schema([schema.field(i) for i in self._columns])

    def _limited(self, limit: int | None) -> Generator[pa.RecordBatch, None, None]:
        left = limit
        try:
            for rows in self._answer.batches if left != 0 else ():
                batch = rows if self._columns is None else rows.select(list(self._columns))
                if left is not None:
                    batch = batch.slice(0, left)
                    left -= batch.num_rows
                if batch.num_rows:
                    yield batch
                if left == 0:
                    return
        finally:
            self._answer.close()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self._rows

    def __next__(self) -> pa.RecordBatch:
        return next(self._rows)

    def to_arrow(self) -> pa.Table:
        """All rows that are left."""
        return pa.Table.from_batches(list(self._rows), self.schema)

    def to_reader(self) -> pa.RecordBatchReader:
        """All rows that are left as an Arrow stream, for whatever reads these."""
        return pa.RecordBatchReader.from_batches(self.schema, self._rows)

    def to_pandas(self) -> Any:
        """All rows that are left as a pandas frame."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        """All rows that are left as a Polars frame. Raises ``RequestError`` if Polars is not installed."""
        return to_polars(self.to_arrow())

    def to_pylist(self) -> list[dict[str, Any]]:
        """All rows that are left as dicts."""
        rows: list[dict[str, Any]] = self.to_arrow().to_pylist()
        return rows

    def close(self) -> None:
        """End it; the hosts stop. Nothing happens if it has ended."""
        self._rows.close()
        self._answer.close()

    def __enter__(self) -> StateScan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def comparisons(where: Sequence[Condition] | None, types: Mapping[str, pa.DataType]) -> list[Comparison]:
    """Conditions as the hosts take them; ``types`` are those of the columns that the client knows. Raises ``RequestError``."""
    return [_comparison(condition, types) for condition in where or ()]


def _comparison(condition: Condition, types: Mapping[str, pa.DataType]) -> Comparison:
    if isinstance(condition, Comparison):
        return condition
    if not isinstance(condition, tuple | list) or len(condition) not in (2, 3) or not isinstance(condition[0], str):
        raise RequestError(f"where: {condition!r} is no condition; give (column, operator, value), as ('n', '>', 10).")
    column, operator, *given = condition
    name: Any = _ALSO.get(operator, operator)
    name = name.lower() if isinstance(name, str) else name
    if name not in OPERATORS:
        raise RequestError(f"where: {operator!r} is no operator; there are {', '.join(OPERATORS)}.")
    if (name in ("is null", "is not null")) != (not given):
        raise RequestError(f"where: {condition!r}: 'is null' and 'is not null' take no value, all others one.")
    values = list(given[0]) if name == "in" else given
    if any(value is None for value in values):
        raise RequestError(f"where: {condition!r} compares with None, which nothing is equal to; use 'is null'.")
    return Comparison(column, name, [plain_value(value, types.get(column)) for value in values])


def plain_value(value: Any, kind: pa.DataType | None) -> str | int | float | bool:
    """A value as JSON can say it: as it is, or as a string that Arrow reads as the column's type. Raises ``RequestError``."""
    if isinstance(value, pa.Scalar):
        value = value.as_py()
    if isinstance(value, np.generic):
        value = value.astype("M8[us]").item() if isinstance(value, np.datetime64) else value.item()
    if isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, dt.datetime):
        return _time_text(value, kind)
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise RequestError(f"where: {value!r} ({type(value).__name__}) cannot be compared with by the hosts.")


def _time_text(value: dt.datetime, kind: pa.DataType | None) -> str:
    """A time such as Arrow reads it: with an offset if the column has one, else without. Times without a zone are UTC."""
    if value.tzinfo is not None:
        value = value.astimezone(dt.timezone.utc)
    has_zone = value.tzinfo is not None if kind is None or not pa.types.is_timestamp(kind) else kind.tz is not None
    return value.replace(tzinfo=dt.timezone.utc if has_zone else None).isoformat()


def key_range(
    codec: KeyCodec, window: str | None, prefix: Any, start: Any, end: Any
) -> tuple[Range, list[tuple[Any, ...]]]:
    """Bounds on the key in the order of ``by``: as a range of bytes, and as conditions that must hold besides.

    Where a window is stored before what is before it in ``by``, only whole leading columns are possible, as conditions.
    Raises ``RequestError`` and ``UnknownKeyOrNamespaceError``.
    """
    if codec.is_in_order:
        bounds: Range = (None, None) if prefix is None else codec.prefix(prefix)
        given = (None if start is None else codec.bound(start), None if end is None else codec.bound(end))
        return narrower(bounds, given), []
    conditions: list[tuple[Any, ...]] = []
    if prefix is not None:
        conditions += _equal(codec, codec.first_columns(prefix))
    for values, operator in ((start, ">="), (end, "<")):
        if values is None:
            continue
        columns = codec.first_columns(values)
        if len(columns) > 1 or codec.by[0] == window:
            raise RequestError(
                f"Operator {codec.operator!r} keeps its keys in the order {', '.join(codec.stored.names)}, so that start= and end= "
                f"can only be of its first key column {codec.by[0]!r}; use where= for others."
            )
        conditions.append((codec.by[0], operator, columns[0]))
    return (None, None), conditions


def _equal(codec: KeyCodec, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    for name, value in zip(codec.by, values, strict=False):
        yield (name, "is null") if value is None else (name, "=", value)
