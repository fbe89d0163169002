"""The tasks that a checkpoint waits for: one task per partition of each operator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from coordinator_actor.exceptions import InvalidRequestError

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
