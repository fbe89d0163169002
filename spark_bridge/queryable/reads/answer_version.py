"""The version of a host's answer: which version a request reads, and each partition at that version.

A completed version is read from a partition's base, from accepted changes over the base, or from the before-images of
older versions. ``PartitionState`` finds out which of these, by the version and its head. Nothing here waits for a
commit, and no commit waits for a read. ``routing/router.py`` brings the answers of several hosts to one
version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from backends.exceptions import StoreClosedError, VersionNotFoundError
from backends.host_memory import BoundedDict
from backends.partition.version_reads import VersionReads
from coordinator_actor.exceptions import CoordinatorError, QueryEndedError
from spark_bridge.exceptions import HostUnavailableError, NotOwnerError, RequestError, StateVersionError
from spark_bridge.host.host import Host
from spark_bridge.host.instances import Instance, RunKey
from spark_bridge.host.partition_cache import Kind
from spark_bridge.host.partition_loader import StoredPartition
from spark_bridge.host.registration import CompletedVersion
from spark_bridge.queryable.protocol import At, before_slow_work
from spark_bridge.queryable.reads.operator_plan import OperatorPlan

T = TypeVar("T")

MAX_WAIT_SECONDS = 2.0
"""A host waits at most so long for a version that others have completed, or for partitions that come or go."""
_PAUSE_SECONDS = 0.005
REFUSED_SECONDS = 0.1
"""TTL of a cached answer that another host owns a partition, in seconds."""
MAX_REFUSED = 1 << 14
ASK_COORDINATOR_SECONDS = 1.0
"""Seconds between two questions to the coordinator while a request waits for a version of a run."""
_BRIEFLY_SECONDS = 0.001
MAX_ASKED_RUNS = 1000


@dataclass(frozen=True)
class PartitionView:
    """One partition at a version, and the head of that version if it is known.

    Reads raise ``VersionNotFoundError`` or ``StoreClosedError`` if the version is not there, or no longer.
    """

    partition: int
    reads: VersionReads
    version: int
    head: str | None
    instance: Instance | None = None


class VersionedReader:
    """Reads partitions at the version that a request asks for, and waits for completed versions.

    Thread-safe; the lock guards changes of the cached refusals, and the times when threads that wait for a version have
    asked the coordinator. Partitions that are not loaded are loaded in the background: no request waits for a load
    longer than ``wait_seconds``. ``on_ended`` is called with a run that proves to be over while a request waits for a
    version of it.
    """

    def __init__(self, host: Host, wait_seconds: float, on_ended: Callable[[str], None]) -> None:
        self._host = host
        self.wait_seconds = wait_seconds
        self._on_ended = on_ended
        self._refused: BoundedDict[RunKey, tuple[float, str]] = BoundedDict(MAX_REFUSED)
        self._asked_at: BoundedDict[str, float] = BoundedDict(MAX_ASKED_RUNS)
        self._lock = threading.Lock()

    def read(
        self, plan: OperatorPlan, partitions: Sequence[int], at: At, read: Callable[[PartitionView], T], keep: ExitStack
    ) -> tuple[int, list[T]]:
        """Return the version, and the result of ``read`` for each partition at that version.

        With ``latest`` the partitions may be at different versions; the lowest one is returned.

        ``read`` may be called again if the version is dropped during the call; its earlier results must then not
        matter. Iterators that it returns may be read until ``keep`` is closed.

        Raises ``StateVersionError``, ``NotOwnerError``, ``RequestError``, the errors of the coordinator, and
        ``HostUnavailableError`` if the coordinator does not say whether the version is completed, or a partition is
        being loaded for longer than ``wait_seconds``.
        """
        if at.staleness:
            return self._stale(plan, partitions, at, read)
        if at.isolation == "completed":
            return self._completed(plan, partitions, at.version, read)
        if at.isolation == "latest":
            return self._latest(plan, partitions, read)
        return self._exactly(plan, partitions, at, read, keep)

    # -- a version that may be stale -----------------------------------------------------------

    def _stale(
        self, plan: OperatorPlan, partitions: Sequence[int], at: At, read: Callable[[PartitionView], T]
    ) -> tuple[int, list[T]]:
        """Read own partitions and copies at the newest version that all of them have. Waits for nothing.

        Raises ``NotOwnerError`` if a partition has no copy here, or the copies are too old, or may be: see
        ``Host.knows_newest``.
        """
        host, known = self._host, self._host.completed.newest(plan.run_id)
        owned_or_copied = [
            host.cache.instance(plan.run_id, plan.operator, p) or host.cache.copy(plan.run_id, plan.operator, p)
            for p in partitions
        ]
        instances = [i for i in owned_or_copied if i is not None and not i.state.is_loading]
        if known is None or len(instances) < len(partitions) or not host.knows_newest(plan.run_id):
            raise NotOwnerError(
                f"Host {host.info.host_id} has no copy of partitions {list(partitions)} of operator {plan.operator!r} "
                f"(run {plan.run_id}) that may be read with staleness={at.staleness}: ask the owners."
            )
        version = min((known.version, *(i.state.version for i in instances)))
        if at.isolation == "version":
            lowest = at.version
            version = min(version, lowest)
        else:
            lowest = max(at.version, known.version - at.staleness)
        if version < lowest:
            raise NotOwnerError(
                f"The copies that host {host.info.host_id} has of operator {plan.operator!r} (run {plan.run_id}) are "
                f"at version {version}, and version {lowest} is asked for: ask the owners."
            )
        for instance in instances:
            instance.note_read()
        try:
            return version, [
                # The head names the version for the index of windows. It is unknown if the copy has advanced since.
                read(PartitionView(p, i.state.reads, version, i.state.head if version == i.state.version else None, i))
                for p, i in zip(partitions, instances, strict=True)
            ]
        except (VersionNotFoundError, StoreClosedError) as error:
            raise NotOwnerError(
                f"A copy of operator {plan.operator!r} left version {version} while it was read: ask the owners."
            ) from error

    # -- the last completed version ------------------------------------------------------------

    def _completed(
        self, plan: OperatorPlan, partitions: Sequence[int], floor: int, read: Callable[[PartitionView], T]
    ) -> tuple[int, list[T]]:
        deadline = time.monotonic() + self.wait_seconds
        self._host.prepared.settle(plan.run_id, self.wait_seconds)
        while True:
            completed = self.completed(plan, floor)
            results: list[T] = []
            failure: Exception
            try:
                for partition in partitions:
                    results.append(read(self._view(plan, partition, completed)))
                return completed.version, results
            except (VersionNotFoundError, StoreClosedError) as error:
                failure = error
            if time.monotonic() > deadline:
                raise self._unsettled(plan, partitions[len(results)], failure) from failure
            if self._host.completed.newest(plan.run_id) is completed:
                self._settle(plan, partitions[len(results)], completed, failure)

    def completed(self, plan: OperatorPlan, at_least: int) -> CompletedVersion:
        """Return the last completed version, ``at_least`` or later. Raises as ``read`` does."""
        begun = time.monotonic()
        completed = self._host.version_requests.completed_version(plan.run_id, at_least, self.wait_seconds)
        if completed is None or completed.version < at_least:
            if completed is None or not self._host.version_requests.has_asked_since(plan.run_id, begun):
                newest = "none" if completed is None else f"version {completed.version} is the last one that"
                raise HostUnavailableError(
                    f"Host {self._host.info.host_id} could not find out within {self.wait_seconds:.1f} s whether "
                    f"version {at_least} of operator {plan.operator!r} (run {plan.run_id}) is completed; {newest} "
                    "is known here. The coordinator does not answer."
                )
            raise StateVersionError(
                f"Version {at_least} of operator {plan.operator!r} (run {plan.run_id}) is not completed; version "
                f"{completed.version} is the last one that is."
            )
        return completed

    def _view(self, plan: OperatorPlan, partition: int, completed: CompletedVersion) -> PartitionView:
        instance = self._host.cache.instance(plan.run_id, plan.operator, partition)
        head = completed.head(plan.operator, partition)
        if instance is None or (head is None and completed.version > 0):
            instance = self._load(plan, partition)
            newest = self._host.completed.newest(plan.run_id)
            if newest is None or newest.version != completed.version:
                raise VersionNotFoundError(f"Version {completed.version} is not the last completed one any more.")
            head = newest.head(plan.operator, partition)
        self._wait_loaded(instance)
        return PartitionView(partition, instance.state.reads, completed.version, head, instance)

    def _settle(self, plan: OperatorPlan, partition: int, completed: CompletedVersion, failure: Exception) -> None:
        """Wait for a partition that lacks the last completed version, or load it. ``failure`` is that of its read."""
        instance = self._host.cache.instance(plan.run_id, plan.operator, partition)
        if instance is None or isinstance(failure, StoreClosedError):
            time.sleep(_PAUSE_SECONDS)  # the partition is being unloaded
        elif instance.state.version > completed.version:
            self._host.version_requests.completed_version(plan.run_id, completed.version + 1, _PAUSE_SECONDS)
        else:
            # Another host has made the version, so this partition lacks its changes, or has changes that do not count.
            self._load(plan, partition, again=True)

    def _unsettled(self, plan: OperatorPlan, partition: int, failure: Exception) -> NotOwnerError:
        return NotOwnerError(
            f"Partition {partition} of operator {plan.operator!r} (run {plan.run_id}) could not be read in host "
            f"{self._host.info.host_id} within {self.wait_seconds:.1f} s; locate it again. Last failure: {failure}"
        )

    # -- the latest version of each partition --------------------------------------------------

    def _latest(
        self, plan: OperatorPlan, partitions: Sequence[int], read: Callable[[PartitionView], T]
    ) -> tuple[int, list[T]]:
        results: list[T] = []
        versions: list[int] = []
        for partition in partitions:
            version, one = self._latest_of(plan, partition, read)
            versions.append(version)
            results.append(one)
        if versions:
            return min(versions), results
        self._host.prepared.settle(plan.run_id, self.wait_seconds)
        return self.completed(plan, 0).version, results

    def _latest_of(self, plan: OperatorPlan, partition: int, read: Callable[[PartitionView], T]) -> tuple[int, T]:
        deadline = time.monotonic() + self.wait_seconds
        while True:
            instance = self._loaded(plan, partition)
            self._wait_loaded(instance)
            version, head = instance.state.newest()
            try:
                result = read(PartitionView(partition, instance.state.reads, version, head, instance))
            except (VersionNotFoundError, StoreClosedError) as error:
                if time.monotonic() > deadline:
                    raise self._unsettled(plan, partition, error) from error
                if isinstance(error, StoreClosedError):
                    time.sleep(_PAUSE_SECONDS)
                continue
            # A partition that no longer serves may be empty because its files were dropped for want of room.
            if version or self._host.cache.has_instance(instance):
                return version, result

    # -- an exact version ----------------------------------------------------------------------

    def _exactly(
        self, plan: OperatorPlan, partitions: Sequence[int], at: At, read: Callable[[PartitionView], T], keep: ExitStack
    ) -> tuple[int, list[T]]:
        if at.version < 0:
            raise RequestError(f"version={at.version} is not a version; the first one is 0.")
        self.completed(plan, at.version)
        return at.version, [self._exactly_of(plan, p, at, read, keep) for p in partitions]

    def _exactly_of(
        self, plan: OperatorPlan, partition: int, at: At, read: Callable[[PartitionView], T], keep: ExitStack
    ) -> T:
        deadline = time.monotonic() + self.wait_seconds
        while True:
            instance = self._loaded(plan, partition)
            self._wait_loaded(instance)
            completed = self._host.completed.at(plan.run_id, at.version)
            head = None if completed is None else completed.head(plan.operator, partition)
            try:
                if head is None and at.version > instance.state.version:
                    # The changes that were accepted for the version need not be those that the manifest names.
                    raise VersionNotFoundError(
                        f"Version {at.version} of partition {partition} of operator {plan.operator!r} is not held "
                        f"here; version {instance.state.version} is."
                    )
                return read(PartitionView(partition, instance.state.reads, at.version, head, instance))
            except StoreClosedError as error:
                if time.monotonic() > deadline:
                    raise self._unsettled(plan, partition, error) from error
                time.sleep(_PAUSE_SECONDS)
            except VersionNotFoundError as error:
                if at.held_only:
                    raise StateVersionError(str(error)) from error
                break
        stored = StoredPartition(plan.registration, plan.spec, partition, at.version)
        if not self._host.cache.has_version(stored.key(Kind.VERSION)):
            before_slow_work()
        copy = keep.enter_context(self._host.loader.pinned_version(stored, self.wait_seconds))
        return read(PartitionView(partition, copy.reads, at.version, None))

    # -- loading -------------------------------------------------------------------------------

    def _loaded(self, plan: OperatorPlan, partition: int) -> Instance:
        """Return a partition of this host; load it if it is not loaded. Raises as ``_load`` does."""
        instance = self._host.cache.instance(plan.run_id, plan.operator, partition)
        return self._load(plan, partition) if instance is None else instance

    def _load(self, plan: OperatorPlan, partition: int, *, again: bool = False) -> Instance:
        """Load a partition. ``again`` replaces one that is loaded, and lacks the changes of the completed version.

        Raises ``NotOwnerError`` for another host's partition, ``HostUnavailableError`` if loading takes longer.
        """
        key = (plan.run_id, plan.operator, partition)
        until, message = self._refused.get(key, (0.0, ""))
        if time.monotonic() < until:
            raise NotOwnerError(message)
        try:
            return self._host.loads.read_result(
                (*key, again), lambda: self._host.reads.load(*key, again=again), _name(*key), self.wait_seconds
            )
        except NotOwnerError as error:
            with self._lock:
                self._refused[key] = (time.monotonic() + REFUSED_SECONDS, str(error))
            raise

    def _wait_loaded(self, instance: Instance) -> None:
        """Wait a moment if another version is being loaded; a read itself would wait as long as the loading takes.

        Raises ``HostUnavailableError`` if the partition is not loaded after ``wait_seconds``.
        """
        instance.note_read()
        if instance.state.is_loading:
            what = _name(*instance.run_key)
            with self._host.loads.waiting(what):
                if not instance.state.wait_loaded(self.wait_seconds):
                    raise self._host.loads.unavailable(what)

    # -- waiting for the completion of a version -----------------------------------------------

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        """See ``StateReads``. Raises ``RetiredRunError`` if the run ends during the wait."""
        deadline = time.monotonic() + seconds
        self._host.prepared.settle(run_id, self.wait_seconds)
        newest = self._host.completed.newest(run_id)
        if newest is None:
            newest = self._host.version_requests.completed_version(run_id, 0, self.wait_seconds)
        while newest is None or newest.version <= after:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            newest = self._host.completed.wait(run_id, after + 1, min(left, ASK_COORDINATOR_SECONDS))
            if newest is None or newest.version <= after:
                newest = self._ask_coordinator(run_id, after)
                if newest is not None and newest.version <= after and self._host.version_requests.has_ended(run_id):
                    raise QueryEndedError(f"The query of run {run_id} has ended at version {newest.version}.")
        return -1 if newest is None else newest.version

    def _ask_coordinator(self, run_id: str, after: int) -> CompletedVersion | None:
        """Return the newest version that the coordinator knows; one waiting thread asks for all of them.

        If this host holds nothing of the run, it gets no messages about the run's versions, nor about its end.
        """
        newest, now = self._host.completed.newest(run_id), time.monotonic()
        with self._lock:
            # Questions of other readers do not count: they may have been asked too early, and may have failed.
            if newest is not None and now - self._asked_at.get(run_id, 0.0) < ASK_COORDINATOR_SECONDS / 2:
                return newest
            self._asked_at[run_id] = now
        try:
            return self._host.version_requests.completed_version(run_id, after + 1, _BRIEFLY_SECONDS)
        except CoordinatorError:
            self._host.completed.forget(run_id)  # so that the other waiting threads find out, too
            self._on_ended(run_id)
            raise


def _name(run_id: str, operator: str, partition: int) -> str:
    return f"Partition {partition} of operator {operator!r} (run {run_id})"
