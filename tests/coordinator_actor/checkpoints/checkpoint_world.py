"""A checkpoint coordinator with the test's clock, whose callbacks are remembered, and messages of its tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator, CheckpointHooks
from coordinator_actor.checkpoints.pending_checkpoint import (
    AcknowledgeCheckpoint,
    CompletedCheckpoint,
    DeclineCheckpoint,
    PendingCheckpoint,
    TaskKey,
)


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


A, B, C = ("op", 0), ("op", 1), ("other", 0)


class Coordinator(CheckpointCoordinator):
    """Records completed checkpoints, and reports cancelled ones."""

    def __init__(
        self,
        *args: Any,
        trigger: Callable[[PendingCheckpoint], None] | None = None,
        store: Callable[[CompletedCheckpoint], None] | None = None,
        cancelled: Callable[[int], None] | None = None,
        subsumes: bool = True,
        **options: Any,
    ) -> None:
        self.successful: list[CompletedCheckpoint] = []
        by_id = None if cancelled is None else lambda pending, error: cancelled(pending.id)
        hooks = CheckpointHooks(trigger, store, self.successful.append, by_id, subsumes)
        super().__init__(*args, hooks, **options)


def coordinator(world: World, tasks: Any = (A, B), **options: Any) -> Coordinator:
    made = Coordinator("job", tasks, **{"clock": world.clock, **options})
    world.coordinators.append(made)
    return made


def ack(task: TaskKey, checkpoint_id: int, state: Any = None, **more: Any) -> AcknowledgeCheckpoint:
    return AcknowledgeCheckpoint(more.pop("job_id", "job"), task, checkpoint_id, state, **more)


def decline(task: TaskKey, checkpoint_id: int, reason: str = "busy", job_id: str = "job") -> DeclineCheckpoint:
    return DeclineCheckpoint(job_id, task, checkpoint_id, reason)


class Recorder:
    """The callbacks of a coordinator, which must come without its lock held."""

    def __init__(self) -> None:
        self.triggered: list[PendingCheckpoint] = []
        self.completed: list[CompletedCheckpoint] = []
        self.cancelled: list[int] = []
        self.failure: BaseException | None = None
        self.coordinator: CheckpointCoordinator | None = None

    def options(self) -> dict[str, Any]:
        return {"trigger": self.trigger, "cancelled": self.cancel, "store": self.complete}

    def _check(self) -> None:
        if self.coordinator is not None:
            assert self.coordinator._lock.acquire(timeout=1), "called with the lock held"
            self.coordinator._lock.release()

    def trigger(self, pending: PendingCheckpoint) -> None:
        self._check()
        self.triggered.append(pending)
        if self.failure is not None:
            raise self.failure

    def complete(self, completed: CompletedCheckpoint) -> None:
        self._check()
        self.completed.append(completed)
        if self.failure is not None:
            raise self.failure

    def cancel(self, checkpoint_id: int) -> None:
        self._check()
        self.cancelled.append(checkpoint_id)


def recorded(world: World, tasks: Any = (A, B), **options: Any) -> tuple[Coordinator, Recorder]:
    recorder = Recorder()
    made = coordinator(world, tasks, **{**recorder.options(), **options})
    recorder.coordinator = made
    return made, recorder
