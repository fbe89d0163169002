"""The rows of grouping keys of an aggregate by windows, whose windows may be in any partition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import decode_keys, encode_keys
from backends.exceptions import SchemaMismatchError
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.protocol.request_context import raise_if_cancelled
from spark_bridge.queryable.reads.operators.operator_plan import OperatorPlan
from spark_bridge.queryable.reads.rows.key_reads import FoundPairs, find_pairs, joined_arrays
from spark_bridge.queryable.reads.rows.window_index import KeyWindowIndex
from spark_bridge.queryable.reads.versions.answer_version import PartitionView
from spark_bridge.state_format.stored_rows import Positions, VariableRows

CANDIDATES = 1 << 16
"""Keys with windows that are looked up at once."""
_Candidates: TypeAlias = tuple[pa.BinaryArray, Positions, Positions]
"""Stored keys that may be there, their partitions, and the positions of their grouping keys."""


@dataclass(frozen=True)
class WindowedKeys:
    """Grouping keys of an aggregate by windows, as columns without the window.

    ``place`` is the position of the window in the stored key.
    """

    rows: VariableRows
    place: int
    columns: pa.RecordBatch
    _made: dict[frozenset[bytes], _Candidates] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: VariableRows, place: int, keys: pa.BinaryArray) -> WindowedKeys:
        """Return the grouping keys of stored keys. Raises ``RequestError`` if these are other bytes."""
        schema = rows.key.remove(place)
        try:
            return cls(rows, place, decode_keys(keys, schema))
        except SchemaMismatchError as error:
            raise RequestError(
                f"The keys of a windowed aggregate are given without the window {rows.key.field(place).name!r}, as "
                f"({', '.join(f'{f.name}: {f.type}' for f in schema)}): {error}"
            ) from error

    def find(self, plan: OperatorPlan, view: PartitionView) -> FoundPairs:
        """Return the pairs that a partition has of the keys, in the order of the keys and then of the windows."""
        index = KeyWindowIndex.of(view.instance, self.rows.key, self.place)
        found: list[FoundPairs] = []
        for keys, partitions, positions in self._candidates(plan, index, index.windows(view)):
            raise_if_cancelled()
            own = partitions == view.partition
            found.append(find_pairs(view, self.rows, keys.filter(pa.array(own)), positions[own]))
        if not found:
            nothing = pa.array([], pa.binary())
            return FoundPairs(np.zeros(0, np.int64), nothing, nothing, {})
        return FoundPairs(
            np.concatenate([f.positions for f in found]),
            joined_arrays([f.keys for f in found]),
            joined_arrays([f.values for f in found]),
            {},
        )

    def _candidates(
        self, plan: OperatorPlan, index: KeyWindowIndex, windows: frozenset[bytes]
    ) -> Iterator[_Candidates]:
        """Yield all keys with all windows, ``CANDIDATES`` at a time.

        They are kept, because partitions mostly have the same windows.
        """
        made = self._made.get(windows)
        if made is not None:
            yield made
            return
        decoded = index.decoded(windows)
        step = max(1, CANDIDATES // max(1, len(decoded)))
        for at in range(0, self.columns.num_rows if len(decoded) else 0, step):
            some = self._with_windows(plan, self.columns.slice(at, step), decoded, at)
            if step >= self.columns.num_rows:
                self._made[windows] = some
            yield some

    def _with_windows(self, plan: OperatorPlan, columns: pa.RecordBatch, windows: pa.Array, first: int) -> _Candidates:
        of_key = np.repeat(np.arange(columns.num_rows), len(windows))
        of_window = np.tile(np.arange(len(windows)), columns.num_rows)
        made = [column.take(pa.array(of_key)) for column in columns.columns]
        made.insert(self.place, windows.take(pa.array(of_window)))
        batch = pa.RecordBatch.from_arrays(made, schema=self.rows.key)
        groups = key_groups(batch, plan.registration.key_groups)
        return encode_keys(batch, groups), plan.partitions_of(groups.astype(np.int64)), of_key + first
