"""Copies of partitions that follow a query: loaded from storage once, then brought from version to version."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from backends.partition.partition_state import PartitionState
from coordinator_actor.reading.stored_versions import Piece
from spark_bridge.host.host import Host
from spark_bridge.queryable.reads.operators.operator_plan import OperatorPlan

MAX_IDLE_FOLLOWERS = 16
"""Copies that are kept while nobody reads them."""
FOLLOWER_IDLE_SECONDS = 60.0
FollowerKey = tuple[str, str, str]
"""Run id, directory, backend."""


@dataclass(eq=False)
class Follower:
    """A copy of a partition that goes on from version to version; for one reader at a time."""

    state: PartitionState
    used_at: float


class FollowerCopies:
    """The copies that nobody reads now. Thread-safe; the lock guards them.

    ``is_active(run id)`` says whether changes of a run may still be read; copies of other runs are not kept.
    """

    def __init__(self, host: Host, clock: Callable[[], float], is_active: Callable[[str], bool]) -> None:
        self._host = host
        self._clock = clock
        self._is_active = is_active
        # An RLock: garbage collection may release an abandoned stream at any allocation, also in a thread that has the
        # lock.
        self._lock = threading.RLock()
        self._idle: dict[FollowerKey, list[Follower]] = {}

    def take(self, plan: OperatorPlan, piece: Piece, version: int) -> Follower:
        """Return a copy at ``version`` or before, or a new one. The caller has it alone until ``give_back``."""
        self.release_idle()
        with self._lock:
            idle = self._idle.get(_key(plan, piece), [])
            fitting = [f for f in idle if f.state.version <= version]
            if fitting:
                chosen = max(fitting, key=lambda f: f.state.version)
                idle.remove(chosen)
                return chosen
        local = self._host.files.copies / uuid.uuid4().hex
        state = self._host.files.open_copy(plan.registration, piece.directory, piece.backend, local)
        return Follower(state, self._clock())

    def give_back(self, plan: OperatorPlan, piece: Piece, follower: Follower) -> None:
        """Keep a copy for the next reader; destroy it if its run is over."""
        follower.used_at = self._clock()
        with self._lock:
            is_active = self._is_active(plan.run_id)
            if is_active:
                self._idle.setdefault(_key(plan, piece), []).append(follower)
        if not is_active:
            follower.state.destroy()
        self.release_idle()

    def release_idle(self) -> None:
        """Destroy copies that were not used for a while, and the oldest ones where there are too many."""
        until = self._clock() - FOLLOWER_IDLE_SECONDS
        with self._lock:
            idle = [(f, key) for key, followers in list(self._idle.items()) for f in followers]
            idle.sort(key=lambda one: one[0].used_at)
            surplus = len(idle) - MAX_IDLE_FOLLOWERS
            gone = [one for i, one in enumerate(idle) if one[0].used_at <= until or i < surplus]
            for follower, key in gone:
                self._idle[key].remove(follower)
        for follower, _ in gone:
            follower.state.destroy()

    def drop(self, run_id: str | None) -> None:
        """Destroy the copies of a run (None: of all runs)."""
        with self._lock:
            gone = [key for key in self._idle if run_id in (None, key[0])]
            followers = [f for key in gone for f in self._idle.pop(key)]
        for follower in followers:
            follower.state.destroy()


def _key(plan: OperatorPlan, piece: Piece) -> FollowerKey:
    return (plan.run_id, piece.directory, piece.backend)
