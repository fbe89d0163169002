"""The filter of changes by grouping keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import TIMERS
from spark_bridge.queryable.reads.operators.operator_plan import without_prefix
from spark_bridge.state_format.family_order import list_keys
from spark_bridge.state_format.layouts import LIST
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_format.windowed_keys import window_place


@dataclass(frozen=True)
class GroupingKeyFilter:
    """Passes rows of some grouping keys.

    ``keys`` are the keys without their key groups, because the key groups of windowed keys come from the window too.
    ``columns`` are the positions of the grouping key's columns, without a window.
    """

    rows: VariableRows
    columns: tuple[int, ...]
    keys: pa.BinaryArray

    @classmethod
    def of(cls, rows: VariableRows, keys: pa.BinaryArray) -> GroupingKeyFilter:
        """Return the filter for stored grouping keys."""
        window = window_place(rows.variable)
        columns = tuple(i for i in range(len(rows.key)) if i != window)
        return cls(rows, columns, without_prefix(keys))

    def of_pairs(self, family: str, keys: pa.BinaryArray) -> pa.BooleanArray | None:
        """Return which stored keys pass (boolean); None if the bytes of stored keys do not tell."""
        rows = self.rows
        if not len(keys) or rows.kind == TIMERS or len(self.columns) < len(rows.key):
            return None
        if rows.kind == LIST:
            keys = list_keys(rows, family, keys)
        elif family != rows.main:
            return None
        return pc.is_in(without_prefix(keys), self.keys)

    def of_changes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the changes whose keys pass."""
        if not self.columns:
            return batch
        # After version and type of change come the columns of the key, in the user's order.
        columns = [batch.column(2 + self.rows.key_order.index(i)) for i in self.columns]
        made = pa.RecordBatch.from_arrays(columns, names=[str(i) for i in self.columns])
        ids = without_prefix(encode_keys(made, np.zeros(batch.num_rows, np.uint16)))
        return batch.filter(pc.is_in(ids, self.keys))
