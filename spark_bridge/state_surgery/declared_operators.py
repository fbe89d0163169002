"""The operators that a program declares, and the schemas of their state."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

import numpy as np
import pyarrow as pa

from backends.encoding.key_groups import DEFAULT_KEY_GROUPS
from backends.encoding.operator_schema import OperatorSchema, StateVariable, evolved
from backends.encoding.sorted_pairs import grouped_by_bytes
from backends.exceptions import IncompatibleSchemaError, InvalidStateStoreArgument
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.messages import OperatorSpec
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.row_groups import group_rows
from spark_bridge.operators.join_sides import JoinSide
from spark_bridge.state_format.layouts import ALL_ROWS_KEY, ROLLING
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_surgery import shuffle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Makes states of an ``aggregate`` from input rows, and merges states, as its tasks do.


def states_of_rows(aggregator: Aggregator, pairs: PairsOfRows, owner: str, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the state of input rows: a row for each key. Raises ``InvalidStateStoreArgument`` for missing columns."""
    keys = _keys(pairs)
    if keys.names == [ALL_ROWS_KEY] and ALL_ROWS_KEY not in batch.schema.names:
        batch = batch.append_column(ALL_ROWS_KEY, pa.repeat(pa.scalar(True), batch.num_rows))
    needed = [*keys.names, *aggregator.inputs]
    if missing := [name for name in needed if name not in batch.schema.names]:
        raise InvalidStateStoreArgument(
            f"The input rows of {owner} came without {', '.join(map(repr, missing))}: they need the columns "
            f"{', '.join(map(repr, dict.fromkeys(needed)))}."
        )
    groups = group_rows(batch, keys, DEFAULT_KEY_GROUPS)
    return _rows(pairs, groups.columns, aggregator.partial(groups.ids, len(groups.keys), batch))


def merged_states(aggregator: Aggregator, pairs: PairsOfRows, table: pa.Table) -> pa.RecordBatch:
    """Return rows of state with those of each key merged: ``combine`` of an aggregate."""
    batch = table.rename_columns(_stored_names(pairs)).combine_chunks().to_batches()[0]
    groups = group_rows(batch, _keys(pairs), DEFAULT_KEY_GROUPS)
    return _rows(pairs, groups.columns, aggregator.merge(groups.ids, len(groups.keys), batch))


def _keys(pairs: PairsOfRows) -> pa.Schema:
    return pa.schema([pa.field(f.name, f.type) for f in pairs.rows.key])


def _stored_names(pairs: PairsOfRows) -> list[str]:
    """Return the names of ``pairs.columns`` as the operator knows them, without the suffix that distinguishes them."""
    rows = pairs.rows
    return [*(rows.key.names[i] for i in rows.key_order), *rows.stored_value.names]


def _rows(pairs: PairsOfRows, keys: pa.RecordBatch, states: pa.RecordBatch) -> pa.RecordBatch:
    columns = {name: batch.column(name) for batch in (keys, states) for name in batch.schema.names}
    return pa.RecordBatch.from_arrays([columns[name] for name in _stored_names(pairs)], names=pairs.columns.names)


MERGE = "merge"
"""A value of ``combine``: merge the states of an ``aggregate``, as its tasks do."""
Program: TypeAlias = Union["DataFrame", Sequence[OperatorSpec]]
"""The streaming DataFrame of a query, or the declarations of its operators."""
Combining: TypeAlias = shuffle.Combine | str
"""A function, or ``MERGE``."""


class OfProgram(NamedTuple):
    """An operator of a program; how its rows are aggregated, and the sides of a join, if that is known."""

    spec: OperatorSpec
    aggregator: Aggregator | None = None
    sides: tuple[JoinSide, ...] = ()


def declared(program: Program) -> dict[str, OfProgram]:
    """Return a program's operators by name. Raises ``InvalidStateStoreArgument`` if there are none."""
    if hasattr(program, "_jdf"):
        from spark_bridge.operators.map_in_arrow import declared_in

        declarations = [OfProgram(one.spec, one.aggregator, one.sides) for one in declared_in(program)]
    else:
        declarations = [OfProgram(spec) for spec in program]
    if not declarations or not all(isinstance(one.spec, OperatorSpec) for one in declarations):
        raise InvalidStateStoreArgument(
            "program= must be the DataFrame of a query with stateful operators of this project, as aggregate(...) "
            "returns it, and it has none."
        )
    return {one.spec.name: one for one in declarations}


