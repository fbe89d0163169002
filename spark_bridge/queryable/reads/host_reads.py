"""``HostReads``: the answers of a host to queries, from its own partitions, each answer at one version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.encoding.columns import placed, take_binary
from backends.exceptions import InvalidStateStoreArgument, StoreClosedError, VersionNotFoundError
from backends.host_memory import BoundedDict
from backends.partition.version_reads import VersionReads
from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import NotOwnerError, RequestError
from spark_bridge.host.host import Host
from spark_bridge.queryable.protocol import ChangesRequest, KeyRowsRequest, LookupRequest, ScanRequest, StateAnswer
from spark_bridge.queryable.reads.answer_version import MAX_WAIT_SECONDS, CompletionWait, PartitionView, VersionedReader
from spark_bridge.queryable.reads.change_feed import ChangeFeed
from spark_bridge.queryable.reads.key_reads import (
    FoundPairs,
    WindowedKeys,
    find_pairs,
    joined_arrays,
    rows_of_keys,
    values_of,
)
from spark_bridge.queryable.reads.operator_plan import OperatorDirectory, OperatorPlan
from spark_bridge.queryable.reads.scans import (
    KeyBounds,
    Pairs,
    RowSelection,
    RowStream,
    gather_batches,
    has_row_per_pair,
    limited,
    pairs_of,
)
from spark_bridge.state_format.layouts import window_place
from spark_bridge.state_format.partition_rows import partition_rows

LOCATES_AT_ONCE = 4
"""At most this many scans and lookups ask the coordinator at once which partitions are this host's."""
MAX_PLANS = 1000


def _now_ms() -> int:
    return int(time.time() * 1000)


