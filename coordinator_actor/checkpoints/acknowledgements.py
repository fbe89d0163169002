"""The messages of a task about a checkpoint: it acknowledges or declines the checkpoint."""

from __future__ import annotations

from enum import Enum
from typing import Any

from msgspec import Struct

from coordinator_actor.checkpoints.tasks import TaskKey


class AcknowledgeCheckpoint(Struct, frozen=True):
    """A task has made its state for a checkpoint durable.

    ``state`` says where the state is. ``size`` is in bytes, ``duration`` in seconds.
    """

    job_id: str
    task: TaskKey
    checkpoint_id: int
    state: Any = None
    size: int = 0
    duration: float = 0.0


class DeclineCheckpoint(Struct, frozen=True):
    """A task cannot take part in a checkpoint. ``reason`` says why."""

    job_id: str
    task: TaskKey
    checkpoint_id: int
    reason: str = "no reason given"


class Received(Enum):
    """The outcome of a message. All but ``UNKNOWN`` are true."""

    PENDING = "pending"  # taken; other tasks have not acknowledged yet
    COMPLETED = "completed"  # taken as the last one: the checkpoint is completed
    ABORTED = "aborted"  # taken: the checkpoint is given up, since a task declined it or it could not be stored
    LATE = "late"  # the checkpoint is over already: the message has changed nothing
    UNKNOWN = "unknown"  # no such checkpoint is remembered, or the coordinator is shut down

    def __bool__(self) -> bool:
        return self is not Received.UNKNOWN
