"""The effect of one refused request on all others of its bucket."""

from __future__ import annotations

import pytest

from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.requests import (
    FREE_AT,
    GROWTH,
    LONGEST_WAIT_SECONDS,
    MIN_RATE,
    AdaptiveRateLimit,
    BucketTraffic,
)
from tests.backends.storage.s3_faults import Fault, FaultProxy, S3Server


class Clock:
    """A clock that only sleeping moves, and that does so at once."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> AdaptiveRateLimit:
    return AdaptiveRateLimit("s3://bucket", clock, lambda: 0.5)


def send(pace: AdaptiveRateLimit, clock: Clock, per_second: float, seconds: float = 3.0) -> None:
    """Send evenly for a while, as one thread would that waits for its turns."""
    for _ in range(int(per_second * seconds)):
        assert pace.wait_seconds() == 0.0
        clock.now += 1 / per_second


def sent_in_a_second(pace: AdaptiveRateLimit, clock: Clock) -> int:
    end, sent = clock.now + 1, 0
    while True:
        clock.now += pace.wait_seconds()
        if clock.now >= end:
            return sent
        sent += 1


def test_no_request_waits_before_the_service_refuses(pace: AdaptiveRateLimit, clock: Clock) -> None:
    send(pace, clock, 10_000, 0.5)
    assert not pace.is_slowed


def test_after_a_refusal_all_wait_and_continue_at_half_the_rate(pace: AdaptiveRateLimit, clock: Clock) -> None:
    send(pace, clock, 200)
    pace.refused(0.4)
    assert pace.is_slowed and pace.wait_seconds() == pytest.approx(0.4)
    clock.now += 0.4
    assert 98 <= sent_in_a_second(pace, clock) <= 100 * GROWTH


def test_the_rate_comes_back(pace: AdaptiveRateLimit, clock: Clock) -> None:
    send(pace, clock, 200)
    pace.refused(0.0)
    counts = [sent_in_a_second(pace, clock) for _ in range(6)]
    assert counts == sorted(counts) and counts[-1] > 300 and pace.is_slowed
    seconds = 0
    while pace.is_slowed:
        clock.now += 1
        seconds += 1
    assert seconds <= 2 and 100 * GROWTH**8 > FREE_AT * 200
    send(pace, clock, 10_000, 0.5)


def test_requests_that_are_refused_together_lower_the_rate_once_and_a_later_one_again(
    pace: AdaptiveRateLimit, clock: Clock
) -> None:
    send(pace, clock, 200)
    for _ in range(20):
        pace.refused(0.1)
    clock.now += 0.1
    assert sent_in_a_second(pace, clock) >= 98
    pace.refused(0.1)
    clock.now += 0.1
    assert sent_in_a_second(pace, clock) <= 100 * GROWTH**2 / 2


def test_the_rate_never_goes_to_nothing_and_no_wait_is_longer_than_the_longest(
    pace: AdaptiveRateLimit, clock: Clock
) -> None:
    send(pace, clock, 200)
    for _ in range(50):
        pace.refused(0.1)
        clock.now += 0.1
    assert sent_in_a_second(pace, clock) >= MIN_RATE - 1
    pace.refused(0.1)
    waits = [pace.wait_seconds() for _ in range(1000)]
    assert waits[0] >= 0.1 and max(waits) <= LONGEST_WAIT_SECONDS < sum(waits)


def test_one_throttled_request_holds_back_the_others_of_its_bucket_alone(
    servers: tuple[S3Server, FaultProxy], clock: Clock
) -> None:
    server, proxy = servers
    buckets = BucketTraffic(clock)
    options = {"fs.s3a.endpoint": proxy.endpoint, "fs.s3a.path.style.access": "true"}
    options |= {"fs.s3a.access.key": "any", "fs.s3a.secret.key": "any"}

    def opened(location: str) -> CheckpointStorage:
        return CheckpointStorage.open(location, options, clock=clock, sleep=clock.sleep, buckets=buckets)

    server.make_bucket("paced")
    server.make_bucket("quiet")
    one, neighbour, other = opened("s3://paced/one"), opened("s3://paced/two"), opened("s3://quiet/one")
    proxy.plan = [Fault("answer", "PUT", "/paced/one", status=503)]
    proxy.seen = []
    one.put_new("x", b"1")
    (wait,) = clock.waits
    assert 0.05 <= wait <= 0.1
    other.put_new("x", b"1")
    assert clock.waits == [wait]
    for i in range(3):
        neighbour.put_new(f"x{i}", b"1")
    assert len(clock.waits) == 4 and max(clock.waits[1:]) <= 1.5 / MIN_RATE
    clock.now += 30
    neighbour.put_new("later", b"1")
    assert len(clock.waits) == 4
    # An error other than a refusal concerns only its request.
    proxy.plan = [Fault("answer", "PUT", "/paced/one", status=500)]
    one.put_new("y", b"1")
    neighbour.put_new("y", b"1")
    assert len(clock.waits) == 5
