"""The entries of secondary indexes, which a task changes in the same commit as the rows.

The key of an entry is the indexed value, followed by the stored key of the row. So an entry moves when the value of its
row changes. The schema of the state names the columns that have an index.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import DEFAULT_FAMILY
from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import INDEXED_PREFIX, OperatorSchema
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import as_binary
from spark_bridge.state_format.layouts import is_present
from spark_bridge.state_format.stored_rows import by_value, indexed_values, without_value
from spark_bridge.task.task_store import StateAccess

if TYPE_CHECKING:
    from backends.partition.partition_state import PartitionState  # a worker of Spark imports this file


def move_entries(
    store: StateAccess,
    keys: pa.BinaryArray,
    before: pa.RecordBatch,
    was_there: pa.BooleanArray,
    after: pa.RecordBatch,
    stays: pa.BooleanArray | None = None,
) -> None:
    """Stage the changes of the entries of rows that a commit changes from ``before`` to ``after``.

    ``was_there`` marks the rows that existed, whose ``before`` counts. ``stays`` marks the rows that the commit keeps,
    whose ``after`` counts; None for all.
    """
    (rows,) = store.schema.variables
    if not rows.indexes:
        return
    was = np.asarray(was_there)
    is_there = np.ones(len(keys), np.bool_) if stays is None else np.asarray(stays)
    key = rows.families[DEFAULT_FAMILY].key
    columns = decode_keys(keys, key) if set(rows.indexes) & set(key.names) else pa.RecordBatch.from_arrays([], [])
    for column, family in rows.indexes.items():
        old, new = (indexed_values(column, columns, states) for states in (before, after))
        same = np.asarray(pc.or_(pc.equal(old, new).fill_null(False), pc.and_(old.is_null(), new.is_null())))
        gone, added = pa.array(was & ~(same & is_there)), pa.array(is_there & ~(same & was))
        schema = rows.families[family]
        _stage(store, family, schema, keys.filter(gone), old.filter(gone), present=False)
        _stage(store, family, schema, keys.filter(added), new.filter(added), present=True)


def remove_entries(store: StateAccess, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
    """Stage the removal of the entries of stored rows."""
    (rows,) = store.schema.variables
    if rows.indexes and len(keys):
        states = rows.families[DEFAULT_FAMILY].decode_values(values)
        no_row = pa.repeat(pa.scalar(False), len(keys))
        move_entries(store, keys, states, was_there=pc.invert(no_row), after=states, stays=no_row)


# The comparison of all entries with all rows, by ``statestore verify --rows``.


COMPARED_KEYS = 1 << 14
"""Keys that are compared at once."""


def index_differences(schema: OperatorSchema, state: PartitionState) -> Iterator[str]:
    """Yield what is wrong with the secondary indexes of a partition that is open at one version.

    Each row must have its entry, and each entry a row with its value.
    """
    for variable in schema.in_use:
        for column, family in variable.indexes.items():
            rows, index = variable.families[DEFAULT_FAMILY], variable.families[family]
            missing, wrong = _Differences(rows.key), _Differences(index.key)
            for keys, values in _pairs(state, DEFAULT_FAMILY):
                entries = _entries_of(column, rows, keys, values)
                missing.add(keys.filter(_values(state, entries, family).is_null()))
            for entries, _ in _pairs(state, family):
                keys = without_value(entries, index)
                values = _values(state, keys, DEFAULT_FAMILY)
                there = values.is_valid()
                of_rows = _entries_of(column, rows, keys.filter(there), values.drop_null())
                is_right = np.zeros(len(entries), np.bool_)
                is_right[np.asarray(there)] = np.asarray(pc.equal(of_rows, entries.filter(there)))
                wrong.add(entries.filter(pa.array(~is_right)))
            if missing.count:
                yield f"the index of column {column!r} has no entry for {missing.count:,} rows, as for {missing.first}"
            if wrong.count:
                yield (
                    f"the index of column {column!r} has {wrong.count:,} entries without a row of that value, as "
                    f"{wrong.first}"
                )


class _Differences:
    """How many keys of a family are wrong, and the first of them."""

    def __init__(self, key: pa.Schema) -> None:
        self._key = key
        self.count = 0
        self.first = ""

    def add(self, keys: pa.BinaryArray) -> None:
        if len(keys) and not self.count:
            (first,) = decode_keys(keys.slice(0, 1), self._key).to_pylist()
            self.first = ", ".join(f"{name.removeprefix(INDEXED_PREFIX)}={value!r}" for name, value in first.items())
        self.count += len(keys)


def _pairs(state: PartitionState, family: str) -> Iterator[tuple[pa.BinaryArray, pa.BinaryArray]]:
    if family in state.reads.column_families():
        for batch in state.reads.scan(None, None, None, family):
            for at in range(0, batch.num_rows, COMPARED_KEYS):
                part = batch.slice(at, COMPARED_KEYS)
                yield as_binary("keys", part.column(0)), as_binary("values", part.column(1))


def _values(state: PartitionState, keys: pa.BinaryArray, family: str) -> pa.BinaryArray:
    if family not in state.reads.column_families():
        return pa.nulls(len(keys), pa.binary())
    return state.reads.get_many(keys, None, family, remember=False)


def _entries_of(column: str, rows: StateSchema, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.BinaryArray:
    """Return the entries that stored rows must have."""
    return by_value(keys, indexed_values(column, decode_keys(keys, rows.key), rows.decode_values(values)))


def _stage(
    store: StateAccess, family: str, schema: StateSchema, keys: pa.BinaryArray, values: pa.Array, *, present: bool
) -> None:
    if not len(keys):
        return
    marks = schema.encode_values(is_present(len(keys))) if present else pa.nulls(len(keys), pa.binary())
    store.stage(by_value(keys, values), marks, family)
