"""The computation of an aggregate function: its state, and how that is created from rows, merged and read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from backends.encoding.columns import Integers, Mask, one_array, struct_array
from spark_bridge.aggregates.row_groups import as_type, plain
from spark_bridge.exceptions import InvalidOperatorError

# Rows in groups: the rows of one key in a batch, or the states to merge into one.


class Groups:
    """Rows in ``num`` groups: ``ids`` has the group of each row, 0 to ``num`` - 1."""

    def __init__(self, ids: Integers, num: int) -> None:
        self.ids = ids
        self.num = num

    @cached_property
    def sizes(self) -> Integers:
        return np.bincount(self.ids, minlength=self.num)

    def counts(self, mask: Mask | None) -> Integers:
        """Return each group's number of rows whose ``mask`` is not set; the mask marks nulls."""
        return self.sizes if mask is None else np.bincount(self.ids[~mask], minlength=self.num)

    def where(self, chosen: Mask) -> Groups:
        return Groups(self.ids[chosen], self.num)


# One output column of an aggregation: its function, columns and types.


_FUNCTION = re.compile(r"(\w+)(?:\(([\w,]*)\))?")


@dataclass(frozen=True)
class UserAggregate:
    """A user's own aggregate, as functions on Arrow tables; see ``functions.merge``."""

    state: pa.Schema
    partial: Callable[[pa.Table], pa.Table]
    merge: Callable[[pa.Table], pa.Table]
    finish: Callable[[pa.Table], pa.Array | pa.ChunkedArray] | None = None
    result_type: pa.DataType | None = None


@dataclass
class DroppedElements:
    """Counts the elements that the ``limit`` of a list has dropped."""

    num: int = 0


