"""A background loop survives every error, backs off, and tells the process's report since when it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from backends.background_loop import BackgroundLoop, FailingLoop, failing_loops
from tests.patience import PATIENCE


class Work:
    """Raises each error once, in order; ``done`` is released by each call that succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.done = threading.Semaphore(0)

    def __call__(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.done.release()


@pytest.fixture
def made() -> Iterator[list[BackgroundLoop]]:
    loops: list[BackgroundLoop] = []
    yield loops
    for loop in loops:
        loop.close(timeout=PATIENCE)


def failing() -> tuple[FailingLoop, ...]:
    return tuple(loop for loop in failing_loops.now() if loop.what == "do the test")


def loop_of(work: Work, made: list[BackgroundLoop], seconds: float = 0.001) -> BackgroundLoop:
    made.append(BackgroundLoop(work, seconds, name="test", what="do the test", remedy="Look.", most_seconds=0.004))
    return made[-1]


def test_no_error_ends_the_loop(made: list[BackgroundLoop]) -> None:
    work = Work(KeyError("a"), RuntimeError("b"), MemoryError("c"), RecursionError("d"), AssertionError("e"))
    loop_of(work, made).start()
    for _ in range(2):
        assert work.done.acquire(timeout=PATIENCE)


def test_a_failure_is_known_until_it_succeeds(made: list[BackgroundLoop]) -> None:
    loop = loop_of(Work(OSError("the disk is gone"), ValueError("x" * 10_000)), made)
    loop.run_once()
    (first,) = failing()
    assert (first.what, first.failures, first.error) == ("do the test", 1, "OSError: the disk is gone")
    assert first.remedy == "Look."
    loop.run_once()
    (second,) = failing()
    assert (second.failures, second.since) == (2, first.since) and len(second.error) <= 500
    loop.run_once()
    assert failing() == ()


def test_the_pause_doubles_up_to_a_bound_and_is_the_interval_again(made: list[BackgroundLoop]) -> None:
    loop = loop_of(Work(*(OSError() for _ in range(4))), made)
    pauses = [loop._pause()]
    for _ in range(5):
        loop.run_once()
        pauses.append(loop._pause())
    assert pauses == [0.001, 0.002, 0.004, 0.004, 0.004, 0.001]


def test_a_loop_that_is_woken_does_not_wait(made: list[BackgroundLoop]) -> None:
    work = Work()
    loop = loop_of(work, made, seconds=1e6)
    loop.start()
    loop.wake()
    assert work.done.acquire(timeout=PATIENCE)


@pytest.mark.parametrize("ends", ["closed", "ending"])
def test_failures_during_a_shutdown_are_not_reported(ends: str, caplog: pytest.LogCaptureFixture) -> None:
    is_ending = False

    def work() -> None:
        nonlocal is_ending
        if ends == "closed":
            loop.close()
        else:
            is_ending = True
        raise OSError("the gateway is closed")

    loop = BackgroundLoop(work, 1.0, name="test", what="do the test", is_ending=lambda: is_ending)
    with caplog.at_level(logging.INFO):
        loop.run_once()
    assert not caplog.records and failing() == ()
