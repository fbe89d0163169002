"""``merge``: a user's own aggregate. Its functions are run on whole tables, and their answers are checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from backends.encoding.columns import Integers, struct_array
from spark_bridge.aggregates.column_order import plain
from spark_bridge.aggregates.computation import Computation, OutputState
from spark_bridge.aggregates.groups import Groups
from spark_bridge.aggregates.outputs import Output, UserAggregate
from spark_bridge.aggregates.state_columns import split_state_column
from spark_bridge.exceptions import InvalidOperatorError

GROUP_ID = "group_id"
"""The column by which the user's functions group: an int64 per row or state."""


def user_partial(output: str, user: UserAggregate, groups: Groups, columns: dict[str, pa.Array]) -> list[pa.Array]:
    """Return the states that the user's ``partial`` makes of the rows; raises ``InvalidOperatorError``."""
    rows = pa.table({GROUP_ID: groups.ids, **columns})
    return _states(f"{output}: partial", user.partial(rows), user.state, groups.num)


def user_merge(output: str, user: UserAggregate, groups: Groups, states: list[pa.Array]) -> list[pa.Array]:
    """Return the states that the user's ``merge`` makes of states; raises ``InvalidOperatorError``."""
    table = pa.Table.from_arrays(
        [pa.array(groups.ids), *states], schema=pa.schema([pa.field(GROUP_ID, pa.int64()), *user.state])
    )
    return _states(f"{output}: merge", user.merge(table), user.state, groups.num)


def user_result(output: str, user: UserAggregate, states: list[pa.Array]) -> pa.Array:
    """Return the results of the user's ``finish``, one per state; raises ``InvalidOperatorError``."""
    if user.finish is None or user.result_type is None:
        return states_as_result(states, user.state)
    result: Any = user.finish(pa.Table.from_arrays(states, schema=user.state))
    if not isinstance(result, pa.Array | pa.ChunkedArray) or len(result) != len(states[0]):
        raise InvalidOperatorError(
            f"{output}: finish answered {_described(result)}; it must give an Arrow array of {len(states[0])} values, "
            "one for each row of the table it was given."
        )
    return _as_type(f"{output}: finish", result, user.result_type)


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
        raise InvalidOperatorError(f"{what} answered {_described(answer)}; it must give a pyarrow.Table.")
    missing = [c for c in (GROUP_ID, *schema.names) if c not in answer.schema.names]
    if missing:
        raise InvalidOperatorError(
            f"{what} answered the columns {', '.join(answer.schema.names)}; it must give {GROUP_ID} and the state "
            f"columns {', '.join(schema.names)} ({', '.join(missing)} missing)."
        )
    order = _order(what, answer.column(GROUP_ID), num)
    return [_as_type(f"{what}: {f.name}", answer.column(f.name).take(order), f.type) for f in schema]


def _order(what: str, group_ids: pa.Array | pa.ChunkedArray, num: int) -> pa.Array:
    ids: Integers = np.asarray(group_ids.cast(pa.int64()).fill_null(-1))
    if len(ids) != num or (np.bincount(ids[(ids >= 0) & (ids < num)], minlength=num) != 1).any():
        raise InvalidOperatorError(
            f"{what} answered {len(ids)} rows for {num} groups; it must give one row for each {GROUP_ID} in the table "
            "that it was given, with the same values of it."
        )
    return pa.array(np.argsort(ids))


def _as_type(what: str, column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
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
    assert output.user is not None
    return user_partial(output.name, output.user, groups, {c: plain(rows.column(c)) for c in output.columns})


def _user_merge(output: Output, groups: Groups, state: OutputState) -> OutputState:
    """Merge states. The function sees no state of nulls alone: rows from before the output was added have that."""
    assert output.user is not None
    has_state = np.logical_or.reduce([np.asarray(column.is_valid()) for column in state])
    if has_state.all():
        return user_merge(output.name, output.user, groups, state)
    present, ids = np.unique(groups.ids[has_state], return_inverse=True)
    known = [column.filter(pa.array(has_state)) for column in state]
    merged = user_merge(output.name, output.user, Groups(ids, len(present)), known) if len(present) else known
    rows = np.full(groups.num, -1, np.int64)
    rows[present] = np.arange(len(present))
    return [column.take(pa.array(rows, mask=rows < 0)) for column in merged]


def _user_parts(output: Output) -> list[tuple[str, pa.DataType]]:
    assert output.user is not None
    return [(f.name, f.type) for f in output.user.state]


def _as_declared(parts: list[pa.Field]) -> pa.Schema:
    return pa.schema([f.with_name(split_state_column(f.name).part) for f in parts])


USER = Computation(
    parts=_user_parts,
    of_rows=_user_rows,
    merge=_user_merge,
    result_type=lambda _, __, parts: state_result_type(_as_declared(parts)),
    result=lambda _, __, parts, state: states_as_result(state, _as_declared(parts)),
)
