"""Keeping the host known to the coordinator, which forgets all hosts when it starts anew."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import TypeVar

from coordinator_actor.exceptions import ReplacedHostError, StaleOwnerError, UnknownHostError, UnknownRunError
from coordinator_actor.messages import HostInfo, HostOrders
from coordinator_actor.port import CoordinatorPort
from spark_bridge.host.held_partitions import HeldPartitions

log = logging.getLogger(__name__)

T = TypeVar("T")


class HostRegistration:
    """Registers the host at the coordinator, and again whenever the coordinator does not know the host or a run.

    ``clock`` is monotonic, in seconds. ``replaced`` says why this incarnation of the host must end itself, or is None.
    """

    def __init__(
        self, info: HostInfo, coordinator: CoordinatorPort, held: HeldPartitions, clock: Callable[[], float]
    ) -> None:
        self.info = info
        self.coordinator = coordinator
        self.replaced: str | None = None
        self._held = held
        self._clock = clock
        self._lease_seconds = HostOrders(known=True).lease_seconds
        self._leased_until = -math.inf
        self._registering: threading.Thread | None = None

    def register(self) -> None:
        """Make this host known to the coordinator, reporting all that the host holds.

        Raises ``ReplacedHostError`` if another incarnation has taken the place of this one.
        """
        sent = self._clock()
        try:
            self.coordinator.register_host(self.info, self._held.report())
        except ReplacedHostError as error:
            self.replaced = str(error)
            raise
        self._runs_from(sent)

    def renew(self) -> HostOrders:
        """Send a heartbeat with what the host holds, and return the answer: the lease runs on from the sending."""
        sent = self._clock()
        orders = self.coordinator.heartbeat_host(self.info.host_id, self.info.incarnation, self._held.versions())
        self._lease_seconds = orders.lease_seconds
        if orders.known:
            self._runs_from(sent)
        return orders

    def _runs_from(self, sent: float) -> None:
        self._leased_until = max(self._leased_until, sent + self._lease_seconds)

    @property
    def is_leased(self) -> bool:
        """Return whether the lease of this host runs: else another host may own its partitions, and complete versions.

        The lease ends here no later than at the coordinator, which counts from the arrival of the heartbeat.
        """
        return self._clock() < self._leased_until

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
        except (UnknownRunError, UnknownHostError, StaleOwnerError):
            self.register()
            return call()

    def call_about(self, run_id: str, call: Callable[[], T]) -> T:
        """Call the coordinator about a run. Only of a run that this host holds can it tell the coordinator anew."""
        return self.call(call) if run_id in self._held.registrations else call()

    def owns(self, owner: HostInfo) -> bool:
        """Return whether ``owner`` is this very incarnation of this host."""
        return (owner.host_id, owner.incarnation) == (self.info.host_id, self.info.incarnation)
