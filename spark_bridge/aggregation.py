"""Running aggregates on Arrow columns: partial results of rows, merging of states, final results.

An aggregation keeps one or two state columns per output, named ``<output>.<function>.<part>``, so
that the state's schema alone says how to read it. Everything works on whole columns: rows carry a
group id (0..m-1), and every step gives tables of m rows in the order of these ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_bridge.exceptions import InvalidOperatorError, SparkBridgeError

MAX_DECIMAL_PRECISION = 38
INT64_LIMIT = float(2**63)
GROUP = "group"


@dataclass(frozen=True)
class Output:
    """One output column: ``function`` of input ``column`` (None: of rows), ordered ``by`` where that matters."""

    name: str
    function: str
    column: str | None
    by: str | None
    type: pa.DataType | None
    by_type: pa.DataType | None = None

    def state_fields(self) -> list[pa.Field]:
        """The columns that this output keeps as state."""
        return [pa.field(f"{self.name}.{self.function}.{part}", kind) for part, kind in self._parts()]

    def _parts(self) -> list[tuple[str, pa.DataType]]:
        match self.function:
            case "count":
                return [("count", pa.int64())]
            case "sum":
                return [("sum", sum_type(self.type))]
            case "min" | "max":
                return [("value", self.type)]
            case "mean":
                return [("sum", pa.float64()), ("count", pa.int64())]
            case "first" | "last":
                return [("value", self.type), ("by", self.by_type)]
        raise InvalidOperatorError(f"Unknown aggregate function {self.function!r} for output {self.name!r}.")


def sum_type(of: pa.DataType) -> pa.DataType:
    """The type of a sum, as in Spark: long, double, or a decimal of ten more digits."""
    if pa.types.is_integer(of):
        return pa.int64()
    if pa.types.is_decimal(of):
        return pa.decimal128(min(MAX_DECIMAL_PRECISION, of.precision + 10), of.scale)
    return pa.float64()


def result_fields(state: pa.Schema) -> list[pa.Field]:
    """The output columns of an aggregation, from the schema of its state."""
    fields = []
    for name, function, parts in outputs_of(state):
        kind = pa.float64() if function == "mean" else parts[0].type
        fields.append(pa.field(name, kind))
    return fields


def outputs_of(state: pa.Schema) -> list[tuple[str, str, list[pa.Field]]]:
    """Output name, function and state columns, read from the names of the state columns."""
    outputs: dict[tuple[str, str], list[pa.Field]] = {}
    for field in state:
        name, function, _ = field.name.rsplit(".", 2)
        outputs.setdefault((name, function), []).append(field)
    return [(name, function, parts) for (name, function), parts in outputs.items()]


def results(states: pa.RecordBatch) -> list[pa.Array]:
    """Output columns from state columns; a row of nulls gives a row of nulls."""
    columns = []
    for _, function, parts in outputs_of(states.schema):
        first = states.column(states.schema.get_field_index(parts[0].name))
        if function == "mean":
            count = states.column(states.schema.get_field_index(parts[1].name))
            some = pc.if_else(pc.equal(count, 0), pa.scalar(None, pa.int64()), count)
            first = pc.divide(first, some.cast(pa.float64()))
        columns.append(first)
    return columns


class Aggregator:
    """The aggregation of one operator: rows to states, and states to states."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.outputs = tuple(outputs)
        self.state_schema = pa.schema([f for o in self.outputs for f in o.state_fields()])

    def partial(self, groups: pa.Array, num_groups: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The states of the rows of each group. ``groups``: int32 per row."""
        columns: dict[str, pa.Array] = {}
        for output in self.outputs:
            source: Any = None if output.column is None else plain(rows.column(output.column))
            names = [f.name for f in output.state_fields()]
            match output.function:
                case "count":
                    columns[names[0]] = (
                        pc.is_valid(source).cast(pa.int64()) if source is not None else ones(rows.num_rows)
                    )
                case "sum":
                    columns[names[0]] = source.cast(output.state_fields()[0].type)
                case "min" | "max":
                    columns[names[0]] = source
                case "mean":
                    columns[names[0]] = source.cast(pa.float64(), safe=False)
                    columns[names[1]] = pc.is_valid(source).cast(pa.int64())
                case "first" | "last":
                    columns[names[0]] = source
                    columns[names[1]] = plain(rows.column(output.by))
        states = pa.RecordBatch.from_arrays([columns[n] for n in self.state_schema.names], schema=self.state_schema)
        return self.merge(groups, num_groups, states)

    def merge(self, groups: pa.Array, num_groups: int, states: pa.RecordBatch) -> pa.RecordBatch:
        """Merge the states that share a group id. Every id from 0 to ``num_groups - 1`` occurs at least once."""
        merged: dict[str, pa.Array] = {}
        for output in self.outputs:
            fields = output.state_fields()
            columns = [states.column(states.schema.get_field_index(f.name)) for f in fields]
            match output.function:
                case "count" | "sum":
                    merged[fields[0].name] = self._sum(groups, num_groups, columns[0], fields[0])
                case "mean":
                    merged[fields[0].name] = self._sum(groups, num_groups, columns[0], fields[0])
                    merged[fields[1].name] = self._sum(groups, num_groups, columns[1], fields[1])
                case "min" | "max":
                    merged[fields[0].name] = extreme(groups, columns[0], output.function)
                case "first" | "last":
                    value, by = pick(groups, num_groups, columns[0], columns[1], output.function)
                    merged[fields[0].name], merged[fields[1].name] = value, by
        return pa.RecordBatch.from_arrays([merged[n] for n in self.state_schema.names], schema=self.state_schema)

    def _sum(self, groups: pa.Array, num_groups: int, column: pa.Array, field: pa.Field) -> pa.Array:
        total = grouped(groups, column, "sum", pc.ScalarAggregateOptions(min_count=1))
        if pa.types.is_decimal(field.type):
            try:
                return total.cast(field.type)
            except pa.ArrowInvalid as error:
                raise overflow(field) from error
        if pa.types.is_integer(field.type) and may_overflow(column):
            exact = grouped(
                groups, column.cast(pa.float64(), safe=False), "sum", pc.ScalarAggregateOptions(min_count=1)
            )
            # The wrapped sum is off by a multiple of 2**64, far more than doubles lose here.
            if pc.any(pc.greater(pc.abs(pc.subtract(exact, total.cast(pa.float64(), safe=False))), 2.0**62)).as_py():
                raise overflow(field)
        return total


def overflow(field: pa.Field) -> SparkBridgeError:
    """The error of a sum that its type cannot hold."""
    name, function, _ = field.name.rsplit(".", 2)
    return SparkBridgeError(
        f"The {function} of output {name!r} has left the range of {field.type}; "
        "cast its input to a wider type (decimal or double) and start with a new operator."
    )


def may_overflow(column: pa.Array) -> bool:
    """Whether a sum of these integers could pass 64 bits, by a bound that costs one look at the column."""
    bounds = pc.min_max(column)
    if not bounds["min"].is_valid:
        return False
    largest: int = max(abs(bounds["min"].as_py()), abs(bounds["max"].as_py()))
    return largest * float(len(column)) >= INT64_LIMIT


def plain(column: pa.Array) -> pa.Array:
    """A column without a dictionary, and with timestamps in UTC whatever the session's zone."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp("us", "UTC"))
    return column


def ones(length: int) -> pa.Array:
    """A column of ones."""
    return pa.array(np.ones(length, dtype=np.int64))


def grouped(groups: pa.Array, column: pa.Array, function: str, options: object = None) -> pa.Array:
    """One aggregate per group id, in the order of the ids."""
    table = pa.table({GROUP: groups, "value": column})
    answer = table.group_by(GROUP, use_threads=False).aggregate([("value", function, options)])
    order = pc.sort_indices(answer.column(GROUP))
    taken = answer.column(f"value_{function}").take(order)
    return taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken


def extreme(groups: pa.Array, column: pa.Array, function: str) -> pa.Array:
    """Minimum or maximum per group. Doubles compare as in Spark: NaN greatest, -0.0 equal to 0.0."""
    if not pa.types.is_floating(column.type):
        return grouped(groups, column, function).cast(column.type)
    width = column.type.bit_width
    bits, signed = (np.int32, pa.int32()) if width == 32 else (np.int64, pa.int64())
    valid = pc.is_valid(column)
    values = np.ascontiguousarray(
        pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False)
    ) + column.type.to_pandas_dtype()(0)
    values[np.isnan(values)] = np.nan
    raw = values.view(bits)
    top = np.iinfo(bits).max
    ordered = pa.array(np.where(raw < 0, raw ^ top, raw), type=signed, mask=~valid.to_numpy(zero_copy_only=False))
    best = grouped(groups, ordered, function)
    back = pc.fill_null(best, 0).to_numpy(zero_copy_only=False).astype(bits)
    floats = np.where(back < 0, back ^ top, back).view(values.dtype)
    return pa.array(floats, type=column.type, mask=~pc.is_valid(best).to_numpy(zero_copy_only=False))


