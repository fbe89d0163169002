"""``HostReads``: the answers of a host to queries, from its own partitions, each answer at one version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa

from backends.exceptions import StoreClosedError, VersionNotFoundError
from backends.host_memory import BoundedDict
from coordinator_actor.messages import LocatedView, RunningView
from spark_bridge.exceptions import NotOwnerError, RequestError
from spark_bridge.host.host import Host
from spark_bridge.queryable.protocol import At, ChangesRequest, KeyRowsRequest, LookupRequest, ScanRequest, StateAnswer
from spark_bridge.queryable.reads.answer_version import MAX_WAIT_SECONDS, PartitionView, VersionedReader
from spark_bridge.queryable.reads.change_feed import ChangeFeed
from spark_bridge.queryable.reads.key_reads import one_value, require_retained, rolled_value
from spark_bridge.queryable.reads.operator_plan import OperatorDirectory, OperatorPlan
from spark_bridge.queryable.reads.partitioned_reads import OperatorReading, PartitionedReads
from spark_bridge.state_format.layouts import ROLLED_FAMILY, TILES_FAMILY

T = TypeVar("T")

LOCATES_AT_ONCE = 4
"""At most this many scans and lookups ask the coordinator at once which partitions are this host's."""
MAX_PLANS = 1000


def _now_ms() -> int:
    return int(time.time() * 1000)


class HostReads(PartitionedReads):
    """``StateReads`` of one host. Thread-safe; ``_plans_lock`` guards changes of the kept plans.

    A request waits at most ``wait_seconds``
    for a version that other hosts report as completed.
    """

    def __init__(
        self, host: Host, *, now_ms: Callable[[], int] = _now_ms, wait_seconds: float = MAX_WAIT_SECONDS
    ) -> None:
        super().__init__(now_ms)
        self._host = host
        # The clock is read at each call, not when the modules are imported: the simulation replaces it.
        self._changes = ChangeFeed(host, wait_seconds, time.monotonic)
        self._directory = directory = OperatorDirectory(host)
        self.locate, self.operators, self.describe = directory.locate, directory.operators, directory.describe
        self._reader = VersionedReader(host, wait_seconds, directory.forget)
        self.await_completed = self._reader.await_completed
        self._plans: BoundedDict[tuple[str, str], OperatorPlan] = BoundedDict(MAX_PLANS)
        self._plans_lock = threading.Lock()
        self._locating = threading.Semaphore(LOCATES_AT_ONCE)
        host.cache.on_run_ended(directory.forget)

    # -- operators and versions ----------------------------------------------------------------

    def lag_ms(self, run_id: str) -> int:
        return self._host.lag_ms(run_id)

    def age_ms(self, run_id: str, version: int) -> int | None:
        completed = self._host.completed
        known = completed.at(run_id, version)
        if known is None and not completed.has(run_id, version):
            # This host has no partition of the run, and so gets no messages about its versions.
            self._host.version_requests.completed_version(run_id, version, self._reader.wait_seconds)
            known = completed.at(run_id, version)
        if known is None or not known.created_ms:
            return None
        return max(0, self._now_ms() - known.created_ms, self.lag_ms(run_id))

    def located_view(self, view: str) -> LocatedView:
        return self._host.coordinator.locate_view(view)

    def feature_views(self) -> Sequence[RunningView]:
        return self._host.coordinator.feature_views()

    # -- lookups -------------------------------------------------------------------------------

    def lookup_one(self, request: LookupRequest, key: bytes) -> tuple[int, bytes | None]:
        self._host.counters.count("keys_read")
        plan = self._plan(request.run_id, request.operator)
        family = request.column_family
        plan.require_family(family)
        rolled = None
        if family == ROLLED_FAMILY:
            rolled = plan.rows(plan.variable(None), self._now_ms(), request.at.moment)

        def value_of(view: PartitionView) -> bytes | None:
            if rolled is None:
                return one_value(view, key, family)
            require_retained(plan, rolled, view)
            recent = one_value(view, key, rolled.main)
            return None if recent is None else rolled_value(rolled, recent, one_value(view, key, TILES_FAMILY))

        partition = plan.partition_of(key)
        at = request.at
        if at.isolation == "completed" and not at.staleness and self._host.prepared.is_settled(plan.run_id):
            completed = self._host.completed.newest(plan.run_id)
            instance = self._host.cache.instance(plan.run_id, plan.operator, partition)
            is_loaded = instance is not None and not instance.state.is_loading
            if completed is not None and instance is not None and is_loaded and completed.version >= at.version:
                head = completed.head(plan.operator, partition)
                if head is not None:
                    instance.note_read()
                    try:
                        view = PartitionView(partition, instance.state.reads, completed.version, head, instance)
                        return completed.version, value_of(view)
                    except (VersionNotFoundError, StoreClosedError):
                        pass  # the reader below finds out why
        with ExitStack() as keep:
            version, (value,) = self._reader.read(plan, [partition], at, value_of, keep)
        return version, value

    def lookup(self, request: LookupRequest, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
        answer = super().lookup(request, keys)
        self._host.counters.count("keys_read", len(keys))
        return answer

    # -- rows ----------------------------------------------------------------------------------

    def key_rows(self, request: KeyRowsRequest, keys: pa.BinaryArray) -> StateAnswer:
        self._host.counters.count("keys_read", len(keys))
        return super().key_rows(request, keys)

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
        return super().scan(request)

    def changes(self, request: ChangesRequest, keys: pa.BinaryArray | None) -> StateAnswer:
        plan = self._plan(request.run_id, request.operator)
        if keys is not None:
            plan.groups_of(keys)
        variable = plan.variable(request.state)
        return self._changes.read(plan, variable, request.after, request.until, keys, request.previous_run)

    # -- plans and partitions ------------------------------------------------------------------

    def _plan(self, run_id: str, operator: str) -> OperatorPlan:
        cached = self._plans.get((run_id, operator))
        if cached is not None:
            return cached
        registration = self._host.cache.registration(run_id)
        if registration is None:
            # Raises if the run does not exist.
            self._host.version_requests.completed_version(run_id, 0, self._reader.wait_seconds)
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

    def _reading(self, run_id: str, operator: str, at: At) -> OperatorReading:
        return _HostReading(self._plan(run_id, operator), at, self._reader, self._own_partitions)

    def _own_partitions(self, plan: OperatorPlan) -> list[int]:
        """Return the partitions that the coordinator has given to this host."""
        with self._locating:  # not from the directory: rows of a partition that has just come would be missing
            owners = self._host.coordinator.locate(plan.operator, plan.run_id).owners
        ours = (self._host.info.host_id, self._host.info.incarnation)
        return [p for p, owner in enumerate(owners) if (owner.host_id, owner.incarnation) == ours]


@dataclass(frozen=True)
class _HostReading(OperatorReading):
    """Partitions of this host at one version. All results are one group: the host holds them at the same time."""

    plan: OperatorPlan
    at: At
    reader: VersionedReader
    own_partitions: Callable[[OperatorPlan], list[int]]

    def partitions(self, named: list[int] | None) -> list[int]:
        return self.own_partitions(self.plan) if named is None else self.plan.partitions(named)

    def read(
        self, partitions: Sequence[int], read: Callable[[PartitionView], T], keep: ExitStack
    ) -> tuple[int, Iterator[Sequence[T]]]:
        version, results = self.reader.read(self.plan, partitions, self.at, read, keep)
        return version, iter((results,))

    def checked(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except StoreClosedError as error:
            raise NotOwnerError(
                f"A partition of operator {self.plan.operator!r} (run {self.plan.run_id}) left this host while it was "
                "read; begin again."
            ) from error
