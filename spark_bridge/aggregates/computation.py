"""The computation of an aggregate function: the state that it keeps, and how state is made of rows, merged and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from backends.encoding.columns import struct_array
from spark_bridge.aggregates.column_order import plain
from spark_bridge.aggregates.groups import Groups
from spark_bridge.aggregates.outputs import Output

OutputState: TypeAlias = list[pa.Array]
"""The state columns of one output, one value per group."""
FunctionArguments: TypeAlias = tuple[str, ...]
"""The arguments of a function, such as ("10",) of ``top_k(10)``."""


@dataclass(frozen=True)
class Computation:
    """The computation of one aggregate function, whole columns at a time.

    - ``parts``: the names and types of the state columns.
    - ``of_rows``: the state of the rows of each group.
    - ``merge``: one state of the states of each group.
    - ``merge_pairs``: row by row, one state of two, a row of nulls being the state of no rows; without it, ``merge`` is
      used.
    - ``result_type``, ``result``: the type of the results, and the results of states. Both are given the function's
      name and arguments and the fields of the state columns: a reader has only the schema of the state, and no
      ``Output``.
    """

    parts: Callable[[Output], Sequence[tuple[str, pa.DataType]]]
    of_rows: Callable[[Output, Groups, pa.RecordBatch], OutputState]
    merge: Callable[[Output, Groups, OutputState], OutputState]
    merge_pairs: Callable[[Output, OutputState, OutputState], OutputState] | None = None
    result_type: Callable[[str, FunctionArguments, list[pa.Field]], pa.DataType] = lambda _, __, parts: parts[0].type
    result: Callable[[str, FunctionArguments, list[pa.Field], OutputState], pa.Array] = lambda _, __, ___, state: state[
        0
    ]


def input_column(output: Output, rows: pa.RecordBatch) -> pa.Array:
    """Return the input column of an output in its declared type; several columns become a struct."""
    kind = output.type
    if output.columns and kind is not None:
        children = [_as_type(rows.column(c), kind.field(i).type) for i, c in enumerate(output.columns)]
        return struct_array(children, rows.num_rows, None, kind)
    return _as_type(rows.column(output.column), output.type)


def order_of(output: Output, rows: pa.RecordBatch) -> pa.Array:
    """Return the column that an output is ordered by, in its declared type."""
    return _as_type(rows.column(output.by), output.by_type)


def _as_type(column: pa.Array, kind: pa.DataType | None) -> pa.Array:
    column = plain(column)
    return column if kind is None or pa.types.is_null(kind) or column.type == kind else column.cast(kind)
