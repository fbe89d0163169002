"""Keeping the host known to the coordinator, which forgets all hosts when it starts anew."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import TypeVar

from backends.tracing import spans
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.exceptions import ReplacedHostError, StaleOwnerError, UnknownHostError, UnknownRunError
from coordinator_actor.messages import HandOver, HostInfo, HostOrders
from spark_bridge.host.coordination.completed_versions import CompletedVersions
from spark_bridge.host.held.held_partitions import HeldPartitions

log = logging.getLogger(__name__)

T = TypeVar("T")

REGISTER_SECONDS = 1.0
"""For readers, of which there may be any number, the host registers again at most once in this many seconds."""
_UNKNOWN = (UnknownRunError, UnknownHostError, StaleOwnerError)


class HostRegistration:
    """Registers the host at the coordinator, and again whenever the coordinator does not know the host or a run.

    Thread-safe. ``_lock`` guards ``number``, and when the host has registered for a reader last, by ``clock``, in
    monotonic seconds. ``replaced`` says why this incarnation of the host must end itself, or is None. ``number`` counts
    registrations: between two of them the coordinator may have given the host's partitions to others.
    """

    def __init__(
        self,
        info: HostInfo,
        coordinator: CoordinatorPort,
        held: HeldPartitions,
        completed: CompletedVersions,
        clock: Callable[[], float],
    ) -> None:
        self.info = info
        self.coordinator = coordinator
        self.replaced: str | None = None
        self.number = 0
        self._held = held
        self._completed = completed
        self._clock = clock
        self._lock = threading.Lock()
        self._registered_for_reader = -math.inf
        self._registered_at = -math.inf
        self._lease_seconds = HostOrders(known=True).lease_seconds
        self._leased_until = -math.inf
        self._registering: threading.Thread | None = None

    def register(self) -> None:
        """Make this host known to the coordinator, reporting all that the host holds.

        Raises ``ReplacedHostError`` if another incarnation has taken the place of this one.
        """
        with self._lock:
            self.number += 1
        sent = self._registered_at = self._clock()
        try:
            with spans.alone("host.register", restart=self.info.restart):
                self.coordinator.register_host(self.info, self._held.report())
            self._leased_until = sent + self._lease_seconds
        except ReplacedHostError as error:
            self.replaced = str(error)
            raise
        finally:
            self._registered_at = self._clock()

    def renew(self, hand_over: HandOver) -> HostOrders:
        """Send a heartbeat with what the host holds, and return the answer: the lease runs on from the sending."""
        sent = self._clock()
        versions = self._versions()
        orders = self.coordinator.heartbeat_host(self.info.host_id, self.info.incarnation, versions, hand_over)
        self._lease_seconds = orders.lease_seconds
        self._leased_until = sent + orders.lease_seconds if orders.known else -math.inf
        return orders

    def _versions(self) -> dict[str, int]:
        """Return by run id the lowest version that this host is at."""
        versions = self._held.versions()
        for run_id, version in versions.items():
            # A partition is loaded at a version that the coordinator has named; the others must hear of it too.
            noted = self._completed.newest(run_id)
            versions[run_id] = version if noted is None else min(version, noted.version)
        return versions

    @property
    def is_leased(self) -> bool:
        """Return whether the lease of this host runs: else another host may own its partitions, and complete versions.

        The lease ends here no later than at the coordinator, which counts from the arrival of the heartbeat.
        """
        return self._clock() < self._leased_until

    def is_surely_known_since(self, moment: float) -> bool:
        """Return whether the coordinator has known this host from ``moment`` until now.

        If so, the host has all partitions that it was granted since for a batch that goes on. False if that is not
        sure.
        """
        return self._registered_at < moment and self.is_leased

    def register_apart(self) -> None:
        """Register in a thread of its own, and wait 1 s for it.

        One query's storage may hang while the coordinator restores it, and the lease must be renewed meanwhile.
        """
        if self._registering is None or not self._registering.is_alive():
            self._registering = threading.Thread(target=self._register_again, name="statestore-register", daemon=True)
            self._registering.start()
        self._registering.join(timeout=1.0)

    def _register_again(self) -> None:
        try:
            self.register()
        except Exception:  # the next heartbeat tries again
            log.warning("Host %s could not be registered", self.info.host_id, exc_info=True)

    def call(self, call: Callable[[], T]) -> T:
        """Call the coordinator; if it does not know this host or run (it was restarted), register and call again."""
        try:
            return call()
        except _UNKNOWN:
            self.register()
            return call()

    def call_about(self, run_id: str, call: Callable[[], T]) -> T:
        """Call the coordinator about a run, for a reader. Only of a run that this host holds can it tell anew.

        The host registers again at most once in ``REGISTER_SECONDS``: a coordinator that was just started may not know
        an owner yet, however often it is told of the run. Raises what the coordinator says then, for the reader to ask
        again.
        """
        try:
            return call()
        except _UNKNOWN:
            if run_id not in self._held.registrations or not self._is_register_due():
                raise
        self.register()
        return call()

    def _is_register_due(self) -> bool:
        with self._lock:
            now = self._clock()
            if now - self._registered_for_reader < REGISTER_SECONDS:
                return False
            self._registered_for_reader = now
            return True

    def owns(self, owner: HostInfo) -> bool:
        """Return whether ``owner`` is this very incarnation of this host."""
        return (owner.host_id, owner.incarnation) == (self.info.host_id, self.info.incarnation)
