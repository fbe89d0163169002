"""A checkpoint that some tasks have not acknowledged yet (Flink: ``PendingCheckpoint``)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np

from coordinator_actor.checkpoints.completed_checkpoint import CompletedCheckpoint
from coordinator_actor.checkpoints.tasks import TaskFigures, TaskKey, Tasks, named_tasks
from coordinator_actor.exceptions import InvalidRequestError


class CancelReason(Enum):
    """Reasons for which a checkpoint is given up."""

    EXPIRED = "expired"
    DECLINED = "declined"
    SUBSUMED = "subsumed"
    STOPPED = "stopped"
    SHUTDOWN = "shutdown"
    CANCELLED = "cancelled"
    FAILED = "failed"


class PendingCheckpoint:
    """A triggered checkpoint that waits for the acknowledgements of its tasks.

    The lock of its coordinator guards it. Readers without that lock get copies or single values.
    ``timestamp`` is given by who triggers the checkpoint. ``started`` is the time of the trigger by the coordinator's
    clock, in seconds. ``properties`` are handed through to the completed checkpoint.
    """

    def __init__(
        self,
        job_id: str,
        checkpoint_id: int,
        timestamp: float,
        tasks: Tasks,
        *,
        started: float,
        properties: Mapping[str, Any] | None = None,
    ) -> None:
        self.job_id = job_id
        self.id = checkpoint_id
        self.timestamp = timestamp
        self.started = started
        self.properties = dict(properties or {})
        self.completed: CompletedCheckpoint | None = None
        self.cancelled: tuple[CancelReason, str] | None = None
        self._tasks = tasks
        self._missing = set(tasks.index)
        self._states: dict[TaskKey, Any] = {}
        self._durations = np.zeros(len(tasks.keys), np.float32)
        self._sizes = np.zeros(len(tasks.keys), np.int64)
        self._size = 0
        self._first = self._last = started

    def __repr__(self) -> str:
        return f"PendingCheckpoint(id={self.id}, acknowledged={self.num_acknowledged}/{len(self._tasks.keys)})"

    @property
    def is_fully_acknowledged(self) -> bool:
        """Return whether every task has acknowledged the checkpoint."""
        return not self._missing

    @property
    def is_discarded(self) -> bool:
        """Return whether the checkpoint is over: completed or given up."""
        return self.completed is not None or self.cancelled is not None

    @property
    def not_yet_acknowledged(self) -> set[TaskKey]:
        """Return the tasks that have not acknowledged the checkpoint."""
        return set(self._missing)

    def state(self, task: TaskKey) -> Any:
        """Return the state that a task has reported, or None."""
        return self._states.get(task)

    def lacks(self, task: TaskKey) -> bool:
        """Return whether a task has not acknowledged the checkpoint."""
        return task in self._missing

    @property
    def num_not_yet_acknowledged(self) -> int:
        """Return the number of tasks that have not acknowledged the checkpoint."""
        return len(self._missing)

    @property
    def num_acknowledged(self) -> int:
        """Return the number of tasks that have acknowledged the checkpoint."""
        return len(self._tasks.keys) - len(self._missing)

    @property
    def states(self) -> dict[TaskKey, Any]:
        """Return the states that were reported so far."""
        return dict(self._states)

    def acknowledge(self, task: TaskKey, state: Any, size: int = 0, duration: float = 0.0, *, at: float) -> None:
        """Take the acknowledgement of a task, which arrived at the time ``at``.

        A second acknowledgement of a task replaces the first one: Spark takes the attempt that ends last.
        Raises ``InvalidRequestError`` for an unknown task or a discarded checkpoint.
        """
        place = self._place(task)
        if self.is_discarded:
            raise InvalidRequestError(f"Checkpoint {self.id} is over; {task[0]}/{task[1]} cannot acknowledge it.")
        if not self.num_acknowledged:
            self._first = at
        self._last = at
        self._missing.discard(task)
        if state is None:
            self._states.pop(task, None)
        else:
            self._states[task] = state
        self._size += size - int(self._sizes[place])
        self._sizes[place] = size
        self._durations[place] = duration

    def check_task(self, task: TaskKey) -> None:
        """Raise ``InvalidRequestError`` if the checkpoint has no such task."""
        self._place(task)

    def to_completed(self, now: float) -> CompletedCheckpoint:
        """Return the completed checkpoint. Raises ``InvalidRequestError`` while acknowledgements are missing."""
        if self._missing:
            raise InvalidRequestError(f"Checkpoint {self.id} is not complete: {self.describe_missing()}.")
        return CompletedCheckpoint(
            id=self.id,
            timestamp=self.timestamp,
            duration=max(0.0, now - self.started),
            states=dict(self._states),
            size=self._size,
            job_id=self.job_id,
            properties=dict(self.properties),
        )

    def figures(self) -> TaskFigures:
        """Return the figures that the tasks reported, when the checkpoint is over. The arrays are not copied."""
        return TaskFigures(self._tasks, self._durations, self._sizes, self._first, self._last)

    def describe_missing(self) -> str:
        """Return which acknowledgements are missing, for messages."""
        missing = sorted(self._missing.copy())
        total = len(self._tasks.keys)
        if not missing:
            return f"all {total} tasks have acknowledged it, but it is not stored"
        return f"{len(missing)} of {total} tasks have not acknowledged it: {named_tasks(missing)}"

    def _place(self, task: TaskKey) -> int:
        place = self._tasks.index.get(task)
        if place is None:
            raise InvalidRequestError(
                f"{task[0]}/{task[1]} is no task of checkpoint {self.id} of {self.job_id}, whose operators "
                f"and partition counts are {self._tasks.parallelism}."
            )
        return place
