"""Following a query that runs elsewhere: its completed versions are taken up as its storage shows them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from backends.background_loop import BackgroundLoop
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.messages import QueryRegistration

log = logging.getLogger(__name__)


class FollowedQuery:
    """Keeps what is served at the last completed version of a query. A loop looks every ``interval`` seconds.

    A look takes four listings of storage and the manifests that are new. ``look_up`` returns the query as storage has
    it now: another run, with other operators perhaps, once the query has been started again. ``serve`` begins to serve
    that run in place of the last one. Each look tells the coordinator how old the last successful one is, so that
    answers can say how far they may be behind the query. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        registration: QueryRegistration,
        coordinator: CoordinatorPort,
        look_up: Callable[[], QueryRegistration],
        serve: Callable[[QueryRegistration], None],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registration = registration
        self._coordinator = coordinator
        self._look_up = look_up
        self._serve = serve
        self._clock = clock
        self._looked_at = clock()
        self._loop = BackgroundLoop(
            self.look,
            interval,
            name="statestore-follow",
            what=f"follow the query at {registration.state_location}: an old version is served",
            remedy="Look at the storage of the checkpoint, at its credentials, and at the log of the serving process. "
            "It tries again by itself; answers say how far they may be behind.",
        )

    def start(self) -> None:
        """Begin to look."""
        self._loop.start()

    def close(self) -> None:
        """Look no more."""
        self._loop.close(timeout=5)

    def look(self) -> None:
        """Take up what was completed since the last look. Raises what storage and the coordinator raise."""
        began = self._clock()
        answer = self._coordinator.take_up_versions(self.registration.run_id, began - self._looked_at)
        if answer.refusal is not None:
            log.info("Run %s is followed no more: %s", self.registration.run_id, answer.refusal)
            self.registration = self._look_up()
            self._serve(self.registration)
        self._looked_at = began
