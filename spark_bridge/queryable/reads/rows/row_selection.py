"""The rows and columns of an answer: comparisons and projection, on whole columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.protocol.messages import Comparison
from spark_bridge.state_format.stored_rows import VariableRows

POSITION = "position"
_COMPARE: dict[str, Callable[[pa.Array, pa.Scalar], pa.Array]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_NESTED = (pa.types.is_struct, pa.types.is_list, pa.types.is_map)

RowPredicate = Callable[[pa.RecordBatch], pa.Array]
"""Returns for each row whether it passes (boolean)."""


@dataclass(frozen=True)
class RowSelection:
    """Turns rows in the columns of ``VariableRows.output`` into the rows and columns of an answer.

    Make one with ``of``. ``schema`` is the answer's; ``taken`` are the positions of its columns among the given ones.
    """

    schema: pa.Schema
    taken: tuple[int, ...]
    predicates: tuple[RowPredicate, ...]

    @classmethod
    def of(
        cls,
        rows: VariableRows,
        columns: Sequence[str] | None,
        where: Sequence[Comparison],
        *,
        with_position: bool = False,
    ) -> RowSelection:
        """Return the selection of ``columns``, in their order.

        None means all but key group, partition, and when a row expires. ``with_position``: the given rows have the
        position of their key as last column, the rows of the answer as first one. Raises ``RequestError`` for an
        unknown column, or a value that is not of a column's type.
        """
        output = rows.output
        hidden = {len(output) - 1, len(output) - 2}
        if rows.has_ttl and not rows.collect:
            hidden.add(len(output) - 3)
        if columns is None:
            taken = [i for i in range(len(output)) if i not in hidden]
        else:
            taken = [_place(output, name) for name in columns]
            if len(set(taken)) < len(taken):
                twice = next(name for name in output.names if columns.count(name) > 1)
                raise RequestError(f"Column {twice!r} is asked for more than once; name each column once.")
            if not taken:
                raise RequestError("columns=[] asks for no columns; name at least one, or leave it out.")
        fields = [output.field(i) for i in taken]
        if with_position:
            name = POSITION
            while name in (f.name for f in fields):
                name += "_"
            taken = [len(output), *taken]
            fields = [pa.field(name, pa.int64()), *fields]
        return cls(pa.schema(fields), tuple(taken), tuple(_predicate(output, comparison) for comparison in where))

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows and columns of the answer among the given ones."""
        columns = [batch.column(i) for i in self.taken]
        if self.predicates:
            passing = reduce(pc.and_, [predicate(batch) for predicate in self.predicates])
            columns = [column.filter(passing) for column in columns]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _place(output: pa.Schema, name: str) -> int:
    places = [i for i, field in enumerate(output.names) if field == name]
    if not places:
        raise RequestError(f"There is no column {name!r}; there are {', '.join(map(repr, output.names))}.")
    return places[0]


def _predicate(output: pa.Schema, comparison: Comparison) -> RowPredicate:
    place = _place(output, comparison.column)
    kind = output.field(place).type
    if comparison.comparison in ("is null", "is not null"):
        if comparison.values:
            raise RequestError(
                f"{comparison.column!r} {comparison.comparison} takes no values, not {comparison.values}."
            )
        test = pc.is_null if comparison.comparison == "is null" else pc.is_valid
        return lambda batch: test(batch.column(place))
    if any(is_kind(kind) for is_kind in _NESTED):
        raise RequestError(
            f"Column {comparison.column!r} is {kind}: it can be compared with null alone (is null, is not null)."
        )
    values = [scalar_of(comparison.column, value, kind) for value in comparison.values]
    if comparison.comparison == "in":
        among = pa.array([v.as_py() for v in values], kind)
        return lambda batch: pc.is_in(batch.column(place), among)
    if len(values) != 1:
        raise RequestError(f"{comparison.column!r} {comparison.comparison} takes one value, not {len(values)}.")
    compare, value = _COMPARE[comparison.comparison], values[0]
    return lambda batch: compare(batch.column(place), value)


def scalar_of(column: str, value: Any, kind: pa.DataType) -> pa.Scalar:
    """Return a JSON value as a scalar of a column's type."""
    try:
        if isinstance(value, bool) and not pa.types.is_boolean(kind):
            raise TypeError("a truth value")
        if pa.types.is_decimal(kind):
            return pa.scalar(str(value)).cast(kind)
        given = pa.scalar(value)
        if pa.types.is_timestamp(kind) and kind.tz is not None and isinstance(value, str):
            return _instant(given, kind)
        return given.cast(kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"{value!r} cannot be compared with column {column!r}, which is {kind}: {error}") from error


def _instant(given: pa.Scalar, kind: pa.DataType) -> pa.Scalar:
    try:
        return given.cast(kind)
    except pa.ArrowInvalid:  # a time without a zone is UTC
        return pc.assume_timezone(given.cast(pa.timestamp(kind.unit)), "UTC").cast(kind)
