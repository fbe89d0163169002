"""A checkpoint that every task has acknowledged (Flink: ``CompletedCheckpoint``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coordinator_actor.checkpoints.tasks import TaskKey


@dataclass(frozen=True)
class CompletedCheckpoint:
    """A checkpoint that every task has acknowledged.

    ``timestamp`` was given when the checkpoint was triggered. ``duration`` is in seconds, from the trigger to the last
    acknowledgement. ``size`` is the number of bytes of all tasks. ``states`` has the tasks that reported a state.
    ``properties`` are those of the pending checkpoint.
    """

    id: int
    timestamp: float
    duration: float
    states: dict[TaskKey, Any]
    size: int = 0
    job_id: str = ""
    properties: dict[str, Any] = field(default_factory=dict)
