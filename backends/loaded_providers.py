"""The providers that are loaded in a process, and the thread that maintains them (Spark: the object ``StateStore``).

Programs that use providers without a host use it through ``StateStore.get`` and the other class methods of
``StateStore``. If there is a coordinator, active instances are reported to it.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from backends.background_loop import BackgroundLoop
from backends.conf import StateStoreConf, StateStoreProviderId
from backends.exceptions import InvalidStateStoreArgument

Store = TypeVar("Store")
Store_co = TypeVar("Store_co", covariant=True)
log = logging.getLogger(__name__)


class Provider(Protocol[Store_co]):
    """The part of a ``StateStoreProvider`` that is used here."""

    def get_store(self, version: int) -> Store_co:
        """Open a version to change it."""

    def get_read_store(self, version: int) -> Store_co:
        """Open a version to read."""

    def do_maintenance(self) -> None:
        """Take snapshots that are due, and remove files that are no longer kept."""

    def close(self) -> None:
        """Release memory and local files."""


class Report(Protocol):
    """The coordinator's pending or received answer to the report of an instance."""

    def result(self) -> Sequence[StateStoreProviderId]:
        """Return the providers to unload here, because they are active elsewhere."""


class CoordinatorReference(Protocol):
    """The part of ``coordinator_actor.StateStoreCoordinatorRef`` that is used here."""

    def report_active_instance(
        self,
        provider_id: StateStoreProviderId,
        host: str,
        executor_id: str,
        other_provider_ids: Iterable[StateStoreProviderId] = (),
    ) -> Report:
        """Report to the coordinator that an instance is active here, along with the other ones."""

    def verify_if_instance_active(self, provider_id: StateStoreProviderId, executor_id: str) -> bool:
        """Return whether an instance is active here, as far as the coordinator knows."""


