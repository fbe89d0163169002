"""The number of sources in a checkpoint, by Spark's files of planned batches."""

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
    assert SparkCommits(checkpoint).sources() is None


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["v1", TIMES, '{"logOffset":0}'], (1, set(), set())),
        (["v1", TIMES, '{"logOffset":0}', "12"], (2, {1}, {1})),
        (["v1", TIMES, "-", "12"], (2, {1}, {1})),  # Spark writes "-" for a source that has given nothing
        (["v1", TIMES, "12", "-"], (2, {0}, set())),  # another source whose offsets are numbers
        (["v2", TIMES, '2:{"logOffset":0}', "1:12"], (None, {1}, {1})),
        (["v2", TIMES, "0:12"], (None, {0}, set())),
        (["v2", TIMES, 'clicks:{"logOffset":0}', "1:12"], None),
    ],
)
def test_the_last_planned_batch_names_the_sources(
    checkpoint: CheckpointStorage, lines: list[str], expected: tuple[int | None, set[int], set[int]] | None
) -> None:
    checkpoint.replace("sources/0/0", b'v1\n{"path":"file:///in/0.parquet"}')
    checkpoint.replace("sources/1/0", b"v1\n1795803193348")
    checkpoint.replace("offsets/9", "\n".join(["v1", TIMES, "1", "2", "3"]).encode())
    checkpoint.replace("offsets/10", "\n".join(lines).encode())
    assert SparkCommits(checkpoint).sources() == expected
    checkpoint.replace("offsets/10", ("\n".join(lines) + "\n").encode())
    assert SparkCommits(checkpoint).sources() == expected
