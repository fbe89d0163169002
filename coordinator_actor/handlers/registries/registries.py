"""Tables that all handlers share: the hosts, runs and instances that a coordinator knows, and their lock."""

from __future__ import annotations

import threading
from collections.abc import Callable

from backends.background_loop import FailingLoop
from backends.bounded_dict import BoundedDict
from coordinator_actor.handlers.registries.host_registry import HostRegistry
from coordinator_actor.handlers.registries.instance_registry import InstanceRegistry
from coordinator_actor.handlers.registries.run_registry import REMEMBERED_ENTRIES, RunRegistry


class Registries:
    """The hosts, runs and instances of one coordinator.

    ``lock`` guards all of them, ``started`` and ``last_needed`` included. Whoever needs the lock of a run, too, takes
    the lock of the run first. Nothing waits for storage while it holds ``lock``.

    ``clock`` gives seconds since 1970 and never goes back. ``last_needed`` is when hosts or drivers were heard of last.
    For ``report_timeout`` seconds from the start on, hosts and drivers of an earlier coordinator may still report.
    """

    def __init__(self, clock: Callable[[], float], report_timeout: float) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.hosts = HostRegistry()
        self.instances = InstanceRegistry()
        self.runs = RunRegistry(self.lock, self.instances, clock)
        self.started = self.last_needed = clock()
        self._reports_until = self.started + report_timeout
        self.placement_problems: BoundedDict[str, tuple[str, ...]] = BoundedDict(REMEMBERED_ENTRIES)
        """By session, where hosts do not stand as they should."""
        self.failing: BoundedDict[str, tuple[str, float, tuple[FailingLoop, ...]]] = BoundedDict(REMEMBERED_ENTRIES)
        """By session, the name of the driver's process, when it reported last, and its loops that fail."""
        self._ended_sessions: BoundedDict[str, None] = BoundedDict(REMEMBERED_ENTRIES)

    def expects_reports(self) -> bool:
        """Return whether hosts and drivers of an earlier coordinator may still report for the first time."""
        with self.lock:
            return self.clock() < self._reports_until

    def needed(self) -> None:
        """Take note that a host or a driver was heard of."""
        with self.lock:
            self.last_needed = self.clock()

    def prolong(self, seconds: float, now: float) -> None:
        """Let all leases run ``seconds`` longer: those of hosts, of drivers, and of the coordinator itself."""
        with self.lock:
            self.hosts.prolong(seconds, now)
            for run in self.runs.by_id.values():
                run.lifetime.prolong(seconds, now)
            self.last_needed = min(now, self.last_needed + seconds)
            self._reports_until += seconds

    def end_session(self, session_id: str) -> bool:
        """End a driver's session with its hosts and runs. Return whether other hosts are left."""
        with self.lock:
            # The hosts are told to stop only afterwards, and must not bring the session back meanwhile.
            self._ended_sessions[session_id] = None
            self.placement_problems.pop(session_id, None)
            self.failing.pop(session_id, None)
            self.hosts.leave(session_id, ())
            for host_id in self.hosts.of_session(session_id):
                del self.hosts.leases[host_id]
            gone = self.runs.of_session(session_id)
            for run in gone:
                self.runs.remove(run.run_id)
            others = bool(self.hosts.leases)
        for run in gone:
            self.runs.end(run, "its session has ended")
        return others

    def has_ended(self, session_id: str) -> bool:
        """Return whether a driver's session has ended."""
        with self.lock:
            return session_id in self._ended_sessions
