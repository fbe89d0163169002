"""The lease of one load or upload: while it lasts, the coordinator neither removes nor exchanges the files."""

from __future__ import annotations

import logging
from collections.abc import Callable

from backends.exceptions import StateStoreError
from backends.formats.manifest import Lineage
from coordinator_actor.exceptions import CoordinatorError, SparkBridgeError
from coordinator_actor.query.files.files_in_use import FILES_RENEW_SECONDS
from spark_bridge.host.coordination.registration import HostRegistration

log = logging.getLogger(__name__)


class FileLease:
    """The lease of one load or upload, of a version of a partition of a run.

    Used by the thread that loads. The host's heartbeat has the lease renewed, too, in another thread, since one step of
    a load may take longer than the lease. At worst both send the same message.

    ``use`` tells the load from others of the same partition. A lease that is neither renewed nor ended runs out after
    ``BUSY_SECONDS``, so the death of a host leaves nothing behind. ``clock`` gives seconds.
    """

    def __init__(
        self,
        registration: HostRegistration,
        run_id: str,
        operator: str,
        partition: int,
        version: int,
        *,
        use: str,
        clock: Callable[[], float],
    ) -> None:
        self._registration = registration
        self._partition = (run_id, operator, partition)
        self._version = version
        self._use = use
        self._clock = clock
        self._renewed = clock()

    def lineage(self) -> Lineage:
        """Begin the lease; return the files. Raises what the coordinator raises."""
        run_id = self._partition[0]
        coordinator = self._registration.coordinator
        found = self._registration.call_about(
            run_id, lambda: coordinator.lineage(*self._partition, self._version, self._use)
        )
        self._renewed = self._clock()
        return found

    @property
    def is_due(self) -> bool:
        """Return whether the lease was not renewed for ``FILES_RENEW_SECONDS``."""
        return self._clock() - self._renewed >= FILES_RENEW_SECONDS

    def renew(self) -> None:
        """Renew the lease if that is due: one message in ``FILES_RENEW_SECONDS``.

        A load calls this after each of its steps. A failure is logged, since the load may be
        through before the lease has run out.
        """
        if not self.is_due:
            return
        self._renewed = self._clock()
        try:
            if not self._registration.coordinator.renew_files(*self._partition, self._use):
                self.lineage()  # a coordinator that was restarted knows of no load
        except (CoordinatorError, SparkBridgeError, StateStoreError) as error:
            log.warning(
                "The coordinator was not told that version %d of %s is still being loaded; it is told again in %.0f s: "
                "%s",
                self._version,
                self._partition,
                FILES_RENEW_SECONDS,
                error,
            )

    def is_held(self) -> bool:
        """Return whether the lease has lasted since ``lineage``. Renews it if that is due.

        An upload asks. While it lasts no files are exchanged; without it, they may have been. Raises what the
        coordinator raises.
        """
        if not self.is_due:
            return True
        asked = self._clock()
        is_held = self._registration.coordinator.renew_files(*self._partition, self._use)
        if is_held:
            self._renewed = asked
        return is_held

    def end(self) -> None:
        """End the lease. A failure is logged, since the lease runs out by itself."""
        try:
            self._registration.coordinator.release_files(*self._partition, self._use)
        except (CoordinatorError, SparkBridgeError, StateStoreError) as error:
            log.info("The coordinator was not told that the load of %s is over: %s", self._partition, error)
