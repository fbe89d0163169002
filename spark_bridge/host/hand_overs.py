"""Partitions that change hands: those that this host now owns or is about to own, and own ones to give away."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Container, Hashable, Iterator
from dataclasses import dataclass
from functools import partial

from backends.exceptions import LoadEndedError
from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.messages import HandOver, HostInfo, HostOrders, OpenGrant, WarmUp
from spark_bridge.exceptions import STATESTORE_ERRORS
from spark_bridge.host.instances import key_of
from spark_bridge.host.partition_cache import PartitionCache
from spark_bridge.host.partition_loader import PartitionLoader
from spark_bridge.host.registration import CompletedVersions, Order, RunOrders

log = logging.getLogger(__name__)

WANTED_SECONDS = 10.0
"""The load of a copy ends if the coordinator has not asked for it for this many seconds."""
LANES = 4
"""At most this many copies of a run are loaded side by side."""
MAX_LOADS = 16
"""At most this many copies are loaded side by side for all runs."""
PLACE_SECONDS = 1.0
"""Copies that are to follow wait at most this many seconds for a place among ``MAX_LOADS``."""
AGAIN_SECONDS, LONGEST_AGAIN_SECONDS = 1.0, 60.0
"""The seconds until a copy that could not be loaded is tried again; twice as many after each further failure."""

_Copy = tuple[str, str, int]
"""Run id, operator and partition of a copy."""


class _Backoff:
    """When to try again what has failed, by key: after ``AGAIN_SECONDS``, and twice as long after each failure."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failed: dict[Hashable, tuple[float, float]] = {}

    def is_due(self, key: Hashable) -> bool:
        return self._failed.get(key, (-math.inf, 0.0))[0] <= self._clock()

    def note_failure(self, key: Hashable) -> tuple[float, bool]:
        """Return the seconds until the next attempt, and whether this is the first failure."""
        _, waited = self._failed.get(key, (0.0, 0.0))
        wait = min(2 * waited or AGAIN_SECONDS, LONGEST_AGAIN_SECONDS)
        self._failed[key] = (self._clock() + wait, wait)
        return wait, not waited

    def forget(self, key: Hashable) -> None:
        self._failed.pop(key, None)

    def forget_others(self, keys: Container[Hashable]) -> None:
        """Forget all keys but these."""
        self._failed = {key: failed for key, failed in self._failed.items() if key in keys}


