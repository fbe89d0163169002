"""Spark's StreamingSymmetricHashJoinExec in plain Python, row by row, and a join over real providers to compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from backends import FileStateStoreProvider
from backends.providers.standalone_provider import LocalStateStoreProvider
from coordinator_actor.messages import BatchTimes
from spark_bridge.operators.join_sides import ANTI, FULL, LEFT_OUTER, RIGHT_OUTER, SEMI, SIDE, Bounds, slot_name
from spark_bridge.operators.join_task import JoinLogic, join_logic
from spark_bridge.state_format.layouts import DUE
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.state_task import EventTime
from tests.spark_bridge.operators.operator_runs import SECOND, TS, OperatorRun, column, seconds

KEY = pa.field("k", pa.string())
COLUMNS = (
    pa.schema([pa.field("lt", TS), pa.field("a", pa.int64())]),
    pa.schema([pa.field("b", pa.string()), pa.field("rt", TS)]),
)
"""The columns of both sides without the keys: the times share a column, the others do not."""

Row = tuple[Any, Any, Any]
"""Key, time in seconds, value."""
Pair = tuple[Row | None, Row | None]
"""A row of each side; None in place of a side without a match."""


@dataclass(frozen=True)
class Case:
    """A join: ``lower`` and ``upper`` in seconds, None for no bound; ``timed`` False has no times at all.

    ``in_key``: the time is a second key column.
    """

    how: str
    lower: float | None = None
    upper: float | None = None
    timed: bool = True
    in_key: bool = False

    @property
    def bounds(self) -> Bounds:
        """The bounds as the operator has them."""
        if not self.timed:
            return Bounds()
        if self.in_key:
            key = EventTime("t")
            return Bounds(key, key, key, key, in_key=True)
        left, right = EventTime("lt"), EventTime("rt")
        us = [None if s is None else round(s * SECOND) for s in (self.lower, self.upper)]
        return Bounds(left, right, left, right, us[0], us[1])

    def logic(self) -> JoinLogic:
        """The work of the operator."""
        keys = pa.schema([KEY, pa.field("t", TS)] if self.in_key else [KEY])
        columns = tuple(pa.schema([f for f in c if not (self.in_key and f.type == TS)]) for c in COLUMNS)
        both = [*keys, *columns[0], *columns[1]]
        if self.how in (SEMI, ANTI):
            both = [*keys, *columns[0]]
        return join_logic(keys, (columns[0], columns[1]), self.how, self.bounds, pa.schema(both))


@dataclass
class _Waiting:
    row: Row
    matched: bool = False


class Model:
    """The reference: lists of waiting rows, and a loop over all of them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.left: list[_Waiting] = []
        self.right: list[_Waiting] = []
        self.late = 0

    def batch(self, left: Iterable[Row], right: Iterable[Row], times: BatchTimes) -> list[Pair]:
        """Process a batch."""
        case = self.case
        late = [r for rows in (left, right) for r in rows if self._reached(r, times.late_watermark_ms)]
        self.late = len(late)
        pairs: list[Pair] = []
        for row in left:
            if self._reached(row, times.late_watermark_ms):
                continue
            new = _Waiting(row)
            for other in self.right:
                self._meet(new, other, pairs)
            self.left.append(new)
        for row in right:
            if self._reached(row, times.late_watermark_ms):
                continue
            new = _Waiting(row)
            for other in self.left:
                self._meet(other, new, pairs)
            self.right.append(new)
        if case.how == SEMI:
            self.left = [w for w in self.left if not w.matched]
        self.left = self._without_expired(self.left, case.upper, times, (LEFT_OUTER, FULL, ANTI), pairs)
        lower = None if case.lower is None else -case.lower
        self.right = self._without_expired(self.right, lower, times, (RIGHT_OUTER, FULL), pairs, is_left=False)
        return pairs

    def _reached(self, row: Row, watermark_ms: int) -> bool:
        return self.case.timed and row[1] is not None and row[1] * 1000 <= watermark_ms

    def _meet(self, left: _Waiting, right: _Waiting, pairs: list[Pair]) -> None:
        case = self.case
        if left.row[0] is None or left.row[0] != right.row[0]:
            return
        if case.timed:
            if left.row[1] is None or right.row[1] is None:
                return
            later = right.row[1] - left.row[1]
            if case.in_key and later:
                return
            if (case.lower is not None and later < case.lower) or (case.upper is not None and later > case.upper):
                return
        if case.how == SEMI:
            if not left.matched:
                pairs.append((left.row, None))
        elif case.how != ANTI:
            pairs.append((left.row, right.row))
        left.matched = right.matched = True

    def _without_expired(
        self,
        waiting: list[_Waiting],
        bound: float | None,
        times: BatchTimes,
        hows: Sequence[str],
        pairs: list[Pair],
        *,
        is_left: bool = True,
    ) -> list[_Waiting]:
        case = self.case
        stay = []
        for w in waiting:
            if not case.timed:
                expired = False
            elif w.row[1] is None:
                expired = case.in_key or bound is not None
            elif case.in_key:
                expired = w.row[1] * 1000 <= times.watermark_ms
            else:
                expired = bound is not None and w.row[1] * 1000 <= times.watermark_ms - bound * 1000 - 1
            if expired and not w.matched and case.how in hows:
                pairs.append((w.row, None) if is_left else (None, w.row))
            if not expired:
                stay.append(w)
        return stay


