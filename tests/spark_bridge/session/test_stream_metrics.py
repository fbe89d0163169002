"""The driver's metrics: Spark's rates and durations, and the figures of operators under Spark's names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator_actor.messages import InputPace
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.session.progress import StateOperatorProgress, StreamMetrics
from spark_bridge.session.settings import Shutdown
from tests.prometheus import KeptMetrics
from tests.spark_bridge.queryable.memory_reads import eventually

PROGRESS = StateOperatorProgress("op", 4, 100, 7, 1, 2, 12.5, 5000, 4, 4, 70, 10.0, {"numDroppedDuplicateRows": 3.0})


@pytest.fixture
def sink() -> KeptMetrics:
    return KeptMetrics()


@pytest.fixture
def metrics(sink: KeptMetrics) -> Iterator[StreamMetrics]:
    def progress_of(run_id: str) -> list[StateOperatorProgress]:
        if run_id == "gone":
            raise HostUnavailableError("no host answers")
        return [PROGRESS]

    made = StreamMetrics(sink, progress_of, Shutdown())
    yield made
    made.close()


def progress(**changes: Any) -> str:
    return json.dumps({"inputRowsPerSecond": 50.0, "processedRowsPerSecond": 80.0, **changes})


def test_rates_and_durations_are_those_of_the_last_batch(sink: KeptMetrics, metrics: StreamMetrics) -> None:
    metrics.add("run1", "totals")
    metrics.batch("run1", progress(durationMs={"addBatch": 1500}))
    assert sink.of("statestore_input_rows_per_second") == {("totals",): 50.0}
    assert sink.of("statestore_processed_rows_per_second") == {("totals",): 80.0}
    assert sink.of("statestore_spark_duration_seconds") == {("totals", "addBatch"): 1.5}
    sink.values.clear()
    metrics.publish()
    assert sink.of("statestore_input_rows_per_second") == {("totals",): 50.0}, "Ray forgets what is not set again"
    assert sink.of("statestore_spark_duration_seconds") == {("totals", "addBatch"): 1.5}
    metrics.remove("run1")
    metrics.publish()
    assert sink.of("statestore_input_rows_per_second") == {("totals",): 0.0}
    metrics.batch("run1", progress())
    assert sink.of("statestore_input_rows_per_second") == {("totals",): 0.0}, "it has ended"


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), None])
def test_non_numeric_rate_is_none(sink: KeptMetrics, metrics: StreamMetrics, rate: float | None) -> None:
    metrics.add("run1", "totals")
    metrics.batch("run1", progress(inputRowsPerSecond=rate))
    assert sink.of("statestore_input_rows_per_second") == {("totals",): 0.0}


def test_operators_have_sparks_names_and_one_without_figures_keeps_no_other(
    sink: KeptMetrics, metrics: StreamMetrics
) -> None:
    metrics.add("gone", "lost")
    metrics.add("run1", "totals")
    metrics.publish()
    assert sink.get("statestore_operator_numRowsTotal", query="totals", operator="op") == 100
    assert sink.get("statestore_operator_commitTimeMs", query="totals", operator="op") == 12.5
    custom = {"query": "totals", "operator": "op", "figure": "numDroppedDuplicateRows"}
    assert sink.get("statestore_operator_customMetrics", **custom) == 3.0


def test_key_skew_is_reported_until_the_query_ends(sink: KeptMetrics, metrics: StreamMetrics) -> None:
    metrics.add("run1", "totals")
    metrics.publish()
    sizes = ("statestore_largest_partition_keys", "statestore_median_partition_keys")
    assert [sink.of(name) for name in sizes] == [{("op", "totals"): 70}, {("op", "totals"): 10.0}]
    metrics.remove("run1")
    metrics.publish()
    assert [sink.of(name) for name in sizes] == [{("op", "totals"): 0}] * 2


def test_metrics_thread_survives_any_error_of_a_refresh(sink: KeptMetrics) -> None:
    failures = [RuntimeError("of Ray, while its coordinator is restarted")]

    def progress_of(run_id: str) -> list[StateOperatorProgress]:
        if failures:
            raise failures.pop()
        return [PROGRESS]

    metrics = StreamMetrics(sink, progress_of, Shutdown(), seconds=0.01)
    metrics.add("run1", "totals")
    eventually(lambda: bool(sink.of("statestore_largest_partition_keys")))
    metrics.close()


def test_a_run_with_an_unexpected_error_keeps_no_other_run_from_its_figures(sink: KeptMetrics) -> None:
    def progress_of(run_id: str) -> list[StateOperatorProgress]:
        if run_id == "run1":
            raise RuntimeError("an actor of Ray died")
        return [PROGRESS]

    metrics = StreamMetrics(sink, progress_of, Shutdown())
    metrics.add("run1", "first")
    metrics.add("run2", "second")
    with pytest.raises(RuntimeError, match="an actor of Ray died"):  # the loop reports it
        metrics.publish()
    metrics.close()
    assert sink.get("statestore_operator_numRowsTotal", query="second", operator="op") == 100


def test_backlog_counts_input_after_the_batch(metrics: StreamMetrics) -> None:
    kafka = {"endOffset": {"clicks": {"0": 10, "1": 7}}, "latestOffset": {"clicks": {"0": 25, "1": 7}}}
    ticks = {"endOffset": 12, "latestOffset": 13}
    assert metrics.pace("run1") is None
    metrics.add("run1", "totals")
    metrics.batch("run1", progress(sources=[kafka, ticks, {"endOffset": None, "latestOffset": None}]))
    assert metrics.pace("run1") == InputPace(50.0, 80.0, 15)
    metrics.batch("run1", progress(sources=[ticks, {"endOffset": {"logOffset": 3}, "latestOffset": {"logOffset": 9}}]))
    assert metrics.pace("run1") == InputPace(50.0, 80.0, None)
    new_partition = {**kafka, "latestOffset": {"clicks": {"0": 25, "1": 7, "2": 4}}}
    metrics.batch("run1", progress(sources=[new_partition]))
    assert metrics.pace("run1") == InputPace(50.0, 80.0, None), "its first offset is not known yet"
