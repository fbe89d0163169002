"""Running aggregates on Arrow columns: states of rows, merging of states, and results.

An aggregation keeps some state columns per output (see ``state_columns``), so that the schema of the state alone
defines how to read it. Everything works on whole columns: rows carry a group id (0 to m - 1), and every step returns
batches of m rows in the order of these ids.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.user_values import python_rows
from coordinator_actor.messages import DROPPED_ELEMENTS
from spark_bridge.aggregates import builtin_aggregates, lists_and_sketches
from spark_bridge.aggregates.computation import (
    USER,
    Computation,
    DroppedElements,
    Groups,
    Output,
    OutputState,
    StateColumn,
    outputs_of,
    split_function,
    split_state_column,
    user_result,
)
from spark_bridge.aggregates.lists_and_sketches import LISTS, ListTooLarge, counts_dropped
from spark_bridge.aggregates.row_groups import as_type, plain
from spark_bridge.exceptions import InvalidOperatorError, SparkBridgeError

# The computation of each aggregate function.


COMPUTATIONS: dict[str, Computation] = {
    "count": builtin_aggregates.COUNT,
    "count_if": builtin_aggregates.COUNT_IF,
    "sum": builtin_aggregates.SUM,
    "mean": builtin_aggregates.MEAN,
    "min": builtin_aggregates.MIN,
    "max": builtin_aggregates.MAX,
    "first": builtin_aggregates.FIRST,
    "last": builtin_aggregates.LAST,
    **dict.fromkeys(("stddev_samp", "stddev_pop", "var_samp", "var_pop"), builtin_aggregates.MOMENTS),
    **dict.fromkeys(("collect_list", "collect_set", "top_k"), LISTS),
    "approx_count_distinct": lists_and_sketches.SKETCH,
    "percentile_approx": lists_and_sketches.PERCENTILES,
    "merge": USER,
}


def computation_of(function: str) -> Computation:
    """Return the computation of a function such as ``top_k(10)``; raises ``InvalidOperatorError``."""
    name = split_function(function)[0]
    if name not in COMPUTATIONS:
        raise InvalidOperatorError(f"Unknown aggregate function {function!r}; there are {', '.join(COMPUTATIONS)}.")
    return COMPUTATIONS[name]


GroupIds: TypeAlias = pa.Array | npt.NDArray[Any]
"""The group of each row, 0 to m - 1: integers, as Arrow or numpy array."""


class Aggregator:
    """The aggregation of one operator: rows to states, states to states, and states to results."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.outputs = tuple(outputs)
        self.state_schema = pa.schema([f for o in self.outputs for f in state_fields(o)])

    def counting(self) -> Aggregator:
        """Return the same aggregation, which counts the elements that its limits drop."""
        return Aggregator([replace(o, dropped=DroppedElements() if counts_dropped(o) else None) for o in self.outputs])

    def unlimited(self) -> Aggregator:
        """Return the same aggregation with all elements in its lists: who counts them comes later."""
        return Aggregator([replace(o, max_bytes=sys.maxsize) if counts_dropped(o) else o for o in self.outputs])

    def figures(self) -> dict[str, float]:
        """Return the figures of an aggregation that counts; none if it has no limits."""
        dropped = [o.dropped.num for o in self.outputs if o.dropped is not None]
        return {DROPPED_ELEMENTS: float(sum(dropped))} if dropped else {}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the columns of the rows that the outputs read, each once."""
        return tuple(dict.fromkeys(c for o in self.outputs for c in o.inputs))

    @property
    def input_schema(self) -> pa.Schema:
        """Return the columns of the rows that the outputs read; of a column that is only counted, the type is null."""
        types: dict[str, pa.DataType] = {}
        for output in self.outputs:
            for name, kind in output.input_types:
                if types.get(name, pa.null()) == pa.null():
                    types[name] = kind
        return pa.schema(list(types.items()))

    @property
    def zeros(self) -> tuple[str, ...]:
        """Return the state columns that are not null in the state of no rows: counts, and empty lists and sketches."""
        builtin = Aggregator([o for o in self.outputs if o.user is None])
        rows = pa.record_batch([pa.nulls(0, f.type) for f in builtin.input_schema], schema=builtin.input_schema)
        state = builtin.partial(np.zeros(0, np.int64), 1, rows)
        return tuple(f.name for f, column in zip(state.schema, state.columns, strict=True) if column[0].is_valid)

    @property
    def result_fields(self) -> list[pa.Field]:
        fields = result_fields(self.state_schema)
        for i, output in enumerate(self.outputs):
            if output.user is not None and output.user.result_type is not None:
                fields[i] = pa.field(output.name, output.user.result_type)
        return fields

    def partial(self, groups: GroupIds, num_groups: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the state of the rows of each group.

        Raises ``SparkBridgeError`` for a sum that leaves the range of its type.
        """
        by_group = _groups(groups, num_groups)
        return self._states(lambda output: computation_of(output.function).of_rows(output, by_group, rows))

    def merge(self, groups: GroupIds, num_groups: int, states: pa.RecordBatch) -> pa.RecordBatch:
        """Return one state for the states of each group. Every id from 0 to ``num_groups - 1`` occurs at least once.

        Raises ``SparkBridgeError`` for a sum that leaves the range of its type.
        """
        by_group = _groups(groups, num_groups)
        return self._states(lambda o: computation_of(o.function).merge(o, by_group, self._of(o, states)))

    def merge_pairs(self, old: pa.RecordBatch, present: pa.BooleanArray, new: pa.RecordBatch) -> pa.RecordBatch:
        """Return, row by row, one state of an old and a new one.

        ``present`` marks the rows with an old state; elsewhere ``old`` has nulls. Raises as ``merge`` does.
        """
        is_old = np.asarray(present)
        if not is_old.any():
            return new
        ids = np.concatenate([np.flatnonzero(is_old), np.arange(new.num_rows)])
        by_group = Groups(ids, new.num_rows)

        def merged(output: Output) -> OutputState:
            computation = computation_of(output.function)
            before, after = self._of(output, old), self._of(output, new)
            if computation.merge_pairs is not None:
                return computation.merge_pairs(output, before, after)
            old_states = before if is_old.all() else [column.filter(present) for column in before]
            both = [pa.concat_arrays([b, a]) for b, a in zip(old_states, after, strict=True)]
            return computation.merge(output, by_group, both)

        return self._states(merged)

    def results(self, states: pa.RecordBatch) -> list[pa.Array]:
        """Return the output columns of states.

        A row of nulls has a null result, unless a user's own ``finish`` decides otherwise.
        """
        columns = results(states)
        for i, output in enumerate(self.outputs):
            if output.user is not None:
                columns[i] = user_result(output.name, output.user, self._of(output, states))
        return columns

    def _of(self, output: Output, states: pa.RecordBatch) -> OutputState:
        return [as_type(states.column(states.schema.get_field_index(f.name)), f.type) for f in state_fields(output)]

    def _states(self, calculate: Callable[[Output], OutputState]) -> pa.RecordBatch:
        columns: list[pa.Array] = []
        for output in self.outputs:
            try:
                columns += calculate(output)
            except builtin_aggregates.SumOverflow as error:
                raise _overflow(state_fields(output)[0]) from error
            except ListTooLarge as error:
                raise ListTooLargeError.of(output, error) from error
        return pa.RecordBatch.from_arrays(columns, schema=self.state_schema)


