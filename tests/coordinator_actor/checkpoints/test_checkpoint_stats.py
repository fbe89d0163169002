"""The figures of checkpoints.

Counterparts of Flink 1.0's SimpleCheckpointStatsTrackerTest: testNoCompletedCheckpointYet (test_nothing_yet),
testRandomStats (test_random_checkpoints_against_a_model), testIllegalOperatorId
(test_old_and_unknown_checkpoints_have_no_stats),
testCompletedCheckpointReordering (test_checkpoints_may_complete_out_of_order).
testOperatorStateCachedClearedOnNewCheckpoint has none: nothing is cached.
"""

from __future__ import annotations

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from coordinator_actor.checkpoints.checkpoint_stats import CheckpointStatsTracker, percentiles
from coordinator_actor.checkpoints.pending_checkpoint import PendingCheckpoint, TaskKey, Tasks
from coordinator_actor.exceptions import InvalidRequestError


def run(
    tracker: CheckpointStatsTracker,
    checkpoint_id: int,
    reports: dict[TaskKey, tuple[float, int]],
    *,
    started: float = 100.0,
    gap: float = 1.0,
    complete: bool = True,
) -> PendingCheckpoint:
    """A checkpoint whose tasks report (duration, size), one every ``gap`` seconds after its start."""
    pending = PendingCheckpoint("job", checkpoint_id, started + 0.5, Tasks(reports), started=started)
    tracker.on_triggered(pending)
    now = started
    for task, (duration, size) in reports.items():
        now += gap
        pending.acknowledge(task, "state", size, duration, at=now)
    if complete:
        tracker.on_completed(pending.to_completed(now), pending.figures())
    return pending


REPORTS = {("op", 0): (0.5, 10), ("op", 1): (2.0, 30), ("other", 0): (1.0, 60)}


def test_nothing_yet() -> None:
    tracker = CheckpointStatsTracker()
    assert tracker.counts() == dict.fromkeys(("triggered", "in_progress", "completed", "failed"), 0)
    assert tracker.history() == [] and tracker.task_stats() is None and tracker.task_summary() is None
    snapshot = tracker.snapshot()
    assert snapshot["latest"] is None and snapshot["recent"] is None and snapshot["overall"]["size"] is None
    json.dumps(snapshot)


def test_one_checkpoint() -> None:
    tracker = CheckpointStatsTracker()
    run(tracker, 7, REPORTS, started=100, gap=2)
    [stats] = tracker.history()
    assert (stats.id, stats.trigger_timestamp, stats.duration, stats.size, stats.tasks) == (7, 100.5, 6, 100, 3)
    assert stats.acknowledging == 4, "from the first acknowledgement to the last"
    assert tracker.task_stats() == {
        "op": {"duration": [0.5, 2.0], "size": [10, 30]},
        "other": {"duration": [1.0], "size": [60]},
    }
    summary = tracker.task_summary()
    assert summary is not None
    assert summary["duration"] == {"p50": 1.0, "p90": 2.0, "p99": 2.0, "max": 2.0}
    assert summary["size"] == {"p50": 30, "p90": 60, "p99": 60, "max": 60}
    assert [s["task"] for s in summary["slowest"]] == ["op/1", "other/0", "op/0"]


def test_counts_and_checkpoints_in_progress() -> None:
    tracker = CheckpointStatsTracker()
    run(tracker, 1, REPORTS)
    run(tracker, 2, REPORTS, complete=False)
    half = PendingCheckpoint("job", 3, 9.0, Tasks(REPORTS), started=1)
    tracker.on_triggered(half)
    half.acknowledge(("op", 0), None, at=2)
    assert tracker.counts() == {"triggered": 3, "in_progress": 2, "completed": 1, "failed": 0}
    assert tracker.snapshot()["in_progress"][1] == {"id": 3, "trigger_timestamp": 9.0, "acknowledged": 1, "tasks": 3}
    tracker.on_failed(2, "expired: not complete within 5 s")
    assert tracker.counts() == {"triggered": 3, "in_progress": 1, "completed": 1, "failed": 1}
    snapshot = tracker.snapshot()
    assert snapshot["latest_failed"] == {
        "id": 2,
        "trigger_timestamp": 100.5,
        "reason": "expired: not complete within 5 s",
    }
    assert snapshot["latest"]["id"] == 1


