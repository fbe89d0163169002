"""The coordinator's metrics: each checkpoint is counted once, and gauges say how a query is now."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.storage.requests import RequestCounts
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import CommitFigures
from coordinator_actor.metrics import QueryMetrics
from tests.coordinator_actor.coordinator_world import World, acknowledge, batches, begin, staged
from tests.prometheus import KeptMetrics

REQUESTS = RequestCounts()
for _ in range(3):
    REQUESTS.note("write", "ck")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def published(sink: KeptMetrics, metrics: QueryMetrics, c: Coordinator) -> KeptMetrics:
    metrics.publish(*c.counts(), c.running(), REQUESTS)
    return sink


def made(world: World) -> tuple[KeptMetrics, QueryMetrics]:
    sink = KeptMetrics()
    return sink, QueryMetrics(sink, lambda: world.now)


def test_a_checkpoint_is_counted_once_with_its_steps_and_phases(world: World) -> None:
    sink, metrics = made(world)
    c = begin(world, name="totals")
    world.plan_spark(0)
    first = staged(world, c, 0, 0, CommitFigures(5, 4, 1, 2, {"put": 7}, {"get": 10.0}))
    second = staged(world, c, 0, 1, CommitFigures(6, 5, 0, 0, {"put": 2}, {"get": 30.0}, 4))
    world.now += 1.0
    acknowledge(c, first)
    published(sink, metrics, c)
    assert sink.get("statestore_batch_seconds", query="totals") == 1.0
    assert sink.of("statestore_checkpoints_total") == {}
    world.now += 2.0
    acknowledge(c, second)
    world.now += 4.0
    world.commit_spark(0)
    c.batch_committed("run1", 0)
    for _ in range(2):
        published(sink, metrics, c)
    counted = {
        name: sink.get(f"statestore_{name}_total", query="totals")
        for name in (
            "checkpoints",
            "rows",
            "keys_updated",
            "keys_removed",
            "late_rows",
            "duplicate_rows",
            "checkpoint_delta_bytes",
        )
    }
    assert counted == {
        "checkpoints": 1,
        "rows": 11,
        "keys_updated": 9,
        "keys_removed": 1,
        "late_rows": 2,
        "duplicate_rows": 4,
        "checkpoint_delta_bytes": first.file.size + second.file.size,
    }
    assert sink.of("statestore_retried_tasks_total") == {}
    assert sink.of("statestore_checkpoint_step_seconds_total") == {("totals", "get"): pytest.approx(0.04)}
    phases = {"acknowledge": 2.0, "tasks": 1.0, "manifest": 0.0, "commit": 4.0}
    assert sink.of("statestore_checkpoint_phase_seconds_total") == {
        ("totals", p)[::-1]: s for p, s in phases.items() if s
    }
    assert list(sink.observed.values()) == [[3.0]]
    assert sink.of("statestore_storage_requests_total") == {("", "put"): 3}
    # Nine puts by hosts; the coordinator has written the manifest.
    assert sink.get("statestore_query_storage_requests_total", query="totals", kind="put") >= 10
    assert sink.get("statestore_query_storage_bytes_total", query="totals", direction="sent") > 100


def test_gauges_show_the_age_of_the_newest_version_and_the_usual_interval(world: World) -> None:
    sink, metrics = made(world)
    c = begin(world, name="totals")
    for batch in range(4):
        world.now += 10.0
        batches(world, c, batch, batch)
    world.now += 7.0
    published(sink, metrics, c)
    labels = {"query": "totals"}
    assert sink.get("statestore_query_running", **labels) == 1
    assert sink.get("statestore_freshness_seconds", **labels) == pytest.approx(7.0)
    assert sink.get("statestore_last_checkpoint_timestamp_seconds", **labels) == pytest.approx(world.now - 7.0)
    assert sink.get("statestore_usual_interval_seconds", **labels) == pytest.approx(10.0)
    assert sink.get("statestore_completed_version", **labels) == 4
    assert sink.get("statestore_batch_seconds", **labels) == 0
    assert sink.of("statestore_event_time_lag_seconds") == {}, "without a watermark"


def test_a_batch_counts_from_where_its_driver_is_at_work_until_spark_has_committed_it(world: World) -> None:
    sink, metrics = made(world)
    c = begin(world, name="totals")

    def batch_seconds(is_at_work: bool = True) -> float:
        assert c.driver_heartbeat("run1", is_at_work=is_at_work)
        described = c.describe()["queries"][0]["batch_begun_ms"]
        seconds = published(sink, metrics, c).get("statestore_batch_seconds", query="totals")
        assert seconds == (0 if described is None else world.now - described / 1000)
        return seconds

    assert batch_seconds(is_at_work=False) == 0, "the stream looks for rows"
    batch_seconds()
    world.now += 40.0
    assert batch_seconds() == 40.0, "no task has opened the state yet"
    world.plan_spark(0)
    tasks = [staged(world, c, 0, p, CommitFigures()) for p in range(2)]
    world.now += 1.0
    assert batch_seconds() == 41.0
    for task in tasks:
        acknowledge(c, task)
    world.now += 9.0
    assert batch_seconds() == 50.0, "all is stored, and the sink takes its time"
    world.commit_spark(0)
    assert batch_seconds() == 0, "this is the next batch"
    assert sink.get("statestore_freshness_seconds", query="totals") == 50.0, "since it began to read"
    world.now += 2.0
    assert batch_seconds() == 2.0
    assert batch_seconds(is_at_work=False) == 0


def test_a_query_that_has_ended_runs_no_more_and_a_restarted_one_does(world: World) -> None:
    sink, metrics = made(world)
    c = begin(world, name="totals")
    published(sink, metrics, c)
    c.deactivate_instances("run1")
    published(sink, metrics, c)
    assert sink.get("statestore_query_running", query="totals") == 0
    assert c.register_query(world.registration("run2", name="totals")).refusal is None
    published(sink, metrics, c)
    assert sink.get("statestore_query_running", query="totals") == 1
    assert sink.get("statestore_epoch", query="totals") == 2


def test_versions_completed_before_the_coordinator_began_are_not_counted_again(world: World) -> None:
    c = begin(world)
    batches(world, c, 0, 2)
    world.now += 100.0
    sink, metrics = made(world)
    published(sink, metrics, c)
    assert sink.of("statestore_checkpoints_total") == {}
    batches(world, c, 3, 3)
    published(sink, metrics, c)
    assert set(sink.of("statestore_checkpoints_total").values()) == {1}


def test_checkpoints_of_an_earlier_run_are_not_counted_again(world: World) -> None:
    """A restarted query reads the history of its earlier runs, which this process has counted already."""
    sink, metrics = made(world)
    c = begin(world, name="totals")
    batches(world, c, 0, 2)
    world.now += 100.0
    published(sink, metrics, c)
    c.deactivate_instances("run1")
    published(sink, metrics, c)
    assert c.register_query(world.registration("run2", name="totals")).refusal is None
    for run in c.running():
        run.history.write(world.now)
        assert len(run.history.records()) == 3
    published(sink, metrics, c)
    assert sink.get("statestore_checkpoints_total", query="totals") == 3
