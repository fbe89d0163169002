"""The answers to query clients from partitions that this process opens. ``HostReads`` and ``StoredReads`` share it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import placed, take_binary
from spark_bridge.queryable.protocol import At, KeyRowsRequest, LookupRequest, ScanRequest, StateAnswer
from spark_bridge.queryable.reads import key_reads, scans
from spark_bridge.queryable.reads.answer_version import PartitionView
from spark_bridge.queryable.reads.index_reads import IndexLookup
from spark_bridge.queryable.reads.operator_plan import OperatorPlan
from spark_bridge.state_format.layouts import ROLLED_FAMILY, window_place
from spark_bridge.state_format.partition_rows import partition_rows

T = TypeVar("T")


class OperatorReading(ABC):
    """The partitions of one operator, for one request at the version that it asks for."""

    plan: OperatorPlan

    @abstractmethod
    def partitions(self, named: list[int] | None) -> Sequence[int]:
        """Return the partitions that a request names; those that this process answers for if it names none."""

    @abstractmethod
    def read(
        self, partitions: Sequence[int], read: Callable[[PartitionView], T], keep: ExitStack
    ) -> tuple[int, Iterator[Sequence[T]]]:
        """Return the version, and the result of ``read`` for each partition, in groups.

        Iterators in a group may be read until the next group is taken, and until ``keep`` is closed.
        """

    def checked(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches of a group; replace errors that the client would misunderstand."""
        return batches


