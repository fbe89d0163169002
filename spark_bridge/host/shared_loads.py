"""Opening a partition for tasks: an answer within seconds, however long the files take to load.

A load continues in a separate thread after the call that began it has been answered. All tasks that ask for the same
partition wait for the same load. A task receives the progress of the load, and asks again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from backends import spans
from backends.exceptions import LoadEndedError, StateStoreError
from backends.partition.load_watch import LoadProgress
from coordinator_actor.exceptions import CoordinatorError, RetiredRunError
from coordinator_actor.messages import HandOver, HostInfo, HostOrders, OpenGrant, WarmUp
from spark_bridge.exceptions import SparkBridgeError
from spark_bridge.host.held_partitions import HeldPartitions, Instance, InstanceKey, key_of
from spark_bridge.host.loading import PartitionLoading
from spark_bridge.host.registration import CompletedVersions, Order, RunOrders

log = logging.getLogger(__name__)

TASK_ANSWER_SECONDS = 2.0
"""A task is answered after this many seconds at the latest: far below the time limit of its call."""
ABANDONED_SECONDS = 60.0
"""A load ends if no task has asked for it for this many seconds; the files that it has loaded are kept for the next
one.
"""


@dataclass(eq=False)
class _Load:
    """One load under way, or one that has failed. ``asked`` is when it was asked for last, by the host's clock.

    ``goal`` is run, epoch, version and head. ``askers`` are the task invocations that were asked to retry: they receive
    the failure, and any later caller starts a new load.
    """

    goal: tuple[str, int, int, str | None]
    asked: float
    askers: set[str] = field(default_factory=set)
    done: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None


class SharedLoads:
    """The loads that tasks wait for, at most one for each partition. Thread-safe; the lock guards the table."""

    def __init__(
        self,
        loading: PartitionLoading,
        held: HeldPartitions,
        clock: Callable[[], float] = time.monotonic,
        answer_seconds: float = TASK_ANSWER_SECONDS,
        abandoned_seconds: float = ABANDONED_SECONDS,
    ) -> None:
        self._loading = loading
        self._clock = clock
        self._answer_seconds = answer_seconds
        self._abandoned_seconds = abandoned_seconds
        self._lock = threading.Lock()
        self._loads: dict[InstanceKey, _Load] = {}
        held.on_run_ended(self._forget)

    def opened(self, grant: OpenGrant, operator: str, partition: int, asker: str) -> Instance | LoadProgress:
        """Return the partition as the grant says, or the progress of its load; the caller then asks again.

        Raises the errors of ``PartitionLoading.load``, for every ``asker`` that was asked to retry before.
        """
        ready = self._loading.ready(grant, operator, partition)
        if ready is not None:
            return ready
        key = key_of(grant.registration, operator, partition)
        goal = (grant.registration.run_id, grant.epoch, grant.version, grant.head)
        with self._lock:
            load = self._loads.get(key)
            if load is not None and load.done.is_set():
                self._take(key, load, goal, asker)
                load = None
            if load is None:
                load = self._begin(key, goal, grant)
            load.askers.add(asker)
            load.asked = self._clock()
        load.done.wait(self._answer_seconds)
        if load.done.is_set():
            with self._lock:
                self._take(key, load, goal, asker)
            ready = self._loading.ready(grant, operator, partition)
            if ready is not None:
                return ready
        return self._loading.progress(key)

    def _take(self, key: InstanceKey, load: _Load, goal: tuple[str, int, int, str | None], asker: str) -> None:
        """Take a load that is over out of the table, and raise its error to those who waited for it."""
        if self._loads.get(key) is load:
            del self._loads[key]
        if load.failure is not None and load.goal == goal and asker in load.askers:
            raise load.failure

    def _begin(self, key: InstanceKey, goal: tuple[str, int, int, str | None], grant: OpenGrant) -> _Load:
        load = self._loads[key] = _Load(goal, self._clock())
        _, operator, partition = key
        work = threading.Thread(
            target=spans.carried(self._run),
            args=(load, grant, operator, partition),
            name="statestore-open",
            daemon=True,
        )
        work.start()
        return load

    def _run(self, load: _Load, grant: OpenGrant, operator: str, partition: int) -> None:
        try:
            self._loading.load(
                grant,
                operator,
                partition,
                is_abandoned=lambda: self._clock() - load.asked > self._abandoned_seconds,
            )
        except LoadEndedError as error:
            log.info("%s", error)  # the next caller starts a new load
        except Exception as error:  # noqa: BLE001 - those who wait raise it
            load.failure = error
        finally:
            load.done.set()
            if load.failure is None:
                self._forget(None, load)

    def _forget(self, run_id: str | None, only: _Load | None = None) -> None:
        """Forget the loads of a run (None: of all runs), or one of them, that are over."""
        with self._lock:
            for key, load in list(self._loads.items()):
                if load.done.is_set() and run_id in (None, load.goal[0]) and only in (None, load):
                    del self._loads[key]


# Partitions that change hands: copies of those that this host now owns or is about to own, and own ones to give away.
#
# The coordinator names both with each heartbeat (``HostOrders.warm_up`` and ``giving``). A partition that this host is
# about to own is loaded as a copy, and again after each version, while the owner keeps serving it (Kafka Streams:
# warm-up replicas). Partitions of a lost host, and those that a query begins with, are loaded in the same way before
# tasks ask for them. The first task that opens the partition here continues from the copy. While own partitions may be
# given away, this host checks Spark's log before it takes a version for the newest: another host may have made the
# next version.


WANTED_SECONDS = 10.0
"""The load of a copy ends if the coordinator has not asked for it for this many seconds."""
LANES = 4
"""At most this many copies of a run are loaded side by side."""
MAX_LOADS = 16
"""At most this many copies are loaded side by side for all runs."""
AGAIN_SECONDS, LONGEST_AGAIN_SECONDS = 1.0, 60.0
"""The seconds until a copy that could not be loaded is tried again; twice as many after each further failure."""

_Copy = tuple[str, str, int, str | None]
"""Run id, operator, partition and head of a copy."""


class HandOvers:
    """Thread-safe. ``_lock`` guards all fields; no other lock is taken while it is held. Grows with the moving
    partitions.

    ``_number`` is that of the last heartbeat sent, ``_followed`` that of the last one whose answer counts: answers may
    overtake each other. ``_giving`` has the runs of that answer, ``_wanted`` its orders. ``_given`` has, for runs that
    have left ``_giving``, the version that must be known. ``_failed`` has the wanted copies that could not be
    loaded: the time of the next attempt, and the backoff. ``_places`` bounds the loads in progress.
    """

    def __init__(
        self,
        info: HostInfo,
        held: HeldPartitions,
        loading: PartitionLoading,
        completed: CompletedVersions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._held = held
        self._loading = loading
        self._completed = completed
        self._clock = clock
        self._lock = threading.Lock()
        self._orders = RunOrders(wait_seconds=0.0)
        self._number = self._followed = 0
        self._giving: frozenset[str] = frozenset()
        self._given: dict[str, int] = {}
        self._wanted: dict[str, WarmUp] = {}
        self._wanted_at = 0.0
        self._failed: dict[_Copy, tuple[float, float]] = {}
        self._places = threading.Semaphore(MAX_LOADS)

    def report(self) -> HandOver:
        """Return how far this host is, for a heartbeat."""
        with self._lock:
            self._number += 1
            number, giving = self._number, tuple(self._giving)
            wanted = list(self._wanted.values())
        warm: dict[str, dict[str, dict[int, int]]] = {}
        for order in wanted:
            for operator, heads in order.heads.items():
                versions = {p: self._loading.warm_version(order.registration, operator, p) for p in heads}
                known = {p: version for p, version in versions.items() if version is not None}
                warm.setdefault(order.registration.run_id, {})[operator] = known
        return HandOver(number, warm, giving, self._held.exchanged())

    def follow(self, number: int, orders: HostOrders) -> None:
        """Carry out the answer to the heartbeat of that number. Waits for no load."""
        now = self._clock()
        announced = {completed.run_id: completed.version for completed in orders.completed}
        with self._lock:
            if number < self._followed or not orders.known:
                return
            self._followed = number
            over = {run_id: version for run_id, version in announced.items() if run_id not in orders.giving}
            self._given.update({run_id: version for run_id, version in over.items() if run_id in self._giving})
            # The coordinator does not know a run yet that its answer does not mention.
            gone = over.keys() | set(orders.unload_runs)
            self._giving = frozenset((self._giving | orders.giving.keys()) - gone)
            self._given = {
                run_id: version
                for run_id, version in self._given.items()
                if run_id not in orders.unload_runs and not self._knows(run_id, version)
            }
            self._wanted, self._wanted_at = {order.registration.run_id: order for order in orders.warm_up}, now
            wanted_copies = {copy for order in orders.warm_up for copy in _copies(order)}
            self._failed = {copy: again for copy, again in self._failed.items() if copy in wanted_copies}
        self._orders.carry_out(dict(loads for order in orders.warm_up for loads in self._loads(order)))

    def gives(self, run_id: str) -> bool:
        """Return whether partitions of a run may be another host's by now, without this one knowing."""
        with self._lock:
            if run_id in self._giving:
                return True
            version = self._given.get(run_id)
        return version is not None and not self._knows(run_id, version)

    def _knows(self, run_id: str, version: int) -> bool:
        newest = self._completed.newest(run_id)
        return newest is not None and newest.version >= version

    def _loads(self, order: WarmUp) -> Iterator[tuple[str, list[Order]]]:
        """Yield the pending loads of an order, in lanes that run in parallel."""
        now, loads = self._clock(), list[Order]()
        for copy in _copies(order):
            _, operator, partition, head = copy
            grant = OpenGrant(self._info, order.version, head, order.registration, order.epoch)
            with self._lock:
                again, _ = self._failed.get(copy, (now, 0.0))
            if again <= now and not self._loading.is_warm(grant, operator, partition):
                loads.append(partial(self._load, copy, grant))
        for lane in range(min(LANES, len(loads))):
            yield f"{order.registration.run_id}/{lane}", loads[lane::LANES]

    def _load(self, copy: _Copy, grant: OpenGrant) -> None:
        run_id, operator, partition, _ = copy
        if not self._places.acquire(blocking=False):
            return  # the coordinator repeats the order
        try:
            self._loading.warm_up(grant, operator, partition, partial(self._is_unwanted, run_id, operator, partition))
        except (LoadEndedError, RetiredRunError) as error:
            log.info("Partition %d of %r of run %s is not loaded ahead: %s", partition, operator, run_id, error)
        except (CoordinatorError, StateStoreError, SparkBridgeError) as error:
            with self._lock:
                _, waited = self._failed.get(copy, (0.0, 0.0))
                wait = min(2 * waited or AGAIN_SECONDS, LONGEST_AGAIN_SECONDS)
                self._failed[copy] = (self._clock() + wait, wait)
            log.warning(
                "Partition %d of %r of run %s could not be loaded ahead, and is tried again in %.0f s: %s",
                *(partition, operator, run_id, wait, error),
                exc_info=not waited,
            )
        finally:
            self._places.release()

    def _is_unwanted(self, run_id: str, operator: str, partition: int) -> bool:
        with self._lock:
            wanted = self._wanted.get(run_id)
            is_old = self._clock() - self._wanted_at > WANTED_SECONDS
        return is_old or wanted is None or partition not in wanted.heads.get(operator, {})


def _copies(order: WarmUp) -> Iterator[_Copy]:
    for operator, heads in order.heads.items():
        for partition, head in heads.items():
            yield order.registration.run_id, operator, partition, head
