"""Reads of Spark's commit log and offset log are shared by the threads that need them, without the lock of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.spark_commits import SparkCommits, SparkLogs
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