def pick(groups: pa.Array, num_groups: int, value: pa.Array, by: pa.Array, function: str) -> tuple[pa.Array, pa.Array]:
    """The value of the row with the least or greatest ``by`` of each group, and that ``by``.

    Rows without ``by`` do not count. Ties go to the greater value, a null being the least, so that
    the answer does not depend on the order of rows (DESIGN, rule 8).
    """
    table = pa.table(
        {
            GROUP: groups,
            "by": by,
            "some": pc.is_valid(value).cast(pa.uint8()),
            "value": value.cast(pa.uint8()) if pa.types.is_boolean(value.type) else value,
            "row": pa.array(np.arange(len(value), dtype=np.int64)),
        }
    ).filter(pc.is_valid(by))
    ties = "ascending" if function == "last" else "descending"
    order = pc.sort_indices(table, sort_keys=[("by", "ascending"), ("some", ties), ("value", ties)])
    ordered = table.select([GROUP, "row"]).take(order)
    chosen = ordered.group_by(GROUP, use_threads=False).aggregate([("row", function)])
    rows = np.full(num_groups, -1, dtype=np.int64)
    rows[chosen.column(GROUP).to_numpy()] = chosen.column(f"row_{function}").to_numpy()
    indices = pa.array(rows, mask=rows < 0)
    return value.take(indices), by.take(indices)
