"""A checkpoint coordinator with a clock and stores of the test's own, and the batches that it is told of."""

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
    """A clock; who turns it lets the coordinators look at what is overdue."""

    now: float = 1000.0
    coordinators: list[CheckpointCoordinator] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for coordinator in self.coordinators:
            coordinator.expire()
