"""A checkpoint that some tasks have not acknowledged yet (Flink: ``PendingCheckpoint``)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from coordinator_actor.exceptions import InvalidRequestError

# The tasks that a checkpoint waits for: one task per partition of each operator.


TaskKey: TypeAlias = tuple[str, int]
"""(operator, partition)"""


class Tasks:
    """The tasks that every checkpoint of one coordinator waits for. All its checkpoints share this object.

    ``index`` is the place of each task in ``keys``. ``parallelism`` is the number of partitions per operator.
    """

    def __init__(self, tasks: Iterable[TaskKey]) -> None:
        self.keys = tuple(tasks)
        self.index: dict[TaskKey, int] = {key: i for i, key in enumerate(self.keys)}
        if len(self.index) != len(self.keys):
            raise InvalidRequestError(
                f"{len(self.keys) - len(self.index)} of the {len(self.keys)} tasks are named twice."
            )
        self.parallelism: dict[str, int] = {}
        for operator, partition in self.keys:
            self.parallelism[operator] = max(self.parallelism.get(operator, 0), partition + 1)


@dataclass(frozen=True, eq=False)
class TaskFigures:
    """Reports of the tasks of one completed checkpoint, in the order of ``tasks.keys``.

    ``durations`` are in seconds, ``sizes`` in bytes. ``first`` and ``last`` are the times, by the coordinator's clock,
    of the first and the last acknowledgement.
    """

    tasks: Tasks
    durations: NDArray[np.float32]
    sizes: NDArray[np.int64]
    first: float
    last: float


def named_tasks(tasks: Iterable[TaskKey]) -> str:
    """Return the names of the first eight tasks, for messages."""
    names = [f"{operator}/{partition}" for operator, partition in tasks]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


# A checkpoint that every task has acknowledged (Flink: ``CompletedCheckpoint``).


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


class CancelReason(Enum):
    """Reasons to cancel a checkpoint."""

    EXPIRED = "expired"
    DECLINED = "declined"
    SUBSUMED = "subsumed"
    STOPPED = "stopped"
    SHUTDOWN = "shutdown"
    CANCELLED = "cancelled"
    FAILED = "failed"


class PendingCheckpoint:
    """A triggered checkpoint that waits for the acknowledgements of its tasks.

    The lock of its coordinator guards it. Readers without that lock get copies or single values. ``timestamp`` is given
    by the caller that triggers the checkpoint. ``started`` is the time of the trigger by the coordinator's clock, in
    seconds. ``properties`` are copied to the completed checkpoint.
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
        return not self._missing

    @property
    def is_discarded(self) -> bool:
        """Return whether the checkpoint is over: completed or cancelled."""
        return self.completed is not None or self.cancelled is not None

    @property
    def not_yet_acknowledged(self) -> set[TaskKey]:
        return set(self._missing)

    def state(self, task: TaskKey) -> Any:
        """Return the state that a task has reported, or None."""
        return self._states.get(task)

    def lacks(self, task: TaskKey) -> bool:
        """Return whether a task has not acknowledged the checkpoint."""
        return task in self._missing

    @property
    def num_not_yet_acknowledged(self) -> int:
        return len(self._missing)

    @property
    def num_acknowledged(self) -> int:
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
        place = self.place(task)
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

    def place(self, task: TaskKey) -> int:
        """Return the place of a task. Raises ``InvalidRequestError`` if the checkpoint has no such task."""
        place = self._tasks.index.get(task)
        if place is None:
            raise InvalidRequestError(
                f"{task[0]}/{task[1]} is not a task of checkpoint {self.id} of {self.job_id}, whose operators "
                f"and partition counts are {self._tasks.parallelism}."
            )
        return place


# The messages of a task about a checkpoint: it acknowledges or declines the checkpoint.


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
    ABORTED = "aborted"  # taken: the checkpoint is cancelled, because a task declined it or it could not be stored
    LATE = "late"  # the checkpoint is already over: the message has changed nothing
    UNKNOWN = "unknown"  # no such checkpoint is remembered, or the coordinator is shut down

    def __bool__(self) -> bool:
        return self is not Received.UNKNOWN


# The counter that numbers a query's checkpoints and savepoints (Flink: ``CheckpointIDCounter``).


class CheckpointIDCounter:
    """Ascending ids, shared by the checkpoints and savepoints of a query. Safe to use from many threads.

    The counter is only in memory. Its maker passes the first id above all ids in storage, so that ids always ascend.
    """

    def __init__(self, first: int = 1) -> None:
        if first < 0:
            raise InvalidRequestError(f"The first checkpoint id is {first}; it must be 0 or more.")
        self._next = first
        self._lock = threading.Lock()

    def get_and_increment(self) -> int:
        """Take the next id."""
        with self._lock:
            checkpoint_id = self._next
            self._next += 1
            return checkpoint_id

    def get(self) -> int:
        """Return the id that will be taken next, without taking it."""
        with self._lock:
            return self._next

    def set_count(self, count: int) -> None:
        """Take ``count`` next. Raises ``InvalidRequestError`` if that would give an id out twice."""
        with self._lock:
            if count < self._next:
                raise InvalidRequestError(
                    f"The checkpoint id counter is at {self._next} and cannot be set back to {count}: "
                    "ids may have been given out already. Set it to that or more."
                )
            self._next = count

    def ensure_above(self, checkpoint_id: int) -> None:
        """Never give out ``checkpoint_id`` or less from now on."""
        with self._lock:
            self._next = max(self._next, checkpoint_id + 1)
