"""The live hosts and their leases."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from backends.bounded_dict import BoundedDict
from coordinator_actor.checkpoints.tasks import TaskKey
from coordinator_actor.exceptions import ReplacedHostError, UnknownHostError
from coordinator_actor.messages import HandOver, HostInfo

log = logging.getLogger(__name__)

REMEMBERED_HOSTS = 10_000
"""The newest incarnation is known of at most this many hosts, also when its lease is over."""


@dataclass
class HostLease:
    """One host, and when it was last heard of, in seconds by the coordinator's clock.

    ``is_reported``: what the host has reported is taken up, or is being taken up. ``held`` has the partitions that it
    held when it registered, by run and operator. ``hand_over`` is what its last heartbeat has said of moves.
    """

    info: HostInfo
    seen: float
    is_reported: bool = True
    held: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    hand_over: HandOver = field(default_factory=HandOver)


class HostLeases(UserDict[str, HostLease]):
    """The leases by host id. ``generation`` counts the changes of the set of hosts, or of what a host says of itself.

    A host that registers again as the same incarnation at the same address changes nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generation = 0

    def __setitem__(self, host_id: str, lease: HostLease) -> None:
        known = self.data.get(host_id)
        if known is None or known.info != lease.info:
            self.generation += 1
        self.data[host_id] = lease

    def __delitem__(self, host_id: str) -> None:
        del self.data[host_id]
        self.generation += 1


class HostRegistry:
    """The live hosts. A host that registers with a new incarnation replaces the old incarnation.

    Which incarnation is the newer one does not follow from who speaks last: a machine that was cut off comes back with
    an incarnation that Ray has replaced meanwhile (fencing, by the number of the actor's restart).
    """

    def __init__(self) -> None:
        self.leases = HostLeases()
        self._newest: BoundedDict[str, tuple[int, str]] = BoundedDict(REMEMBERED_HOSTS)
        self._leaving: dict[str, frozenset[str]] = {}
        self._nodes: dict[str, Mapping[str, str]] = {}
        self._nodes_generation = 0

    @property
    def generation(self) -> int:
        """Return the number of changes of the hosts: a result of one generation holds until the next one."""
        return self.leases.generation

    def register(
        self, info: HostInfo, now: float, held: Mapping[str, Mapping[str, Sequence[int]]] = MappingProxyType({})
    ) -> None:
        """Add a host that holds these partitions, or replace its incarnation.

        Raises ``ReplacedHostError`` for an incarnation that is older than one that was here.
        """
        restart, incarnation = self._newest.get(info.host_id, (info.restart, info.incarnation))
        if info.restart < restart:
            raise ReplacedHostError(
                f"Incarnation {info.incarnation} of host {info.host_id} (restart {info.restart}, at {info.address}) "
                f"was replaced by incarnation {incarnation} (restart {restart}): it must end itself."
            )
        self._newest[info.host_id] = (info.restart, info.incarnation)
        self.leases[info.host_id] = HostLease(info, now, held=held)

    def holders(self, run_id: str) -> dict[TaskKey, str]:
        """Return the host of each partition of a run that a live host held when it registered: the first one's."""
        found: dict[TaskKey, str] = {}
        for task, host_id in self.reported(run_id):
            found.setdefault(task, host_id)
        return found

    def reported(self, run_id: str) -> list[tuple[TaskKey, str]]:
        """Return the partitions of a run that live hosts held when they registered, each with its host."""
        return [
            ((operator, partition), host_id)
            for host_id, lease in self.leases.items()
            for operator, partitions in lease.held.get(run_id, {}).items()
            for partition in partitions
        ]

    def renew(self, host_id: str, incarnation: str, now: float) -> HostLease | None:
        """Renew and return a lease; None if this incarnation is not known."""
        lease = self.leases.get(host_id)
        if lease is None or lease.info.incarnation != incarnation:
            return None
        lease.seen = now
        return lease

    def ask_again(self, host_id: str, incarnation: str) -> None:
        """Let the next heartbeat ask a host for its report, which could not be taken up."""
        lease = self.leases.get(host_id)
        if lease is not None and lease.info.incarnation == incarnation:
            lease.is_reported = False

    def require(self, host_id: str, incarnation: str) -> None:
        """Raise ``UnknownHostError`` unless this very incarnation is registered."""
        lease = self.leases.get(host_id)
        if lease is None or lease.info.incarnation != incarnation:
            raise UnknownHostError(f"Host {host_id} (incarnation {incarnation}) is not registered; register it again.")

    def nodes_of_session(self, session_id: str) -> Mapping[str, str]:
        """Return the node of each live host of a session, in the order of host ids. The result must not be changed."""
        if self._nodes_generation != self.generation:
            self._nodes, self._nodes_generation = {}, self.generation
        nodes = self._nodes.get(session_id)
        if nodes is None:
            infos = [lease.info for lease in self.leases.values() if lease.info.session_id == session_id]
            infos.sort(key=lambda info: info.host_id)
            nodes = self._nodes[session_id] = MappingProxyType({info.host_id: info.node_id for info in infos})
        return nodes

    def leave(self, session_id: str, host_ids: Collection[str]) -> None:
        """Take note that these hosts of a session, and no others, are to hand over what they own and go."""
        leaving = frozenset(host_ids)
        if self._leaving.get(session_id, frozenset()) != leaving:
            self._leaving[session_id] = leaving
            self.leases.generation += 1
        if not leaving:
            self._leaving.pop(session_id, None)

    def staying(self, session_id: str) -> Mapping[str, str]:
        """Return the node of each live host of a session that is not to go; of all of them if all are to go."""
        nodes, leaving = self.nodes_of_session(session_id), self._leaving.get(session_id, frozenset())
        return {host_id: node for host_id, node in nodes.items() if host_id not in leaving} or nodes

    def of_session(self, session_id: str) -> list[str]:
        """Return the live hosts of a session, in a fixed order."""
        return list(self.nodes_of_session(session_id))

    def prolong(self, seconds: float, now: float) -> None:
        """Let all leases run ``seconds`` longer."""
        for lease in self.leases.values():
            lease.seen = min(now, lease.seen + seconds)

    def expire_nodes(self, nodes: Collection[str]) -> list[HostInfo]:
        """Drop the hosts on these nodes. Return their descriptions."""
        lost = [lease.info for lease in self.leases.values() if lease.info.node_id in nodes]
        for info in lost:
            del self.leases[info.host_id]
        return lost

    def expire(self, before: float) -> list[str]:
        """Drop the hosts that were last heard of before that time. Return their ids."""
        lost = [h for h, lease in self.leases.items() if lease.seen < before]
        for host_id in lost:
            del self.leases[host_id]
        return lost
