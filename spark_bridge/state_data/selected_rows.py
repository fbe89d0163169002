"""Some rows and columns of a state variable in storage: conditions on keys leave out partitions and ranges of keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from backends.encoding.key_groups import key_groups, partition_range
from backends.encoding.keys import KEY_GROUP_BYTES, encode_keys
from coordinator_actor.reading.partition_reader import opened_partition
from coordinator_actor.reading.stored_versions import Piece
from spark_bridge.queryable.client.arguments.conditions import WhereCondition, comparisons
from spark_bridge.queryable.client.arguments.key_ranges import first_key_after
from spark_bridge.queryable.protocol.messages import Comparison
from spark_bridge.queryable.reads.rows.partition_scans import KeyBounds, pairs_of
from spark_bridge.queryable.reads.rows.row_selection import RowSelection, normalized_condition, scalar_of
from spark_bridge.queryable.reads.versions.answer_version import PartitionView
from spark_bridge.state_data.state_sources import StateSource
from spark_bridge.state_format.partition_rows import partition_rows
from spark_bridge.state_format.stored_rows import VariableRows

MAX_SELECTED_KEYS = 10_000
"""Conditions that this many keys can meet, or more, leave out no partition."""


@dataclass(frozen=True)
class SelectedSource:
    """The rows of a source that meet all conditions, in the columns wanted; every batch has ``schema``.

    ``groups`` are the key groups that can have such rows (None: all). Make one with ``selected``.
    """

    source: StateSource
    selection: RowSelection
    bounds: KeyBounds
    groups: frozenset[int] | None

    @property
    def schema(self) -> pa.Schema:
        """Return the columns."""
        return self.selection.schema

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Return the partitions that can have such rows."""
        return tuple(piece for piece in self.source.reading.pieces if self.may_have(piece))

    def may_have(self, piece: Piece) -> bool:
        """Return whether a partition can have such rows."""
        return self.groups is None or not self.groups.isdisjoint(self._key_groups(piece))

    def _key_groups(self, piece: Piece) -> range:
        reading = self.source.reading
        return range(*partition_range(piece.partition, reading.num_partitions, reading.key_groups))

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Give the rows of one partition. Raises ``VersionNotFoundError`` if the version has been removed meanwhile."""
        source = self.source
        with opened_partition(source.reading.place, piece, open_storage=source.open_storage) as state:
            view = PartitionView(piece.partition, state.reads, source.reading.version, None)
            pairs = pairs_of(view, source.rows, self._key_groups(piece), self.bounds)
            for batch in partition_rows(source.rows, pairs, piece.partition):
                found = self.selection.rows(batch)
                if found.num_rows:
                    yield found


def selected(
    source: StateSource, columns: Sequence[str] | None = None, where: Sequence[WhereCondition] | None = None
) -> SelectedSource:
    """Return the rows of a source that meet all conditions (as in ``client.scan``), in some columns (None: all).

    Raises ``RequestError`` naming a column that there is not, or a value that is not of a column's type.
    """
    output = source.rows.output
    types = {field.name: field.type for field in output}
    conditions = comparisons(where, types)
    wanted = output.names if columns is None else list(columns)
    selection = RowSelection.of(source.rows, wanted, conditions)
    conditions = [normalized_condition(c, types[c.column]) for c in conditions]
    groups = _groups(source, conditions)
    bounds = key_bounds(source.rows, conditions)
    if bounds is None:  # no key is in an empty range
        return SelectedSource(source, selection, KeyBounds(), frozenset())
    return SelectedSource(source, selection, bounds, groups)


def key_bounds(rows: VariableRows, conditions: Sequence[Comparison]) -> KeyBounds | None:
    """Return the range of keys outside which no row meets the conditions; None if no key is in the range.

    Leading key columns in stored order that must be equal to one value bound the range, and the first one after them
    by its comparisons. Columns of floats bound nothing: equal floats can be stored as different bytes.
    """
    prefix: list[pa.Scalar] = []
    fields: list[pa.Field] = []
    start = end = b""
    for field in rows.key:
        if pa.types.is_floating(field.type):
            break
        of_column = [c for c in conditions if c.column == field.name]
        equal = [c for c in of_column if c.comparison == "="]
        fields.append(field)
        if equal:
            prefix.append(scalar_of(field.name, equal[0].values[0], field.type))
            continue
        starts, ends = [], []
        for condition in of_column:
            if condition.comparison in ("<", "<=", ">", ">="):
                at = _encoded(fields, [*prefix, scalar_of(field.name, condition.values[0], field.type)])
                if condition.comparison[0] == ">":
                    starts.append(at)
                else:
                    ends.append(at if condition.comparison == "<" else first_key_after(at) or b"")
        start, end = max(starts, default=b""), min((e for e in ends if e), default=b"")
        break
    before = _encoded(fields[: len(prefix)], prefix) if prefix else b""
    first = start or before
    last = end or (first_key_after(before) if before else None)
    if last is not None and last <= first:
        return None
    return KeyBounds(first or None, last)


def _encoded(fields: Sequence[pa.Field], values: Sequence[pa.Scalar]) -> bytes:
    """Return the first columns of a key as they are stored, without the key group."""
    arrays = [pa.array([value], field.type) for field, value in zip(fields, values, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(list(fields)))
    encoded: bytes = encode_keys(batch, np.zeros(1, np.uint16))[0].as_py()
    return encoded[KEY_GROUP_BYTES:]


def _groups(source: StateSource, conditions: Sequence[Comparison]) -> frozenset[int] | None:
    """Return the key groups of the keys that can meet the conditions; None if not all key columns are given."""
    key = source.rows.key
    choices: list[list[object]] = []
    many = 1
    for field in key:
        given = [c for c in conditions if c.column == field.name and c.comparison in ("=", "in")]
        if not given or pa.types.is_floating(field.type):
            return None
        values = [scalar_of(field.name, value, field.type) for value in given[0].values]
        many *= len(values)
        if many > MAX_SELECTED_KEYS:
            return None
        choices.append(values)
    keys = list(itertools.product(*choices))
    columns = [pa.array([k[i] for k in keys], field.type) for i, field in enumerate(key)]
    batch = pa.RecordBatch.from_arrays(columns, schema=key)
    return frozenset(key_groups(batch, source.reading.key_groups).tolist())
