"""Grants: who owns a partition in a batch, and which version and head its state must have.

The coordinator decides who owns what. A host asks it once for all tasks of a batch that come close together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coordinator_actor.exceptions import InvalidRequestError, UnknownRunError
from coordinator_actor.messages import NOBODY, BatchGrant, Completed, HostInfo, OpenBatch, OpenGrant
from spark_bridge.host.coordination.completed_versions import CompletedVersions
from spark_bridge.host.coordination.registration import HostRegistration
from spark_bridge.transport.protocol import TaskIdentity

GRANT_SECONDS = 1.0
"""Tasks of a batch use the coordinator's answer to the first of them for this many seconds: owners may have moved
since.
"""


@dataclass(frozen=True)
class _Granted:
    """The last answer of the coordinator about a run, and its time by the host's clock."""

    grant: BatchGrant
    at: float
    hosts: tuple[HostInfo, ...]
    owners: Mapping[str, list[int]]

    def lacks(self, operator: str, partition: int) -> bool:
        """Return whether a partition has no owner yet."""
        places = self.owners.get(operator, [])
        return 0 <= partition < len(places) and places[partition] == NOBODY


class Grants:
    """Asks for grants and remembers the last one of each run. Thread-safe.

    The lock of a run is held while the coordinator is asked, so that the other tasks wait for that answer. ``_waiting``
    has the partitions that they wait for: the next question names them all. ``_lock`` guards the tables alone; nothing
    else is locked meanwhile.
    """

    def __init__(
        self,
        registration: HostRegistration,
        completed: CompletedVersions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registration = registration
        self._completed = completed
        self._clock = clock
        self._lock = threading.Lock()
        self._granted: dict[str, _Granted] = {}
        self._waiting: dict[str, set[tuple[str, int]]] = {}
        self._granting: dict[str, threading.Lock] = {}

    def for_task(self, task: TaskIdentity) -> OpenGrant:
        """Return who owns the task's partition, and what its state is, for the task's batch.

        Raises ``InvalidRequestError`` if the run has no such partition, and what the coordinator raises.
        """
        wanted = (task.operator, task.partition)
        with self._lock:
            granting = self._granting.setdefault(task.run_id, threading.Lock())
            self._waiting.setdefault(task.run_id, set()).add(wanted)
        try:
            with granting:
                held = self._granted.get(task.run_id)
                now = self._clock()
                if (
                    held is None
                    or held.grant.version != task.batch_id
                    or not 0 <= now - held.at < GRANT_SECONDS
                    or held.lacks(*wanted)
                ):
                    held = self._ask(task, held, now)
        finally:
            with self._lock:
                self._waiting.get(task.run_id, set()).discard(wanted)
        grant = held.grant
        owners = held.owners.get(task.operator, [])
        if not 0 <= task.partition < len(owners):
            raise InvalidRequestError(
                f"Run {task.run_id} has no partition {task.partition} of an operator {task.operator!r}; it has "
                f"{ {name: len(places) for name, places in held.owners.items()} }."
            )
        if held.lacks(*wanted):
            raise UnknownRunError(
                f"The coordinator was asked for the owner of {task.operator}/{task.partition} of run {task.run_id} "
                "and named none; ask again."
            )
        head = grant.heads.get(task.operator, {}).get(task.partition)
        owner = held.hosts[owners[task.partition]]
        return OpenGrant(owner, grant.version, head, grant.registration, grant.epoch, grant.times)

    def _ask(self, task: TaskIdentity, held: _Granted | None, now: float) -> _Granted:
        info = self._registration.info
        known = 0 if held is None else held.grant.assignment
        with self._lock:
            # This one too: another attempt of the same task may have taken it out.
            waiting = tuple(sorted({*self._waiting.get(task.run_id, ()), (task.operator, task.partition)}))
        request = OpenBatch(task.run_id, task.batch_id, info.host_id, info.incarnation, known, waiting)
        grant = self._registration.call(lambda: self._registration.coordinator.open_batch(request))
        if grant.hosts or held is None:
            held = _Granted(grant, now, grant.hosts, grant.owners)
        else:
            # The assignment is the one that is known: the coordinator does not repeat it.
            held = _Granted(grant, now, held.hosts, held.owners)
        with self._lock:
            self._granted[task.run_id] = held
        self._completed.note(Completed(task.run_id, grant.version, grant.heads))
        return held

    def for_read(self, run_id: str, operator: str, partition: int) -> OpenGrant:
        """Ask the coordinator who owns a partition, and what its last completed version is."""
        return self._registration.call_about(
            run_id, lambda: self._registration.coordinator.open_for_read(run_id, operator, partition)
        )

    def forget(self, run_id: str) -> None:
        """Forget a run that is over."""
        with self._lock:
            self._granted.pop(run_id, None)
            self._waiting.pop(run_id, None)
            self._granting.pop(run_id, None)
