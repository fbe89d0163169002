"""Arrow batches to pandas DataFrames and back, in the form of PySpark's functions on pandas.

Timestamps are naive, in the session's time zone; structs and maps are dicts, arrays numpy arrays, dates objects.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from backends.encoding.columns import is_list_like, list_array, list_parts, null_mask, one_array, struct_array
from backends.encoding.user_values import are_plain, is_missing
from spark_bridge.stateful.state_values import RowCodec, shown, to_array

ColumnValues: TypeAlias = "np.ndarray[Any, Any] | pd.api.extensions.ExtensionArray"
"""A column's values, as pandas keeps them."""
FrameColumns: TypeAlias = "list[ColumnValues] | np.ndarray[Any, Any]"
"""Columns of a frame; those of one numpy type may be the rows of an array."""

_WALL_CLOCK = pa.timestamp("us")


@dataclass(frozen=True)
class PandasCodec:
    """DataFrames of one Spark schema. ``time_zone`` is the session's."""

    struct: StructType
    time_zone: str

    @cached_property
    def schema(self) -> pa.Schema:
        return RowCodec(self.struct).schema

    def to_frame(self, batch: pa.RecordBatch) -> pd.DataFrame:
        """Return the rows as a DataFrame, in newly allocated memory.

        A column with a time that nanoseconds cannot hold, before 1678 or after 2261, is of microseconds. Raises
        ``ValueError`` naming the column of a date or a nested time that Python's datetime cannot hold.
        """
        nested = [pa.types.is_nested(c.type) for c in batch.columns]
        columns = [_wall_clock(c, self.time_zone) if n else c for c, n in zip(batch.columns, nested, strict=True)]
        table = pa.table(columns, names=[str(i) for i in range(len(columns))])
        try:
            frame: pd.DataFrame = _pandas_of(table, coerce=True)
        except (pa.ArrowException, ValueError, OverflowError):
            frame = _frame_of_far_times(columns, self.struct.names, self.time_zone)
        for i, column in enumerate(columns):
            if _has_zone(column.type) and isinstance(frame[str(i)].dtype, pd.DatetimeTZDtype):
                frame[str(i)] = frame[str(i)].dt.tz_convert(self.time_zone).dt.tz_localize(None)
        frame.columns = pd.Index(self.struct.names)
        # Computed here once: otherwise every part of the frame would compute the place of each column.
        inner: Any = frame
        inner._mgr._rebuild_blknos_and_blklocs()
        return frame

    def to_columns(self, frame: pd.DataFrame) -> FrameColumns:
        """Return copies of the columns of a frame, in the order of the schema.

        Columns go by name if any name is a string, otherwise by position. For a frame without columns, return no
        columns. Raises ``ValueError`` naming the columns of a frame that does not fit.
        """
        places = _positions(tuple(frame.columns.tolist()), tuple(self.struct.names))
        # Many times as fast as through series. Copied, as the processor may change the frame afterwards.
        inner: Any = frame
        blocks = inner._mgr.blocks
        where = blocks[0].mgr_locs if len(blocks) == 1 and type(blocks[0].values) is np.ndarray else None
        if where is not None and where.is_slice_like and where.indexer == slice(0, len(where), 1):
            together: FrameColumns = blocks[0].values.take(places, axis=0)
            return together
        arrays = {place: block.iget(i) for block in blocks for i, place in enumerate(block.mgr_locs)}
        return [arrays[place].copy() for place in places.tolist()]

    def to_batch(self, frames: Sequence[FrameColumns]) -> pa.RecordBatch:
        """Return a batch of the columns that ``to_columns`` has returned for some frames.

        Raises ``TypeError`` or ``ValueError`` naming field, type and value.
        """
        joined: list[FrameColumns] = []
        for kind, some in groupby(frames, type):
            if kind is list:
                joined += some
                continue
            for _, alike in groupby(some, attrgetter("dtype")):
                # All columns of many small frames together cost less than one column after the other.
                parts: list[Any] = list(alike)
                joined.append(np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0])
        columns = zip(*joined, strict=True)
        arrays = [_column(f, parts, self.time_zone) for f, parts in zip(self.schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _pandas_of(table: pa.Table, *, coerce: bool) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_pandas(maps_as_pydicts="strict", coerce_temporal_nanoseconds=coerce)
    return frame


def _frame_of_far_times(columns: Sequence[pa.Array], names: Sequence[str], time_zone: str) -> pd.DataFrame:
    """Return a frame with columns of microseconds where nanoseconds do not do; raises ``ValueError``."""
    series = {}
    for i, (name, column) in enumerate(zip(names, columns, strict=True)):
        place = str(i)
        try:
            series[place] = _pandas_of(pa.table([column], [place]), coerce=True)[place]
        except (pa.ArrowException, ValueError, OverflowError) as error:
            if not pa.types.is_timestamp(column.type):
                raise ValueError(
                    f"Column {name!r} has a time that pandas or Python's datetime cannot hold: {error}. Cast it to a "
                    "string or a number."
                ) from error
            # By Arrow: pandas is off by fractions of a second if the offset of a zone has seconds.
            wall = pa.table([_wall_clock(column, time_zone)], [place])
            series[place] = _pandas_of(wall, coerce=False)[place]
    return pd.DataFrame(series)


@lru_cache(maxsize=1024)
def _positions(labels: tuple[Any, ...], names: tuple[str, ...]) -> npt.NDArray[np.intp]:
    """Return the places of the schema's columns ``names`` in a frame with columns ``labels``; raises ``ValueError``."""
    if not labels:
        return np.arange(0)
    if any(isinstance(label, str) for label in labels):
        if not set(names) <= set(labels):  # further columns are left out, as by Spark
            raise ValueError(f"A DataFrame has the columns {', '.join(map(str, labels))}.")
        return np.array([labels.index(name) for name in names], np.intp)
    if len(labels) != len(names):
        raise ValueError(f"A DataFrame has {len(labels)} columns.")
    return np.arange(len(names))


def rows_of_frame(frame: pd.DataFrame, start: int, stop: int) -> pd.DataFrame:
    """Return some rows of a frame as a frame with an index from 0, in the same memory."""
    # The same as ``iloc`` and then a new index, in half the time.
    inner: Any = frame
    part = inner._mgr.get_slice(slice(start, stop), axis=1)
    # Views: if the processor names the index or the columns of a part, the other parts stay as they are.
    part.axes = [frame.columns.view(), _numbers(stop - start).view()]
    frame_rows: pd.DataFrame = inner._from_mgr(part, part.axes)
    return frame_rows


@lru_cache(maxsize=1 << 14)
def _numbers(n: int) -> pd.RangeIndex:
    return pd.RangeIndex(n)


def _column(field: pa.Field, parts: Sequence[ColumnValues], time_zone: str) -> pa.Array:
    """Return a column of the output. Parts of different types are not joined by pandas, which would round integers."""
    arrays = []
    for _, alike in groupby(parts, lambda part: part.dtype):
        values: list[Any] = list(alike)
        first = values[0]
        joined = np.concatenate(values) if isinstance(first, np.ndarray) else first._concat_same_type(values)
        arrays.append(_array(field, pd.Series(joined), time_zone))
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _array(field: pa.Field, column: pd.Series, time_zone: str) -> pa.Array:
    """Return a column of the output; raises ``TypeError`` or ``ValueError`` naming the column."""
    kind = field.type
    if pa.types.is_nested(kind):
        values = to_array(field.name, column.tolist(), _wall_field(field), nan_is_null=True)
        return _instants(values, kind, time_zone)
    if pa.types.is_timestamp(kind) and not pd.api.types.is_datetime64_any_dtype(column.dtype):
        column = _times(field.name, column)
    elif column.dtype == object:
        values = column.tolist()
        may_be_nan = pa.types.is_floating(kind) or pa.types.is_decimal(kind) or not are_plain(values, kind)
        return to_array(field.name, values, field, nan_is_null=may_be_nan)
    try:
        if pa.types.is_timestamp(kind) and kind.tz is not None:
            if column.dt.tz is None and column.dt.unit != "ns":
                return _checked(_instants(pa.array(column, from_pandas=True).cast(_WALL_CLOCK), kind, time_zone), field)
            if column.dt.tz is None:
                column = column.dt.tz_localize(time_zone, ambiguous=False, nonexistent="shift_forward")
            array = pa.array(column, from_pandas=True).cast(kind, safe=False)
        elif pa.types.is_timestamp(kind):
            array = pa.array(column, from_pandas=True).cast(kind, safe=False)
        else:
            array = _flat_array(column, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        # Value by value: an odd value may fit nevertheless, and if not, the error names the value.
        return to_array(field.name, column.tolist(), field, nan_is_null=True)
    return _checked(array, field)


def _checked(array: pa.Array | pa.ChunkedArray, field: pa.Field) -> pa.Array:
    array = one_array(array)
    if array.null_count and not field.nullable:
        raise ValueError(f"Field {field.name!r} is declared not nullable, but a value of it is missing.")
    return array


def _flat_array(column: pd.Series, kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(column, kind, from_pandas=True)
    except (pa.ArrowException, TypeError):
        if pd.api.types.is_numeric_dtype(column.dtype):
            return pa.array(column, from_pandas=True).cast(kind)  # as in PySpark, numbers can be cast, also to strings
        raise


def _times(name: str, column: pd.Series) -> pd.Series:
    """Return a column of Python objects as one of times; raises ``TypeError`` naming the column."""
    values = [None if is_missing(v, nan=True) else v for v in column]
    wrong = [v for v in values if not (v is None or isinstance(v, str | dt.date | np.datetime64))]
    if wrong:
        # pandas would take a number for nanoseconds since 1970.
        raise TypeError(
            f"Field {name!r} is of type timestamp, and {shown(wrong[0])} ({type(wrong[0]).__name__}) is not a time."
        )
    try:
        return pd.to_datetime(pd.Series(values, dtype=object))
    except pd.errors.OutOfBoundsDatetime as error:
        if any(isinstance(v, str) for v in values):
            raise TypeError(f"Field {name!r} is of type timestamp: {error}") from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"Field {name!r} is of type timestamp: {error}") from error
    # A time before 1678 or after 2261, which pandas has no nanoseconds for.
    has_zone = {v.tzinfo is not None for v in values if isinstance(v, dt.datetime)}
    if has_zone == {True, False}:
        raise TypeError(f"Field {name!r} is of type timestamp, and some of its values have a time zone, others none.")
    if True in has_zone:
        values = [v and v.astimezone(dt.timezone.utc).replace(tzinfo=None) for v in values]
    series = pd.Series(np.array(values, "M8[us]"))
    return series.dt.tz_localize("UTC") if True in has_zone else series


def _has_zone(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) and kind.tz is not None)


def _wall_type(kind: pa.DataType) -> pa.DataType:
    """Return the type with wall-clock times instead of instants."""
    if pa.types.is_struct(kind):
        return pa.struct([_wall_field(kind.field(i)) for i in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(_wall_field(kind.key_field), _wall_field(kind.item_field))
    if is_list_like(kind):
        return pa.list_(_wall_field(kind.value_field))
    return _WALL_CLOCK if _has_zone(kind) else kind


def _wall_field(field: pa.Field) -> pa.Field:
    return field.with_type(_wall_type(field.type))


def _wall_clock(array: pa.Array, time_zone: str) -> pa.Array:
    """Return the array with the instants in it as wall-clock times."""
    return _converted(
        array, _wall_type(array.type), lambda leaf: pc.local_timestamp(leaf.cast(pa.timestamp("us", time_zone)))
    )


def _instants(array: pa.Array, kind: pa.DataType, time_zone: str) -> pa.Array:
    """Return the array that ``_wall_clock`` was given; of two equal hours the later is meant, as in PySpark."""
    return _converted(
        array, kind, lambda leaf: pc.assume_timezone(leaf, time_zone, ambiguous="latest", nonexistent="latest")
    )


def _converted(array: pa.Array, kind: pa.DataType, convert: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Return the array in another type of the same shape; ``convert`` receives the timestamps whose types differ."""
    if array.type == kind:
        return array
    if pa.types.is_struct(kind):
        children = [_converted(c, kind.field(i).type, convert) for i, c in enumerate(array.flatten())]
        return struct_array(children, len(array), null_mask(array), kind)
    if is_list_like(kind):
        elements, offsets = list_parts(array)
        of = pa.struct([kind.key_field, kind.item_field]) if pa.types.is_map(kind) else kind.value_type
        return list_array(_converted(elements, of, convert), offsets, null_mask(array), kind)
    return (convert(array) if pa.types.is_timestamp(kind) else array).cast(kind)
