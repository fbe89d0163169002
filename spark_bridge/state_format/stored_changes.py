"""Makes the changes of a state variable from version to version: a row per changed value, element, entry or timer.

After the change feed of Spark's state data source, which shows changed pairs. Here a row is shown only if it changed. A
value that was written again unchanged is not a change. The entries of a map that has grown large stay. If a list was
only appended to, only the new elements are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import Mask
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import TIMERS
from spark_bridge.exceptions import RequestError
from spark_bridge.state_format import stored_rows
from spark_bridge.state_format.layouts import KEY_GROUP, LIST, PARTITION, ROLLING, with_distinct_names
from spark_bridge.state_format.partition_rows import numbered

if TYPE_CHECKING:
    from backends.storage.checkpoint_storage import OpenStorage
    from coordinator_actor.reading.stored_files import ChangedPairs
    from coordinator_actor.reading.stored_versions import Piece, StatePlace

# Changes of lists between two versions: the elements that were deleted, and those that were inserted.
#
# An element that stays is not a change. These stay: the elements that the old and the new list have in common at their
# beginnings, then those at their ends. And if elements were removed at the beginning and added at the end, as with a
# TTL, those between.


def changed_elements(
    lists: tuple[pa.BinaryArray, pa.BinaryArray], values: tuple[pa.Array, pa.Array]
) -> tuple[stored_rows.Positions, stored_rows.Positions]:
    """Return the deleted and inserted elements by list, those deleted from a list first.

    Each is a position among the old elements and one among the new elements; the one that does not apply is -1. Both
    arguments have an array for the old elements and one for the new: ``lists`` has the id of each element's list,
    ``values`` bytes that are equal for equal elements. The elements of a list are adjacent and in order.
    """
    distinct = pc.unique(pa.concat_arrays(list(lists)))
    distinct = distinct.take(pc.sort_indices(distinct))
    of_before, of_after = (np.asarray(pc.index_in(ids, value_set=distinct)).astype(np.int64) for ids in lists)
    old, new = (np.searchsorted(of, np.arange(len(distinct) + 1)) for of in (of_before, of_after))
    lengths = np.minimum(np.diff(old), np.diff(new))
    prefix = _in_common(values, old[:-1], new[:-1], lengths, 1)
    suffix = _in_common(values, old[1:] - 1, new[1:] - 1, lengths - prefix, -1)
    begins, ends = (old[:-1] + prefix, new[:-1] + prefix), (old[1:] - suffix, new[1:] - suffix)
    is_lost, is_added = (_between(of, a, b) for of, a, b in zip((of_before, of_after), begins, ends, strict=True))
    for i in np.flatnonzero((ends[0] > begins[0]) & (ends[1] > begins[1])).tolist():
        stays = _overlap(*(v[int(a[i]) : int(b[i])].to_pylist() for v, a, b in zip(values, begins, ends, strict=True)))
        is_lost[int(ends[0][i]) - stays : int(ends[0][i])] = False
        is_added[int(begins[1][i]) : int(begins[1][i]) + stays] = False
    lost, added = np.flatnonzero(is_lost), np.flatnonzero(is_added)
    order = np.argsort(np.concatenate([of_before[lost], of_after[added]]), kind="stable")
    return (
        np.concatenate([lost, np.full(len(added), -1)])[order],
        np.concatenate([np.full(len(lost), -1), added])[order],
    )


def _in_common(
    values: tuple[pa.Array, pa.Array],
    old: stored_rows.Positions,
    new: stored_rows.Positions,
    lengths: stored_rows.Positions,
    step: int,
) -> stored_rows.Positions:
    """Return, per list, how many elements are equal from the positions ``old`` and ``new`` on, ``lengths`` at most."""
    lists = np.repeat(np.arange(len(lengths)), lengths)
    nth = np.arange(len(lists)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    before, after = (of.take(pa.array(at[lists] + step * nth)) for of, at in zip(values, (old, new), strict=True))
    equal = np.asarray(pc.equal(before, after)).astype(np.bool_)
    num_common: stored_rows.Positions = lengths.copy()
    np.minimum.at(num_common, lists[~equal], nth[~equal])
    return num_common


def _between(lists: stored_rows.Positions, begins: stored_rows.Positions, ends: stored_rows.Positions) -> Mask:
    """Return which elements are from ``begins`` (included) to ``ends`` (not included) of their list."""
    at = np.arange(len(lists))
    is_between: Mask = (at >= begins[lists]) & (at < ends[lists])
    return is_between


def _overlap(before: list[bytes], after: list[bytes]) -> int:
    """Return how many of the last elements of one list are the first elements of the other."""
    shortest = max(1, len(before) - len(after))
    starts = range(shortest, len(before))
    overlaps = (s for s in starts if before[s] == after[0] and before[s:] == after[: len(before) - s])
    return len(before) - next(overlaps, len(before))


VERSION = "version"
EMIT_ROWS = 1 << 14
"""Rows of a batch, at most."""


@dataclass(frozen=True)
class VariableChanges:
    """Makes the changes of one state variable. Raises ``RequestError`` for rolling aggregates."""

    rows: stored_rows.VariableRows

    def __post_init__(self) -> None:
        if self.rows.kind == ROLLING:
            raise RequestError(
                "Rolling aggregates change with time and not only with rows: there is no feed of their changes. Write "
                "the rows that the operator emits to a sink, which has a row for each key that a batch touches."
            )

    @cached_property
    def output(self) -> pa.Schema:
        """Return the columns: version, type of change, key, inner, value before and after, key group, partition.

        No two have the same name. Timers have no values, and so no columns before and after.
        """
        rows = self.rows
        keys = [*(rows.key.field(i) for i in rows.key_order), *rows.inner]
        values = stored_rows.change_fields(rows.value)
        ours = [pa.field(VERSION, pa.int64()), pa.field(stored_rows.CHANGE_TYPE, pa.string())]
        last = [pa.field(KEY_GROUP, pa.int32()), pa.field(PARTITION, pa.int32())]
        # Where names are equal, the user's columns keep theirs; in the table, version and type come first nevertheless.
        n = len(keys)
        named = list(with_distinct_names([*keys, *values, *ours, *last]))
        return pa.schema([*named[-4:-2], *named[:n], *named[n:-4], *named[-2:]])

    def changes(self, place: StatePlace, piece: Piece, open_storage: OpenStorage) -> Iterator[pa.RecordBatch]:
        """Yield all changes of a piece: ascending by version, and within a version in the order of the stored keys."""
        from coordinator_actor.reading import stored_files  # which clients of a cluster do not need

        for version, families in stored_files.changes(place, piece, self.rows.families, open_storage=open_storage):
            for batch in self.of_version(version, families, piece.partition):
                for at in range(0, batch.num_rows, EMIT_ROWS):
                    yield batch.slice(at, EMIT_ROWS)

    def of_version(
        self, version: int, families: Mapping[str, ChangedPairs], partition: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the changes that one version has made to a partition, in one batch if there are any.

        ``families`` has the pairs that the version wrote, by column family.
        """
        before = self._side({f: (pairs.keys, pairs.before) for f, pairs in families.items()})
        after = self._side({f: (pairs.keys, pairs.after) for f, pairs in families.items()})
        changed_of = changed_elements if self.rows.kind == LIST else stored_rows.changed_rows
        changed = changed_of((before.ids, after.ids), (before.comparable(), after.comparable()))
        if not len(changed[0]):
            return
        types, keys, structs = stored_rows.change_columns(before, after, changed, self.rows.value)
        yield pa.RecordBatch.from_arrays(
            [
                pa.repeat(pa.scalar(version, pa.int64()), len(types)),
                types,
                *(keys[i] for i in self.rows.key_order),
                *keys[len(self.rows.key) : -1],
                *structs,
                keys[-1],
                pa.repeat(pa.scalar(partition, pa.int32()), len(types)),
            ],
            schema=self.output,
        )

    def as_inserts(self, version: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows in the columns of ``VariableRows.output`` as rows of ``output``: each is new in ``version``."""
        rows = self.rows
        n, count = len(rows.key) + len(rows.inner), batch.num_rows
        values = batch.columns[n:-2]
        structs = []
        if len(rows.value):
            kind = pa.struct(list(rows.value))
            structs = [pa.nulls(count, kind), pa.StructArray.from_arrays(values, fields=list(rows.value))]
        return pa.RecordBatch.from_arrays(
            [
                pa.repeat(pa.scalar(version, pa.int64()), count),
                pa.repeat(pa.scalar(stored_rows.INSERT), count),
                *batch.columns[:n],
                *structs,
                *batch.columns[-2:],
            ],
            schema=self.output,
        )

    def _side(self, families: Mapping[str, tuple[pa.BinaryArray, pa.BinaryArray]]) -> stored_rows.ComparedRows:
        """Return the rows of pairs, by family, in the order of their keys; a pair whose value is null does not exist.

        The key group is the last of the columns before those of the value.
        """
        rows = self.rows
        n = len(rows.key) + len(rows.inner)
        ids: list[pa.BinaryArray] = []
        ordered: list[pa.BinaryArray] = []
        parts: list[stored_rows.DecodedRows] = []
        for family, (all_keys, all_values) in families.items():
            is_there = pc.is_valid(all_values)
            keys = all_keys.filter(is_there)
            decoded = rows.decode(family, keys, all_values.filter(is_there))
            groups = pa.array(stored_rows.key_groups_of(keys)[decoded.pair], pa.int32())
            part = stored_rows.DecodedRows(decoded.pair, [*decoded.columns[:n], groups, *decoded.columns[n:]])
            ids.append(self._ids(family, keys, part))
            ordered.append(stored_rows.order_keys(rows, family, keys))
            parts.append(part)
        order = pa.array(stored_rows.row_order(ordered, [part.pair for part in parts]))
        columns = [pa.concat_arrays(c).take(order) for c in zip(*(part.columns for part in parts), strict=True)]
        return stored_rows.ComparedRows(pa.concat_arrays(ids).take(order), columns, n + 1)

    def _ids(self, family: str, keys: pa.BinaryArray, part: stored_rows.DecodedRows) -> pa.BinaryArray:
        rows = self.rows
        if len(rows.inner) and rows.kind != TIMERS and family == rows.main:
            # The key that the entry would have in a large map.
            n = len(rows.key) + len(rows.inner)
            of_key = part.columns[:n]
            columns = pa.RecordBatch.from_arrays(of_key, names=numbered(of_key))
            return encode_keys(columns, np.asarray(part.columns[n]))
        stored = stored_rows.list_keys(rows, family, keys) if rows.kind == LIST else keys
        return stored.take(pa.array(part.pair))
