"""Reports of storage that fails or gives no answer: the last minute, by location, without signatures."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from backends.exceptions import StorageError
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.failures import LONGEST_TEXT, MAX_FAILURES, MAX_TRACKED_LOCATIONS, TroubleTracker, for_people
from backends.storage.requests import RequestCounts


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fails(trouble: TroubleTracker, location: str = "s3://b/ck", text: str = "it is full") -> None:
    trouble.ended(trouble.began("put", location), OSError(text))


def test_storage_that_answers_is_not_reported() -> None:
    clock = Clock()
    trouble = TroubleTracker(clock)
    quick, slow = trouble.began("get", "a"), trouble.began("get", "a")
    clock.now += 4.9
    trouble.ended(quick, None)
    assert trouble.read() == []
    trouble.ended(slow, None)
    clock.now += 60
    assert trouble.read() == []


def test_failures_are_reported_for_a_minute_and_whether_they_are_over() -> None:
    clock = Clock()
    trouble = TroubleTracker(clock)
    fails(trouble, text="of before")
    clock.now += 40
    fails(trouble)
    clock.now += 3
    (told,) = trouble.read()
    assert (told["failures"], told["error"], told["failed_seconds"]) == (2, "put: it is full", 3.0)
    assert not told["answered_since"]
    trouble.ended(trouble.began("put", "s3://b/ck"), None)
    assert trouble.read()[0]["answered_since"]
    clock.now += 20
    assert trouble.read()[0]["failures"] == 1  # the first is more than a minute old
    fails(trouble)
    assert not trouble.read()[0]["answered_since"]
    clock.now += 60
    assert trouble.read() == []


def test_requests_without_an_answer_are_reported_with_the_longest_wait() -> None:
    clock = Clock()
    trouble = TroubleTracker(clock)
    first = trouble.began("put", "a")
    clock.now += 20
    trouble.began("get", "a")
    trouble.began("get", "b")
    clock.now += 6
    assert [(t["location"], t["waiting"], t["waiting_seconds"]) for t in trouble.read()] == [
        ("a", 2, 26.0),
        ("b", 1, 6),
    ]
    trouble.ended(first, OSError("it broke"))
    assert [(t["location"], t["waiting"], t["failures"]) for t in trouble.read()] == [("a", 1, 1), ("b", 1, 0)]


def test_a_text_is_bounded_and_has_no_signature() -> None:
    trouble = TroubleTracker(Clock())
    fails(trouble, text=f"url (https://a.blob/c?sv=1&sig=secret) {'x' * 1000} why?\nmore")
    error = trouble.read()[0]["error"]
    assert error.startswith("put: url (https://a.blob/c?...") and "secret" not in error and "more" not in error
    assert error.endswith("xxx why?")  # what storage says was wrong stands at the end
    assert len(error) <= LONGEST_TEXT + len("put: ")


def test_storage_that_refuses_writes_and_answers_reads_has_not_answered() -> None:
    clock = Clock()
    trouble = TroubleTracker(clock)
    fails(trouble, "a")
    clock.now += 1
    trouble.ended(trouble.began("get", "a"), None)
    assert [t["answered_since"] for t in trouble.read()] == [False]
    trouble.ended(trouble.began("put", "a"), None)
    assert [t["answered_since"] for t in trouble.read()] == [True]


def test_tracked_failures_are_bounded() -> None:
    trouble = TroubleTracker(Clock())
    for n in range(MAX_FAILURES + 5):
        fails(trouble, "often")
        fails(trouble, f"other-{n}")
    assert {t["location"]: t["failures"] for t in trouble.read()}["often"] == MAX_FAILURES
    for n in range(MAX_TRACKED_LOCATIONS + 5):
        fails(trouble, f"{n}")
    assert len(trouble.read()) == MAX_TRACKED_LOCATIONS


def test_a_request_that_fails_is_reported_with_its_error(tmp_path: Path) -> None:
    counts = RequestCounts()
    storage = CheckpointStorage.open(str(tmp_path / "ck"), requests=counts)
    storage.put_new("a/b", b"x")
    assert not storage.exists("a/nothing") and counts.trouble.read() == []  # an answer like any other
    with pytest.raises(StorageError):
        storage.put_new("a/b/c", b"x")  # below a file
    (told,) = counts.trouble.read()
    assert told["location"] == storage.location and told["failures"] == 1 and told["error"].startswith("put: ")
    assert told["waiting"] == 0


def test_a_long_word_takes_no_long_time() -> None:
    """An error may have a value of its user in it; a search for addresses must not stop the process at it."""
    took: list[float] = []
    for text in ("ab" * 100_000, "x://" * 20_000):
        begun = time.process_time()
        assert len(for_people(text, 300)) <= 300
        took.append(time.process_time() - begun)
    assert max(took) < 5, took
