"""Following a query that runs elsewhere: its completed versions are taken up as its storage shows them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from backends.exceptions import StateStoreError
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.exceptions import CoordinatorError, SparkBridgeError
from coordinator_actor.messages import QueryRegistration

log = logging.getLogger(__name__)


class FollowedQuery:
    """Keeps what is served at the last completed version of a query. One thread looks every ``interval`` seconds.

    A look takes four listings of storage and the manifests that are new. ``look_up`` returns the query as storage has
    it now: another run, with other operators perhaps, once the query has been started again. ``serve`` begins to serve
    that run in place of the last one.
    """

    def __init__(
        self,
        registration: QueryRegistration,
        coordinator: CoordinatorPort,
        look_up: Callable[[], QueryRegistration],
        serve: Callable[[QueryRegistration], None],
        interval: float,
    ) -> None:
        self.registration = registration
        self._coordinator = coordinator
        self._look_up = look_up
        self._serve = serve
        self._interval = interval
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="statestore-follow", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            try:
                self.look()
            except (StateStoreError, CoordinatorError, SparkBridgeError) as error:
                log.warning("The last version of %s was not looked for: %s", self.registration.state_location, error)

    def look(self) -> None:
        """Take up what was completed since the last look. Raises what storage and the coordinator raise."""
        answer = self._coordinator.take_up_versions(self.registration.run_id)
        if answer.refusal is not None:
            log.info("Run %s is followed no more: %s", self.registration.run_id, answer.refusal)
            self.registration = self._look_up()
            self._serve(self.registration)
