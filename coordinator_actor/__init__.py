"""The coordinator of the state store: one named Ray actor per namespace, and its logic without Ray.

Names are loaded when first used: PySpark workers import this package and must not pay for Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.lazy_names import lazy_names

if TYPE_CHECKING:
    from coordinator_actor.actor import StateStoreCoordinator
    from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator
    from coordinator_actor.checkpoints.checkpoint_stats import CheckpointStatsTracker
    from coordinator_actor.checkpoints.pending_checkpoint import CheckpointIDCounter
    from coordinator_actor.feature_views import Feature, FeatureView
    from coordinator_actor.messages import KvStateLocationOracle
    from coordinator_actor.reference import StateStoreCoordinatorRef
    from coordinator_actor.savepoints.savepoint_coordinator import SavepointCoordinator

__all__ = [
    "CheckpointCoordinator",
    "CheckpointIDCounter",
    "CheckpointStatsTracker",
    "Feature",
    "FeatureView",
    "KvStateLocationOracle",
    "SavepointCoordinator",
    "StateStoreCoordinator",
    "StateStoreCoordinatorRef",
]

_HOMES = {
    "CheckpointCoordinator": "coordinator_actor.checkpoints.checkpoint_coordinator",
    "CheckpointIDCounter": "coordinator_actor.checkpoints.pending_checkpoint",
    "CheckpointStatsTracker": "coordinator_actor.checkpoints.checkpoint_stats",
    "Feature": "coordinator_actor.feature_views",
    "FeatureView": "coordinator_actor.feature_views",
    "KvStateLocationOracle": "coordinator_actor.messages",
    "SavepointCoordinator": "coordinator_actor.savepoints.savepoint_coordinator",
    "StateStoreCoordinator": "coordinator_actor.actor",
    "StateStoreCoordinatorRef": "coordinator_actor.reference",
}

__getattr__ = lazy_names("coordinator_actor", _HOMES)
