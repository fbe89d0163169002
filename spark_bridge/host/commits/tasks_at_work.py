"""Counts the tasks of an operator that are at work on a host: they have opened the batch and have no answer yet.

The tasks of a batch start together where each has a slot, but open one after the other. So the first ones would commit
before the last ones have opened. How many are at work at once is much the same from batch to batch: it is the number of
slots. Memory grows with the partitions of the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

VAIN_WAITS = 3
"""After this many waits in a row in which nobody came, nobody is waited for,"""
RETRY_BATCHES = 32
"""for this many batches."""


@dataclass
class _Operator:
    """One operator in one batch. ``came`` have opened it, ``at_work`` have no answer; ``most`` were so at once."""

    came: set[int] = field(default_factory=set)
    at_work: set[int] = field(default_factory=set)
    most: int = 0


class TasksAtWork:
    """The tasks of one batch of a run on this host, and what is known from the batch before. Not thread-safe."""

    def __init__(self) -> None:
        self._operators: dict[str, _Operator] = {}
        self._before: dict[str, _Operator] = {}
        self._vain = 0
        self._without = 0

    def next_batch(self) -> TasksAtWork:
        """Return those of the next batch, with what is known of this one."""
        new = TasksAtWork()
        new._before = self._operators
        new._vain, new._without = self._vain, self._without
        if new._vain >= VAIN_WAITS:
            new._without += 1
            if new._without >= RETRY_BATCHES:
                new._vain = new._without = 0
        return new

    def opened(self, operator: str, partition: int) -> None:
        """Take note that a task has opened the batch."""
        known = self._operators.setdefault(operator, _Operator())
        known.came.add(partition)
        known.at_work.add(partition)
        known.most = max(known.most, len(known.at_work))

    def answered(self, operator: str, partition: int) -> None:
        """Take note that a task's changes are durable, or could not be stored: it has its slot no longer."""
        known = self._operators.get(operator)
        if known is not None:
            known.at_work.discard(partition)

    def expects_more(self) -> bool:
        """Return whether other tasks are about to open, of an operator of which some are at work.

        They are if fewer are at work than were at once in the batch before, and fewer have come than came then.
        """
        if self._vain >= VAIN_WAITS:
            return False
        for name, now in self._operators.items():
            before = self._before.get(name)
            if before is not None and 0 < len(now.at_work) < before.most and len(now.came) < len(before.came):
                return True
        return False

    def waited(self, *, in_vain: bool) -> None:
        """Take note of what has come of a wait for tasks that had not opened."""
        self._vain = self._vain + 1 if in_vain else 0
