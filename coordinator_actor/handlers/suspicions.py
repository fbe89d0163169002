"""Suspected hosts: a connection to a host's own address shows sooner than its lease that the host is lost."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum

from coordinator_actor.handlers.registries import HostLease, Loss, Registries
from coordinator_actor.messages import HostInfo

log = logging.getLogger(__name__)

CONNECTION_SECONDS = 1.0
LEAST_CONNECTION_SECONDS = 0.5
"""A host's machine has so many seconds to take or refuse a connection, the fewer only if it was silent before."""
PROBE_PAUSE_SECONDS = 0.25
"""The least seconds between two probes of a host."""
SILENT_PROBES = 2
"""A machine is silent after this many consecutive probes without an answer: a single packet may get lost."""
REACH_SECONDS = 10.0
"""A host that has never taken a connection from this coordinator is tried again after this many seconds."""
MOST_PROBES = 256
"""Hosts that are probed at the same time, each by its own thread. The next report or look repeats other suspicions."""
STOOD_STILL_SECONDS = 1.0
"""A probe that takes this much longer than its time shows nothing: this process itself stood still."""
_SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN})


class Probed(Enum):
    """What a connection to a host shows.

    ``REFUSED``: the machine's kernel answers, and nothing listens, so the process is dead. ``CONNECTED``: the kernel
    answers, even if the process is suspended. ``SILENT``: the machine does not answer. ``UNCLEAR``: this process could
    not try.
    """

    REFUSED = "refused"
    CONNECTED = "connected"
    SILENT = "silent"
    UNCLEAR = "unclear"


Probe = Callable[[str, float], Probed]
"""Connects to a host by its address for tasks, within so many seconds."""


def probe_address(address: str, seconds: float) -> Probed:
    """Connect to a host's address, such as ``grpc://10.0.0.7:40123``, and close the connection at once."""
    ip, _, port = address.rpartition("//")[2].rpartition(":")
    try:
        socket.create_connection((ip.strip("[]"), int(port)), timeout=seconds).close()
    except ConnectionRefusedError:
        return Probed.REFUSED
    except OSError as error:
        if isinstance(error, TimeoutError) or error.errno in _SILENT:
            return Probed.SILENT
        log.warning("A connection to host address %s could not be tried: %s", address, error)
        return Probed.UNCLEAR
    return Probed.CONNECTED


