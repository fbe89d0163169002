"""A host's metrics, from its own description: its memory, its work, and the requests that it has answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.storage.requests import RequestCounts
from coordinator_actor.messages import DROPPED_ELEMENTS, OperatorFigures, OperatorSpec
from spark_bridge.host.instances import in_columns
from spark_bridge.host_actor import MAX_PARTITIONS, HostMetrics
from spark_bridge.overview.from_cluster import overview_of_cluster
from spark_bridge.queryable.server.limits import RequestStatistics
from tests.coordinator_actor.coordinator_world import SCHEMA, World
from tests.prometheus import KeptMetrics
from tests.spark_bridge.host.host_steps import ch, make_host, plan_spark, reg, run_task, task

NAMES = {"run1": "totals"}


@pytest.fixture
def sink() -> KeptMetrics:
    return KeptMetrics(host="host-0")


def described(*instances: dict[str, Any], **changes: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("loads", "commits", "snapshots", "keys_read", "keys_written"), 0)
    disk = {"evictions": 3, "evicted_bytes": 300, "reread_bytes": 200, "budget": None, "evicted_seconds": 1.0}
    rest = {"memory": {"host_memory": 1 << 20}, "loading": [], "waiting_commits": 0, "disk": disk}
    return {**counts, **rest, "instances": list(instances), **changes}


def instance(partition: int, keys: int = 10, of: int = 2, version: int = 9, snapshot: int = 7) -> dict[str, Any]:
    return {
        "run_id": "run1",
        "query_id": "q",
        "operator": "op",
        "partition": partition,
        "num_partitions": of,
        "keys": keys,
        "memory_bytes": keys * 100,
        "version": version,
        "snapshot_version": snapshot,
    }


def test_evictions_are_metrics(sink: KeptMetrics, tmp_path: Path) -> None:
    metrics = HostMetrics(sink, RequestStatistics(), RequestCounts(), restarts=0)
    metrics.publish(described(), NAMES)
    for name, value in (("evictions", 3), ("evicted_bytes", 300), ("reread_bytes", 200)):
        assert sink.get(f"statestore_disk_{name}_total") == value


def test_metrics_of_a_real_host(tmp_path: Path, sink: KeptMetrics) -> None:
    world = World(tmp_path)
    coordinator = world.coordinator(0)
    host = make_host(world, coordinator, 0, tmp_path, "a")
    registration = world.registration("run1", operators=(OperatorSpec("op", 2, SCHEMA, backend="file"),))
    assert coordinator.register_query(registration).refusal is None
    plan_spark(world, 0)
    for p in range(2):
        run_task([host], 0, p, "run1", b"x")
    metrics = HostMetrics(sink, RequestStatistics(), host.files.requests, restarts=3)
    for _ in range(2):
        metrics.publish(host.describe(), NAMES)
    assert sink.get("statestore_host_restarts") == 3
    assert sink.get("statestore_commits_total") == 2
    assert sink.get("statestore_memory_limit_bytes") == host.memory.limit
    assert set(sink.of("statestore_keys")) == {("op", "0", "totals"), ("op", "1", "totals")}
    host.close()


def test_elements_that_limits_have_dropped_are_counted_by_the_last_attempt_at_each_batch(tmp_path: Path) -> None:
    world = World(tmp_path)
    coordinator = world.coordinator(0)
    host = make_host(world, coordinator, 0, tmp_path, "a")
    assert coordinator.register_query(reg(world)).refusal is None
    told = []
    for batch, attempts in enumerate((((3,), (5,)), ((2,),), ((0,),))):
        plan_spark(world, batch)
        for number, (dropped,) in enumerate(attempts):
            for p in range(2):
                of = task(batch, p, attempt=f"{batch}-{number}-{p}")
                host.open(of)
                figures = OperatorFigures(custom={DROPPED_ELEMENTS: float(dropped)} if p == 0 else {})
                host.commit(of, ch(b"x"), {}, figures)
        world.commit_spark(batch)
        coordinator.batch_committed("run1", batch)
        columns = in_columns(host.describe())["partitions"]
        told.append(dict(zip(columns["partition"], columns["dropped_elements"], strict=True)))
    assert told == [{0: 5, 1: None}, {0: 7, 1: None}, {0: 7, 1: None}]
    coordinator_says = {**coordinator.describe(), "namespace": "n"}
    (query,) = overview_of_cluster(coordinator_says, [in_columns(host.describe())], now_ms=0).queries
    assert query.operators[0].dropped_elements == 7
    host.close()


def test_few_partitions_have_separate_labels(sink: KeptMetrics) -> None:
    metrics = HostMetrics(sink, RequestStatistics(), RequestCounts(), 0)
    metrics.publish(described(instance(0), instance(1, 30, snapshot=2)), NAMES)
    assert sink.of("statestore_keys") == {("op", "0", "totals"): 10, ("op", "1", "totals"): 30}
    assert sink.of("statestore_partition_memory_bytes")["op", "1", "totals"] == 3000
    assert sink.of("statestore_snapshot_lag_versions") == {("op", "totals"): 7}
    many = [instance(p, of=MAX_PARTITIONS + 1) for p in range(5)]
    metrics.publish(described(*many), NAMES)
    assert sink.of("statestore_keys")["op", "all", "totals"] == 50


def test_gauges_of_released_partitions_drop_to_zero(sink: KeptMetrics) -> None:
    metrics = HostMetrics(sink, RequestStatistics(), RequestCounts(), 0)
    metrics.publish(described(instance(0), instance(1)), NAMES)
    metrics.publish(described(instance(1, 11)), NAMES)
    assert sink.of("statestore_keys") == {("op", "0", "totals"): 0, ("op", "1", "totals"): 11}
    sink.values.clear()
    metrics.publish(described(instance(1, 12)), NAMES)
    assert sink.of("statestore_keys") == {("op", "1", "totals"): 12}, "said once"
    metrics.publish(described(), NAMES)
    assert sink.of("statestore_snapshot_lag_versions") == {("op", "totals"): 0}


def test_requests_fall_into_buckets_that_add_up(sink: KeptMetrics) -> None:
    statistics = RequestStatistics()
    metrics = HostMetrics(sink, statistics, RequestCounts(), 0)
    for _ in range(99):
        statistics.observe("op", "lookup", 0.0007)
    statistics.observe("op", "lookup", 40.0, failed=True)
    for _ in range(2):
        metrics.publish(described(), NAMES)
    labels = {"operator": "op", "verb": "lookup"}
    assert sink.get("statestore_requests_total", **labels) == 100
    assert sink.get("statestore_request_failures_total", **labels) == 1
    buckets = {le: count for (le, _, _), count in sink.of("statestore_request_seconds_bucket").items()}
    assert {le: buckets.get(le) for le in ("0.0005", "0.001", "10", "+Inf")} == {
        "0.0005": None,
        "0.001": 99,
        "10": 99,
        "+Inf": 100,
    }
    statistics.observe("op", "lookup", 0.0007)
    metrics.publish(described(), NAMES)
    assert sink.get("statestore_request_seconds_bucket", **labels, le="+Inf") == 101


def test_counter_continues_after_a_reset(sink: KeptMetrics) -> None:
    metrics = HostMetrics(sink, RequestStatistics(), RequestCounts(), 0)
    for loads in (5, 7, 2):
        metrics.publish(described(loads=loads), NAMES)
    assert sink.get("statestore_loads_total") == 9


def test_requests_to_storage_their_failures_and_times_are_counted(sink: KeptMetrics) -> None:
    requests = RequestCounts()
    metrics = HostMetrics(sink, RequestStatistics(), requests, 0)
    for seconds, failed in ((0.002, False), (0.2, False), (70.0, True)):
        requests.note("write", "ck")
        requests.took("write", seconds, failed)
    for _ in range(2):
        metrics.publish(described(), NAMES)
    assert sink.of("statestore_storage_requests_total") == {("put",): 3}
    assert sink.of("statestore_storage_failures_total") == {("put",): 1}
    took = {le: count for (_, le), count in sink.of("statestore_storage_request_seconds_bucket").items()}
    assert (took["0.0025"], took["0.25"], took["60"], took["+Inf"]) == (1, 2, 2, 3)
