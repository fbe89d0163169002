"""The values of families that have one value per key, as users see them: whole columns, or one value at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.schema import StateSchema, nullable
from backends.encoding.single_rows import ValueDecoder
from backends.encoding.user_values import python_value
from spark_bridge.aggregates.aggregator import is_aggregate_state, result_fields, results
from spark_bridge.aggregates.computation import outputs_of, split_function
from spark_bridge.state_format import layouts

# The results of one aggregate's state for single lookups, as ``results`` of the aggregates computes them for columns.


Row: TypeAlias = Mapping[str, Any]
SingleResult: TypeAlias = Callable[[Row], Any]

AS_STORED = ("count", "count_if", "sum", "min", "max", "first", "last")
"""The functions whose result is the first column of their state."""
MOMENT_FUNCTIONS = ("var_pop", "var_samp", "stddev_pop", "stddev_samp")
EXACT_IN_DOUBLE = 1 << 53


class _Unsure(Exception):
    """The result is left to the column-wise code (``results``)."""


class SingleResults:
    """Turns single states of one schema into results, exactly as the column-wise code does."""

    def __init__(self, outputs: Mapping[str, SingleResult]) -> None:
        self._outputs = list(outputs.items())

    @classmethod
    def of(cls, state: pa.Schema) -> SingleResults | None:
        """Return the results for state columns.

        None for functions other than counts, sums, means, extremes, first, last, moments.
        """
        outputs: dict[str, SingleResult] = {}
        for name, function, parts in outputs_of(state):
            if (result := _result_of(function, [part.name for part in parts])) is None:
                return None
            outputs[name] = result
        return cls(outputs)

    def of_row(self, row: Row) -> dict[str, Any] | None:
        """Return the output columns of a row of state columns; None leaves the row to the columns."""
        try:
            return {name: result(row) for name, result in self._outputs}
        except _Unsure:
            return None


def _result_of(function: str, columns: list[str]) -> SingleResult | None:
    name, arguments = split_function(function)
    if name in AS_STORED:
        return itemgetter(columns[0])
    if name == "mean" and not arguments:
        return _mean(*columns)
    if name in MOMENT_FUNCTIONS:
        return _moment(name, *columns)
    return None


def _mean(total_column: str, count_column: str) -> SingleResult:
    def mean(row: Row) -> float | None:
        total, count = row[total_column], row[count_column]
        if count is not None and abs(count) > EXACT_IN_DOUBLE:
            raise _Unsure
        return None if total is None or not count else float(total / count)

    return mean


def _moment(function: str, count_column: str, _: str, squares_column: str) -> SingleResult:
    fewer = 1 if function.endswith("samp") else 0
    is_root = function.startswith("stddev")

    def moment(row: Row) -> float | None:
        count, squares = row[count_column] or 0, row[squares_column]
        squares = 0.0 if squares is None else squares  # -0.0 stays
        if abs(count) > EXACT_IN_DOUBLE or squares < 0:
            raise _Unsure
        divisor = count - fewer
        if divisor <= 0:
            return None
        return math.sqrt(squares / divisor) if is_root else float(squares / divisor)

    return moment


@dataclass(frozen=True)
class StoredValues:
    """The values of a family that has one value per key; ``is_rows``: they are the rows of an operator."""

    schema: StateSchema
    is_rows: bool

    @cached_property
    def is_aggregate(self) -> bool:
        """Whether a value is the state of aggregate functions, which has results."""
        return self.is_rows and is_aggregate_state(self.schema.value)

    @cached_property
    def fields(self) -> list[pa.Field]:
        """The columns of ``columns``."""
        fields = result_fields(self.schema.value) if self.is_aggregate else list(self.schema.value)
        return [pa.field(f.name, nullable(f.type)) for f in fields if f.name != layouts.TTL_COLUMN]

    @cached_property
    def has_ttl(self) -> bool:
        return layouts.TTL_COLUMN in self.schema.value.names

    def unexpired(self, values: pa.BinaryArray, at_ms: int) -> pa.BinaryArray:
        """Return stored values; null for one that had expired at ``at_ms``, in ms since 1970."""
        if not self.has_ttl:
            return values
        states = self.schema.decode_values(values)
        expired = pc.less_equal(states.column(states.schema.get_field_index(layouts.TTL_COLUMN)), at_ms)
        if not pc.any(expired).as_py():
            return values
        return pc.if_else(expired.fill_null(False), pa.scalar(None, pa.binary()), values)

    def columns(self, values: pa.BinaryArray, at_ms: int) -> list[pa.Array]:
        """Return the columns of stored values; null for values that are absent, or had expired at ``at_ms``."""
        states = self.schema.decode_values(self.unexpired(values, at_ms))
        if self.is_aggregate:
            columns = results(states)
        else:
            columns = [states.column(i) for i, f in enumerate(states.schema) if f.name != layouts.TTL_COLUMN]
        return [c if c.type == f.type else c.cast(f.type) for c, f in zip(columns, self.fields, strict=True)]

    @cached_property
    def decode_one(self) -> Callable[[bytes], dict[str, Any] | None]:
        """The function that returns the columns of one stored value, in a few microseconds for plain columns.

        None if it has expired.
        """
        by_columns = self._one_by_columns
        decoder = ValueDecoder.of(self.schema.value, self.schema.history)
        single = SingleResults.of(self.schema.value) if self.is_aggregate else None
        if decoder is None or (self.is_aggregate and single is None):
            return by_columns
        decode = decoder.decode
        if self.has_ttl:
            return lambda value: by_columns(value) if (row := decode(value)) is None else _alive(row)
        if single is None:
            return lambda value: by_columns(value) if (row := decode(value)) is None else row
        of_row = single.of_row
        return lambda value: (
            by_columns(value) if (row := decode(value)) is None or (result := of_row(row)) is None else result
        )

    def _one_by_columns(self, value: bytes) -> dict[str, Any] | None:
        one, at_ms = pa.array([value], pa.binary()), now_ms()
        if not self.unexpired(one, at_ms)[0].is_valid:
            return None
        return {f.name: python_value(c[0]) for f, c in zip(self.fields, self.columns(one, at_ms), strict=True)}


def _alive(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the columns of a row without the time when it expires; None if it has expired."""
    expiry = row.pop(layouts.TTL_COLUMN)
    return None if expiry is not None and expiry <= now_ms() else row


def now_ms() -> int:
    """Return the time that decides whether rows have expired, in ms since 1970, in the form that hosts expect."""
    return int(time.time() * 1000)
