"""An assignment: the owner of every partition of a run at one time. ``partition_owners.py`` decides on the owners."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator_actor.checkpoints.tasks import TaskKey
from coordinator_actor.messages import HostInfo


@dataclass(frozen=True)
class Assignment:
    """The owner of every partition of a run.

    ``number`` grows with every change in a run. ``generation`` is that of the set of hosts. ``owners`` has, per
    operator, an index into ``hosts`` for each partition. ``of_host`` has the partitions of each host, by host id.
    """

    number: int
    generation: int
    hosts: tuple[HostInfo, ...]
    owners: Mapping[str, list[int]]
    of_host: Mapping[str, tuple[TaskKey, ...]]

    @classmethod
    def of(cls, number: int, generation: int, hosts: Sequence[HostInfo], owners: Mapping[TaskKey, str]) -> Assignment:
        """Make an assignment from the host id of each partition. Partitions must come in ascending order."""
        places = {host.host_id: i for i, host in enumerate(hosts)}
        by_operator: dict[str, list[int]] = {}
        by_host: dict[str, list[TaskKey]] = {host.host_id: [] for host in hosts}
        for task, host_id in owners.items():
            by_operator.setdefault(task[0], []).append(places[host_id])
            by_host[host_id].append(task)
        return cls(number, generation, tuple(hosts), by_operator, {h: tuple(t) for h, t in by_host.items()})

    def owner(self, operator: str, partition: int) -> HostInfo:
        """Return the owner of a partition."""
        return self.hosts[self.owners[operator][partition]]


class RunAssignment:
    """The assignment of one run, and what is known before the first one is made.

    ``current`` is None until the first batch or question. ``reported`` has the hosts that partitions were reported from
    after a restart of the coordinator. ``is_unbalanced``: hosts may have more than their share, since partitions move
    between living hosts only where a batch begins.

    ``lock`` guards all changes here. Nobody waits for storage while it is held, so clients learn of owners while a
    query's storage hangs. It is taken behind the lock of the run, and before that of the registries.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.current: Assignment | None = None
        self.is_unbalanced = False
        self.reported: dict[TaskKey, str] = {}

    def report(self, task: TaskKey, host_id: str, *, overrides: bool = False) -> None:
        """Take note that a host has a partition. The first report counts, unless this one ``overrides`` it."""
        with self.lock:
            if overrides or task not in self.reported:
                self.reported[task] = host_id

    def unbalance(self) -> None:
        """Let the next batch give every host its share."""
        with self.lock:
            self.is_unbalanced = True

    def change(self, assignment: Assignment, *, is_balanced: bool) -> None:
        """Put an assignment in force."""
        with self.lock:
            self.current = assignment
            self.is_unbalanced = not is_balanced
