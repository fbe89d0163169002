"""What a host answers to queries: from its own partitions, all of one answer at one version."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import placed, taken
from backends.exceptions import InvalidStateStoreArgument, StoreClosedError, VersionNotFoundError
from backends.ids import DEFAULT_FAMILY
from backends.partition.partition_state import PartitionState
from coordinator_actor.exceptions import CoordinatorError
from coordinator_actor.messages import OperatorLocation, RunningOperator
from spark_bridge.exceptions import NotOwnerError, RequestError
from spark_bridge.host.completed_versions import CompletedVersion
from spark_bridge.host.host import Host
from spark_bridge.queryable.protocol.messages import Changes, KeyRows, Lookup, Scan
from spark_bridge.queryable.protocol.state_reads import StateAnswer
from spark_bridge.queryable.reads.answer_version import WAIT_SECONDS, AnswerVersions, PartitionView
from spark_bridge.queryable.reads.change_feed import ChangeFeed
from spark_bridge.queryable.reads.key_reads import FoundPairs, find_pairs, joined, rows_of_keys, values_of
from spark_bridge.queryable.reads.operator_plan import OperatorPlan
from spark_bridge.queryable.reads.operator_summary import operator_summary
from spark_bridge.queryable.reads.partition_scans import KeyBounds, Pairs, has_row_per_pair, pairs_of
from spark_bridge.queryable.reads.row_selection import RowSelection
from spark_bridge.queryable.reads.row_stream import RowStream, gathered, limited
from spark_bridge.queryable.reads.version_copies import VersionCopies
from spark_bridge.queryable.reads.windowed_key_reads import WindowedKeys
from spark_bridge.state_format.partition_rows import partition_rows
from spark_bridge.state_format.windowed_keys import window_of

AWAIT_SECONDS = 1.0
"""So often the coordinator is asked, while somebody waits for a version, in a host that nobody tells of it."""
_BRIEFLY = 0.001
KEPT_SECONDS = 0.5
"""For so long answers of the coordinator about operators are given again: anybody may ask, and it has commits to take."""
ASKED_AT_ONCE = 4
"""So many scans and lookups ask the coordinator at once which partitions are this host's."""
_KNOWN_PLANS = 1000


def _now_ms() -> int:
    return int(time.time() * 1000)


