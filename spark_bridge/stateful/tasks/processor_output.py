"""The output of a processor: checked against the declared schema, and made into Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from types import GeneratorType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType

from backends.encoding.given_values import is_missing, python_value
from spark_bridge.exceptions import StatefulProcessorError
from spark_bridge.stateful.values.pandas_values import FrameColumns, PandasCodec
from spark_bridge.stateful.values.row_values import RowCodec
from spark_bridge.stateful.values.value_arrays import shown
from spark_bridge.task.output_spool import Spool
from spark_bridge.task.watermark import EventTime

ROWS_AT_ONCE = 1 << 14
"""Rows that are made into one batch, about."""


@dataclass
class OutputRows:
    """The output of a processor of rows: ``Row``s, whose fields go by name, or tuples, whose fields go by position."""

    codec: RowCodec
    sink: OutputSink
    _rows: list[Any] = field(default_factory=list)

    def take(self, given: Any) -> None:
        """Take all rows that a method of the processor has returned."""
        rows = given if type(given) is GeneratorType else _iterator(given, "Rows")
        if self._is_mutable:
            rows = map(detached, rows)
        self._rows.extend(islice(rows, ROWS_AT_ONCE))
        while len(self._rows) >= ROWS_AT_ONCE:
            self.flush()
            self._rows.extend(islice(rows, ROWS_AT_ONCE))

    @cached_property
    def _is_mutable(self) -> bool:
        """Return whether a row has values that the processor may change after it has given the row."""
        kinds = (ArrayType, MapType, StructType, BinaryType)
        return any(isinstance(f.dataType, kinds) for f in self.codec.struct.fields)

    def flush(self) -> None:
        """Give the rows to the sink; raises ``StatefulProcessorError`` for rows that do not fit the schema."""
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        try:
            batch = self.codec.to_batch(_by_position(rows, self.codec.struct.names))
        except (TypeError, ValueError) as error:
            raise _mismatch(self.codec.struct, error) from error
        self.sink.add(batch)


@dataclass
class OutputFrames:
    """The output of a processor of pandas DataFrames."""

    codec: PandasCodec
    sink: OutputSink
    _frames: list[FrameColumns] = field(default_factory=list)
    _num_rows: int = 0

    def take(self, given: Any) -> None:
        """Take all DataFrames that a method of the processor has returned; raises ``StatefulProcessorError``."""
        for frame in given if type(given) is GeneratorType else _iterator(given, "pandas DataFrames"):
            if not isinstance(frame, pd.DataFrame):
                raise StatefulProcessorError(
                    f"The processor gave {shown(frame)} ({type(frame).__name__}) for output: give pandas DataFrames."
                )
            try:
                columns = self.codec.to_columns(frame)
            except ValueError as error:
                raise _mismatch(self.codec.struct, error) from error
            if len(columns) and len(columns[0]):
                self._frames.append(columns)
                self._num_rows += len(columns[0])
            if self._num_rows >= ROWS_AT_ONCE:
                self.flush()

    def flush(self) -> None:
        """Give the rows to the sink; raises ``StatefulProcessorError`` for rows that do not fit the schema."""
        if not self._frames:
            return
        frames, self._frames, self._num_rows = self._frames, [], 0
        try:
            batch = self.codec.to_batch(frames)
        except (TypeError, ValueError) as error:
            raise _mismatch(self.codec.struct, error) from error
        self.sink.add(batch)


@dataclass(frozen=True)
class OutputSink:
    """Takes batches into the spool; no row's ``event_time`` may be late (at or before ``late_watermark_ms``)."""

    spool: Spool
    event_time: EventTime | None
    late_watermark_ms: int

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch; raises ``StatefulProcessorError`` if one of its rows is late."""
        if self.event_time is not None:
            is_late = self.event_time.is_done(batch, self.late_watermark_ms)
            if is_late.any():
                name = self.event_time.column
                late = python_value(batch.column(name).filter(pa.array(is_late))[0])
                raise StatefulProcessorError(
                    f"[EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED] The processor gave a row with {name}={late}, "
                    f"which is not after the watermark, {self.late_watermark_ms} ms since 1970: whatever follows would "
                    "take it for late. Give it a later event time, or leave event_time_column out."
                )
        self.spool.add(batch)


def _iterator(given: Any, what: str) -> Iterator[Any]:
    if given is None:
        return iter(())
    if isinstance(given, (tuple, str, bytes, dict, pd.DataFrame)) or not hasattr(given, "__iter__"):
        raise StatefulProcessorError(
            f"The processor returned {shown(given)} ({type(given).__name__}): return an iterator of {what}, for "
            "instance by yield."
        )
    return iter(given)


def detached(value: Any) -> Any:
    """Return the value with copies of all that can be changed in it, and with None for NaT and NA."""
    if isinstance(value, tuple):
        copy: Any = tuple.__new__(type(value), map(detached, value))
        if isinstance(value, Row) and "__fields__" in value.__dict__:
            copy.__fields__ = value.__fields__
        return copy
    if isinstance(value, list):
        return list(map(detached, value))
    if isinstance(value, dict):
        return {k: detached(v) for k, v in value.items()}
    if isinstance(value, (bytearray, np.ndarray)):
        return value.copy()
    return None if is_missing(value) else value


def _by_position(rows: list[Any], names: list[str]) -> Sequence[Sequence[Any]]:
    """Return the rows with their values in the order of ``names``; raises ``TypeError`` or ``ValueError``."""
    kinds = set(map(type, rows))
    for kind in kinds:
        if not issubclass(kind, (tuple, list)):
            wrong = next(r for r in rows if type(r) is kind)
            raise TypeError(f"{shown(wrong)} ({kind.__name__}) is no Row.")
    if not any(issubclass(kind, Row) for kind in kinds):
        return rows
    known: object = None
    places: list[int] | None = None
    for i, row in enumerate(rows):
        given = getattr(row, "__fields__", names)
        # Rows of one maker, Row("a", "b"), share the object that names their fields.
        if given is not known:
            known, places = given, None if given == names else _places(row, given, names)
        if places is None:
            continue
        try:
            rows[i] = tuple([tuple.__getitem__(row, place) for place in places])
        except IndexError as error:
            raise ValueError(f"{shown(tuple(row))} has {len(row)} values for {', '.join(given)}.") from error
    return rows


def _places(row: Any, given: Sequence[str], names: list[str]) -> list[int] | None:
    """Return where a row has the fields ``names``, None if in their order; raises ``ValueError``."""
    fields = list(given)
    if fields == names:
        return None
    if not set(names) <= set(fields):  # further fields are left out, as by Spark
        raise ValueError(f"{shown(row)} has the fields {', '.join(fields)}.")
    return [fields.index(name) for name in names]


def _mismatch(struct: StructType, error: Exception) -> StatefulProcessorError:
    return StatefulProcessorError(
        f"What the processor gave for output does not fit its schema, {struct.simpleString()}: {error}"
    )
