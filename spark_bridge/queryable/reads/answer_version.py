"""The partitions of a host at one version, whatever of it each of them has applied.

A completed version is read from a partition's base, from accepted changes over it, or from what is kept of the past; which of
these, ``PartitionState`` finds out by the version and its head. Nothing here waits for a commit, and no commit waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from backends.exceptions import StoreClosedError, VersionNotFoundError
from backends.partition.partition_state import PartitionState
from spark_bridge.exceptions import HostUnavailableError, NotOwnerError, RequestError, StateVersionError
from spark_bridge.host.completed_versions import CompletedVersion
from spark_bridge.host.host import Host
from spark_bridge.host.instance import Instance, RunKey
from spark_bridge.queryable.protocol.messages import At
from spark_bridge.queryable.reads.background_loads import BackgroundLoads
from spark_bridge.queryable.reads.operator_plan import OperatorPlan
from spark_bridge.queryable.reads.version_copies import VersionCopies

T = TypeVar("T")

WAIT_SECONDS = 2.0
"""So long a host waits for a version that others say is completed, or for partitions that are just being loaded or unloaded."""
REFUSED_SECONDS = 0.1
"""For so long a host believes that a partition is another's."""
_PAUSE = 0.005
_MOST_REFUSED = 1 << 14


@dataclass(frozen=True)
class PartitionView:
    """One partition at a version, and the head of that version if it is known.

    What is read of it raises ``VersionNotFoundError`` or ``StoreClosedError`` if it is not there (any more).
    """

    partition: int
    state: PartitionState
    version: int
    head: str | None
    instance: Instance | None = None


