"""Monotonic reads: no answer of a client is older than an answer that the client has had of the same run before."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

from spark_bridge.queryable.protocol.messages import At

MAX_SEEN_RUNS = 4096


class SeenVersions:
    """Remember the highest completed version that a client has seen of each run.

    For any number of threads and routers, and for processes that fork. The lock guards all writes; reads take no lock.
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._lock = threading.Lock()
        _instances.add(self)

    def get(self, run_id: str) -> int:
        """Return the highest version seen of a run; 0 of an unknown run."""
        return self._versions.get(run_id, 0)

    def note(self, run_id: str, version: int) -> None:
        """Remember that a completed version has been seen."""
        if version <= self._versions.get(run_id, 0):
            return
        with self._lock:
            if version <= self._versions.get(run_id, 0):
                return
            if run_id not in self._versions and len(self._versions) >= MAX_SEEN_RUNS:
                del self._versions[next(iter(self._versions))]
            # In place, unlike in a ``BoundedDict``: ``get`` takes no lock, and must never find a lower version in
            # between.
            self._versions[run_id] = version

    def floor(self, run_id: str, at: At) -> At:
        """Return ``at`` (isolation ``completed``), raised so that the answer is not older than the version seen."""
        seen = self._versions.get(run_id, 0)
        return at if at.version >= seen else At("completed", seen)


_instances: WeakSet[SeenVersions] = WeakSet()


def _renew_locks() -> None:
    """Replace all locks after a fork: a thread that the new process does not have may have held one."""
    for seen in _instances:
        seen._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