def schema_to_write(spec: OperatorSpec, stored: OperatorSchema | None) -> OperatorSchema:
    """Return the schema of an operator whose variables in ``stored`` stay as they are, and whose others are new.

    Raises ``InvalidStateStoreArgument`` if the program cannot continue with those that stay.
    """
    try:
        return evolved(stored, OperatorSchema.from_json(spec.schema), spec.kind)
    except IncompatibleSchemaError as error:
        raise InvalidStateStoreArgument(
            f"What stays as it is of operator {spec.name!r} does not fit the program: {error} Rewrite these state "
            "variables as well, or give None as their function, which leaves their rows out."
        ) from error


def written_by_hand(schema: OperatorSchema, variables: Sequence[StateVariable]) -> list[StateVariable]:
    """Return the variables that can get rows: not the sides of ``join``, which wait by times of the program, nor
    rolling aggregates, whose pieces depend on the watermark.
    """
    return [v for v in variables if _can_get_rows(PairsOfRows(VariableRows(schema, v, raw=True)))]


def _can_get_rows(pairs: PairsOfRows) -> bool:
    return not pairs.is_by_time_of_program and pairs.rows.kind != ROLLING


def without_rows(operator: str) -> str:
    """Return why rolling aggregates get no rows, and what their operator does instead."""
    return (
        f"Operator {operator!r} has rolling aggregates: only aggregate(...) makes the tiles of their state, from "
        "events. It begins empty: let its sources begin as far back as the longest horizon."
    )


def check_written_by_hand(operator: str, schema: OperatorSchema, variable: StateVariable) -> None:
    """Raise ``InvalidStateStoreArgument`` for the rows of a side of ``join``, and for rolling aggregates."""
    if VariableRows(schema, variable).kind == ROLLING:
        raise InvalidStateStoreArgument(
            f"{without_rows(operator)} For that give None as their function. Without {operator!r} in operator= its "
            "state stays as it is; other outputs or horizons only need a restart of the query."
        )
    if not written_by_hand(schema, [variable]):
        raise InvalidStateStoreArgument(
            f"The rows of {variable.name!r} of operator {operator!r} cannot be rewritten: only join(...) knows how "
            "long they wait. Give None as their function. The join then begins without them: its sources must reach "
            "back as far as within=."
        )


def combining(
    functions: Combining | Mapping[Any, Combining] | None,
    names: Sequence[shuffle.OperatorVariable],
    default: Mapping[shuffle.OperatorVariable, Combining],
) -> dict[shuffle.OperatorVariable, Combining]:
    """Return how the rows of each variable are combined: as given, for all or by operator or variable, or by default.

    Raises ``InvalidStateStoreArgument`` for a mapping that names something else.
    """
    if functions is None:
        return dict(default)
    if not isinstance(functions, Mapping):
        return dict.fromkeys(names, functions)
    combines = dict(default)
    for target, how in functions.items():
        if not (of_target := [n for n in names if target in (n, n[0])]):
            listed = ", ".join(map(repr, names))
            raise InvalidStateStoreArgument(f"combine= names {target!r}, which gets no rows: there are {listed}.")
        combines.update(dict.fromkeys(of_target, how))
    return combines


def targets_of(
    operator: str,
    schema: OperatorSchema,
    variables: Sequence[StateVariable],
    num_partitions: int,
    combine: Mapping[shuffle.OperatorVariable, Combining],
    aggregator: Aggregator | None = None,
    sides: Sequence[JoinSide] = (),
) -> tuple[shuffle.Target, ...]:
    """Return the targets of the rows of some variables of an operator: those of a join only if ``sides`` are given, and
    none for rolling aggregates.

    Raises ``InvalidStateStoreArgument`` for states that cannot be merged.
    """
    targets = []
    times = {side.name: side.row_times for side in sides if side.expires_after_us is not None}
    for variable in variables:
        pairs = PairsOfRows(VariableRows(schema, variable, raw=True), times.get(variable.name))
        if not _can_get_rows(pairs):
            continue
        name = (operator, variable.name)
        how = combine.get(name)
        if isinstance(how, str):
            how = _merging(how, operator, pairs, aggregator)
        targets.append(shuffle.Target(name, num_partitions, pairs, how))
    return tuple(targets)


def _merging(how: str, operator: str, pairs: PairsOfRows, aggregator: Aggregator | None) -> shuffle.Combine:
    if how != MERGE:
        raise InvalidStateStoreArgument(f"combine={how!r} must be a function, or {MERGE!r}.")
    if aggregator is None or len(pairs.rows.inner):
        raise InvalidStateStoreArgument(
            f"combine={MERGE!r} merges the states of an aggregate, and needs program= to know how: for operator "
            f"{operator!r} give program=, the DataFrame that aggregate(...) returns, or a function as combine=."
        )
    return partial(merged_states, aggregator, pairs)


