"""Who is there: hosts with their leases, and Spark's active state store instances."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from backends.ids import StateStoreProviderId
from coordinator_actor.exceptions import UnknownHostError
from coordinator_actor.messages import HostInfo

log = logging.getLogger(__name__)


@dataclass
class HostLease:
    """One host and when it was last heard of."""

    info: HostInfo
    seen: float


class HostLeases(UserDict[str, HostLease]):
    """Leases by host id, which counts in ``generation`` how often the set of hosts, or what one says of itself, changed.

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
    """The live hosts. A host that registers with a new incarnation replaces the old one."""

    def __init__(self) -> None:
        self.leases = HostLeases()
        self._nodes: dict[str, Mapping[str, str]] = {}
        self._nodes_generation = 0

    @property
    def generation(self) -> int:
        """Grows with every change of the hosts: what was worked out at one generation holds until the next."""
        return self.leases.generation

    def register(self, info: HostInfo, now: float) -> None:
        """Add a host, or replace its incarnation."""
        self.leases[info.host_id] = HostLease(info, now)

    def renew(self, host_id: str, incarnation: str, now: float) -> HostLease | None:
        """Renew a lease; None if this incarnation is not known."""
        lease = self.leases.get(host_id)
        if lease is None or lease.info.incarnation != incarnation:
            return None
        lease.seen = now
        return lease

    def require(self, host_id: str, incarnation: str) -> None:
        """Raise ``UnknownHostError`` unless this very incarnation is registered."""
        lease = self.leases.get(host_id)
        if lease is None or lease.info.incarnation != incarnation:
            raise UnknownHostError(f"Host {host_id} (incarnation {incarnation}) is not registered; register it again.")

    def nodes_of_session(self, session_id: str) -> Mapping[str, str]:
        """The live hosts of a session with the node of each, in the order of their ids. Not to be changed."""
        if self._nodes_generation != self.generation:
            self._nodes, self._nodes_generation = {}, self.generation
        nodes = self._nodes.get(session_id)
        if nodes is None:
            infos = [lease.info for lease in self.leases.values() if lease.info.session_id == session_id]
            infos.sort(key=lambda info: info.host_id)
            nodes = self._nodes[session_id] = MappingProxyType({info.host_id: info.node_id for info in infos})
        return nodes

    def of_session(self, session_id: str) -> list[str]:
        """The live hosts of a session, in a fixed order."""
        return list(self.nodes_of_session(session_id))

    def prolong(self, seconds: float, now: float) -> None:
        """All leases run so much longer."""
        for lease in self.leases.values():
            lease.seen = min(now, lease.seen + seconds)

    def expire(self, before: float) -> list[str]:
        """Drop the hosts last heard of before that moment."""
        lost = [h for h, lease in self.leases.items() if lease.seen < before]
        for host_id in lost:
            del self.leases[host_id]
        return lost


Executor = tuple[str, str]
"""Host and executor id."""


class InstanceRegistry:
    """Spark's ``StateStoreCoordinator``: which executor has which provider loaded.

    Kept by run, since a run's instances go together and other runs may have many. The debug messages are Spark's.
    """

    def __init__(self) -> None:
        self._runs: dict[str, dict[StateStoreProviderId, Executor]] = {}
        self._executors: dict[Executor, Executor] = {}

    def report(
        self,
        provider_id: StateStoreProviderId,
        host: str,
        executor_id: str,
        others: Iterable[StateStoreProviderId] = (),
    ) -> list[StateStoreProviderId]:
        """Make an instance active at an executor; returns the others that are active elsewhere by now.

        As in Spark, one that nobody has reported stays: a coordinator that was restarted knows of none at first.
        """
        # One tuple per executor, not one per instance.
        executor = self._executors.setdefault((host, executor_id), (host, executor_id))
        self._runs.setdefault(str(provider_id.query_run_id), {})[provider_id] = executor
        log.debug("Reported state store %s is active at %s", provider_id, executor_id)
        return [o for o in others if (held := self._held(o)) is not None and held != executor]

    def verify(self, provider_id: StateStoreProviderId, executor_id: str) -> bool:
        """Whether an executor has the active instance."""
        return self.verify_many((provider_id,), executor_id)[0]

    def verify_many(self, provider_ids: Sequence[StateStoreProviderId], executor_id: str) -> list[bool]:
        """Whether an executor has the active instance of each, in the order asked."""
        responses = [(held := self._held(p)) is not None and held[1] == executor_id for p in provider_ids]
        if log.isEnabledFor(logging.DEBUG):
            for provider_id, response in zip(provider_ids, responses, strict=True):
                log.debug("Verified that state store %s is active: %s", provider_id, response)
        return responses

    def location(self, provider_id: StateStoreProviderId) -> str | None:
        """``executor_<host>_<executor id>`` of the active instance."""
        return self.locations((provider_id,))[0]

    def locations(self, provider_ids: Sequence[StateStoreProviderId]) -> list[str | None]:
        """``executor_<host>_<executor id>`` of the active instance of each, in the order asked; None where there is none."""
        found = [None if (held := self._held(p)) is None else f"executor_{held[0]}_{held[1]}" for p in provider_ids]
        if log.isEnabledFor(logging.DEBUG):
            for provider_id, location in zip(provider_ids, found, strict=True):
                log.debug("Got location of the state store %s: %s", provider_id, location)
        return found

    def of_run(self, run_id: str) -> list[StateStoreProviderId]:
        """The active instances of a run."""
        return list(self._runs.get(run_id, ()))

    def deactivate(self, run_id: str) -> None:
        """Forget the instances of a run."""
        gone = self._runs.pop(run_id, {})
        if not self._runs:
            self._executors.clear()
        if log.isEnabledFor(logging.DEBUG):
            ids = ", ".join(map(str, gone))
            log.debug("Deactivating instances related to checkpoint location %s: %s", run_id, ids)

    def describe(self) -> list[dict[str, str]]:
        """All active instances, for people."""
        return [{"id": str(p), "host": h, "executor_id": e} for run in self._runs.values() for p, (h, e) in run.items()]

    def _held(self, provider_id: StateStoreProviderId) -> Executor | None:
        run = self._runs.get(str(provider_id.query_run_id))
        return None if run is None else run.get(provider_id)
