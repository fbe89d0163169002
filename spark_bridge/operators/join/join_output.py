"""The output of a join: matching rows of both sides, and rows of one side that have no match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from backends.encoding.columns import Mask
from spark_bridge.exceptions import StatefulProcessorError
from spark_bridge.operators.join.matching import PAIRS_AT_ONCE, RowsToMatch
from spark_bridge.operators.join.sides import JoinSide
from spark_bridge.operators.join.waiting_rows import Due, Waiting
from spark_bridge.task.keyed_rows import Ids, empty, one_batch
from spark_bridge.task.output_spool import Spool
from spark_bridge.task.watermark import Times

Apply: TypeAlias = Callable[[pa.Table, pa.Table], "pa.Table | pa.RecordBatch"]
"""Takes matching rows of both sides, row by row, and gives output."""


@dataclass(frozen=True)
class SideRows:
    """All rows of one side that a step handles: first the new ones, then those that were waiting.

    ``can_match`` is false for rows with a null in their key, or without a time where the join has bounds.
    """

    waiting: Waiting
    due: Due
    num_new: int
    ids: Ids
    times: Times
    rows: pa.RecordBatch
    can_match: Mask

    def matchable(self, *, new: bool, old: bool) -> RowsToMatch:
        """Return the new rows, the waiting rows, or both, as far as they can match."""
        chosen = self.can_match.copy()
        if not new:
            chosen[: self.num_new] = False
        if not old:
            chosen[self.num_new :] = False
        return RowsToMatch(self.ids, self.times, np.arange(len(self.ids))).where(chosen)


@dataclass(frozen=True)
class JoinOutput:
    """Makes the rows of the output; the fields are those of ``JoinLogic``."""

    keys: pa.Schema
    sides: tuple[JoinSide, JoinSide]
    output: pa.Schema
    apply: Apply | None
    given: tuple[tuple[str, ...], tuple[str, ...]]

    def emit(
        self,
        keys: pa.RecordBatch,
        left: SideRows | None,
        of_left: Ids | None,
        right: SideRows | None,
        of_right: Ids | None,
        spool: Spool,
    ) -> None:
        """Put pairs of rows into the spool; where a side is None, the rows have nulls for it."""
        rows = ((left, of_left), (right, of_right))
        num_rows = next((len(numbers) for _, numbers in rows if numbers is not None), 0)
        for first in range(0, num_rows, PAIRS_AT_ONCE):
            part = slice(first, first + PAIRS_AT_ONCE)
            spool.add(self._output(keys, [(side, None if n is None else n[part]) for side, n in rows]))

    def _output(self, keys: pa.RecordBatch, rows: Sequence[tuple[SideRows | None, Ids | None]]) -> pa.RecordBatch:
        n = next(len(numbers) for _, numbers in rows if numbers is not None)
        key_columns: list[pa.RecordBatch | None] = []
        columns: list[list[pa.Array]] = []
        for side, (of_side, numbers) in zip(self.sides, rows, strict=True):
            if of_side is None or numbers is None:
                key_columns.append(None)
                columns.append([pa.nulls(n, kind) for kind in side.columns.types])
            else:
                key_columns.append(keys.take(pa.array(of_side.ids[numbers])))
                columns.append(of_side.rows.take(pa.array(numbers)).columns)
        if self.apply is not None:
            return self._applied(key_columns, columns, n)
        of_keys = next(k for k in key_columns if k is not None)
        named = {f.name: c for f, c in zip(self.keys, of_keys.columns, strict=True)}
        for side, arrays in zip(self.sides, columns, strict=True):
            named.update({f.name: c for f, c in zip(side.columns, arrays, strict=True) if f.name in self.output.names})
        return pa.RecordBatch.from_arrays([named[f.name] for f in self.output], schema=self.output)

    def _applied(
        self, key_columns: list[pa.RecordBatch | None], columns: list[list[pa.Array]], n: int
    ) -> pa.RecordBatch:
        """Return the output of the user's function for rows of both sides."""
        assert self.apply is not None
        tables = []
        for side, of_keys, arrays, names in zip(self.sides, key_columns, columns, self.given, strict=True):
            of_key = [pa.nulls(n, f.type) for f in self.keys] if of_keys is None else of_keys.columns
            named = {
                **dict(zip(self.keys.names, of_key, strict=True)),
                **dict(zip(side.columns.names, arrays, strict=True)),
            }
            tables.append(pa.table({name: named[name] for name in names}))
        made = self.apply(tables[0], tables[1])
        if not isinstance(made, (pa.Table, pa.RecordBatch)):
            raise StatefulProcessorError(
                f"apply= of a join gave {type(made).__name__}: it must give a pyarrow.Table or RecordBatch."
            )
        missing = [name for name in self.output.names if made.schema.names.count(name) != 1]
        if missing:
            raise StatefulProcessorError(
                f"apply= of a join gave the columns {', '.join(made.schema.names) or 'none'}; output= says that there "
                f"is one each of {', '.join(self.output.names)}."
            )
        table = pa.table(made.select(self.output.names)) if isinstance(made, pa.RecordBatch) else made
        return one_batch(table.select(self.output.names).cast(self.output).to_batches() or [empty(self.output)])
