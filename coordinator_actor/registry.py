"""Who is there: hosts with their leases, and Spark's active state store instances."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from backends.ids import StateStoreProviderId
from coordinator_actor.exceptions import UnknownHostError
from coordinator_actor.messages import HostInfo

log = logging.getLogger(__name__)


@dataclass
class HostLease:
    """One host and when it was last heard of."""

    info: HostInfo
    seen: float


class HostRegistry:
    """The live hosts. A host that registers with a new incarnation replaces the old one."""

    def __init__(self) -> None:
        self.leases: dict[str, HostLease] = {}

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

    def of_session(self, session_id: str) -> list[str]:
        """The live hosts of a session, in a fixed order."""
        return sorted(h for h, lease in self.leases.items() if lease.info.session_id == session_id)

    def expire(self, before: float) -> list[str]:
        """Drop the hosts last heard of before that moment."""
        lost = [h for h, lease in self.leases.items() if lease.seen < before]
        for host_id in lost:
            del self.leases[host_id]
        return lost


class InstanceRegistry:
    """Spark's ``StateStoreCoordinator``: which executor has which provider loaded."""

    def __init__(self) -> None:
        self._active: dict[StateStoreProviderId, tuple[str, str]] = {}

    def report(
        self, provider_id: StateStoreProviderId, host: str, executor_id: str, others: tuple[StateStoreProviderId, ...]
    ) -> list[StateStoreProviderId]:
        """Make an instance active at an executor; returns the others that are active elsewhere by now."""
        self._active[provider_id] = (host, executor_id)
        log.debug("Reported state store %s is active at %s", provider_id, executor_id)
        return [o for o in others if self._active.get(o) != (host, executor_id)]

    def verify(self, provider_id: StateStoreProviderId, executor_id: str) -> bool:
        """Whether an executor has the active instance."""
        held = self._active.get(provider_id)
        response = held is not None and held[1] == executor_id
        log.debug("Verified that state store %s is active: %s", provider_id, response)
        return response

    def location(self, provider_id: StateStoreProviderId) -> str | None:
        """``executor_<host>_<executor id>`` of the active instance."""
        held = self._active.get(provider_id)
        location = None if held is None else f"executor_{held[0]}_{held[1]}"
        log.debug("Got location of the state store %s: %s", provider_id, location)
        return location

    def deactivate(self, run_id: str) -> None:
        """Forget the instances of a run."""
        gone = [p for p in self._active if str(p.query_run_id) == run_id]
        for provider_id in gone:
            del self._active[provider_id]
        log.debug("Deactivating instances related to checkpoint location %s: %s", run_id, ", ".join(map(str, gone)))

    def describe(self) -> list[dict[str, str]]:
        """All active instances, for people."""
        return [{"id": str(p), "host": h, "executor_id": e} for p, (h, e) in self._active.items()]
