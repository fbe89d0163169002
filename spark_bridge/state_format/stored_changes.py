"""What changed in a state variable from version to version, a row per value, list element, map entry or timer.

After the change feed of Spark's state data source, which shows stored pairs: here a value that was written again as it was
is no change, an entry of a map that has grown large did not go and come, and of a list that was appended to only the new
elements are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.keys import encode_keys
from backends.encoding.values import encode_values
from coordinator_actor import state_reader
from coordinator_actor.state_reader import ChangedPairs, OpenStorage, Piece, StatePlace
from spark_bridge.state_format.stored_rows import (
    KEY_GROUP,
    PARTITION,
    Positions,
    Rows,
    VariableRows,
    distinct,
    key_groups_of,
    numbered,
    order_of,
)

VERSION = "version"
CHANGE_TYPE = "change_type"
BEFORE = "before"
AFTER = "after"
INSERT, UPDATE, DELETE = "insert", "update", "delete"
_TYPES = (DELETE, INSERT, UPDATE)
_DELETE, _INSERT, _UPDATE = range(3)
EMIT_ROWS = 1 << 14

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Side:
    """The rows that pairs held before a version, or hold after it.

    ``ids`` tell rows apart (of a list: they are the lists', whose elements are in order), ``columns`` are those of key and
    inner, key group and value.
    """

    ids: pa.BinaryArray
    columns: list[pa.Array]


@dataclass(frozen=True)
class VariableChanges:
    """How the changes of one state variable are made: version, type of change, key, inner columns, value before and after."""

    rows: VariableRows

    @property
    def _has_values(self) -> bool:
        return len(self.rows.value) > 0

    @cached_property
    def output(self) -> pa.Schema:
        """The columns of ``changes``; no two have the same name. A variable without values, timers, has no before and after."""
        rows = self.rows
        keys = [*(rows.key.field(i) for i in rows.key_order), *rows.inner]
        value = pa.struct(list(self.rows.value))
        values = [pa.field(BEFORE, value), pa.field(AFTER, value)] if self._has_values else []
        ours = [pa.field(VERSION, pa.int64()), pa.field(CHANGE_TYPE, pa.string())]
        last = [pa.field(KEY_GROUP, pa.int32()), pa.field(PARTITION, pa.int32())]
        # The user's names come first where names are equal, but not in the table.
        n = len(keys)
        named = list(distinct([*keys, *values, *ours, *last]))
        return pa.schema([*named[-4:-2], *named[:n], *named[n:-4], *named[-2:]])

    def changes(self, place: StatePlace, piece: Piece, open_storage: OpenStorage) -> Iterator[pa.RecordBatch]:
        """All changes of a piece, ascending by version, and within one in the order of the stored keys."""
        for version, families in state_reader.changes(place, piece, self.rows.families, open_storage=open_storage):
            for batch in self.of_version(version, families, piece.partition):
                for at in range(0, batch.num_rows, EMIT_ROWS):
                    yield batch.slice(at, EMIT_ROWS)

    def of_version(
        self, version: int, families: Mapping[str, ChangedPairs], partition: int
    ) -> Iterator[pa.RecordBatch]:
        """The changes that one version has made to a partition, of those of its pairs."""
        before = self._side({f: (pairs.keys, pairs.before) for f, pairs in families.items()})
        after = self._side({f: (pairs.keys, pairs.after) for f, pairs in families.items()})
        of_before, of_after, types = (self._in_lists if self.rows.kind == "list" else self._by_id)(before, after)
        if not len(types):
            return
        n = len(self.rows.key) + len(self.rows.inner)
        either = pa.array(np.where(of_after >= 0, of_after + len(before.ids), of_before))
        keys = [
            pa.concat_arrays([b, a]).take(either)
            for b, a in zip(before.columns[: n + 1], after.columns[: n + 1], strict=True)
        ]
        values = []
        for side, positions in ((before, of_before), (after, of_after)) if self._has_values else ():
            made = pa.StructArray.from_arrays(side.columns[n + 1 :], fields=list(self.rows.value))
            values.append(made.take(pa.array(positions, pa.int64(), mask=positions < 0)))
        yield pa.RecordBatch.from_arrays(
            [
                pa.repeat(pa.scalar(version, pa.int64()), len(types)),
                pa.array(_TYPES).take(pa.array(types)),
                *(keys[i] for i in self.rows.key_order),
                *keys[len(self.rows.key) : n],
                *values,
                keys[n],
                pa.repeat(pa.scalar(partition, pa.int32()), len(types)),
            ],
            schema=self.output,
        )

    def _side(self, families: Mapping[str, tuple[pa.BinaryArray, pa.BinaryArray]]) -> _Side:
        """The rows of the pairs that are there, in the order of their keys."""
        rows = self.rows
        ids: list[pa.BinaryArray] = []
        ordered: list[pa.BinaryArray] = []
        parts: list[Rows] = []
        for family, (all_keys, all_values) in families.items():
            is_there = pc.is_valid(all_values)
            keys = all_keys.filter(is_there)
            made = rows.decode(family, keys, all_values.filter(is_there))
            groups = pa.array(key_groups_of(keys)[made.pair], pa.int32())
            n = len(rows.key) + len(rows.inner)
            part = Rows(made.pair, [*made.columns[:n], groups, *made.columns[n:]])
            ids.append(self._ids(family, keys, part))
            ordered.append(rows.order_keys(family, keys))
            parts.append(part)
        order = pa.array(order_of(ordered, [part.pair for part in parts]))
        columns = [pa.concat_arrays(c).take(order) for c in zip(*(part.columns for part in parts), strict=True)]
        return _Side(pa.concat_arrays(ids).take(order), columns)

    def _ids(self, family: str, keys: pa.BinaryArray, part: Rows) -> pa.BinaryArray:
        rows = self.rows
        if len(rows.inner) and rows.kind != "timers" and family == rows.main:
            # As the key of an entry would be in a large map.
            n = len(rows.key) + len(rows.inner)
            schema = pa.schema([*rows.key, *rows.inner])
            columns = pa.RecordBatch.from_arrays(part.columns[:n], names=numbered(schema))
            return encode_keys(columns, np.asarray(part.columns[n]))
        stored = rows.list_keys(family, keys) if rows.kind == "list" else keys
        return stored.take(pa.array(part.pair))

    def _fingerprints(self, side: _Side) -> pa.Array:
        """Bytes that are equal where the values are."""
        n = len(self.rows.key) + len(self.rows.inner) + 1
        columns = side.columns[n:]
        if not columns:
            return pa.repeat(pa.scalar(b""), len(side.ids))
        return encode_values(pa.RecordBatch.from_arrays(columns, names=numbered(self.rows.value)))

    def _by_id(self, before: _Side, after: _Side) -> tuple[Positions, Positions, Positions]:
        """Positions in both sides (-1: not there) and types of the changes, where every row has an id of its own."""
        at = np.asarray(pc.fill_null(pc.index_in(after.ids, value_set=before.ids), -1)).astype(np.int64)
        stays = at >= 0
        same = np.zeros(len(at), np.bool_)
        held = pa.array(at[stays])
        same[stays] = np.asarray(
            pc.equal(self._fingerprints(before).take(held), self._fingerprints(after).filter(pa.array(stays)))
        )
        gone = np.ones(len(before.ids), np.bool_)
        gone[at[stays]] = False
        lost, changed = np.flatnonzero(gone), np.flatnonzero(~same)
        of_before = np.concatenate([lost, at[changed]])
        of_after = np.concatenate([np.full(len(lost), -1), changed])
        types = np.concatenate([np.full(len(lost), _DELETE), np.where(at[changed] >= 0, _UPDATE, _INSERT)])
        ids = pa.concat_arrays([before.ids.take(pa.array(lost)), after.ids.take(pa.array(changed))])
        order = np.asarray(pc.sort_indices(ids))
        return of_before[order], of_after[order], types[order]

    def _in_lists(self, before: _Side, after: _Side) -> tuple[Positions, Positions, Positions]:
        """The same for lists. What they have in common at their beginnings, and then at their ends, is no change.

        Nor is what of a list stays where elements went from its beginning and others came to its end, as with a TTL.
        """
        known = pc.unique(pa.concat_arrays([before.ids, after.ids]))
        known = known.take(pc.sort_indices(known))
        of_before, of_after = (
            np.asarray(pc.index_in(side.ids, value_set=known)).astype(np.int64) for side in (before, after)
        )
        old, new = (np.searchsorted(of, np.arange(len(known) + 1)) for of in (of_before, of_after))
        marks = self._fingerprints(before), self._fingerprints(after)
        lengths = np.minimum(np.diff(old), np.diff(new))
        prefix = _in_common(marks, old[:-1], new[:-1], lengths, 1)
        suffix = _in_common(marks, old[1:] - 1, new[1:] - 1, lengths - prefix, -1)
        begins, ends = (old[:-1] + prefix, new[:-1] + prefix), (old[1:] - suffix, new[1:] - suffix)
        is_lost, is_added = (_between(of, a, b) for of, a, b in zip((of_before, of_after), begins, ends, strict=True))
        for i in np.flatnonzero((ends[0] > begins[0]) & (ends[1] > begins[1])).tolist():
            stays = _overlap(
                *(m[int(a[i]) : int(b[i])].to_pylist() for m, a, b in zip(marks, begins, ends, strict=True))
            )
            is_lost[int(ends[0][i]) - stays : int(ends[0][i])] = False
            is_added[int(begins[1][i]) : int(begins[1][i]) + stays] = False
        lost, added = np.flatnonzero(is_lost), np.flatnonzero(is_added)
        order = np.argsort(np.concatenate([of_before[lost], of_after[added]]), kind="stable")
        return (
            np.concatenate([lost, np.full(len(added), -1)])[order],
            np.concatenate([np.full(len(lost), -1), added])[order],
            np.concatenate([np.full(len(lost), _DELETE), np.full(len(added), _INSERT)])[order],
        )


def _in_common(
    marks: tuple[pa.Array, pa.Array], old: Positions, new: Positions, lengths: Positions, step: int
) -> Positions:
    """How many elements are equal from the positions ``old`` and ``new`` on, of at most ``lengths``, per list."""
    lists = np.repeat(np.arange(len(lengths)), lengths)
    nth = np.arange(len(lists)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    equal = np.asarray(
        pc.equal(marks[0].take(pa.array(old[lists] + step * nth)), marks[1].take(pa.array(new[lists] + step * nth)))
    ).astype(np.bool_)
    found: Positions = lengths.copy()
    np.minimum.at(found, lists[~equal], nth[~equal])
    return found


def _between(lists: Positions, begins: Positions, ends: Positions) -> Mask:
    """Which elements are from ``begins`` (included) to ``ends`` (not included) of their list."""
    at = np.arange(len(lists))
    found: Mask = (at >= begins[lists]) & (at < ends[lists])
    return found


def _overlap(before: list[bytes], after: list[bytes]) -> int:
    """How many of the last elements of one list are the first ones of the other."""
    shortest = max(1, len(before) - len(after))
    starts = (
        s for s in range(shortest, len(before)) if before[s] == after[0] and before[s:] == after[: len(before) - s]
    )
    start = next(starts, None)
    return 0 if start is None else len(before) - start