class ListTooLargeError(SparkBridgeError):
    """A list has more bytes than ``max_bytes``. ``group`` is the number of its group."""

    group = 0

    @classmethod
    def of(cls, output: Output, error: ListTooLarge) -> ListTooLargeError:
        function = split_function(output.function)[0]
        raised = cls(
            f"The {function} of output {output.name!r} has {error.num_elements:,} elements of {error.num_bytes:,} "
            f"bytes, more than max_bytes={output.max_bytes:,}. The batch has changed nothing. Start the query again "
            "with a greater max_bytes=, which keeps the list. Or give the output another name, under which it begins "
            f"empty, with S.{function}(..., limit=), which drops elements. For long lists use a list state in a "
            "processor."
        )
        raised.group = error.group
        return raised

    def of_key(self, key: pa.RecordBatch) -> ListTooLargeError:
        return ListTooLargeError(f"For the key {python_rows(key)[0]}: {self}")


def state_fields(output: Output) -> list[pa.Field]:
    """Return the state columns of an output."""
    parts = computation_of(output.function).parts(output)
    return [pa.field(StateColumn(output.name, output.function, part).name, kind) for part, kind in parts]


# -- for readers of states, which have only the schema of the state ------------------------------


def result_fields(state: pa.Schema) -> list[pa.Field]:
    """Return the output columns of an aggregation, from the schema of its state.

    The output of a user's own aggregate is its state column, or a struct of several. Raises ``ValueError`` for a name
    that is not of the form of a state column's.
    """
    return [
        pa.field(name, computation_of(function).result_type(*split_function(function), parts))
        for name, function, parts in outputs_of(state)
    ]


