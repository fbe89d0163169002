"""The results of one aggregate's state for single lookups: what ``results`` of the aggregates does for columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, TypeAlias

import pyarrow as pa

from spark_bridge.aggregates.outputs import split_function
from spark_bridge.aggregates.state_columns import outputs_of

Row: TypeAlias = Mapping[str, Any]
Result: TypeAlias = Callable[[Row], Any]

AS_STORED = ("count", "count_if", "sum", "min", "max", "first", "last")
"""The functions whose result is the first column of their state."""
MOMENT_FUNCTIONS = ("var_pop", "var_samp", "stddev_pop", "stddev_samp")
EXACT_IN_DOUBLE = 1 << 53


class _Unsure(Exception):
    """The result is left to the column-wise code (``results``)."""


class SingleResults:
    """Turns single states of one schema into results, exactly as the column-wise code does."""

    def __init__(self, outputs: Mapping[str, Result]) -> None:
        self._outputs = list(outputs.items())

    @classmethod
    def of(cls, state: pa.Schema) -> SingleResults | None:
        """Return the results for state columns.

        None for functions other than counts, sums, means, extremes, first, last, moments.
        """
        outputs: dict[str, Result] = {}
        for name, function, parts in outputs_of(state):
            result = _result_of(function, [part.name for part in parts])
            if result is None:
                return None
            outputs[name] = result
        return cls(outputs)

    def of_row(self, row: Row) -> dict[str, Any] | None:
        """Return the output columns of a row of state columns; None leaves the row to the columns."""
        try:
            return {name: result(row) for name, result in self._outputs}
        except _Unsure:
            return None


def _result_of(function: str, columns: list[str]) -> Result | None:
    name, arguments = split_function(function)
    if name in AS_STORED:
        return itemgetter(columns[0])
    if name == "mean" and not arguments:
        return _mean(*columns)
    if name in MOMENT_FUNCTIONS:
        return _moment(name, *columns)
    return None


def _mean(total_column: str, count_column: str) -> Result:
    def mean(row: Row) -> float | None:
        total, count = row[total_column], row[count_column]
        if count is not None and abs(count) > EXACT_IN_DOUBLE:
            raise _Unsure
        return None if total is None or not count else float(total / count)

    return mean


def _moment(function: str, count_column: str, _: str, squares_column: str) -> Result:
    fewer = 1 if function.endswith("samp") else 0
    is_root = function.startswith("stddev")

    def moment(row: Row) -> float | None:
        count, squares = row[count_column] or 0, row[squares_column]
        if squares is None:
            squares = 0.0
        if abs(count) > EXACT_IN_DOUBLE or squares < 0:
            raise _Unsure
        divisor = count - fewer
        if divisor <= 0:
            return None
        return math.sqrt(squares / divisor) if is_root else float(squares / divisor)

    return moment
