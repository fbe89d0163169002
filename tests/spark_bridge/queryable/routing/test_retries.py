"""Which failures are retried, for how long, and the final error."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from coordinator_actor.exceptions import (
    QueryBusyError,
    RetiredRunError,
    StaleOwnerError,
    UnknownHostError,
    UnknownRunError,
)
from spark_bridge.exceptions import (
    AccessDeniedError,
    ConnectionClosedError,
    HostUnavailableError,
    NotOwnerError,
    QueryEndedError,
    QueryTimeoutError,
    RequestError,
    SparkBridgeError,
    StateVersionError,
    TooManyRequestsError,
    UnknownOperatorError,
    WrongOperatorError,
    rebuilt_error,
)
from spark_bridge.queryable.routing.scatter_gather import LONGEST_RETRY_DELAY, Attempts, retrying, should_locate

HELPED = (
    NotOwnerError,
    RetiredRunError,
    UnknownRunError,
    StaleOwnerError,
    UnknownHostError,
    ConnectionClosedError,
    HostUnavailableError,
    ConnectionResetError,
)
BUSY = (QueryBusyError, TooManyRequestsError)
FINAL = (AccessDeniedError, RequestError, StateVersionError, ValueError, QueryTimeoutError, WrongOperatorError)


class Time:
    """A clock that advances only during a sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def attempts(clock: Time, seconds: float = 10.0, **changes: Any) -> Attempts:
    return Attempts("get('op', 42)", clock() + seconds, clock=clock, rng=lambda: 1.0, **changes)


@pytest.mark.parametrize("kind", [*HELPED, *BUSY])
def test_transient_errors_are_retried(kind: type[Exception]) -> None:
    clock, relocated = Time(), []
    failures = [kind("no"), kind("no"), kind("no")]

    def call() -> str:
        if failures:
            raise failures.pop()
        return "answer"

    assert retrying(call, attempts(clock), relocate=relocated.append, sleep=clock.sleep) == "answer"
    assert len(relocated) == (0 if kind in BUSY else 3), "who is busy has not moved"
    assert should_locate(kind("no")) == (kind not in BUSY)
    assert clock.slept == [0.02, 0.04, 0.08]


@pytest.mark.parametrize("kind", FINAL)
def test_permanent_errors_are_raised_at_once(kind: type[Exception]) -> None:
    clock = Time()

    def call() -> None:
        raise kind("no")

    with pytest.raises(kind, match="no"):
        retrying(call, attempts(clock), sleep=clock.sleep)
    assert not clock.slept
    assert not should_locate(kind("no"))


@pytest.mark.parametrize("kind", [QueryEndedError, UnknownOperatorError])
def test_ended_query_is_awaited_by_clients_with_earlier_answers(kind: type[Exception]) -> None:
    clock = Time()

    def call() -> None:
        raise kind("over")

    with pytest.raises(kind, match="over"):
        retrying(call, attempts(clock), sleep=clock.sleep)
    assert not clock.slept
    with pytest.raises(kind, match="over"):
        retrying(call, attempts(clock, had_answer=True), sleep=clock.sleep)
    assert sum(clock.slept) > 9, "it may come back until the deadline"


def test_final_error_has_the_request_duration_and_last_failure() -> None:
    clock = Time()

    def call() -> None:
        raise HostUnavailableError("10.0.0.1:7 does not answer")

    with pytest.raises(QueryTimeoutError) as raised:
        retrying(call, attempts(clock, 3.0), sleep=clock.sleep)
    assert str(raised.value).startswith("get('op', 42) was not answered within 3.0 s, in ")
    assert "last failure: HostUnavailableError: 10.0.0.1:7 does not answer" in str(raised.value)
    assert isinstance(raised.value.__cause__, HostUnavailableError)
    assert clock.now <= 103.0
    assert max(clock.slept) == LONGEST_RETRY_DELAY
    assert all(a <= b for a, b in pairwise(clock.slept))


def test_a_first_attempt_of_the_callers_counts() -> None:
    clock = Time()
    begun = clock()
    clock.sleep(2.0)
    asked = Attempts("get", begun + 3.0, begun=begun, clock=clock, rng=lambda: 1.0)
    busy = TooManyRequestsError("busy")
    assert retrying(lambda: "answer", asked, sleep=clock.sleep, failure=busy) == "answer"
    assert clock.slept == [2.0, 0.02]
    asked = Attempts("get", begun + 2.0, begun=begun, clock=clock, rng=lambda: 1.0)
    with pytest.raises(QueryTimeoutError, match=r"within 2\.0 s.*TooManyRequestsError: busy"):
        retrying(lambda: "answer", asked, sleep=clock.sleep, failure=busy)
    with pytest.raises(AccessDeniedError):
        retrying(lambda: "answer", attempts(clock), sleep=clock.sleep, failure=AccessDeniedError("no"))


def test_delays_are_random_by_half() -> None:
    clock = Time()
    few = Attempts("x", clock() + 9, clock=clock, rng=lambda: 0.0)
    assert few.delay(NotOwnerError("no")) == 0.01
    assert len({Attempts("x", clock() + 9, clock=clock).delay(NotOwnerError("no")) for _ in range(20)}) > 10


def test_errors_keep_their_class_across_the_network() -> None:
    for kind in (NotOwnerError, RetiredRunError, StateVersionError):
        rebuilt = rebuilt_error(kind.__name__, "it says this")
        assert (type(rebuilt), str(rebuilt)) == (kind, "it says this")
    ended = rebuilt_error("QueryEndedError", "over")
    assert type(ended) is QueryEndedError, "our class, wherever it was raised"
    for name in ("KeyError", "os", "rebuilt_error", "__builtins__", "annotations"):
        unknown = rebuilt_error(name, "m")
        assert (type(unknown), str(unknown)) == (SparkBridgeError, f"{name}: m")
