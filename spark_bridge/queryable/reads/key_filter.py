"""TODO docstring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.keys import encode_keys
from spark_bridge.queryable.reads.operator_plan import behind
from spark_bridge.state_format.family_order import list_keys
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_format.windowed_keys import window_of


@dataclass(frozen=True)
class GroupingKeyFilter:
    """Some grouping keys, by what they are without their key groups: those of windowed keys come from the window too."""

    rows: VariableRows
    columns: tuple[int, ...]
    keys: pa.BinaryArray

    @classmethod
    def of(cls, rows: VariableRows, keys: pa.BinaryArray) -> GroupingKeyFilter:
        window = window_of(rows.variable)
        columns = tuple(i for i in range(len(rows.key)) if i != window)
        return cls(rows, columns, behind(keys))

    def of_pairs(self, family: str, keys: pa.BinaryArray) -> pa.BooleanArray | None:
        """Which stored keys are of those, if the bytes tell it."""
        rows = self.rows
        if not len(keys) or rows.kind == "timers" or len(self.columns) < len(rows.key):
            return None
        if rows.kind == "list":
            keys = list_keys(rows, family, keys)
        elif family != rows.main:
            return None
        return pc.is_in(behind(keys), self.keys)

    def of_changes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of those keys among the changes."""
        if not self.columns:
            return batch
        # Behind version and type of change are the columns of the key, in the user's order.
        columns = [batch.column(2 + self.rows.key_order.index(i)) for i in self.columns]
        made = pa.RecordBatch.from_arrays(columns, names=[str(i) for i in self.columns])
        ids = behind(encode_keys(made, np.zeros(batch.num_rows, np.uint16)))
        return batch.filter(pc.is_in(ids, self.keys))