# Rows that users give, as sources of the first stage: tables, pandas, Ray Datasets and Spark DataFrames.


SOURCE_BYTES = 64 << 20
"""A task of the first stage gets about this many bytes of a table."""
SOURCE_BATCH_ROWS = 1 << 16


def _given_rows(parts: Sequence[shuffle.PackedRows]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        yield from shuffle.unpacked_rows(part)


def _block_rows(ref: Any) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a block of a Ray Dataset, an Arrow table, by its reference."""
    import ray

    yield from ray.get(ref).to_batches(max_chunksize=SOURCE_BATCH_ROWS)


STAGING = "staging"
"""The directory of a new state for rows on their way from Spark's executors to Ray's tasks."""


def _rows_of_file(location: str, options: Mapping[str, str], path: str) -> Iterator[pa.RecordBatch]:
    data = CheckpointStorage.open(location, options).get(path)
    yield from shuffle.unpacked_rows(np.frombuffer(data, np.uint8))


def staged_rows(frame: DataFrame, location: str, options: Mapping[str, str]) -> list[shuffle.RowSource]:
    """Have Spark's executors write the rows of a DataFrame to ``STAGING`` of a storage, all partitions in parallel.

    Returns the files in the order of the rows. Files of failed tasks stay there as well, until the caller removes all.
    """
    from spark_bridge.operators.map_in_arrow import map_in_arrow

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        storage = CheckpointStorage.open(location, options)
        for part in grouped_by_bytes(batches, SOURCE_BYTES):
            path = f"{STAGING}/{uuid.uuid4().hex}.arrow"
            storage.put_new(path, shuffle.packed(part[0].schema, part).tobytes())
            yield pa.RecordBatch.from_arrays([pa.array([path])], names=["path"])

    paths = map_in_arrow(frame, write, "staged_rows", "path string").collect()
    return [partial(_rows_of_file, location, options, row["path"]) for row in paths]


def sources_of(rows: Any) -> Iterator[shuffle.RowSource]:
    """Yield the sources of a user's rows. Raises ``InvalidStateStoreArgument`` for an object without rows."""
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    if isinstance(rows, pa.Table):
        yield from _of_table(rows)
    elif isinstance(rows, pa.RecordBatchReader):
        yield from _together(shuffle.packed(batch.schema, [batch]) for batch in rows)
    elif hasattr(rows, "to_arrow_refs"):
        yield from (partial(_block_rows, ref) for ref in rows.to_arrow_refs())
    elif hasattr(rows, "_jdf"):
        if rows.isStreaming:
            raise InvalidStateStoreArgument(
                "The rows are a streaming DataFrame: state is made of a batch of rows, as spark.read gives them."
            )
        yield from _together(np.frombuffer(row[0], np.uint8) for row in _of_frame(rows))
    elif type(rows).__module__.partition(".")[0] == "pandas":
        yield from _of_table(pa.Table.from_pandas(rows, preserve_index=False))
    else:
        raise InvalidStateStoreArgument(
            f"The rows are {type(rows).__name__}: give a pyarrow Table, RecordBatch or RecordBatchReader, a pandas "
            "DataFrame, a Ray Dataset or a Spark DataFrame."
        )


def _together(parts: Iterable[shuffle.PackedRows]) -> Iterator[shuffle.RowSource]:
    return (partial(_given_rows, group) for group in grouped_by_bytes(parts, SOURCE_BYTES))


def _of_table(table: pa.Table) -> Iterator[shuffle.RowSource]:
    step = max(1, min(table.num_rows, table.num_rows * SOURCE_BYTES // max(1, table.nbytes)))
    for first in range(0, max(1, table.num_rows), step):
        part = table.slice(first, step)
        yield partial(_given_rows, [shuffle.packed(part.schema, part.to_batches(max_chunksize=SOURCE_BATCH_ROWS))])


def _of_frame(frame: Any) -> Iterator[Any]:
    """Yield the rows of a Spark DataFrame as IPC streams, a partition after the other through the driver."""
    from spark_bridge.operators.map_in_arrow import map_in_arrow

    def packed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = shuffle.packed(batch.schema, [batch]).tobytes()
            yield pa.RecordBatch.from_arrays([pa.array([rows], pa.binary())], names=["rows"])

    return iter(map_in_arrow(frame, packed, "given_rows", "rows binary").toLocalIterator(prefetchPartitions=True))
