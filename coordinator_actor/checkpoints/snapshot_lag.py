"""Finds the partitions of a run that are behind with their snapshots, and makes the warning that names them.

After Spark 4.1 (SPARK-51358): a partition takes long to load after a failure if its newest snapshot is many versions
and many rounds of maintenance old. Nothing else shows that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator_actor.checkpoints.tasks import TaskKey
from coordinator_actor.exceptions import InvalidRequestError

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

    key: TaskKey
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
        keys: Iterable[TaskKey],
        started: float,
        base_version: int = 0,
        conf: SnapshotLagConf | None = None,
    ) -> None:
        self.conf = conf or SnapshotLagConf()
        self._run_id = run_id
        self._started = started
        self._base_version = base_version
        self._uploaded: dict[TaskKey, tuple[int, float] | None] = dict.fromkeys(keys)
        self._reported: float | None = None

    def report_uploaded(self, key: TaskKey, version: int, now: float) -> None:
        """Take note of a durable snapshot. It may come late: if a newer one is known, nothing changes.

        Raises ``InvalidRequestError`` for a partition that the run does not have.
        """
        if key not in self._uploaded:
            raise InvalidRequestError(f"Run {self._run_id} has no partition {key[0]}/{key[1]} to have a snapshot.")
        known = self._uploaded[key]
        if known is None or known[0] < version:
            self._uploaded[key] = (version, now)

    def latest(self, key: TaskKey) -> int | None:
        """Return the version of a partition's newest snapshot; None if none is known."""
        known = self._uploaded.get(key)
        return None if known is None else known[0]

    def lagging(self, latest_version: int, now: float, *, is_terminating: bool = False) -> list[LaggingSnapshot]:
        """Return the partitions that lag behind ``latest_version``, those furthest behind first.

        With ``is_terminating`` the versions alone decide, as in Spark: a trigger that ends by itself, such as
        ``availableNow``, has batches that follow one another faster than maintenance.
        """
        if not self.conf.coordinator_report_snapshot_upload_lag:
            return []
        found = []
        for key, known in self._uploaded.items():
            version, moment = (self._base_version, self._started) if known is None else known
            versions, seconds = latest_version - version, now - moment
            if versions > self.conf.versions and (is_terminating or seconds > self.conf.seconds):
                found.append(LaggingSnapshot(key, None if known is None else version, versions, seconds))
        found.sort(key=lambda lag: (-lag.versions_behind, -lag.seconds_behind, lag.key))
        return found

    def warning(self, latest_version: int, now: float, *, is_terminating: bool = False) -> str | None:
        """Return the warning to log; None if no partition lags, or if the last warning was a short while ago."""
        # A clock that was set back must not silence the warning.
        if self._reported is not None and 0 <= now - self._reported < self.conf.snapshot_lag_report_interval:
            return None
        lagging = self.lagging(latest_version, now, is_terminating=is_terminating)
        if not lagging:
            return None
        self._reported = now
        named = [str(lag) for lag in lagging[: self.conf.max_lagging_stores_to_report]]
        more = len(lagging) - len(named)
        listed = ", ".join(named) + (f"{', and ' if named else ''}{more} more" if more else "")
        return (
            f"StateStoreCoordinator Snapshot Lag Report for queryRunId={self._run_id} - Number of state stores falling "
            "behind: "
            f"{len(lagging)} of {len(self._uploaded)} at version {latest_version}: {listed}. Loading them after a "
            "failure takes "
            "long; look at the logs of their hosts for uploads that fail or maintenance that does not keep up."
        )
