"""The entries of secondary indexes, which a task changes in the same commit as the rows.

An entry is a stored key after the indexed value: it moves when the value of its row changes. Which columns have an
index is in the schema of the state.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import DEFAULT_FAMILY
from backends.encoding.keys import decode_keys
from backends.encoding.schema import StateSchema
from spark_bridge.state_format.layouts import is_present
from spark_bridge.state_format.stored_rows import by_value, indexed_values
from spark_bridge.task.task_store import StateAccess


def move_entries(
    store: StateAccess,
    keys: pa.BinaryArray,
    before: pa.RecordBatch,
    was_there: pa.BooleanArray,
    after: pa.RecordBatch,
    stays: pa.BooleanArray | None = None,
) -> None:
    """Stage the entries of rows whose states were ``before``, where they were there, and are ``after``.

    ``stays`` marks the rows that the commit keeps; None for all.
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
        none = pa.repeat(pa.scalar(False), len(keys))
        move_entries(store, keys, states, pc.invert(none), states, none)


def _stage(
    store: StateAccess, family: str, schema: StateSchema, keys: pa.BinaryArray, values: pa.Array, *, present: bool
) -> None:
    if not len(keys):
        return
    marks = schema.encode_values(is_present(len(keys))) if present else pa.nulls(len(keys), pa.binary())
    store.stage(by_value(keys, values), marks, family)