@dataclass(eq=False, repr=False)
class HandOvers:
    """Loads copies ahead, and knows which partitions may move.

    The coordinator names both with each heartbeat (``HostOrders.warm_up`` and ``giving``). A partition that this host
    is about to own, or is the standby of, is loaded as a copy, and follows version by version, while the owner keeps
    serving it (Kafka Streams: warm-up and standby replicas). Partitions of a lost host, and those that a query begins
    with, are loaded in the same way before tasks ask for them. The first task that opens the partition here continues
    from the copy. While own partitions may be given away, this host checks Spark's log before it takes a version for
    the newest: another host may have made the next version.

    Thread-safe. ``_lock`` guards all fields; no other lock is taken while it is held. Grows with the moving
    partitions.

    ``_number`` is that of the last heartbeat sent, ``_followed`` that of the last one whose answer counts: answers may
    overtake each other. ``_giving`` has the runs of that answer, ``_wanted`` its orders. ``_given`` has, for runs that
    have left ``_giving``, the version that must be known. ``_backoff`` has the wanted copies that could not be loaded,
    and the runs whose changelogs could not be read. ``_places`` bounds the work in progress.
    """

    _info: HostInfo
    _cache: PartitionCache
    _loader: PartitionLoader
    _completed: CompletedVersions
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._orders = RunOrders(wait_seconds=0.0)
        self._number = self._followed = 0
        self._giving: frozenset[str] = frozenset()
        self._given: dict[str, int] = {}
        self._wanted: dict[str, WarmUp] = {}
        self._wanted_at = 0.0
        self._backoff = _Backoff(self._clock)
        self._places = threading.Semaphore(MAX_LOADS)

    def report(self) -> HandOver:
        """Return how far this host is, for a heartbeat."""
        with self._lock:
            self._number += 1
            number, giving = self._number, tuple(self._giving)
        warm: dict[str, dict[str, dict[int, int]]] = {}
        for copy in self._cache.kept_copies():
            run_id, operator, partition = copy.run_key
            if not self._cache.has_ended(run_id):
                warm.setdefault(run_id, {}).setdefault(operator, {})[partition] = copy.state.version
        return HandOver(number, warm, giving, self._cache.exchanged())

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
                if run_id not in orders.unload_runs and not self._completed.has(run_id, version)
            }
            self._wanted, self._wanted_at = {order.registration.run_id: order for order in orders.warm_up}, now
            wanted_copies = {copy for order in orders.warm_up for copy in _copies(order)}
            self._backoff.forget_others(wanted_copies | self._wanted.keys())
        self._note_wanted(orders)
        work = dict(loads for order in orders.warm_up for loads in self._loads(order))
        for order in orders.warm_up:
            run_id = order.registration.run_id
            with self._lock:
                is_due = self._backoff.is_due(run_id)
            if order.changelogs and is_due:
                work[f"{run_id}/follow"] = [partial(self._follow, order)]
        self._orders.carry_out(work)

    def _note_wanted(self, orders: HostOrders) -> None:
        """Tell the cache which kept files the orders name."""
        standbys = {
            key_of(registration, operator, partition)
            for run_id, operators in orders.standbys.items()
            if (registration := self._cache.registration(run_id)) is not None
            for operator, partitions in operators.items()
            for partition in partitions
        }
        wanted = {key_of(order.registration, *copy[1:]) for order in orders.warm_up for copy in _copies(order)}
        self._cache.want(frozenset(wanted - standbys), frozenset(standbys))
        for order in orders.warm_up:
            for operator, versions in order.snapshots.items():
                for partition, version in versions.items():
                    kept = self._cache.kept(key_of(order.registration, operator, partition))
                    if kept is not None:  # if it is promoted, no snapshot is due that its former owner has taken
                        kept.snapshot_version = max(kept.snapshot_version, version)

    def gives(self, run_id: str) -> bool:
        """Return whether partitions of a run may be another host's by now, without this one knowing."""
        with self._lock:
            if run_id in self._giving:
                return True
            version = self._given.get(run_id)
        return version is not None and not self._completed.has(run_id, version)

    def _loads(self, order: WarmUp) -> Iterator[tuple[str, list[Order]]]:
        """Yield the pending loads of an order, in lanes that run in parallel."""
        loads = list[Order]()
        for copy in _copies(order):
            _, operator, partition = copy
            if partition in order.changelogs.get(operator, {}):
                continue
            grant = self._grant(order, copy)
            with self._lock:
                is_due = self._backoff.is_due(copy)
            if is_due and not self._loader.is_warm(grant, operator, partition):
                loads.append(partial(self._load, copy, grant))
        for lane in range(min(LANES, len(loads))):
            yield f"{order.registration.run_id}/{lane}", loads[lane::LANES]

    def _grant(self, order: WarmUp, copy: _Copy) -> OpenGrant:
        head = order.heads[copy[1]][copy[2]]
        return OpenGrant(self._info, order.version, head, order.registration, order.epoch)

    def _follow(self, order: WarmUp) -> None:
        """Bring copies to the newest version by the changelogs that they lack; load those that cannot follow."""
        run_id = order.registration.run_id
        if not self._places.acquire(timeout=PLACE_SECONDS):
            return  # the coordinator repeats the order
        try:
            unable = self._loader.follow(order, lambda *task: not self._is_unwanted(run_id, *task))
        except Exception as error:  # also errors that are not ours, such as of the local disk: the next try waits
            with self._lock:
                wait, is_first = self._backoff.note_failure(run_id)
            log.warning(
                "The copies of run %s cannot follow, and try again in %.0f s: %s",
                *(run_id, wait, error),
                exc_info=is_first and not isinstance(error, STATESTORE_ERRORS),
            )
            return
        finally:
            self._places.release()
        with self._lock:
            self._backoff.forget(run_id)
        for task in unable:
            copy = (run_id, *task)
            with self._lock:
                is_due = self._backoff.is_due(copy)
            if is_due:
                self._load(copy, self._grant(order, copy))

    def _load(self, copy: _Copy, grant: OpenGrant) -> None:
        run_id, operator, partition = copy
        if not self._places.acquire(blocking=False):
            return  # the coordinator repeats the order
        try:
            self._loader.warm_up(grant, operator, partition, partial(self._is_unwanted, run_id, operator, partition))
        except (LoadEndedError, RetiredRunError) as error:
            log.info("Partition %d of %r of run %s is not loaded ahead: %s", partition, operator, run_id, error)
        except Exception as error:  # see ``_follow``
            with self._lock:
                wait, is_first = self._backoff.note_failure(copy)
            log.warning(
                "Partition %d of %r of run %s could not be loaded ahead, and is tried again in %.0f s: %s",
                *(partition, operator, run_id, wait, error),
                exc_info=is_first,
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
        for partition in heads:
            yield order.registration.run_id, operator, partition