class HostReads:
    """``StateReads`` of one host. Thread-safe; ``_plans_lock`` guards changes of the kept plans.

    ``now_ms`` is the time that decides whether rows with a TTL have expired. A request waits at most ``wait_seconds``
    for a version that other hosts report as completed.
    """

    def __init__(
        self, host: Host, *, now_ms: Callable[[], int] = _now_ms, wait_seconds: float = MAX_WAIT_SECONDS
    ) -> None:
        self._host = host
        self._now_ms = now_ms
        self._reader = VersionedReader(host, wait_seconds)
        # The clock is read at each call, not when the modules are imported: the simulation replaces it.
        self._changes = ChangeFeed(host, wait_seconds, time.monotonic)
        self._directory = OperatorDirectory(host)
        self._completion = CompletionWait(host, wait_seconds, self._directory.forget)
        self._plans: BoundedDict[tuple[str, str], OperatorPlan] = BoundedDict(MAX_PLANS)
        self._plans_lock = threading.Lock()
        self._locating = threading.Semaphore(LOCATES_AT_ONCE)
        host.cache.on_run_ended(self._directory.forget)

    # -- operators and versions ----------------------------------------------------------------

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        return self._directory.locate(operator, query)

    def operators(self) -> list[dict[str, Any]]:
        return self._directory.operators()

    def describe(self, operator: str | None, query: str | None) -> dict[str, Any]:
        return self._directory.describe(operator, query)

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        return self._completion.await_completed(run_id, after, seconds)

    def lag_ms(self, run_id: str) -> int:
        return self._host.lag_ms(run_id)

    # -- lookups -------------------------------------------------------------------------------

    def lookup_one(self, request: LookupRequest, key: bytes) -> tuple[int, bytes | None]:
        plan = self._plan(request.run_id, request.operator)
        family = request.column_family
        plan.require_family(family)
        partition = plan.partition_of(key)
        at = request.at
        if at.isolation == "completed" and self._host.prepared.is_settled(plan.run_id):
            completed = self._host.completed.newest(plan.run_id)
            instance = self._host.cache.instance(plan.run_id, plan.operator, partition)
            is_loaded = instance is not None and not instance.state.is_loading
            if completed is not None and instance is not None and is_loaded and completed.version >= at.version:
                head = completed.head(plan.operator, partition)
                if head is not None:
                    instance.is_read = True
                    try:
                        return completed.version, _value_of(instance.state.reads, key, family, completed.version, head)
                    except (VersionNotFoundError, StoreClosedError):
                        pass  # the reader below finds out why
        with ExitStack() as keep:
            version, (value,) = self._reader.read(
                plan, [partition], at, lambda v: _value_of(v.reads, key, family, v.version, v.head), keep
            )
        return version, value

    def lookup(self, request: LookupRequest, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
        plan = self._plan(request.run_id, request.operator)
        plan.require_family(request.column_family)
        of_keys = plan.partitions_of_keys(keys)
        runs, order = _key_runs(of_keys, plan.spec.num_partitions), None
        if runs is None:
            order = np.argsort(of_keys, kind="stable")
            keys = take_binary(keys, order)
            runs = _key_runs(of_keys.take(order), plan.spec.num_partitions) or {}
        partitions = list(runs)
        parts = {partition: keys[begin:end] for partition, (begin, end) in runs.items()}
        with ExitStack() as keep:
            version, found = self._reader.read(
                plan,
                partitions,
                request.at,
                lambda view: values_of(view, parts[view.partition], request.column_family),
                keep,
            )
        values = joined_arrays(found)
        self._host.counters.count("keys_read", len(keys))
        return version, values if order is None else placed([values], [order])

    # -- rows ----------------------------------------------------------------------------------

    def key_rows(self, request: KeyRowsRequest, keys: pa.BinaryArray) -> StateAnswer:
        plan = self._plan(request.run_id, request.operator)
        variable = plan.variable(request.state)
        rows = plan.rows(variable, self._now_ms())
        selection = RowSelection.of(rows, request.columns, (), with_position=True)
        window = window_place(variable)
        groups = plan.groups_of(keys)
        if window is not None:
            windowed = WindowedKeys.of(rows, window, keys)
            partitions = self._partitions_of(plan, request)

            def find(view: PartitionView) -> FoundPairs:
                return windowed.find(plan, view)

        else:
            of_keys = plan.partitions_of(groups)
            partitions = np.unique(of_keys).tolist()

            def find(view: PartitionView) -> FoundPairs:
                positions = np.flatnonzero(of_keys == view.partition)
                return find_pairs(view, rows, keys.take(pa.array(positions)), positions)

        def read(found: Sequence[FoundPairs]) -> Iterator[pa.RecordBatch]:
            return rows_of_keys(plan, rows, found, by_window=window is not None)

        self._host.counters.count("keys_read", len(keys))
        return self._answer(plan, partitions, request, find, read, selection)

    def scan(self, request: ScanRequest) -> StateAnswer:
        plan = self._plan(request.run_id, request.operator)
        if request.previous_run not in ("", plan.run_id):
            if request.at.isolation != "version":
                raise RequestError(
                    "The rest of a scan that another run began needs isolation version; previous_run= is for nothing "
                    "else."
                )
            completed = self._reader.completed(plan, request.at.version).version
            self._changes.require_same_history(plan, completed, request.at.version, request.previous_run)
        rows = plan.rows(plan.variable(request.state), self._now_ms(), collect=request.collect)
        selection = RowSelection.of(rows, request.columns, request.where)
        bounds = KeyBounds(request.start, request.end)
        partitions = self._partitions_of(plan, request)

        def read(found: Sequence[tuple[int, Pairs]]) -> Iterator[pa.RecordBatch]:
            return chain.from_iterable(partition_rows(rows, pairs, partition) for partition, pairs in found)

        return self._answer(
            plan,
            partitions,
            request,
            lambda v: (v.partition, pairs_of(v, rows, plan.key_groups_of(v.partition), bounds)),
            read,
            selection,
            request.limit,
        )

    def _answer(
        self,
        plan: OperatorPlan,
        partitions: Sequence[int],
        request: KeyRowsRequest | ScanRequest,
        find: Callable[[PartitionView], Any],
        read: Callable[[Sequence[Any]], Iterator[pa.RecordBatch]],
        selection: RowSelection,
        limit: int | None = None,
    ) -> StateAnswer:
        with ExitStack() as opening:
            version, found = self._reader.read(plan, partitions, request.at, find, opening)
            keep = opening.pop_all()
        batches = limited(map(selection.rows, _not_owner_if_unloaded(plan, read(found))), limit)
        return StateAnswer(version, selection.schema, RowStream(gather_batches(batches), keep.close))

    def count(self, request: ScanRequest) -> tuple[int, int]:
        plan = self._plan(request.run_id, request.operator)
        rows = plan.rows(plan.variable(request.state), self._now_ms(), collect=request.collect)
        if request.where or not has_row_per_pair(rows):
            answer = self.scan(request)
            return answer.version, sum(batch.num_rows for batch in answer.batches)
        bounds = KeyBounds(request.start, request.end)
        # Keys that deleted variables have left are among the keys too.
        is_all = bounds.is_open and set(plan.schema.families) == {rows.main}

        def counted(view: PartitionView) -> int | Pairs:
            known = view.reads.num_keys(view.version, head=view.head) if is_all and view.instance is not None else None
            return pairs_of(view, rows, plan.key_groups_of(view.partition), bounds) if known is None else known

        with ExitStack() as keep:
            version, found = self._reader.read(plan, self._partitions_of(plan, request), request.at, counted, keep)
            count = 0
            for one in found:
                if isinstance(one, int):
                    count += one
                else:
                    count += sum(batch.num_rows for batch in _not_owner_if_unloaded(plan, one[rows.main]))
        return version, count if request.limit is None else min(count, request.limit)

    def changes(self, request: ChangesRequest, keys: pa.BinaryArray | None) -> StateAnswer:
        plan = self._plan(request.run_id, request.operator)
        if keys is not None:
            plan.groups_of(keys)
        variable = plan.variable(request.state)
        return self._changes.read(plan, variable, request.after, request.until, keys, request.previous_run)

    # -- plans and partitions ------------------------------------------------------------------

    def _plan(self, run_id: str, operator: str) -> OperatorPlan:
        known = self._plans.get((run_id, operator))
        if known is not None:
            return known
        registration = self._host.cache.registration(run_id)
        if registration is None:
            self._host.version_requests.completed_version(
                run_id, 0, self._reader.wait_seconds
            )  # raises if the run does not exist
            registration = self._host.loads.read_result(
                (run_id, operator),
                lambda: self._host.grants.for_read(run_id, operator, 0).registration,
                f"What operator {operator!r} (run {run_id}) is like",
                self._reader.wait_seconds,
            )
        plan = OperatorPlan.of(registration, operator)
        with self._plans_lock:
            self._plans[run_id, operator] = plan
        return plan

    def _partitions_of(self, plan: OperatorPlan, request: ScanRequest | KeyRowsRequest) -> list[int]:
        return self._own_partitions(plan) if request.partitions is None else plan.partitions(request.partitions)

    def _own_partitions(self, plan: OperatorPlan) -> list[int]:
        """Return the partitions that the coordinator has given to this host."""
        with self._locating:  # not from the directory: rows of a partition that has just come would be missing
            owners = self._host.coordinator.locate(plan.operator, plan.run_id).owners
        ours = (self._host.info.host_id, self._host.info.incarnation)
        return [p for p, owner in enumerate(owners) if (owner.host_id, owner.incarnation) == ours]


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


def _value_of(reads: VersionReads, key: bytes, family: str, version: int, head: str | None) -> bytes | None:
    try:
        return reads.get_one(key, version, family, head=head)
    except InvalidStateStoreArgument:
        if family == DEFAULT_FAMILY:
            raise
        return None  # the family of a variable that was never written


def _not_owner_if_unloaded(plan: OperatorPlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches; raise ``NotOwnerError`` if a partition is unloaded while it is read."""
    try:
        yield from batches
    except StoreClosedError as error:
        raise NotOwnerError(
            f"A partition of operator {plan.operator!r} (run {plan.run_id}) left this host while it was read; begin "
            "again."
        ) from error
