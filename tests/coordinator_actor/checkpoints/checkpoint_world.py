"""A checkpoint coordinator with the test's clock and stores, and the batches that the test gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator


@dataclass
class ManualTimer:
    due: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class World:
    """A clock; turning it lets the coordinators look for overdue checkpoints."""

    now: float = 1000.0
    coordinators: list[CheckpointCoordinator] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for coordinator in self.coordinators:
            coordinator.expire()