class HostReads:
    """``StateReads`` of one host.

    ``now_ms`` is the time at which rows with a TTL have expired. A version that others say is completed is waited for
    ``wait_seconds`` at most.
    """

    def __init__(self, host: Host, *, now_ms: Callable[[], int] = _now_ms, wait_seconds: float = WAIT_SECONDS) -> None:
        self._host = host
        self._now_ms = now_ms
        self._views = AnswerVersions(host, VersionCopies(host, wait_seconds=wait_seconds), wait_seconds)
        self._changes = ChangeFeed(host, wait_seconds)
        self._plans: dict[tuple[str, str], OperatorPlan] = {}
        self._asked: dict[str, float] = {}
        self._locations: dict[tuple[str, str | None], tuple[float, OperatorLocation]] = {}
        self._operators: tuple[float, tuple[RunningOperator, ...]] = (-math.inf, ())
        self._asking = threading.Semaphore(ASKED_AT_ONCE)
        host.held.on_run_ended(self._forget_locations)

    # -- what there is -------------------------------------------------------------------------

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        """See ``StateReads``. The answer may be half a second old, as any is by the time it arrives."""
        key, now = (operator, query), time.monotonic()
        until, location = self._locations.get(key, (-math.inf, None))
        if location is None or now >= until:
            location = self._host.coordinator.locate(operator, query)
            self._locations.pop(key, None)
            while len(self._locations) >= _KNOWN_PLANS:
                self._locations.pop(next(iter(self._locations)), None)
            self._locations[key] = (now + KEPT_SECONDS, location)
        return location

    def operators(self) -> list[dict[str, Any]]:
        """See ``StateReads``."""
        return [operator_summary(found) for found in self._running()]

    def _running(self) -> tuple[RunningOperator, ...]:
        until, operators = self._operators
        now = time.monotonic()
        if now >= until:
            operators = self._host.coordinator.operators()
            self._operators = (now + KEPT_SECONDS, operators)
        return operators

    def describe(self, operator: str | None, query: str | None) -> dict[str, Any]:
        """See ``StateReads``. ``held`` are the partitions that are loaded here, by operator."""
        info = self._host.info
        asked = [o for o in self._running() if _is_asked(o, operator, query)]
        if operator is not None and not asked:
            self._host.coordinator.locate(operator, query)  # says what there is, or that the query has ended
        described = []
        for found in asked:
            held = self._host.reads.partitions(found.run_id, found.operator.name)
            noted = self._host.completed.newest(found.run_id)
            described.append(
                {
                    **operator_summary(found),
                    "completed_version_here": None if noted is None else noted.version,
                    "held": held,
                }
            )
        return {
            "host_id": info.host_id,
            "incarnation": info.incarnation,
            "address": info.address,
            "query_address": info.query_address,
            "node_id": info.node_id,
            "operators": described,
        }

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        """See ``StateReads``. Raises ``RetiredRunError`` if the run ends meanwhile."""
        deadline = time.monotonic() + seconds
        newest = self._host.completed.newest(run_id)
        if newest is None:
            newest = self._host.version_requests.completed_version(run_id, 0, self._views.wait_seconds)
        while newest is None or newest.version <= after:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            newest = self._host.completed.wait(run_id, after + 1, min(left, AWAIT_SECONDS))
            if newest is None or newest.version <= after:
                newest = self._asked_again(run_id, after)
        return -1 if newest is None else newest.version

    def _asked_again(self, run_id: str, after: int) -> CompletedVersion | None:
        """What the coordinator says: nobody tells this host if it has nothing of the run, or that the run is over.

        One of those who wait asks for all of them.
        """
        newest, now = self._host.completed.newest(run_id), time.monotonic()
        if newest is not None and now - self._asked.get(run_id, 0.0) < AWAIT_SECONDS / 2:
            return newest
        while len(self._asked) >= _KNOWN_PLANS:
            self._asked.pop(next(iter(self._asked)), None)
        self._asked[run_id] = now
        try:
            return self._host.version_requests.completed_version(run_id, after + 1, _BRIEFLY)
        except CoordinatorError:
            self._host.completed.forget(run_id)  # the others find out, too
            self._forget_locations(run_id)
            raise

    def _forget_locations(self, run_id: str | None) -> None:
        """The run is over (None: all are): whoever asks must hear of it, or of the next one, at once."""
        for key, (_, location) in list(self._locations.items()):
            if run_id in (None, location.run_id):
                self._locations.pop(key, None)
        self._operators = (-math.inf, ())

    # -- lookups -------------------------------------------------------------------------------

    def lookup_one(self, request: Lookup, key: bytes) -> tuple[int, bytes | None]:
        """See ``StateReads``."""
        plan = self._plan(request.run_id, request.operator)
        family = request.column_family
        plan.require_family(family)
        partition = plan.partition_of(key)
        at = request.at
        if at.isolation == "completed":
            noted = self._host.completed.newest(plan.run_id)
            instance = self._host.held.instance(plan.run_id, plan.operator, partition)
            is_there = instance is not None and not instance.state.is_loading
            if noted is not None and instance is not None and is_there and noted.version >= at.version:
                head = noted.head(plan.operator, partition)
                if head is not None:
                    try:
                        return noted.version, _value_of(instance.state, key, family, noted.version, head)
                    except (VersionNotFoundError, StoreClosedError):
                        pass  # the way below finds out why
        with ExitStack() as keep:
            version, (value,) = self._views.read(
                plan, [partition], at, lambda v: _value_of(v.state, key, family, v.version, v.head), keep
            )
        return version, value

    def lookup(self, request: Lookup, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
        """See ``StateReads``."""
        plan = self._plan(request.run_id, request.operator)
        plan.require_family(request.column_family)
        of_keys = plan.partitions_of_keys(keys)
        runs, order = _runs(of_keys, plan.spec.num_partitions), None
        if runs is None:
            order = np.argsort(of_keys, kind="stable")
            keys = taken(keys, order)
            runs = _runs(of_keys.take(order), plan.spec.num_partitions) or {}
        partitions = list(runs)
        parts = {partition: keys[begin:end] for partition, (begin, end) in runs.items()}
        with ExitStack() as keep:
            version, found = self._views.read(
                plan,
                partitions,
                request.at,
                lambda view: values_of(view, parts[view.partition], request.column_family),
                keep,
            )
        values = joined(found)
        self._host.counters.add("keys_read", len(keys))
        return version, values if order is None else placed([values], [order])

    # -- rows ----------------------------------------------------------------------------------

    def key_rows(self, request: KeyRows, keys: pa.BinaryArray) -> StateAnswer:
        """See ``StateReads``."""
        plan = self._plan(request.run_id, request.operator)
        variable = plan.variable(request.state)
        rows = plan.rows(variable, self._now_ms())
        selection = RowSelection.of(rows, request.columns, (), with_position=True)
        window = window_of(variable)
        groups = plan.groups_of(keys)
        if window is not None:
            windowed = WindowedKeys.of(rows, window, keys)
            partitions = self._asked_partitions(plan, request)

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

        self._host.counters.add("keys_read", len(keys))
        return self._answer(plan, partitions, request, find, read, selection)

    def scan(self, request: Scan) -> StateAnswer:
        """See ``StateReads``."""
        plan = self._plan(request.run_id, request.operator)
        if request.previous_run not in ("", plan.run_id):
            if request.at.isolation != "version":
                raise RequestError(
                    "The rest of a scan that another run began needs isolation version; previous_run= is for nothing else."
                )
            completed = self._views.noted(plan, request.at.version).version
            self._changes.require_same_history(plan, completed, request.at.version, request.previous_run)
        rows = plan.rows(plan.variable(request.state), self._now_ms(), collect=request.collect)
        selection = RowSelection.of(rows, request.columns, request.where)
        bounds = KeyBounds(request.start, request.end)
        partitions = self._asked_partitions(plan, request)

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
        request: KeyRows | Scan,
        find: Callable[[PartitionView], Any],
        read: Callable[[Sequence[Any]], Iterator[pa.RecordBatch]],
        selection: RowSelection,
        limit: int | None = None,
    ) -> StateAnswer:
        with ExitStack() as opening:
            version, found = self._views.read(plan, partitions, request.at, find, opening)
            keep = opening.pop_all()
        batches = limited(map(selection.rows, _moved(plan, read(found))), limit)
        return StateAnswer(version, selection.schema, RowStream(gathered(batches), keep.close))

    def count(self, request: Scan) -> tuple[int, int]:
        """See ``StateReads``."""
        plan = self._plan(request.run_id, request.operator)
        rows = plan.rows(plan.variable(request.state), self._now_ms(), collect=request.collect)
        if request.where or not has_row_per_pair(rows):
            answer = self.scan(request)
            return answer.version, sum(batch.num_rows for batch in answer.batches)
        bounds = KeyBounds(request.start, request.end)
        # What is left of deleted variables is among the keys too.
        is_all = bounds.is_open and set(plan.schema.families) == {rows.main}

        def counted(view: PartitionView) -> int | Pairs:
            known = view.state.num_keys(view.version, head=view.head) if is_all and view.instance is not None else None
            return pairs_of(view, rows, plan.key_groups_of(view.partition), bounds) if known is None else known

        with ExitStack() as keep:
            version, found = self._views.read(plan, self._asked_partitions(plan, request), request.at, counted, keep)
            count = 0
            for one in found:
                if isinstance(one, int):
                    count += one
                else:
                    count += sum(batch.num_rows for batch in _moved(plan, one[rows.main]))
        return version, count if request.limit is None else min(count, request.limit)

    def changes(self, request: Changes, keys: pa.BinaryArray | None) -> StateAnswer:
        """See ``StateReads``."""
        plan = self._plan(request.run_id, request.operator)
        if keys is not None:
            plan.groups_of(keys)
        variable = plan.variable(request.state)
        return self._changes.read(plan, variable, request.after, request.until, keys, request.previous_run)

    # -- where ---------------------------------------------------------------------------------

    def _plan(self, run_id: str, operator: str) -> OperatorPlan:
        held = self._plans.get((run_id, operator))
        if held is not None:
            return held
        registration = self._host.held.registration(run_id)
        if registration is None:
            self._host.version_requests.completed_version(
                run_id, 0, self._views.wait_seconds
            )  # raises if there is no such run
            registration = self._views.loads.result(
                (run_id, operator),
                lambda: self._host.grants.for_read(run_id, operator, 0).registration,
                f"What operator {operator!r} (run {run_id}) is like",
            )
        plan = OperatorPlan.of(registration, operator)
        while len(self._plans) >= _KNOWN_PLANS:
            self._plans.pop(next(iter(self._plans)), None)
        self._plans[(run_id, operator)] = plan
        return plan

    def _asked_partitions(self, plan: OperatorPlan, request: Scan | KeyRows) -> list[int]:
        return self._own_partitions(plan) if request.partitions is None else plan.partitions(request.partitions)

    def _own_partitions(self, plan: OperatorPlan) -> list[int]:
        """Those that the coordinator has given to this host."""
        with self._asking:  # not what is kept: of a partition that has just come, rows would be missing
            owners = self._host.coordinator.locate(plan.operator, plan.run_id).owners
        ours = (self._host.info.host_id, self._host.info.incarnation)
        return [p for p, owner in enumerate(owners) if (owner.host_id, owner.incarnation) == ours]


