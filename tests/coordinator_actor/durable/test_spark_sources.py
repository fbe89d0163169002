"""How many sources a checkpoint goes on with, as Spark's files of planned batches say it."""

from __future__ import annotations

import uuid

import pytest

from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.spark_commits import SparkCommits

TIMES = '{"batchWatermarkMs":0,"batchTimestampMs":1700000000000,"conf":{}}'


@pytest.fixture
def checkpoint() -> CheckpointStorage:
    return CheckpointStorage.open(f"memory://{uuid.uuid4().hex}")


def test_a_query_that_has_planned_no_batch_may_have_any_sources(checkpoint: CheckpointStorage) -> None:
    assert SparkCommits(checkpoint).num_sources() is None


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["v1", TIMES, '{"logOffset":0}'], 1),
        (["v1", TIMES, '{"logOffset":0}', "12"], 2),
        (["v1", TIMES, "-", "12"], 2),  # Spark writes "-" for a source that has given nothing
        (["v2", TIMES, '{"0":"x","1":"y"}'], None),
    ],
)
def test_the_last_planned_batch_has_a_line_for_each_source(
    checkpoint: CheckpointStorage, lines: list[str], expected: int | None
) -> None:
    checkpoint.replace("offsets/9", "\n".join(["v1", TIMES, "1", "2", "3"]).encode())
    checkpoint.replace("offsets/10", "\n".join(lines).encode())
    assert SparkCommits(checkpoint).num_sources() == expected
    checkpoint.replace("offsets/10", ("\n".join(lines) + "\n").encode())
    assert SparkCommits(checkpoint).num_sources() == expected
