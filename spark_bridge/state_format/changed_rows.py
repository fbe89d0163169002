"""Finds the rows that differ between two moments, and the columns in which differences are shown."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_bridge.state_format.stored_rows import Positions

CHANGE_TYPE = "change_type"
BEFORE = "before"
AFTER = "after"
INSERT, UPDATE, DELETE = "insert", "update", "delete"


def changed_rows(
    ids: tuple[pa.BinaryArray, pa.BinaryArray], values: tuple[pa.Array, pa.Array]
) -> tuple[Positions, Positions]:
    """Return the changed rows by id: the position of each among the old rows and among the new rows, -1 for none.

    Both arguments have an array for the old rows and one for the new: ``ids`` are different for different rows,
    ``values`` are bytes that are equal where the values of rows are.
    """
    (ids_before, ids_after), (values_before, values_after) = ids, values
    at = np.asarray(pc.fill_null(pc.index_in(ids_after, value_set=ids_before), -1)).astype(np.int64)
    stays = at >= 0
    same = np.zeros(len(at), np.bool_)
    held = pa.array(at[stays])
    same[stays] = np.asarray(pc.equal(values_before.take(held), values_after.filter(pa.array(stays))))
    gone = np.ones(len(ids_before), np.bool_)
    gone[at[stays]] = False
    lost, changed = np.flatnonzero(gone), np.flatnonzero(~same)
    of_before = np.concatenate([lost, at[changed]])
    of_after = np.concatenate([np.full(len(lost), -1), changed])
    order = np.asarray(
        pc.sort_indices(pa.concat_arrays([ids_before.take(pa.array(lost)), ids_after.take(pa.array(changed))]))
    )
    return of_before[order], of_after[order]
