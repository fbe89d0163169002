"""An assignment: the owner of every partition of a run at one time. ``partition_owners.py`` decides on the owners."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator_actor.checkpoints.tasks import TaskKey
from coordinator_actor.exceptions import UnknownRunError
from coordinator_actor.messages import NOBODY, HostInfo


@dataclass(frozen=True)
class Assignment:
    """The owner of every partition of a run.

    ``number`` grows with every change in a run. ``generation`` is that of the set of hosts, ``reports`` the number of
    reports that are taken into account. ``owners`` has, per operator, an index into ``hosts`` for each partition, or
    ``NOBODY``. ``of_host`` has the partitions of each host, by host id. ``is_partial``: some partitions have no owner
    yet, since the host that holds them may still report.
    """

    number: int
    generation: int
    hosts: tuple[HostInfo, ...]
    owners: Mapping[str, list[int]]
    of_host: Mapping[str, tuple[TaskKey, ...]]
    is_partial: bool = False
    reports: int = 0

    @classmethod
    def of(
        cls,
        number: int,
        generation: int,
        hosts: Sequence[HostInfo],
        owners: Mapping[TaskKey, str | None],
        reports: int = 0,
    ) -> Assignment:
        """Make an assignment from the host id of each partition, or None. Partitions must come in ascending order."""
        places = {host.host_id: i for i, host in enumerate(hosts)}
        by_operator: dict[str, list[int]] = {}
        by_host: dict[str, list[TaskKey]] = {host.host_id: [] for host in hosts}
        for task, host_id in owners.items():
            by_operator.setdefault(task[0], []).append(NOBODY if host_id is None else places[host_id])
            if host_id is not None:
                by_host[host_id].append(task)
        of_host = {h: tuple(t) for h, t in by_host.items()}
        is_partial = any(host_id is None for host_id in owners.values())
        return cls(number, generation, tuple(hosts), by_operator, of_host, is_partial, reports)

    def owner(self, operator: str, partition: int) -> HostInfo:
        """Return the owner of a partition. Raises ``UnknownRunError`` if its holder may still report."""
        found = self.find(operator, partition)
        if found is None:
            raise UnknownRunError(
                f"The owner of {operator}/{partition} is not known yet: this coordinator was just started, and hosts "
                "still report what they hold; ask again."
            )
        return found

    def find(self, operator: str, partition: int) -> HostInfo | None:
        """Return the owner of a partition; None if there is none yet, or no such partition."""
        places = self.owners.get(operator, [])
        place = places[partition] if 0 <= partition < len(places) else NOBODY
        return None if place == NOBODY else self.hosts[place]


@dataclass(frozen=True)
class NewOwners:
    """The partitions that hosts own since the completed ``version`` is the newest, and did not before, by host."""

    version: int = 0
    of_host: Mapping[str, frozenset[TaskKey]] = field(default_factory=dict)


class RunAssignment:
    """The assignment of one run, and what is known before the first one is made.

    ``current`` is None until the first batch or question. ``reported`` has the hosts that acknowledgements of
    partitions came from; ``reports`` counts them. ``awaits_reports``: another coordinator has known the run, so hosts
    may hold partitions of it. ``is_unbalanced``: hosts may have more than their share, and what is to move is not
    planned yet.

    ``planned`` has the new owner of each partition that is to move from one living host to another: the difference to
    the target assignment. ``given`` has the completed version at which a host has given partitions away last. Until a
    later version is completed, that host does not know. ``new_owners`` load what they own before tasks ask for it.

    ``lock`` guards all changes here. Nobody waits for storage while it is held, so clients learn of owners while a
    query's storage hangs. It is taken after the lock of the run, and before that of the registries.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.current: Assignment | None = None
        self.is_unbalanced = False
        self.awaits_reports = False
        self.reported: dict[TaskKey, str] = {}
        self.reports = 0
        self.planned: Mapping[TaskKey, str] = {}
        self.given: dict[str, int] = {}
        self.new_owners = NewOwners()

    @property
    def is_made(self) -> bool:
        """Return whether all partitions have had an owner, as far as this coordinator knows."""
        current = self.current
        return current is not None and not current.is_partial

    def report(self, task: TaskKey, host_id: str, *, overrides: bool = False) -> None:
        """Take note that a host has a partition. The first report counts, unless this one ``overrides`` it."""
        with self.lock:
            if overrides or task not in self.reported:
                self.reported[task] = host_id
                self.reports += 1

    def unbalance(self) -> None:
        """Let the next batch give every host its share."""
        with self.lock:
            self.is_unbalanced = True

    def change(self, assignment: Assignment, planned: Mapping[TaskKey, str] | None) -> None:
        """Put an assignment in force, and the moves that are to follow; None if nobody has planned them."""
        with self.lock:
            self.current = assignment
            self.planned = planned or {}
            self.is_unbalanced = planned is None
