"""The times of Spark's batches: read from its offset log, each batch's once in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.exceptions import MissingFileError
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.requests import num_requests
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.messages import BatchTimes


def plan(checkpoint: Path, batch: int) -> None:
    (checkpoint / "offsets").mkdir(exist_ok=True)
    times = f'{{"batchWatermarkMs":{batch * 10},"batchTimestampMs":{batch * 1000}}}'
    (checkpoint / "offsets" / str(batch)).write_text(f"v1\n{times}\n{{}}")


def test_a_batch_takes_one_request_and_rows_are_late_by_the_watermark_before(tmp_path: Path) -> None:
    storage = CheckpointStorage.open(str(tmp_path), fsync=False)
    commits = SparkCommits(storage)
    for batch in range(4):
        plan(tmp_path, batch)
    asked = num_requests(commits.used)
    assert commits.times(1) == BatchTimes(1000, 10, 0)
    assert num_requests(commits.used) - asked == 2, "nothing of this run is known before its first batch"
    assert [commits.times(batch) for batch in (2, 3)] == [BatchTimes(2000, 20, 10), BatchTimes(3000, 30, 20)]
    assert num_requests(commits.used) - asked == 4
    assert commits.times(1) == BatchTimes(1000, 10, 0), "of a batch that is not behind the last one all is read"
    assert SparkCommits(storage).times(0) == BatchTimes(0, 0, 0)


def test_missing_batch_times_are_read_again(tmp_path: Path) -> None:
    commits = SparkCommits(CheckpointStorage.open(str(tmp_path), fsync=False))
    plan(tmp_path, 1)
    with pytest.raises(MissingFileError, match="offsets/0"):
        commits.times(1)
    plan(tmp_path, 0)
    assert commits.times(1) == BatchTimes(1000, 10, 0)
    with pytest.raises(MissingFileError, match="offsets/2"):
        commits.times(2)
    plan(tmp_path, 2)
    assert commits.times(2) == BatchTimes(2000, 20, 10)