class PartitionedReads(ABC):
    """Five of the requests of ``StateReads``. ``now_ms`` decides whether rows with a TTL have expired."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms

    @abstractmethod
    def _reading(self, run_id: str, operator: str, at: At) -> OperatorReading:
        """Return the reading of an operator for one request."""

    def lookup_one(self, request: LookupRequest, key: bytes) -> tuple[int, bytes | None]:
        version, values = self.lookup(request, pa.array([key], pa.binary()))
        return version, values[0].as_py()

    def lookup(self, request: LookupRequest, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
        reading = self._reading(request.run_id, request.operator, request.at)
        plan = reading.plan
        plan.require_family(request.column_family)
        of_keys = plan.partitions_of_keys(keys)
        runs, order = _key_runs(of_keys, plan.spec.num_partitions), None
        if runs is None:
            order = np.argsort(of_keys, kind="stable")
            keys = take_binary(keys, order)
            runs = _key_runs(of_keys.take(order), plan.spec.num_partitions) or {}
        parts = {partition: keys[begin:end] for partition, (begin, end) in runs.items()}

        rolled = None
        families = [request.column_family]
        if request.column_family == ROLLED_FAMILY:
            rolled = plan.rows(plan.variable(None), self._now_ms(), request.at.moment)
            families = rolled.families

        def values_of(view: PartitionView) -> list[pa.BinaryArray]:
            if rolled is not None:
                key_reads.require_retained(plan, rolled, view)
            return [key_reads.values_of(view, parts[view.partition], family) for family in families]

        with ExitStack() as keep:
            version, groups = reading.read(list(runs), values_of, keep)
            of_partitions = [part for group in groups for part in group]
            values, *more = (key_reads.joined_arrays([part[i] for part in of_partitions]) for i in range(len(families)))
        if rolled is not None:
            values = key_reads.rolled_values(rolled, values, *more)
        return version, values if order is None else placed([values], [order])

    def key_rows(self, request: KeyRowsRequest, keys: pa.BinaryArray) -> StateAnswer:
        reading = self._reading(request.run_id, request.operator, request.at)
        plan = reading.plan
        variable = plan.variable(request.state)
        rows = plan.rows(variable, self._now_ms(), request.at.moment)
        selection = scans.RowSelection.of(rows, request.columns, (), with_position=True)
        window = window_place(variable)
        of_keys = plan.partitions_of(plan.groups_of(keys))
        if window is not None:
            windowed = key_reads.WindowedKeys.of(rows, window, keys)
            partitions = reading.partitions(request.partitions)
        else:
            windowed = None
            partitions = np.unique(of_keys).tolist()

        def pairs_of(view: PartitionView) -> key_reads.FoundPairs:
            key_reads.require_retained(plan, rows, view)
            if windowed is not None:
                return windowed.find(plan, view)
            positions = np.flatnonzero(of_keys == view.partition)
            return key_reads.find_pairs(view, rows, keys.take(pa.array(positions)), positions)

        def batches(groups: Iterator[Sequence[key_reads.FoundPairs]]) -> Iterator[pa.RecordBatch]:
            if windowed is not None:
                # The windows of a key are in several partitions, and come in the order of time: all are read first.
                # They are the rows of a few keys.
                groups = iter([[pairs for group in groups for pairs in group]])
            for group in groups:
                yield from key_reads.rows_of_keys(plan, rows, group, by_window=windowed is not None)

        return self._answer(reading, partitions, pairs_of, batches, selection)

    def scan(self, request: ScanRequest) -> StateAnswer:
        reading = self._reading(request.run_id, request.operator, request.at)
        plan = reading.plan
        rows = plan.rows(plan.variable(request.state), self._now_ms(), request.at.moment, collect=request.collect)
        selection = scans.RowSelection.of(rows, request.columns, request.where)
        bounds = scans.KeyBounds(request.start, request.end)
        index = IndexLookup.of(rows, request.where, request.limit) if bounds.is_open else None

        def pairs_of(view: PartitionView) -> tuple[int, scans.Pairs]:
            key_reads.require_retained(plan, rows, view)
            groups = plan.key_groups_of(view.partition)
            matches = None if index is None else index.pairs(view, groups)
            return view.partition, scans.pairs_of(view, rows, groups, bounds) if matches is None else matches

        def batches(groups: Iterator[Sequence[tuple[int, scans.Pairs]]]) -> Iterator[pa.RecordBatch]:
            for group in groups:
                for partition, pairs in group:
                    yield from partition_rows(rows, pairs, partition)

        partitions = reading.partitions(request.partitions)
        return self._answer(reading, partitions, pairs_of, batches, selection, request.limit)

    def _answer(
        self,
        reading: OperatorReading,
        partitions: Sequence[int],
        find: Callable[[PartitionView], T],
        batches: Callable[[Iterator[Sequence[T]]], Iterator[pa.RecordBatch]],
        selection: scans.RowSelection,
        limit: int | None = None,
    ) -> StateAnswer:
        with ExitStack() as opening:
            version, groups = reading.read(partitions, find, opening)
            keep = opening.pop_all()
        rows = scans.limited(map(selection.rows, reading.checked(batches(groups))), limit)
        return StateAnswer(version, selection.schema, scans.RowStream(scans.gather_batches(rows), keep.close))

    def count(self, request: ScanRequest) -> tuple[int, int]:
        reading = self._reading(request.run_id, request.operator, request.at)
        plan = reading.plan
        rows = plan.rows(plan.variable(request.state), self._now_ms(), request.at.moment, collect=request.collect)
        if request.where or not scans.has_row_per_pair(rows):
            answer = self.scan(request)
            return answer.version, sum(batch.num_rows for batch in answer.batches)
        bounds = scans.KeyBounds(request.start, request.end)
        # Keys that deleted variables have left are among the keys too, and an entry of each index for each row.
        indexes = rows.variable.indexes.values()
        is_all = bounds.is_open and set(plan.schema.families) == {rows.main, *indexes}

        def count_of(view: PartitionView) -> int | Iterator[pa.RecordBatch]:
            key_reads.require_retained(plan, rows, view)
            count = view.reads.num_keys(view.version, head=view.head) if is_all and view.instance is not None else None
            if count is not None:
                return count // (1 + len(indexes))
            return scans.pairs_of(view, rows, plan.key_groups_of(view.partition), bounds)[rows.main]

        num_rows = 0
        with ExitStack() as keep:
            version, groups = reading.read(reading.partitions(request.partitions), count_of, keep)
            for group in groups:
                for count in group:
                    if isinstance(count, int):
                        num_rows += count
                    else:
                        num_rows += sum(batch.num_rows for batch in reading.checked(count))
        return version, num_rows if request.limit is None else min(num_rows, request.limit)


def _key_runs(of_keys: npt.NDArray[np.uint16], num_partitions: int) -> dict[int, tuple[int, int]] | None:
    """Return begin and end of each partition's keys; None if the keys of a partition are not all together."""
    if not len(of_keys):
        return {}
    changes = (of_keys[1:] != of_keys[:-1]).nonzero()[0]
    if len(changes) >= num_partitions:
        return None
    begins: list[int] = [0, *(changes + 1).tolist()]
    runs = dict(zip(of_keys[begins].tolist(), pairwise([*begins, len(of_keys)]), strict=True))
    return runs if len(runs) == len(begins) else None