@dataclass(frozen=True)
class Output:
    """One output column: ``function`` of the input ``column`` (None: of rows), ordered ``by`` where order matters.

    ``function`` has the arguments that its state depends on, as in ``top_k(10)``. ``columns`` are several input
    columns, which make a struct, instead of ``column``. ``type`` is the type of the input, ``by_type`` that of ``by``.

    With ``max_bytes`` a list keeps all elements, up to that many bytes for each key, whatever limit its function names;
    without, the elements beyond the limit are counted by ``dropped``.
    """

    name: str
    function: str
    column: str | None
    by: str | None
    type: pa.DataType | None
    by_type: pa.DataType | None = None
    columns: tuple[str, ...] = ()
    user: UserAggregate | None = None
    max_bytes: int | None = None
    dropped: DroppedElements | None = field(default=None, compare=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(c for c in (self.column, *self.columns, self.by) if c is not None)

    @property
    def input_types(self) -> list[tuple[str, pa.DataType]]:
        inputs = [] if self.column is None or self.type is None else [(self.column, self.type)]
        if self.type is not None and pa.types.is_struct(self.type):
            inputs += [(name, self.type.field(name).type) for name in self.columns]
        return inputs if self.by is None or self.by_type is None else [*inputs, (self.by, self.by_type)]


def split_function(function: str) -> tuple[str, tuple[str, ...]]:
    """Return name and arguments of a function such as ``top_k(10)``; raises ``InvalidOperatorError``."""
    if (match := _FUNCTION.fullmatch(function)) is None:
        raise InvalidOperatorError(f"{function!r} is not an aggregate function; it must look like sum, or top_k(10).")
    return match[1], tuple(match[2].split(",")) if match[2] else ()


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
    - ``result_type``, ``result``: the type of the results, and the results of states. Both receive the function's
      name and arguments and the fields of the state columns: a reader has only the schema of the state, and no
      ``Output``.
    """

    parts: Callable[[Output], Sequence[tuple[str, pa.DataType]]]
    of_rows: Callable[[Output, Groups, pa.RecordBatch], OutputState]
    merge: Callable[[Output, Groups, OutputState], OutputState]
    merge_pairs: Callable[[Output, OutputState, OutputState], OutputState] | None = None
    result_type: Callable[[str, FunctionArguments, list[pa.Field]], pa.DataType] = lambda _, __, parts: parts[0].type
    result: Callable[[str, FunctionArguments, list[pa.Field], OutputState], pa.Array] = lambda *given: given[3][0]


def input_column(output: Output, rows: pa.RecordBatch) -> pa.Array:
    """Return the input column of an output in its declared type; several columns become a struct."""
    kind = output.type
    if output.columns and kind is not None:
        children = [as_type(rows.column(c), kind.field(i).type) for i, c in enumerate(output.columns)]
        return struct_array(children, rows.num_rows, None, kind)
    column = rows.column(output.column)
    return plain(column) if kind is None or pa.types.is_null(kind) else as_type(column, kind)


def order_of(output: Output, rows: pa.RecordBatch) -> pa.Array:
    """Return the column that an output is ordered by, in its declared type."""
    return as_type(rows.column(output.by), output.by_type)


# The names of an aggregation's state columns: ``<output>.<function>.<part>``, such as ``total.sum.sum``.
#
# The names alone define how to read the state: a client that has only the schema of the state can compute results.


class StateColumn(NamedTuple):
    """A state column: the output that it belongs to, the output's function with arguments, and the part of the state.

    An output may have dots in its name; functions and parts have none.
    """

    output: str
    function: str
    part: str

    @property
    def name(self) -> str:
        return f"{self.output}.{self.function}.{self.part}"


def split_state_column(name: str) -> StateColumn:
    """Return the parts of the name of a state column; raises ``ValueError`` for any other name."""
    output, function, part = name.rsplit(".", 2)
    return StateColumn(output, function, part)


def outputs_of(state: pa.Schema) -> list[tuple[str, str, list[pa.Field]]]:
    """Return name, function and state columns of each output; raises ``ValueError`` for a name of another form."""
    outputs: dict[tuple[str, str], list[pa.Field]] = {}
    for column in state:
        name, function, _ = split_state_column(column.name)
        outputs.setdefault((name, function), []).append(column)
    return [(name, function, parts) for (name, function), parts in outputs.items()]


# ``merge``: a user's own aggregate. Its functions are run on whole tables, and their answers are checked.


GROUP_ID = "group_id"
"""The column that the user's functions group by: an int64 per row or state."""


def user_merge(output: str, user: UserAggregate, groups: Groups, states: list[pa.Array]) -> list[pa.Array]:
    """Return the states that the user's ``merge`` makes of states; raises ``InvalidOperatorError``."""
    schema = pa.schema([pa.field(GROUP_ID, pa.int64()), *user.state])
    table = pa.Table.from_arrays([pa.array(groups.ids), *states], schema=schema)
    return _states(f"{output}: merge", user.merge(table), user.state, groups.num)


def user_result(output: str, user: UserAggregate, states: list[pa.Array]) -> pa.Array:
    """Return the results of the user's ``finish``, one per state; raises ``InvalidOperatorError``."""
    if user.finish is None or user.result_type is None:
        return states_as_result(states, user.state)
    result: Any = user.finish(pa.Table.from_arrays(states, schema=user.state))
    if not isinstance(result, pa.Array | pa.ChunkedArray) or len(result) != len(states[0]):
        raise InvalidOperatorError(
            f"{output}: finish returned {_described(result)}; it must be an Arrow array of {len(states[0])} values, "
            "one for each row of its table."
        )
    return _as_arrow_type(f"{output}: finish", result, user.result_type)


def states_as_result(states: list[pa.Array], schema: pa.Schema) -> pa.Array:
    """Return states as results: the one state column, or a struct of several."""
    if len(states) == 1:
        return states[0]
    return struct_array(states, len(states[0]), None, state_result_type(schema))


def state_result_type(schema: pa.Schema) -> pa.DataType:
    """Return the type of ``states_as_result``."""
    return schema.field(0).type if len(schema) == 1 else pa.struct(list(schema))


def _states(what: str, answer: Any, schema: pa.Schema, num: int) -> list[pa.Array]:
    """Return the state columns of an answer, in the order of the groups; raises ``InvalidOperatorError``."""
    if not isinstance(answer, pa.Table | pa.RecordBatch):
        raise InvalidOperatorError(f"{what} returned {_described(answer)}; it must return a pyarrow.Table.")
    if missing := [c for c in (GROUP_ID, *schema.names) if c not in answer.schema.names]:
        raise InvalidOperatorError(
            f"{what} answered the columns {', '.join(answer.schema.names)}; it must give {GROUP_ID} and the state "
            f"columns {', '.join(schema.names)} ({', '.join(missing)} missing)."
        )
    order = _order(what, answer.column(GROUP_ID), num)
    return [_as_arrow_type(f"{what}: {f.name}", answer.column(f.name).take(order), f.type) for f in schema]


def _order(what: str, group_ids: pa.Array | pa.ChunkedArray, num: int) -> pa.Array:
    ids: Integers = np.asarray(group_ids.cast(pa.int64()).fill_null(-1))
    if len(ids) != num or (np.bincount(ids[(ids >= 0) & (ids < num)], minlength=num) != 1).any():
        raise InvalidOperatorError(
            f"{what} answered {len(ids)} rows for {num} groups; it must give one row for each {GROUP_ID} in the table "
            "that it was given, with the same values of it."
        )
    return pa.array(np.argsort(ids))


def _as_arrow_type(what: str, column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    column = one_array(column)
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidOperatorError(f"{what} has the type {column.type} where {kind} was declared: {error}") from error


def _described(answer: Any) -> str:
    length = f" of length {len(answer)}" if hasattr(answer, "__len__") else ""
    return f"a {type(answer).__module__}.{type(answer).__name__}{length}"


def _user_rows(output: Output, groups: Groups, rows: pa.RecordBatch) -> OutputState:
    """Return the states that the user's ``partial`` makes of the rows; raises ``InvalidOperatorError``."""
    assert output.user is not None
    table = pa.table({GROUP_ID: groups.ids, **{c: plain(rows.column(c)) for c in output.columns}})
    return _states(f"{output.name}: partial", output.user.partial(table), output.user.state, groups.num)


def _user_merge(output: Output, groups: Groups, state: OutputState) -> OutputState:
    """Merge states, without those that are null in all columns: rows older than the output have such states."""
    assert output.user is not None
    has_state = np.logical_or.reduce([np.asarray(column.is_valid()) for column in state])
    if has_state.all():
        return user_merge(output.name, output.user, groups, state)
    present, ids = np.unique(groups.ids[has_state], return_inverse=True)
    old_state = [column.filter(pa.array(has_state)) for column in state]
    merged = user_merge(output.name, output.user, Groups(ids, len(present)), old_state) if len(present) else old_state
    rows = np.full(groups.num, -1, np.int64)
    rows[present] = np.arange(len(present))
    return [column.take(pa.array(rows, mask=rows < 0)) for column in merged]


def _as_declared(parts: list[pa.Field]) -> pa.Schema:
    return pa.schema([f.with_name(split_state_column(f.name).part) for f in parts])


USER = Computation(
    parts=lambda output: [] if output.user is None else [(f.name, f.type) for f in output.user.state],
    of_rows=_user_rows,
    merge=_user_merge,
    result_type=lambda _, __, parts: state_result_type(_as_declared(parts)),
    result=lambda _, __, parts, state: states_as_result(state, _as_declared(parts)),
)
