"""The partitions and runs that a host holds: tables in memory, without any work on state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from coordinator_actor.messages import HostReport, QueryRegistration
from spark_bridge.host.held.instance import Instance, InstanceKey, RunKey

NOTHING_HELD = 1 << 62
"""The version reported of a run that a host knows, but has no partition of: no version is newer."""


class HeldPartitions:
    """The loaded partitions of a host, and the runs that it has, or has had, partitions of.

    ``lock`` guards all tables here, and ``invocations`` and ``commits`` of every ``Instance``. ``instance`` and
    ``registration`` read one table without the lock. A thread that holds ``lock`` takes no other lock but those of
    ``CompletedVersions``, ``Grants`` and ``VersionRequests``.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.instances: dict[InstanceKey, Instance] = {}
        self.registrations: dict[str, QueryRegistration] = {}
        self._by_run: dict[RunKey, Instance] = {}
        self._opened: dict[str, int] = {}
        self._ended_run_hooks: list[Callable[[str | None], None]] = []
        self._exchange_hooks: list[Callable[[str], None]] = []
        self._exchanged: dict[str, str] = {}

    def instance(self, run_id: str, operator: str, partition: int) -> Instance | None:
        """Return a partition as it is loaded here, if it is."""
        return self._by_run.get((run_id, operator, partition))

    def registration(self, run_id: str) -> QueryRegistration | None:
        """Return a run that this host has, or has had, partitions of."""
        return self.registrations.get(run_id)

    def all(self) -> list[Instance]:
        """Return all loaded partitions."""
        with self.lock:
            return list(self.instances.values())

    def of_run(self, run_id: str, operator: str | None = None) -> list[Instance]:
        """Return the loaded partitions of a run, of one operator or of all."""
        return [i for i in self.all() if i.registration.run_id == run_id and operator in (None, i.operator)]

    def holds(self, instance: Instance) -> bool:
        """Return whether this is the instance that is found."""
        with self.lock:
            return self.instances.get(instance.key) is instance

    def put(self, instance: Instance) -> None:
        """Let a loaded partition be found."""
        with self.lock:
            self.instances[instance.key] = instance
            self._by_run[instance.run_key] = instance

    def remove(self, instance: Instance) -> bool:
        """Let a partition no longer be found; return whether it was this instance that was found."""
        with self.lock:
            if self.instances.get(instance.key) is not instance:
                return False
            del self.instances[instance.key]
            self._by_run.pop(instance.run_key, None)
            return True

    def note_opened(self, registration: QueryRegistration, batch_id: int) -> None:
        """Note that a task of a batch has opened a partition: a coordinator that starts anew must know the batch."""
        run_id = registration.run_id
        with self.lock:
            self.registrations[run_id] = registration
            self._opened[run_id] = max(batch_id, self._opened.get(run_id, 0))

    def note_ended(self, run_ids: Sequence[str]) -> None:
        """Note that queries have ended: a coordinator that starts anew must know, and no snapshot is due."""
        with self.lock:
            for run_id in run_ids:
                registration = self.registrations.get(run_id)
                if registration is not None and not registration.ended:
                    self.registrations[run_id] = replace(registration, ended=True)

    def has_ended(self, run_id: str) -> bool:
        """Return whether the query of a run is known to have ended. Its last version is read on."""
        registration = self.registrations.get(run_id)
        return registration is not None and registration.ended

    def forget_run(self, run_id: str) -> None:
        """Forget a run that is over; its partitions are removed apart."""
        with self.lock:
            self.registrations.pop(run_id, None)
            self._opened.pop(run_id, None)
            self._exchanged.pop(run_id, None)

    def report(self) -> HostReport:
        """Return the report of this host to a coordinator that starts anew."""
        with self.lock:
            pending = tuple(a for i in self.instances.values() for a in list(i.acknowledged.values()))
            held: dict[str, dict[str, list[int]]] = {}
            for i in self.instances.values():
                held.setdefault(i.registration.run_id, {}).setdefault(i.operator, []).append(i.partition)
            return HostReport(tuple(self.registrations.values()), pending, dict(self._opened), held)

    def versions(self) -> dict[str, int]:
        """Return by run id the lowest version of the partitions that are loaded here."""
        with self.lock:
            held = dict.fromkeys(self.registrations, NOTHING_HELD)
            for i in self.instances.values():
                held[i.registration.run_id] = min(i.state.version, held.get(i.registration.run_id, i.state.version))
            return held

    def on_files_exchanged(self, hook: Callable[[str], None]) -> None:
        """Have ``hook`` called with the id of each run whose files were written anew: older copies do not count."""
        self._exchange_hooks.append(hook)

    def tell_exchanged(self, run_id: str) -> None:
        """Call the hooks of ``on_files_exchanged``."""
        for hook in self._exchange_hooks:
            hook(run_id)

    def note_exchanged(self, run_id: str, exchange: str) -> None:
        """Note that nothing of a run from before an exchange of files is held here any more."""
        with self.lock:
            if run_id in self.registrations:
                self._exchanged[run_id] = exchange

    def last_exchange(self, run_id: str) -> str:
        """Return the last exchange of a run of which nothing from before it is held; "" if there was none."""
        with self.lock:
            return self._exchanged.get(run_id, "")

    def exchanged(self) -> dict[str, str]:
        """Return the last exchange of each run of which nothing from before it is held, for the heartbeat."""
        with self.lock:
            return dict(self._exchanged)

    def on_run_ended(self, hook: Callable[[str | None], None]) -> None:
        """Have ``hook`` called with the id of each run that is over here, and with None when the host closes."""
        self._ended_run_hooks.append(hook)

    def tell_ended(self, run_id: str | None) -> None:
        """Call the hooks of ``on_run_ended``, in the order in which they came."""
        for hook in self._ended_run_hooks:
            hook(run_id)
