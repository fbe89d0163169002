"""Arrow batches to the Python rows that PySpark would give, and such rows to batches, a column at a time.

A struct is a ``Row``, a map a dict, an array a list, a timestamp a naive datetime in the local time zone.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.types import StructType

from backends.encoding.columns import is_list_like, list_parts, null_mask
from backends.encoding.spark_types import from_spark_type
from spark_bridge.stateful.values.local_time import check_years, to_local
from spark_bridge.stateful.values.value_arrays import Value, integers_of, to_array, transposed

_DAY_MICROS = 86_400_000_000


@dataclass(frozen=True)
class RowCodec:
    """Rows of one Spark schema. Columns go by position."""

    struct: StructType

    @cached_property
    def schema(self) -> pa.Schema:
        """Return the Arrow schema of the rows, in normalised types; raises ``InvalidStateStoreArgument``."""
        return pa.schema(
            [pa.field(f.name, from_spark_type(f.dataType.jsonValue()), f.nullable) for f in self.struct.fields]
        )

    def to_tuples(self, batch: pa.RecordBatch) -> list[tuple[Value, ...]]:
        """Return the rows as tuples; raises as ``to_columns`` does."""
        return list(zip(*self.to_columns(batch), strict=True)) if batch.num_columns else [()] * batch.num_rows

    def iter_rows(self, batch: pa.RecordBatch) -> Iterator[Row]:
        """Yield the rows as ``Row``, each made when it is asked for."""
        return _rows(tuple(self.struct.names), self.to_columns(batch), batch.num_rows)

    def to_columns(self, batch: pa.RecordBatch) -> list[list[Value]]:
        """Return the values of each column.

        Raises ``ValueError`` naming the column of a time that Python's datetime cannot hold.
        """
        return [_column_values(name, c) for name, c in zip(self.struct.names, batch.columns, strict=True)]

    def to_batch(self, rows: Sequence[Sequence[Value]]) -> pa.RecordBatch:
        """Return the rows as a batch; raises ``TypeError`` or ``ValueError`` naming field, type and value."""
        schema = self.schema
        if not rows:
            return pa.RecordBatch.from_pylist([], schema=schema)
        columns = transposed(
            rows, len(schema), lambda: f"the schema has {len(schema)} fields ({', '.join(schema.names)})"
        )
        arrays = [to_array(f.name, c, f) for f, c in zip(schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


@lru_cache(maxsize=1024)
def row_class(names: tuple[str, ...]) -> type[Row]:
    """Return a subclass of ``Row`` with these field names.

    Names and getters belong to the class, so that a row is made as fast as a tuple, and a field is read as fast as that
    of a namedtuple. Pickling makes a plain ``Row`` of such a row.
    """
    members: dict[str, Any] = {"__fields__": list(names), "__slots__": (), "__module__": Row.__module__}
    fields = namedtuple("fields", [f"field{i}" for i in range(len(names))])  # type: ignore[misc]
    for i, name in reversed(list(enumerate(names))):
        # As in Row, an attribute that a tuple has ("count", "index") is not a field.
        if not hasattr(Row, name) and not name.startswith("__"):
            members[name] = getattr(fields, f"field{i}")
    return type("Row", (Row,), members)


def _rows(names: tuple[str, ...], columns: Sequence[Sequence[Value]], num_rows: int) -> Iterator[Row]:
    tuples = zip(*columns, strict=True) if columns else iter([()] * num_rows)
    return map(partial(tuple.__new__, row_class(names)), tuples)


def _column_values(name: str, array: pa.Array) -> list[Value]:
    """Return a column's values; raises ``ValueError`` naming the column."""
    try:
        return _values(array)
    except ValueError as error:
        raise ValueError(f"Column {name!r}: {error}") from error


def _values(array: pa.Array) -> list[Value]:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _values(array.dictionary_decode())
    mask = null_mask(array)
    values: list[Value]
    if _is_text(kind):
        values = array.to_numpy(zero_copy_only=False).tolist()
        return values
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        filled = array if mask is None else array.fill_null(False if pa.types.is_boolean(kind) else 0)
        values = filled.to_numpy(zero_copy_only=False).tolist()
    elif pa.types.is_date32(kind):
        days = integers_of(array, pa.int32(), mask)
        check_years(days * _DAY_MICROS)
        values = days.view("datetime64[D]").tolist()
    elif pa.types.is_timestamp(kind) and kind.unit == "us":
        micros = integers_of(array, pa.int64(), mask)
        if kind.tz is not None:
            values = list(to_local(micros))
        else:
            check_years(micros)
            values = micros.view("datetime64[us]").tolist()
    elif pa.types.is_struct(kind):
        names = tuple(kind.field(i).name for i in range(kind.num_fields))
        values = list(_rows(names, [_values(child) for child in array.flatten()], len(array)))
    elif is_list_like(kind):
        elements, offsets = list_parts(array)
        bounds = pairwise(offsets.tolist())
        if pa.types.is_map(kind):
            keys, items = (_values(part) for part in elements.flatten())
            values = [dict(zip(keys[a:b], items[a:b], strict=True)) for a, b in bounds]
        else:
            flat = _values(elements)
            values = [flat[a:b] for a, b in bounds]
    else:
        values = array.to_pylist()
        return values
    if mask is not None:
        for i in np.flatnonzero(mask).tolist():
            values[i] = None
    return values


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    )
