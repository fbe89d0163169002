"""Figures of a query's checkpoints: counts, durations, sizes (Flink: ``SimpleCheckpointStatsTracker``)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from coordinator_actor.checkpoints import pending_checkpoint
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
    """One cancelled checkpoint, and the reason."""

    id: int
    trigger_timestamp: float
    reason: str


@dataclass
class _Overall:
    """The least, the greatest and the sum of one figure over all checkpoints ever."""

    least: float = float("inf")
    greatest: float = float("-inf")
    total: float = 0

    def include(self, value: float) -> None:
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
        self._pending: dict[int, pending_checkpoint.PendingCheckpoint] = {}
        self._stats: dict[int, CheckpointStats] = {}  # by ascending id
        self._figures: dict[int, pending_checkpoint.TaskFigures] = {}
        self._failures: deque[FailedCheckpointStats] = deque(maxlen=history)
        self._durations = _Overall()
        self._sizes = _Overall()
        self._triggered = self._completed = self._failed = 0

    def on_triggered(self, pending: pending_checkpoint.PendingCheckpoint) -> None:
        with self._lock:
            self._triggered += 1
            self._pending[pending.id] = pending

    def on_completed(
        self, completed: pending_checkpoint.CompletedCheckpoint, figures: pending_checkpoint.TaskFigures | None = None
    ) -> None:
        """Record a completed checkpoint. They may come out of order: the latest has the highest id."""
        spread = max(0.0, figures.last - figures.first) if figures else 0.0
        tasks = len(figures.tasks.keys) if figures else len(completed.states)
        stats = CheckpointStats(
            completed.id, completed.timestamp, completed.duration, completed.size, tasks, acknowledging=spread
        )
        with self._lock:
            self._pending.pop(completed.id, None)
            self._completed += 1
            self._durations.include(completed.duration)
            self._sizes.include(completed.size)
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
        """Record a cancelled checkpoint."""
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
        """Return the last cancelled checkpoints, in the order of their ends."""
        with self._lock:
            return list(self._failures)

    def task_stats(self, checkpoint_id: int | None = None) -> dict[str, dict[str, list[float]]] | None:
        """Return the figures of each task of one checkpoint, the latest by default; None if it is not remembered.

        They are per operator ``{"duration": [...], "size": [...]}`` by partition. A partition without a task has 0 for
        both.
        """
        figures = self._figures_of(checkpoint_id)
        if figures is None:
            return None
        by_operator: dict[str, dict[str, list[float]]] = {
            operator: {"duration": [0.0] * n, "size": [0] * n} for operator, n in figures.tasks.parallelism.items()
        }
        durations, sizes = figures.durations.tolist(), figures.sizes.tolist()
        for (operator, partition), duration, size in zip(figures.tasks.keys, durations, sizes, strict=True):
            by_operator[operator]["duration"][partition] = duration
            by_operator[operator]["size"][partition] = size
        return by_operator

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
        """Return all figures as plain dicts, lists, numbers and strings, for JSON."""
        with self._lock:
            counts = self._counts()
            stats = list(self._stats.values())
            failures = list(self._failures)
            pending = list(self._pending.values())
            overall = {"duration": self._summary(self._durations), "size": self._summary(self._sizes)}
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

    def _figures_of(self, checkpoint_id: int | None) -> pending_checkpoint.TaskFigures | None:
        with self._lock:
            if checkpoint_id is None:
                checkpoint_id = next(reversed(self._stats), None)
            return None if checkpoint_id is None else self._figures.get(checkpoint_id)


def percentiles(values: ArrayLike) -> dict[str, float]:
    """Return p50, p90, p99 and max by nearest rank: each is one of the values. There must be at least one value."""
    array = np.asarray(values)
    names = ("p50", "p90", "p99", "max")
    values_at = np.percentile(array, (50, 90, 99, 100), method="inverted_cdf")
    return dict(zip(names, values_at.tolist(), strict=True))


def _plain(stats: CheckpointStats | FailedCheckpointStats) -> dict[str, Any]:
    return dict(vars(stats))


def _name(task: pending_checkpoint.TaskKey) -> str:
    return f"{task[0]}/{task[1]}"


# Finds the partitions of a run that are behind with their snapshots, and makes the warning that names them.
#
# After Spark 4.1 (SPARK-51358): a partition takes long to load after a failure if its newest snapshot is many versions
# and many rounds of maintenance old. Nothing else shows that.


_LEAST = {
    "multiplier_for_min_version_diff_to_log": 1,
    "multiplier_for_min_time_diff_to_log": 1,
    "snapshot_lag_report_interval": 0,
    "max_lagging_stores_to_report": 0,
    "deltas_per_snapshot": 1,
    "maintenance_interval": 0,
}


@dataclass(frozen=True)
class SnapshotLagConf:
    """Bounds of snapshot lag. The first five have the names and defaults of ``spark.sql.streaming.stateStore.*``.

    A partition lags if its newest snapshot is both too many versions behind, more than
    ``multiplier_for_min_version_diff_to_log * deltas_per_snapshot``, and too old, more than
    ``multiplier_for_min_time_diff_to_log * maintenance_interval`` seconds. At most ``max_lagging_stores_to_report``
    partitions are named, at most every ``snapshot_lag_report_interval`` seconds.
    """

    coordinator_report_snapshot_upload_lag: bool = True
    multiplier_for_min_version_diff_to_log: int = 5
    multiplier_for_min_time_diff_to_log: int = 10
    snapshot_lag_report_interval: float = 300.0
    max_lagging_stores_to_report: int = 5
    deltas_per_snapshot: int = 10
    maintenance_interval: float = 60.0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value < least:
                raise InvalidRequestError(f"{name} must be {least} or more, not {value}.")

    @property
    def versions(self) -> int:
        """Return the greatest number of versions that a snapshot may be behind."""
        return self.multiplier_for_min_version_diff_to_log * self.deltas_per_snapshot

    @property
    def seconds(self) -> float:
        """Return the greatest age of a snapshot, in seconds."""
        return self.multiplier_for_min_time_diff_to_log * self.maintenance_interval


@dataclass(frozen=True)
class LaggingSnapshot:
    """One partition that lags. ``version`` is that of its newest snapshot; None if none is known."""

    key: pending_checkpoint.TaskKey
    version: int | None
    versions_behind: int
    seconds_behind: float

    def __str__(self) -> str:
        newest = "no snapshot" if self.version is None else f"snapshot of version {self.version}"
        operator, partition = self.key
        return (
            f"{operator}/{partition} ({newest}, {self.versions_behind} versions and {self.seconds_behind:.0f} s behind)"
        )


class SnapshotLag:
    """The snapshots of one run. Not thread-safe: the lock of the run guards it. Times are in seconds and handed in.

    A partition without a known snapshot counts as if it had one of ``base_version``, the version that the run began
    with, made at ``started``. (Spark takes version 0 at time 0, and so warns of every store right after a restart.)
    """

    def __init__(
        self,
        run_id: str,
        keys: Iterable[pending_checkpoint.TaskKey],
        started: float,
        base_version: int = 0,
        conf: SnapshotLagConf | None = None,
    ) -> None:
        self.conf = conf or SnapshotLagConf()
        self._run_id = run_id
        self._started = started
        self._base_version = base_version
        self._uploaded: dict[pending_checkpoint.TaskKey, tuple[int, float] | None] = dict.fromkeys(keys)
        self._reported: float | None = None

    def report_uploaded(self, key: pending_checkpoint.TaskKey, version: int, now: float) -> None:
        """Record a durable snapshot. It may come late: if a newer one is known, nothing changes.

        Raises ``InvalidRequestError`` for a partition that the run does not have.
        """
        if key not in self._uploaded:
            raise InvalidRequestError(f"Run {self._run_id} has no partition {key[0]}/{key[1]} to have a snapshot.")
        last_version = self._uploaded[key]
        if last_version is None or last_version[0] < version:
            self._uploaded[key] = (version, now)

    def latest(self, key: pending_checkpoint.TaskKey) -> int | None:
        """Return the version of a partition's newest snapshot; None if none is known."""
        last_version = self._uploaded.get(key)
        return None if last_version is None else last_version[0]

    def lagging(self, latest_version: int, now: float) -> list[LaggingSnapshot]:
        """Return the partitions that lag behind ``latest_version``, those furthest behind first."""
        if not self.conf.coordinator_report_snapshot_upload_lag:
            return []
        late = []
        for key, uploaded in self._uploaded.items():
            version, moment = (self._base_version, self._started) if uploaded is None else uploaded
            versions, seconds = latest_version - version, now - moment
            if versions > self.conf.versions and seconds > self.conf.seconds:
                late.append(LaggingSnapshot(key, None if uploaded is None else version, versions, seconds))
        late.sort(key=lambda lag: (-lag.versions_behind, -lag.seconds_behind, lag.key))
        return late

    def warning(self, latest_version: int, now: float) -> str | None:
        """Return the warning to log; None if no partition lags, or if the last warning was a short while ago."""
        # A clock that was set back must not silence the warning.
        if self._reported is not None and 0 <= now - self._reported < self.conf.snapshot_lag_report_interval:
            return None
        lagging = self.lagging(latest_version, now)
        if not lagging:
            return None
        self._reported = now
        named = [str(lag) for lag in lagging[: self.conf.max_lagging_stores_to_report]]
        more = len(lagging) - len(named)
        listed = ", ".join(named) + (f"{', and ' if named else ''}{more} more" if more else "")
        return (
            f"StateStoreCoordinator Snapshot Lag Report for queryRunId={self._run_id} - Number of state stores falling "
            f"behind: {len(lagging)} of {len(self._uploaded)} at version {latest_version}: {listed}. "
            "Loading them after a failure takes long; look at the logs of their hosts for uploads that fail or "
            "maintenance that does not keep up."
        )