class JoinRun:
    """A join on real providers, given rows as ``Model`` is."""

    def __init__(
        self,
        case: Case,
        partitions: int = 1,
        provider: type[LocalStateStoreProvider] = FileStateStoreProvider,
        limits: Limits | None = None,
    ) -> None:
        self.case = case
        logic = case.logic()
        object.__setattr__(logic, "limits", limits)
        self.logic = logic
        self.run = OperatorRun(logic, logic.schema, logic.keys.names, partitions, provider)

    def batch(
        self,
        left: Sequence[Row],
        right: Sequence[Row],
        times: BatchTimes,
        cuts: Iterable[int] = (),
        order: Sequence[int] | None = None,
    ) -> list[Pair]:
        """Process a batch: the rows in the given order, in pieces cut at ``cuts``."""
        rows = shared_rows(self.logic, left, right)
        if order is not None:
            rows = rows.take(pa.array(order, pa.int64()))
        return [pair_of(e) for e in self.run.batch(rows, times, cuts)]

    def num_waiting(self) -> tuple[int, int]:
        """How many rows of both sides are stored, as the heads of the lists say; each head is checked."""
        counts = []
        for side in ("left", "right"):
            total = 0
            for family, elements in ((side, "tail"), (f"{side}.-chunks", "elements")):
                schema = self.run.schema.families[family]
                for _, values in self.pairs(family):
                    decoded = schema.decode_values(values)
                    total += sum(len(e) for e in decoded.column(elements).to_pylist())
            lengths = [
                n
                for _, values in self.pairs(side)
                for n in self.run.schema.families[side].decode_values(values).column("length").to_pylist()
            ]
            assert sum(lengths) == total and 0 not in lengths
            counts.append(total)
        return counts[0], counts[1]

    def num_entries(self, side: str) -> int:
        """How many chunks of a side stand by time, those that are gone included."""
        return sum(1 for key in self.run.stored_keys(f"{side}.-due") if DUE in key)

    def pairs(self, family: str) -> Iterable[tuple[pa.Array, pa.Array]]:
        """The stored keys and values of a family."""
        for provider in self.run.providers:
            if provider.latest_version():
                store = provider.get_read_store(provider.latest_version())
                if family in store.column_families:
                    yield from ((p.column(0), p.column(1)) for p in store.scan(b"", None, family))
                store.abort()


def pair_of(emitted: dict[str, Any]) -> Pair:
    """A row of the output as ``Model`` gives it."""
    given = {name: seconds(value) for name, value in emitted.items()}
    key = given["k"]
    left: Row | None = (key, given.get("lt", given.get("t")), given["a"])
    right: Row | None = (key, given.get("rt", given.get("t")), given.get("b"))
    return left if given["a"] is not None else None, right if given.get("b") is not None else None


def shared_rows(logic: JoinLogic, left: Sequence[Row], right: Sequence[Row]) -> pa.RecordBatch:
    """Rows of both sides as the operator's plan gives them to its tasks."""
    rows = [*left, *right]
    columns = {
        SIDE: pa.array([0] * len(left) + [1] * len(right), pa.int8()),
        "k": column([r[0] for r in rows], KEY.type),
    }
    if "t" in logic.keys.names:
        columns["t"] = column([r[1] for r in rows], TS)
    of_slots: dict[int, list[Any]] = {i: [None] * len(rows) for i in range(len(logic.slots))}
    for side, given, first in ((logic.left, left, 0), (logic.right, right, len(left))):
        for slot, field in zip(side.slots, side.columns, strict=True):
            of_slots[slot][first : first + len(given)] = [r[1] if field.type == TS else r[2] for r in given]
    columns.update({slot_name(i): column(of_slots[i], kind) for i, kind in enumerate(logic.slots)})
    return pa.record_batch(columns)


def check_event_time(emitted: Iterable[Pair], waits_ms: tuple[int | None, int | None], late_watermark_ms: int) -> None:
    """No row is older than operators behind the join allow for."""
    for pair in emitted:
        for row, waits in zip(pair, waits_ms, strict=True):
            if row is not None and row[1] is not None and waits is not None:
                assert row[1] * 1000 > max(0, late_watermark_ms - waits)


def random_rows(random: np.random.Generator, count: int, until: int, keys: Sequence[Any], side: str) -> list[Row]:
    """Rows with times around ``until`` and values that tell them apart; some keys and times are null."""
    rows = []
    for _ in range(count):
        key = keys[int(random.integers(len(keys)))]
        time = None if random.random() < 0.05 else max(0, until - int(random.integers(0, 40)))
        value = int(random.integers(1 << 40))
        rows.append((key, time, value if side == "left" else str(value)))
    return rows