class AnswerVersions:
    """Reads partitions at the version that a request asks for. Thread-safe."""

    def __init__(self, host: Host, copies: VersionCopies, wait_seconds: float = WAIT_SECONDS) -> None:
        self._host = host
        self._copies = copies
        self.wait_seconds = wait_seconds
        self.loads = BackgroundLoads(wait_seconds)
        self._refused: dict[RunKey, tuple[float, str]] = {}

    def read(
        self,
        plan: OperatorPlan,
        partitions: Sequence[int],
        at: At,
        read: Callable[[PartitionView], T],
        keep: ExitStack,
    ) -> tuple[int, list[T]]:
        """What ``read`` gives for each partition, and the version: one for all of them, but with ``latest`` the lowest one.

        ``read`` may be called again if the version has gone meanwhile; what it has opened before must not matter then. What is
        read later, as iterators, may be read until ``keep`` is closed. Raises ``StateVersionError``, ``HostUnavailableError`` if the coordinator
        does not say whether the version is completed or a partition is being loaded for longer than ``wait_seconds``, ``NotOwnerError``, ``RequestError``, and what the coordinator raises.
        """
        if at.isolation == "completed":
            return self._completed(plan, partitions, at.version, read)
        if at.isolation == "latest":
            return self._latest(plan, partitions, read)
        return self._exactly(plan, partitions, at, read, keep)

    def _completed(
        self, plan: OperatorPlan, partitions: Sequence[int], floor: int, read: Callable[[PartitionView], T]
    ) -> tuple[int, list[T]]:
        deadline = time.monotonic() + self.wait_seconds
        while True:
            noted = self.noted(plan, floor)
            found: list[T] = []
            failure: Exception
            try:
                for partition in partitions:
                    found.append(read(self._view(plan, partition, noted)))
                return noted.version, found
            except (VersionNotFoundError, StoreClosedError) as error:
                failure = error
            if time.monotonic() > deadline:
                raise self._unsettled(plan, partitions[len(found)], failure) from failure
            if self._host.completed.newest(plan.run_id) is noted:
                self._settle(plan, partitions[len(found)], noted, failure)

    def noted(self, plan: OperatorPlan, at_least: int) -> CompletedVersion:
        """The last completed version, which is ``at_least`` that; raises ``HostUnavailableError``, ``StateVersionError`` as ``read`` does."""
        begun = time.monotonic()
        noted = self._host.version_requests.completed_version(plan.run_id, at_least, self.wait_seconds)
        if noted is None or noted.version < at_least:
            if noted is None or not self._host.version_requests.has_asked_since(plan.run_id, begun):
                there = "none is known" if noted is None else f"version {noted.version} is the last one that is known"
                raise HostUnavailableError(
                    f"Host {self._host.info.host_id} could not find out within {self.wait_seconds:.1f} s whether version {at_least} of "
                    f"operator {plan.operator!r} (run {plan.run_id}) is completed; {there} here. The coordinator does not answer."
                )
            raise StateVersionError(
                f"Version {at_least} of operator {plan.operator!r} (run {plan.run_id}) is not completed; version {noted.version} is the "
                "last one that is."
            )
        return noted

    def _view(self, plan: OperatorPlan, partition: int, noted: CompletedVersion) -> PartitionView:
        instance = self._host.held.instance(plan.run_id, plan.operator, partition)
        head = noted.head(plan.operator, partition)
        if instance is None or (head is None and noted.version > 0):
            instance = self._load(plan, partition)
            newest = self._host.completed.newest(plan.run_id)
            if newest is None or newest.version != noted.version:
                raise VersionNotFoundError(f"Version {noted.version} is not the last completed one any more.")
            head = newest.head(plan.operator, partition)
        self._wait_loaded(instance)
        return PartitionView(partition, instance.state, noted.version, head, instance)

    def _load(self, plan: OperatorPlan, partition: int, *, again: bool = False) -> Instance:
        key = (plan.run_id, plan.operator, partition)
        until, message = self._refused.get(key, (0.0, ""))
        if time.monotonic() < until:
            raise NotOwnerError(message)
        try:
            return self.loads.result(
                (*key, again),
                lambda: self._host.reads.load(*key, again=again),
                _name(plan.run_id, plan.operator, partition),
            )
        except NotOwnerError as error:
            if len(self._refused) >= _MOST_REFUSED:
                self._refused.clear()
            self._refused[key] = (time.monotonic() + REFUSED_SECONDS, str(error))
            raise

    def _wait_loaded(self, instance: Instance) -> None:
        """Wait a moment for another version to be loaded, if one is, for the reads themselves wait as long as it takes."""
        state = instance.state
        if state.is_loading:
            what = _name(*instance.run_key)
            with self.loads.waiting(what):
                if not state.wait_loaded(self.wait_seconds):
                    raise self.loads.unavailable(what)

    def _settle(self, plan: OperatorPlan, partition: int, noted: CompletedVersion, failure: Exception) -> None:
        """Do what may help a partition that does not have the version that is noted last."""
        instance = self._host.held.instance(plan.run_id, plan.operator, partition)
        if instance is None or isinstance(failure, StoreClosedError):
            time.sleep(_PAUSE)  # it is being unloaded
        elif instance.state.version > noted.version:
            self._host.version_requests.completed_version(plan.run_id, noted.version + 1, _PAUSE)
        else:
            # It has other changes than those that count, or lacks some: another host has made them.
            self._load(plan, partition, again=True)

    def _unsettled(self, plan: OperatorPlan, partition: int, failure: Exception) -> NotOwnerError:
        return NotOwnerError(
            f"Partition {partition} of operator {plan.operator!r} (run {plan.run_id}) could not be read in host "
            f"{self._host.info.host_id} within {self.wait_seconds:.1f} s; locate it again. Last failure: {failure}"
        )

    def _latest(
        self, plan: OperatorPlan, partitions: Sequence[int], read: Callable[[PartitionView], T]
    ) -> tuple[int, list[T]]:
        found: list[T] = []
        versions: list[int] = []
        for partition in partitions:
            version, one = self._latest_of(plan, partition, read)
            versions.append(version)
            found.append(one)
        if versions:
            return min(versions), found
        return self.noted(plan, 0).version, found

    def _latest_of(self, plan: OperatorPlan, partition: int, read: Callable[[PartitionView], T]) -> tuple[int, T]:
        deadline = time.monotonic() + self.wait_seconds
        while True:
            held = self._host.held.instance(plan.run_id, plan.operator, partition)
            instance = self._load(plan, partition) if held is None else held
            self._wait_loaded(instance)
            version, head = instance.state.newest()
            try:
                return version, read(PartitionView(partition, instance.state, version, head, instance))
            except (VersionNotFoundError, StoreClosedError) as error:
                if time.monotonic() > deadline:
                    raise self._unsettled(plan, partition, error) from error
                if isinstance(error, StoreClosedError):
                    time.sleep(_PAUSE)

    def _exactly(
        self,
        plan: OperatorPlan,
        partitions: Sequence[int],
        at: At,
        read: Callable[[PartitionView], T],
        keep: ExitStack,
    ) -> tuple[int, list[T]]:
        if at.version < 0:
            raise RequestError(f"version={at.version} is no version; the first one is 0.")
        self.noted(plan, at.version)
        return at.version, [self._exactly_of(plan, p, at, read, keep) for p in partitions]

    def _exactly_of(
        self, plan: OperatorPlan, partition: int, at: At, read: Callable[[PartitionView], T], keep: ExitStack
    ) -> T:
        deadline = time.monotonic() + self.wait_seconds
        while True:
            held = self._host.held.instance(plan.run_id, plan.operator, partition)
            instance = self._load(plan, partition) if held is None else held
            self._wait_loaded(instance)
            known = self._host.completed.at(plan.run_id, at.version)
            head = None if known is None else known.head(plan.operator, partition)
            try:
                if head is None and at.version > instance.state.version:
                    # What was accepted for it need not be what the manifest names.
                    raise VersionNotFoundError(
                        f"Version {at.version} of partition {partition} of operator {plan.operator!r} is not held here; version "
                        f"{instance.state.version} is."
                    )
                return read(PartitionView(partition, instance.state, at.version, head, instance))
            except StoreClosedError as error:
                if time.monotonic() > deadline:
                    raise self._unsettled(plan, partition, error) from error
                time.sleep(_PAUSE)
            except VersionNotFoundError as error:
                if at.held_only:
                    raise StateVersionError(str(error)) from error
                break
        copy = keep.enter_context(self._copies.at(plan.registration, plan.spec, partition, at.version))
        return read(PartitionView(partition, copy, at.version, None))


def _name(run_id: str, operator: str, partition: int) -> str:
    return f"Partition {partition} of operator {operator!r} (run {run_id})"
