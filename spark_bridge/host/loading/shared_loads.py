"""Opening a partition for tasks: an answer within seconds, however long the files take to load.

A load goes on in a thread of its own when the call that began it has been answered. All tasks that ask for the same
partition wait for the same load. A task is told how far the load has come, and asks again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from backends.exceptions import LoadEndedError
from backends.partition.load_watch import LoadProgress
from backends.tracing import spans
from coordinator_actor.messages import OpenGrant
from spark_bridge.host.held.held_partitions import HeldPartitions
from spark_bridge.host.held.instance import Instance, InstanceKey, key_of
from spark_bridge.host.loading.partition_loading import PartitionLoading

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

    ``goal`` is run, epoch, version and head. ``askers`` are the task invocations that were told to ask again: they hear
    of a failure, and whoever comes later begins anew.
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
        """Return the partition as the grant says, or how far its load has come: then ask again.

        Raises what ``PartitionLoading.load`` raises, for every ``asker`` that was told to ask again before.
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
            log.info("%s", error)  # whoever asks again begins anew
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
