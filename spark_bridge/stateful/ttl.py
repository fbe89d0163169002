"""TTL expiry: when values expire, and the removal of expired values and of deleted state variables.

An expired value is invisible at once. It is removed from the store when its key is handled, and otherwise by a sweep:
each batch looks at a bounded number of rows, in other key groups every time, so that every batch takes about the same
time. If a key group has more rows than that, the state itself records where its next sweep starts (``SWEEP_FAMILY``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import Mask, list_parts, offsets_of
from backends.encoding.keys import KeyRange
from backends.encoding.operator_schema import StateVariable
from backends.encoding.schema import StateSchema
from spark_bridge.state_format import layouts
from spark_bridge.state_format.partition_rows import rows_of_structs
from spark_bridge.state_format.stored_rows import group_range, prefix_range
from spark_bridge.stateful.declaration import INT64_MAX, KeyStep

SWEPT_ROWS = 20_000
"""Rows that a sweep looks at in a batch, at most, or one of each column family."""
_HEADS_ASKED = 32
"""In one batch of a scan: long lists and large maps whose other rows are looked up, after the row at the key."""
_GOLDEN = (math.sqrt(5) - 1) / 2
"""The share of the key groups that sweeps advance by: it spreads them evenly."""
_PARTS_SWEPT = {layouts.VALUE: ("",), layouts.LIST: (layouts.CHUNKS, ""), layouts.MAP: (layouts.ENTRIES, "")}


class Ttl:
    """The TTL of one variable: its values live for ``ttl_ms`` after the batch that wrote them (None: for ever)."""

    def __init__(self, ttl_ms: int | None, step: KeyStep) -> None:
        self._ttl_ms = ttl_ms
        self._step = step
        self.is_on = ttl_ms is not None

    @property
    def expiry(self) -> int | None:
        """Return when values written in this batch expire, in ms since 1970; None without a TTL."""
        return None if self._ttl_ms is None else expiry_at(self._step.timestamp_ms, self._ttl_ms)

    def alive(self, rows: pa.RecordBatch) -> Mask:
        """Return which rows have not expired."""
        return alive_at(rows, self._step.timestamp_ms)

    def expiries(self, rows: pa.RecordBatch) -> list[int | None]:
        """Return when each row expires; None without a TTL."""
        return list(rows.column(layouts.TTL_COLUMN).to_pylist()) if self.is_on else [None] * rows.num_rows

    def stamped(self, rows: pa.RecordBatch, expiries: list[int | None] | None = None) -> pa.RecordBatch:
        """Return the rows with the column of their expiries, by default that of this batch; unchanged without a TTL."""
        if not self.is_on:
            return rows
        column: Any = np.full(rows.num_rows, self.expiry, np.int64) if expiries is None else expiries
        return rows.append_column(pa.field(layouts.TTL_COLUMN, pa.int64()), pa.array(column, pa.int64()))


def expiry_at(timestamp_ms: int, ttl_ms: int) -> int:
    """Return when a value expires that is written at ``timestamp_ms`` (ms since 1970)."""
    return min(timestamp_ms + ttl_ms, INT64_MAX)


def alive_at(rows: pa.RecordBatch, timestamp_ms: int) -> Mask:
    """Return which rows have no expiry, or one after ``timestamp_ms``."""
    alive: Mask = rows.column(layouts.TTL_COLUMN).fill_null(INT64_MAX).to_numpy() > timestamp_ms
    return alive


def stage_expired(step: KeyStep) -> None:
    """Stage the removal of expired values in some key groups, and of some rows of deleted variables.

    To be called before all other changes are staged: a change staged later to the same key counts. An operator without
    a TTL and without deleted variables costs nothing.
    """
    _Sweep(step).stage()


@dataclass(frozen=True)
class _Family:
    """A column family of a variable with a TTL: ``part`` selects it, ``name`` and ``schema`` are the stored ones."""

    variable: StateVariable
    part: str
    name: str
    schema: StateSchema


class _Sweep:
    """The sweep of one batch: it looks at some key groups of the partition, at others in every batch."""

    def __init__(self, step: KeyStep) -> None:
        self._step = step
        self._groups = _rotated(step.store.key_groups, step.store.batch_id)

    def stage(self) -> None:
        schema = self._step.store.schema
        variables = [v for v in schema.variables if not v.deleted and v.ttl_ms is not None]
        swept = [_Family(v, part, *layouts.family_of(v, part)) for v in variables for part in _PARTS_SWEPT[v.kind]]
        deleted = [family for v in schema.variables if v.deleted for family in v.families]
        if not swept and not deleted:
            return
        positions = self._positions([family.name for family in swept] + deleted)
        for family in swept:
            self._stage_family(family, max(1, SWEPT_ROWS // len(swept)), positions[family.name])
        self._purge(deleted, positions)

    def _positions(self, families: list[str]) -> dict[str, bytes | None]:
        """Return the last key that sweeps of this batch's first key group have looked at, None for the beginning."""
        keys = pa.array([self._position_key(family) for family in families], pa.binary())
        order = pc.sort_indices(keys)
        values = self._step.store.get_many(keys.take(order), layouts.SWEEP_FAMILY).to_pylist()
        return {families[i]: position for i, position in zip(order.to_pylist(), values, strict=True)}

    def _position_key(self, family: str) -> bytes:
        return group_range(self._groups[0])[0] + family.encode()

    def _note(self, family: str, position: bytes | None) -> None:
        """Stage the start of the next sweep of this batch's first key group: after that key, or at the beginning."""
        values = None if position is None else pa.array([position], pa.binary())
        self._step.stage(pa.array([self._position_key(family)], pa.binary()), values, layouts.SWEEP_FAMILY)

    def _purge(self, deleted: list[str], positions: dict[str, bytes | None]) -> None:
        """Stage the removal of some rows of deleted variables, which no processor writes to."""
        store, left = self._step.store, SWEPT_ROWS
        ranges = [group_range(group) for group in range(*store.key_groups)]
        for family in deleted:
            if positions[family] is not None:
                self._note(family, None)
            for batch in store.scan(ranges, family, left) if left else ():
                self._step.stage(batch.column(0), None, family)
                left -= batch.num_rows

    def _stage_family(self, family: _Family, rows: int, position: bytes | None) -> None:
        """Look at ``rows`` rows: of the first key group those after ``position``, then of the others."""
        first, *others = map(group_range, self._groups)
        behind = first if position is None else (position + b"\x00", first[1])
        left, last = self._stage_ranges(family, [behind], rows)
        if left == 0:
            self._note(family.name, last)
            return
        if position is not None:
            self._note(family.name, None)
        if others:
            self._stage_ranges(family, others, left)

    def _stage_ranges(self, family: _Family, ranges: list[KeyRange], rows: int) -> tuple[int, bytes | None]:
        """Look at ``rows`` rows of some ranges; return how many of them were not there, and the last key there was."""
        last = None
        for batch in self._step.store.scan(ranges, family.name, rows):
            rows -= batch.num_rows
            last = batch.column(0)[-1].as_py()
            is_over = self._is_over(family, batch)
            if is_over.any():
                keys = batch.column(0).filter(pa.array(is_over))
                self._step.stage(keys, None, family.name)
                self._step.figures.count("numValuesRemovedDueToTTLExpiry", len(keys))
        return rows, last

    def _is_over(self, family: _Family, batch: pa.RecordBatch) -> Mask:
        """Return which stored rows have expired with all elements or entries that they hold."""
        variable, part = family.variable, family.part
        rows = family.schema.decode_values(batch.column(1))
        now = self._step.timestamp_ms
        if variable.kind == layouts.VALUE or part == layouts.ENTRIES:
            return ~alive_at(rows, now)
        if part == layouts.CHUNKS:
            column, others, elsewhere = layouts.ELEMENTS, "", None
        elif variable.kind == layouts.LIST:
            column, others, elsewhere = layouts.TAIL, layouts.CHUNKS, layouts.NUM_CHUNKS
        else:
            column, others, elsewhere = layouts.MAP_ENTRIES, layouts.ENTRIES, layouts.IS_LARGE
        elements, offsets = list_parts(rows.column(column))
        alive = offsets_of(alive_at(rows_of_structs(elements), now))[offsets]
        is_over: Mask = alive[1:] == alive[:-1]
        if elsewhere is None:
            return is_over
        # A head is over if it never had rows in the other family, or all of them have been removed.
        gone: Mask = rows.column(elsewhere).to_numpy(zero_copy_only=False) == 0
        family_of_others = layouts.family_of(variable, others)[0]
        for i in np.flatnonzero(is_over & ~gone)[:_HEADS_ASKED].tolist():
            ranges = [prefix_range(batch.column(0)[i].as_py())]
            gone[i] = sum(found.num_rows for found in self._step.store.scan(ranges, family_of_others, 1)) == 0
        return is_over & gone


def _rotated(key_groups: tuple[int, int], batch_id: int) -> list[int]:
    """Return the key groups, from another one on in every batch, and from each one in n batches of n key groups."""
    first, end = key_groups
    n = end - first
    stride = max(1, round(n * _GOLDEN))
    while math.gcd(stride, n) > 1:
        stride += 1
    start = batch_id * stride % n
    return [first + (start + i) % n for i in range(n)]