def is_aggregate_state(state: pa.Schema) -> bool:
    """Return whether these are the state columns of an aggregation, which has results."""
    try:
        return bool(result_fields(state))
    except ValueError:  # a name that is not of the form of a state column's
        return False


def results(states: pa.RecordBatch) -> list[pa.Array]:
    """Return the output columns of states, in the types of ``result_fields``; a row of nulls becomes a row of nulls."""
    return [
        computation.result(name, arguments, parts, [states.column(i) for i in places])
        for computation, name, arguments, parts, places in _computations(states.schema)
    ]


@lru_cache(256)
def _computations(state: pa.Schema) -> list[tuple[Computation, str, tuple[str, ...], list[pa.Field], list[int]]]:
    """Return, by output: the computation, name and arguments of its function, its state columns and their places."""
    return [
        (computation_of(function), *split_function(function), parts, [state.get_field_index(f.name) for f in parts])
        for _, function, parts in outputs_of(state)
    ]


def merge_states(states: pa.RecordBatch, groups: GroupIds, num_groups: int) -> pa.RecordBatch:
    """Return one state for the states of each group, as ``Aggregator.merge`` does; a group without any has no rows.

    The schema of the states is all that is needed, so ``merge`` by functions of a user is not possible.
    """
    by_group = _groups(groups, num_groups)
    columns: list[pa.Array] = []
    for name, function, parts in outputs_of(states.schema):
        by = name if parts[0].name.endswith(lists_and_sketches.LISTS_BY_ORDER) else None
        output = Output(name, function, None, by, None)
        state = [plain(states.column(states.schema.get_field_index(f.name))) for f in parts]
        try:
            columns += computation_of(function).merge(output, by_group, state)
        except builtin_aggregates.SumOverflow as error:
            raise _overflow(parts[0]) from error
    return pa.RecordBatch.from_arrays(columns, names=states.schema.names)


def _groups(ids: GroupIds, num_groups: int) -> Groups:
    return Groups(np.asarray(ids).astype(np.int64, copy=False), num_groups)


_SUMS = {"mean": "sum behind the mean"}
"""The name in an overflow message, if it differs from that of the sum in the state."""


def _overflow(field: pa.Field) -> SparkBridgeError:
    name, function, _ = split_state_column(field.name)
    return SparkBridgeError(
        f"The {_SUMS.get(split_function(function)[0], function)} of output {name!r} has left the range of "
        f"{field.type}. Cast its input to a wider type (decimal or double). If the output keeps its name, the restart "
        "is refused and prints the rewrite_state call that keeps the stored values. With another name the output "
        "begins with no rows."
    )
