"""The model of processes: hosts, the coordinator, and the faults of storage that they meet.

As in the rest of the model, times are in ms and sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LocationTrouble:
    """Faults of one location of checkpoint storage, as one process sees them.

    ``failures`` requests have failed within the last minute, the last with ``error``, ``failed_ms`` ago; ``is_over`` if
    one was answered after that. ``waiting`` requests have had no answer for seconds, the longest for ``waiting_ms``.
    """

    location: str
    failures: int = 0
    error: str = ""
    failed_ms: int = 0
    is_over: bool = False
    waiting: int = 0
    waiting_ms: int = 0


@dataclass(frozen=True)
class LoopFailures:
    """A background loop that fails: ``failures`` times in a row, the first ``failing_ms`` ago, the last with ``error``.

    ``process`` names its process, ``what`` the work that waits.
    """

    process: str
    what: str
    failing_ms: int
    failures: int
    error: str
    remedy: str


@dataclass(frozen=True)
class HostOverview:
    """One StateStoreHost. ``answered``: False if it did not answer in time, and only the coordinator's word is known.

    Without a heartbeat the coordinator does not know the host. ``actor_state`` is what Ray says of its actor, where it
    has not answered: ALIVE, RESTARTING and so on.

    ``memory`` is in bytes by what holds it, with the budget as ``host_memory``; ``counters`` count since it started.
    ``row_cache`` has the keys that its row caches were ``asked`` for, and the ``hits`` among them. Ray has started its
    process again ``restarts`` times, and this one ``up_ms`` ago.
    """

    host_id: str
    address: str
    node_id: str | None = None
    query_address: str | None = None
    incarnation: str | None = None
    pid: int | None = None
    answered: bool = True
    heartbeat_ms: int | None = None
    partitions: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    row_cache: dict[str, int] = field(default_factory=dict)
    storage_requests: dict[str, int] = field(default_factory=dict)
    requests: dict[str, Any] = field(default_factory=dict)
    loading: tuple[dict[str, Any], ...] = ()
    restarts: int = 0
    up_ms: int | None = None
    storage_trouble: tuple[LocationTrouble, ...] = ()
    actor_state: str | None = None
    failing_loops: tuple[LoopFailures, ...] = ()

    @property
    def cache_hits(self) -> float | None:
        """Return the share of keys that row caches had, 0 to 1; None if nothing was asked for."""
        asked = self.row_cache.get("asked", 0)
        return self.row_cache.get("hits", 0) / asked if asked else None

    @property
    def machine(self) -> str:
        """Return the IP address of its machine."""
        return self.address.rpartition("//")[2].rpartition(":")[0]


@dataclass(frozen=True)
class LostDriver:
    """A query whose driver was given up while it ran, last heard of at ``lost_ms``; nobody has started it again."""

    query: str
    run_id: str
    checkpoint_location: str
    lost_ms: int
    query_id: str = ""
    state_location: str = ""


@dataclass(frozen=True)
class CoordinatorInfo:
    """The coordinator of a namespace. ``problems`` say where hosts stand that should stand elsewhere.

    ``restarts`` and ``up_ms`` are those of its process, as of hosts. ``lost`` are the queries that it has given up.
    ``failing_loops`` has the loops of its process, and those that drivers report.
    """

    id: str
    namespace: str
    node_ip: str | None = None
    pid: int | None = None
    storage_requests: dict[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    restarts: int = 0
    up_ms: int | None = None
    storage_trouble: tuple[LocationTrouble, ...] = ()
    lost: tuple[LostDriver, ...] = ()
    failing_loops: tuple[LoopFailures, ...] = ()
