"""Spark's messages about active state store instances (Spark: ``StateStoreCoordinator``)."""

from __future__ import annotations

from collections.abc import Sequence

from backends.ids import StateStoreProviderId
from coordinator_actor.handlers.registries.registries import Registries


class Instances:
    """Reports and verifies which executor has which instance."""

    def __init__(self, registries: Registries) -> None:
        self._lock = registries.lock
        self._instances = registries.instances

    def report_active_instance(
        self,
        provider_id: StateStoreProviderId,
        host: str,
        executor_id: str,
        other_provider_ids: Sequence[StateStoreProviderId] = (),
    ) -> list[StateStoreProviderId]:
        """See ``CoordinatorPort``."""
        with self._lock:
            return self._instances.report(provider_id, host, executor_id, other_provider_ids)

    def verify_if_instance_active(self, provider_id: StateStoreProviderId, executor_id: str) -> bool:
        """See ``CoordinatorPort``."""
        with self._lock:
            return self._instances.verify(provider_id, executor_id)

    def get_location(self, provider_id: StateStoreProviderId) -> str | None:
        """See ``CoordinatorPort``."""
        with self._lock:
            return self._instances.location(provider_id)

    def get_locations(self, provider_ids: Sequence[StateStoreProviderId]) -> list[str | None]:
        """See ``CoordinatorPort``."""
        with self._lock:
            return self._instances.locations(provider_ids)