class Suspicions:
    """Probes suspected hosts, and ends the leases of those that are lost. Thread-safe: the registries' lock guards it.

    A host is suspected if a task, a client or another host could not connect to it, or if its heartbeat is late. A host
    that refuses a connection is lost at once if its standbys have reported copies of all its partitions, of all
    queries: otherwise Ray's restart of the process, which finds its local files, is faster than a load elsewhere. A
    host on a silent machine is lost ``silent_timeout`` seconds after its last heartbeat. All others keep their leases.

    Only a host that has taken a connection before can be lost in this way: otherwise a firewall between coordinator and
    host would look like a dead host. ``probe`` waits in a separate thread without any lock; None probes nothing.
    """

    def __init__(self, registries: Registries, silent_timeout: float, probe: Probe | None) -> None:
        self._registries = registries
        self._silent_timeout = silent_timeout
        self._probe = probe
        self._probing: set[str] = set()

    def suspect_host(self, address: str) -> None:
        """Probe the host that has this address, for tasks or for clients. Other addresses are of lost hosts."""
        if not address:
            return  # a host that no client can ask has an empty one
        with self._registries.lock:
            leases = self._registries.hosts.leases.values()
            infos = [lease.info for lease in leases if address in (lease.info.address, lease.info.query_address)]
        for info in infos:
            self._suspect(info)

    def suspect_late_hosts(self, now: float) -> None:
        """Probe the hosts whose heartbeats are late, and those that have not taken a connection yet."""
        with self._registries.lock:
            late = [lease.info for lease in self._registries.hosts.leases.values() if self._is_due(lease, now)]
        for info in late:
            self._suspect(info)

    def _is_due(self, lease: HostLease, now: float) -> bool:
        if lease.is_reachable:
            return now - lease.seen > self._silent_timeout / 2
        return now - lease.probed_at > REACH_SECONDS

    def _suspect(self, info: HostInfo) -> None:
        """Begin to probe a host, unless it is being probed or was probed just now. Does not wait."""
        if self._probe is None:
            return
        with self._registries.lock:
            lease = self._registries.hosts.find(info.host_id, info.incarnation)
            now = self._registries.clock()
            is_busy = info.host_id in self._probing or len(self._probing) >= MOST_PROBES
            if lease is None or is_busy or abs(now - lease.probed_at) < PROBE_PAUSE_SECONDS:
                return
            lease.probed_at = now
            self._probing.add(info.host_id)
        try:
            threading.Thread(target=self._confirm, args=(info,), name="statestore-probe", daemon=True).start()
        except BaseException:
            with self._registries.lock:
                self._probing.discard(info.host_id)
            raise

    def _confirm(self, info: HostInfo) -> None:
        """Probe a host until it is lost, has answered, or has sent a heartbeat."""
        try:
            probes = 0
            while (pause := self._probed(info, probes)) is not None:
                probes += 1
                time.sleep(pause)
        except Exception:
            log.exception("Host %s at %s could not be probed", info.host_id, info.address)
        finally:
            with self._registries.lock:
                self._probing.discard(info.host_id)

    def _probed(self, info: HostInfo, earlier: int) -> float | None:
        """Probe a host once, after ``earlier`` silent probes. Return the seconds until the next probe, or None."""
        assert self._probe is not None
        with self._registries.lock:
            lease = self._registries.hosts.find(info.host_id, info.incarnation)
            if lease is None:
                return None
            seen = lease.seen
            left = self._silent_timeout - (self._registries.clock() - seen)
        is_last = earlier + 1 >= SILENT_PROBES
        seconds = max(LEAST_CONNECTION_SECONDS, min(CONNECTION_SECONDS, left)) if is_last else CONNECTION_SECONDS
        began = time.monotonic()
        probed = self._probe(info.address, seconds)
        took = time.monotonic() - began
        stood_still = took > seconds + STOOD_STILL_SECONDS
        with self._registries.lock:
            lease = self._registries.hosts.find(info.host_id, info.incarnation)
            if lease is None:
                return None
            now = self._registries.clock()
            age = now - lease.seen
            lease.probed_at = now
            if probed is Probed.CONNECTED:
                lease.is_reachable = True
            if probed is Probed.REFUSED:
                if lease.is_reachable and self._has_copies(info.host_id):
                    self._registries.hosts.lose(lease, Loss.REFUSED, age)
                return None
            if probed is not Probed.SILENT or not lease.is_reachable or lease.seen > seen:
                return None
            if age >= self._silent_timeout and is_last and not stood_still:
                self._registries.hosts.lose(lease, Loss.SILENT, age)
                return None
        # The next probe ends when the host may be given up, or begins soon.
        return max(PROBE_PAUSE_SECONDS - took, self._silent_timeout - CONNECTION_SECONDS - age, 0.0)

    def _has_copies(self, host_id: str) -> bool:
        """Return whether standbys have reported copies of all partitions that a host owns; True if it owns none."""
        for run in self._registries.runs.current():
            current = run.assignment.current
            tasks = () if current is None else current.of_host.get(host_id, ())
            if current is None or not tasks:
                continue
            leases = [self._registries.hosts.leases.get(h) for h in current.standbys.get(host_id, ())]
            copies = [lease.hand_over.warm.get(run.run_id, {}) for lease in leases if lease is not None]
            if not all(any(p in copy.get(operator, ()) for copy in copies) for operator, p in tasks):
                return False
        return True
