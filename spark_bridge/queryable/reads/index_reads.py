"""Rows by a secondary index: the stored pairs whose indexed column has one of some values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.encoding.keys import KEY_GROUP_BYTES, first_key_after
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import as_binary, key_order
from backends.exceptions import DamagedFileError
from spark_bridge.queryable.protocol import Comparison, raise_if_cancelled
from spark_bridge.queryable.reads import key_reads, scans
from spark_bridge.queryable.reads.answer_version import PartitionView
from spark_bridge.state_format.stored_rows import VariableRows, columns_of_key, without_value

MAX_MATCHES = 1 << 16
MAX_MATCHES_BYTES = 64 << 20
"""The most rows, and bytes of rows, that are looked up in a partition. Beyond these the partition is scanned."""
_STEP_KEYS = 1 << 12


@dataclass(frozen=True)
class IndexLookup:
    """The index entries that a scan looks up: by values as bytes of a key, ascending. ``most`` rows are enough."""

    column: str
    family: str
    schema: StateSchema
    prefixes: tuple[bytes, ...]
    most: int | None

    @classmethod
    def of(cls, rows: VariableRows, where: Sequence[Comparison], limit: int | None) -> IndexLookup | None:
        """Return the lookup of the condition with the fewest values; None if no condition selects values of an index.

        The conditions are valid: ``RowSelection.of`` has checked them. Other conditions filter the rows afterwards.
        """
        lookups = []
        for comparison in where:
            family = rows.variable.indexes.get(comparison.column)
            if family is None:
                continue
            schema = rows.variable.families[family]
            kind = schema.key.field(0).type
            condition = scans.normalized_condition(comparison, kind)
            if condition.comparison == "is null":
                values = pa.nulls(1, kind)
            elif condition.comparison in ("=", "in"):
                values = pa.array([scans.scalar_of(comparison.column, v, kind) for v in condition.values], kind)
            else:
                continue
            prefixes = columns_of_key(pa.RecordBatch.from_arrays([values], names=["value"]))
            most = limit if len(where) == 1 else None
            lookups.append(cls(comparison.column, family, schema, tuple(sorted(set(prefixes.to_pylist()))), most))
        return min(lookups, key=lambda lookup: len(lookup.prefixes), default=None)

    def pairs(self, view: PartitionView, groups: range) -> scans.Pairs | None:
        """Return the pairs of the matching rows of a partition, ascending; None if a scan of all rows costs less."""
        if len(groups) * len(self.prefixes) > scans.MAX_RANGES:
            return None
        keys = self._keys(view, groups)
        if keys is None:
            return None
        pairs: list[pa.RecordBatch] = []
        nbytes = 0
        for at in range(0, len(keys), _STEP_KEYS):
            part = keys.slice(at, _STEP_KEYS)
            values = key_reads.values_of(view, part, DEFAULT_FAMILY)
            if values.null_count:
                raise DamagedFileError(
                    f"The index of column {self.column!r} has {values.null_count} entries without a row in partition "
                    f"{view.partition} at version {view.version}: rewrite_state makes a checkpoint whose index is "
                    "built from the rows. Until then scan with a condition on another column."
                )
            nbytes += values.nbytes
            if nbytes > MAX_MATCHES_BYTES:
                return None
            pairs.append(pa.RecordBatch.from_arrays([part, values], names=["key", "value"]))
        return {DEFAULT_FAMILY: iter(pairs)}

    def _keys(self, view: PartitionView, groups: range) -> pa.BinaryArray | None:
        """Return the stored keys of the matching rows, ascending; None for more than ``MAX_MATCHES``."""
        matches: list[pa.BinaryArray] = []
        num_matches = 0
        for entries in self._entries(view, groups):
            raise_if_cancelled()
            matches.append(entries)
            num_matches += len(entries)
            if num_matches > MAX_MATCHES:
                return None
            if self.most is not None and num_matches >= self.most:
                break
        keys = without_value(pa.concat_arrays([pa.array([], pa.binary()), *matches])[: self.most], self.schema)
        return keys.take(key_order(keys))

    def _entries(self, view: PartitionView, groups: range) -> Iterator[pa.BinaryArray]:
        if self.family not in view.reads.column_families(view.version, head=view.head):
            return
        begins = [group.to_bytes(KEY_GROUP_BYTES, "big") + prefix for group in groups for prefix in self.prefixes]
        ranges = [(begin, first_key_after(begin)) for begin in begins]
        for batch in view.reads.scan_in_turn(ranges, view.version, self.family, head=view.head):
            yield as_binary("keys", batch.column(0))
