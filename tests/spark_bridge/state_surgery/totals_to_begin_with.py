"""Rows of totals, and the program that begins with them."""

from __future__ import annotations

import pyarrow as pa

from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from coordinator_actor.messages import OperatorSpec

KEYS = pa.schema([pa.field("user", pa.int64())])
TOTALS = StateSchema(
    KEYS, pa.schema([pa.field("n.count.count", pa.int64(), nullable=False), ("x.sum.sum", pa.float64())])
)
PROGRAM = [OperatorSpec("totals", 3, OperatorSchema.of_rows(TOTALS).to_json(), "file")]
GIVEN = pa.table({"user": [1, 2, 3, None], "n.count.count": [5, 6, 7, 8], "x.sum.sum": [0.5, None, 2.0, 1.0]})
