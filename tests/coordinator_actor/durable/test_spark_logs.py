"""Reads of Spark's commit log and offset log are shared by the threads that need them, without the lock of the run.

The number of sources in a checkpoint, by Spark's files of planned batches.

The times of Spark's batches: read from its offset log, each batch's once in a run.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from backends.exceptions import MissingFileError
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.requests import num_requests
from coordinator_actor.durable.spark_commits import SparkCommits, SparkLogs
from coordinator_actor.messages import BatchTimes
from tests.patience import PATIENCE


class Commits:
    """Spark's files; each question waits for ``gate``."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.gate, self.came = threading.Event(), threading.Semaphore(0)
        self.answers: Callable[[int], Any] = lambda batch: batch + 1

    def _ask(self, what: str, batch: int) -> Any:
        self.asked.append((what, batch))
        self.came.release()
        answer = self.answers
        assert self.gate.wait(PATIENCE)
        return answer(batch)

    def has(self, batch: int) -> Any:
        return self._ask("has", batch)

    def times(self, batch: int) -> Any:
        return self._ask("times", batch)

    def wait_for(self, questions: int) -> None:
        for _ in range(questions):
            assert self.came.acquire(timeout=PATIENCE)


@pytest.fixture
def commits() -> Commits:
    return Commits()


def logs_of(commits: Commits) -> SparkLogs:
    return SparkLogs(commits, lambda: 0.0, uses_time=True)  # type: ignore[arg-type]


def test_many_that_need_an_answer_ask_once(commits: Commits) -> None:
    logs = logs_of(commits)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(logs.has, 7) for _ in range(3)]
        commits.wait_for(1)
        commits.gate.set()
        assert [answer.result(PATIENCE) for answer in answers] == [8, 8, 8]
    assert logs.has(7) == 8 and commits.asked == [("has", 7)]
    assert logs.has(8) == 9 and commits.asked[1:] == [("has", 8)]


def test_opening_a_batch_sends_its_requests_concurrently(commits: Commits) -> None:
    logs = logs_of(commits)
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(logs.look_ahead, 5, is_before_open=True)
        commits.wait_for(2)  # neither has an answer yet
        commits.gate.set()
        ahead.result(PATIENCE)
    assert sorted(commits.asked) == [("has", 4), ("times", 5)]
    assert logs.times(5) == 6 and logs.has(4) == 5 and len(commits.asked) == 2


def test_a_negative_answer_that_may_be_older_than_the_question_is_asked_again(commits: Commits) -> None:
    logs = logs_of(commits)
    commits.answers = lambda batch: False
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(logs.has, 3)
        commits.wait_for(1)
        commits.answers = lambda batch: True  # committed behind the first question
        late = pool.submit(logs.has, 3)
        commits.gate.set()
        assert early.result(PATIENCE) is False and late.result(PATIENCE) is True


def test_an_error_reaches_the_caller_that_asked(commits: Commits) -> None:
    logs = logs_of(commits)

    def fails(batch: int) -> Any:
        commits.answers = lambda batch: True
        raise OSError("storage fails")

    commits.answers = fails
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(logs.has, 3)
        commits.wait_for(1)
        second = pool.submit(logs.has, 3)
        commits.gate.set()
        with pytest.raises(OSError, match="storage fails"):
            first.result(PATIENCE)
        assert second.result(PATIENCE) is True


def test_the_watermark_of_a_version_is_that_of_its_batch(tmp_path: Path) -> None:
    """From storage before a run has opened a batch, and then from the batch itself, or from the next one."""
    storage = CheckpointStorage.open(str(tmp_path))
    for batch, watermark in enumerate((0, 5000, 7000)):
        storage.put_new(
            f"offsets/{batch}", f'v1\n{{"batchWatermarkMs":{watermark},"batchTimestampMs":9}}\n{{}}'.encode()
        )
    logs = SparkLogs(SparkCommits(storage), lambda: 0.0, uses_time=True)
    assert [logs.watermark_of(version) for version in (0, 1, 2, 3, 4)] == [None, None, 5000, 7000, None]
    logs.times_for_tasks(2)
    for batch in range(3):
        storage.delete(f"offsets/{batch}")
    assert [logs.watermark_of(version) for version in (2, 3)] == [5000, 7000]


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