def test_random_checkpoints_against_a_model() -> None:
    rng = random.Random(3)
    tasks = [(f"op{o}", p) for o in range(5) for p in range(rng.randint(4, 16))]
    tracker = CheckpointStatsTracker(10)
    durations, sizes = [], []
    for i in range(16):
        # Sums go beyond 64 bits, as in Flink's test.
        reports = {t: (rng.randrange(128) / 4, rng.randrange(2**31, 2**62)) for t in tasks}
        run(tracker, i, reports, gap=rng.random())
        sizes.append(sum(size for _, size in reports.values()))
        durations.append(tracker.history()[-1].duration)
        assert [(s.id, s.duration, s.size) for s in tracker.history()] == list(
            zip(range(i + 1), durations, sizes, strict=True)
        )[-10:]
        found = tracker.task_stats()
        assert found is not None
        assert {(o, p): (found[o]["duration"][p], found[o]["size"][p]) for o, p in tasks} == reports
        overall = tracker.snapshot()["overall"]
        assert overall["size"]["min"] == min(sizes) and overall["size"]["max"] == max(sizes)
        assert overall["duration"]["avg"] == pytest.approx(sum(durations) / len(durations))
    recent = tracker.snapshot()["recent"]["duration"]
    assert recent["max"] == max(durations[-10:]) and recent["p50"] == sorted(durations[-10:])[4]


def test_old_and_unknown_checkpoints_have_no_stats() -> None:
    tracker = CheckpointStatsTracker(2)
    for i in (1, 2, 3):
        run(tracker, i, REPORTS)
    assert tracker.task_stats(1) is None and tracker.task_summary(1) is None and tracker.task_stats(99) is None
    assert tracker.task_stats(2) is not None and [s.id for s in tracker.history()] == [2, 3]
    for i in range(10, 15):
        tracker.on_failed(i, "x")
    assert [f.id for f in tracker.failures()] == [13, 14] and tracker.counts()["failed"] == 5
    with pytest.raises(InvalidRequestError, match="history is 0"):
        CheckpointStatsTracker(0)


def test_checkpoints_may_complete_out_of_order() -> None:
    tracker = CheckpointStatsTracker(3)
    later = {("op", 0): (9.0, 9)}
    run(tracker, 5, later)
    run(tracker, 4, {("op", 0): (1.0, 1)})
    assert [s.id for s in tracker.history()] == [4, 5]
    assert tracker.task_stats() == {"op": {"duration": [9.0], "size": [9]}} and tracker.snapshot()["latest"]["id"] == 5
    run(tracker, 6, later)
    run(tracker, 1, later)
    assert [s.id for s in tracker.history()] == [4, 5, 6], "the oldest goes, though it came last"
    assert tracker.counts()["completed"] == 4 and tracker.task_stats(1) is None


def test_a_checkpoint_without_figures_counts() -> None:
    tracker = CheckpointStatsTracker()
    pending = run(CheckpointStatsTracker(), 1, REPORTS)
    tracker.on_completed(pending.to_completed(105))
    assert tracker.history()[0].tasks == 3 and tracker.task_stats() is None
    json.dumps(tracker.snapshot())


def test_the_snapshot_is_plain() -> None:
    tracker = CheckpointStatsTracker()
    run(tracker, 1, REPORTS)
    tracker.on_failed(2, "declined")
    snapshot = tracker.snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot

    def types(value: Any) -> set[type]:
        if isinstance(value, dict):
            return set().union(*(types(v) for v in value.values()))
        return set().union(*(types(v) for v in value)) if isinstance(value, list) else {type(value)}

    assert types(snapshot) <= {int, float, str, type(None)}
    assert tracker.snapshot()["latest_tasks"]["duration"]["max"] == 2.0


@pytest.mark.parametrize("n", [1, 2, 3, 10, 99, 100, 101, 1000])
def test_percentiles_are_values_by_nearest_rank(n: int) -> None:
    values = [float(v) for v in range(1, n + 1)]
    random.Random(n).shuffle(values)
    assert percentiles(values) == {
        "p50": math.ceil(n * 0.5),
        "p90": math.ceil(n * 0.9),
        "p99": math.ceil(n * 0.99),
        "max": n,
    }


def test_many_threads() -> None:
    tracker = CheckpointStatsTracker(20)

    def work(worker: int) -> None:
        for i in range(50):
            run(tracker, worker * 50 + i, REPORTS)
            json.dumps(tracker.snapshot())

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert tracker.counts() == {"triggered": 300, "in_progress": 0, "completed": 300, "failed": 0}
    assert [s.id for s in tracker.history()] == list(range(280, 300))
