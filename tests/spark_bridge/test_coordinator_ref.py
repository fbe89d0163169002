"""Spark's state store messages to the real actor: from the driver, a plain Ray task, and a PySpark task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from pyspark.sql import SparkSession

from backends import StateStoreId, StateStoreProviderId
from coordinator_actor import StateStoreCoordinatorRef
from coordinator_actor.exceptions import CoordinatorStoppedError

pytestmark = pytest.mark.spark


def provider(partition: int, run: str = "run-ref") -> StateStoreProviderId:
    return StateStoreProviderId(StateStoreId("/ck", "op", partition), run)


def test_messages_from_the_driver(spark: SparkSession) -> None:
    ref = StateStoreCoordinatorRef.for_driver()
    assert ref.get_location(provider(0)) is None
    assert ref.verify_if_instance_active(provider(0), "e1") is False
    assert ref.report_active_instance(provider(0), "hostA", "e1").result(timeout=30) == []
    assert ref.verify_if_instance_active(provider(0), "e1") is True
    assert ref.get_location(provider(0)) == "executor_hostA_e1"
    moved = ref.report_active_instance(provider(0), "hostB", "e2")
    assert moved.result(timeout=30) == []
    other = ref.report_active_instance(provider(1), "hostA", "e1", (provider(0),))
    assert other.result(timeout=30) == [provider(0)]
    assert ref.deactivate_instances("run-ref") is True
    assert ref.get_location(provider(0)) is None


def test_references_made_anywhere_reach_the_same_coordinator(spark: SparkSession) -> None:
    driver = StateStoreCoordinatorRef.for_driver()
    driver.report_active_instance(provider(7), "hostA", "e1").result(timeout=30)

    @ray.remote(num_cpus=0)
    def plain_ray() -> str | None:
        return StateStoreCoordinatorRef.for_executor().get_location(provider(7))

    assert ray.get(plain_ray.remote(), timeout=60) == "executor_hostA_e1"

    def in_task(rows: Iterator[Any]) -> Iterator[Any]:
        import sys

        ref = StateStoreCoordinatorRef.for_executor()
        held = provider(7)
        yield (
            ref.get_location(held),
            ref.verify_if_instance_active(held, "e1"),
            ref.report_active_instance(provider(8), "hostT", "e9", (held,)).result(timeout=30) == [held],
            "ray" in sys.modules and sys.modules["ray"].is_initialized(),
        )

    assert spark.sparkContext.parallelize([0], 1).mapPartitions(in_task).collect() == [
        ("executor_hostA_e1", True, True, False)
    ]
    assert driver.get_location(provider(8)) == "executor_hostT_e9"
    driver.deactivate_instances("run-ref")


def test_a_coordinator_that_is_not_there_says_so(spark: SparkSession) -> None:
    with pytest.raises(CoordinatorStoppedError, match="'nobody'"):
        StateStoreCoordinatorRef.for_executor(name="nobody")
    ref = StateStoreCoordinatorRef.for_driver(name="short-lived")
    assert ref.get_location(provider(0)) is None
    ref.stop()
    with pytest.raises(CoordinatorStoppedError, match="short-lived"):
        ref.get_location(provider(0))
