"""Figures of a query's checkpoints: counts, durations, sizes (Flink: ``SimpleCheckpointStatsTracker``)."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from coordinator_actor.checkpoints.completed_checkpoint import CompletedCheckpoint
from coordinator_actor.checkpoints.pending_checkpoint import PendingCheckpoint
from coordinator_actor.checkpoints.tasks import TaskFigures, TaskKey
from coordinator_actor.exceptions import InvalidRequestError

_SLOWEST = 5


@dataclass(frozen=True)
class CheckpointStats:
    """One completed checkpoint. Times are in seconds, sizes in bytes.

    ``duration`` is from the trigger to the last acknowledgement, ``acknowledging`` from the first acknowledgement to
    the last.
    """

    id: int
    trigger_timestamp: float
    duration: float
    size: int
    tasks: int
    acknowledging: float


@dataclass(frozen=True)
class FailedCheckpointStats:
    """One checkpoint that was given up, and why."""

    id: int
    trigger_timestamp: float
    reason: str


@dataclass
class _Overall:
    """The least, the greatest and the sum of one figure over all checkpoints ever."""

    least: float = float("inf")
    greatest: float = float("-inf")
    total: float = 0

    def add(self, value: float) -> None:
        self.least = min(self.least, value)
        self.greatest = max(self.greatest, value)
        self.total += value


class CheckpointStatsTracker:
    """Counts checkpoints and keeps the figures of the last ``history`` completed ones. Safe to use from many threads.

    It keeps 12 bytes per checkpoint and task, and the names of the tasks once.
    """

    def __init__(self, history: int = 100) -> None:
        if history < 1:
            raise InvalidRequestError(f"history is {history}; at least one checkpoint must be remembered.")
        self._history = history
        self._lock = threading.Lock()
        self._pending: dict[int, PendingCheckpoint] = {}
        self._stats: dict[int, CheckpointStats] = {}  # by ascending id
        self._figures: dict[int, TaskFigures] = {}
        self._failures: deque[FailedCheckpointStats] = deque(maxlen=history)
        self._durations = _Overall()
        self._sizes = _Overall()
        self._triggered = self._completed = self._failed = 0

    def on_triggered(self, pending: PendingCheckpoint) -> None:
        """Take note that a checkpoint has begun."""
        with self._lock:
            self._triggered += 1
            self._pending[pending.id] = pending

    def on_completed(self, completed: CompletedCheckpoint, figures: TaskFigures | None = None) -> None:
        """Take note of a completed checkpoint. They may come out of order: the latest has the highest id."""
        spread = max(0.0, figures.last - figures.first) if figures else 0.0
        tasks = len(figures.tasks.keys) if figures else len(completed.states)
        stats = CheckpointStats(
            completed.id, completed.timestamp, completed.duration, completed.size, tasks, acknowledging=spread
        )
        with self._lock:
            self._pending.pop(completed.id, None)
            self._completed += 1
            self._durations.add(completed.duration)
            self._sizes.add(completed.size)
            if figures is not None:
                self._figures[completed.id] = figures
            in_order = not self._stats or completed.id > next(reversed(self._stats))
            self._stats[completed.id] = stats
            if not in_order:
                self._stats = {i: self._stats[i] for i in sorted(self._stats)}
            while len(self._stats) > self._history:
                oldest = next(iter(self._stats))
                del self._stats[oldest]
                self._figures.pop(oldest, None)

    def on_failed(self, checkpoint_id: int, reason: str) -> None:
        """Take note that a checkpoint was given up."""
        with self._lock:
            pending = self._pending.pop(checkpoint_id, None)
            self._failed += 1
            timestamp = pending.timestamp if pending is not None else 0.0
            self._failures.append(FailedCheckpointStats(checkpoint_id, timestamp, reason))

    def counts(self) -> dict[str, int]:
        """Return how many checkpoints were triggered, are in progress, were completed, or failed."""
        with self._lock:
            return self._counts()

    def history(self) -> list[CheckpointStats]:
        """Return the last completed checkpoints, by ascending id."""
        with self._lock:
            return list(self._stats.values())

    def failures(self) -> list[FailedCheckpointStats]:
        """Return the last checkpoints that were given up, in the order of their ends."""
        with self._lock:
            return list(self._failures)

    def task_stats(self, checkpoint_id: int | None = None) -> dict[str, dict[str, list[float]]] | None:
        """Return the figures of each task of one checkpoint, the latest by default; None if it is not remembered.

        They are per operator ``{"duration": [...], "size": [...]}`` by partition. A partition that is no task has 0 for
        both.
        """
        figures = self._figures_of(checkpoint_id)
        if figures is None:
            return None
        found: dict[str, dict[str, list[float]]] = {
            operator: {"duration": [0.0] * n, "size": [0] * n} for operator, n in figures.tasks.parallelism.items()
        }
        durations, sizes = figures.durations.tolist(), figures.sizes.tolist()
        for (operator, partition), duration, size in zip(figures.tasks.keys, durations, sizes, strict=True):
            found[operator]["duration"][partition] = duration
            found[operator]["size"][partition] = size
        return found

    def task_summary(self, checkpoint_id: int | None = None) -> dict[str, Any] | None:
        """Return percentiles over the tasks of one checkpoint (default: the latest), and its slowest tasks.

        None if the checkpoint is not remembered.
        """
        figures = self._figures_of(checkpoint_id)
        if figures is None or not figures.tasks.keys:
            return None
        slowest = np.argsort(-figures.durations, kind="stable")[:_SLOWEST].tolist()
        return {
            "duration": percentiles(figures.durations),
            "size": percentiles(figures.sizes),
            "slowest": [
                {
                    "task": _name(figures.tasks.keys[i]),
                    "duration": float(figures.durations[i]),
                    "size": int(figures.sizes[i]),
                }
                for i in slowest
            ],
        }

    def snapshot(self) -> dict[str, Any]:
        """Return all figures as plain dicts, lists, numbers and texts, for JSON."""
        with self._lock:
            counts = self._counts()
            stats = list(self._stats.values())
            failures = list(self._failures)
            pending = list(self._pending.values())
            overall = {
                "duration": self._summary(self._durations),
                "size": self._summary(self._sizes),
            }
        return {
            "counts": counts,
            "in_progress": [
                {
                    "id": p.id,
                    "trigger_timestamp": p.timestamp,
                    "acknowledged": p.num_acknowledged,
                    "tasks": p.num_acknowledged + p.num_not_yet_acknowledged,
                }
                for p in pending
            ],
            "latest": _plain(stats[-1]) if stats else None,
            "latest_tasks": self.task_summary(stats[-1].id) if stats else None,
            "latest_failed": _plain(failures[-1]) if failures else None,
            "overall": overall,
            "recent": {
                "duration": percentiles([s.duration for s in stats]),
                "size": percentiles([s.size for s in stats]),
                "acknowledging": percentiles([s.acknowledging for s in stats]),
            }
            if stats
            else None,
            "history": [_plain(s) for s in stats],
            "failures": [_plain(f) for f in failures],
        }

    def _counts(self) -> dict[str, int]:
        return {
            "triggered": self._triggered,
            "in_progress": len(self._pending),
            "completed": self._completed,
            "failed": self._failed,
        }

    def _summary(self, overall: _Overall) -> dict[str, float] | None:
        if not self._completed:
            return None
        return {"min": overall.least, "avg": overall.total / self._completed, "max": overall.greatest}

    def _figures_of(self, checkpoint_id: int | None) -> TaskFigures | None:
        with self._lock:
            if checkpoint_id is None:
                checkpoint_id = next(reversed(self._stats), None)
            return None if checkpoint_id is None else self._figures.get(checkpoint_id)


def percentiles(values: ArrayLike) -> dict[str, float]:
    """Return p50, p90, p99 and max by nearest rank: each is one of the values. There must be at least one value."""
    array = np.asarray(values)
    names = ("p50", "p90", "p99", "max")
    found = np.percentile(array, (50, 90, 99, 100), method="inverted_cdf")
    return dict(zip(names, found.tolist(), strict=True))


def _plain(stats: CheckpointStats | FailedCheckpointStats) -> dict[str, Any]:
    return dict(vars(stats))


def _name(task: TaskKey) -> str:
    return f"{task[0]}/{task[1]}"
