"""The driver's spans: the root of a batch from Spark's progress, its steps, and a batch that has failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends import spans
from spark_bridge.session.progress import BatchTraces
from tests.collector import Recorded, recorded_spans
from tests.coordinator_actor.coordinator_world import World

MS = 1_000_000
BEGAN = 1_764_090_000_123 * MS
STEPS = {"latestOffset": 5, "walCommit": 20, "getBatch": 1, "queryPlanning": 10, "addBatch": 300, "commitOffsets": 30}
PROGRESS = {
    "timestamp": "2025-11-25T17:00:00.123Z",
    "batchId": 4,
    "numInputRows": 500,
    "durationMs": {**STEPS, "triggerExecution": 400},
    "sources": [{"endOffset": {"a secret": 1}}],
}


def traced(root: Path, *, progress: object = PROGRESS, exception: str | None = None) -> Recorded:
    with recorded_spans() as recorded:
        traces = BatchTraces()
        traces.add(World(root).registration(), 4)
        traces.batch("run1", 4, json.dumps(progress))
        traces.batch("of no state", 4, json.dumps(progress))
        traces.end("run1", exception)
        traces.end("run1", exception)
    return recorded


def test_root_span_of_a_batch_has_sparks_duration(tmp_path: Path) -> None:
    recorded = traced(tmp_path)
    root = recorded.one("batch")
    assert (root.context.trace_id, root.context.span_id) == spans.batch("run1", 5).ids
    assert (root.start_time, root.end_time) == (BEGAN, BEGAN + 400 * MS)
    assert root.attributes == {
        "statestore.run_id": "run1",
        "statestore.version": 5,
        "statestore.query_id": "q",
        "statestore.query_name": "name",
        "statestore.rows": 500,
    }
    assert "secret" not in "".join(s.to_json() for s in recorded.all())


def test_sparks_steps_are_in_order(tmp_path: Path) -> None:
    recorded = traced(tmp_path)
    root = recorded.one("batch")
    steps = sorted((s for s in recorded.all() if s is not root), key=lambda s: s.start_time or 0)
    assert [s.name for s in steps] == [f"spark.{name}" for name in STEPS]
    assert {s.parent.span_id for s in steps if s.parent} == {root.context.span_id}
    starts = [((s.start_time or 0) - BEGAN) // MS for s in steps]
    assert starts == [0, 5, 25, 26, 70, 370]
    assert (steps[-1].end_time or 0) == root.end_time


@pytest.mark.parametrize("steps", [{}, {"latestOffset": 3, "triggerExecution": 3}])
def test_a_trigger_without_a_batch_has_no_trace(tmp_path: Path, steps: dict[str, int]) -> None:
    assert traced(tmp_path, progress={**PROGRESS, "durationMs": steps}).all() == ()


def test_the_batch_that_a_query_fails_in_has_a_root_with_the_class_of_the_error(tmp_path: Path) -> None:
    said = "org.apache.spark.SparkException: Job aborted: ValueError: the salary of Alice\n\tat org.apache"
    recorded = traced(tmp_path, exception=said)
    _, failed = recorded.named("batch")
    assert (failed.context.trace_id, failed.context.span_id) == spans.batch("run1", 6).ids
    assert failed.status.description == "SparkException"
    assert failed.start_time == recorded.named("batch")[0].end_time
    assert "Alice" not in failed.to_json()


def test_nothing_is_kept_while_tracing_is_off(tmp_path: Path) -> None:
    traces = BatchTraces()
    traces.add(World(tmp_path).registration(), 4)
    traces.batch("run1", 4, "this is not even read")
    assert traces._runs == {}
