"""Running aggregates on Arrow columns: partial results of rows, merging of states, final results.

An aggregation keeps some state columns per output, named ``<output>.<function>.<part>``, so that the
state's schema alone says how to read it. Everything works on whole columns: rows carry a group id
(0..m-1), and every step gives tables of m rows in the order of these ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_bridge.aggregates.column_order import plain
from spark_bridge.aggregates.group_kernels import Groups, SumOverflow
from spark_bridge.aggregates.kinds import Kind, State, kind_of
from spark_bridge.aggregates.outputs import Output, split_function
from spark_bridge.aggregates.user_aggregate import user_result
from spark_bridge.exceptions import SparkBridgeError

__all__ = ["Aggregator", "Output", "outputs_of", "plain", "result_fields", "results"]

GroupIds: TypeAlias = pa.Array | npt.NDArray[Any]
"""The group of each row, 0 to m - 1: integers, as Arrow or numpy array."""


class Aggregator:
    """The aggregation of one operator: rows to states, states to states, and states to results."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.outputs = tuple(outputs)
        self.state_schema = pa.schema([f for o in self.outputs for f in state_fields(o)])

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns of the rows that the outputs read, each once."""
        return tuple(dict.fromkeys(c for o in self.outputs for c in o.inputs))

    @property
    def result_fields(self) -> list[pa.Field]:
        """The output columns."""
        fields = result_fields(self.state_schema)
        for i, output in enumerate(self.outputs):
            if output.user is not None and output.user.result_type is not None:
                fields[i] = pa.field(output.name, output.user.result_type)
        return fields

    def partial(self, groups: GroupIds, num_groups: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The states of the rows of each group. Raises ``SparkBridgeError`` where a sum leaves the range of its type."""
        by_group = _groups(groups, num_groups)
        return self._states(lambda output: kind_of(output.function).of_rows(output, by_group, rows))

    def merge(self, groups: GroupIds, num_groups: int, states: pa.RecordBatch) -> pa.RecordBatch:
        """Merge the states that share a group id. Every id from 0 to ``num_groups - 1`` occurs at least once."""
        by_group = _groups(groups, num_groups)
        return self._states(lambda output: kind_of(output.function).merge(output, by_group, self._of(output, states)))

    def merge_pairs(self, old: pa.RecordBatch, present: pa.BooleanArray, new: pa.RecordBatch) -> pa.RecordBatch:
        """Row by row, one state of two. ``present``: where there is an old one; elsewhere ``old`` has nulls."""
        is_old = np.asarray(present)
        if not is_old.any():
            return new
        ids = np.concatenate([np.flatnonzero(is_old), np.arange(new.num_rows)])
        by_group = Groups(ids, new.num_rows)

        def merged(output: Output) -> State:
            kind, before, after = kind_of(output.function), self._of(output, old), self._of(output, new)
            if kind.merge_pairs is not None:
                return kind.merge_pairs(output, before, after)
            held = before if is_old.all() else [column.filter(present) for column in before]
            both = [pa.concat_arrays([b, a]) for b, a in zip(held, after, strict=True)]
            return kind.merge(output, by_group, both)

        return self._states(merged)

    def results(self, states: pa.RecordBatch) -> list[pa.Array]:
        """The output columns of states; a row of nulls gives a row of nulls, where no function of the user's has a say."""
        columns = results(states)
        for i, output in enumerate(self.outputs):
            if output.user is not None:
                columns[i] = user_result(output.name, output.user, self._of(output, states))
        return columns

    def _of(self, output: Output, states: pa.RecordBatch) -> State:
        # Spark gives back lists and timestamps of its own spelling: field names, the session's zone.
        columns = [(plain(states.column(states.schema.get_field_index(f.name))), f) for f in state_fields(output)]
        return [column if column.type == f.type else column.cast(f.type) for column, f in columns]

    def _states(self, calculate: Callable[[Output], State]) -> pa.RecordBatch:
        columns: list[pa.Array] = []
        for output in self.outputs:
            try:
                columns += calculate(output)
            except SumOverflow as error:
                raise _overflow(state_fields(output)[0]) from error
        return pa.RecordBatch.from_arrays(columns, schema=self.state_schema)


def state_fields(output: Output) -> list[pa.Field]:
    """The columns that an output keeps as state."""
    parts = kind_of(output.function).parts(output)
    return [pa.field(f"{output.name}.{output.function}.{part}", kind) for part, kind in parts]


def result_fields(state: pa.Schema) -> list[pa.Field]:
    """The output columns of an aggregation, from the schema of its state.

    Of a user's own aggregate these are its state columns, together as a struct if they are several.
    """
    fields = []
    for name, function, parts in outputs_of(state):
        kind, (function_name, arguments) = kind_of(function), split_function(function)
        fields.append(pa.field(name, kind.result_type(function_name, arguments, parts)))
    return fields


def outputs_of(state: pa.Schema) -> list[tuple[str, str, list[pa.Field]]]:
    """Output name, function and state columns, read from the names of the state columns."""
    outputs: dict[tuple[str, str], list[pa.Field]] = {}
    for field in state:
        name, function, _ = field.name.rsplit(".", 2)
        outputs.setdefault((name, function), []).append(field)
    return [(name, function, parts) for (name, function), parts in outputs.items()]


def results(states: pa.RecordBatch) -> list[pa.Array]:
    """Output columns from state columns, in the types of ``result_fields``; a row of nulls gives a row of nulls."""
    columns = []
    for kind, name, arguments, parts, places in _results_of(states.schema):
        try:
            columns.append(kind.result(name, arguments, parts, [states.column(i) for i in places]))
        except SumOverflow as error:
            raise _overflow(parts[0]) from error
    return columns


@lru_cache(256)
def _results_of(state: pa.Schema) -> list[tuple[Kind, str, tuple[str, ...], list[pa.Field], list[int]]]:
    """How each output is made: the kind, name and arguments of its function, its state columns and their places."""
    return [
        (kind_of(function), *split_function(function), parts, [state.get_field_index(f.name) for f in parts])
        for _, function, parts in outputs_of(state)
    ]


def _groups(ids: GroupIds, num_groups: int) -> Groups:
    return Groups(np.asarray(ids).astype(np.int64, copy=False), num_groups)


def _overflow(field: pa.Field) -> SparkBridgeError:
    name, function, _ = field.name.rsplit(".", 2)
    return SparkBridgeError(
        f"The {function} of output {name!r} has left the range of {field.type}; "
        "cast its input to a wider type (decimal or double) and start with a new operator."
    )