def _runs(of_keys: npt.NDArray[np.uint16], num_partitions: int) -> dict[int, tuple[int, int]] | None:
    """Where the keys of each partition begin and end; None if those of one are not all together."""
    if not len(of_keys):
        return {}
    changes = (of_keys[1:] != of_keys[:-1]).nonzero()[0]
    if len(changes) >= num_partitions:
        return None
    begins: list[int] = [0, *(changes + 1).tolist()]
    runs = dict(zip(of_keys[begins].tolist(), pairwise([*begins, len(of_keys)]), strict=True))
    return runs if len(runs) == len(begins) else None


def _value_of(state: PartitionState, key: bytes, family: str, version: int, head: str | None) -> bytes | None:
    try:
        return state.get_one(key, version, family, head=head)
    except InvalidStateStoreArgument:
        if family == DEFAULT_FAMILY:
            raise
        return None  # that of a variable which was never written to


def _moved(plan: OperatorPlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same, but for what is raised if a partition is unloaded while it is read."""
    try:
        yield from batches
    except StoreClosedError as error:
        raise NotOwnerError(
            f"A partition of operator {plan.operator!r} (run {plan.run_id}) left this host while it was read; begin again."
        ) from error


def _is_asked(found: RunningOperator, operator: str | None, query: str | None) -> bool:
    named = (found.query_name, found.query_id, found.run_id)
    return (operator is None or operator == found.operator.name) and (query is None or query in named)