class LoadedProviders(Generic[Store]):
    """Loaded providers by their id. Many threads may use one object at once.

    ``load`` makes a provider. ``coordinator`` returns the reference to the coordinator, or None if there is none.
    ``_lock`` guards everything here. It is held during ``load`` and ``coordinator``, and never during other calls of a
    provider or of the coordinator.
    """

    def __init__(
        self,
        load: Callable[[StateStoreProviderId, StateStoreConf], Provider[Store]],
        coordinator: Callable[[], CoordinatorReference | None] = lambda: None,
        *,
        host: str | None = None,
        executor_id: str = "driver",
    ) -> None:
        self._load = load
        self._coordinator_of = coordinator
        self._coordinator: CoordinatorReference | None = None
        self._host = host or socket.gethostname()
        self._executor_id = executor_id
        self._providers: dict[StateStoreProviderId, Provider[Store]] = {}
        self._reported: set[StateStoreProviderId] = set()
        self._maintained: dict[StateStoreProviderId, Future[None]] = {}
        self._lock = threading.RLock()
        self._loop: BackgroundLoop | None = None
        self._pool: ThreadPoolExecutor | None = None

    def use_coordinator(
        self,
        coordinator: Callable[[], CoordinatorReference | None],
        host: str | None = None,
        executor_id: str = "driver",
    ) -> None:
        """Report to a coordinator from now on."""
        with self._lock:
            self._coordinator_of, self._coordinator = coordinator, None
            self._host, self._executor_id = host or self._host, executor_id

    def get(self, provider_id: StateStoreProviderId, version: int, conf: StateStoreConf | None = None) -> Store:
        """Open a version to change it. Load the provider if necessary, which starts maintenance.

        Raises ``VersionNotFoundError``, and ``InvalidStateStoreArgument`` for an invalid provider id or class.
        """
        return self._provider(provider_id, conf).get_store(version)

    def get_read_only(
        self, provider_id: StateStoreProviderId, version: int, conf: StateStoreConf | None = None
    ) -> Store:
        return self._provider(provider_id, conf).get_read_store(version)

    def _provider(self, provider_id: StateStoreProviderId, conf: StateStoreConf | None) -> Provider[Store]:
        if not isinstance(provider_id, StateStoreProviderId):
            raise InvalidStateStoreArgument(
                f"{provider_id!r} is not a StateStoreProviderId. On the class, StateStore.get(provider_id, version, "
                "conf) opens a store; get(key) is for a store that is open."
            )
        conf = conf or StateStoreConf()
        with self._lock:
            self._start_maintenance(conf)
            provider = self._providers.get(provider_id)
            if provider is None:
                provider = self._providers[provider_id] = self._load(provider_id, conf)
            others = [other for other in self._providers if other != provider_id]
        self._report(provider_id, others)
        return provider

    def _reference(self) -> CoordinatorReference | None:
        with self._lock:
            if self._coordinator is None:
                log.debug("Getting StateStoreCoordinatorRef")
                self._coordinator = self._coordinator_of()
                if self._coordinator is not None:
                    log.info("Retrieved reference to StateStoreCoordinator: %s", self._coordinator)
            return self._coordinator

    def _report(self, provider_id: StateStoreProviderId, others: Sequence[StateStoreProviderId]) -> None:
        coordinator = self._reference()
        if coordinator is None:
            return
        report = coordinator.report_active_instance(provider_id, self._host, self._executor_id, tuple(others))
        log.info("Reported that the loaded instance %s is active", provider_id)
        to_unload = report.result()
        with self._lock:
            self._reported.add(provider_id)
        log.debug("The loaded instances are going to unload: %s", ", ".join(map(str, to_unload)))
        for other in to_unload:
            self.unload(other)

    def is_loaded(self, provider_id: StateStoreProviderId) -> bool:
        with self._lock:
            return provider_id in self._providers

    def unload(self, provider_id: StateStoreProviderId) -> None:
        with self._lock:
            provider = self._providers.pop(provider_id, None)
            self._maintained.pop(provider_id, None)
            self._reported.discard(provider_id)
        if provider is not None:
            provider.close()
            log.info("Unloaded %s", provider)

    def stop(self) -> None:
        """Close all providers, and end maintenance. A provider that is loaded afterwards starts maintenance again."""
        with self._lock:
            ids = list(self._providers)
            loop, pool = self._loop, self._pool
            self._loop = self._pool = None
            self._coordinator = None
        if loop is not None:
            loop.close()
        for provider_id in ids:
            self.unload(provider_id)
        if loop is not None:
            loop.close(timeout=None)
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        log.info("StateStore stopped")

    # -- maintenance ---------------------------------------------------------------------------

    def is_maintenance_running(self) -> bool:
        with self._lock:
            return self._loop is not None and self._loop.is_alive

    def _start_maintenance(self, conf: StateStoreConf) -> None:
        if self._loop is not None and self._loop.is_alive:
            return
        self._pool = self._pool or ThreadPoolExecutor(
            conf.maintenance_threads, thread_name_prefix="statestore-maintenance"
        )
        self._loop = BackgroundLoop(
            self.do_maintenance,
            conf.maintenance_interval,
            name="state-store-maintenance-task",
            what="do the maintenance of the loaded providers: no snapshots are made",
            remedy="Look at the log of this process.",
        ).start()
        log.info("State Store maintenance task started")

    def do_maintenance(self) -> list[Future[None]]:
        """Do one round: unload providers that are active elsewhere, and begin to maintain the rest.

        Returns at once, so that a slow upload does not delay the next round. A provider whose last maintenance has not
        ended is skipped.
        """
        log.debug("Doing maintenance")
        with self._lock:
            loaded, pool = dict(self._providers), self._pool
        begun = []
        for provider_id, provider in loaded.items():
            with self._lock:
                running = self._maintained.get(provider_id)
                if pool is None or (running is not None and not running.done()):
                    continue
                try:
                    begun.append(pool.submit(self._maintain, provider_id, provider))
                except RuntimeError:  # stopped in between
                    break
                self._maintained[provider_id] = begun[-1]
        return begun

    def _maintain(self, provider_id: StateStoreProviderId, provider: Provider[Store]) -> None:
        try:
            if self._is_active(provider_id):
                provider.do_maintenance()
            else:
                self.unload(provider_id)
        except Exception:
            with self._lock:
                is_loaded = self._providers.get(provider_id) is provider
            if is_loaded:  # else it was closed on purpose, in the middle of its maintenance
                log.warning("Error managing %s, unloading state store provider", provider, exc_info=True)
                self.unload(provider_id)

    def _is_active(self, provider_id: StateStoreProviderId) -> bool:
        coordinator = self._reference()
        with self._lock:
            is_reported = provider_id in self._reported
        if coordinator is None or not is_reported:  # one that is just being loaded is not reported yet
            return True
        verified = coordinator.verify_if_instance_active(provider_id, self._executor_id)
        log.debug("Verified whether the loaded instance %s is active: %s", provider_id, verified)
        return verified
