"""Figures of partitions add up to an operator's, also while one of them is held by two hosts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import ray
from pyspark.sql.streaming import listener
from ray.exceptions import ActorUnavailableError

from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.session import progress as progress_module
from spark_bridge.session.progress import StateOperatorProgress, newest_progress, progress_of_batch
from spark_bridge.session.state_cluster import StateCluster


class Cluster:
    """A fake state cluster that reports one run of one operator, and its hosts."""

    def __init__(self, *hosts: list[dict[str, Any]]) -> None:
        self.hosts = [{"instances": instances} for instances in hosts]
        self.coordinator = self

    def describe(self) -> dict[str, Any]:
        return {"queries": [{"run_id": "r", "completed_version": 3, "operators": {"op": 2}}]}

    def describe_hosts(self) -> list[dict[str, Any]]:
        return self.hosts


def instance(partition: int, keys: int, *versions: int) -> dict[str, Any]:
    figures = {"num_rows_updated": keys, "num_rows_removed": 1, "num_rows_dropped_by_watermark": 0, "custom": {}}
    commits = {v: {"ms": {"changelog_ms": 2.0, "acknowledge_ms": 1.0}, "keys": None, **figures} for v in versions}
    held = {"operator": "op", "run_id": "r", "version": 3, "memory_bytes": 10}
    return {**held, "partition": partition, "keys": keys, "commits": commits}


def test_a_partition_held_twice_counts_once() -> None:
    cluster: Any = Cluster([instance(0, 5, 2, 3)], [instance(1, 7, 3)], [instance(1, 6, 2)])
    (progress,) = newest_progress(cluster, "r", 2)
    assert (progress.batch_id, progress.num_rows_total, progress.num_rows_updated) == (2, 12, 12)
    assert (progress.num_rows_removed, progress.commit_time_ms, progress.memory_used_bytes) == (2, 6.0, 20)
    assert progress.num_state_store_instances == progress.num_shuffle_partitions == 2
    assert progress.custom_metrics == {"changelog_ms": 4.0, "acknowledge_ms": 2.0}


def test_the_largest_and_the_median_partition_are_those_of_any_number_of_partitions() -> None:
    sizes = [*range(1, 500), 100_000]
    cluster: Any = Cluster(*([instance(p, keys, 3) for p, keys in enumerate(sizes) if p % 3 == h] for h in range(3)))
    (progress,) = newest_progress(cluster, "r", 2)
    assert (progress.num_rows_largest_partition, progress.num_rows_median_partition) == (100_000, 250.5)
    moved: Any = Cluster([instance(0, 5, 2), instance(1, 7, 3)], [instance(0, 50, 3)])
    (progress,) = newest_progress(moved, "r", 2)
    assert (progress.num_rows_largest_partition, progress.num_rows_median_partition) == (50, 28.5), "held twice"


def test_version_that_is_visible_but_not_applied_is_awaited() -> None:
    applied, early = instance(0, 5, 3), instance(1, 0, 3)
    del early["commits"][3]["keys"]
    cluster: Any = Cluster([applied], [early])
    looks = iter([[early], [instance(1, 7, 3)]])
    cluster.describe_hosts = lambda: [{"instances": [applied]}, {"instances": next(looks)}]
    (progress,) = newest_progress(cluster, "r", 2)
    assert (progress.num_rows_total, next(looks, None)) == (12, None)


def test_a_host_that_is_starting_again_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own error would end the loop that publishes the figures with a traceback."""
    answers: list[Any] = [ActorUnavailableError("The actor is restarting.", None), [{"instances": [instance(0, 5, 3)]}]]

    def get(*_: Any, **__: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    cluster: Any = Cluster()
    cluster.describe_hosts = lambda: StateCluster.describe_hosts(cluster)
    (progress,) = newest_progress(cluster, "r", 2)
    assert (progress.num_rows_total, answers) == (5, [])
    monkeypatch.setattr(progress_module, "PROGRESS_WAIT_SECONDS", -1.0)
    answers.append(ActorUnavailableError("The actor is restarting.", None))
    with pytest.raises(HostUnavailableError, match=r"A host did not answer: .*restarting.* Ray starts hosts"):
        newest_progress(cluster, "r", 2)


def test_no_progress_before_the_first_batch() -> None:
    cluster: Any = Cluster()
    cluster.describe = lambda: {"queries": []}
    assert newest_progress(cluster, "r") == []


def test_a_batch_has_its_own_figures_when_others_have_followed() -> None:
    held = instance(0, 9, 2, 3)
    held["commits"][2] |= {"keys": 4, "num_rows_updated": 4}
    held["commits"][3] |= {"keys": 9, "num_rows_updated": 6}
    cluster: Any = Cluster([held])
    told = [p for batch in (1, 2) for p in progress_of_batch(cluster, "r", batch)]
    assert [(p.batch_id, p.num_rows_total, p.num_rows_updated) for p in told] == [(1, 4, 4), (2, 9, 6)]
    (forgotten,) = progress_of_batch(cluster, "r", 0)
    assert (forgotten.batch_id, forgotten.num_rows_total, forgotten.num_state_store_instances) == (0, 9, 0)
    (newest,) = newest_progress(cluster, "r", 1)
    assert newest.batch_id == 2


def test_figures_have_the_names_of_sparks_json() -> None:
    progress = StateOperatorProgress("op", 7, num_rows_total=3, custom_metrics={"numDroppedDuplicateRows": 2.0})
    told = json.loads(progress.json)
    assert told == progress.as_dict()
    assert (told["operatorName"], told["batchId"], told["numRowsTotal"]) == ("op", 7, 3)
    assert told["customMetrics"] == {"numDroppedDuplicateRows": 2.0}
    theirs = {name for name in vars(listener.StateOperatorProgress) if name.startswith(("num", "commit", "memory"))}
    assert theirs <= set(told)
    assert len(theirs) >= 8
